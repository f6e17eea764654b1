"""The verdict on an adapter's folder: what it is, what is wrong with it, in one paragraph.

    verdict = judge_folder(Path("out/adapter"), model=Path("models/Qwen3-0.6B"))
    verdict.is_sound, verdict.paragraph()

Does not own: the findings (`adapter_files.values`, `.whole`, `.on_model`), printing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from meshlora_judge.adapter_files.differences import differences_from, trained_name
from meshlora_judge.adapter_files.finding import Finding
from meshlora_judge.adapter_files.on_model import names_on_model, of_model
from meshlora_judge.adapter_files.reading import Adapter, open_adapter
from meshlora_judge.adapter_files.values import Values, of_values, read_values
from meshlora_judge.adapter_files.whole import (
    is_of_experts,
    of_config,
    of_fields,
    of_layers,
    of_names,
    of_pairs,
    of_scale,
    ranks_of,
    scale_of,
)
from meshlora_judge.recording.files import read_recordings
from meshlora_judge.steps.ranks import wholes

_MOST_NOTES = 4


@dataclass
class Verdict:
    """What is known of a folder. description: what it holds. config: PEFT's. wrong: why it cannot be what was
    trained."""

    folder: Path
    description: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    wrong: list[Finding] = field(default_factory=list)
    notes: list[Finding] = field(default_factory=list)

    @property
    def is_sound(self) -> bool:
        return not self.wrong

    def words(self) -> str:
        """What is wrong, or what it is, without the folder."""
        said = [f"sound: {self.description}."]
        if self.wrong:
            numbered = (f"({number}) {finding}." for number, finding in enumerate(self.wrong, 1))
            said = ["cannot be what was trained.", *numbered, f"It is {self.description}."]
        return " ".join([*said, *(f"Note: {note}." for note in self.notes[:_MOST_NOTES])])

    def paragraph(self) -> str:
        """All of it in one paragraph."""
        return f"{self.folder}: {self.words()}"

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        return {
            "folder": f"{self.folder}",
            "is_sound": self.is_sound,
            "description": self.description,
            "findings": [finding.as_json() for finding in self.wrong],
            "notes": [finding.as_json() for finding in self.notes],
        }


def _beside_run(adapter: Adapter, run: Path) -> list[Finding]:
    """What the file holds beside what the recorded ranks had after their last step."""
    recordings = read_recordings(run)
    ranks = [recording.steps[-1].after for recording in recordings]
    first = recordings[0].steps
    steps = {0: first[0].before} | {number: step.after for number, step in enumerate(first[:-1], 1)}
    names, notes = set[str]().union(*ranks), list[Finding]()
    if not {trained_name(name) for name in names} <= {part.name for part in adapter.names.parts}:
        # In the file a tensor has the name from which PEFT finds it, which of some families is another one.
        loaded, notes = names_on_model(adapter, recordings[0].config)
        adapter = replace(adapter, names=loaded)
    values = {}
    for name in names:
        parts = [own.get(name) for own in ranks]
        shape = _whole_shape(adapter, name, parts[0])
        if shape is None:
            continue
        copies = wholes(parts, shape)
        # Ranks whose parts make no whole are a finding on the recording itself (`steps.judge`), not on the file.
        if copies is not None and copies[0] is not None:
            values[name] = copies[0]
    return notes + differences_from(adapter, values, ranks=ranks, steps=steps)


def _whole_shape(adapter: Adapter, name: str, part: Tensor | None) -> Sequence[int] | None:
    """That of the file, if ranks had parts of it; else what every rank had."""
    if part is None:
        return None
    wanted = trained_name(name)
    for each in adapter.names.parts:
        if each.name != wanted:
            continue
        stored = adapter.read(each.key).shape
        # A file that holds less than a rank had is the one that is wrong: its shape says nothing then.
        if stored.numel() > part.numel():
            return stored
        break
    return part.shape


def judge_folder(folder: Path, *, model: Path | None = None, run: Path | None = None) -> Verdict:
    """Look at every tensor of the adapter in `folder`. model: its base, a folder, for what only that tells. run: a
    recording of the training whose last step it was saved after, for whether it holds what was trained.

    Raises:
        UserError: it is no adapter, or its files cannot be read.
    """
    with open_adapter(folder) as adapter:
        values = read_values(adapter)
        shapes = {key: value.shape for key, value in values.items()}
        findings = of_names(adapter) + of_values(adapter, values)
        if adapter.config:
            findings += of_fields(adapter.config)
        if adapter.is_lora:
            findings += of_config(adapter) + of_pairs(adapter, shapes) + of_scale(adapter) + of_layers(adapter)
        if model is not None and adapter.names.is_peft and adapter.config:
            findings = _joined(findings, of_model(adapter, shapes, model))
        if run is not None:
            findings += _beside_run(adapter, run)
        verdict = Verdict(folder, _described(adapter, values, has_model=model is not None), adapter.config)
    for finding in findings:
        if finding.is_note:
            verdict.notes.append(finding)
        else:
            verdict.wrong.append(finding)
    return verdict


def _joined(by_name: list[Finding], by_model: list[Finding]) -> list[Finding]:
    """Both, where PEFT on the model decides what is missing and dropped, and the names only say why."""
    dropped, is_loaded = set[str](), True
    for finding in by_model:
        if finding.kind == "dropped":
            dropped.update(finding.names)
        if not finding.names:
            is_loaded = False  # PEFT failed, and has decided nothing
    kept, explained = [], set[str]()
    for finding in by_name:
        if is_loaded and finding.kind == "incomplete" and finding.is_note:
            continue
        if is_loaded and finding.kind == "dropped":
            names = tuple(name for name in finding.names if name in dropped)
            explained.update(names)
            finding = replace(finding, names=names)
            if not names:
                continue
        kept.append(finding)
    for finding in by_model:
        if finding.kind == "dropped" and finding.names:
            finding = replace(finding, names=tuple(name for name in finding.names if name not in explained))
            if not finding.names:
                continue
        kept.append(finding)
    return kept


def _described(adapter: Adapter, values: dict[str, Values], *, has_model: bool) -> str:
    """`an adapter in the layout of PEFT, 14 modules, rank 8, scale 2, float32`."""
    modules = adapter.names.by_module()
    words = [f"an adapter in the layout of {adapter.names.layout}"]
    if not adapter.is_lora:
        words.append(f"of type {adapter.config['peft_type']:.40}")
    words.append(f"{len(modules):,} modules, {len(values):,} tensors")
    ranks, scales = set[int](), set[float]()
    for module, sides in modules.items():
        scale = scale_of(adapter.config, module)
        if scale is not None:
            scales.add(scale)
        part = sides.get("A") or sides.get("embedding_A")
        if is_of_experts(adapter.config, module):
            ranks.update(ranks_of(adapter.config, module)[:1])  # A has the ranks of all experts
        elif part is not None and values[part.key].shape:
            ranks.add(values[part.key].shape[0])
    if ranks:
        words.append(f"rank {_listed(sorted(ranks))}")
    rule = "lora_alpha / r"
    if adapter.config.get("use_rslora"):
        rule = "lora_alpha / sqrt(r), as use_rslora says"
    if scales:
        words.append(f"scale {_listed(sorted(scales))} = {rule}")
    elif adapter.is_lora:
        words.append("scale not recorded")
    kinds = sorted({f"{value.dtype}".removeprefix("torch.") for value in values.values()})
    words.append(" and ".join(kinds[:4]))
    if not adapter.names.is_peft:
        words.append("which PEFT does not read as it is")
    elif not has_model:
        words.append("judged without its base (--model)")
    return ", ".join(words)


def _listed(numbers: list[Any]) -> str:
    shown = ", ".join(f"{number:g}" for number in numbers[:4])
    return f"{shown} and {len(numbers) - 4} more" if len(numbers) > 4 else shown

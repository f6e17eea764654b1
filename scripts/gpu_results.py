"""Results of `scripts/prove_on_gpu.py`: the file, its page, and what other pages and the planner say of it.

Owns: the form of `benchmarks/results/gpu_<card>_<yyyymm>.json`, merging a second run into it, tables, what is asked of
a card. Does not own: what is run, and how (`prove_on_gpu.py`).
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import table
from meshlora_ground.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- written by scripts/prove_on_gpu.py --write-docs -->\n\n", "\n\n<!-- end -->"
RECORDED, RECORDED_FLOAT8 = "meshlora + fused, recorded", "meshlora + fused, fp8, recorded"
FLOAT8, LIGER = "meshlora + liger, fp8", "PEFT + liger-kernel"
# (part, what it is, ours, a peer), the order of the page; README has those with a star.
COMPARISONS = (
    ("8b", "Llama 8B, against PEFT + SDPA*", "meshlora", "PEFT + SDPA"),
    ("8b", "Llama 8B, kernels of liger-kernel on both sides*", "meshlora + liger", LIGER),
    ("8b-fp8", "Llama 8B, products in float8, liger-kernel on both sides*", FLOAT8, LIGER),
    (
        "8b-fp8",
        "Llama 8B, those of the backward in float8, liger-kernel on both sides",
        "meshlora + liger, fp8_backward",
        LIGER,
    ),
    ("8b", "Llama 8B, fused kernels as CUDA graphs, against PEFT + liger-kernel*", RECORDED, LIGER),
    ("8b-fp8", "Llama 8B, fused kernels as CUDA graphs, products in float8*", RECORDED_FLOAT8, LIGER),
    (
        "8b-8k",
        "Llama 8B, 8,192 tokens a row, fused kernels as CUDA graphs, against PEFT + liger-kernel",
        RECORDED,
        LIGER,
    ),
    ("8b-8k", "Llama 8B, 8,192 tokens a row, the same with products in float8", RECORDED_FLOAT8, LIGER),
    ("1b", "Llama 1B, 4 rows, against PEFT + SDPA", "meshlora", "PEFT + SDPA"),
    ("1b", "Llama 1B, 4 rows, kernels of liger-kernel on both sides", "meshlora + liger", LIGER),
    ("1b", "Llama 1B, 4 rows, fused kernels as CUDA graphs, against PEFT + liger-kernel", RECORDED, LIGER),
    ("moe", "Qwen3-MoE, 12 layers of 128 experts, against PEFT + SDPA*", "meshlora", "PEFT + SDPA"),
    ("moe", "Qwen3-MoE, fused kernels as CUDA graphs, against PEFT + SDPA*", RECORDED, "PEFT + SDPA"),
    ("32k", "Llama 8B, a row of 32,768, all recomputed, liger-kernel", "meshlora + liger", LIGER),
    (
        "32k",
        "Llama 8B, a row of 32,768, attention kept, liger-kernel",
        "meshlora + liger, keep_attention",
        LIGER,
    ),
    (
        "32k",
        "Llama 8B, a row of 32,768, inputs of layers on the host, liger-kernel",
        "meshlora + liger, offload",
        LIGER,
    ),
    ("quantized", "8 layers of Llama 8B in nf4, against PEFT QLoRA", "meshlora, nf4", "PEFT QLoRA, nf4"),
    ("quantized", "8 layers of Llama 8B in fp8, against PEFT + SDPA in bf16", "meshlora, fp8", "PEFT + SDPA"),
    ("quantized", "8 layers of Llama 8B in mxfp4, against PEFT + SDPA in bf16", "meshlora, mxfp4", "PEFT + SDPA"),
)


@dataclass(frozen=True)
class Bound:
    """What is asked of the best of `ours` in the best of `parts`.

    Attributes:
        row: of a benchmark, after its shape. peer: what `asked` is a ratio to; None: it is of the value itself.
        is_most: at most `asked`, not at least. card: of which alone it is asked.
    """

    what: str
    parts: tuple[str, ...]
    asked: float
    ours: tuple[str, ...]
    row: str = "one sequence"
    peer: str | None = LIGER
    is_most: bool = False
    card: str = ""


_BF16 = (RECORDED, "meshlora + fused", "meshlora + liger", "meshlora")
_FP8 = (RECORDED_FLOAT8, FLOAT8)
_BUSY: dict[str, Any] = {"row": "one sequence, a step", "peer": "GPU busy", "is_most": True}
_PEAK: dict[str, Any] = {"row": "one sequence, peak memory", "peer": None, "is_most": True, "card": "H200"}
BOUNDS = (
    Bound("8B in bf16, of PEFT + liger-kernel", ("8b", "8b-8k"), 1.35, _BF16),
    Bound("8B with products in float8, of PEFT + liger-kernel", ("8b-fp8", "8b-8k"), 1.6, _FP8),
    Bound("8B with products in float8, tokens/s", ("8b-fp8", "8b-8k"), 19_000, _FP8, peer=None, card="H100"),
    Bound("8B with products in float8, tokens/s", ("8b-fp8", "8b-8k"), 20_500, _FP8, peer=None, card="H200"),
    Bound("8B, packed rows, of PEFT + liger-kernel", ("8b", "8b-8k"), 1.6, _BF16, "packed"),
    Bound("1B, of PEFT + liger-kernel", ("1b",), 1.3, _BF16),
    Bound("1B, packed rows, of PEFT + liger-kernel", ("1b",), 1.7, _BF16, "packed"),
    Bound("the mixture, of PEFT + SDPA", ("moe",), 1.8, _BF16, peer="PEFT + SDPA"),
    Bound(
        "a row of 32,768, of PEFT + liger-kernel",
        ("32k",),
        1.2,
        ("meshlora + liger", "meshlora + liger, keep_attention", "meshlora + liger, offload"),
    ),
    Bound("a step of 8B, of the GPU's busy time", ("8b",), 1.06, (RECORDED,), **_BUSY),
    Bound("a step of 8B in float8, of the GPU's busy time", ("8b-fp8",), 1.06, (RECORDED_FLOAT8,), **_BUSY),
    Bound("a step of 1B, of the GPU's busy time", ("1b",), 1.06, (RECORDED,), **_BUSY),
    Bound("a step of the mixture, of the GPU's busy time", ("moe",), 1.06, (RECORDED,), **_BUSY),
    # What the best of ours took in November 2026, before there were records, which have memory of their own.
    Bound("peak memory of 8B, GiB", ("8b",), 29.5, (RECORDED,), **_PEAK),
    Bound("peak memory of 1B, GiB", ("1b",), 17.7, (RECORDED,), **_PEAK),
    Bound("peak memory of the mixture, GiB", ("moe",), 21.0, (RECORDED,), **_PEAK),
)
OF_BOUNDS = frozenset(part for bound in BOUNDS for part in bound.parts)
Status = Literal["ok", "failed", "timed out", "not run"]


@dataclass(frozen=True)
class Line:
    """What came of one step of a part.

    Attributes:
        found: in words, a line for each thing. data: the same as plain values. is_fault: whether the command has failed
            with it; a step that a dry run leaves out is none.
    """

    part: str
    step: str
    status: Status
    seconds: float
    found: str
    data: Mapping[str, Any] = field(default_factory=dict)
    is_fault: bool = False


class Results:
    """The file of a campaign: rewritten after each step, so that one that is killed leaves what it had."""

    def __init__(self, path: Path, *, card: str, command: str, versions: Mapping[str, str]) -> None:
        """Go on from `path` if it is there: steps that run again are replaced, the others stay.

        Raises:
            UserError: what is there is of another card or of other versions, or no campaign's.
        """
        self.path, self.versions = path, dict(versions)
        self.document: dict[str, Any] = {"card": card, "versions": self.versions, "parts": {}}
        if path.is_file():
            self.document = read_results(path)
            for name, own in (("card", card), ("versions", self.versions)):
                if self.document[name] != own:
                    raise UserError(
                        f"{path}: its {name} are {_words(self.document[name])}",
                        f"this run's are {_words(own)}, and numbers of one file belong together",
                        "give another --out, or remove the file",
                    )
        self.command = command

    def add(self, line: Line) -> None:
        """Keep `line`, and write all."""
        steps = self.document["parts"].setdefault(line.part, {})
        begun = {"date": time.strftime("%Y-%m-%d"), "command": self.command}
        steps[line.step] = begun | {name: value for name, value in dataclasses.asdict(line).items() if name != "step"}
        self.document["measured"] = measured(self.document)
        table.write(self.path, json.dumps(self.document, indent=1) + "\n")
        table.write(self.path.with_suffix(".md"), page(self.document))


def read_results(path: Path) -> dict[str, Any]:
    """The document in `path`.

    Raises:
        UserError: it is no campaign's.
    """
    if not path.is_file():
        raise UserError(f"{path}", "there is no such file", "scripts/prove_on_gpu.py writes it on a GPU")
    try:
        document = json.loads(path.read_text("utf-8"))
    except json.JSONDecodeError as error:
        raise UserError(f"{path}", f"it is no JSON ({error})", "remove it") from None
    if not isinstance(document, dict) or not {"card", "versions", "parts"} <= document.keys():
        raise UserError(f"{path}", "it has no results of scripts/prove_on_gpu.py", "give another file")
    return document


def file_of(folder: Path, card: str) -> Path:
    """`gpu_<card>_<yyyymm>.json`."""
    return folder / f"gpu_{re.sub(r'[^a-z0-9]+', '-', card.lower()).strip('-')}_{time.strftime('%Y%m')}.json"


def lines_of(document: Mapping[str, Any]) -> list[Line]:
    """Of all parts, in their order."""
    names = {field.name for field in dataclasses.fields(Line)}
    return [
        Line(step=step, **{name: value for name, value in found.items() if name in names})
        for steps in document["parts"].values()
        for step, found in steps.items()
    ]


# --- what was measured ----------------------------------------------------------------------------------------------


def measured(document: Mapping[str, Any]) -> dict[str, float]:
    """The most that the card did: FLOP/s of products in bf16, bytes/s of copies (read and written), s a launch."""
    found = [line.data["details"] for line in lines_of(document) if "details" in line.data]
    best = {"bf16_flops": max, "copy_bytes_s": max, "launch_s": min}
    return {name: choose(each[name] for each in found) for name, choose in best.items()} if found else {}


def peaks(document: Mapping[str, Any]) -> str:
    """What the best product and copy reached of the card's datasheet, beside the efficiencies that the planner has.

    These are lower, and no peak is to replace them: they are those of all products of a step, and of all between them,
    by which `benchmarks/step_kernels.py --beside` finds the time that the GPU was busy.
    """
    from meshlora_extra.planner.hardware import card_of  # takes seconds, and imports what a campaign is to run apart

    seen, gpu = document.get("measured"), card_of(document["card"])
    if not seen or gpu is None:
        return "no peaks beside the planner's numbers: nothing was measured, or its table has no such card"
    found = {
        "products": (seen["bf16_flops"] / (gpu.half_tflops * 1e12), gpu.matmul_efficiency),
        "copies": (seen["copy_bytes_s"] / (gpu.memory_gb_s * 1e9), gpu.memory_efficiency),
    }
    said = [f"{name} {peak:.3f} at best, {own:g} in the planner's steps" for name, (peak, own) in found.items()]
    return f"of {gpu.name}'s datasheet: {'; '.join(said)} (benchmarks/step_kernels.py --beside)"


def rows_of(document: Mapping[str, Any], part: str) -> list[table.Row]:
    """Rows of the benchmark of a part; empty if it did not run."""
    found = [line.data for line in lines_of(document) if line.part == part and "rows" in line.data]
    return [row for data in found for row in table.rows_of(data)]


# --- what is asked --------------------------------------------------------------------------------------------------


def answers(document: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    """(what, asked, found, yes or no) of each bound of this card; no too where it was not measured, with the reason."""
    return [_answer(document, bound) for bound in BOUNDS if bound.card in document["card"]]


def _answer(document: Mapping[str, Any], bound: Bound) -> tuple[str, str, str, str]:
    asked = f"{'≤' if bound.is_most else '≥'} {bound.asked:,g}"
    found = dict[str, float]()  # words -> value
    for part in bound.parts:
        for row in rows_of(document, part):
            is_there = row.ours_name in bound.ours and bound.peer in (None, row.peer_name)
            if is_there and row.what.partition(", ")[2] == bound.row:
                value = row.ours if bound.peer is None else row.ratio
                found[f"{table.number(value)}, {row.ours_name}, {part}"] = value
    if not found:
        inputs = bound.row.partition(",")[0]
        named = tuple(f"{name}{on} is left out" for name in (*bound.ours, bound.peer) for on in ("", f", {inputs}"))
        lines = [line for line in lines_of(document) if line.part in bound.parts]
        # A step that has failed or found no time says so in all of its words.
        why = [text for line in lines for text in line.found.splitlines() if text.startswith(named) or not line.data]
        return bound.what, asked, "; ".join(["not measured", *why])[:300], "no"
    best = (min if bound.is_most else max)(found, key=lambda words: found[words])
    is_met = found[best] <= bound.asked if bound.is_most else found[best] >= bound.asked
    return bound.what, asked, best, "yes" if is_met else "no"


# --- pages ----------------------------------------------------------------------------------------------------------


def page(document: Mapping[str, Any]) -> str:
    """The results as Markdown: the table of all steps, then each benchmark's own."""
    lines = [f"# meshlora on one {document['card']}", "", f"Versions: {_words(document['versions'])}.", ""]
    for name, steps in document["parts"].items():
        runs = dict.fromkeys(f"`{step['command']}`, {step['date']}" for step in steps.values())
        lines.append(f"- {name}: {'; '.join(runs)}")
    if seen := document.get("measured"):
        shown = (seen["bf16_flops"] / 1e12, seen["copy_bytes_s"] / 1e12, seen["launch_s"] * 1e6)
        lines += ["", "Most: {:.0f} TFLOP/s in bf16, {:.2f} TB/s copied, {:.1f} µs a launch.".format(*shown)]
    if document["parts"].keys() & OF_BOUNDS:
        lines += ["", "| asked of the card | bound | found | met |", "|---|---|---|---|"]
        lines += [f"| {' | '.join(map(_one_cell, answer))} |" for answer in answers(document)]
    lines += ["", "| part | step | result | seconds | found |", "|---|---|---|---|---|"]
    for line in lines_of(document):
        found = "<br>".join(_one_cell(text) for text in line.found.splitlines())
        lines.append(f"| {line.part} | {line.step} | {line.status} | {line.seconds:.0f} | {found} |")
    for line in lines_of(document):
        if "page" in line.data:
            lines += ["", line.data["page"].strip()]
    return "\n".join(lines) + "\n"


def write_docs(path: Path, *, root: Path = ROOT) -> list[Path]:
    """Write the sections of the GPU in docs/performance.md and README.md from the results in `path`; the files.

    Raises:
        UserError: `path` has no results, or no speeds; a page has no place for them.
    """
    document = read_results(path)
    if not any(rows_of(document, part) for part, *_ in COMPARISONS):
        raise UserError(f"{path}", "it has no speeds", "run the parts 8b, 1b and moe")
    sections = {"docs/performance.md": performance(document, path), "README.md": readme(document)}
    written = []
    for name, section in sections.items():
        before, begin, rest = (root / name).read_text("utf-8").partition(BEGIN)
        _, end, after = rest.partition(END)
        if not end:
            raise UserError(name, "it has no place for results of a GPU", f"put {BEGIN.strip()}, {END.strip()} there")
        (root / name).write_text(f"{before}{begin}{section}{end}{after}", "utf-8")
        written.append(root / name)
    return written


def performance(document: Mapping[str, Any], path: Path) -> str:
    """The section of docs/performance.md."""
    parts = ",".join(dict.fromkeys(part for part, *_ in COMPARISONS if part in document["parts"]))
    intro = (
        f"One {document['card']}, bfloat16 base, r=16, 4,096 tokens a row, in the same run as the peer "
        f"(`scripts/prove_on_gpu.py --parts {parts}`; [all numbers](../benchmarks/results/{path.stem}.md)):"
    )
    lines = [intro, "", "| | speed, one sequence a row | packed rows | peak memory |", "|---|---|---|---|"]
    missing = []
    for part, what, ours, peer in COMPARISONS:
        rows = _by_what(document, part, ours, peer)
        speed, packed, memory = (rows.get(name) for name in ("one sequence", "packed", "one sequence, peak memory"))
        if speed is None:
            missing.append(what.rstrip("*"))
            continue
        cells = [f"{_times(speed)}{_rate(speed)}{_missed(speed)}", _times(packed), f"{_times(memory)}{_rate(memory)}"]
        lines.append(f"| {what.rstrip('*')} | {' | '.join(cells)} |")
    return "\n".join([*lines, *(["", f"Not measured on it: {'; '.join(missing)}."] if missing else [])])


def readme(document: Mapping[str, Any]) -> str:
    """The table of README.md."""
    lines = [f"| one {document['card']}, bfloat16, 4,096 tokens a row | speed | peak memory |", "|---|---|---|"]
    for part, what, ours, peer in COMPARISONS:
        rows = _by_what(document, part, ours, peer)
        speed, memory = rows.get("one sequence"), rows.get("one sequence, peak memory")
        if what.endswith("*") and speed is not None:
            cells = f"{_times(speed)}{_rate(speed)} | {_times(memory)}{_rate(memory)}"
            lines.append(f"| {what.rstrip('*')}{_missed(speed)} | {cells} |")
    return "\n".join(lines)


def _by_what(document: Mapping[str, Any], part: str, ours: str, peer: str) -> dict[str, table.Row]:
    """`one sequence`, and so on -> the row of these two."""
    rows = [row for row in rows_of(document, part) if (row.ours_name, row.peer_name) == (ours, peer)]
    return {row.what.partition(", ")[2]: row for row in rows}  # after the shape


def _times(row: table.Row | None) -> str:
    return "not measured" if row is None else f"{row.ratio:.2f}×"


def _rate(row: table.Row | None) -> str:
    return "" if row is None else f" ({table.number(row.ours)} {row.unit})"


def _missed(row: table.Row | None) -> str:
    return f", the goal of {row.target:g} is missed" if row is not None and row.is_met is False else ""


def _words(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {text}" for name, text in value.items())
    return str(value)


def _one_cell(text: str) -> str:
    return text.replace("|", "\\|")


def counts(lines: Iterable[Line]) -> str:
    """`12 ok, 1 failed`."""
    statuses: Sequence[str] = [line.status for line in lines]
    order = ("ok", "failed", "timed out", "not run")
    return ", ".join(f"{statuses.count(name)} {name}" for name in order if name in statuses)

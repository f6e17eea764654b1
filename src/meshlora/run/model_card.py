"""The model card of a finished adapter: what it was trained on and how, and how to load it.

Owns: the text of README.md. It may be published, so it names files without their folders, and has no secrets. Does not
own: the facts (`run.prepare`), the adapter's other files (`run.trained`), sending it anywhere
(`meshlora_extra.hub.push`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from meshlora.run.config.run_file import Given, paths_of
from meshlora.run.in_words import batch_in_words, rates_in_words, scale_in_words
from meshlora.run.prepared import Prepared
from meshlora_ground.errors import one_line
from meshlora_ground.tasks import CAUSAL
from meshlora_ground.versions import versions
from meshlora_ground.weight_files import repository_of

_DATASET = re.compile(r"datasets--(?P<name>[\w.-]+--[\w.-]+)/snapshots/[0-9a-f]{40}/(?P<file>.+)", re.ASCII)
# What may stand in a command and is nobody's business: tokens, places behind URLs, folders of a machine.
_TOKEN = re.compile(r"\b(?:hf_|sk-|gh[pousr]_|github_pat_)[\w-]+")
_FILE, _URL = re.compile(r"\bfile:/+", re.I), re.compile(r"(\w+://)(?:[^\s/'\"@]*@)?([^\s/'\"]+)[^\s'\"]*")
_PATH = re.compile(r"(?<![\w/.])(?:(?:~\w*|\.\.?)?/|(?:[\w.-]+/)+\.\./)(?:[^\s'\"=,/]+/)*")
_LONGEST = 2000
_LOADING = """\
```python
from peft import {auto}
from transformers import AutoTokenizer

folder = "."  # this folder, or its name on the hub
model = {auto}.from_pretrained(folder)
tokenizer = AutoTokenizer.from_pretrained(folder)
```
"""
_AUTO = {CAUSAL: "AutoPeftModelForCausalLM", "SEQ_CLS": "AutoPeftModelForSequenceClassification"}
# How `run.proof` begins where the run has no proof of its own.
NOT_PROVED = "none of this run"
_PIPELINE = {CAUSAL: "text-generation", "SEQ_CLS": "text-classification", "FEATURE_EXTRACTION": "feature-extraction"}


def public(text: str) -> str:
    """`text` without tokens, what stands behind the host of a URL, and the folders of absolute paths.

    >>> public("meshlora train /home/me/run.yaml --set model.path=~/models/tiny")
    'meshlora train run.yaml --set model.path=tiny'
    """
    text = _URL.sub(r"\1\2", _FILE.sub("/", _TOKEN.sub("…", text)))
    kept = re.split(r"(\w+://[^\s'\"]+)", text)  # a host is no folder
    return "".join(part if number % 2 else _PATH.sub("", part) for number, part in enumerate(kept))


@dataclass(frozen=True)
class Measured:
    """Metrics on generated answers, by name: of the last evaluation, and before the first step, if they are known."""

    last: Mapping[str, float]
    first: Mapping[str, float]


def model_card(
    run: Prepared, *, done: int, task: str, eval_loss: float | None, measured: Measured | None = None
) -> str:
    """README.md of the adapter that `run` has trained for `done` steps. eval_loss, measured: of its last evaluation."""
    base, commit = base_name(run.config.model.path)
    header: dict[str, Any] = {"library_name": "peft", "tags": ["lora", "meshlora"]}
    if commit:  # else it is a folder, which the hub knows nothing of
        header["base_model"] = base
    if task in _PIPELINE:
        header["pipeline_tag"] = _PIPELINE[task]
    title = f"# {run.config.train.objective.kind} adapter (LoRA) of {_cell(base).strip('`')}\n"
    rows = [f"| {name} | {value} |" for name, value in _rows(run, base, commit, done, eval_loss, measured).items()]
    table = ["| | |", "|---|---|", *rows, ""]
    words = "It is the adapter that one process would have trained; its files do not depend on the mesh.\n"
    if not run.proof or run.proof.startswith(NOT_PROVED):
        words = "That it is the adapter that one process would have trained was not proved before this run.\n"
    parts = ["---", yaml.safe_dump(header, sort_keys=True) + "---", "", title, words, *table]
    if run.command:
        parts += ["## Command", "", f"    {one_line(public(run.command), _LONGEST)}", ""]
    auto = _AUTO.get(task, "AutoPeftModel")
    parts += ["## Loading", "", _LOADING.format(auto=auto)]
    if not commit:
        parts += [f"`adapter_config.json` has the folder of {_cell(base)} on the machine that trained it.", ""]
    return "\n".join(parts)


def base_name(folder: str | Path) -> tuple[str, str]:
    """(name of a base on the hub, its commit), or (name of its folder, "")."""
    if repository := repository_of(folder):
        return repository.name, repository.commit
    return Path(folder).absolute().name, ""


def _rows(
    run: Prepared, base: str, commit: str, done: int, eval_loss: float | None, measured: Measured | None
) -> Mapping[str, str]:
    """Name -> content of the rows of the table."""
    config, train = run.config, run.config.train
    lora = run.blueprint.trained.config
    start = f"{_cell(Path(config.adapter).name)}, " if config.adapter is not None else ""
    # A run that goes on where it was has the card of one that nothing interrupted, as it has its adapter.
    other = run.resume if run.resume is not None and run.resume.topology != str(run.topology) else None
    rows = {
        "base": _cell(base) + (f", commit {_cell(commit)}" if commit else ""),
        "data": _names(config.data.train)
        + (
            ": rollouts, a file a step"
            if config.is_stream
            else f": {len(run.train_data):,} sequences, {run.train_data.num_trained_tokens:,} trained tokens"
        ),
    }
    if config.data.eval is not None:
        loss = "" if eval_loss is None else f": loss {eval_loss:.4f}"
        what = _names(config.data.eval_files)
        if (share := config.data.eval_share) is not None:
            what = f"{share:,.3g} of its rows, drawn by the seed"
            if share >= 1:
                what = f"{share:,} of its rows, drawn by the seed"
        rows["held out"] = f"{what}{loss}"
    if run.answers is not None and measured is not None and measured.last:
        rows["answers"] = _answers(run, measured)
    rows |= {
        "adapter": f"{start}r={lora.r}, lora_alpha={lora.lora_alpha:g}, {run.blueprint.trained.num_trainable:,} "
        "trained parameters",
        "scale": scale_in_words(run.blueprint.trained),
        "training": f"{done:,} of {run.steps:,} steps of {batch_in_words(train, run.topology)}; "
        f"lr {rates_in_words(train)}; seed {train.seed}",
        "mesh": f"{_cell(str(run.topology))}, {run.topology.world} processes"
        + (f"; steps 1 to {other.step} on {_cell(other.topology)}" if other is not None else ""),
        "proof": run.proof or "not recorded",
        "versions": ", ".join(f"{name} {number}" for name, number in versions().items()),
    }
    return rows


def _answers(run: Prepared, measured: Measured) -> str:
    """The metrics, with those before the first step: of the base, where a new adapter changed nothing of it."""
    assert run.answers is not None
    is_base = run.config.adapter is None and (run.config.lora or {}).get("init_lora_weights", True) is not False
    start = "of the base" if is_base else "before"
    parts = []
    for name, value in measured.last.items():
        first = measured.first.get(name)
        before = "" if first is None else f" ({first:.4g} {start})"
        parts.append(f"{name} {value:.4g}{before}")
    return f"{', '.join(parts)}, over {len(run.answers.prompts.prompts):,} generated answers"


def _names(given: Given) -> str:
    """Names of data: of files without their folders, or of a dataset of the hub with the file in it."""
    return ", ".join(_cell(_name(path)) for path in paths_of(given))


def _name(path: str) -> str:
    if found := _DATASET.search(path):
        return f"{found['name'].replace('--', '/', 1)}/{found['file']}"
    return public(Path(path).name)


def _cell(text: str) -> str:
    """`text` as code in a cell of a table: nothing in it is markup."""
    return f"`{one_line(text, 200).replace('`', '').replace('|', chr(92) + '|')}`"

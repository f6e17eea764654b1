"""A first run file: what a model, its data and the devices at hand suggest, written so that it runs at once.

Owns: preset, lengths, rank, sizes and topology, and the reasons. Does not own: the recipes (`run.config.presets`), the
checks of a run (`run.prepare`), the ranking of topologies (`meshlora_extra.planner.choose`).
"""

from __future__ import annotations

import dataclasses
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import yaml

from meshlora.adapter.formats.peft_format import lora_config
from meshlora.loading.blueprint import Blueprint
from meshlora.loading.guards import longest_fixed_length
from meshlora.loading.positions import most_positions
from meshlora.reading.sources import JOINED
from meshlora.run.config.file import read_run
from meshlora.run.config.model_presets import facts_of, has_known_rate
from meshlora.run.config.run_file import RunConfig
from meshlora.run.prepare import blueprint_of
from meshlora.run.run_data import RunData, read_data
from meshlora.run.texts import Texts
from meshlora_extra.planner.choose import choose
from meshlora_extra.planner.hardware import Hardware
from meshlora_extra.planner.problem import Problem
from meshlora_ground.errors import MeshloraError, UserError, one_line
from meshlora_ground.topology import Topology

Goal = Literal["sft", "qlora", "dpo"]
PRESET: Mapping[Goal, str] = {"sft": "lora-without-regret", "qlora": "qlora", "dpo": "dpo"}
# Sequences longer than this many per cent of all are cut rather than pay for.
_KEPT_PERCENT = 99
_LONGEST, _STEP = 131_072, 64
# LoRA Without Regret: capacity, as long as there are at least as many trained parameters as trained tokens.
_RANKS = (32, 64, 128, 256)
# Fewer trained tokens than these are seen three times.
_FEW_TOKENS, _LARGE_WIDTH = 1_000_000, 5120
_CHECKPOINTS = 5
# Held out of data that have as many rows as make one of it, where no other file is given.
_HELD_OUT, _FEWEST_ROWS = 0.05, 20


@dataclass(frozen=True)
class Wish:
    """What the user says. gpus: processes. goal, epochs, steps: None, or their choice; at most one of the last two."""

    model: str
    data: str
    eval: str | None
    output: str
    gpus: int
    hardware: Hardware
    goal: Goal | None = None
    epochs: float | None = None
    steps: int | None = None
    columns: Mapping[str, str] | None = None


@dataclass(frozen=True)
class _Seen:
    """The run file's beginnings, its model, and its data at the model's full length."""

    goal: Goal
    config: RunConfig
    blueprint: Blueprint
    data: RunData


def first_run(wish: Wish, *, file: Path, schema: str = "", show: Callable[[RunData], None] = lambda data: None) -> str:
    """The text of a run file. schema: a first line for editors. show: called with the data once they are read.

    Raises:
        UserError: a model or data that do not fit.
    """
    seen = _look(wish)
    show(seen.data)
    lengths = np.diff(seen.data.train.offsets)
    # A multiple of 64, as long as all but the longest hundredth of the sequences, at most the model's positions.
    kept = int(np.percentile(lengths, _KEPT_PERCENT, method="higher"))
    max_length = min(_most_positions(seen.blueprint), math.ceil(kept / _STEP) * _STEP)
    values = _values(wish, seen, max_length)
    plan = _plan(wish, seen, values, max_length)
    start = f"meshlora train {file}"
    if wish.gpus > 1:
        start += f" --nproc {wish.gpus}"
    head = ["# Written by meshlora init; every key: docs/run-file.md. It is started by", f"#   {start}"]
    if schema:
        head.insert(0, schema)  # editors look for it in the first line
    joined = [note for note in seen.data.notes if note.startswith(JOINED)]  # nobody chose it
    head += [f"# note: {one_line(note, 200)}" for note in joined]
    return "\n".join([*head, "", *_lines(values, _notes(seen, lengths, max_length, plan))]) + "\n"


def _look(wish: Wish) -> _Seen:
    """Read the model and the data, with the goal as given, or the first that takes data of this kind."""
    goals: list[Goal] = ["sft", "dpo"]
    if wish.goal:
        goals = [wish.goal]
    first: UserError | None = None
    for goal in goals:
        try:
            return _looked(wish, goal)
        except UserError as error:
            first = first or error  # sft's: most data are meant for it
    assert first is not None
    raise first


def _looked(wish: Wish, goal: Goal) -> _Seen:
    tree: dict[str, Any] = {
        "preset": PRESET[goal],
        "model": {"path": wish.model},
        "data": _data(wish),
        # The rate is not asked for while the family may have none.
        "train": {"output": wish.output, "steps": 1, "lr": 1e-4},
        "lora": {"target_modules": "all-linear"},
    }
    with tempfile.TemporaryDirectory(prefix="meshlora-init-") as folder:  # read_run takes a file alone
        (Path(folder) / "run.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
        config = read_run(Path(folder) / "run.yaml")
    blueprint = blueprint_of(config, Topology())
    whole = dataclasses.replace(config.data, max_length=_most_positions(blueprint))
    texts = Texts(config.model, whole, config.train.objective)
    return _Seen(goal, config, blueprint, read_data(texts, blueprint, config.asked))


def _most_positions(blueprint: Blueprint) -> int:
    """The longest sequences that the model takes."""
    lengths = [most_positions(blueprint.config), _LONGEST]
    if fixed := longest_fixed_length(blueprint.config):
        lengths.append(fixed[0])
    return min(each for each in lengths if each)


def _data(wish: Wish) -> dict[str, Any]:
    data: dict[str, Any] = {"train": wish.data}
    if wish.eval is not None:
        data["eval"] = wish.eval
    if wish.columns:
        data["columns"] = dict(wish.columns)
    return data


def _values(wish: Wish, seen: _Seen, max_length: int) -> dict[str, Any]:
    """The tree of the run file, without what the planner says."""
    config, facts = seen.config, facts_of(seen.config.model.path)
    train: dict[str, Any] = {"output": wish.output}
    tokens, data = seen.data.train.num_trained_tokens, _data(wish) | {"max_length": max_length}
    number = seen.data.train.num_examples
    if wish.eval is None and number >= _FEWEST_ROWS:
        data["eval"] = _HELD_OUT
        number -= math.ceil(number * _HELD_OUT)
    size = min(config.train.batch_size, number)
    if wish.steps is not None:
        train["steps"] = wish.steps
    elif wish.epochs is not None:
        train["epochs"] = wish.epochs
    elif tokens < _FEW_TOKENS:
        train["epochs"] = 3
    else:
        train["epochs"] = 1
    train["batch_size"] = max(size, wish.gpus)  # each dp rank needs a sequence
    if seen.goal == "sft" and not has_known_rate(facts):
        train["lr"] = 2e-4 if facts.width <= _LARGE_WIDTH else 1e-4
    steps = train.get("steps") or math.ceil(train["epochs"] * math.ceil(number / size))
    if steps >= 2 * _CHECKPOINTS:
        train |= {"save_every": steps // _CHECKPOINTS, "keep_last": 2}
        if "eval" in data:
            train |= {"eval_every": steps // _CHECKPOINTS}
    lora: dict[str, Any] = {}
    if seen.goal == "sft":
        # The least with as many trained parameters as trained tokens.
        planned = seen.blueprint.trained
        ranks = (rank for rank in _RANKS if planned.num_trainable * rank / planned.config.r >= tokens)
        lora["r"] = next(ranks, _RANKS[-1])
    elif seen.goal == "dpo":
        lora["target_modules"] = "all-linear"
    values = {"preset": PRESET[seen.goal], "model": {"path": wish.model}, "data": data}
    if lora:
        values["lora"] = lora
    return values | {"train": train}


def _plan(wish: Wish, seen: _Seen, values: dict[str, Any], max_length: int) -> str:
    """Plan the topology, and add it to `values`: the best, or plain dp; returns on what that stands."""
    train, topology = values["train"], f"dp={wish.gpus}"
    recompute: str | int = "none"
    lora = {**(seen.config.lora or {}), **values.get("lora", {})}  # the preset's, below ours
    plain = dataclasses.replace(seen.blueprint, adapter=None)
    hardware, size = wish.hardware, train["batch_size"]
    try:
        problem = Problem(
            plain, lora_config(lora, "lora"), gpus=wish.gpus, gpu=hardware, seq=max_length, global_batch=size
        )
        best = choose(problem).ranked[0]
        memory = f"{best.memory_bytes / 1e9:.2f} of {best.usable_bytes / 1e9:.1f} GB a rank"
        words = f"the planner's first of {wish.gpus} x {hardware.name}: {memory}"
        if not best.fits:
            raise MeshloraError(f"no topology fits: {best.topology} comes nearest, {memory}; use more GPUs, or qlora")
        topology, recompute, train["micro_batch_size"] = str(best.topology), best.recompute, best.micro_batch
        if seen.goal == "dpo":
            train["micro_batch_size"] = max(1, best.micro_batch // 2)  # a pair is two rows
    except UserError as error:
        # The run is possible without a plan.
        train["micro_batch_size"], words = 1, f"not planned: {one_line(str(error), 160)}"
    if recompute != "none":
        train["recompute"] = recompute
    values["topology"] = topology
    return words


def _notes(seen: _Seen, lengths: np.ndarray, max_length: int, plan: str) -> dict[str, str]:
    """Key of the run file -> the reason for its value."""
    cut, data, facts = int((lengths > max_length).sum()), seen.data.train, facts_of(seen.config.model.path)
    what = "pairs" if seen.goal == "dpo" else "sequences"
    why = {
        "sft": "thinkingmachines.ai/blog/lora; values here win over the preset's",
        "qlora": "arXiv 2305.14314: the base in 4 bits; values here win over the preset's",
        "dpo": "alignment-handbook's DPO with LoRA; values here win over the preset's",
    }
    middle, longest = int(np.median(lengths)), int(lengths.max())
    return {
        "preset": why[seen.goal],
        "model.path": f"{facts.model_type}, hidden size {facts.width:,}",
        "data.train": f"{data.num_examples:,} {what}, {data.num_trained_tokens:,} trained tokens",
        "data.eval": "a share of the rows, drawn by the seed, that is never trained; or a file",
        "data.max_length": f"half have at most {middle:,} tokens, the longest {longest:,}; {cut:,} are cut",
        "lora.r": "as many trained parameters as trained tokens, or the preset's 32",
        "lora.target_modules": "the recipe names the seven linears of a Llama layer",
        "train.lr": "of the QLoRA paper, by size; meshlora lr-find tries others",
        "train.epochs": "passes over the data",
        "train.batch_size": "sequences of a step, on all processes together",
        "train.micro_batch_size": "sequences at once",
        "train.eval_every": "steps between evaluations",
        "train.save_every": "steps between checkpoints: go on from the last one with --resume auto",
        "topology": plan,
    }


def _lines(values: Mapping[str, Any], notes: Mapping[str, str]) -> Sequence[str]:
    """`values` as YAML with the note of each key behind it."""
    lines = []
    for name, value in values.items():
        if isinstance(value, Mapping):
            lines.append(f"{name}:")
            lines += [f"  {_line(key, own, notes.get(f'{name}.{key}', ''))}" for key, own in value.items()]
        else:
            lines.append(_line(name, value, notes.get(name, "")))
    return lines


def _line(key: str, value: Any, note: str) -> str:
    written = yaml.safe_dump(value, width=10_000, default_flow_style=True).removesuffix("...\n").strip()
    if not note:
        return f"{key}: {written}"
    return f"{key}: {written}  # {one_line(note, 200)}"

"""The planner's step time after calibration against the trainer's own, on three shapes and four topologies, and pp.

    python benchmarks/planned_vs_seen.py [--dtype D] [--quick] [--json FILE]

One process and two, each with one thread, hold the trainers of all cells (random weights, rows of full length). In a
turn they are calibrated, as by `meshlora calibrate`, and then every cell takes a step: whatever the machine does in
these minutes is on both sides. Planned is what `meshlora plan` says with the medians of all calibrations, seen the
median of `step_time_s` of a cell, and the ratio the greater of the two over the smaller. Nothing is fitted to a cell.

A time in which other programs had more than `MOST_ELSEWHERE` of a processor is taken again; where there is none
without, the least disturbed ones stand. The page says how busy others were, and has the same table with one term of the
model of time left out.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from meshlora.comm.groups import open_mesh, simulated_job
from meshlora.loading.blueprint import make_blueprint
from meshlora.loading.load import load_blueprint
from meshlora.plan.base_options import BaseOptions
from meshlora.run.allocator import keep_freed_memory
from meshlora.run.config.file import read_run
from meshlora.run.together import prepare_run
from meshlora.run.trainer import Trainer
from meshlora.run.watch.metrics import Reporter
from meshlora_extra.planner import calibrate
from meshlora_extra.planner.choose import Prediction, predict
from meshlora_extra.planner.hardware import hardware_named
from meshlora_extra.planner.problem import Problem, read_config
from meshlora_ground.topology import Topology
from processes import Group, be_quiet, open_groups
from table import Findings, Parity, Row, parser, run, turns_within

MOST = 1.15
# Processors that other programs may have, and how often a time is taken for one without.
MOST_ELSEWHERE, MOST_TRIES = 0.1, 2
WORDS = 1000
LORA: dict[str, Any] = {"r": 16, "lora_alpha": 32, "target_modules": "all-linear"}


# What the model of time would be without a term. All: the best product and bandwidth, as of a datasheet.
_NO_RATES = dict.fromkeys(("full_products", "half_products", "full_attention", "half_attention"), ())
LEFT_OUT: dict[str, dict[str, Any]] = {
    "nothing": {},
    "the host, for each operator": {"host_s": 0.0},
    "rates of products by size": {**_NO_RATES, "matmul_efficiency": 1.0},
    "attention's own rate": dict.fromkeys(("full_attention", "half_attention"), ()),
    "operators below the best bandwidth": {"memory_efficiency": 1.0, "half_memory_efficiency": 0.0},
    "what starting a collective takes": {"launch_s": 1e-9},
    "all of these": {
        **_NO_RATES,
        "host_s": 0.0,
        "launch_s": 1e-9,
        "half_memory_efficiency": 0.0,
        "matmul_efficiency": 1.0,
        "memory_efficiency": 1.0,
    },
}


@dataclass(frozen=True)
class Shape:
    """A decoder and the rows of a step: `batch` of `seq` tokens, `micro_batch` at once."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    seq: int
    batch: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.layers} layers of {self.hidden}, {self.batch} × {self.seq}"


SHAPES = (
    Shape(512, 1408, 8, 8, 4, 4096, seq=256, batch=4, micro_batch=2),
    Shape(1024, 2816, 4, 16, 8, 4096, seq=256, batch=2, micro_batch=1),
    Shape(768, 2048, 4, 12, 12, 16_384, seq=512, batch=2, micro_batch=1),
)
TINY = (Shape(64, 128, 2, 4, 2, 1024, seq=32, batch=2, micro_batch=1),)
TOPOLOGIES = {"dp=1": 1, "dp=2": 2, "tp=2,sp": 2, "cp=2": 2, "pp=2": 2}


def make_checkpoint(folder: Path, shape: Shape) -> None:
    """A random one in float32, with a tokenizer of whole words, and rows that fill `seq` tokens."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        vocab_size=shape.vocab,
        max_position_embeddings=shape.seq,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(WORDS)}, unk_token="w2"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w1", pad_token="w0").save_pretrained(folder)
    rows = torch.randint(3, WORDS, (32, shape.seq + 1)).tolist()  # one token too many: cut
    lines = [json.dumps({"text": " ".join(f"w{i}" for i in row)}) for row in rows]
    (folder / "train.jsonl").write_text("\n".join(lines) + "\n")


@dataclass(frozen=True)
class System:
    """Processes that hold the trainers of every cell with so many ranks. topology: whose axes are calibrated."""

    num_ranks: int
    topology: str

    @property
    def name(self) -> str:
        return f"{self.num_ranks} ranks"

    def has(self, topology: str) -> bool:
        """Whether a cell of `topology` is here."""
        return TOPOLOGIES[topology] == self.num_ranks


SYSTEMS = (System(1, "dp=1"), System(2, "tp=2,sp"))

# --- a rank ---------------------------------------------------------------------------------------------------------

_held: dict[str, Any] = {}


def open_system(system: System, folders: Sequence[Path], dtype: str) -> None:
    """The samples of the calibration, and the trainer of every cell."""
    keep_freed_memory()
    mesh = open_mesh(Topology.parse(system.topology))
    per_node, _ = calibrate.machines(mesh)
    samples = list(calibrate.samples_of(mesh, [getattr(torch, dtype)], gpus_per_node=per_node))
    _held.update(mesh=mesh, samples=samples, timings=[])
    for folder in folders:
        for topology in filter(system.has, TOPOLOGIES):
            config = replace(read_run(folder / "run.json"), topology=topology)
            prepared = prepare_run(config, world=system.num_ranks)
            model = load_blueprint(prepared.start, device="cpu", seed=config.train.seed)
            reporter = Reporter(folder / "unused", steps=prepared.steps, log_every=1, is_main=False)
            _held[f"{folder.name}, {topology}"] = Trainer({"default": prepared}, model, {"default": reporter})


def step(cell: str) -> tuple[float, float]:
    """`step_time_s` of the next step of a cell, and the processor's seconds of this rank."""
    trainer, started = _held[cell], time.process_time()
    [metrics] = trainer.train_step(trainer.adapters)
    trainer.adapters[0].done += 1
    return metrics.step_time_s, time.process_time() - started


def measure_samples() -> tuple[list[calibrate.Timing], float]:
    """A round of the calibration, and the processor's seconds of this rank."""
    started = time.process_time()
    found = calibrate.measure(_held["samples"], calibrate.clock_of(_held["mesh"]), rounds=1)
    return found, time.process_time() - started


def hardware_of(rounds: Sequence[Sequence[calibrate.Timing]]) -> dict[str, Any]:
    """The file of `meshlora calibrate`, of the medians of all rounds."""
    medians = [replace(of[0], seconds=statistics.median(t.seconds for t in of)) for of in zip(*rounds, strict=True)]
    return calibrate.hardware_of(_held["mesh"], medians)


# --- times ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Taken:
    """What a call of all ranks gave on rank 0, its seconds, and the processors that other programs had meanwhile."""

    found: Any
    seconds: float
    elsewhere: float


def taken(group: Group, function: Callable[..., Any], *args: Any) -> Taken:
    """A call, again while others had more than `MOST_ELSEWHERE`; the least disturbed one."""
    best: Taken | None = None
    for _ in range(MOST_TRIES):
        started, busy, own = time.perf_counter(), busy_s(), time.process_time()
        answers = group.call(function, *args)
        seconds = time.perf_counter() - started
        used = sum(of_rank for _, of_rank in answers) + time.process_time() - own
        one = Taken(answers[0][0], seconds, max(0.0, (busy_s() - busy - used) / seconds))
        best = one if best is None or one.elsewhere < best.elsewhere else best
        if best.elsewhere <= MOST_ELSEWHERE:
            break
    assert best is not None
    return best


def busy_s() -> float:
    """Seconds that all processors of this machine have worked since it was started."""
    user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def undisturbed(of: Sequence[Taken]) -> list[Taken]:
    """Those in which others had little; at least half of them, the least disturbed ones, where these are fewer."""
    ranked = sorted(of, key=lambda one: one.elsewhere)
    return [t for i, t in enumerate(ranked) if t.elsewhere <= MOST_ELSEWHERE or i < (len(ranked) + 1) // 2]


# --- the run --------------------------------------------------------------------------------------------------------


def make_run(folder: Path, shape: Shape, dtype: str, steps: int) -> None:
    """A checkpoint with its data, and a run file for `steps` steps, to be completed by a topology."""
    make_checkpoint(folder, shape)
    values = {
        "model": {"path": str(folder), "dtype": dtype},
        "lora": LORA,
        "data": {"train": str(folder / "train.jsonl"), "max_length": shape.seq},
        "train": {
            "output": str(folder.parent / f"run of {folder.name}"),
            "steps": steps,
            "batch_size": shape.batch,
            "micro_batch_size": shape.micro_batch,
        },
        "device": "cpu",
    }
    (folder / "run.json").write_text(json.dumps(values))


def predictions(folder: Path, shape: Shape, hardware: dict[int, Path], dtype: Any) -> Iterator[dict[str, Prediction]]:
    """Of each topology: what is left out of the model of time -> its prediction."""
    blueprint = make_blueprint(read_config(str(folder)), Topology(), BaseOptions(dtype=dtype))
    traces = dict[Any, Any]()
    for topology, ranks in TOPOLOGIES.items():
        found = {}
        for name, fields in LEFT_OUT.items():
            problem = Problem(
                blueprint,
                LoraConfig(**LORA),
                gpus=ranks,
                gpu=replace(hardware_named(None, str(hardware[ranks])), **fields),
                seq=shape.seq,
                global_batch=shape.batch,
                micro_batch=shape.micro_batch,
                recompute="none",
            )
            with simulated_job(2):
                found[name] = predict(problem, Topology.parse(topology, world=ranks), traces)
        yield found


def row_of(name: str, planned_s: float, times: list[float]) -> Row:
    """Planned beside seen: the greater over the smaller, at most `MOST`."""
    median = statistics.median(times)
    over = planned_s > median
    ratio_is: Literal["ours / peer", "peer / ours"] = "ours / peer" if over else "peer / ours"
    ratios = [planned_s / one if over else one / planned_s for one in times]
    return Row(
        what=name,
        unit="s",
        ours_name="planned",
        ours=planned_s,
        peer_name="seen",
        peer=median,
        ratio=planned_s / median if over else median / planned_s,
        low=min(ratios),
        high=max(ratios),
        num_turns=len(times),
        ratio_is=ratio_is,
        better="lower",
        target=MOST,
    )


def measure(options: argparse.Namespace) -> Findings:
    """Turns of calibrations and steps, then the plans."""
    shapes, turns = TINY if options.tiny else SHAPES, 2 if options.tiny else 5 if options.quick else 9
    rounds, steps = defaultdict[int, list[Taken]](list), defaultdict[str, list[Taken]](list)
    rows, cells, files = [], [], dict[int, Path]()
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        folders = [root / str(shape) for shape in shapes]
        for folder, shape in zip(folders, shapes, strict=True):
            make_run(folder, shape, options.dtype, 1 + turns * MOST_TRIES)
        with open_groups(dict.fromkeys(SYSTEMS, 1), root, open_system, folders, options.dtype) as groups:
            everywhere = [(s, f"{f.name}, {t}") for s in SYSTEMS for f in folders for t in TOPOLOGIES if s.has(t)]
            for system, cell in everywhere:
                groups[system.name].call(step, cell)
            for turn in turns_within(turns, options):
                for system in SYSTEMS:
                    rounds[system.num_ranks].append(taken(groups[system.name], measure_samples))
                for system, cell in everywhere:
                    steps[cell].append(taken(groups[system.name], step, cell))
                print(f"turn {turn + 1} of {turns}", file=sys.stderr, flush=True)
            for system in SYSTEMS:
                ranks = system.num_ranks
                files[ranks] = root / f"hardware-{ranks}.json"
                kept = [one.found for one in undisturbed(rounds[ranks])]
                files[ranks].write_text(json.dumps(groups[system.name].call(hardware_of, kept)[0]))
        for folder, shape in zip(folders, shapes, strict=True):
            for topology, found in zip(TOPOLOGIES, predictions(folder, shape, files, options.dtype), strict=True):
                own = steps[f"{folder.name}, {topology}"]
                times = [one.found for one in undisturbed(own)]
                rows.append(row_of(f"{shape}, {topology}", found["nothing"].time_s, times))
                cells.append({"shape": asdict(shape), "topology": topology, "turns": [asdict(one) for one in own]})
                cells[-1] |= {"parts_s": found["nothing"].parts_s, "without_s": {n: p.time_s for n, p in found.items()}}
        details = {"hardware": {ranks: json.loads(file.read_text()) for ranks, file in files.items()}, "cells": cells}
    details["calibrations"] = {n: [(o.seconds, o.elsewhere) for o in of] for n, of in rounds.items()}
    parity = Parity("none: times are compared, the runs are of one trainer", None, None, agrees=True)
    return Findings(parity, rows, details, page(rows, cells, rounds, steps, options.dtype))


def page(rows: Sequence[Row], cells: Any, rounds: Any, steps: Any, dtype: str) -> str:
    """How many cells are met, how busy others were, and the tables without terms."""
    met = sum(bool(row.is_met) for row in rows)
    every = [one for of in (*rounds.values(), *steps.values()) for one in of]
    kept = [one.elsewhere for of in (*rounds.values(), *steps.values()) for one in undisturbed(of)]
    lines = [
        f"{met} of {len(rows)} within {MOST - 1:.0%}; {dtype}. {len(kept)} of {len(every)} times count: in these other "
        f"programs had {statistics.mean(kept):.2f} processors on average, {max(kept):.2f} at most. The spread is that "
        "of the turns of a cell, against one plan.",
        "",
        "| left out of the model of time | planned / seen, least | median | greatest |",
        "|---|---|---|---|",
    ]
    for name in LEFT_OUT:
        ratios = sorted(cell["without_s"][name] / row.peer for cell, row in zip(cells, rows, strict=True))
        lines.append(f"| {name} | {ratios[0]:.2f} | {statistics.median(ratios):.2f} | {ratios[-1]:.2f} |")
    return "\n".join(lines)


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="of the base")
    be_quiet()
    return run("Planned step times against the trainer's", made.parse_args(), measure, name="planned_vs_seen")


if __name__ == "__main__":
    sys.exit(main())

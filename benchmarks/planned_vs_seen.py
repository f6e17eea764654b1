"""The planner's step time after calibration against the trainer's own, on three shapes and four topologies.

    python benchmarks/planned_vs_seen.py [--dtype D] [--quick] [--json FILE]

`meshlora calibrate` measures this machine once with one rank and once with two, each with one thread. Then every cell
is planned (`meshlora plan --hardware`) and trained (`meshlora train`): random weights, rows of full length, the median
of `step_time_s` in metrics.jsonl after the first steps. The ratio is the greater of the two over the smaller.
Nothing is fitted to a cell. Below the table: the same with one term of the model of time left out.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from meshlora.comm.groups import simulated_job
from meshlora.loading.blueprint import BaseOptions, make_blueprint
from meshlora.plan.topology import Topology
from meshlora.planner.choose import predict
from meshlora.planner.hardware import hardware_named
from meshlora.planner.problem import Problem, read_config
from table import Findings, Parity, Row, parser, run

MOST = 1.15
WARM_UP = 2
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


def meshlora(*words: str) -> None:
    """Run a command, one thread a rank.

    Raises:
        RuntimeError: it failed.
    """
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-m", "meshlora", *words], env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"meshlora {' '.join(words)}:\n{done.stdout}{done.stderr}")


def planned(folder: Path, shape: Shape, hardware: dict[int, Path], dtype: str) -> dict[str, dict[str, Any]]:
    """Topology -> its prediction."""
    out, found = folder / "plan.json", {}
    for ranks, file in hardware.items():
        own = [word for topology, number in TOPOLOGIES.items() if number == ranks for word in ("--topology", topology)]
        meshlora(
            *("plan", "--model", str(folder), "--hardware", str(file), "--gpus", str(ranks), *own),
            *("--seq", str(shape.seq), "--global-batch", str(shape.batch), "--dtype", dtype),
            *("--micro-batch", str(shape.micro_batch), "--recompute", "none", "--json", str(out)),
        )
        found |= {each["topology"]: each for each in json.loads(out.read_text())["topologies"]}
    return found


def without_terms(folder: Path, shape: Shape, hardware: dict[int, Path], dtype: Any) -> dict[str, dict[str, float]]:
    """What is left out -> topology -> planned seconds."""
    blueprint = make_blueprint(read_config(str(folder)), Topology(), BaseOptions(dtype=dtype))
    lora, found, traces = LoraConfig(**LORA), {name: dict[str, float]() for name in LEFT_OUT}, dict[Any, Any]()
    for topology, ranks in TOPOLOGIES.items():
        for name, fields in LEFT_OUT.items():
            problem = Problem(
                blueprint,
                lora,
                gpus=ranks,
                gpu=replace(hardware_named(None, str(hardware[ranks])), **fields),
                seq=shape.seq,
                global_batch=shape.batch,
                micro_batch=shape.micro_batch,
                recompute="none",
            )
            with simulated_job(2):
                found[name][topology] = predict(problem, Topology.parse(topology, world=ranks), traces).time_s
    return found


def seen(folder: Path, shape: Shape, topology: str, dtype: str, steps: int) -> list[float]:
    """Seconds of the steps of a run, after the first."""
    run_file, output = folder / "run.json", folder.parent / f"run-{topology}"
    values = {
        "model": {"path": str(folder), "dtype": dtype},
        "lora": LORA,
        "data": {"train": str(folder / "train.jsonl"), "max_length": shape.seq},
        "train": {
            "output": str(output),
            "steps": steps,
            "batch_size": shape.batch,
            "micro_batch_size": shape.micro_batch,
            "overwrite": True,
        },
        "topology": topology,
        "device": "cpu",
    }
    run_file.write_text(json.dumps(values))
    meshlora("train", str(run_file), "--no-preflight", "--nproc", str(TOPOLOGIES[topology]))
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [line["step_time_s"] for line in lines if "step_time_s" in line][WARM_UP:]


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
    """Calibrate, then plan and train each cell."""
    steps = WARM_UP + (4 if options.tiny or options.quick else 8)
    rows, cells, files = [], [], {}
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        for ranks in (1, 2):
            files[ranks] = root / f"hardware-{ranks}.json"
            words = ("--topology", "tp=2,sp") if ranks == 2 else ()
            out = ("--dtype", options.dtype, "--device", "cpu", "--out", str(files[ranks]))
            meshlora("calibrate", "--nproc", str(ranks), *words, *out)
        for number, shape in enumerate(TINY if options.tiny else SHAPES):
            folder = root / f"shape-{number}"
            make_checkpoint(folder, shape)
            plans, without = (f(folder, shape, files, options.dtype) for f in (planned, without_terms))
            for topology in TOPOLOGIES:
                times, plan = seen(folder, shape, topology, options.dtype, steps), plans[topology]
                rows.append(row_of(f"{shape}, {topology}", plan["time_s"], times))
                cells.append({"shape": asdict(shape), "topology": topology, "seen_s": times, "plan": plan})
                cells[-1]["without_s"] = {name: of[topology] for name, of in without.items()}
                print(rows[-1].what, f"planned {rows[-1].ours:.3f} seen {rows[-1].peer:.3f}", file=sys.stderr)
        details = {"hardware": {ranks: json.loads(file.read_text()) for ranks, file in files.items()}, "cells": cells}
    parity = Parity("none: times are compared, the runs are of one trainer", None, None, agrees=True)
    met = sum(bool(row.is_met) for row in rows)
    lines = [f"{met} of {len(rows)} within {MOST - 1:.0%}; {options.dtype}.", ""]
    lines += ["| left out of the model of time | planned / seen, least | median | greatest |", "|---|---|---|---|"]
    for name in LEFT_OUT:
        ratios = sorted(cell["without_s"][name] / row.peer for cell, row in zip(cells, rows, strict=True))
        lines.append(f"| {name} | {ratios[0]:.2f} | {statistics.median(ratios):.2f} | {ratios[-1]:.2f} |")
    return Findings(parity, rows, details, "\n".join(lines))


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="of the base")
    return run("Planned step times against the trainer's", made.parse_args(), measure, name="planned_vs_seen")


if __name__ == "__main__":
    sys.exit(main())

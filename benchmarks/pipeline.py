"""Stages of layers: pp=2 against one process, whose micro-batches it has to finish in the time that the order allows.

    python benchmarks/pipeline.py [--turns N] [--quick] [--json FILE]

A Llama of hidden 512 with 8 equal layers and a small head, LoRA on all seven linears, float32, one thread a rank.
Before anything is timed, loss and every gradient of four micro-batches are compared with one process. Of `n`
micro-batches each of two equal stages computes half, and waits for one turn more: the order says (n + 1) / (2 n) of one
process. A target is met within 10 % of that.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import context_parallel
from meshlora.adapter.attach import active_factors, runtime
from meshlora.loading.blueprint import make_blueprint
from meshlora.loading.load import load_blueprint
from meshlora.plan.base_options import BaseOptions
from meshlora.train.gradsync import finish_gradients
from meshlora.train.losses import shifted_loss
from meshlora.wings.stages.pipeline_schedule import one_forward_one_backward
from meshlora_ground.topology import Topology
from processes import Group, batch_of, be_quiet, open_groups
from table import Findings, Parity, ParityError, parser, run, smaller
from tp_vs_peft import difference, make_checkpoint

TOLERANCE = 1e-4  # fp32, relative
SIZES = {"num_hidden_layers": 8, "vocab_size": 256}
TINY = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 128}
TOKENS, TINY_TOKENS, COUNTS, CHECKED = 512, 16, (2, 4, 8), 4
MARGIN = 1.1


@dataclass(frozen=True)
class System:
    """topology: of meshlora."""

    name: str
    topology: str
    num_ranks: int


ALONE, PP = System("1 process", "dp=1", 1), System("pp=2", "pp=2", 2)

_held: dict[str, Any] = {}


def open_system(system: System, folder: Path) -> None:
    """Load it, on a rank."""
    blueprint = make_blueprint(folder / "model", Topology.parse(system.topology), BaseOptions(dtype="float32"))
    _held["model"] = load_blueprint(blueprint.with_folder(folder / "adapter"), device="cpu")


def step(number: int, tokens: int) -> tuple[float, float]:
    """Seconds and the loss of `number` micro-batches of one row, up to their gradients."""
    model = _held["model"]
    mesh, pipeline, waiting, total = runtime(model).mesh, runtime(model).pipeline, dict[tuple[int, int], Any](), 0.0
    for factor in active_factors(model):
        factor.parameter.grad = None
    rows = [batch_of(1, tokens + n, model.config.vocab_size) for n in range(number)]
    if mesh.pp.size > 1:
        dist.barrier()
    started = time.perf_counter()
    for micro_batch, stage, is_forward in one_forward_one_backward(number, rank=mesh.pp.rank, size=mesh.pp.size):
        with pipeline.at(stage):
            if is_forward:
                ids, labels = rows[micro_batch]
                waiting[micro_batch, stage] = shifted_loss(model, ids, None, labels), pipeline.noted()
                continue
            loss, know_again = waiting.pop((micro_batch, stage))
            know_again()
            loss.backward()
            total += float(loss.detach())
    finish_gradients(model, num_tokens=sum(labels.numel() for _, labels in rows))
    return time.perf_counter() - started, total


def first_gradients(tokens: int) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss of the checked micro-batches, and the gradients of this rank's stage."""
    loss = step(CHECKED, tokens)[1]
    return loss, {f.name: f.parameter.grad for f in active_factors(_held["model"]) if f.parameter.grad is not None}


def check_parity(groups: dict[str, Group], tokens: int) -> float:
    """The worst relative difference of the loss or a gradient.

    Raises:
        ParityError: it is above `TOLERANCE`, or stages together do not have every gradient once.
    """
    [(loss, reference)] = groups[ALONE.name].call(first_gradients, tokens)
    ranks = groups[PP.name].call(first_gradients, tokens)
    names = [name for _, found in ranks for name in found]
    off = [abs(sum(of_rank for of_rank, _ in ranks) - loss) / abs(loss), float(sorted(names) != sorted(reference))]
    off += [difference([found[name]], reference[name]) for _, found in ranks for name in found]
    if not max(off) <= TOLERANCE:
        raise ParityError(f"{PP.name} against {ALONE.name}", max(off), TOLERANCE)
    return max(off)


def measure(options: argparse.Namespace) -> Findings:
    """Parity, then times, the systems in turns."""
    is_small = options.tiny or options.quick
    sizes, tokens = (TINY, TINY_TOKENS) if options.tiny else (SIZES, TOKENS)
    with tempfile.TemporaryDirectory() as name:
        folder = make_checkpoint(Path(name) / "model", **context_parallel.MODEL | sizes)
        with open_groups({ALONE: 1, PP: 1}, Path(name), open_system, folder) as groups:
            worst = check_parity(groups, tokens)
            times: dict[int, dict[str, list[float]]] = {n: {ALONE.name: [], PP.name: []} for n in COUNTS}
            for _ in range(2 if is_small else options.turns):
                for number, of_systems in times.items():
                    for system, found in of_systems.items():
                        found.append(max(seconds for seconds, _ in groups[system].call(step, number, tokens)))
    names = {"ours_name": PP.name, "peer_name": ALONE.name}
    rows = [
        smaller(f"{n} micro-batches", of[PP.name], of[ALONE.name], unit="s", target=MARGIN * (n + 1) / (2 * n), **names)
        for n, of in times.items()
    ]
    lines = ["| micro-batches | measured | the order says | of it |", "|---|---|---|---|"]
    for n, of in times.items():
        ratio = statistics.median(of[PP.name]) / statistics.median(of[ALONE.name])
        says = (n + 1) / (2 * n)
        lines.append(f"| {n} | {ratio:.3f} | {says:.3f} | {ratio / says:.2f} |")
    parity = Parity("loss and every gradient of four micro-batches, against one process", worst, TOLERANCE, agrees=True)
    return Findings(parity, rows, {"seconds": times, "model": sizes, "tokens": tokens}, "\n".join(lines))


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--turns", type=int, default=7, help="of each system and number of micro-batches")
    options = made.parse_args()
    be_quiet()
    return run("Stages of layers: two against one process", options, measure, name="pipeline")


if __name__ == "__main__":
    sys.exit(main())

"""Long sequences: cp=2, balanced and contiguous, its ring, and tp=2, against our own one process.

    python benchmarks/context_parallel.py [--lengths N...] [--turns N] [--quick] [--json FILE]

One row of 8,192 and of 16,384 tokens through a Llama of hidden 512 with 4 layers, LoRA on all seven linears, float32,
one thread a rank. Before anything is timed, loss and every gradient of 1,024 tokens are compared with one process.
A step is forward, loss, backward, gradient sync, AdamW. The systems take turns, one step at a time, so that what else
the machine does hits all alike.

Memory is the most resident memory of a rank during a step, above the level before the first one: `VmHWM`, begun anew
once the allocator has given back what nobody uses. It does so after a step too, for those who wait hold it otherwise.
Bytes and calls of attention are counted at dispatch, of one layer.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import many_adapters
import meshlora
from meshlora.comm.collectives import all_reduce_sum
from meshlora.train.losses import shifted_loss
from meshlora_judge.capture import CollectiveCounter
from processes import Group, batch_of, be_quiet, begin_high_water_mark, memory_bytes, open_groups
from table import Findings, Parity, ParityError, Row, faster, parser, run, smaller
from tp_vs_peft import RANK, TINY, Meshlora, difference, make_checkpoint

TOLERANCE = 1e-4  # fp32, relative
MODEL = {**many_adapters.MODEL, "max_position_embeddings": 16384}


@dataclass(frozen=True)
class System:
    """topology: of meshlora. is_balanced: whether each rank has heads and tails of sequences, or a contiguous part."""

    name: str
    topology: str = ""
    num_ranks: int = 1
    is_balanced: bool = True


ALONE = System("1 process")
CP = System("cp=2", "cp=2", 2)
CONTIGUOUS = System("cp=2, contiguous", "cp=2", 2, is_balanced=False)
RING = System("cp=2,ring", "cp=2,ring", 2)
TP = System("tp=2", "tp=2", 2)
SYSTEMS = (ALONE, CP, CONTIGUOUS, RING, TP)
LENGTHS, QUICK_LENGTHS, TINY_LENGTHS = (8192, 16384), (4096,), (64,)
COUNTED = 1024  # tokens of the gradients that are compared, and of the collectives that are counted
MEMORY, TIME, BALANCE = 0.6, 0.65, 1.2  # asked for: of one process; times as fast as contiguous parts


# --- the systems: all of this runs on the ranks ---------------------------------------------------------------------

_held: dict[str, Any] = {}


class Candidate(Meshlora):
    """A loaded model, of which each cp rank has its own tokens."""

    def gradients(self, ids: torch.Tensor, labels: torch.Tensor) -> float:
        cp = self.model.meshlora.mesh.cp
        loss = shifted_loss(self.model, ids, torch.ones_like(ids), labels)
        loss.backward()
        num_tokens = meshlora.finish_gradients(self.model, num_tokens=labels.numel())
        return float(all_reduce_sum(loss.detach().view(1), cp)) / num_tokens


def open_system(system: System, folder: Path) -> None:
    paths = {"adapter": folder / "adapter", "topology": system.topology}
    model = meshlora.load(folder / "model", dtype="float32", device="cpu", **paths)
    model.meshlora.context.balances = system.is_balanced
    _held["candidate"] = Candidate(model)


def first_gradients(length: int) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss, and this rank's part of every gradient."""
    candidate = _held["candidate"]
    candidate.optimizer.zero_grad(set_to_none=True)
    loss = candidate.gradients(*_tokens(length))
    return loss, {name: p.grad.clone() for name, p in candidate.factors().items()}


def step(length: int) -> tuple[float, float, int]:
    """Seconds, CPU seconds and peak memory above the level before the first step, of one step."""
    candidate, batch = _held["candidate"], _tokens(length)
    begin_high_water_mark()
    started, cpu_started = time.perf_counter(), time.process_time()
    candidate.step(*batch)
    seconds, cpu = time.perf_counter() - started, time.process_time() - cpu_started
    peak = memory_bytes("VmHWM")
    begin_high_water_mark()
    return seconds, cpu, peak - _held["level"]


def begin() -> None:
    """Memory counts from here."""
    _held["level"] = begin_high_water_mark()


def count(length: int) -> dict[str, tuple[int, int]]:
    """ "phase kind" -> calls and bytes that this rank gives collectives of a step's forward, loss and backward."""
    candidate, counter = _held["candidate"], CollectiveCounter()
    candidate.optimizer.zero_grad(set_to_none=True)

    def watch(_module: Any, _args: Any, output: Any) -> None:
        counter.phase = "loss"
        output.logits.hidden.register_hook(lambda _gradient: setattr(counter, "phase", "backward"))

    hook = candidate.model.register_forward_hook(watch)
    counter.phase = "forward"
    with counter:
        candidate.gradients(*_tokens(length))
    hook.remove()
    return {" ".join(key): (number, counter.sent[key]) for key, number in counter.counts.items() if key[0] != "loss"}


def _tokens(length: int) -> tuple[torch.Tensor, torch.Tensor]:
    return batch_of(1, length, _held["candidate"].model.config.vocab_size)


# --- the run --------------------------------------------------------------------------------------------------------


def check_parity(groups: dict[str, Group], length: int) -> float:
    """The worst relative difference of a loss or a gradient from one process.

    Raises:
        ParityError: it is above `TOLERANCE`.
    """
    [(loss, reference)] = groups[ALONE.name].call(first_gradients, length)
    worst = 0.0
    for name, group in groups.items():
        ranks = group.call(first_gradients, length)
        off = [abs(rank_loss - loss) / abs(loss) for rank_loss, _ in ranks]
        off += [difference([parts[key] for _, parts in ranks], whole) for key, whole in reference.items()]
        if not max(off) <= TOLERANCE:
            raise ParityError(f"{name}, {length} tokens, against {ALONE.name}", max(off), TOLERANCE)
        worst = max(worst, *off)
    return worst


Times = dict[str, list[tuple[float, float, int]]]


def measure_steps(groups: dict[str, Group], length: int, turns: int) -> Times:
    """Of each system and turn: seconds, CPU seconds and peak memory of the rank that has the most of each."""
    found: Times = {name: [] for name in groups}
    for turn in range(turns):
        for name, group in groups.items():
            found[name].append(tuple(max(of_ranks) for of_ranks in zip(*group.call(step, length), strict=True)))
        print(f"{length} tokens, turn {turn + 1} of {turns}", file=sys.stderr, flush=True)
    return found


def rows_of(length: int, found: Times) -> list[Row]:
    """Time and memory against one process, balance against none, and against tp."""
    rows = []

    def pair(ours: System, peer: System, field: int) -> tuple[Sequence[float], Sequence[float]]:
        scale = 2**-20 if field == 2 else 1.0
        own, other = ([turn[field] * scale for turn in found[system.name]] for system in (ours, peer))
        return own, other

    for ours in (CP, RING, TP):
        names = {"ours_name": ours.name, "peer_name": ALONE.name}
        memory, seconds = (MEMORY, TIME) if ours is CP else (None, None)
        rows.append(smaller(f"{length} tokens, a step", *pair(ours, ALONE, 0), unit="s", target=seconds, **names))
        rows.append(smaller(f"{length} tokens, peak memory", *pair(ours, ALONE, 2), unit="MiB", target=memory, **names))
    names = {"ours_name": CP.name, "peer_name": CONTIGUOUS.name}
    rows.append(faster(f"{length} tokens, a step", *pair(CP, CONTIGUOUS, 0), unit="s", target=BALANCE, **names))
    return rows


def page(found: dict[int, Times], counted: dict[str, dict[str, tuple[int, int]]], layers: int, length: int) -> str:
    """What the rows are taken from, and the collectives."""
    lines = [
        f"Llama, hidden {MODEL['hidden_size']}, {MODEL['num_hidden_layers']} layers, intermediate "
        f"{MODEL['intermediate_size']}, vocab {MODEL['vocab_size']}, {MODEL['num_attention_heads']}/"
        f"{MODEL['num_key_value_heads']} heads, LoRA r={RANK} on all seven linears, one row, gloo, one thread a rank."
    ]
    for of_length, by_name in found.items():
        lines += [
            "",
            f"## {of_length} tokens",
            "",
            "| system | median step | min..max | CPU time a rank | peak memory |",
        ]
        lines.append("|---|---|---|---|---|")
        for name, turns in by_name.items():
            wall, cpu, peak = zip(*turns, strict=True)
            lines.append(
                f"| {name} | {statistics.median(wall):.2f} s | {min(wall):.2f}..{max(wall):.2f} s "
                f"| {statistics.median(cpu):.2f} s | {statistics.median(peak) / 2**20:,.0f} MiB |"
            )
    lines += ["", f"## Collectives of all {layers} layers and the ends, {length} tokens", ""]
    lines += ["| system | phase, kind | calls | bytes given by a rank |", "|---|---|---|---|"]
    for name, kinds in counted.items():
        lines += [f"| {name} | {kind} | {calls} | {sent:,} |" for kind, (calls, sent) in sorted(kinds.items())]
    return "\n".join(lines)


def measure(options: argparse.Namespace) -> Findings:
    """Parity, then counts, then times and memory."""
    lengths = TINY_LENGTHS if options.tiny else QUICK_LENGTHS if options.quick else sorted(options.lengths)
    turns = 1 if options.tiny or options.quick else options.turns
    sizes, counted_length = (TINY, TINY_LENGTHS[0]) if options.tiny else ({}, COUNTED)
    with tempfile.TemporaryDirectory() as name:
        folder = make_checkpoint(Path(name) / "model", **MODEL | sizes)
        with open_groups(dict.fromkeys(SYSTEMS, 1), Path(name), open_system, folder) as groups:
            worst = check_parity(groups, counted_length)
            counted = {n: g.call(count, counted_length)[0] for n, g in groups.items() if g.system.num_ranks > 1}
            for group in groups.values():
                group.call(begin)
            found = {length: measure_steps(groups, length, turns) for length in lengths}
    rows = [row for length, times in found.items() for row in rows_of(length, times)]
    details = {"model": {**MODEL, **sizes, "lora_rank": RANK}, "collectives": counted, "steps": found}
    layers = {**MODEL, **sizes}["num_hidden_layers"]
    parity = Parity(f"loss and every gradient of step 1, against {ALONE.name}", worst, TOLERANCE, agrees=True)
    return Findings(parity, rows, details, page(found, counted, layers, counted_length))


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--turns", type=int, default=5, help="of each system and length, one step each")
    made.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="tokens of a row")
    options = made.parse_args()
    be_quiet()
    return run("Context parallel: two ranks against one process", options, measure, name="context_parallel")


if __name__ == "__main__":
    sys.exit(main())

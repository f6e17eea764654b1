"""Collectives and bytes of a layer in one training step, counted: meshlora against transformers' tp + PEFT, tp=2.

    python benchmarks/collectives.py [--quick] [--json FILE]

Of forward, backward and gradient sync: (four layers - two layers) / 2, so that embedding and head do not count.
Counted at dispatch level, where whoever communicates has to pass; as a check that nothing passed beside it, calls are
counted where they leave too, by the profiler's records of gloo and by meshlora's sockets, these with their bytes, and
both have to agree. Bytes are those that a rank sends in a ring: 2(n-1)/n of an all-reduce's tensor, (n-1)/n of the
whole tensor of a gather or a reduce-scatter. Loss and every gradient are compared with one-process PEFT first, as in
tp_vs_peft.py.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from meshlora.comm import direct
from processes import Group, be_quiet, open_groups
from table import Findings, Parity, Row, parser, run, smaller
from tp_vs_peft import (
    PEER,
    REFERENCE,
    SP,
    TINY,
    TINY_SHAPES,
    TOLERANCE,
    TP,
    Shape,
    System,
    check_parity,
    load,
    make_checkpoint,
    open_system,
    tokens,
)

SHAPE = Shape(256, 2)
SYSTEMS = (TP, SP, REFERENCE, PEER)
KINDS = {"allreduce": "all-reduce", "allgather": "all-gather", "reducescatter": "reduce-scatter"}


class CollectiveCounter(TorchDispatchMode):
    """Counts operators that communicate and their bytes by (pass, kind), and all operators of each pass, to show that
    it sees both."""

    def __init__(self, num_ranks: int) -> None:
        super().__init__()
        self.num_ranks = num_ranks
        self.phase = "forward"
        self.calls: Counter[tuple[str, str]] = Counter()
        self.bytes: Counter[tuple[str, str]] = Counter()
        self.num_operators: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_operators[self.phase] += 1
        space, _, name = func.name().partition("::")
        if "c10d" in space and "wait" not in name and "wrap" not in name:
            plain = name.replace("_", "")
            kind = next((shown for key, shown in KINDS.items() if key in plain), name)
            self.calls[self.phase, kind] += 1
            self.bytes[self.phase, kind] += self._sent(kind, [t.numel() * t.element_size() for t in _tensors(args)])
        return func(*args, **(kwargs or {}))

    def _sent(self, kind: str, sizes: list[int]) -> int:
        """sizes: of all tensors among the arguments: output and input, or the input only."""
        n = self.num_ranks
        if kind == "all-gather":  # the smaller is this rank's part
            return (n - 1) * min(sizes)
        if kind == "reduce-scatter":  # the greater is the whole
            return (n - 1) * max(sizes) // n
        return 2 * (n - 1) * sum(sizes) // n


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [t for item in value for t in _tensors(item)] if isinstance(value, list | tuple) else []


def count(system: System, folder: Path, shape: Shape) -> tuple[Counter[tuple[str, str]], Counter[tuple[str, str]]]:
    """Calls and bytes of one forward and backward with gradient sync, of the checkpoint in `folder`.

    Raises:
        RuntimeError: the two ways of counting differ, or one pass was not seen.
    """
    candidate = load(system, folder)
    batch = tokens(candidate, shape)
    links = direct.links_of(candidate.model.meshlora.mesh.tp) if system.kind == "meshlora" else None  # open from here
    before = (links.num_messages, links.num_bytes) if links else (0, 0)
    with profile(activities=[ProfilerActivity.CPU]) as records, CollectiveCounter(system.num_ranks) as counter:

        def watch(_module: nn.Module, _args: Any, output: Any) -> None:
            # meshlora's logits never exist whole: what the head reads stands for them.
            last = getattr(output.logits, "hidden", output.logits)
            last.register_hook(lambda _gradient: setattr(counter, "phase", "backward"))

        candidate.model.register_forward_hook(watch)  # the gradient of the logits opens the backward
        candidate.gradients(*batch)
    if counter.num_operators["backward"] < counter.num_operators["forward"] / 4:
        raise RuntimeError(f"the counter does not see the backward: {dict(counter.num_operators)}")
    by_name = {event.key: event.count for event in records.key_averages() if event.key.startswith("gloo:")}
    by_name.pop("gloo:recv", None)  # of a message, what was sent counts
    calls, num_bytes = sum(counter.calls.values()), sum(counter.bytes.values())
    left = sum(by_name.values()), num_bytes  # gloo's records have no bytes
    if links is not None:  # an exchange between two ranks is one message each way
        left = left[0] + links.num_messages - before[0], links.num_bytes - before[1]
    if left != (calls, num_bytes):
        raise RuntimeError(f"{system.name}: {calls} calls, {num_bytes} bytes counted; gloo and sockets had {left}")
    return counter.calls, counter.bytes


def per_layer(group: Group, four: Path, two: Path, shape: Shape) -> dict[str, dict[str, list[float]]]:
    """By pass and kind: calls and bytes of one layer."""
    more, less = (group.call(count, group.system, folder, shape)[0] for folder in (four, two))
    found: dict[str, dict[str, list[float]]] = {}
    for phase, kind in more[0]:
        numbers = [(a[phase, kind] - b[phase, kind]) / 2 for a, b in zip(more, less, strict=True)]
        if any(numbers):
            found.setdefault(phase, {})[kind] = numbers
    return found


def rows_of(found: dict[str, dict[str, dict[str, list[float]]]]) -> list[Row]:
    """Calls, then bytes, of ours against the peer."""
    rows = []
    for ours in (TP, SP):
        for part, what, unit, scale in (
            (0, "collectives of a layer", "calls", 1),
            (1, "bytes of a layer", "MiB", 2**20),
        ):
            own, peer = ([_sum(found[name], part) / scale] for name in (ours.name, PEER.name))
            rows.append(smaller(what, own, peer, unit=unit, ours_name=ours.name, peer_name=PEER.name))
    return rows


def _sum(by_phase: dict[str, dict[str, list[float]]], part: int) -> float:
    return sum(numbers[part] for kinds in by_phase.values() for numbers in kinds.values())


def page(found: dict[str, dict[str, dict[str, list[float]]]], shape: Shape) -> str:
    """One line a system."""
    lines = [f"{shape}, fp32, tp=2.", "", "| system | calls | bytes | by pass and kind |", "|---|---|---|---|"]
    for name, by_phase in found.items():
        kinds = "; ".join(
            f"{phase}: {calls:g} {kind}, {size:,.0f} bytes"
            for phase, by_kind in by_phase.items()
            for kind, (calls, size) in by_kind.items()
        )
        lines.append(f"| {name} | {_sum(by_phase, 0):g} | {_sum(by_phase, 1):,.0f} | {kinds} |")
    return "\n".join(lines)


def measure(options: argparse.Namespace) -> Findings:
    """Parity, then counts. Nothing is timed: a quick run is a full one."""
    shape, sizes = (TINY_SHAPES[0], TINY) if options.tiny else (SHAPE, {})
    with tempfile.TemporaryDirectory() as name:
        torch.set_num_threads(1)
        four, two = (
            make_checkpoint(Path(name) / str(number), **{**sizes, "num_hidden_layers": number}) for number in (4, 2)
        )
        with open_groups(dict.fromkeys(SYSTEMS, 1), Path(name), open_system, two) as groups:
            parity, _ = check_parity(groups, [shape], None)
            counted = {name: per_layer(g, four, two, shape) for name, g in groups.items() if g.system.num_ranks > 1}
    worst = max(error for errors in parity.values() for error in errors.values())
    what = f"loss and every gradient, against {REFERENCE.name}; two ways of counting agree"
    return Findings(
        Parity(what, worst, TOLERANCE, True), rows_of(counted), {"per_layer": counted}, page(counted, shape)
    )


def main() -> int:
    options = parser(__doc__).parse_args()
    be_quiet()
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # of the profiler, in the processes that start now
    return run("Collectives and bytes of a layer", options, measure, name="collectives")


if __name__ == "__main__":
    sys.exit(main())

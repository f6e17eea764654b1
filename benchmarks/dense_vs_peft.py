"""One process: meshlora against PEFT with a plain loop, and PEFT with transformers' Trainer. Step time and memory.

    python benchmarks/dense_vs_peft.py [--turns N] [--quick] [--tiny] [--json FILE]

Every system has a process of its own, the same random checkpoint and the same adapter. Before anything is timed, the
loss and every LoRA gradient of the first step are compared with PEFT's: a system that disagrees ends the benchmark. A
step is forward, loss, backward, fused AdamW. The systems take turns, a few steps at a time. Memory is counted twice:
what autograd saves (each storage once, without parameters; the same on every machine), and the most that a step
allocates beyond what was there before it. The interface is that of benchmarks/README.md.

The base is bfloat16, as people train, with float32 factors, as PEFT makes them; and float32. There the products of the
base's own matrices take nearly all of a step, on all sides: a row says how fast a step without anything else would be.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import Trainer, TrainerCallback, TrainingArguments

from activation_memory import SavedBytes
from base_products import time_products
from cores import dtypes_here
from processes import Group, be_quiet, open_groups
from table import Findings, Parity, ParityError, Row, faster, parser, run, smaller, turns_within
from tp_vs_peft import (
    LEARNING_RATE,
    MODEL,
    RANK,
    TINY,
    TOLERANCE,
    Candidate,
    Shape,
    System,
    Turn,
    load,
    make_checkpoint,
    tokens,
)

DTYPES = ("bfloat16", "float32")
LIMIT_BFLOAT16 = 4.0  # times PEFT's own distance from float32


def systems_of(dtype: str) -> tuple[System, System, System]:
    """(ours, the reference, PEFT with the Trainer) beside a base of `dtype`."""
    kinds = {"meshlora": "meshlora", "PEFT, plain loop": "peft", "PEFT, transformers Trainer": "trainer"}
    ours, reference, trainer = (System(f"{name}, {dtype}", kind, dtype=dtype) for name, kind in kinds.items())
    return ours, reference, trainer


SHAPES, QUICK, TINY_SHAPES = (Shape(256, 1), Shape(32, 1), Shape(1024, 1)), (Shape(256, 1),), (Shape(16, 1),)
TARGET_TIME, TARGET_MEMORY = {"bfloat16": 1.1, "float32": 1.0}, 0.7


# --- the systems: all of this runs in their processes ---------------------------------------------------------------

_held: dict[str, Any] = {}


def open_system(system: System, folder: Path) -> None:
    candidate = load(replace(system, kind="peft") if system.kind == "trainer" else system, folder)
    _held.update(candidate=candidate, system=system, folder=folder)


def first_gradients(shape: Shape) -> tuple[float, dict[str, Tensor]]:
    """The loss and every LoRA gradient, before any optimizer step."""
    candidate: Candidate = _held["candidate"]
    candidate.optimizer.zero_grad(set_to_none=True)
    loss = candidate.gradients(*tokens(candidate, shape))
    return loss, {name: p.grad for name, p in candidate.factors().items() if p.grad is not None}


def time_steps(shape: Shape, steps: int) -> list[tuple[float, float]]:
    """Seconds and CPU seconds of each of `steps` steps, after one that warms the caches up again."""
    if _held["system"].kind == "trainer":
        return _time_trainer(shape, steps)
    candidate = _held["candidate"]
    batch = tokens(candidate, shape)
    clock = _Clock()
    for _ in range(steps + 1):
        candidate.step(*batch)
        clock.tick()
    return clock.times[1:]


class _Clock(TrainerCallback):
    """When steps ended."""

    def __init__(self) -> None:
        self.times: list[tuple[float, float]] = []
        self._last = self._now()

    @staticmethod
    def _now() -> tuple[float, float]:
        return time.perf_counter(), time.process_time()

    def tick(self) -> None:
        now = self._now()
        self.times.append((now[0] - self._last[0], now[1] - self._last[1]))
        self._last = now

    def on_step_end(self, *_args: Any, **_kwargs: Any) -> None:
        self.tick()


def _time_trainer(shape: Shape, steps: int) -> list[tuple[float, float]]:
    ids, labels = tokens(_held["candidate"], shape)
    # transformers shifts by itself: of the same tokens, one prediction less a sequence.
    rows = [{"input_ids": ids[0], "attention_mask": torch.ones_like(ids[0]), "labels": labels[0]}] * (steps + 1)
    clock = _Clock()
    arguments = TrainingArguments(
        output_dir=str(_held["folder"] / "trainer"),
        per_device_train_batch_size=1,
        max_steps=steps + 1,
        learning_rate=LEARNING_RATE,
        optim="adamw_torch_fused",
        lr_scheduler_type="constant",
        report_to=[],
        logging_strategy="no",
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        bf16=_held["system"].dtype == "bfloat16",
    )
    Trainer(_held["candidate"].model, arguments, train_dataset=rows, callbacks=[clock]).train()
    return clock.times[1:]


def saved(shape: Shape) -> int:
    """Bytes that autograd saves in a step."""
    candidate: Candidate = _held["candidate"]
    candidate.optimizer.zero_grad(set_to_none=True)
    with SavedBytes(candidate.model) as found:
        candidate.gradients(*tokens(candidate, shape))
    return found.total


def peak(shape: Shape) -> int:
    """The most bytes that a step of forward, loss and backward holds beyond what was there before it."""
    candidate: Candidate = _held["candidate"]
    candidate.step(*tokens(candidate, shape))
    candidate.optimizer.zero_grad(set_to_none=True)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        candidate.gradients(*tokens(candidate, shape))
    held = most = 0
    for event in sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most


# --- the run --------------------------------------------------------------------------------------------------------


def check_parity(
    groups: dict[str, Group], shapes: Sequence[Shape], dtypes: Sequence[str]
) -> dict[str, dict[str, float]]:
    """By shape: "float32", the worst relative difference of loss and gradients from PEFT; "bfloat16", the most that a
    gradient is further off PEFT's float32 one than PEFT's bfloat16 one is.

    Raises:
        ParityError: one is above its limit.
    """
    worst: dict[str, dict[str, float]] = {}
    for shape in shapes:
        found = {
            (dtype, kind): groups[system.name].call(first_gradients, shape)[0]
            for dtype in dtypes
            for kind, system in zip(("ours", "peft"), systems_of(dtype), strict=False)
        }
        loss, exact = found["float32", "peft"]
        if any(gradients.keys() != exact.keys() for _, gradients in found.values()):
            raise RuntimeError("the factors are not the same")

        def off(dtype: str, kind: str, name: str, exact: Any = exact, found: Any = found) -> float:
            return float((found[dtype, kind][1][name] - exact[name]).norm() / exact[name].norm())

        differences = [off("float32", "ours", name) for name in exact]
        worst[str(shape)] = {"float32": max(abs(found["float32", "ours"][0] - loss) / abs(loss), *differences)}
        if "bfloat16" in dtypes:
            further = [off("bfloat16", "ours", name) / off("bfloat16", "peft", name) for name in exact]
            worst[str(shape)]["bfloat16"] = max(further)
        for dtype, limit in (("float32", TOLERANCE), ("bfloat16", LIMIT_BFLOAT16)):
            if dtype in dtypes and not worst[str(shape)][dtype] <= limit:
                raise ParityError(f"{dtype}, {shape}, against PEFT", worst[str(shape)][dtype], limit)
    return worst


def products_alone(shape: Shape, steps: int) -> list[float]:
    """Seconds of each of `steps` times the products of the base's own matrices."""
    return time_products(_held["candidate"].model, shape.seq_len * shape.batch_size, steps)


def measure_times(
    groups: dict[str, Group], shapes: Sequence[Shape], turns: Iterable[int], steps: int
) -> dict[Shape, dict[str, list[Turn]]]:
    """By shape and system, of each turn; and of the products of the base alone, in the reference's process."""
    times: dict[Shape, dict[str, list[Turn]]] = {shape: {name: [] for name in groups} for shape in shapes}
    for _ in turns:
        for shape in shapes:
            for name, group in groups.items():
                wall, cpu = zip(*group.call(time_steps, shape, steps)[0], strict=True)
                times[shape][name].append(Turn(list(wall), list(cpu)))
                if group.system.kind == "peft":
                    alone = group.call(products_alone, shape, steps)[0]
                    times[shape].setdefault(products_of(group.system.dtype), []).append(Turn(alone, alone))
    return times


def products_of(dtype: str) -> str:
    """The name of their times."""
    return f"the base's products alone, {dtype}"


def measure_memory(groups: dict[str, Group], shapes: Sequence[Shape]) -> dict[Shape, dict[str, dict[str, int]]]:
    """shape -> system -> {"saved": bytes, "peak": bytes}; the Trainer runs the plain loop's forward and backward."""
    kinds: dict[str, Callable[[Shape], int]] = {"saved": saved, "peak": peak}
    return {
        shape: {
            system.name: {kind: groups[system.name].call(measure, shape)[0] for kind, measure in kinds.items()}
            for system in (group.system for group in groups.values())
            if system.kind != "trainer"
        }
        for shape in shapes
    }


def rows_of(
    times: dict[Shape, dict[str, list[Turn]]],
    memory: dict[Shape, dict[str, dict[str, int]]],
    dtypes: Sequence[str],
    tiny: bool,
) -> list[Row]:
    """A step against either peer, the least a step can take, and the memory of a step against PEFT."""
    rows = []
    for dtype in dtypes:
        ours, reference, trainer = systems_of(dtype)
        asked = dtype == dtypes[0] and not tiny
        for shape, systems in times.items():
            what = f"{dtype} base, one process, {shape}"
            in_turn = {name: [turn.median_ms for turn in turns] for name, turns in systems.items()}
            peers = {"ours_name": ours.name.partition(",")[0], "unit": "ms"}
            for peer in (reference, trainer):
                target = TARGET_TIME[dtype] if asked and peer is reference else None
                name = peer.name.removesuffix(f", {dtype}")
                rows.append(
                    faster(what, in_turn[ours.name], in_turn[peer.name], peer_name=name, target=target, **peers)
                )
            alone = in_turn[products_of(dtype)]
            names = {"ours_name": "the base's products alone", "peer_name": "PEFT, plain loop", "unit": "ms"}
            rows.append(faster(f"the most there is to win: {what}", alone, in_turn[reference.name], **names))
            for kind, kept, target in (
                ("saved", "activations that autograd keeps", TARGET_MEMORY),
                ("peak", "most allocated in a step", None),
            ):
                mib = {name: [found[kind] / 2**20] for name, found in memory[shape].items()}
                rows.append(
                    smaller(
                        f"{kept}, {what}",
                        ours=mib[ours.name],
                        peer=mib[reference.name],
                        unit="MiB",
                        ours_name="meshlora",
                        peer_name="PEFT, plain loop",
                        target=None if tiny else target,
                    )
                )
    return rows


def measure(options: argparse.Namespace) -> Findings:
    """Parity, then memory, then times."""
    shapes, number = (QUICK, 4) if options.quick else (SHAPES, options.turns)
    dtypes = dtypes_here(DTYPES)
    sizes = TINY if options.tiny else {"max_position_embeddings": 1024}
    shapes = TINY_SHAPES if options.tiny else shapes
    with tempfile.TemporaryDirectory() as name:
        folder = make_checkpoint(Path(name), **sizes)
        systems = [system for dtype in dtypes for system in systems_of(dtype)]
        with open_groups(dict.fromkeys(systems, 1), Path(name), open_system, folder) as groups:
            parity = check_parity(groups, shapes, dtypes)
            memory = measure_memory(groups, shapes)
            times = measure_times(groups, shapes, turns_within(number, options), 3)
    details = {
        "model": {**MODEL, **sizes, "lora_rank": RANK, "dtypes": dtypes},
        "parity": parity,
        "memory_bytes": {str(shape): found for shape, found in memory.items()},
        "times": {str(s): {n: [vars(turn) for turn in found] for n, found in by.items()} for s, by in times.items()},
    }
    what = "loss and every gradient of step 1, float32, against PEFT"
    if "bfloat16" in dtypes:
        further = max(found["bfloat16"] for found in parity.values())
        what = (
            f"every gradient of step 1: bfloat16 at most {further:.2f} times as far off PEFT's float32 one as PEFT's "
            f"own bfloat16 one is (limit {LIMIT_BFLOAT16:g}); float32, and the loss, against PEFT"
        )
    worst = max(found["float32"] for found in parity.values())
    return Findings(Parity(what, worst, TOLERANCE, agrees=True), rows_of(times, memory, dtypes, options.tiny), details)


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--turns", type=int, default=10, help="of each system and shape, 3 timed steps each")
    options = made.parse_args()
    be_quiet()
    return run("LoRA on one process: meshlora against PEFT", options, measure, name="dense_vs_peft")


if __name__ == "__main__":
    sys.exit(main())

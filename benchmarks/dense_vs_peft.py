"""One process: meshlora against PEFT with a plain loop, and PEFT with transformers' Trainer. Step time and memory.

    python benchmarks/dense_vs_peft.py [--quick] [--steps N] [--json FILE]

Every system has a process of its own, the same random checkpoint and the same adapter. Before anything is timed, the
loss and every LoRA gradient of the first step are compared with PEFT's: a system that disagrees ends the benchmark. A
step is forward, loss, backward, fused AdamW. The systems take turns, a few steps at a time. Memory is counted twice:
what autograd saves (each storage once, without parameters; the same on every machine), and the most that a step
allocates beyond what was there before it.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from activation_memory import SavedBytes
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from tp_vs_peft import (
    BLOCK,
    LEARNING_RATE,
    MODEL,
    RANK,
    TOLERANCE,
    Candidate,
    Shape,
    System,
    hardware,
    load,
    make_checkpoint,
)
from transformers import Trainer, TrainerCallback, TrainingArguments

import meshlora
from processes import Group, batch_of, be_quiet, open_groups

REFERENCE = System("PEFT, plain loop", "peft")
TRAINER = System("PEFT, transformers Trainer", "trainer")
OURS = System("meshlora", "meshlora")
SYSTEMS = (OURS, REFERENCE, TRAINER)
SHAPES = (Shape(256, 1), Shape(32, 1), Shape(1024, 1))
TARGET_TIME, TARGET_MEMORY = 1.1, 0.7


# --- the systems: all of this runs in their processes ---------------------------------------------------------------

_held: dict[str, Any] = {}


def open_system(system: System, folder: Path) -> None:
    candidate = load(REFERENCE if system.kind == "trainer" else system, folder)
    _held.update(candidate=candidate, system=system, folder=folder)


def first_gradients(shape: Shape) -> tuple[float, dict[str, Tensor]]:
    """The loss and every LoRA gradient, before any optimizer step."""
    candidate: Candidate = _held["candidate"]
    candidate.optimizer.zero_grad(set_to_none=True)
    loss = candidate.gradients(*_batch(shape))
    return loss, {name: p.grad for name, p in candidate.factors().items() if p.grad is not None}


def time_steps(shape: Shape, steps: int) -> list[tuple[float, float]]:
    """Seconds and CPU seconds of each of `steps` steps, after one that warms the caches up again."""
    if _held["system"].kind == "trainer":
        return _time_trainer(shape, steps)
    candidate, batch = _held["candidate"], _batch(shape)
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
    ids, labels = _batch(shape)
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
    )
    Trainer(_held["candidate"].model, arguments, train_dataset=rows, callbacks=[clock]).train()
    return clock.times[1:]


def saved(shape: Shape) -> int:
    """Bytes that autograd saves in a step."""
    candidate: Candidate = _held["candidate"]
    candidate.optimizer.zero_grad(set_to_none=True)
    with SavedBytes(candidate.model) as found:
        candidate.gradients(*_batch(shape))
    return found.total


def peak(shape: Shape) -> int:
    """The most bytes that a step of forward, loss and backward holds beyond what was there before it."""
    candidate: Candidate = _held["candidate"]
    candidate.step(*_batch(shape))
    candidate.optimizer.zero_grad(set_to_none=True)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        candidate.gradients(*_batch(shape))
    held = most = 0
    for event in sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most


def _batch(shape: Shape) -> tuple[Tensor, Tensor]:
    return batch_of(shape.batch_size, shape.seq_len, MODEL["vocab_size"])


# --- the run --------------------------------------------------------------------------------------------------------


def check_parity(groups: dict[str, Group], shapes: tuple[Shape, ...]) -> dict[str, float]:
    """Worst relative difference from PEFT of loss and gradients, by shape.

    Raises:
        RuntimeError: one is above `TOLERANCE`.
    """
    worst = {}
    for shape in shapes:
        (loss, ours), (expected_loss, expected) = (
            groups[system.name].call(first_gradients, shape)[0] for system in (OURS, REFERENCE)
        )
        if ours.keys() != expected.keys():
            raise RuntimeError("the factors are not the same")
        differences = [float((ours[n] - expected[n]).norm() / expected[n].norm()) for n in expected]
        worst[str(shape)] = max(abs(loss - expected_loss) / abs(expected_loss), *differences)
        if not worst[str(shape)] <= TOLERANCE:
            raise RuntimeError(f"{shape}: {worst[str(shape)]:.1e} off PEFT; no times are printed")
    return worst


def measure_times(groups: dict[str, Group], shapes: tuple[Shape, ...], steps: int) -> dict[str, Any]:
    """shape -> system -> clock -> seconds of each step."""
    times: dict[str, Any] = {str(shape): {name: {"wall": [], "cpu": []} for name in groups} for shape in shapes}
    for done in range(0, steps, BLOCK):
        for shape in shapes:
            for name, group in groups.items():
                for wall, cpu in group.call(time_steps, shape, min(BLOCK, steps - done))[0]:
                    times[str(shape)][name]["wall"].append(wall)
                    times[str(shape)][name]["cpu"].append(cpu)
    return times


def measure_memory(groups: dict[str, Group], shapes: tuple[Shape, ...]) -> dict[str, Any]:
    """shape -> system -> {"saved": bytes, "peak": bytes}; the Trainer runs the plain loop's forward and backward."""
    kinds: dict[str, Callable[[Shape], int]] = {"saved": saved, "peak": peak}
    return {
        str(shape): {
            system.name: {kind: groups[system.name].call(measure, shape)[0] for kind, measure in kinds.items()}
            for system in (OURS, REFERENCE)
        }
        for shape in shapes
    }


def _ratio(typical: Callable[[list[float]], float], theirs: list[float], ours: list[float]) -> str:
    return f"{typical(theirs) / typical(ours):.2f}×"


def report(results: dict[str, Any]) -> str:
    """The Markdown page."""
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    lines = [
        "# LoRA on one process: meshlora against PEFT",
        "",
        f"Llama, hidden {MODEL['hidden_size']}, {MODEL['num_hidden_layers']} layers, intermediate "
        f"{MODEL['intermediate_size']}, vocab {MODEL['vocab_size']}, LoRA r={RANK} on all seven linears, fp32,",
        "one thread, fused AdamW on all sides.",
        "",
        f"- hardware: {results['hardware']}",
        f"- versions: {versions}",
        f"- command: `{results['command']}`",
        f"- the systems take turns, {BLOCK} steps at a time; CPU time hardly moves where the machine is shared",
    ]
    for shape, systems in results["times_s"].items():
        lines += [
            "",
            f"## {shape}",
            "",
            f"Loss and gradients of the first step: {results['parity'][shape]:.0e} off PEFT.",
            "",
            f"| system | median step | min..max | median CPU time | {OURS.name} is faster by: median, fastest, CPU |",
            "|---|---|---|---|---|",
        ]
        ours = systems[OURS.name]
        for name, times in systems.items():
            wall, cpu = times["wall"], times["cpu"]
            lines.append(
                f"| {name} | {1e3 * statistics.median(wall):.0f} ms | {1e3 * min(wall):.0f}..{1e3 * max(wall):.0f} ms "
                f"| {1e3 * statistics.median(cpu):.0f} ms "
                f"| {_ratio(statistics.median, wall, ours['wall'])}, {_ratio(min, wall, ours['wall'])}, "
                f"{_ratio(statistics.median, cpu, ours['cpu'])} |"
            )
        lines += ["", "| memory of a step | saved by autograd | most allocated |", "|---|---|---|"]
        memory = results["memory_bytes"][shape]
        for name, found in memory.items():
            shares = (f"{found[k] / 2**20:.1f} MiB ({found[k] / memory[REFERENCE.name][k]:.0%})" for k in found)
            lines.append(f"| {name} | {' | '.join(shares)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=30, help="timed steps per system and shape")
    parser.add_argument("--quick", action="store_true", help="one shape, six steps")
    default = Path(__file__).parent / "results" / f"dense_vs_peft_{hardware()}_{time.strftime('%Y%m')}.json"
    parser.add_argument("--json", type=Path, default=default, help="the numbers go there, and a page beside them")
    options = parser.parse_args()
    shapes, steps = (SHAPES[:1], 6) if options.quick else (SHAPES, options.steps)
    be_quiet()
    with tempfile.TemporaryDirectory() as name:
        folder = make_checkpoint(Path(name), max_position_embeddings=1024)
        with open_groups({system: 1 for system in SYSTEMS}, Path(name), open_system, folder) as groups:  # noqa: C420
            parity = check_parity(groups, shapes)
            memory = measure_memory(groups, shapes)
            times = measure_times(groups, shapes, steps)
    results = {
        "hardware": hardware(),
        "command": " ".join(["python", *sys.argv]),
        "versions": {
            "meshlora": meshlora.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "peft": peft.__version__,
            "python": platform.python_version(),
        },
        "targets": {"time": TARGET_TIME, "saved": TARGET_MEMORY},
        "parity": parity,
        "memory_bytes": memory,
        "times_s": times,
    }
    page = report(results)
    print(page)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(results, indent=1) + "\n")
    options.json.with_suffix(".md").write_text(page)


if __name__ == "__main__":
    main()

"""Where a step on a GPU goes: its kernels by class, the time the GPU is busy, and the host's time to enqueue them.

Owns: the classes, and one step under torch's profiler. Does not own: whose step it is (gpu.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from gpu_machine import Machine

# Words of a kernel's name, the first class that has one of them: a fused copy is an elementwise kernel too.
CLASSES = {
    "attention": ("flash", "fmha", "attention", "sdpa", "dot_do_o", "convert_dq"),
    "gemm": ("gemm", "nvjet", "cutlass", "xmma", "cublas", "splitk", "mm"),
    "optimizer": ("multi_tensor", "adam"),
    "copy": ("copy", "memcpy", "memset", "catarray", "::cat", "fill"),
    "norm": ("norm", "rms"),
    "fused": ("triton", "liger", "swiglu", "_rope"),
    "loss and lookups": ("softmax", "nll", "cross", "index", "gather", "embedding", "scatter"),
    "reduce": ("reduce", "sum"),
    "elementwise": ("elementwise", "vectorized", "unrolled", "mul", "add"),
}


@dataclass(frozen=True)
class Step:
    """One step. Times in seconds.

    Attributes:
        step_time_s, host_s: without the profiler: the whole step, and until the host had enqueued all of it.
        busy_s: the device had a kernel. num_kernels: and copies.
        classes: class -> (seconds, kernels), the longest first.
    """

    step_time_s: float
    host_s: float
    busy_s: float
    num_kernels: int
    classes: Mapping[str, tuple[float, int]]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def class_of(kernel: str) -> str:
    """The class of a kernel, by its name."""
    name = kernel.lower()
    return next((kind for kind, words in CLASSES.items() if any(word in name for word in words)), "other")


def kernels_of(step: Callable[[], object], machine: Machine) -> Step:
    """Of one call of `step`, which must be warm."""
    step()
    machine.synchronize()
    started = time.perf_counter()
    step()
    host_s = time.perf_counter() - started
    machine.synchronize()
    step_time_s = time.perf_counter() - started
    # Operators beside kernels would take seconds to read.
    with profile(activities=[ProfilerActivity.CUDA if machine.is_gpu else ProfilerActivity.CPU]) as seen:
        step()
        machine.synchronize()
    kind = torch.autograd.DeviceType.CUDA if machine.is_gpu else torch.autograd.DeviceType.CPU
    spans = []
    for event in seen.events():
        if event.device_type == kind and not event.is_user_annotation:
            begin, end = event.time_range.start, event.time_range.end
            # Operators stand for kernels on a CPU, without those that they call.
            spans.append((begin, end if machine.is_gpu else begin + event.self_cpu_time_total, event.name))
    return Step(step_time_s, host_s, busy_s(spans), len(spans), by_class(spans))


def busy_s(spans: Iterable[tuple[float, float, str]]) -> float:
    """Seconds in which at least one of `spans` (begin, end, name), in microseconds, runs."""
    total, until = 0.0, float("-inf")
    for begin, end, _ in sorted(spans):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total / 1e6


def by_class(spans: Iterable[tuple[float, float, str]]) -> dict[str, tuple[float, int]]:
    """Class -> (seconds, number), the longest first."""
    found: dict[str, tuple[float, int]] = {}
    for begin, end, name in spans:
        seconds, number = found.get(class_of(name), (0.0, 0))
        found[class_of(name)] = (seconds + (end - begin) / 1e6, number + 1)
    return dict(sorted(found.items(), key=lambda item: -item[1][0]))


def table_of(steps: Mapping[str, Mapping[str, Any]]) -> str:
    """Markdown: a row for each system's step (`Step.as_dict`), milliseconds and in brackets kernels of each class."""
    names = list(dict.fromkeys(name for step in steps.values() for name in step["classes"]))
    head = ["system", "step", "host enqueues in", "GPU busy", "kernels", *names]
    lines = [head, ["---"] * len(head)]
    for system, step in steps.items():
        cells = [system, *(f"{1e3 * step[name]:.0f} ms" for name in ("step_time_s", "host_s", "busy_s"))]
        cells.append(f"{step['num_kernels']:,}")
        for name in names:
            seconds, number = step["classes"].get(name, (0.0, 0))
            cells.append(f"{1e3 * seconds:.1f} ({number:,})" if number else "–")
        lines.append(cells)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)

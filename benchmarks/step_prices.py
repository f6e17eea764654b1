"""What a counted step takes on a GPU, by classes of operators; and the same beside what a GPU took.

Owns: from operators to the time of a step, eager and replayed; reading measured classes; the table of both. Does not
own: counting (`step_kernels`), the prices (`meshlora_extra.planner.hardware`), measuring (`gpu_kernels`).
"""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshlora_extra.planner.fake import Work
from meshlora_extra.planner.hardware import Hardware, card_of
from meshlora_ground.errors import UserError
from table import RESULTS

CLASSES = ("products", "attention", "everything else")
# Operators of our steps as they were when cards were measured: `step_kernels.py --counts-of 7faf18f9`.
COUNTS = RESULTS / "step_counts_202611.json"
# Of gpu.py -> of step_kernels.py.
SYSTEMS = {"meshlora": "meshlora", "meshlora + liger": "with liger", "PEFT + SDPA": "PEFT"}

_OF_KERNELS = {"gemm": "products", "attention": "attention"}  # classes of gpu_kernels.py

Counts = Mapping[Work, float]  # cost of an operator -> how often


def class_of(work: Work) -> str:
    """Products, attention, or everything else: what reads and writes."""
    if work.is_attention:
        return "attention"
    return "products" if work.flops else "everything else"


def busy_by_class(work: Counts, gpu: Hardware) -> dict[str, float]:
    """Class -> seconds in which the GPU has work of it."""
    parts = {name: Counter[Work]() for name in CLASSES}
    for one, number in work.items():
        parts[class_of(one)][one] += number  # type: ignore[assignment] # of the ints that a counter counts
    return {name: gpu.busy_s(part, is_half=True) for name, part in parts.items()}


def eager_s(work: Counts, gpu: Hardware, *, waits: bool) -> float:
    """A step whose operators the host launches one by one.

    waits: the GPU waits for the host in it, besides (`Hardware.wait_s`). Not of PEFT: 2 to 13 ms were seen of it where
    ours had 16 to 30, and none of it is counted in our favour.
    """
    busy_s = gpu.busy_s(work, is_half=True)
    return max(busy_s + (gpu.waits_s if waits else 0.0), gpu.launches_s(work))


def replayed_s(record: Counts, beside: Counts, gpu: Hardware) -> float:
    """A step with `train.cuda_graphs`: its record, which is one launch, and what is launched before and after it, of
    which nothing is taken to be hidden by the replay.
    """
    launches_s = gpu.kernel_s + gpu.launches_s(beside)
    return gpu.busy_s(record, is_half=True) + max(gpu.busy_s(beside, is_half=True), launches_s)


# --- measured -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Seen:
    """A measured step, in seconds. step_s: the median of its turns, without a profiler."""

    shape: str
    system: str
    classes: Mapping[str, float]
    busy_s: float
    step_s: float


def measured(document: Mapping[str, Any]) -> tuple[Hardware, list[Seen]]:
    """(The card, its steps by classes of kernels) of a file of gpu.py or scripts/prove_on_gpu.py.

    Raises:
        UserError: the planner's table has no such card.
    """
    found = list(_details(document))
    name = found[0]["device"] if found else document.get("card", "")
    gpu = card_of(name)
    if gpu is None:
        raise UserError(f"--beside: {name!r}", "the planner's table has no such card", "give a file of one that it has")
    seen = []
    for details in found:
        for shape, own in details["shapes"].items():
            for system, step in (own.get("kernels") or {}).items():
                turns = [turn["step_time_s"] for turn in own["runs"]["one sequence"].get(system, [])]
                classes = dict.fromkeys(CLASSES, 0.0)
                for kind, (seconds, _) in step["classes"].items():
                    classes[_OF_KERNELS.get(kind, "everything else")] += seconds
                step_s = statistics.median(turns) if turns else step["step_time_s"]
                seen.append(Seen(shape, system, classes, step["busy_s"], step_s))
    return gpu, seen


def _details(document: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    if "parts" not in document:  # of gpu.py
        yield document["details"]
        return
    for steps in document["parts"].values():
        for line in steps.values():
            if "shapes" in line["data"].get("details", {}):
                yield line["data"]["details"]


def read_counts(file: Path) -> dict[str, dict[str, Counter[Work]]]:
    """Shape -> system -> operators, as `step_kernels.py --counts-of` has written them."""
    stored = json.loads(file.read_text("utf-8"))["steps"]
    found: dict[str, dict[str, Counter[Work]]] = {}
    for shape, systems in stored.items():
        for system, rows in systems.items():
            counts = found.setdefault(shape, {}).setdefault(system, Counter())
            for flops, num_bytes, is_attention, number in rows:
                counts[Work(flops, num_bytes, bool(is_attention))] += number
    return found


# --- both -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Compared:
    """A step, (predicted, measured) in seconds: of each class, of "busy" and of "step"."""

    seen: Seen
    pairs: Mapping[str, tuple[float, float]]


def compare(document: Mapping[str, Any], peft: Callable[[str], Counts], counts: Path = COUNTS) -> list[Compared]:
    """Each measured step of which operators are counted. peft: shape -> those of a step of PEFT, which is not ours to
    change: as it is counted today.
    """
    gpu, steps = measured(document)
    ours = read_counts(counts)
    found = []
    for seen in steps:
        system = SYSTEMS.get(seen.system)
        if system is None or (system != "PEFT" and system not in ours.get(seen.shape, {})):
            continue
        work = peft(seen.shape) if system == "PEFT" else ours[seen.shape][system]
        predicted = busy_by_class(work, gpu)
        pairs = {name: (predicted[name], seen.classes[name]) for name in CLASSES}
        pairs["busy"] = sum(predicted.values()), seen.busy_s
        pairs["step"] = eager_s(work, gpu, waits=system != "PEFT"), seen.step_s
        found.append(Compared(seen, pairs))
    return found


def table_of(found: list[Compared]) -> str:
    """Markdown: a row for each step, predicted / measured in milliseconds."""
    names = [*CLASSES, "busy", "step"]
    lines = [["shape, system", *names], ["---"] * (1 + len(names))]
    for one in found:
        cells = [f"{one.seen.shape}, {one.seen.system}"]
        for name in names:
            said, seen = one.pairs[name]
            cells.append(f"{1e3 * said:.1f} / {1e3 * seen:.1f} ({said / seen - 1:+.0%})")
        lines.append(cells)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)

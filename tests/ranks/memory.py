"""Memory that a process needs beyond what it has, and models that are large and quickly made."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from tests.pool import Pool


def model_of_zeros(config: Any, dtype: torch.dtype) -> Any:
    """Drawing weights takes longer than all that is then done with them."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    return model


def in_a_process_of_its_own(function: Callable[..., Any], *given: Any) -> Any:
    """`function(*given)` where nothing was freed before that could be taken again."""
    pool = Pool(1)
    try:
        return pool.run(function, *given)[0]
    finally:
        pool.close()


def growth_of_peak(make: Callable[[], Any]) -> tuple[int, int, int]:
    """Of a model: bytes of memory that this process needed more while `make` made it, its own, its largest tensor's."""
    # Not ru_maxrss: a child inherits its parent's at the fork.
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = _status("VmRSS")
    model = make()
    after = _status("VmHWM")
    sizes = [p.numel() * p.element_size() for p in model.parameters()]
    return after - before, sum(sizes), max(sizes)


def _status(key: str) -> int:
    return int(Path("/proc/self/status").read_text().split(key + ":")[1].split()[0]) * 1024

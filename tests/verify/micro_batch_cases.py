"""A step with one micro-batch, and one with five: what of the faults that need that must come out."""

from __future__ import annotations

from typing import Any

_LAST_MLP = "model.layers.1.mlp"
MICRO_BATCHES: dict[str, tuple[dict[str, Any], dict[str, tuple[str, str, str]]]] = {
    "five micro-batches a step": (
        {"family": "llama", "topologies": ("tp=2",), "micro_batch_size": 1},
        {"fourth_micro_batch_dropped": ("gradients", f"{_LAST_MLP}.down_proj.lora_B", "")},
    ),
    "one micro-batch a step": (
        {"family": "qwen3_moe", "topologies": ("dp=2",), "micro_batch_size": 5},
        {"balance_of_one_micro_batch_counted_locally": ("loss", "load-balancing loss of step 1", "")},
    ),
}

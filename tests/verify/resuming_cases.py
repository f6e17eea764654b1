"""A run that is stopped and goes on: what of its faults must come out."""

from __future__ import annotations

from typing import Any

from meshlora.verify.mutations_of_resuming import OF_RESUMING
from meshlora.verify.request import DROPOUT

_FIRST = "model.layers.0.self_attn.q_proj"
_MOMENTS = ("deltas", f"{_FIRST}.lora_A", "what the optimizer makes of them")
RESUMING: dict[str, tuple[dict[str, Any], dict[str, tuple[str, str, str]]]] = {
    "a run that is stopped and goes on": (
        {"family": "llama", "topologies": ("tp=2,sp",), "resume": True, "default_dropout": DROPOUT},
        dict.fromkeys(OF_RESUMING, _MOMENTS)
        | {
            "moments_of_another_rank": ("deltas", f"{_FIRST}.lora_B", "what the optimizer makes of them"),
            "resumed_one_step_late": ("deltas", f"{_FIRST}.lora_A", "2 optimizer steps were taken, not 3"),
            "order_begins_again": ("deltas", f"{_FIRST}.lora_A", "later ones take other sequences"),
            "schedule_begins_again": ("deltas", f"{_FIRST}.lora_A", "learning rate of step 3 is 0.01, not 0.005"),
        },
    ),
}

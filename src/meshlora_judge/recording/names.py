"""PEFT's names for the trained parameters of a model that is not PEFT's: a table, or a function of one's own.

record(model, "seen", adapter=LoraConfig(...), names=megatron)
record(model, "seen", adapter=LoraConfig(...), names={"layers.0.wo.lora_a": "base_model.model..."})
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from meshlora_ground.errors import UnsupportedError

Names = Mapping[str, str] | Callable[[str], str] | None

# Megatron-core's modules, as Megatron-Bridge's LoRA and CanonicalLoRA wrap them: (module, part) -> Llama's.
_MEGATRON = {
    ("self_attention.linear_proj", ""): "self_attn.o_proj",
    ("self_attention.linear_qkv", "adapter_q"): "self_attn.q_proj",
    ("self_attention.linear_qkv", "adapter_k"): "self_attn.k_proj",
    ("self_attention.linear_qkv", "adapter_v"): "self_attn.v_proj",
    ("mlp.linear_fc1", "adapter_gate"): "mlp.gate_proj",
    ("mlp.linear_fc1", "adapter_up"): "mlp.up_proj",
    ("mlp.linear_fc2", ""): "mlp.down_proj",
}
_OF_MEGATRON = re.compile(
    r"(?:.*\.)?decoder\.layers\.(\d+)\.([a-z_]+\.[a-z_0-9]+)\.adapter\.(?:(adapter_\w+)\.)?linear_(in|out)\.weight"
)


def as_function(names: Names) -> Callable[[str], str]:
    """Of a table: what it lacks keeps its name."""
    if names is None:
        return str
    if callable(names):
        return names
    table = dict(names)
    return lambda name: table.get(name, name)


def megatron(name: str) -> str:
    """PEFT's name of a LoRA parameter of Megatron-core; of another parameter its own.

    Raises: UnsupportedError: it adapts a fused linear as one, for which PEFT has no counterpart.
    """
    if not (match := _OF_MEGATRON.fullmatch(name)):
        return name
    layer, module, part, side = match.groups()
    if (theirs := _MEGATRON.get((module, part or ""))) is None:
        way_out = "CanonicalLoRA adapts q, k, v, gate and up each by itself"
        raise UnsupportedError(name, "it adapts a fused linear, and PEFT has no such factor", way_out)
    factor = "lora_A" if side == "in" else "lora_B"
    return f"base_model.model.model.layers.{layer}.{theirs}.{factor}.default.weight"

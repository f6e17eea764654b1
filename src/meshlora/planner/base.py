"""What a rank holds of the frozen base: shapes and bytes of its tensors, whole, packed or sharded over dp.

Owns: the tensors that stand for a parameter of the base on a rank (`held`), and `BaseStates`. Does not own: adapters,
the peak of a step (`planner.memory`); which linears are packed (`plan.quantization`) and which parameters are sharded
(`plan.rules`).

torch's `fully_shard` cuts dim 0 into equal parts, the last of which is filled up: every rank holds, and sends, the rows
of the largest part.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from meshlora.plan.layout import Split
from meshlora.plan.quantization import BLOCK, KINDS
from meshlora.plan.rules import ModelPlan
from meshlora.plan.topology import DATA
from meshlora.planner.kinds import Shrunk


@dataclass(frozen=True)
class Held:
    """A tensor of the base on a rank, before dp shards it: its shape, bytes of an element."""

    shape: tuple[int, ...]
    itemsize: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.itemsize

    def shard_bytes(self, dp: int) -> int:
        """Of the part that each of `dp` ranks holds: rows, filled up to as many on every rank."""
        return -(-self.shape[0] // dp) * math.prod(self.shape[1:]) * self.itemsize


@dataclass(frozen=True)
class BaseStates:
    """Bytes on a rank. weights: that it keeps. shards: of those, what it puts into the gather of a layer of each kind;
    empty without dp_shard.
    """

    weights: int
    shards: tuple[int, ...] = ()


def base_states(shrunk: Shrunk, plan: ModelPlan, targets: Collection[str]) -> BaseStates:
    """The base of the model that `shrunk` is of. plan: of the shrunk model. targets: names of what carries LoRA."""
    weights = 0
    shards = [0] * shrunk.num_kinds
    for name, parameter in shrunk.model.named_parameters():
        for tensor in held(name, parameter.shape, parameter.dtype, plan, targets):
            kind = shrunk.kind_of(name)
            num_bytes = tensor.num_bytes
            if plan.is_sharded(name, ndim=len(tensor.shape)):
                assert kind is not None, name
                num_bytes = tensor.shard_bytes(plan.topology.size_over(DATA))
                shards[kind] += num_bytes
            weights += shrunk.times(name) * num_bytes
    return BaseStates(weights, tuple(shards) if plan.units else ())


def held(
    name: str, shape: Sequence[int], dtype: torch.dtype, plan: ModelPlan, targets: Collection[str]
) -> tuple[Held, ...]:
    """What a rank holds of the base's parameter `name`, of whole shape `shape`; where it is packed, numbers and scales.

    targets: names of what carries LoRA: a linear that is not ours keeps the shape in which it is stored.
    """
    owner, _, leaf = name.rpartition(".")
    local = _local_shape(name, shape, plan, targets)
    if owner not in plan.quantized or leaf != "weight":
        return (Held(local, dtype.itemsize),)
    assert plan.quantization is not None
    out, inside = local
    codes = Held((out, inside * KINDS[plan.quantization] // 8), torch.uint8.itemsize)
    return codes, Held((out, inside // BLOCK), torch.float32.itemsize)


def _local_shape(name: str, shape: Sequence[int], plan: ModelPlan, targets: Collection[str]) -> tuple[int, ...]:
    tp = plan.topology.tp
    owner, _, leaf = name.rpartition(".")
    if name in plan.parameters:
        rule = plan.parameters[name]
        return (*shape[: rule.dim], rule.layout.local_size(tp), *shape[rule.dim + 1 :])
    if owner in plan.linears:
        linear = plan.linears[owner]
        inside, out = linear.local_features(tp) if linear.layout else (linear.in_features, linear.out_features)
        if leaf == "bias":
            return (out,)
        is_ours = linear.split is not Split.WHOLE or owner in targets or owner in plan.quantized
        return (out, inside) if is_ours else tuple(shape)
    # Of experts the bias is named after the matrix, as a parameter beside it.
    expert = plan.projections.get(name) or plan.projections.get(name.removesuffix("_bias"))
    if expert is not None:
        inside, out = expert.local_features(plan.topology.etp)
        experts = expert.num_experts // plan.topology.ep
        if name not in plan.projections:
            return experts, out
        return (experts, inside, out) if expert.is_transposed else (experts, out, inside)
    return tuple(shape)

"""A base that is sharded over dp: what is gathered, of which layer, and when."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshlora.comm.groups import Axis
from meshlora.common.compat import running_backward
from meshlora.model import dp_shard, weights
from meshlora.verify.faults.fault import by_name, mutation


def _gathered_in_reverse(original: Any) -> Any:
    def gather(result: Tensor, tensor: Tensor, axis: Axis) -> None:
        original(result, tensor, axis)
        result.copy_(torch.cat(result.chunk(axis.size)[::-1]))

    return gather


def _stale_in_backward(original: Any) -> Any:
    """Backwards find in the freed memory what the last forward left there: the weights of the last layer."""
    last: list[Tensor] = []

    def gather(result: Tensor, tensor: Tensor, axis: Axis) -> None:
        original(result, tensor, axis)
        if running_backward() < 0:
            last[:] = [result.clone()]
        elif last[0].shape == result.shape:
            result.copy_(last[0])

    return gather


def _each_rank_another_layer(original: Any) -> Any:
    """dp rank 1 shards what it has read of the layer before; of the first layer its own."""

    def shard_unit(model: Any, unit: str, plan: Any, mesh: Any) -> None:
        number = plan.units.index(unit)
        if number and mesh.data.rank:
            before = dict(model.get_submodule(plan.units[number - 1]).named_parameters())
            for name, parameter in model.get_submodule(unit).named_parameters():
                if hasattr(before[name], "to_local"):
                    part = before[name].to_local()
                    first = mesh.data.rank * -(-len(parameter) // mesh.data.size)
                    parameter[first : first + len(part)] = part
        original(model, unit, plan, mesh)

    return shard_unit


OF_SHARDING = by_name(
    mutation(
        "dp_shards_gathered_in_reverse",
        "the parts of a layer's weights are put together in the order of the dp ranks",
        "dp_shard",
        (dp_shard, "all_gather_into", _gathered_in_reverse),
    ),
    mutation(
        "dp_shard_stale_in_backward",
        "a layer's backward computes with the weights of its forward",
        "dp_shard",
        (dp_shard, "all_gather_into", _stale_in_backward),
    ),
    mutation(
        "dp_shard_of_another_layer",
        "each dp rank holds its part of the layer that it is sharded as",
        "dp_shard",
        (weights, "shard_unit", _each_rank_another_layer),
    ),
)

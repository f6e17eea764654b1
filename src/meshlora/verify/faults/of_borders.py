"""Faults at the borders of regions: sums over tp of outputs and input gradients, and what sp cuts and gathers."""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from meshlora.comm import collectives
from meshlora.comm.groups import Axis
from meshlora.layers import linear
from meshlora.layers.linear import ParallelHead, ParallelLinear
from meshlora.model import inject, regions, wide_norm
from meshlora.plan.layout import Split
from meshlora.verify.faults.fault import after, around, instead_of, reversed_ranks, unreduced
from meshlora.verify.features import Feature
from meshlora.wings.kernels import early_a
from meshlora.wings.kernels.early_a import Pack


def _unreduced(change: Any) -> Any:
    """`change` without the sum over tp in its backward."""

    def border(x: Tensor) -> Tensor:
        with (
            mock.patch.object(regions, "copy_one_to_each", lambda x, axis: x),
            mock.patch.object(regions, "gather_each_to_each", collectives.gather_each_to_one),
        ):
            return change(x)

    return border


row_output_not_reduced = instead_of(
    linear,
    "reduce_each_to_one",
    needs={Feature.TP},
    also=((linear, "reduce_scatter_each_to_each", lambda _: collectives.slice_one_to_each),),
)(unreduced("the output of a row-parallel linear is the sum over tp"))
sp_gather_reversed = after(regions, "gather_each_to_each", "gather_each_to_one", needs={Feature.SP})(
    reversed_ranks("slices of tokens are gathered in the order of the tp ranks")
)


@after(linear, "reduce_each_to_one", "reduce_scatter_each_to_each", needs={Feature.TP})
def row_output_averaged(y: Tensor, x: Tensor, axis: Axis) -> Tensor:
    """the output of a row-parallel linear is a sum over tp, not a mean"""
    return y / axis.size


@around(linear, "reduce_each_to_one", "reduce_scatter_each_to_each", needs={Feature.TP})
def row_output_reduced_twice(original: Any, x: Tensor, axis: Axis) -> Any:
    """the output of a row-parallel linear is summed over tp once"""
    return original(collectives.reduce_each_to_one(x, axis), axis)  # tp times what it should be


@around(ParallelLinear, "_leave_region", needs={Feature.TP, Feature.ROW_BIAS})
def row_bias_on_every_rank(original: Any, self: ParallelLinear, y: Tensor) -> Any:
    """the bias of a row-parallel linear is added once, after the sum"""
    # Adds the bias tp - 1 times over the ranks, besides the correct one.
    return original(self, y if self.bias is None else y + self.bias * (1 - 1 / self.tp.size))


@around(regions, "map_input", needs={Feature.TP})
def column_input_gradient_not_reduced(original: Any, module: Any, name: str, change: Any, **rest: Any) -> None:
    """the gradient that leaves a split region is the sum over tp"""
    original(module, name, _unreduced(change), **rest)


@around(ParallelLinear, "forward", needs={Feature.TP}, also=column_input_gradient_not_reduced.changes)
def column_input_gradient_reduced_per_linear(original: Any, self: ParallelLinear, x: Tensor) -> Any:
    """the gradient that leaves a split region is summed once for all of its column-parallel linears"""
    in_region = self.rule.split is Split.COLUMN and not isinstance(self, ParallelHead)
    return original(self, collectives.copy_one_to_each(x, self.tp) if in_region else x)


@around(regions, "slice_one_to_each", needs={Feature.SP})
def sp_slices_rotated(original: Any, x: Tensor, axis: Axis) -> Any:
    """tp rank i holds the i-th slice of the tokens"""
    return original(x, dataclasses.replace(axis, rank=(axis.rank + 1) % axis.size))


@around(regions, "_install_region", needs={Feature.SP, Feature.WHOLE_MIXER})
def whole_region_sees_its_slice(
    original: Any, module: Any, of: Any, cut: regions.TokenCut, *, sp: bool, gather: Any
) -> None:
    """a block that is not split sees all tokens"""
    if of.is_split:
        original(module, of, cut, sp=sp, gather=gather)
        return

    def own_tokens(x: Tensor) -> Tensor:
        """All tokens, those of other ranks zeroed."""
        whole = cut.whole(x, terms=False)
        mine = torch.zeros(whole.shape[0] * whole.shape[1], 1, dtype=x.dtype, device=x.device)
        mine.tensor_split(cut.tp.size)[cut.tp.rank].fill_(1)
        return whole * mine.view(*whole.shape[:2], 1)

    regions.map_input(module, of.name, own_tokens)
    regions.map_output(module, cut.cut)


# --- what layers take beside the stream


@around(regions, "_second_input", needs={Feature.SP, Feature.SECOND_INPUTS})
def second_input_of_the_neighbour(original: Any, cut: regions.TokenCut, value: Tensor) -> Any:
    """what a layer takes for each token beside the stream is that of its own tokens"""
    other = regions.TokenCut(_next_rank(cut.tp), sp=cut.sp)
    return original(other, value)


@instead_of(regions, "_second_input", needs={Feature.SP, Feature.SECOND_INPUTS})
def second_input_gradient_not_gathered(cut: regions.TokenCut, value: Tensor) -> Tensor:
    """what a layer takes for each token beside the stream has the gradient of the tokens of all tp ranks"""
    return value.flatten(0, 1).tensor_split(cut.tp.size)[cut.tp.rank].unsqueeze(0)


@around(inject, "install_borders", needs={Feature.SP, Feature.EXPERTS_BESIDE})
def router_beside_mlp_reads_other_tokens(original: Any, model: Any, plan: Any, mesh: Any, *rest: Any) -> Any:
    """experts beside a layer's MLP are chosen by the residual stream of their own tokens"""
    found = original(model, plan, mesh, *rest)

    def of_the_next(_: Any, args: Any) -> Any:
        return _of_the_next(args[0], mesh.tp), *args[1:]

    for rule in plan.experts.values():
        for name in rule.routers:  # that of gemma4 is a linear in one
            router = name.removeprefix(f"{rule.block}.").partition(".")[0]
            model.get_submodule(f"{rule.block}.{router}").register_forward_pre_hook(of_the_next)
    return found


def _changed_keys(change: Any) -> Any:
    """A hook of a layer's attention: what it takes of an earlier layer's keys and values is changed."""

    def hook(_: Any, args: Any, kwargs: Any) -> Any:
        shared = {}
        for kind, pair in kwargs[regions.SHARED_KEYS].items():
            shared[kind] = tuple(map(change, pair))
        return args, kwargs | {regions.SHARED_KEYS: shared}

    return hook


def _change_keys(model: Any, change: Any) -> None:
    for module in model.modules():
        if getattr(module, "is_kv_shared_layer", False):
            module.register_forward_pre_hook(_changed_keys(change), with_kwargs=True)


@around(inject, "install_borders", needs={Feature.RANKS, Feature.SHARED_KEYS})
def shared_keys_without_gradient(original: Any, model: Any, *rest: Any) -> Any:
    """keys and values that later layers take have their gradients, too"""
    found = original(model, *rest)
    _change_keys(model, Tensor.detach)
    return found


@around(inject, "install_borders", needs={Feature.TP, Feature.SHARED_KEYS})
def shared_keys_of_the_neighbour(original: Any, model: Any, plan: Any, mesh: Any, *rest: Any) -> Any:
    """keys and values that later layers take are of the heads of this tp rank"""
    found = original(model, plan, mesh, *rest)
    _change_keys(model, lambda x: _of_the_next(x, mesh.tp))
    return found


def _next_rank(axis: Axis) -> Axis:
    return dataclasses.replace(axis, rank=(axis.rank + 1) % axis.size)


def _of_the_next(x: Tensor, axis: Axis) -> Tensor:
    """x of the next rank of `axis`, of the same shape."""
    every = collectives.gather_each_to_one(x.contiguous(), axis)
    return every.tensor_split(axis.size)[(axis.rank + 1) % axis.size]


@around(inject, "install_borders", needs={Feature.TP})
def head_input_gradient_not_reduced(original: Any, model: Any, plan: Any, *rest: Any) -> Any:
    """the gradient that leaves the head is the sum over the parts of the vocabulary"""
    last = model.get_submodule(plan.layers)[-1] if plan.layers else None
    map_output = regions.map_output

    def map_but_last(module: Any, change: Any) -> None:
        map_output(module, _unreduced(change) if module is last else change)

    with mock.patch.object(regions, "map_output", map_but_last):
        return original(model, plan, *rest)


@instead_of(wide_norm, "reduce_each_to_each", needs={Feature.TP, Feature.WIDE_NORM})
def wide_norm_over_local_width(x: Tensor, axis: Axis) -> Tensor:
    """a norm over a split width has the mean of squares of the whole"""
    return x * axis.size  # as if all ranks had the same squares


@instead_of(wide_norm, "reduce_each_to_each", needs={Feature.TP, Feature.WIDE_NORM})
def wide_norm_gradient_not_reduced(x: Tensor, axis: Axis) -> Tensor:
    """the gradient of a mean over a split width is summed over tp"""
    return collectives.reduce_each_to_one(x, axis)


@instead_of(wide_norm, "silu", needs={Feature.TP, Feature.GATED_NORM})
def gated_norm_before_its_gate(x: Tensor) -> Tensor:
    """the mean of squares of a norm after a gate is that of what the gate lets through"""
    return torch.ones_like(x)  # a gate that lets all through


@around(early_a, "unpack", needs={Feature.RIDING_TOGETHER})
def ride_ends_at_the_next_linear(original: Any, packed: Any, width: int, riders: Any) -> Any:
    """a linear adds the product of its own A to its output"""
    return original(packed, width, riders[1:] + riders[:1])  # each takes that of the next one


@after(Pack, "backward", needs={Feature.RIDING, Feature.SCALE})
def ride_gradient_without_scale(found: Any, ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
    """the gradient of an A applied before the gather has the LoRA scale"""
    dx, riders, *das = found
    pairs = zip(das, ctx.how, strict=True)
    return dx, riders, *(None if da is None else da / scale for da, (scale, _) in pairs)


@after(Pack, "backward", needs={Feature.RIDING})
def ride_gradient_stops_at_a(found: Any, ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
    """the gradient of a region's input has the terms of every A"""
    dx, *rest = found
    return grads[0][:, : dx.shape[1]], *rest

"""The borders of regions: outputs and input gradients that are sums over tp, tokens that sp cuts and gathers, and what
rides with them."""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from meshlora.comm import collectives
from meshlora.layers import linear, split_norm
from meshlora.layers.early_a import Pack
from meshlora.layers.linear import ParallelHead, ParallelLinear
from meshlora.model import inject, regions
from meshlora.plan.layout import Split
from meshlora.verify.faults import wrong_code
from meshlora.verify.faults.fault import Change, by_name, instead, mutation, then


def _given_to_the_next(original: Any) -> Any:
    return lambda packed, width, riders: original(packed, width, riders[1:] + riders[:1])


def _a_without_scale(original: Any) -> Any:
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        dx, riders, *das = original(ctx, *grads)
        pairs = zip(das, ctx.how, strict=True)
        return dx, riders, *(None if da is None else da / scale for da, (scale, _) in pairs)

    return backward


def _input_of_the_base_alone(original: Any) -> Any:
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        dx, *rest = original(ctx, *grads)
        return grads[0][:, : dx.shape[1]], *rest

    return backward


def bias_before_reduction(original: Any) -> Any:
    def leave(self: ParallelLinear, y: Tensor) -> Tensor:
        # The sum over tp then has the bias tp times: tp - 1 times here, once where it belongs.
        return original(self, y if self.bias is None else y + self.bias * (1 - 1 / self.tp.size))

    return leave


def reduce_in_each_column_linear(original: Any) -> Any:
    def forward(self: ParallelLinear, x: Tensor) -> Tensor:
        in_region = self.rule.split is Split.COLUMN and not isinstance(self, ParallelHead)
        return original(self, collectives.copy_one_to_each(x, self.tp) if in_region else x)

    return forward


def _unreduced(change: Any) -> Any:
    """A border whose backward leaves each rank its own term."""

    def border(x: Tensor) -> Tensor:
        with (
            mock.patch.object(regions, "copy_one_to_each", lambda x, axis: x),
            mock.patch.object(regions, "gather_each_to_each", collectives.gather_each_to_one),
        ):
            return change(x)

    return border


NO_REDUCTION_AT_ENTRY: Change = (
    regions,
    "map_input",
    lambda original: lambda module, name, change, **rest: original(module, name, _unreduced(change), **rest),
)


def no_reduction_at_head(original: Any) -> Any:
    """The gradient at the end of the last layer stays, on each rank, that of its part of the vocabulary."""

    def install(model: Any, plan: Any, mesh: Any) -> None:
        last = model.get_submodule(plan.layers)[-1] if plan.layers else None
        map_output = regions.map_output

        def map_but_last(module: Any, change: Any) -> None:
            map_output(module, _unreduced(change) if module is last else change)

        with mock.patch.object(regions, "map_output", map_but_last):
            original(model, plan, mesh)

    return install


def next_slice(original: Any) -> Any:
    return lambda x, axis: original(x, dataclasses.replace(axis, rank=(axis.rank + 1) % axis.size))


def blind_whole_regions(original: Any) -> Any:
    """The block gets its rank's tokens, and zeros in the place of all others."""

    def install(module: Any, of: Any, cut: regions.TokenCut, *, sp: bool, riders: Any) -> None:
        if of.is_split:
            original(module, of, cut, sp=sp, riders=riders)
            return

        def own_tokens(x: Tensor) -> Tensor:
            whole = cut.whole(x, terms=False)
            mine = torch.zeros(whole.shape[0] * whole.shape[1], 1, dtype=x.dtype, device=x.device)
            mine.tensor_split(cut.tp.size)[cut.tp.rank].fill_(1)
            return whole * mine.view(*whole.shape[:2], 1)

        regions.map_input(module, of.name, own_tokens)
        regions.map_output(module, cut.cut)

    return install


OF_BORDERS = by_name(
    mutation(
        "row_output_not_reduced",
        "the output of a row-parallel linear is the sum over tp",
        "tp",
        (linear, "reduce_each_to_one", instead(lambda x, axis: x)),
        (linear, "reduce_scatter_each_to_each", instead(collectives.slice_one_to_each)),
    ),
    mutation(
        "row_output_averaged",
        "the output of a row-parallel linear is a sum over tp, not a mean",
        "tp",
        (linear, "reduce_each_to_one", then(lambda y, x, axis: y / axis.size)),
        (linear, "reduce_scatter_each_to_each", then(lambda y, x, axis: y / axis.size)),
    ),
    mutation(
        "row_output_reduced_twice",
        "the output of a row-parallel linear is summed over tp once",
        "tp",
        (linear, "reduce_each_to_one", lambda f: lambda x, axis: f(f(x, axis), axis)),
        (
            linear,
            "reduce_scatter_each_to_each",
            lambda f: lambda x, axis: f(collectives.reduce_each_to_one(x, axis), axis),
        ),
    ),
    mutation(
        "row_bias_on_every_rank",
        "the bias of a row-parallel linear is added once, after the sum",
        "tp row_bias",
        (ParallelLinear, "_leave_region", bias_before_reduction),
    ),
    mutation(
        "column_input_gradient_not_reduced",
        "the gradient that leaves a split region is the sum over tp",
        "tp",
        NO_REDUCTION_AT_ENTRY,
    ),
    mutation(
        "column_input_gradient_reduced_per_linear",
        "the gradient that leaves a split region is summed once for all of its column-parallel linears",
        "tp",
        NO_REDUCTION_AT_ENTRY,
        (ParallelLinear, "forward", reduce_in_each_column_linear),
    ),
    mutation(
        "sp_slices_rotated",
        "tp rank i holds the i-th slice of the tokens",
        "sp",
        (regions, "slice_one_to_each", next_slice),
    ),
    mutation(
        "sp_gather_reversed",
        "slices of tokens are gathered in the order of the tp ranks",
        "sp",
        (regions, "gather_each_to_each", then(wrong_code.blocks_reversed)),
        (regions, "gather_each_to_one", then(wrong_code.blocks_reversed)),
    ),
    mutation(
        "whole_region_sees_its_slice",
        "a block that is not split sees all tokens",
        "sp whole_mixer",
        (regions, "_install_region", blind_whole_regions),
    ),
    mutation(
        "head_input_gradient_not_reduced",
        "the gradient that leaves the head is the sum over the parts of the vocabulary",
        "tp",
        (inject, "install_borders", no_reduction_at_head),
    ),
    mutation(
        "wide_norm_over_local_width",
        "a norm over a split width has the mean of squares of the whole",
        "tp wide_norm",
        (split_norm, "reduce_each_to_each", instead(lambda x, axis: x * axis.size)),
    ),
    mutation(
        "wide_norm_gradient_not_reduced",
        "the gradient of a mean over a split width is summed over tp",
        "tp wide_norm",
        (split_norm, "reduce_each_to_each", instead(collectives.reduce_each_to_one)),
    ),
    mutation(
        "ride_ends_at_the_next_linear",
        "a linear adds the z of its own A to what it returns",
        "riding_together",
        (regions, "unpack", _given_to_the_next),
    ),
    mutation(
        "ride_gradient_without_scale",
        "the gradient of an A that works before the gather has the LoRA scale",
        "riding scale",
        (Pack, "backward", _a_without_scale),
    ),
    mutation(
        "ride_gradient_stops_at_a",
        "the gradient of a region's input has the terms of every A",
        "riding",
        (Pack, "backward", _input_of_the_base_alone),
    ),
)

"""Faults of placement: shards of weights, pieces of fused matrices, kv heads, dp shards, quantized blocks."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from meshlora.adapter import attach
from meshlora.comm.groups import Axis
from meshlora.layers.adapted import Placement
from meshlora.layers.linear import ParallelLinear
from meshlora.model import dp_shard, regions, weights
from meshlora.plan.layout import Layout, Piece
from meshlora.verify.faults.fault import after, around, configured, fault, passing
from meshlora.verify.features import Feature
from meshlora.wings.quantized import keep_packed, quantized
from meshlora.wings.quantized.kinds import FACTOR_BYTES, WITH_ZEROS
from meshlora.wings.quantized.quantized import Equal, Form, Packed, Run
from meshlora_ground.compat.torch_tensors import running_backward


def _is_split(placement: Placement) -> bool:
    """Whether it is split over tp, experts apart."""
    return placement.layout is not None and not placement.num_experts


def _seen_as(mesh: Any, rank: int) -> Any:
    """A mesh that reports tp rank `rank`."""
    return SimpleNamespace(tp=dataclasses.replace(mesh.tp, rank=rank), device=mesh.device)  # all that readers ask


def next_rank(mesh: Any) -> Any:
    """A mesh that reports the next tp rank."""
    return _seen_as(mesh, (mesh.tp.rank + 1) % mesh.tp.size)


def _pieces_reversed(value: Tensor, placement: Placement, mesh: Any, names: str) -> Tensor:
    """The rows of a fused matrix with its pieces in reverse order. names: of its pieces."""
    layout = placement.layout
    if layout is None or placement.num_experts or sorted(p.name for p in layout.pieces) != sorted(names.split()):
        return value
    sizes = [run.size for run in layout.runs(rank=mesh.tp.rank, size=mesh.tp.size)]
    return torch.cat(value.split(sizes, placement.dim)[::-1], placement.dim or 0)


def _as_one_matrix(layout: Layout | None) -> Layout | None:
    return Layout.plain(layout.size) if layout is not None and len(layout.pieces) > 1 else layout


@around(weights, "_read_local", "read_packed", needs={Feature.TP})
def base_shards_reversed(
    original: Any, name: str, placement: Placement, source: Any, mesh: Any, *rest: Any, **options: Any
) -> Any:
    """tp rank i holds the i-th slice of a row-parallel weight"""
    if _is_split(placement) and placement.dim == 1 and name.endswith(".weight"):
        mesh = _seen_as(mesh, mesh.tp.size - 1 - mesh.tp.rank)
    return original(name, placement, source, mesh, *rest, **options)


@around(weights, "_read_local", needs={Feature.TP, Feature.COLUMN_BIAS})
def column_bias_of_rank_0(original: Any, name: str, placement: Placement, source: Any, mesh: Any) -> Any:
    """tp rank i holds the i-th slice of the bias of a column-parallel linear"""
    is_it = _is_split(placement) and name.endswith(".bias")
    return original(name, placement, source, _seen_as(mesh, 0) if is_it else mesh)


@after(weights, "_read_local", needs={Feature.TP, Feature.FUSED_QKV, Feature.PLAIN_BASE})
def qkv_pieces_reversed(value: Tensor, name: str, placement: Placement, source: Any, mesh: Any) -> Tensor:
    """a rank holds the rows of a fused matrix in the order q, k, v"""
    return _pieces_reversed(value, placement, mesh, "q k v")


@after(weights, "_read_local", needs={Feature.TP, Feature.FUSED_GATE_UP, Feature.PLAIN_BASE})
def gate_and_up_swapped(value: Tensor, name: str, placement: Placement, source: Any, mesh: Any) -> Tensor:
    """a rank holds its rows of gate before those of up"""
    return _pieces_reversed(value, placement, mesh, "gate up")


@around(attach, "local_part", needs={Feature.TP, Feature.FUSED_BLOCKS, Feature.FUSED_TARGET})
def fused_b_cut_as_one_matrix(original: Any, full: Tensor, rule: Any, mesh: Any) -> Any:
    """the rows of B go with the rows of the base"""
    cuts = tuple(dataclasses.replace(cut, layout=_as_one_matrix(cut.layout)) for cut in rule.cuts)
    return original(full, rule if rule.is_expert else dataclasses.replace(rule, cuts=cuts), mesh)


@around(
    weights,
    "_read_local",
    "read_packed",
    needs={Feature.TP, Feature.FUSED_BLOCKS},
    also=fused_b_cut_as_one_matrix.changes,
)
def fused_base_cut_as_one_matrix(
    original: Any, name: str, placement: Placement, source: Any, mesh: Any, *rest: Any, **options: Any
) -> Any:
    """each rank holds a share of every piece of a fused matrix"""
    if not placement.num_experts:
        placement = dataclasses.replace(placement, layout=_as_one_matrix(placement.layout))
    return original(name, placement, source, mesh, *rest, **options)


@after(ParallelLinear, "_piece_rows", needs={Feature.PIECES})
def piece_lands_on_the_next(rows: Tensor, self: ParallelLinear, piece: str) -> Tensor:
    """an adapter on a piece adds to the rows of that piece"""
    return (rows + len(rows)) % self.out_features


@around(Piece, "share", needs={Feature.KV_REPLICAS})
def kv_head_of_another_rank(original: Any, self: Piece, *, rank: int, size: int) -> Any:
    """a rank holds the key/value heads of its query heads"""
    # Deals replicated heads to ranks round-robin.
    if self.copies(size) > 1:
        rank = rank % self.num_units * (size // self.num_units)
    return original(self, rank=rank, size=size)


@around(weights, "_read_local", needs={Feature.TP, Feature.WIDE_NORM})
def wide_norm_weight_of_rank_0(original: Any, name: str, placement: Placement, source: Any, mesh: Any) -> Any:
    """tp rank i holds the i-th slice of the weight of a norm over a split width"""
    is_it = _is_split(placement) and not name.endswith(".bias") and len(placement.shape) == 1
    return original(name, placement, source, _seen_as(mesh, 0) if is_it else mesh)


@around(weights, "_read_local", needs={Feature.TP, Feature.MIXER})
def mixer_decay_of_the_neighbour(original: Any, name: str, placement: Placement, source: Any, mesh: Any) -> Any:
    """a rank has the decay and the step of its own heads of a mixer"""
    is_it = _is_split(placement) and name.endswith((".A_log", ".dt_bias"))
    return original(name, placement, source, next_rank(mesh) if is_it else mesh)


@around(weights, "_read_local", needs={Feature.TP, Feature.MIXER})
def mixer_values_of_the_neighbour(original: Any, name: str, placement: Placement, source: Any, mesh: Any) -> Any:
    """the heads of every piece of a mixer's projection belong to the same rank"""
    found, layout = original(name, placement, source, mesh), placement.layout
    if layout is None or "in_proj" not in name:
        return found
    other = original(name, placement, source, next_rank(mesh))
    for piece in {"v", "x"} & {piece.name for piece in layout.pieces}:
        rows = layout.piece_rows(piece, rank=mesh.tp.rank, size=mesh.tp.size)
        found = found.index_copy(0, rows, other[rows])
    return found


@around(weights, "_read_local", needs={Feature.TP, Feature.MIXER})
def mixer_channels_of_another_piece(original: Any, name: str, placement: Placement, source: Any, mesh: Any) -> Any:
    """the channels of a mixer's convolution are in the order of its pieces, as the rows of its projection"""
    found, layout = original(name, placement, source, mesh), placement.layout
    if layout is None or not name.endswith(".conv1d.weight"):
        return found
    sizes = [run.size for run in layout.runs(rank=mesh.tp.rank, size=mesh.tp.size)]
    return torch.cat(found.split(sizes)[::-1])


@around(
    keep_packed,
    "pack",
    needs={Feature.QUANTIZES},
    also=(
        (quantized, "_by_rows", lambda unpack: lambda packed: unpack(packed).roll(-(packed.form.columns[0] // 2), 1)),
    ),
)
def quantized_blocks_straddle(original: Any, weight: Tensor, kind: str) -> Any:
    """the blocks of a rank are blocks of the whole matrix"""
    # Shifts blocks by half a block against those of one process; unpacking shifts back.
    packed = original(weight, kind)
    return original(weight.roll(packed.form.columns[0] // 2, 1), kind)


@after(weights, "read_packed", needs={Feature.QUANTIZED})
def quantized_scale_of_neighbour(packed: Packed, *_: Any, **__: Any) -> Packed:
    """each block has its own scale"""
    of_rows = FACTOR_BYTES.get(packed.form.kind, 0)  # factors, which stay where they are
    scales, factors = packed.scales.tensor_split((packed.scales.shape[-1] - of_rows,), -1)
    by = 1 + (packed.form.kind in WITH_ZEROS)  # which lie beside their scales
    rolled = scales.flatten(-2).roll(by, -1).view(scales.shape)
    return dataclasses.replace(packed, scales=torch.cat([rolled, factors], -1))


@after(weights, "read_packed", needs={Feature.QUANTIZED})
def quantized_scale_off_by_a_power(packed: Packed, *_: Any, **__: Any) -> Packed:
    """a scale is what its bits say"""
    return dataclasses.replace(
        packed, scales=packed.scales + (1 if packed.scales.dtype == torch.uint8 else packed.scales)
    )


@around(weights, "read_packed", needs={Feature.QUANTIZED, Feature.TP})
def quantized_codes_of_neighbour(
    original: Any, name: str, placement: Placement, source: Any, mesh: Any, *rest: Any, **options: Any
) -> Any:
    """a rank holds the codes of its slice, where cuts cross blocks too"""
    own = original(name, placement, source, mesh, *rest, **options)
    if not _is_split(placement):
        return own
    other = original(name, placement, source, _seen_as(mesh, mesh.tp.size - 1 - mesh.tp.rank), *rest, **options)
    return dataclasses.replace(own, codes=other.codes)


@after(weights, "read_packed", needs={Feature.QUANTIZED, Feature.FOUR_BITS})
def quantized_halves_swapped(packed: Packed, *_: Any, **__: Any) -> Packed:
    """a byte of two codes begins with the right one"""
    return dataclasses.replace(packed, codes=(packed.codes >> 4) | (packed.codes << 4))


@around(Form, "numbers", needs={Feature.NVFP4})
def nvfp4_scale_as_exponent(original: Any, self: Form, scales: Tensor) -> Tensor:
    """a scale of NVFP4 is a number of e4m3, though bytes are exponents in other formats"""
    own = original(self, scales)
    return own / scales[..., :-4].view(torch.float8_e4m3fn).float() * quantized.numbers_of_scales(scales[..., :-4])


@after(weights, "read_packed", needs={Feature.NVFP4, Feature.EXPERTS})
def nvfp4_factor_of_another_expert(packed: Packed, *_: Any, **__: Any) -> Packed:
    """each expert has the factor of its own matrix"""
    if packed.codes.ndim < 3:
        return packed
    scales = packed.scales
    return dataclasses.replace(packed, scales=torch.cat([scales[..., :-4], scales[..., -4:].roll(1, 0)], -1))


@after(Packed, "__getitem__", needs={Feature.QUANTIZED, Feature.EXPERTS})
def quantized_expert_transposed(found: Tensor, self: Packed, expert: int) -> Tensor:
    """an unpacked expert is not the transpose"""
    return found.T.reshape(found.shape)  # the numbers of the transpose in the old shape


@after(quantized, "_by_rows", needs={Feature.QUANTIZED, Feature.DIGITS})
def quantized_otherwise_in_backward(found: Tensor, packed: Packed) -> Tensor:
    """a backward computes with the same numbers as its forward"""
    return found.bfloat16().to(found.dtype) if running_backward() >= 0 else found


@after(quantized, "runs", needs={Feature.QUANTIZED})
def quantized_parts_by_first_scales(found: Iterator[Run], equal: Equal, most: int) -> Iterator[Run]:
    """rows that are unpacked a part at a time take the scales of their own blocks"""
    is_in_parts = most < sum(count * number for count, number in equal)
    for run in found:
        yield run._replace(blocks=slice(0, run.blocks.stop - run.blocks.start)) if is_in_parts else run


@after(dp_shard, "all_gather_into", needs={Feature.DP_SHARD})
def dp_shards_gathered_in_reverse(_: None, result: Tensor, tensor: Tensor, axis: Axis) -> None:
    """the parts of a layer's weights are gathered in the order of the dp ranks"""
    result.copy_(torch.cat(result.chunk(axis.size)[::-1]))


# A new list each time the fault is injected.
@fault(
    lambda wrong, gather: functools.partial(wrong, gather, []), dp_shard, "all_gather_into", needs={Feature.DP_SHARD}
)
def dp_shard_stale_in_backward(original: Any, last: list[Tensor], result: Tensor, tensor: Tensor, axis: Axis) -> None:
    """a layer's backward computes with the weights of its forward"""
    # Simulates backwards that read freed memory: the weights of the last layer forwarded.
    original(result, tensor, axis)
    if running_backward() < 0:
        last[:] = [result.clone()]
    elif last[0].shape == result.shape:
        result.copy_(last[0])


@around(weights, "shard_unit", needs={Feature.DP_SHARD})
def dp_shard_of_another_layer(original: Any, model: Any, unit: str, plan: Any, mesh: Any) -> None:
    """each dp rank holds its part of the right layer"""
    # All but dp rank 0 shard the layer before instead; the first layer is right.
    number = plan.units.index(unit)
    if number and mesh.data.rank:
        before = dict(model.get_submodule(plan.units[number - 1]).named_parameters())
        for name, parameter in model.get_submodule(unit).named_parameters():
            if hasattr(before[name], "to_local"):
                part = before[name].to_local()
                first = mesh.data.rank * -(-len(parameter) // mesh.data.size)  # shards are of rows, rounded up
                parameter[first : first + len(part)] = part
    original(model, unit, plan, mesh)


heads_of_rank_0_in_arguments = around(regions, "_cut_arguments", needs={Feature.SLICED})(
    passing("each rank sees its own heads of an argument with a heads dim", tp=lambda t: dataclasses.replace(t, rank=0))
)
nvfp4_factor_divides = around(Form, "numbers", needs={Feature.NVFP4})(
    configured("a factor that multiplies is not divided by", divides=lambda form: not form.divides)
)

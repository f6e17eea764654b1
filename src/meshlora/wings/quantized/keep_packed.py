"""Packed weights of a checkpoint: which stay so in memory, and a rank's part of one.

Owns: choosing the weights of `quantization: keep`, and reading or making packed slices. Does not own: the formats
(`wings.quantized.packed`), plain slices and how a weight is split (`model.weights`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from meshlora.comm.groups import Mesh
from meshlora.layers.adapted import Placement
from meshlora.model.stored import Part, StoredTensor
from meshlora.model.weights import CheckpointSource, Source, bounds_in, check_finite, in_file, local_parts, read_bounds
from meshlora.plan.rules import Packing
from meshlora.wings.quantized.float8_matrix import for_kernels, pack_float8
from meshlora.wings.quantized.float8_stored import multiplied_as_stored, stored_for_kernels
from meshlora.wings.quantized.kinds import COMPUTE, FACTOR_BYTES, KEEP, KINDS, STORED
from meshlora.wings.quantized.packed import PackedFormat
from meshlora.wings.quantized.quantized import Packed, joined, pack, stacked
from meshlora_ground.errors import UnsupportedError, UserError


def kept_packed(
    source: Path | None, model: Any, stored: Mapping[str, Any] | None, quantization: str | None
) -> dict[str, Packing]:
    """Parameter -> how it stays packed in memory: of `keep` what the checkpoint packs, else none.

    stored: the `quantization_config` of the checkpoint.

    Raises:
        UserError: nothing is stored in few bits. UnsupportedError: in a format that does not stay packed; a checkpoint
            in few bits would be rounded again.
    """
    if quantization != KEEP:
        if stored and quantization is not None:  # without the option it is read in plain numbers
            given = f"quantization {quantization} of model {source}"
            rule = "its checkpoint is quantised already, and rounding it twice is not proved"
            raise UnsupportedError(given, rule, "use model.quantization: keep, or leave it out")
        return {}
    given = f"quantization keep of model {source or model.config.model_type}"
    if not stored:
        raise UserError(given, "its checkpoint is not quantised", f"use one of {', '.join(KINDS)}, or leave it out")
    if source is None:
        raise UserError(given, "its files say which weights are in few bits", "give the folder of the checkpoint")
    weights = CheckpointSource(source, model, stored)
    kept, packed = packings(weights), weights.packed()
    if packed is not None and not kept:
        rule = f"what {stored['quant_method']} stores so does not stay packed"
        raise UnsupportedError(f"{given}: {packed}", rule, "leave out model.quantization")
    return kept


def packings(source: Source) -> dict[str, Packing]:
    """Name -> how it can stay packed in memory, for the weights that can: none that is in plain numbers."""
    found = {}
    for name, stored in source.stored.items():
        own = {None if tensor.packed is None else _format(tensor).packing for tensor in stored.tensors}
        if len(own) == 1 and (packing := own.pop()) is not None:  # a matrix has one form in memory
            found[name] = packing
    return found


def _format(tensor: StoredTensor) -> PackedFormat:
    assert tensor.packed is not None, tensor
    form = tensor.packed[0]
    assert isinstance(form, PackedFormat), form
    return form


def keep(source: Source, name: str, *parts: Part) -> Packed:
    """`source.read`, packed. The slices may be several along one dim."""
    stored = source.stored[name]
    # Expert, if they are stored one by one -> place along dim -2 -> blocks along dim -1.
    grid: dict[str, dict[str, list[Packed]]] = {}
    for tensor, own, place in stored.blocks(parts):
        row = grid.setdefault(str(place[:-2]), {}).setdefault(str(place[-2]), [])
        row.append(_keep_slice(tensor, own))
    found = []
    for rows in grid.values():
        whole_rows = [joined(row, -1) for row in rows.values()]
        found.append(joined(whole_rows, -2))
    if stored.experts:
        return stacked(found)
    return found[0]


def _keep_slice(stored: StoredTensor, parts: tuple[Part, ...]) -> Packed:
    assert stored.packed is not None, stored
    if stored.swapped:  # the last two dims
        return _keep_slice(*in_file(stored, parts)).mT
    tensors = stored.packed[1]
    return _format(stored).keep(bounds_in(stored, parts), lambda part, of_part: read_bounds(tensors[part], of_part))


def read_packed(
    name: str,
    where: Placement,
    source: Source,
    mesh: Mesh,
    packing: Packing,
    *,
    dtype: torch.dtype,
    quantization: str | None,
) -> Packed:
    """This rank's part of the stored tensor `name`, packed: as it is stored, or quantised now, an expert at a time.

    Raises:
        UserError: a value that is not finite.
    """
    _, experts, parts = local_parts(where, mesh)

    def quantised(expert: list[Part]) -> Packed:
        return _quantised(name, expert, parts, where, source, packing, mesh.device, dtype)

    is_stored = quantization == KEEP
    if is_stored:
        packed = keep(source, name, *experts, *parts)
    elif experts:
        each = []
        for part in experts:  # one at a time: in plain numbers a stack may be larger than the memory
            each += [quantised([Part(0, number, number + 1)]) for number in range(part.start, part.stop)]
        packed = stacked(each)
    else:
        packed = quantised([])
    if where.is_transposed:
        packed = packed.mT
    packed = packed.to(mesh.device, dtype)
    if packing.kind in STORED.values():
        packed = multiplied_as_stored(packed, packing.kind)
    if mesh.device.type == "cuda":
        if packing.kind in COMPUTE.values():
            packed = for_kernels(packed, name)
        elif packing.kind in STORED.values():
            packed = stored_for_kernels(packed, name)
    # What is quantised here was checked before: its codes have no word for NaN.
    if is_stored and experts:
        for number in range(len(packed)):
            check_finite(packed[number], name, source)
    elif is_stored:
        check_finite(packed.whole(), name, source)
    return packed


def _quantised(
    name: str,
    expert: list[Part],
    parts: list[Part],
    where: Placement,
    source: Source,
    packing: Packing,
    device: torch.device,
    dtype: torch.dtype,
) -> Packed:
    """The slices `parts` of a matrix, quantised. Of a block that is cut all is read: its scale is that of the whole."""
    found, ndim = [], len(where.shape)
    dim = -ndim
    if parts:
        dim += parts[0].dim  # -2 or -1, as stored
    along = dim  # of [out, in]
    if where.has_inputs_first:
        along = -3 - dim
    size = packing.block[along]  # 1 along a dim whose elements share no scale
    if packing.kind in FACTOR_BYTES:
        size = where.shape[dim]  # all of it: the whole matrix has one factor
    for part in parts or [Part(ndim + dim, 0, where.shape[dim])]:
        start, stop = part.start // size * size, min(-(-part.stop // size) * size, where.shape[dim])
        value = source.read(name, *expert, Part(part.dim, start, stop))
        if expert:
            value = value[0]
        value = value.to(device=device, dtype=dtype)
        check_finite(value, name, source)
        if where.has_inputs_first:
            value = value.T
        if packing.kind in COMPUTE.values():
            packed = pack_float8(value, packing.kind)
        elif packing.kind in STORED.values():
            packed = pack(value, "fp8")
        else:
            packed = pack(value, packing.kind)
        bounds = [(0, size) for size in packed.shape]
        bounds[along] = (part.start - start, part.stop - start)
        packed = packed.part(bounds[0], bounds[1])
        if where.has_inputs_first:
            packed = packed.mT
        found.append(packed)
    return joined(found, dim)

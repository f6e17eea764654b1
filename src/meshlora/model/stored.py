"""The stored tensors of each parameter of a model: one, or several to be put together.

Owns: finding the tensors of a Hugging Face checkpoint (single file or sharded, old and new key names, experts one by
one) and the place of each in its parameter. Does not own: reading them (`model.weights`), the formats of weights in few
bits, which a wing reads (`wings.quantized.packed`).

transformers' own rules for loading decide: its renamings, and those of its conversions that concatenate tensors,
stack the matrices of experts or transpose them. Others are refused by name, and only where the model has the weight.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from meshlora.feature import features
from meshlora.model.stream import FLOATS, dtype_name
from meshlora_ground.errors import UnsupportedError, UserError, reason
from meshlora_ground.files import open_safetensors
from meshlora_ground.weight_files import weight_files

# (start, stop) along each dim.
Bounds = Sequence[tuple[int, int]]
# A range wanted along a dim, and its place in the result.
_Range = tuple[tuple[int, int], slice]
# `read("scales", bounds)`: a slice of one of the stored tensors.
Reader = Callable[[str, Bounds], Tensor]


class Format(Protocol):
    """How a weight is made of several stored tensors, its parts. shape: of the weight."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def read(self, bounds: Bounds, read: Reader) -> Tensor:
        """The slice `bounds` of the weight, in float32."""


# Name of a weight, its format (None: its parts do not fit), part -> key of the stored tensor, keys that say no more.
Place = tuple[str, Format | None, dict[str, str], list[str]]


@dataclass(frozen=True)
class Part:
    """A slice of one dim: `start:stop`."""

    dim: int
    start: int
    stop: int


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a file.

    Attributes:
        shape: with the swapped dims swapped. dtype: as safetensors writes it: F32, BF16, I8.
        value: set for a tensor in no file. swapped: two dims whose places in the file are each other's.
        packed: set for a weight in few bits: its format and parts. key, shape, dtype are those of the weight.
        rows: the rows (along `rows_dim`) of the tensor in the file that it consists of, int64; None: all, in order.
    """

    file: Path
    key: str
    shape: tuple[int, ...]
    dtype: str
    value: Tensor | None = None
    packed: tuple[Format, Mapping[str, StoredTensor]] | None = None
    swapped: tuple[int, int] | None = None
    rows: Tensor | None = None
    rows_dim: int = 0

    @classmethod
    def in_memory(cls, key: str, value: Tensor) -> StoredTensor:
        """A tensor that need not be read."""
        dtype = dtype_name(value.dtype) if value.is_floating_point() else str(value.dtype)
        return cls(Path(), key, tuple(value.shape), dtype, value)

    def with_swapped(self, one: int, other: int) -> StoredTensor:
        """The same with two dims in each other's place; twice: as it is stored."""
        shape = list(self.shape)
        shape[one], shape[other] = shape[other], shape[one]
        swapped = None if self.swapped else (one, other)
        return dataclasses.replace(self, shape=tuple(shape), swapped=swapped)


class Block(NamedTuple):
    """A slice of one stored tensor and its place in the result; in a stack the place starts with an index."""

    tensor: StoredTensor
    parts: tuple[Part, ...]
    place: tuple[slice | int, ...]


@dataclass(frozen=True)
class Stored:
    """The stored tensors of one parameter.

    Attributes:
        experts: the numbers of the experts whose matrices it stacks, ascending; empty if it is no stack.
        rows: for each expert, or for the one parameter, the tensors to concatenate along its dim `dim`.
        names: for messages, the key of each position in a row, with `*` for the number of the expert.
    """

    rows: tuple[tuple[StoredTensor, ...], ...]
    experts: tuple[int, ...] = ()
    names: tuple[str, ...] = ()
    dim: int = 0

    @property
    def tensors(self) -> tuple[StoredTensor, ...]:
        """All of them."""
        return tuple(itertools.chain.from_iterable(self.rows))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the parameter."""
        first, *others = self.rows[0]
        shape = first.shape
        if others:
            width = sum(tensor.shape[self.dim] for tensor in self.rows[0])
            shape = (*shape[: self.dim], width, *shape[self.dim + 1 :])
        if self.experts:
            return (len(self.experts), *shape)
        return shape

    def shape_of(self, parts: Sequence[Part]) -> list[int]:
        """The shape of the parameter sliced to `parts`."""
        return [_along(dim, size, parts)[-1][1].stop for dim, size in enumerate(self.shape)]

    def blocks(self, parts: Sequence[Part]) -> Iterator[Block]:
        """The slices `parts` of the parameter, as slices of the stored tensors, one by one.

        Several parts along one dim are concatenated.
        """
        chosen = [_along(dim, size, parts) for dim, size in enumerate(self.shape)]
        if not self.experts:
            yield from _blocks_of_row(self.rows[0], chosen, self.dim)
            return
        of_experts, *of_matrix = chosen
        for (first, stop), place in of_experts:
            for number in range(first, stop):
                index = place.start + number - first
                for block in _blocks_of_row(self.rows[number], of_matrix, self.dim):
                    yield Block(block.tensor, block.parts, (index, *block.place))

    def mistake(self, name: str, needed: tuple[int, ...], num_experts: int = 0) -> tuple[str, str] | None:
        """(What is wrong, the rule) if this does not fit parameter `name` of shape `needed`. num_experts: the first
        ones that must be there; 0: all."""
        if not self.experts or len(needed) != len(self.shape):
            return None if self.shape == needed else (name, shape_mistake(self.shape, needed))
        number, *sizes = needed
        # Those of one expert are of one shape: gate and up, one above the other.
        sizes[self.dim] //= len(self.names)
        matrix = tuple(sizes)
        for expert, row in zip(self.experts, self.rows, strict=True):
            if expert >= number:
                return row[0].key, f"config.json says {number} experts, 0 to {number - 1}"
            for tensor in row:
                if tensor.shape != matrix:
                    return tensor.key, shape_mistake(tensor.shape, matrix)
        if missing := sorted(set(range(num_experts or number)) - set(self.experts)):
            return self.names[0].replace("*", str(missing[0])), f"it is missing; config.json says {number} experts"
        return None


def _blocks_of_row(row: Sequence[StoredTensor], chosen: Sequence[Sequence[_Range]], along: int) -> Iterator[Block]:
    """The blocks of tensors that are concatenated along dim `along`. chosen: the ranges wanted along each dim."""
    start = 0
    for tensor in row:
        bounds = [(0, size) for size in tensor.shape]
        if len(row) > 1:
            bounds[along] = (start, start + tensor.shape[along])
            start += tensor.shape[along]
        cuts = [list(_overlaps(own, bound)) for own, bound in zip(chosen, bounds, strict=True)]
        for cut in itertools.product(*cuts):  # of a tensor without dims: one, of nothing
            parts, place = [], []
            for dim, (inside, of_dim) in enumerate(cut):
                place.append(of_dim)
                if inside != (0, tensor.shape[dim]):  # a dim that is read whole has no part
                    parts.append(Part(dim, *inside))
            yield Block(tensor, tuple(parts), tuple(place))


def _along(dim: int, size: int, parts: Sequence[Part]) -> list[_Range]:
    """The ranges that are wanted along a dim: those of `parts`, or all of it."""
    found, offset = [], 0
    for part in [p for p in parts if p.dim == dim] or [Part(dim, 0, size)]:
        found.append(((part.start, part.stop), slice(offset, offset + part.stop - part.start)))
        offset += part.stop - part.start
    return found


def _overlaps(chosen: Sequence[_Range], bound: tuple[int, int]) -> Iterator[_Range]:
    """The chosen ranges within `bound`, counted from its start."""
    for (start, stop), place in chosen:
        low, high = max(start, bound[0]), min(stop, bound[1])
        # An empty range is read too: of a rank that has no rows, the result still has a shape and a dtype.
        if low < high or (start == stop and bound[0] <= start <= bound[1]):
            shift = place.start - start
            yield (low - bound[0], high - bound[0]), slice(low + shift, high + shift)


def shape_mistake(given: tuple[int, ...], needed: tuple[int, ...]) -> str:
    """The words for a wrong shape."""
    return f"its shape is {list(given)}, config.json says {list(needed)}"


def num_stored(folder: Path) -> int:
    """The number of tensors in a checkpoint; 0 if none can be read."""
    try:
        return len(list(stored_tensors(folder)))
    except UserError:
        return 0


def stored_dtype(folder: Path) -> torch.dtype | None:
    """The dtype of most plain numbers in a checkpoint, which weights in few bits become; None if none can be read."""
    sizes = Counter[str]()
    try:
        for tensor in stored_tensors(folder):
            if tensor.dtype in FLOATS:
                sizes[tensor.dtype] += math.prod(tensor.shape)
    except UserError:
        return None
    if not sizes.total():
        return None
    ((most, _),) = sizes.most_common(1)
    return FLOATS[most]


def stored_tensors(folder: Path) -> Iterator[StoredTensor]:
    """The tensors in the files of a checkpoint."""
    for path in weight_files(folder):
        with open_safetensors(path) as file:
            for key in file.keys():  # noqa: SIM118 - not a dict
                view = file.get_slice(key)
                yield StoredTensor(path, key, tuple(view.get_shape()), view.get_dtype())


def _with_packed(folder: Path, quantization: Mapping[str, Any] | None) -> list[StoredTensor]:
    """The tensors of a checkpoint, where those of a weight in few bits are that weight. Raises: UserError: some are
    missing, or do not fit."""
    tensors = {tensor.key: tensor for tensor in stored_tensors(folder)}
    if not quantization:
        return list(tensors.values())

    def value(key: str) -> Tensor:
        with open_safetensors(tensors[key].file) as file:
            return file.get_tensor(key)

    found, spent = dict(tensors), set[str]()
    for feature in features():
        for name, form, keys, others in feature.packed_weights(tensors, quantization, value):
            parts = {part: tensors[key] for part, key in keys.items() if key in tensors}
            if form is None or parts.keys() != keys.keys() or len(parts) < 2:
                shapes = ", ".join(f"{part} {list(tensor.shape)}" for part, tensor in parts.items())
                rule = f"its stored parts are not all there, or do not fit one another ({shapes})"
                raise UserError(f"checkpoint {folder}: {name}", rule, "download it again")
            spent |= {*keys.values(), *others} - {name}  # some formats store the codes under the weight's own name
            found[name] = StoredTensor(parts["codes"].file, name, form.shape, "F32", packed=(form, parts))
    return [tensor for key, tensor in found.items() if key not in spent]  # scales and codes are no weights of the model


class _Found(NamedTuple):
    """A tensor as transformers would load it.

    Attributes:
        pattern: the index of its pattern in the conversion. number: the match of a `*` in the pattern.
        is_stacked: whether the number is that of an expert. dim: along which it is concatenated with others.
    """

    tensor: StoredTensor
    pattern: int = 0
    number: int | None = None
    is_stacked: bool = False
    dim: int = 0


def find_stored(folder: Path, model: Any, quantization: Mapping[str, Any] | None = None) -> dict[str, Stored]:
    """Name in `model` (not split, meta device) -> its stored tensors; and the tensors without a place in the model.

    quantization: the `quantization_config` of its config.json.

    Raises:
        UserError: two tensors for one place, an expert without one of its matrices.
        UnsupportedError: an unknown conversion.
    """
    from transformers import conversion_mapping, core_model_loading

    renamings, converters = [], []
    of_pattern: dict[str, Any] = {}
    lacking = (conversion for feature in features() for conversion in feature.lacking_conversions(model))
    for transform in [*conversion_mapping.get_model_conversion_mapping(model), *lacking]:
        if isinstance(transform, core_model_loading.WeightRenaming):
            renamings.append(transform)
        elif isinstance(transform, core_model_loading.WeightConverter):
            converters.append(transform)
            # The first that has a pattern takes what matches it, in transformers too.
            of_pattern = dict.fromkeys(transform.source_patterns, transform) | of_pattern
    # A checkpoint may lack the prefix, or have it in vain.
    rename, prefix = core_model_loading.rename_source_key, model.base_model_prefix
    names = model.state_dict()
    found: dict[str, list[_Found]] = {}
    for tensor in _with_packed(folder, quantization):
        name, pattern = rename(tensor.key, renamings, converters, prefix, names)
        if name not in names and tensor.key in names:
            # It has the current name already.
            name, pattern = rename(tensor.key, [], [], prefix, names)
        place = _Found(tensor)
        if pattern is not None and name in names:
            converter = of_pattern[pattern]
            operations = converter.operations
            if len(converter.target_patterns) > 1 or {type(one).__name__ for one in operations} <= _CHOOSING:
                for target, part in _pieces(tensor, converter, model, name):
                    found.setdefault(name.replace(converter.target_patterns[0], target), []).append(_Found(part))
                continue
            # One that looks at the shape reads what a merge writes in the model's own order, too; others would not.
            if len(operations) == 1 and getattr(operations[0], "check_dims", False):
                place = _Found(_transposed(tensor, tuple(names[name].shape), operations[0]))
            else:
                is_stacked, dim = _check_operations(tensor.key, operations)
                number = _number(rename(tensor.key, renamings, [])[0], pattern)
                own = tensor
                if len(operations) > 1 and type(operations[-1]).__name__ == "Transpose":
                    own, dim = tensor.with_swapped(0, 1), 1  # gate and up of an expert, beside each other
                place = _Found(own, converter.source_patterns.index(pattern), number, is_stacked, dim)
        found.setdefault(name, []).append(place)
    stored: dict[str, Stored] = {}
    for name, places in found.items():
        if name in names:
            stored[name] = _together(places)
        elif len(places) == 1:  # no parameter takes it
            stored[name] = Stored(((places[0].tensor,),))
        else:
            for place in places:
                stored[place.tensor.key] = Stored(((place.tensor,),))
    return stored


def _transposed(tensor: StoredTensor, needed: tuple[int, ...], operation: Any) -> StoredTensor:
    """`tensor` with two dims swapped, if its shape is another one than the model's (qwen3_vl_moe)."""
    dims = operation.dim0, operation.dim1
    if len(tensor.shape) <= max(dims) or tensor.shape == needed:
        return tensor
    return tensor.with_swapped(*dims)


# Conversions that choose rows: of the q, k and v of a fused qkv (kimi_k25, sarvam_moe), of gate and up, those that are
# no padding (inkling2).
_CHOOSING = {"Chunk", "PermuteForRope", "Split", "Interleave", "Inkling2UnpadVocab"}


def _pieces(tensor: StoredTensor, converter: Any, model: Any, name: str) -> Iterator[tuple[str, StoredTensor]]:
    """(target, its rows of `tensor`) of a conversion that chooses rows. name: in `model`, of its first target."""
    kinds, dims = (
        [type(one).__name__ for one in converter.operations],
        {getattr(one, "dim", 0) for one in converter.operations},
    )
    if not {*kinds} <= _CHOOSING or len(dims) != 1 or tensor.packed is not None:
        raise UnsupportedError(tensor.key, f"its conversion on load ({kinds}) is not supported yet")
    (dim,) = dims
    # Of the numbers of its rows it makes the rows that it chooses.
    rows: dict[str, Any] = {converter.source_patterns[0]: torch.arange(tensor.shape[dim]).view(*[1] * dim, -1)}
    targets = SimpleNamespace(get_parameter=lambda one: model.get_parameter(one).to(torch.int64))  # as numbers of rows
    given = {"config": model.config, "model": targets, "full_layer_name": name}
    try:
        for operation in converter.operations:
            rows = operation.convert(rows, converter.source_patterns, converter.target_patterns, **given)
    except RuntimeError as error:  # the parts have other sizes
        raise UserError(f"{tensor.key} {list(tensor.shape)}", reason(error), "download it again") from None
    for target, of_target in rows.items():
        shape = (*tensor.shape[:dim], of_target.numel(), *tensor.shape[dim + 1 :])
        yield target, dataclasses.replace(tensor, shape=shape, rows=of_target.flatten(), rows_dim=dim)


def _check_operations(key: str, operations: Sequence[Any]) -> tuple[bool, int]:
    """Whether a conversion stacks experts, and the dim along which it concatenates; others are refused."""
    kinds = [(type(operation).__name__, getattr(operation, "dim", None)) for operation in operations]
    if len(kinds) > 1 and kinds[-1] == ("Transpose", None):
        del kinds[-1]
    for dim in (0, 1):  # 1: of stacks (step3p7)
        if kinds == [("Concatenate", dim)]:
            return False, dim
    if kinds in ([("MergeModulelist", 0)], [("MergeModulelist", 0), ("Concatenate", 1)]):
        return True, 0
    raise UnsupportedError(key, f"its conversion on load ({[name for name, _ in kinds]}) is not supported yet")


def _number(key: str, pattern: str) -> int | None:
    """The match of the `*` in a pattern of transformers."""
    if "*." not in pattern:
        return None
    match = re.search(pattern.replace("*.", r"(\d+)\."), key)
    return int(match[1]) if match else None


def _together(places: list[_Found]) -> Stored:
    """The tensors of one parameter, in the order in which transformers puts them together. Raises: UserError: two are
    of one place, or an expert lacks one."""
    # By number, not by name: 10 follows 9.
    places = sorted(places, key=lambda p: (p.pattern, -1 if p.number is None else p.number))
    for one, two in itertools.pairwise(places):
        if one.is_stacked != two.is_stacked or one[1:] == two[1:]:
            given = f"{one.tensor.file.parent}: {one.tensor.key} and {two.tensor.key}"
            raise UserError(given, "both are stored for the same parameter", "keep one of the two")
    if not places[0].is_stacked:  # as all are, or none
        return Stored((tuple(place.tensor for place in places),), dim=places[0].dim)
    names: dict[int, str] = {}
    by_place: dict[int, dict[int, StoredTensor]] = {}
    for place in places:
        names.setdefault(place.pattern, _any_expert(place))
        by_place.setdefault(place.number or 0, {})[place.pattern] = place.tensor
    experts, rows = sorted(by_place), []
    for expert in experts:
        row = by_place[expert]
        for pattern, name in names.items():
            if pattern not in row:
                given = f"checkpoint {places[0].tensor.file.parent}: {name.replace('*', str(expert))}"
                rule = f"it is missing, and other weights of expert {expert} are there"
                raise UserError(given, rule, "download it again")
        rows.append(tuple(row[pattern] for pattern in names))
    return Stored(tuple(rows), tuple(experts), tuple(names.values()), places[0].dim)


def _any_expert(place: _Found) -> str:
    """The key of a tensor, with `*` for the number of the expert."""
    before, dot, after = place.tensor.key.rpartition(f".{place.number}.")
    return f"{before}.*.{after}" if dot else after

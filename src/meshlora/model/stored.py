"""The stored tensors of each parameter of a model: one, or several to be put together.

Owns: finding the tensors of a Hugging Face checkpoint (single file or sharded, old and new key names, experts one by
one) and the place of each in its parameter. Does not own: reading them (`model.weights`), the formats of weights in few
bits, which a wing reads (`wings.quantized.packed`).

transformers' own rules for loading decide: its renamings, and those of its conversions that concatenate tensors,
stack the matrices of experts or transpose them. Others are refused by name, and only where the model has the weight.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from meshlora.feature import features
from meshlora.model.stream import dtype_name
from meshlora_ground.errors import UnsupportedError, UserError
from meshlora_ground.files import open_safetensors
from meshlora_ground.weight_files import weight_files

_ROWS_AT_ONCE = 4096
_HEAD, _EMBEDDING = "lm_head.weight", "embed_tokens.weight"

# (start, stop) along each dim.
Bounds = Sequence[tuple[int, int]]
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
        rows: the rows of the tensor in the file that it consists of, int64; None: all of them, in order.
    """

    file: Path
    key: str
    shape: tuple[int, ...]
    dtype: str
    value: Tensor | None = None
    packed: tuple[Format, Mapping[str, StoredTensor]] | None = None
    swapped: tuple[int, int] | None = None
    rows: Tensor | None = None

    @classmethod
    def in_memory(cls, key: str, value: Tensor) -> StoredTensor:
        """A tensor that need not be read."""
        dtype = dtype_name(value.dtype) if value.is_floating_point() else str(value.dtype)
        return cls(Path(), key, tuple(value.shape), dtype, value)


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
        rows: for each expert, or for the one parameter, the tensors to concatenate along its first dim.
        names: for messages, the key of each position in a row, with `*` for the number of the expert.
    """

    rows: tuple[tuple[StoredTensor, ...], ...]
    experts: tuple[int, ...] = ()
    names: tuple[str, ...] = ()

    @property
    def tensors(self) -> tuple[StoredTensor, ...]:
        """All of them."""
        return tuple(itertools.chain.from_iterable(self.rows))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the parameter."""
        first = self.rows[0]
        shape = (sum(t.shape[0] for t in first), *first[0].shape[1:]) if len(first) > 1 else first[0].shape
        return (len(self.experts), *shape) if self.experts else shape

    def shape_of(self, parts: Sequence[Part]) -> list[int]:
        """The shape of the parameter sliced to `parts`."""
        return [_along(dim, size, parts)[-1][1].stop for dim, size in enumerate(self.shape)]

    def blocks(self, parts: Sequence[Part]) -> Iterator[Block]:
        """The slices `parts` of the parameter, as slices of the stored tensors, one by one.

        Several parts along one dim are concatenated.
        """
        chosen = [_along(dim, size, parts) for dim, size in enumerate(self.shape)]
        stacked = 1 if self.experts else 0
        for number, row in enumerate(self.rows):
            if stacked and not any(start <= number < stop for (start, stop), _ in chosen[0]):
                continue
            start = 0
            for tensor in row:
                first = [(number, number + 1)] if stacked else []
                bounds = [*first, *((0, size) for size in tensor.shape)]
                if len(row) > 1:
                    bounds[stacked] = (start, start + tensor.shape[0])
                    start += tensor.shape[0]
                cuts = [list(_overlaps(own, bound)) for own, bound in zip(chosen, bounds, strict=True)]
                for cut in itertools.product(*cuts):
                    place = [place for _, place in cut]
                    own = tuple(
                        Part(dim, *inside)
                        for dim, (inside, _) in enumerate(cut[stacked:])
                        if inside != (0, tensor.shape[dim])
                    )
                    yield Block(tensor, own, (*(p.start for p in place[:stacked]), *place[stacked:]))

    def mistake(self, name: str, needed: tuple[int, ...]) -> tuple[str, str] | None:
        """(What is wrong, the rule) if this does not fit parameter `name` of shape `needed`."""
        if not self.experts or len(needed) != len(self.shape):
            return None if self.shape == needed else (name, shape_mistake(self.shape, needed))
        number, width, *others = needed
        matrix = (width // len(self.names), *others)
        for tensor, expert in zip(self.tensors, (e for e in self.experts for _ in self.names), strict=True):
            if expert >= number:
                return tensor.key, f"config.json says {number} experts, 0 to {number - 1}"
            if tensor.shape != matrix:
                return tensor.key, shape_mistake(tensor.shape, matrix)
        if missing := sorted(set(range(number)) - set(self.experts)):
            return self.names[0].replace("*", str(missing[0])), f"it is missing; config.json says {number} experts"
        return None


def _along(dim: int, size: int, parts: Sequence[Part]) -> list[tuple[tuple[int, int], slice]]:
    """[(range wanted along a dim, its place in the result)]."""
    found, offset = [], 0
    for part in [p for p in parts if p.dim == dim] or [Part(dim, 0, size)]:
        found.append(((part.start, part.stop), slice(offset, offset + part.stop - part.start)))
        offset += part.stop - part.start
    return found


def _overlaps(
    chosen: list[tuple[tuple[int, int], slice]], bound: tuple[int, int]
) -> Iterator[tuple[tuple[int, int], slice]]:
    """The parts of the chosen ranges within `bound`: (range from its start, place in the result)."""
    for (start, stop), place in chosen:
        low, high = max(start, bound[0]), min(stop, bound[1])
        if low < high or (start == stop and bound[0] <= start <= bound[1]):
            yield (
                (low - bound[0], high - bound[0]),
                slice(place.start + low - start, place.start + high - start),
            )


def shape_mistake(given: tuple[int, ...], needed: tuple[int, ...]) -> str:
    """The words for a wrong shape."""
    return f"its shape is {list(given)}, config.json says {list(needed)}"


def num_stored(folder: Path) -> int:
    """The number of tensors in a checkpoint; 0 if none can be read."""
    try:
        return sum(1 for _ in _stored_tensors(folder))
    except UserError:
        return 0


def stored_dtype(folder: Path) -> torch.dtype | None:
    """The dtype of most plain numbers in a checkpoint, which weights in few bits become; None if none can be read."""
    kinds = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
    with contextlib.suppress(UserError):
        sizes = Counter[str]()
        for tensor in _stored_tensors(folder):
            sizes[tensor.dtype] += math.prod(tensor.shape) if tensor.dtype in kinds else 0
        return next((kinds[name] for name, size in sizes.most_common(1) if size), None)
    return None


def has_own_head(folder: Path) -> bool:
    """Whether a checkpoint holds an output head with other values than its embedding: transformers ties no such two."""
    with contextlib.suppress(UserError):
        tensors = [*_stored_tensors(folder)]
        heads, embeddings = ([t for t in tensors if t.key.endswith(end)] for end in (_HEAD, _EMBEDDING))
        return len(heads) == len(embeddings) == 1 and not _same_values(heads[0], embeddings[0])
    return False


def _same_values(one: StoredTensor, other: StoredTensor) -> bool:
    with open_safetensors(one.file) as file, open_safetensors(other.file) as other_file:
        rows, other_rows = file.get_slice(one.key), other_file.get_slice(other.key)
        return one.shape == other.shape and all(
            torch.equal(rows[start : start + _ROWS_AT_ONCE], other_rows[start : start + _ROWS_AT_ONCE])
            for start in range(0, one.shape[0], _ROWS_AT_ONCE)
        )


def _stored_tensors(folder: Path) -> Iterator[StoredTensor]:
    for path in weight_files(folder):
        with open_safetensors(path) as file:
            for key in file.keys():  # noqa: SIM118 - not a dict
                view = file.get_slice(key)
                yield StoredTensor(path, key, tuple(view.get_shape()), view.get_dtype())


def _with_packed(folder: Path, quantization: Mapping[str, Any] | None) -> list[StoredTensor]:
    """The tensors of a checkpoint, where those of a weight in few bits are that weight.

    Raises:
        UserError: some are missing, or do not fit.
    """
    tensors = {tensor.key: tensor for tensor in _stored_tensors(folder)}
    if not quantization:
        return list(tensors.values())

    def value(key: str) -> Tensor:
        with open_safetensors(tensors[key].file) as file:
            found: Tensor = file.get_tensor(key)
            return found

    found, spent = dict(tensors), set[str]()
    places = [feature.packed_weights(tensors, quantization, value) for feature in features()]
    for name, form, keys, others in itertools.chain.from_iterable(places):
        parts = {part: tensors[key] for part, key in keys.items() if key in tensors}
        if form is None or parts.keys() != keys.keys() or len(parts) < 2:
            shapes = ", ".join(f"{part} {list(tensor.shape)}" for part, tensor in parts.items())
            raise UserError(
                f"checkpoint {folder}: {name}",
                f"its stored parts are not all there, or do not fit one another ({shapes})",
                "download it again",
            )
        spent |= {*keys.values(), *others} - {name}
        found[name] = StoredTensor(parts["codes"].file, name, form.shape, "F32", packed=(form, parts))
    return [tensor for key, tensor in found.items() if key not in spent]


class _Found(NamedTuple):
    """A tensor as transformers would load it.

    Attributes:
        pattern: the index of its pattern in the conversion. number: the match of a `*` in the pattern.
        is_stacked: whether the number is that of an expert.
    """

    tensor: StoredTensor
    pattern: int = 0
    number: int | None = None
    is_stacked: bool = False


def find_stored(folder: Path, model: Any, quantization: Mapping[str, Any] | None = None) -> dict[str, Stored]:
    """Name in `model` (not split, meta device) -> its stored tensors; and the tensors without a place in the model.

    quantization: the `quantization_config` of its config.json.

    Raises:
        UserError: two tensors for one place, an expert without one of its matrices.
        UnsupportedError: an unknown conversion.
    """
    from transformers import conversion_mapping, core_model_loading

    transforms = conversion_mapping.get_model_conversion_mapping(model)
    renamings = [t for t in transforms if isinstance(t, core_model_loading.WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, core_model_loading.WeightConverter)]
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
            converter = next(c for c in converters if pattern in c.source_patterns)
            operations = converter.operations
            if len(converter.target_patterns) > 1:
                for target, part in _pieces(tensor, converter, model.config):
                    found.setdefault(name.replace(converter.target_patterns[0], target), []).append(_Found(part))
                continue
            # One that looks at the shape reads what a merge writes in the model's own order, too; others would not.
            if [getattr(operation, "check_dims", False) for operation in operations] == [True]:
                place = _Found(_transposed(tensor, tuple(names[name].shape), operations[0]))
            else:
                is_stacked = _check_operations(tensor.key, operations)
                number = _number(rename(tensor.key, renamings, [])[0], pattern)
                place = _Found(tensor, converter.source_patterns.index(pattern), number, is_stacked)
        found.setdefault(name, []).append(place)
    stored: dict[str, Stored] = {}
    for name, places in found.items():
        if name in names:
            stored[name] = _together(places)
        else:  # no parameter takes these
            stored |= {p.tensor.key if len(places) > 1 else name: Stored(((p.tensor,),)) for p in places}
    return stored


def _transposed(tensor: StoredTensor, needed: tuple[int, ...], operation: Any) -> StoredTensor:
    """`tensor` with two dims swapped, if its shape is another one than the model's (qwen3_vl_moe)."""
    dims = operation.dim0, operation.dim1
    if len(tensor.shape) <= max(dims) or tensor.shape == needed:
        return tensor
    if tensor.packed is not None:
        raise UnsupportedError(tensor.key, "it is transposed on load, and in few bits: this is not proved")
    shape = list(tensor.shape)
    shape[dims[0]], shape[dims[1]] = shape[dims[1]], shape[dims[0]]
    return dataclasses.replace(tensor, shape=tuple(shape), swapped=dims)


def _pieces(tensor: StoredTensor, converter: Any, config: Any) -> Iterator[tuple[str, StoredTensor]]:
    """(target, its rows of `tensor`) of a conversion that chooses rows: of the q, k and v of a fused qkv (kimi_k25)."""
    kinds = [type(operation).__name__ for operation in converter.operations]
    if not {*kinds} <= {"Chunk", "PermuteForRope"} or tensor.packed is not None:
        raise UnsupportedError(tensor.key, f"its conversion on load ({kinds}) is not supported yet")
    # Of the numbers of its rows it makes the rows that it chooses.
    rows: dict[str, Any] = {converter.source_patterns[0]: torch.arange(tensor.shape[0])}
    for operation in converter.operations:
        rows = operation.convert(rows, converter.source_patterns, converter.target_patterns, config=config)
    for target, of_target in rows.items():
        yield target, dataclasses.replace(tensor, shape=(len(of_target), *tensor.shape[1:]), rows=of_target)


def _check_operations(key: str, operations: Sequence[Any]) -> bool:
    """Whether a conversion stacks experts; anything but stacking and concatenating is refused."""
    kinds = [(type(operation).__name__, getattr(operation, "dim", None)) for operation in operations]
    if kinds == [("Concatenate", 0)]:
        return False
    if kinds in ([("MergeModulelist", 0)], [("MergeModulelist", 0), ("Concatenate", 1)]):
        return True
    raise UnsupportedError(key, f"its conversion on load ({[name for name, _ in kinds]}) is not supported yet")


def _number(key: str, pattern: str) -> int | None:
    """The match of the `*` in a pattern of transformers."""
    match = re.search(pattern.replace("*.", r"(\d+)\."), key) if "*." in pattern else None
    return int(match[1]) if match else None


def _together(places: list[_Found]) -> Stored:
    places = sorted(places, key=lambda p: (p.pattern, -1 if p.number is None else p.number))
    for one, two in itertools.pairwise(places):
        if one.is_stacked != two.is_stacked or one[1:] == two[1:]:
            raise UserError(
                f"{one.tensor.file.parent}: {one.tensor.key} and {two.tensor.key}",
                "both are stored for the same parameter",
                "keep one of the two",
            )
    if not any(place.is_stacked for place in places):
        return Stored((tuple(place.tensor for place in places),))
    by_place = {(place.number or 0, place.pattern): place for place in places}
    experts, patterns = (sorted({key[side] for key in by_place}) for side in (0, 1))
    names = _names(places, patterns)
    for expert, (pattern, name) in itertools.product(experts, zip(patterns, names, strict=True)):
        if (expert, pattern) not in by_place:
            folder = places[0].tensor.file.parent
            raise UserError(
                f"checkpoint {folder}: {name.replace('*', str(expert))}",
                f"it is missing, and other weights of expert {expert} are there",
                "download it again",
            )
    rows = tuple(tuple(by_place[e, p].tensor for p in patterns) for e in experts)
    return Stored(rows, tuple(experts), names)


def _names(places: list[_Found], patterns: Collection[int]) -> tuple[str, ...]:
    """The key of each pattern, with `*` for the number of the expert."""
    firsts = {place.pattern: place for place in reversed(places)}
    parts = [firsts[pattern].tensor.key.rpartition(f".{firsts[pattern].number}.") for pattern in patterns]
    return tuple(f"{before}.*.{after}" if dot else after for before, dot, after in parts)

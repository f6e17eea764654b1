"""Checkpoint weights in few bits: from what is stored to plain numbers, or to codes that stay packed, for a slice.

Owns: the formats, the names of their tensors, and the arithmetic. Does not own: reading files (`model.weights`), packed
weights in memory (`wings.quantized.quantized`).

A cut may cross a block or a word: it is read whole, and a number is that of the checkpoint on every topology.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from meshlora.model.stored import Bounds, Format, Place, Reader
from meshlora.plan.rules import Packing
from meshlora.wings.quantized.plan import Touched
from meshlora.wings.quantized.quantized import Form, Packed, numbers_of_scales, values_of
from meshlora_ground.errors import UnsupportedError, UserError

METHODS = ("fp8", "fbgemm_fp8", "mxfp4", "compressed-tensors", "modelopt", "gptq", "awq", "bitsandbytes")
# Kinds of stored numbers of 8 bits; integers only where a method says so.
_OF_8_BITS = {"F8_E4M3": "fp8", "F8_E5M2": "fp8_e5m2", "I8": "integers"}
_MX_BLOCK, _NV_BLOCK = 32, 16
_NUM_BYTES = {"F8_E8M0": 1, "U8": 1, "BF16": 2, "F16": 2}
_BNB_STATE = ".quant_state.bitsandbytes__"
# Scales of activations and of caches, which training has no use for, and what says no more.
_SPENT = ("activation_scale", "input_scale", "input_scale_ub", "input_global_scale", "k_scale", "v_scale")
_WAY_OUT = "use the checkpoint that it was made from"


@runtime_checkable
class PackedFormat(Format, Protocol):
    """One whose codes and scales may stay packed."""

    @property
    def packing(self) -> Packing | None:
        """How codes and scales stay packed in memory; None if they cannot yet."""

    def keep(self, bounds: Bounds, read: Reader) -> Packed:
        """The slice `bounds` of the weight, packed: its codes, and the scales of all blocks that it has a part of."""


class Tensors(Protocol):
    """What is known of a stored tensor before it is read."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> str: ...


def check_packing(quantization: Any, model_type: Any, what: str) -> None:
    """Refuse a `quantization_config` of a config.json whose weights cannot be read.

    Raises:
        UnsupportedError: another method, or a variant of one. UserError: it is malformed.
    """
    given = quantization if isinstance(quantization, Mapping) else {}
    method, way_out = given.get("quant_method"), _WAY_OUT
    if method not in METHODS:
        rule = f"of quantised checkpoints those in {', '.join(METHODS)} are read"
        raise UnsupportedError(f"{what}: quantization_config with quant_method {method!r}", rule, way_out)
    if method == "mxfp4" and model_type != "gpt_oss":  # whether others hold the transpose is not known
        raise UnsupportedError(f"{what}: mxfp4 of model_type {model_type!r}", "only that of gpt_oss is read", way_out)
    # Option -> the values that are read, what stands for one that is not given first.
    read: dict[str, dict[str, tuple[Any, ...]]] = {
        "fp8": {"expert_dtype": ("fp8",)},
        "compressed-tensors": {
            "format": (
                None,
                "float-quantized",
                "int-quantized",
                "naive-quantized",
                "pack-quantized",
                "nvfp4-pack-quantized",
            ),
            "transform_config": (None, {}),
        },
        "modelopt": {"quant_algo": (None, "NVFP4", "FP8")},
        "gptq": {
            "bits": (None, 4, 8),
            "checkpoint_format": ("gptq", "gptq_v2"),
            "is_marlin_format": (False,),
            "pack_dtype": ("int32",),
        },
        "awq": {"bits": (None, 4), "version": ("gemm", "GEMM")},
        "bitsandbytes": {"bnb_4bit_quant_storage": ("uint8",)},
    }
    sparsity = given.get("sparsity_config")
    if isinstance(sparsity, Mapping) and sparsity.get("format", "dense") != "dense":
        raise UnsupportedError(f"{what}: sparse weights ({sparsity.get('format')!r})", "they are not read yet", way_out)
    for name, values in read.get(method, {}).items():
        value = given.get(name, values[0])
        if (value is None and name in ("bits", "format", "quant_algo")) or value not in values:
            raise UnsupportedError(f"{what}: {method} with {name} {given.get(name)!r}", "it is not read yet", way_out)
    block = given.get("weight_block_size")
    if block is not None and not (isinstance(block, list) and len(block) == 2 and all(map(_is_size, block))):
        raise UserError(f"{what}: weight_block_size {block!r}", "it must be [rows, columns]", "download it again")


def _is_size(value: Any) -> bool:
    return type(value) is int and value > 0


def find_packed(
    tensors: Mapping[str, Tensors], quantization: Mapping[str, Any], value: Callable[[str], Tensor]
) -> Iterator[Place]:
    """The place of each weight in few bits. value: reads a whole tensor by key.

    Raises:
        UnsupportedError: a variant of a format that is not read.
    """
    method, weights = quantization.get("quant_method"), _weights_of_groups(quantization)
    for key, codes in tensors.items():
        owner, _, leaf = key.rpartition(".")
        nvfp4 = _nvfp4(owner, leaf, tensors, str(method))
        if nvfp4 is not None:
            yield nvfp4
        elif codes.dtype in _OF_8_BITS and (codes.dtype != "I8" or method in ("compressed-tensors", "bitsandbytes")):
            if not leaf.endswith(("_scale", "_zero_point")):  # a part, which may be of 8 bits, too
                yield _of_8_bits(key, tensors, quantization, weights, value)
        elif method == "mxfp4" and key.endswith("_blocks"):
            name = key.removesuffix("_blocks")
            parts = {"codes": key, "scales": f"{name}_scales"}
            yield name, Mxfp4.of(codes.shape, _shape(tensors, parts["scales"])), parts, []
        elif leaf in ("qweight", "weight_packed"):
            yield _integers(owner, leaf, tensors, quantization, weights)
        elif _BNB_STATE in key:
            name, _, kind = key.partition(_BNB_STATE)
            parts = {part: f"{name}.{part}" for part in ("absmax", "quant_map", "nested_absmax", "nested_quant_map")}
            parts = {"codes": name} | {part: k for part, k in parts.items() if k in tensors}
            form_of_blocks = Blocks4.of(kind, bytes(value(key).tolist()))
            if name not in tensors or tensors[name].dtype != "U8":
                form_of_blocks = None
            yield name, form_of_blocks and form_of_blocks.fitting(tensors, parts), parts, [key]


def _nvfp4(owner: str, leaf: str, tensors: Mapping[str, Tensors], method: str) -> Place | None:
    """The place of codes of NVFP4, of which a float32 scale of the whole matrix tells."""
    names = {"weight_packed": "weight_global_scale", "weight": "weight_scale_2"}
    if leaf not in names or f"{owner}.{names[leaf]}" not in tensors:
        return None
    parts = {
        "codes": f"{owner}.{leaf}",
        "scales": f"{owner}.weight_scale",
        "global": f"{owner}.{names[leaf]}",
    }
    shapes = [_shape(tensors, key) for key in parts.values()]
    form = Nvfp4.of(shapes[0], shapes[1], shapes[2], divides=method == "compressed-tensors")
    if [tensors[key].dtype for key in parts.values() if key in tensors] != ["U8", "F8_E4M3", "F32"]:
        form = None
    return f"{owner}.weight", form, parts, [f"{owner}.{name}" for name in _SPENT]


def _of_8_bits(
    key: str,
    tensors: Mapping[str, Tensors],
    quantization: Mapping[str, Any],
    weights: Mapping[str, Any],
    value: Callable[[str], Tensor],
) -> Place:
    """The place of a matrix of float8 or of integers of 8 bits."""
    owner, codes = key.rpartition(".")[0], tensors[key]
    is_of_rows = codes.dtype == "I8" and quantization.get("quant_method") == "bitsandbytes"
    names = [("scales", f"{owner}.SCB")] if is_of_rows else [("scales", f"{key}_scale"), ("scales", f"{key}_scale_inv")]
    names += [("zeros", f"{key}_zero_point")] if codes.dtype == "I8" else []
    parts = {"codes": key} | {part: name for part, name in names if name in tensors}
    spent = [f"{owner}.{name}" for name in (*_SPENT, "weight_format")]
    if is_of_rows and spent[-1] in tensors and int(value(spent[-1])):
        raise UnsupportedError(spent[-1], "only int8 in rows is read", _WAY_OUT)
    scales = _shape(tensors, parts.get("scales", ""))
    if "scales" not in parts or _shape(tensors, parts.get("zeros", parts["scales"])) != scales:
        return key, None, parts, spent
    block = quantization.get("weight_block_size") or weights.get("block_structure") or [1, weights.get("group_size")]
    width = _NUM_BYTES.get(tensors[parts["scales"]].dtype, 4)
    form = Blocks8.of(
        codes.shape,
        (*scales, 1) if is_of_rows else scales,
        block if isinstance(block, list) and all(map(_is_size, block)) else None,
        _OF_8_BITS[codes.dtype],
        width,
    )
    if form is not None and codes.dtype == "I8":
        form = dataclasses.replace(form, divisor=127.0 if is_of_rows else 1.0, has_zeros="zeros" in parts)
    return key, form, parts, spent


def _integers(
    owner: str, leaf: str, tensors: Mapping[str, Tensors], quantization: Mapping[str, Any], weights: Mapping[str, Any]
) -> Place:
    """The place of a matrix of integers in words."""
    is_packed = leaf == "weight_packed"
    names = {"codes": leaf, "scales": "weight_scale" if is_packed else "scales"}
    zeros, groups = "weight_zero_point" if is_packed else "qzeros", "weight_g_idx" if is_packed else "g_idx"
    names |= {"zeros": zeros} if not is_packed or f"{owner}.{zeros}" in tensors else {}
    names |= {"groups": "g_idx"} if f"{owner}.g_idx" in tensors else {}
    if is_packed and f"{owner}.{groups}" in tensors:
        rule = "integers of compressed-tensors in the order of activations are not read yet"
        raise UnsupportedError(f"{owner}.{groups}", rule, _WAY_OUT)
    parts = {part: f"{owner}.{name}" for part, name in names.items()}
    shapes = {part: _shape(tensors, key) for part, key in parts.items()}
    bits = weights.get("num_bits", 4) if is_packed else quantization.get("bits", 4)
    return f"{owner}.weight", GroupedInts.of(shapes, quantization, bits), parts, [f"{owner}.weight_shape"]


def _shape(tensors: Mapping[str, Tensors], key: str) -> tuple[int, ...]:
    return tensors[key].shape if key in tensors else ()


def _weights_of_groups(quantization: Mapping[str, Any]) -> Mapping[str, Any]:
    """What compressed-tensors says of weights: `num_bits`, `group_size`, `block_structure`.

    Raises:
        UnsupportedError: not the same of all.
    """
    groups = quantization.get("config_groups")
    if quantization.get("quant_method") != "compressed-tensors" or not isinstance(groups, Mapping):
        return {}
    said_of = [group.get("weights") for group in groups.values() if isinstance(group, Mapping)]
    weights = [one for one in said_of if isinstance(one, Mapping)]
    found: dict[str, Any] = {}
    for field in ("num_bits", "group_size", "block_structure"):
        said = [w[field] for w in weights if w.get(field) is not None]
        if any(one != said[0] for one in said):
            raise UnsupportedError(f"config_groups with {field} {said}", "one for all weights is read", _WAY_OUT)
        if said:
            found[field] = said[0]
    if found.get("num_bits", 8) not in (4, 8):
        raise UnsupportedError(f"weights of {found['num_bits']} bits", "those of 4 and 8 are read", _WAY_OUT)
    return found


@dataclass(frozen=True)
class Blocks8:
    """Numbers of 8 bits, each times the float32 scale of its block (DeepSeek-V3, section 3.3). Scales may be exponents.

    Attributes:
        divisor: of scales: 127 where they are the largest numbers (LLM.int8, Dettmers et al., 2022). has_zeros: whether
            each block has a number that stands for 0.
    """

    shape: tuple[int, ...]
    block: tuple[int, ...]
    kind: str = "fp8"
    scale_bytes: int = 4
    divisor: float = 1.0
    has_zeros: bool = False

    @staticmethod
    def of(
        codes: tuple[int, ...],
        scales: tuple[int, ...],
        block: Sequence[int] | None,
        kind: str = "fp8",
        scale_bytes: int = 4,
    ) -> Blocks8 | None:
        """One scale for all, one for each row, or one for each `block` of the last two dims."""
        if math.prod(scales) == 1:
            return Blocks8(codes, codes, kind, scale_bytes)
        if scales == (*codes[:-1], 1):
            return Blocks8(codes, (*(1 for _ in codes[:-1]), codes[-1]), kind, scale_bytes)
        whole = (*(1 for _ in codes[:-2]), *(block or ()))
        fits = len(whole) == len(codes) and scales == tuple(-(-n // size) for n, size in zip(codes, whole, strict=True))
        return Blocks8(codes, whole, kind, scale_bytes) if fits else None

    @property
    def packing(self) -> Packing | None:
        """How codes and scales stay packed in memory."""
        if len(self.shape) not in (2, 3) or self.has_zeros:
            return None
        return Packing(self.kind, (self.block[-2], self.block[-1]), self.scale_bytes)

    def read(self, bounds: Bounds, read: Reader) -> Tensor:
        """The slice `bounds` of the weight, in float32."""
        value = read("codes", bounds).float()
        if self.has_zeros:
            value.sub_(_spread(*self._of_blocks("zeros", bounds, read)).float())
        touched, scales = self._of_blocks("scales", bounds, read)
        return value.mul_(_spread(touched, numbers_of_scales(scales)))

    def keep(self, bounds: Bounds, read: Reader) -> Packed:
        """The slice `bounds` of the weight, packed."""
        codes = read("codes", bounds).contiguous().view(torch.uint8)
        touched, scales = self._of_blocks("scales", bounds, read)
        if scales.dtype == torch.float8_e8m0fnu:
            scales = scales.view(torch.uint8)
        *experts, rows, columns = touched
        for along in experts:  # one scale of all of them, or one each
            scales = scales.repeat_interleave(torch.tensor(along.counts, dtype=torch.long), 0)
        return Packed(codes, scales.contiguous(), Form(self.kind, torch.float32, rows.counts, columns.counts))

    def _of_blocks(self, part: str, bounds: Bounds, read: Reader) -> tuple[list[Touched], Tensor]:
        """The blocks along each dim that the slice has a part of, and their scales or zeros."""
        touched = [Touched.by(*bound, size) for bound, size in zip(bounds, self.block, strict=True)]
        found = read(part, [(along.first, along.last) for along in touched])
        if part == "scales" and self.divisor != 1:
            found = found.float() / self.divisor
        return touched, found.reshape([along.last - along.first for along in touched])


def _spread(touched: Sequence[Touched], of_blocks: Tensor) -> Tensor:
    """What each block has, for each of its elements."""
    for dim, along in enumerate(touched):
        of_blocks = of_blocks.repeat_interleave(torch.tensor(along.counts, dtype=torch.long), dim)
    return of_blocks


@dataclass(frozen=True)
class Mxfp4:
    """4-bit values (E2M1) with a power of two for each 32 input features (OCP Microscaling Formats 1.0).

    gpt-oss stores matrices of experts as `[expert, output, block, 16 bytes]`; its model holds the transpose.
    """

    shape: tuple[int, ...]

    @staticmethod
    def of(codes: tuple[int, ...], scales: tuple[int, ...]) -> Mxfp4 | None:
        """The format of codes and scales of these shapes; None if they do not fit."""
        if len(codes) != 4 or codes != (*scales, _MX_BLOCK // 2):
            return None
        experts, outputs, blocks, _ = codes
        return Mxfp4((experts, blocks * _MX_BLOCK, outputs))

    @property
    def packing(self) -> Packing | None:
        """How codes and scales stay packed in memory."""
        return Packing("mxfp4", (1, _MX_BLOCK), 1)

    def keep(self, bounds: Bounds, read: Reader) -> Packed:
        """The slice `bounds` of the weight, packed: codes and scales as they are stored, transposed."""
        experts, (start, stop), outputs = bounds
        along = Touched.by(start, stop, _MX_BLOCK)
        assert start % 2 == 0 == stop % 2, bounds
        blocks = (along.first, along.last)
        codes = read("codes", [experts, outputs, blocks, (0, _MX_BLOCK // 2)]).flatten(-2)
        offset = along.first * _MX_BLOCK
        codes = codes[..., (start - offset) // 2 : (stop - offset) // 2].contiguous()
        rows = (1,) * (outputs[1] - outputs[0])
        form = Form("mxfp4", torch.float32, rows, along.counts, is_transposed=True)
        return Packed(codes, read("scales", [experts, outputs, blocks]), form)

    def read(self, bounds: Bounds, read: Reader) -> Tensor:
        """The slice `bounds` of the weight, in float32; one expert at a time, as its codes alone need little memory."""
        (first, last), (start, stop), outputs = bounds
        table = values_of("mxfp4")
        blocks = (start // _MX_BLOCK, -(-stop // _MX_BLOCK))
        offset = blocks[0] * _MX_BLOCK
        whole = torch.empty(last - first, stop - start, outputs[1] - outputs[0])
        for place, expert in enumerate(range(first, last)):
            one = (expert, expert + 1)
            pairs = read("codes", [one, outputs, blocks, (0, _MX_BLOCK // 2)])[0].int()
            values = torch.stack([table[pairs & 15], table[pairs >> 4]], -1).flatten(-2)  # low nibble first
            exponents = read("scales", [one, outputs, blocks])[0].int() - 127
            values = torch.ldexp(values, exponents[..., None]).flatten(-2)
            whole[place] = values[:, start - offset : stop - offset].T
        return whole


@dataclass(frozen=True)
class Nvfp4:
    """4-bit values (E2M1) with a float8 scale for each 16 input features, and a float32 one for the whole matrix.

    Attributes:
        divides: whether scales are divided by that of the matrix (compressed-tensors), or multiplied (modelopt).
    """

    shape: tuple[int, ...]
    divides: bool
    packing: None = None

    @staticmethod
    def of(
        codes: tuple[int, ...], scales: tuple[int, ...], of_matrix: tuple[int, ...], *, divides: bool
    ) -> Nvfp4 | None:
        """The format of tensors of these shapes; None if they do not fit."""
        shape = (codes[0], 2 * codes[1]) if len(codes) == 2 else ()
        fits = len(shape) == 2 and scales == (shape[0], shape[1] / _NV_BLOCK) and of_matrix in ((), (1,))
        return Nvfp4(shape, divides) if fits else None

    def read(self, bounds: Bounds, read: Reader) -> Tensor:
        """The slice `bounds` of the weight, in float32."""
        rows, (start, stop) = bounds
        along = Touched.by(start, stop, _NV_BLOCK)
        pairs = read("codes", [rows, (start // 2, -(-stop // 2))]).int()
        values = values_of("mxfp4")[torch.stack([pairs & 15, pairs >> 4], -1).flatten(1)]  # low nibble first
        scales, of_matrix = read("scales", [rows, (along.first, along.last)]).float(), read("global", [(0, 1)])
        scales = scales / of_matrix if self.divides else scales * of_matrix
        return values[:, start % 2 :][:, : stop - start] * _spread([Touched.by(*rows, 1), along], scales)

    def keep(self, bounds: Bounds, read: Reader) -> Packed:
        """Not yet."""
        raise AssertionError(self)


# AWQ: the place in a word of each of eight neighbouring columns.
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


@dataclass(frozen=True)
class GroupedInts:
    """Integers in 32-bit words: minus the zero, times the scale, of their output and group of input features.

    Attributes:
        method: gptq: words along the inputs, `[inputs / n, outputs]`; awq: along the outputs, in an order of its own,
            `[inputs, outputs / n]`; else compressed-tensors: `[outputs, inputs / n]`, with a zero of half the range, or
            zeros along the outputs, `[outputs / n, groups]`.
        group: input features that share a scale. zero_offset: added to stored zeros.
    """

    shape: tuple[int, ...]
    method: str
    bits: int
    group: int
    zero_offset: int = 0
    has_groups: bool = False
    has_zeros: bool = True
    packing: None = None

    @staticmethod
    def of(shapes: Mapping[str, tuple[int, ...]], quantization: Mapping[str, Any], bits: int) -> GroupedInts | None:
        """The format of tensors of these shapes, by part; None if they do not fit."""
        method, codes = quantization.get("quant_method"), shapes["codes"]
        number = 32 // bits
        if len(codes) != 2 or len(shapes["scales"]) != 2:
            return None
        if method == "compressed-tensors":
            outputs, inputs, (rows, groups) = codes[0], codes[1] * number, shapes["scales"]
            if shapes.get("zeros", (-(-rows // number), groups)) != (-(-rows // number), groups):
                return None
        else:
            groups, rows = shapes["scales"]
            inputs, outputs = (codes[0] * number, codes[1]) if method == "gptq" else (codes[0], codes[1] * number)
            if shapes["zeros"] != (groups, outputs // number) or shapes.get("groups", (inputs,)) != (inputs,):
                return None
        if rows != outputs or not groups or inputs % groups:
            return None
        offset = int(method == "gptq" and quantization.get("checkpoint_format", "gptq") == "gptq")
        form = GroupedInts((outputs, inputs), str(method), bits, inputs // groups, offset)
        return dataclasses.replace(form, has_groups="groups" in shapes, has_zeros="zeros" in shapes)

    def read(self, bounds: Bounds, read: Reader) -> Tensor:
        """The slice `bounds` of the weight, in float32."""
        outputs, inputs = bounds
        group = torch.arange(*inputs) // self.group
        if self.has_groups:  # features in the order of their activations: a group is not a range
            group = read("groups", [inputs]).long()
        first = int(group.min()) if len(group) else 0
        groups = (first, int(group.max()) + 1 if len(group) else 0)
        codes, zeros, scales = self._parts(outputs, inputs, groups, read)
        return (codes - zeros.index_select(1, group - first)).float() * scales.index_select(1, group - first)

    def keep(self, bounds: Bounds, read: Reader) -> Packed:
        """Not yet."""
        raise AssertionError(self)

    def _parts(
        self, outputs: tuple[int, int], inputs: tuple[int, int], groups: tuple[int, int], read: Reader
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(codes `[outputs, inputs]`, zeros and scales `[outputs, groups]`)."""
        if self.method == "compressed-tensors":
            scales = read("scales", [outputs, groups]).float()
            zeros = torch.full_like(scales, 2 ** (self.bits - 1)).int()
            if self.has_zeros:
                zeros = self._numbers("zeros", [outputs, groups], 0, read)
            return self._numbers("codes", [outputs, inputs], 1, read), zeros, scales
        scales = read("scales", [groups, outputs]).float().T
        zeros = self._numbers("zeros", [groups, outputs], 1, read).T
        zeros = (zeros + self.zero_offset) & (2**self.bits - 1)
        codes = self._numbers("codes", [inputs, outputs], 0 if self.method == "gptq" else 1, read).T
        return codes, zeros, scales

    def _numbers(self, part: str, bounds: Bounds, dim: int, read: Reader) -> Tensor:
        """The integers of the slice `bounds`, which are in words along `dim`."""
        number = 32 // self.bits
        start, stop = bounds[dim]
        words = (start // number, -(-stop // number))
        found = read(part, [words if d == dim else bound for d, bound in enumerate(bounds)])
        shifts = torch.tensor(_AWQ_ORDER if self.method == "awq" else range(number), dtype=torch.int32) * self.bits
        shifts = shifts.reshape([-1 if d == dim + 1 else 1 for d in range(3)])
        numbers = (found.unsqueeze(dim + 1) >> shifts) & (2**self.bits - 1)
        offset = words[0] * number
        return numbers.flatten(dim, dim + 1).narrow(dim, start - offset, stop - start)


@dataclass(frozen=True)
class Blocks4:
    """bitsandbytes' nf4 and fp4: 4-bit numbers of a table, times the scale of their block of neighbouring weights.

    Attributes:
        block: weights that share a scale, in the order of the flattened matrix. nested: scales that share one, where
            scales are 8-bit numbers of a table themselves; 0 where they are plain. offset: added to nested scales.
    """

    shape: tuple[int, ...]
    block: int
    nested: int = 0
    offset: float = 0.0
    kind: str = "nf4"

    @staticmethod
    def of(kind: str, state: bytes) -> Blocks4 | None:
        """From the JSON that is stored beside a matrix; None if it is malformed, or not of 4 bits."""
        try:
            found = json.loads(state)
            shape, block, nested = found["shape"], found["blocksize"], found.get("nested_blocksize", 0)
            offset = float(found.get("nested_offset", 0.0))
        except (ValueError, KeyError, TypeError, AttributeError):
            return None
        is_right = isinstance(shape, list) and len(shape) == 2 and all(map(_is_size, [*shape, block]))
        if kind not in ("nf4", "fp4") or not is_right or not (nested == 0 or _is_size(nested)) or shape[1] % 2:
            return None
        return Blocks4((shape[0], shape[1]), block, nested, offset, kind)

    def fitting(self, tensors: Mapping[str, Tensors], parts: Mapping[str, str]) -> Blocks4 | None:
        """This, if the stored tensors have the shapes that it needs."""
        number = math.prod(self.shape)
        scales = -(-number // self.block)
        needed = {"codes": (number // 2, 1), "quant_map": (16,), "absmax": (scales,)}
        if self.nested:
            needed |= {"nested_absmax": (-(-scales // self.nested),), "nested_quant_map": (256,)}
        return self if {part: _shape(tensors, key) for part, key in parts.items()} == needed else None

    def read(self, bounds: Bounds, read: Reader) -> Tensor:
        """The slice `bounds` of the weight, in float32: whole rows are read, as their blocks follow one another."""
        (first, last), columns = bounds
        width = self.shape[1]
        start, stop = first * width, last * width
        pairs = read("codes", [(start // 2, stop // 2), (0, 1)]).flatten().int()
        values = read("quant_map", [(0, 16)])[torch.stack([pairs >> 4, pairs & 15], -1).flatten()]  # high nibble first
        blocks = (start // self.block, -(-stop // self.block))
        values = values * self._scales(blocks, read)[torch.arange(start, stop) // self.block - blocks[0]]
        return values.reshape(last - first, width)[:, slice(*columns)]

    @property
    def packing(self) -> Packing | None:
        """How codes and scales stay packed in memory: their blocks must lie in rows."""
        return None if self.shape[1] % self.block else Packing(self.kind, (1, self.block), 4)

    def keep(self, bounds: Bounds, read: Reader) -> Packed:
        """The slice `bounds` of the weight, packed; scales in few bits become float32."""
        if not torch.equal(read("quant_map", [(0, 16)]).float(), values_of(self.kind)):
            raise UnsupportedError(f"{self.kind} with levels of its own", "they cannot stay packed", "leave out keep")
        (first, last), columns = bounds
        along, each = Touched.by(*columns, self.block), self.shape[1] // self.block
        rows, width = last - first, self.shape[1] // 2
        codes = read("codes", [(first * width, last * width), (0, 1)]).view(rows, width)
        scales = self._scales((first * each, last * each), read).view(rows, each)[:, along.first : along.last]
        codes = codes[:, columns[0] // 2 : columns[1] // 2].contiguous()
        return Packed(codes, scales.float().contiguous(), Form(self.kind, torch.float32, (1,) * rows, along.counts))

    def _scales(self, blocks: tuple[int, int], read: Reader) -> Tensor:
        scales = read("absmax", [blocks])
        if not self.nested:
            return scales
        outer = (blocks[0] // self.nested, -(-blocks[1] // self.nested))
        of_each = torch.arange(*blocks) // self.nested - outer[0]
        table = read("nested_quant_map", [(0, 256)])
        return table[scales.int()] * read("nested_absmax", [outer])[of_each] + self.offset

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
from meshlora.wings.quantized.fp4 import place_of_mxfp4, place_of_nvfp4
from meshlora.wings.quantized.grouped_ints import GroupedInts
from meshlora.wings.quantized.kinds import MX_BLOCK, Tensors, Touched
from meshlora.wings.quantized.quantized import Form, Packed, numbers_of_scales, values_of
from meshlora_ground.errors import UnsupportedError, UserError

METHODS = ("fp8", "fbgemm_fp8", "mxfp4", "compressed-tensors", "modelopt", "gptq", "awq", "bitsandbytes")
# Kinds of stored numbers of 8 bits; integers only where a method says so.
_OF_8_BITS = {"F8_E4M3": "fp8", "F8_E5M2": "fp8_e5m2", "I8": "integers"}
_OF_COMPRESSED = (None, "float-quantized", "int-quantized", "naive-quantized", "pack-quantized", "nvfp4-pack-quantized")
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


def check_packing(quantization: Any, model_type: Any, what: str) -> None:
    """Refuse a `quantization_config` of a config.json whose weights cannot be read.

    Raises:
        UnsupportedError: another method, or a variant of one. UserError: it is malformed.
    """
    given: Mapping[str, Any] = {}
    if isinstance(quantization, Mapping):
        given = quantization
    method, way_out = given.get("quant_method"), _WAY_OUT
    if method not in METHODS:
        rule = f"of quantised checkpoints those in {', '.join(METHODS)} are read"
        raise UnsupportedError(f"{what}: quantization_config with quant_method {method!r}", rule, way_out)
    if method == "mxfp4" and model_type != "gpt_oss":  # whether others hold the transpose is not known
        raise UnsupportedError(f"{what}: mxfp4 of model_type {model_type!r}", "only that of gpt_oss is read", way_out)
    # Option -> the values that are read, what stands for one that is not given first.
    read: dict[str, dict[str, tuple[Any, ...]]] = {
        "fp8": {"expert_dtype": ("fp8", "fp4")},
        "compressed-tensors": {"format": _OF_COMPRESSED, "transform_config": (None, {})},
        # Of several kinds each matrix says its own.
        "modelopt": {"quant_algo": (None, "NVFP4", "FP8", "MIXED_PRECISION")},
        "gptq": {
            "bits": (None, 2, 3, 4, 8),
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
        nvfp4 = place_of_nvfp4(key, tensors, _spent(owner))
        if nvfp4 is not None:
            yield nvfp4
        elif codes.dtype in _OF_8_BITS and (codes.dtype != "I8" or method in ("compressed-tensors", "bitsandbytes")):
            if not leaf.endswith(("_scale", "_zero_point")):  # a part, which may be of 8 bits, too
                yield _of_8_bits(key, tensors, quantization, weights, value)
        elif codes.dtype == "I8" and method == "fp8":  # experts of a checkpoint whose other matrices are float8
            yield place_of_mxfp4(key, tensors)
        elif method == "mxfp4" and key.endswith("_blocks"):
            name = key.removesuffix("_blocks")
            parts = {"codes": key, "scales": f"{name}_scales"}
            yield name, Mxfp4.of(codes.shape, _shape(tensors, parts["scales"])), parts, []
        elif leaf in ("qweight", "weight_packed"):
            yield _integers(owner, leaf, tensors, quantization, weights)
        elif _BNB_STATE in key:
            yield _of_4_bits(key, tensors, value)


def _of_4_bits(key: str, tensors: Mapping[str, Tensors], value: Callable[[str], Tensor]) -> Place:
    """The place of codes of bitsandbytes, of which the JSON at `key` tells."""
    name, _, kind = key.partition(_BNB_STATE)
    parts = {"codes": name}
    # Scales are nested or plain: `fitting` says whether what is there belongs together.
    for part in ("absmax", "quant_map", "nested_absmax", "nested_quant_map"):
        if f"{name}.{part}" in tensors:
            parts[part] = f"{name}.{part}"
    form = None
    if name in tensors and tensors[name].dtype == "U8":
        form = Blocks4.of(kind, bytes(value(key).tolist()))  # the JSON is stored as a tensor of bytes
    return name, form and form.fitting(tensors, parts), parts, [key]


def _spent(owner: str) -> list[str]:
    return [f"{owner}.{name}" for name in _SPENT]


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
    # DeepSeek calls its scales inverse ones, and multiplies by them like all others.
    names = {f"{key}_scale": "scales", f"{key}_scale_inv": "scales"}
    if quantization.get("quant_method") == "fp8":  # of DeepSeek-V4
        names[f"{owner}.scale"] = "scales"
    if is_of_rows:
        names = {f"{owner}.SCB": "scales"}
    if codes.dtype == "I8":
        names[f"{key}_zero_point"] = "zeros"
    parts = {"codes": key} | {part: name for name, part in names.items() if name in tensors}
    spent = [*_spent(owner), f"{owner}.weight_format"]
    if is_of_rows and spent[-1] in tensors and int(value(spent[-1])):
        raise UnsupportedError(spent[-1], "only int8 in rows is read", _WAY_OUT)
    scales = _shape(tensors, parts.get("scales", ""))
    if "scales" not in parts or _shape(tensors, parts.get("zeros", parts["scales"])) != scales:
        return key, None, parts, spent
    block = quantization.get("weight_block_size") or weights.get("block_structure") or [1, weights.get("group_size")]
    if not isinstance(block, list) or not all(map(_is_size, block)):
        block = None
    if is_of_rows:
        scales = (*scales, 1)
    width = _NUM_BYTES.get(tensors[parts["scales"]].dtype, 4)
    form = Blocks8.of(codes.shape, scales, block, _OF_8_BITS[codes.dtype], width)
    if form is not None:
        form = dataclasses.replace(form, has_zeros="zeros" in parts)
    if form is not None and is_of_rows:
        form = dataclasses.replace(form, divisor=127.0)
    return key, form, parts, spent


def _integers(
    owner: str, leaf: str, tensors: Mapping[str, Tensors], quantization: Mapping[str, Any], weights: Mapping[str, Any]
) -> Place:
    """The place of a matrix of integers in words."""
    names, bits = {"codes": leaf, "scales": "scales", "zeros": "qzeros"}, quantization.get("bits", 4)
    prefix, group = "", quantization.get("group_size")
    if leaf == "weight_packed":  # of compressed-tensors
        names, bits, prefix = {"codes": leaf, "scales": "weight_scale"}, weights.get("num_bits", 4), "weight_"
        group = weights.get("group_size")
        if f"{owner}.weight_zero_point" in tensors:
            names["zeros"] = "weight_zero_point"
    if f"{owner}.{prefix}g_idx" in tensors:
        names["groups"] = f"{prefix}g_idx"
    parts = {part: f"{owner}.{name}" for part, name in names.items()}
    shapes = {part: _shape(tensors, key) for part, key in parts.items()}
    form = GroupedInts.of(shapes, quantization, bits, group)
    if form is not None:
        form = dataclasses.replace(form, scale_bytes=_NUM_BYTES.get(tensors[parts["scales"]].dtype, 4))
    return f"{owner}.weight", form, parts, [f"{owner}.weight_shape"]


def _shape(tensors: Mapping[str, Tensors], key: str) -> tuple[int, ...]:
    return tensors[key].shape if key in tensors else ()


def _weights_of_groups(quantization: Mapping[str, Any]) -> Mapping[str, Any]:
    """What compressed-tensors says of weights: `num_bits`, `group_size`, `block_structure`. Raises: UnsupportedError:
    not the same of all."""
    groups = quantization.get("config_groups")
    if quantization.get("quant_method") != "compressed-tensors" or not isinstance(groups, Mapping):
        return {}
    groups = [group for group in groups.values() if isinstance(group, Mapping)]
    weights = [group["weights"] for group in groups if isinstance(group.get("weights"), Mapping)]
    found: dict[str, Any] = {}
    for field in ("num_bits", "group_size", "block_structure"):
        said = [one[field] for one in weights if one.get(field) is not None]
        if said and said.count(said[0]) < len(said):
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
            return Blocks8(codes, (1,) * (len(codes) - 1) + codes[-1:], kind, scale_bytes)
        whole = (1,) * (len(codes) - 2) + tuple(block or ())
        if len(whole) != len(codes) or scales != tuple(-(-n // size) for n, size in zip(codes, whole, strict=True)):
            return None
        return Blocks8(codes, whole, kind, scale_bytes)

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
        if scales.dtype == torch.float8_e8m0fnu:  # exponents, which are held as bytes
            scales = scales.view(torch.uint8)
        *experts, rows, columns = touched
        for along in experts:  # one scale of all of them, or one each
            scales = scales.repeat_interleave(torch.tensor(along.counts, dtype=torch.long), 0)
        return Packed(codes, scales.contiguous(), Form(self.kind, torch.float32, rows.counts, columns.counts))

    def _of_blocks(self, part: str, bounds: Bounds, read: Reader) -> tuple[list[Touched], Tensor]:
        """The blocks along each dim that the slice has a part of, and their scales or zeros."""
        touched, blocks = [], []
        for bound, size in zip(bounds, self.block, strict=True):
            touched.append(Touched.by(*bound, size))
            blocks.append((touched[-1].first, touched[-1].last))
        found = read(part, blocks)
        if part == "scales" and self.divisor != 1:
            found = found.float() / self.divisor
        # A scale of the whole matrix, or of rows, may be stored with fewer dims.
        return touched, found.reshape([last - first for first, last in blocks])


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
        if len(codes) != 4 or codes != (*scales, MX_BLOCK // 2):
            return None
        experts, outputs, blocks, _ = codes
        return Mxfp4((experts, blocks * MX_BLOCK, outputs))

    @property
    def packing(self) -> Packing | None:
        """How codes and scales stay packed in memory."""
        return Packing("mxfp4", (1, MX_BLOCK), 1)

    def keep(self, bounds: Bounds, read: Reader) -> Packed:
        """The slice `bounds` of the weight, packed: codes and scales as they are stored, transposed."""
        experts, (start, stop), outputs = bounds
        along = Touched.by(start, stop, MX_BLOCK)
        assert start % 2 == 0 == stop % 2, bounds
        blocks = (along.first, along.last)
        codes = read("codes", [experts, outputs, blocks, (0, MX_BLOCK // 2)]).flatten(-2)
        offset = along.first * MX_BLOCK
        codes = codes[..., (start - offset) // 2 : (stop - offset) // 2].contiguous()
        rows = (1,) * (outputs[1] - outputs[0])
        form = Form("mxfp4", torch.float32, rows, along.counts, is_transposed=True)
        return Packed(codes, read("scales", [experts, outputs, blocks]), form)

    def read(self, bounds: Bounds, read: Reader) -> Tensor:
        """The slice `bounds` of the weight, in float32; one expert at a time, as its codes alone need little memory."""
        (first, last), (start, stop), outputs = bounds
        table = values_of("mxfp4")
        blocks = (start // MX_BLOCK, -(-stop // MX_BLOCK))
        offset = blocks[0] * MX_BLOCK
        whole = torch.empty(last - first, stop - start, outputs[1] - outputs[0])
        for place, expert in enumerate(range(first, last)):
            one = (expert, expert + 1)
            pairs = read("codes", [one, outputs, blocks, (0, MX_BLOCK // 2)])[0].int()
            values = torch.stack([table[pairs & 15], table[pairs >> 4]], -1).flatten(-2)  # low nibble first
            exponents = read("scales", [one, outputs, blocks])[0].int() - 127
            values = torch.ldexp(values, exponents[..., None]).flatten(-2)
            whole[place] = values[:, start - offset : stop - offset].T
        return whole


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
        if {part: _shape(tensors, key) for part, key in parts.items()} != needed:
            return None
        return self

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
        if self.shape[1] % self.block:
            return None
        return Packing(self.kind, (1, self.block), 4)

    def keep(self, bounds: Bounds, read: Reader) -> Packed:
        """The slice `bounds` of the weight, packed; scales in few bits become float32."""
        # What stays packed is unpacked with bitsandbytes' own levels.
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
        # Scales in few bits are blocks themselves, cut as those of weights are.
        outer = (blocks[0] // self.nested, -(-blocks[1] // self.nested))
        of_each = torch.arange(*blocks) // self.nested - outer[0]
        table = read("nested_quant_map", [(0, 256)])
        return table[scales.int()] * read("nested_absmax", [outer])[of_each] + self.offset

"""Integers of 2 to 8 bits in 32-bit words, with a scale and a zero for each output and group of inputs: GPTQ, AWQ, and
compressed-tensors' `pack-quantized`.

Owns: the three orders in a file, and a slice, plain or packed. Does not own: the names of tensors
(`wings.quantized.packed`), unpacking (`wings.quantized.quantized`).

Packed in memory all three are the same: `[outputs, inputs]`, a number in a byte, or two if it has at most 4 bits, the
even input in the low half. A cut may cross a word, or a group.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshlora.model.stored import Bounds, Reader
from meshlora.plan.rules import Packing
from meshlora.wings.quantized.kinds import BITS, Touched
from meshlora.wings.quantized.quantized import Form, Packed
from meshlora_ground.errors import UnsupportedError

# AWQ: the place in a word of each of eight neighbouring columns.
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
_WORD = 32  # bits


@dataclass(frozen=True)
class GroupedInts:
    """Integers in words: minus the zero, times the scale, of their output and group of input features.

    Attributes:
        method: gptq: words along the inputs, `[inputs / n, outputs]`; awq: along the outputs, in an order of its own,
            `[inputs, outputs / n]`; else compressed-tensors: `[outputs, inputs / n]`, with a zero of half the range, or
            zeros along the outputs, `[outputs / n, groups]`.
        group: input features that share a scale; the last may have fewer. zero_offset: added to stored zeros.
        has_groups: whether a tensor says the group of each input. is_ordered: whether it may be any.
    """

    shape: tuple[int, ...]
    method: str
    bits: int
    group: int
    zero_offset: int = 0
    has_groups: bool = False
    has_zeros: bool = True
    is_ordered: bool = False
    scale_bytes: int = 2

    @staticmethod
    def of(
        shapes: Mapping[str, tuple[int, ...]], quantization: Mapping[str, Any], bits: int, group: Any = None
    ) -> GroupedInts | None:
        """The format of tensors of these shapes, by part; None if they do not fit.

        group: the size of a group, as config.json has it; -1: all inputs.
        """
        method, codes, scales = str(quantization.get("quant_method")), shapes["codes"], shapes["scales"]
        if len(codes) != 2 or len(scales) != 2:
            return None
        outputs, inputs = codes
        if method == "compressed-tensors":
            inputs, (rows, groups) = inputs * _WORD // bits, scales
            zeros: tuple[int, ...] = (-(-rows * bits // _WORD), groups)
        else:
            inputs, outputs = codes
            groups, rows = scales
            if method == "gptq":
                inputs = inputs * _WORD // bits
            else:
                outputs = outputs * _WORD // bits
            zeros = (groups, outputs * bits // _WORD)
        has_zeros = "zeros" in shapes
        if shapes.get("zeros", zeros) != zeros or shapes.get("groups", (inputs,)) != (inputs,):
            return None
        if rows != outputs or not groups:
            return None
        if type(group) is not int or group <= 0 or -(-inputs // group) != groups:
            if inputs % groups:
                return None
            group = inputs // groups
        # The first format of gptq stores zeros less 1; gptq_v2 as they are.
        offset = int(method == "gptq" and quantization.get("checkpoint_format", "gptq") == "gptq")
        has_groups = "groups" in shapes
        is_ordered = has_groups and quantization.get("desc_act") is not False
        return GroupedInts((outputs, inputs), method, bits, group, offset, has_groups, has_zeros, is_ordered)

    @property
    def packing(self) -> Packing:
        """How codes and scales stay packed in memory."""
        return Packing(self._kind, (1, self.group), self.scale_bytes)

    @property
    def _kind(self) -> str:
        kinds = ("signed4", "integers")
        if self.has_zeros:
            kinds = ("ints4", "ints8")
        return kinds[self.bits > 4]

    def read(self, bounds: Bounds, read: Reader) -> Tensor:
        """The slice `bounds` of the weight, in float32."""
        outputs, inputs = bounds
        index, groups = self._groups(inputs, read), (0, 0)
        if len(index):
            groups = (int(index.min()), int(index.max()) + 1)
        codes, zeros, scales = self._parts(outputs, inputs, groups, read)
        index = index - groups[0]
        return (codes - zeros.index_select(1, index)).float() * scales.float().index_select(1, index)

    def keep(self, bounds: Bounds, read: Reader) -> Packed:
        """The slice `bounds` of the weight, packed. Columns are cut between bytes.

        Raises:
            UnsupportedError: inputs are in another order than config.json says.
        """
        outputs, inputs = bounds
        index, along = self._groups(inputs, read), Touched.by(*inputs, self.group)
        groups, counts, order = (along.first, along.last), along.counts, None
        if self.is_ordered:  # each rank may have inputs of any group
            groups = (0, -(-self.shape[1] // self.group))
            counts, order = (1,) * groups[1], index.int()
        elif not torch.equal(index, torch.arange(*inputs) // self.group):
            rule = "config.json has desc_act: false, and its g_idx is another order"
            raise UnsupportedError(f"{self.method} of {list(self.shape)}", rule, "leave out model.quantization")
        codes, zeros, scales = self._parts(outputs, inputs, groups, read)
        if not self.has_zeros:  # half of the range for all: codes have a sign in its place
            codes = codes - 2 ** (self.bits - 1)
        codes = codes.to(torch.uint8) & (2 ** BITS[self._kind] - 1)
        if BITS[self._kind] == 4:
            codes = codes[:, 0::2] | (codes[:, 1::2] << 4)
        if self.has_zeros:  # of at most 8 bits: exact in any float
            scales = torch.stack([scales, zeros.to(scales.dtype)], -1).flatten(1)
        form = Form(self._kind, torch.float32, (1,) * len(codes), counts, order=order)
        return Packed(codes.contiguous(), scales.contiguous(), form)

    def _groups(self, inputs: tuple[int, int], read: Reader) -> Tensor:
        """The group of each input, int64."""
        found = torch.arange(*inputs) // self.group
        if not self.has_groups:
            return found
        stored = read("groups", [inputs]).long()
        if bool((stored < 0).any()):  # compressed-tensors has -1 for the order of the file
            return found
        return stored

    def _parts(
        self, outputs: tuple[int, int], inputs: tuple[int, int], groups: tuple[int, int], read: Reader
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(codes `[outputs, inputs]`, zeros and scales `[outputs, groups]`)."""
        if self.method == "compressed-tensors":
            scales = read("scales", [outputs, groups])
            zeros = torch.full_like(scales, 2 ** (self.bits - 1)).int()
            if self.has_zeros:
                zeros = self._numbers("zeros", [outputs, groups], 0, read)
            return self._numbers("codes", [outputs, inputs], 1, read), zeros, scales
        scales = read("scales", [groups, outputs]).T
        zeros = self._numbers("zeros", [groups, outputs], 1, read).T
        zeros = (zeros + self.zero_offset) & (2**self.bits - 1)  # 0 less 1 is stored as the largest: it wraps
        codes = self._numbers("codes", [inputs, outputs], int(self.method == "awq"), read).T
        return codes, zeros, scales

    def _numbers(self, part: str, bounds: Bounds, dim: int, read: Reader) -> Tensor:
        """The integers of the slice `bounds`, int32, which follow one another in words along `dim`, lowest bits first.

        Those of 3 bits may begin in one word and end in the next.
        """
        start, stop = bounds[dim]
        first, last = start * self.bits // _WORD, -(-stop * self.bits // _WORD)
        of_words = list(bounds)
        of_words[dim] = (first, last)
        words, places = read(part, of_words), torch.arange(start, stop)
        if self.method == "awq":
            places = places // 8 * 8 + torch.tensor(_AWQ_ORDER)[places % 8]
        begin = places * self.bits - first * _WORD
        shape = [1, 1]
        shape[dim] = -1
        word, shift = begin // _WORD, (begin % _WORD).int().view(shape)
        # The sign of a word is shifted in from above, and masked out.
        numbers = words.index_select(dim, word) >> shift
        if _WORD % self.bits:
            here = (_WORD - shift).clamp(max=self.bits)  # bits in the first word
            rest = words.index_select(dim, (word + 1).clamp(max=last - first - 1)) << here
            numbers = torch.where(here < self.bits, numbers & ((1 << here) - 1) | rest, numbers)
        return numbers & (2**self.bits - 1)

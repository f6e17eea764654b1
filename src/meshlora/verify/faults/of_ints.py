"""Faults of integers in words, GPTQ's and AWQ's: their order, the zeros, and the order of activations."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from meshlora.verify.faults.fault import after, around
from meshlora.verify.features import Feature
from meshlora.wings.quantized.grouped_ints import GroupedInts


@around(GroupedInts, "_numbers", needs={Feature.INTS, Feature.FOUR_BITS})
def ints_in_the_order_of_another_format(original: Any, self: GroupedInts, *given: Any) -> Tensor:
    """the numbers of a word lie in the order of its format"""
    other = "gptq" if self.method == "awq" else "awq"
    found: Tensor = original(dataclasses.replace(self, method=other), *given)
    return found


@after(GroupedInts, "_parts", needs={Feature.INTS})
def ints_zeros_off_by_one(found: tuple[Tensor, Tensor, Tensor], *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    """GPTQ's first format stores zeros less 1, others as they are"""
    codes, zeros, scales = found
    return codes, zeros + 1, scales


@after(GroupedInts, "_parts", needs={Feature.INTS})
def ints_zero_of_neighbour(found: tuple[Tensor, Tensor, Tensor], *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    """each group has its own zero"""
    codes, zeros, scales = found
    return codes, zeros.roll(1, 1), scales


@after(GroupedInts, "_groups", needs={Feature.INTS_IN_ORDER})
def ints_order_ignored(found: Tensor, self: GroupedInts, inputs: tuple[int, int], *_: Any) -> Tensor:
    """with desc_act an input is of the group that g_idx says"""
    return torch.arange(*inputs) // self.group


@around(GroupedInts, "_groups", needs={Feature.INTS_IN_ORDER, Feature.TP})
def ints_order_of_the_first_inputs(original: Any, self: GroupedInts, inputs: tuple[int, int], read: Any) -> Tensor:
    """g_idx is cut as the inputs of a row-parallel linear are"""
    found: Tensor = original(self, (0, inputs[1] - inputs[0]), read)
    return found

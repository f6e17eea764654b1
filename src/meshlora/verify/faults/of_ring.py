"""Faults of the ring: whose keys a part is of, how parts are merged, gradients of keys that have passed by."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from meshlora.verify.faults.fault import after, around, instead_of
from meshlora.verify.features import Feature
from meshlora.wings.context import attention_parts
from meshlora.wings.context.attention_parts import Part
from meshlora.wings.context.context import RowsOfMask


@after(RowsOfMask, "parts", needs={Feature.RING})
def ring_parts_of_own_tokens(result: list[list[Part]], *_: Any, **__: Any) -> list[list[Part]]:
    """keys that pass by are seen through the mask of their own positions"""
    return [result[0]] * len(result)  # the first part is of the own keys


@instead_of(attention_parts, "_add", needs={Feature.RING})
def ring_parts_added_up(out: Tensor, lse: Tensor, part: Part, part_out: Tensor, part_lse: Tensor) -> None:
    """parts are merged by the logarithms of their sums of exponentials"""
    where = part.rows, slice(None), part.queries
    out[where] += part_out
    lse[where] = torch.logaddexp(lse[where], part_lse)  # this is right: only the outputs are not weighted


@around(attention_parts._Backward, "through", needs={Feature.RING})
def ring_gradients_of_own_queries(original: Any, self: Any, pair: Tensor, parts: Any) -> Tensor:
    """keys and values get the gradients of the queries of all ranks that they have passed"""
    found: Tensor = original(self, pair, parts)
    passed, self.has_passed = getattr(self, "has_passed", False), True  # the first call is for the own keys
    return found * 0 if passed else found


@after(attention_parts, "_small", needs={Feature.RING, Feature.SOFT_CAPS})
def ring_last_queries_left_out(found: Iterator[Part], parts: Sequence[Part], *_: Any) -> list[Part]:
    """queries whose products are taken some at a time are all there"""
    small = list(found)
    return small[:-1] if len(small) > len(parts) else small

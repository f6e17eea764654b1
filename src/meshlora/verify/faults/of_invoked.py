"""Faults of adapters that tokens invoke (aLoRA): they act where they should not, or not where they should."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from meshlora.verify.faults.fault import after, around, instead_of
from meshlora.verify.features import Feature
from meshlora.wings.invoked import linear, rows


@after(rows, "invoked_tokens", needs={Feature.INVOKED})
def invoked_after_the_first_token(acts: Tensor, *_: Any, **__: Any) -> Tensor:
    """an adapter acts on the first token of its invocation too"""
    before = torch.zeros_like(acts)
    before[:, 1:] = acts[:, :-1]
    return acts & before


@after(rows, "_occurrences", needs={Feature.INVOKED_TWICE})
def invoked_from_the_first_occurrence(found: Tensor, ids: Tensor, *_: Any) -> Tensor:
    """an adapter acts from the last occurrence of its invocation on"""
    return found & (found.cumsum(1) == 1)


@instead_of(rows, "invoked_tokens", needs={Feature.INVOKED})
def invoked_everywhere(ids: Tensor, *_: Any, **__: Any) -> Tensor:
    """tokens before the invocation, and sequences without one, are the base's"""
    return torch.ones_like(ids, dtype=torch.bool)


@after(rows, "invoked_tokens", needs={Feature.INVOKED, Feature.SEVERAL_ROWS})
def invoked_by_the_neighbours_row(acts: Tensor, *_: Any, **__: Any) -> Tensor:
    """each row is invoked by its own tokens"""
    return acts.roll(1, 0)


@around(rows, "_occurrences", needs={Feature.INVOKED})
def invoked_by_the_first_token_alone(original: Any, ids: Tensor, invocation: Sequence[int], *rest: Any) -> Any:
    """all tokens of the invocation are needed"""
    return original(ids, invocation[:1], *rest)


@around(rows, "invoked_tokens", needs={Feature.INVOKED, Feature.PACKING})
def invoked_by_the_row_not_the_sequence(original: Any, ids: Tensor, invocation: Any, *_: Any, **__: Any) -> Any:
    """each sequence of a packed row is invoked by its own tokens"""
    return original(ids, invocation)


@around(linear.ActiveRows, "drop", needs={Feature.INVOKED, Feature.LORA_DROPOUT})
def invoked_without_dropout(original: Any, self: linear.ActiveRows, x: Tensor) -> Tensor:
    """where an adapter acts, its input has dropout"""
    return x.masked_fill(~self.acts.unsqueeze(1), 0)

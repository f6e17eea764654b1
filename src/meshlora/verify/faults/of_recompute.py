"""Faults of layers that run twice: what of the first forward the second is given."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from meshlora.layers.kept_attention import KeptAttention
from meshlora.verify.faults.fault import around, instead_of
from meshlora.verify.features import Feature
from meshlora.wings.context import attention_parts
from meshlora_ground.compat.torch_operators import map_tensors

_BEFORE: list[Any] = []  # what the attention of the layer before gave, or of the last layer of the micro-batch before


def _shapes(results: list[Any]) -> Any:
    return map_tensors(lambda tensor: tensor.shape, results)


@around(KeptAttention, "first", needs={Feature.KEPT_ATTENTION})
@contextlib.contextmanager
def kept_attention_of_the_layer_before(original: Any, kept: KeptAttention) -> Iterator[None]:
    """the second forward of a layer is given what its own attention gave, for the same tokens"""
    with original(kept):
        yield
    own = kept._results
    if _shapes(own) == _shapes(_BEFORE):  # else it would crash
        kept._results = [*_BEFORE]
    _BEFORE[:] = own


@instead_of(attention_parts, "once", needs={Feature.KEPT_ATTENTION, Feature.RING})
def kept_ring_goes_round_again(_: str, compute: Callable[[], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """keys and values pass by once in the forward and once in the backward"""
    return compute()

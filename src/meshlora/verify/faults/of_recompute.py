"""Faults of layers that run twice: what of the first forward the second is given."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from meshlora.layers.kept_attention import KeptAttention
from meshlora.run.offload import Checkpoint, Offload
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


@around(Checkpoint, "back", needs={Feature.OFFLOADED})
def checkpoint_of_the_layer_after(original: Any, one: Checkpoint) -> Tensor:
    """what is fetched for the second forward of a layer is that layer's own input"""
    before = one.before()
    if before is None:
        return original(one)
    own, before.host = before.host, one.host
    found = original(one)
    before.host = own
    return found


@around(Offload, "add", needs={Feature.OFFLOADED})
def checkpoint_let_go_before_it_is_copied(original: Any, offload: Offload, tensor: Tensor, *, is_first: bool) -> Any:
    """the buffer of a layer's input is let go once its copy out has ended, and not to the next layer before"""
    last = offload._last()
    one = original(offload, tensor, is_first=is_first)
    if last is not None and not is_first:
        last.host.copy_(tensor)
    return one

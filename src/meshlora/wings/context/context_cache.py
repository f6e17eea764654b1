"""Modules that read the keys of other tokens from transformers' cache, under context parallelism.

Owns: `ContextCache`, which stands there as the cache of one call, and what else such a module is called with: the mask
of its own queries. Does not own: attention by the registry's functions, which gathers keys itself
(`wings.context.context`), states of recurrent mixers (`wings.context.passed_states`).

In text generation a cache has the keys of all tokens before those at hand: so what a module does with a part of a
sequence is stated in its own code. Here the tokens before are those of other cp ranks, and those after them too: with
as many columns as one process has, scores that are equal are chosen alike, and a linear that runs on what is gathered
(of latents) sees all tokens of its rows, which dropout knows. The mask of own queries has these columns.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from meshlora.layers.held_tokens import ContextCut, HeldTokens
from meshlora.wings.context.context import RowsOfMask
from meshlora.wings.context.mixing import OFFSET, PAST
from meshlora_ground.caches import cache_argument

# Arguments with an entry for each key, in their last dim: columns of a mask.
OF_KEYS = ("alibi", "position_bias")


class ContextCache:
    """The cache of one call of a module. way: of `wings.context.mixing`."""

    def __init__(self, held: HeldTokens, way: str) -> None:
        self.held, self.way = held, way

    def update(self, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Key and value `[B, h, S/cp, d]`, or latents, of own tokens -> `[B, h, S, d]` of all. Gradients are summed."""
        if self.way == OFFSET:  # the attention function gathers them
            return key, value
        # Side by side, so that one collective moves both.
        pair = self.held.gathered(torch.cat([key.transpose(1, 2), value.transpose(1, 2)], -1))
        if self.way == PAST:
            pair = pair[:, : self.end()]
        keys, values = pair.transpose(1, 2).split([key.shape[-1], value.shape[-1]], -1)
        # Contiguous, as a cache's are: some attentions make views of them.
        return keys.contiguous(), values.contiguous()

    def update_indexer(self, key: Tensor, *_: Any) -> Tensor:
        """Keys of an indexer `[B, S/cp, d]` -> `[B, S, d]`. It chooses, and has no gradient."""
        return self.held.gathered(key.detach())

    def update_index(self, key: Tensor) -> Tensor:
        """The same of `[B, 1, S/cp, d]`."""
        return self.update_indexer(key.transpose(1, 2)).transpose(1, 2)

    def get_mask_sizes(self, *_: Any) -> tuple[int, int]:
        """How many keys there are, and the position of the first."""
        return self.held.length, 0

    def get_query_offset(self, *_: Any) -> int:
        """The position of the first of the tokens at hand."""
        return self.get_seq_length()

    def get_seq_length(self, *_: Any) -> int:
        """How many tokens are before those at hand: ranks have contiguous parts."""
        return self.held.axis.rank * self.held.per_rank

    def end(self) -> int:
        """The position after the last of the tokens at hand."""
        return self.get_seq_length() + self.held.per_rank

    @property
    def layers(self) -> Mapping[int, Any]:
        """The caches by the number of the layer, whichever it is."""
        return defaultdict(lambda: self)


def hold_cache(module: nn.Module, way: str, context: ContextCut) -> None:
    """Let `module` read the keys of all cp ranks' tokens as those of a cache."""
    argument, names = cache_argument(module.forward), list(inspect.signature(module.forward).parameters)

    def given(name: str, value: Any, held: HeldTokens | None) -> Any:
        if way != OFFSET and isinstance(value, RowsOfMask):
            value = value.whole if held is None else value.own(held)
        is_mask = isinstance(value, Tensor) and (value.ndim == 4 or name in OF_KEYS)
        if way == PAST and is_mask and held is not None:
            return value[..., : ContextCache(held, way).end()]
        return value

    def begin(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        held, by_name = context.held, dict[str, Any]()
        for name, value in (dict(zip(names, args, strict=False)) | kwargs).items():
            by_name[name] = given(name, value, held)
        if held is not None:
            by_name[argument] = ContextCache(held, way)
        return (), by_name

    module.register_forward_pre_hook(begin, with_kwargs=True)

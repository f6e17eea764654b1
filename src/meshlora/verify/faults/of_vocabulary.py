"""Faults of the split vocabulary: embedding rows, logits, and the loss."""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from meshlora.adapter import attach
from meshlora.adapter import plan as adapter_plan
from meshlora.comm.groups import Axis
from meshlora.layers import embedding, linear, logits_recipe
from meshlora.layers import head_loss as vocabulary
from meshlora.layers.embedding import ParallelEmbedding
from meshlora.layers.linear import ParallelHead
from meshlora.layers.logits_recipe import LogitsRecipe
from meshlora.plan.grads import Side
from meshlora.verify.faults.fault import after, around, instead_of, reversed_ranks, stating, unreduced, without_axis
from meshlora.verify.features import Feature

LOSS = (vocabulary.ChunkLoss, "__call__")


def _next_rank(tp: Axis) -> int:
    return (tp.rank + 1) % tp.size


@around(ParallelEmbedding, "_local", needs={Feature.TP})
def embedding_rows_of_another_rank(original: Any, self: ParallelEmbedding, ids: Tensor) -> Any:
    """a rank looks up the tokens of its own part of the vocabulary"""
    with mock.patch.object(self, "first_id", _next_rank(self.tp) * self.num_embeddings):
        return original(self, ids)


@after(ParallelEmbedding, "_local", needs={Feature.TP})
def embedding_of_others_not_masked(found: tuple[Tensor, Tensor | None], *_: Any) -> tuple[Tensor, Tensor | None]:
    """a rank adds nothing for tokens of other ranks"""
    ids, is_other = found
    return ids, None if is_other is None else torch.zeros_like(is_other)


@instead_of(logits_recipe, "_without_end", needs={Feature.UNPADDED})
def padding_of_the_head_counted(recipe: LogitsRecipe, _: Any) -> int:
    """rows that a model cuts off its logits are not part of the vocabulary"""
    return recipe.shape[-1]


@after(adapter_plan, "embedding_rule", needs={Feature.TP, Feature.EMBEDDING_TARGET})
def embedding_b_not_summed(found: Any, rule: Any, side: Side) -> Any:
    """the gradient of B on the embedding is summed over tp"""
    return without_axis(found, "tp") if side is Side.OUTPUT else found


@after(adapter_plan, "rows_rule", needs={Feature.TP, Feature.TOKEN_ROWS})
def token_rows_not_summed(found: Any, *_: Any) -> Any:
    """the gradient of rows in place of the base's is summed over tp: a rank has the terms of its own tokens"""
    return without_axis(found, "tp")


@around(ParallelHead, "replace_rows", needs={Feature.TIED_ROWS})
def tied_head_keeps_rows_of_base(original: Any, self: ParallelHead, adapter: str, *rows: Any) -> None:
    """a tied head has the rows that the embedding has in place of the base's"""


@around(vocabulary.ChunkLoss, "targets", needs={Feature.TP, Feature.LABELS})
def labels_of_another_rank(original: Any, self: Any, *seen: Any) -> Any:
    """a rank finds the labels of its own part of the vocabulary"""
    other = dataclasses.replace(self.axis, rank=_next_rank(self.axis))
    return original(dataclasses.replace(self, axis=other), *seen)


@around(*LOSS, needs={Feature.PADDED_VOCABULARY})
def padding_in_softmax(original: Any, self: Any, logits: Tensor, *seen: Any) -> Any:
    """the padding of a vocabulary is excluded from the softmax"""
    return original(dataclasses.replace(self, vocab=self.axis.size * logits.shape[1]), logits, *seen)


@after(vocabulary, "all_gather", needs={Feature.TP, Feature.SMOOTHING, Feature.SFT}, within=LOSS)
def smoothed_over_local_vocabulary(by_rank: Tensor, tensor: Tensor, axis: Axis) -> Tensor:
    """label smoothing takes the mean over the whole vocabulary"""
    # Each rank uses the mean over its own logits.
    by_rank.view(axis.size, *tensor.shape)[:, 3] = tensor[3]  # the fourth of its sums is that of all logits
    return by_rank


@around(ParallelEmbedding, "_with_lora", needs={Feature.EMBEDDING_PADDING})
def embedding_padding_trained(original: Any, self: ParallelEmbedding, *args: Any) -> Any:
    """as in PEFT an adapter on the embedding has no gradient from the padding token"""
    with mock.patch.object(self, "padding_idx", None):
        return original(self, *args)


embedding_not_reduced = instead_of(embedding, "reduce_each_to_one", needs={Feature.TP})(
    unreduced("the embedding of a token is the sum over tp")
)
logits_gathered_in_another_order = after(linear, "gather_each_to_one", needs={Feature.TP})(
    reversed_ranks("logits are gathered in the order of the tp ranks")
)
tied_head_keeps_weight_of_base = instead_of(attach, "_under_other_names", needs={Feature.TIED_COPY})(
    stating("the copy of an embedding is the head's too, where `ensure_weight_tying` says so", lambda *_: {})
)

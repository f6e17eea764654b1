"""The split vocabulary: rows of the embedding, logits and the loss over parts of them."""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from meshlora.adapter import plan as adapter_plan
from meshlora.comm.groups import Axis
from meshlora.layers import embedding, linear
from meshlora.layers.embedding import ParallelEmbedding
from meshlora.layers.head import loss as vocabulary
from meshlora.plan.grads import Side
from meshlora.verify.faults import wrong_code
from meshlora.verify.faults.fault import by_name, instead, mutation, then


def _padding_trained(original: Any) -> Any:
    def lora(self: ParallelEmbedding, *args: Any) -> Tensor:
        with mock.patch.object(self, "padding_idx", None):
            return original(self, *args)

    return lora


def output_without_tp(found: Any, rule: Any, side: Side) -> Any:
    return dataclasses.replace(found, grad_axes=found.grad_axes - {"tp"}) if side is Side.OUTPUT else found


def next_rank(tp: Axis) -> int:
    return (tp.rank + 1) % tp.size


def rows_of_next_rank(original: Any) -> Any:
    """Each rank takes the tokens of another for its own."""

    def local(self: ParallelEmbedding, ids: Tensor) -> Any:
        with mock.patch.object(self, "first_id", next_rank(self.tp) * self.num_embeddings):
            return original(self, ids)

    return local


def nothing_masked(found: tuple[Tensor, Tensor | None], *_: Any) -> tuple[Tensor, Tensor | None]:
    ids, is_other = found
    return ids, None if is_other is None else torch.zeros_like(is_other)


def labels_of_next_rank(original: Any) -> Any:
    def loss(self: Any, logits: Tensor, labels: Tensor, gradient: Tensor) -> Tensor:
        other = dataclasses.replace(self.axis, rank=next_rank(self.axis))
        return original(dataclasses.replace(self, axis=other), logits, labels, gradient)

    return loss


def padding_in_softmax(original: Any) -> Any:
    def loss(self: Any, logits: Tensor, labels: Tensor, gradient: Tensor) -> Tensor:
        padded = dataclasses.replace(self, vocab=self.axis.size * logits.shape[1])
        return original(padded, logits, labels, gradient)

    return loss


def smoothed_over_local_vocabulary(original: Any) -> Any:
    """Each rank takes the mean over its own logits for that over all."""

    def own_total(tensor: Tensor, axis: Axis) -> Tensor:
        by_rank: Tensor = gather(tensor, axis)
        by_rank.view(axis.size, *tensor.shape)[:, 3] = tensor[3]
        return by_rank

    gather = vocabulary.all_gather

    def loss(self: Any, logits: Tensor, labels: Tensor, gradient: Tensor) -> Tensor:
        with mock.patch.object(vocabulary, "all_gather", own_total):
            return original(self, logits, labels, gradient)

    return loss


OF_VOCABULARY = by_name(
    mutation(
        "embedding_rows_of_another_rank",
        "a rank looks up the tokens of its own part of the vocabulary",
        "tp",
        (ParallelEmbedding, "_local", rows_of_next_rank),
    ),
    mutation(
        "embedding_of_others_not_masked",
        "a rank adds nothing for tokens that are another's",
        "tp",
        (ParallelEmbedding, "_local", then(nothing_masked)),
    ),
    mutation(
        "embedding_not_reduced",
        "the embedding of a token is the sum over tp",
        "tp",
        (embedding, "reduce_each_to_one", instead(lambda x, axis: x)),
    ),
    mutation(
        "embedding_b_not_summed",
        "the gradient of B on the embedding is summed over tp",
        "tp embedding_target",
        (adapter_plan, "embedding_rule", then(output_without_tp)),
    ),
    mutation(
        "logits_gathered_in_another_order",
        "logits are gathered in the order of the tp ranks",
        "tp",
        (linear, "gather_each_to_one", then(wrong_code.blocks_reversed)),
    ),
    mutation(
        "labels_of_another_rank",
        "a rank finds the labels of its own part of the vocabulary",
        "tp",
        (vocabulary._ChunkLoss, "__call__", labels_of_next_rank),
    ),
    mutation(
        "padding_in_softmax",
        "the padding of a vocabulary is no part of the softmax",
        "padded_vocabulary",
        (vocabulary._ChunkLoss, "__call__", padding_in_softmax),
    ),
    mutation(
        "smoothed_over_local_vocabulary",
        "label smoothing takes the mean over the whole vocabulary",
        "tp smoothing sft",
        (vocabulary._ChunkLoss, "__call__", smoothed_over_local_vocabulary),
    ),
    mutation(
        "embedding_padding_trained",
        "as in PEFT an adapter on the embedding has no gradient from the padding token",
        "embedding_padding",
        (ParallelEmbedding, "_lora", _padding_trained),
    ),
)

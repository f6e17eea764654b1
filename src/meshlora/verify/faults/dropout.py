"""Mutations of dropout: masks that know the topology, or that are no masks of dropout."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from meshlora.layers import linear, tokens
from meshlora.layers.tokens import ForwardTokens, Mask
from meshlora.train import trainer
from meshlora.verify.faults.fault import in_call, instead, mutation, then


def _local_tokens(mask: Mask, *_: Any) -> Mask:
    return dataclasses.replace(mask, tokens=torch.arange(len(mask.tokens), device=mask.tokens.device))


def _local_features(features: Tensor, *_: Any) -> Tensor:
    return torch.arange(len(features))


def _always_first_step(original: Any) -> Any:
    return lambda seed, step, module: original(seed, 0, module)


def _one_for_all_modules(original: Any) -> Any:
    return lambda seed, step, module: original(seed, step, "")


def _of_rank(mask: Mask, own: ForwardTokens, *_: Any) -> Mask:
    return Mask(mask.key ^ own.tp.rank, mask.tokens, mask.features, mask.p)


def _unscaled(original: Any) -> Any:
    return lambda self, x: original(self, x) * (1 - self.p)


OF_DROPOUT = dict(
    [
        mutation(
            "dropout_by_local_token",
            "a mask goes by the place in the global batch and the position, not by the row on the rank",
            "dropout other_tokens",
            (ForwardTokens, "mask", then(_local_tokens)),
        ),
        mutation(
            "dropout_by_local_feature",
            "the mask of an input that is split goes by the features of the whole matrix",
            "lora_dropout tp row_target",
            (linear, "input_features", then(_local_features)),
        ),
        mutation(
            "dropout_same_in_every_step",
            "each optimizer step has masks of its own",
            "dropout steps",
            (tokens, "mask_key", _always_first_step),
        ),
        mutation(
            "dropout_same_in_every_module",
            "each module has masks of its own",
            "dropout",
            (tokens, "mask_key", _one_for_all_modules),
        ),
        mutation(
            "dropout_per_tp_rank",
            "a mask does not depend on the tp rank",
            "dropout tp",
            (ForwardTokens, "mask", then(_of_rank)),
        ),
        mutation(
            "dropout_not_scaled",
            "what is kept is divided by the share that is kept",
            "dropout",
            (Mask, "drop", _unscaled),
        ),
        mutation(
            "base_with_dropout",
            "what the frozen base says is without dropout",
            "base model_dropout",
            (trainer, "base_log_probabilities", in_call(PreTrainedModel, "eval", instead(lambda self: self))),
        ),
    ]
)

"""Dropout: masks of other tokens, features, steps, modules, rates."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from meshlora.layers import linear, tokens
from meshlora.layers.tokens import ForwardTokens, Mask
from meshlora.train import trained, trainer
from meshlora.verify.faults.fault import by_name, in_call, instead, mutation, then


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


def _left_in_evaluation(found: Any, model: Any, *_: Any) -> Any:
    model.eval()
    return found


def _rounded_rate(mask: Mask, *_: Any) -> Mask:
    return dataclasses.replace(mask, p=round(mask.p, 1))


OF_DROPOUT = by_name(
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
    mutation(
        "evaluation_ends_dropout",
        "after an evaluation training goes on with dropout",
        "dropout steps",
        (trained, "mean_loss", then(_left_in_evaluation)),
    ),
    mutation(
        "dropout_seed_ignored",
        "masks are those of the run's seed",
        "dropout seed",
        (tokens, "mask_key", lambda f: lambda seed, step, module: f(0, step, module)),
    ),
    mutation(
        "dropout_rate_in_tenths",
        "the dropout rate of an adapter is the configured one",
        "odd_dropout",
        (ForwardTokens, "mask", then(_rounded_rate)),
    ),
)

"""Faults of what is drawn at random: masks of dropout and noise on embedded tokens (NEFTune), keyed by the wrong
token, feature, step, module, rate or length."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from meshlora.layers import linear, noise, tokens
from meshlora.layers.tokens import ForwardTokens, Mask
from meshlora.run import trained, trainer
from meshlora.verify.faults.fault import after, around, instead_of, passing, rank
from meshlora.verify.features import Feature
from meshlora_ground import masks


@after(ForwardTokens, "mask", needs={Feature.DROPOUT, Feature.OTHER_TOKENS})
def dropout_by_local_token(mask: Mask, *_: Any) -> Mask:
    """a mask depends on the place in the global batch and the position, not on the row on the rank"""
    return dataclasses.replace(mask, tokens=torch.arange(len(mask.tokens), device=mask.tokens.device))


@after(linear, "input_features", needs={Feature.LORA_DROPOUT, Feature.TP, Feature.ROW_TARGET})
def dropout_by_local_feature(features: Tensor, *_: Any) -> Tensor:
    """the mask of a split input is indexed by the features of the whole matrix"""
    return torch.arange(len(features))


@after(ForwardTokens, "mask", needs={Feature.DROPOUT, Feature.TP})
def dropout_per_tp_rank(mask: Mask, own: ForwardTokens, *_: Any) -> Mask:
    """a mask does not depend on the tp rank"""
    return dataclasses.replace(mask, key=mask.key ^ own.tp.rank)  # that of rank 0 stays right


@after(masks, "_hashed", needs={Feature.DROPOUT})
def dropout_of_later_tokens_as_the_first(found: Iterator[tuple[slice, Tensor]], *_: Any) -> Iterator[Any]:
    """tokens whose masks are made some at a time have masks of their own"""
    first = None
    for block, hashed in found:
        first = hashed if first is None else first
        yield block, first[: len(hashed)]  # the last block may be shorter


@after(Mask, "drop", needs={Feature.DROPOUT})
def dropout_not_scaled(found: Tensor, self: Mask, x: Tensor) -> Tensor:
    """kept elements are divided by the keep probability"""
    return found * (1 - self.p)


@instead_of(
    PreTrainedModel,
    "eval",
    needs={Feature.BASE, Feature.MODEL_DROPOUT, Feature.LOG_PROBABILITIES},
    within=(trainer, "of_reference"),
)
def base_with_dropout(self: Any) -> Any:
    """the frozen base is evaluated without dropout"""
    return self


@after(trained, "mean_loss", needs={Feature.DROPOUT, Feature.STEPS})
def evaluation_ends_dropout(found: Any, model: Any, *_: Any, **__: Any) -> Any:
    """training continues with dropout after an evaluation"""
    model.eval()
    return found


@after(ForwardTokens, "mask", needs={Feature.ODD_DROPOUT})
def dropout_rate_in_tenths(mask: Mask, *_: Any) -> Mask:
    """the dropout rate of an adapter is the configured one"""
    return dataclasses.replace(mask, p=round(mask.p, 1))


@after(noise, "sequence_lengths", needs={Feature.NOISE})
def noise_by_padded_length(lengths: Tensor, *_: Any) -> Tensor:
    """the size of noise depends on the tokens of a sequence, not on those of its row"""
    return torch.full_like(lengths, lengths.shape[1])


@around(noise, "noise_key", needs={Feature.NOISE, Feature.RANKS})
def noise_drawn_by_each_rank(original: Any, seed: int, step: int) -> Any:
    """all ranks that embed a token add the same noise to it, which is that of one process"""
    return original(seed + rank(), step)


@around(noise, "uniform", needs={Feature.NOISE, Feature.OTHER_TOKENS})
def noise_by_local_token(original: Any, key: int, tokens: Tensor, *rest: Any) -> Any:
    """noise depends on the place in the global batch and the position, not on the row on the rank"""
    return original(key, torch.arange(len(tokens), device=tokens.device), *rest)


dropout_same_in_every_step = around(tokens, "mask_key", needs={Feature.DROPOUT, Feature.STEPS})(
    passing("each optimizer step has masks of its own", step=0)
)
dropout_same_in_every_module = around(tokens, "mask_key", needs={Feature.DROPOUT})(
    passing("each module has masks of its own", module="")
)
dropout_seed_ignored = around(tokens, "mask_key", needs={Feature.DROPOUT, Feature.SEED})(
    passing("masks are determined by the run's seed", seed=0)
)
noise_same_in_every_step = around(noise, "noise_key", needs={Feature.NOISE, Feature.STEPS})(
    passing("each optimizer step has noise of its own", step=0)
)
noise_seed_ignored = around(noise, "noise_key", needs={Feature.NOISE, Feature.SEED})(
    passing("noise is determined by the run's seed", seed=0)
)

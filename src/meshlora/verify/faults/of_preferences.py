"""Faults of preferences, of the frozen policy that they are compared with, and of reward models."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from meshlora.adapter.attach import disable_adapter
from meshlora.layers import head_loss
from meshlora.run import objectives, ordered_pairs, trainer
from meshlora.run.formulas import pairs, preferences
from meshlora.run.trainer import Trainer
from meshlora.train import batches
from meshlora.train.batch import Batch
from meshlora.verify.faults.fault import after, around, configured, instead_of, passing, result, stating, unreduced
from meshlora.verify.faults.formulas import of_formula, of_head
from meshlora.verify.features import Feature
from meshlora_ground.objective import Objective, Sft
from meshlora_ground.objectives.preferences import Dpo, Kto, Orpo, Simpo
from meshlora_ground.objectives.rewards import Reward


@instead_of(objectives, "reference_in_use", needs={Feature.BASE, Feature.LOG_PROBABILITIES})
def base_with_adapter_on(model: Any) -> Any:
    """the divergence is from a frozen policy, not from the one that is trained"""
    return contextlib.nullcontext()  # so that the adapter stays on


@instead_of(objectives, "reference_in_use", needs={Feature.REFERENCE, Feature.LOG_PROBABILITIES})
def reference_is_base(model: Any) -> Any:
    """the divergence is from the policy that the run starts from, not from the base"""
    return disable_adapter(model)


@after(Trainer, "_reference_log_probabilities", needs={Feature.BASE, Feature.LOG_PROBABILITIES})
def base_halved(found: Tensor | None, *_: Any) -> Tensor | None:
    """the log-probabilities of the reference are not scaled"""
    return None if found is None else found * 0.5


@after(batches, "collate", needs={Feature.DPO})
def dpo_pairs_swapped(batch: Batch, *_: Any, **__: Any) -> Batch:
    """the first of a pair is the better answer"""
    if batch.is_dummy:
        return batch
    order = [row ^ 1 for row in range(len(batch.input_ids))]  # rows of a pair are neighbours
    ids, mask, labels = (t[order] for t in (batch.input_ids, batch.attention_mask, batch.labels))
    return replace(batch, input_ids=ids, attention_mask=mask, labels=labels)


@after(pairs.Pairs, "of", needs={Feature.BY_LENGTH})
def answer_length_counts_the_prompt(found: Any, objective: Dpo, seen: Any) -> Any:
    """the length of an answer is that of its trained tokens"""
    return replace(found, length=torch.full_like(found.length, seen.is_trained.shape[1]))


@around(pairs, "score", needs={Feature.F_DIVERGENCE})
def scores_of_the_reverse_kl(original: Any, objective: Dpo, ratio: Tensor) -> Tensor:
    """answers are scored by the divergence that is configured"""
    return ratio


@around(preferences, "on_policy", needs={Feature.WEIGHTED_PAIRS})
def pair_weights_of_likelihood_alone(original: Any, seen: Any) -> Tensor:
    """answers are weighted by how likely they are beside what the policy draws"""
    found: Tensor = original(replace(seen, score=torch.zeros_like(seen.score)))
    return found


@around(preferences, "on_policy", needs={Feature.WEIGHTED_PAIRS})
def pair_weights_with_gradient(original: Any, seen: Any) -> Tensor:
    """the weight of a pair has no gradient"""
    mean = (seen.log_p - seen.score).sum(1) / seen.is_trained.sum(1)
    return (mean[0::2] + mean[1::2]).exp()


@after(head_loss, "all_gather", needs={Feature.WEIGHTED_PAIRS, Feature.TP}, within=(head_loss._Scores, "apply"))
def squares_of_own_vocabulary(by_rank: Tensor, tensor: Tensor, axis: Any) -> Tensor:
    """what the policy draws is of the whole vocabulary"""
    if len(tensor) == 5:  # the fifth is the sum of squares
        by_rank.view(axis.size, *tensor.shape)[:, 4] = tensor[4] / axis.size
    return by_rank


@around(ordered_pairs, "partners", needs={Feature.ORDERED_PAIRS})
def pairs_left_as_they_are(original: Any, log_p: Tensor, log_ref: Tensor) -> Tensor:
    """answers are compared with those of the same place in the order"""
    own = (log_p - log_ref).view(-1, 2).flip(1).flatten()
    return torch.stack([torch.zeros_like(own), own], 1)


@of_formula(needs={Feature.DFT})
def dft_weight_with_gradient(original: Any, objective: Sft, seen: Any) -> Any:
    """the probability that weights a token has no gradient"""
    return -seen.log_p.exp() * seen.log_p, {}


@of_formula(needs={Feature.DFT})
def dft_without_weight(original: Any, objective: Sft, seen: Any) -> Any:
    """each token is weighted by its own probability"""
    return -seen.log_p, {}


@of_formula(needs={Feature.ORPO})
def orpo_without_likelihood(original: Any, objective: Orpo, seen: Any) -> Any:
    """the better answer is trained as text too"""
    losses, values = original(objective, seen)
    return losses - values["nll"], values  # leaves the term of the odds


@around(objectives, "reference_point", needs={Feature.KTO_POINT, Feature.STEPS})
def kto_point_below_zero(original: Any, *given: Any) -> Tensor:
    """rewards are compared with a divergence of at least 0"""
    seen: list[Tensor] = []
    every = objectives.all_reduce_sum

    def kept(*sums: Any) -> Tensor:
        seen.append(every(*sums))
        return seen[-1]

    with mock.patch.object(objectives, "all_reduce_sum", kept):
        original(*given)
    total, number = seen[-1]
    return total / number  # without the clamp at 0


@after(batches, "collate", needs={Feature.KTO})
def kto_labels_swapped(batch: Batch, *_: Any, **__: Any) -> Batch:
    """desirable answers become more likely"""
    if batch.is_dummy:
        return batch
    return replace(batch, columns={**batch.columns, "desirable": -batch.columns["desirable"]})


@of_formula(needs={Feature.KTO})
def kto_weights_swapped(original: Any, objective: Kto, seen: Any) -> Any:
    """desirable and undesirable answers have their own weights"""
    liked, disliked = objective.desirable_weight, objective.undesirable_weight
    return original(replace(objective, desirable_weight=disliked, undesirable_weight=liked), seen)


@of_head(needs={Feature.REWARD})
def reward_center_not_squared(original: Any, objective: Reward, outputs: Tensor, batch: Batch, point: Any) -> Any:
    """the sum of the scores of a pair counts by its square"""
    losses, values = original(replace(objective, center=0.0), outputs, batch, point)
    return losses + objective.center * (outputs[0::2, 0] + outputs[1::2, 0])[: len(losses)], values


@of_head(needs={Feature.REWARD})
def reward_pairs_swapped(original: Any, objective: Reward, outputs: Tensor, batch: Batch, point: Any) -> Any:
    """the first of a pair is the better answer"""
    if batch.is_dummy:  # of one row
        return original(objective, outputs, batch, point)
    return original(objective, outputs.unflatten(0, (-1, 2)).flip(1).flatten(0, 1), batch, point)


@instead_of(trainer, "set_padding", needs={Feature.REWARD})
def reward_of_the_padding(model: Any, pad_token_id: int) -> None:
    """the score is that of the last token, not of the padding behind it"""
    model.config.get_text_config().pad_token_id = -1  # which no token is


@instead_of(trainer, "count", needs={Feature.REWARD})
def reward_per_answer(objective: Objective, batch: Batch) -> int:
    """the loss is a mean over the pairs of all ranks"""
    return 0 if batch.is_dummy else len(batch.input_ids)


# --- options that are not those of the run

dpo_labels_not_smoothed = of_formula(needs={Feature.OF_SIGMOID, Feature.SMOOTHING})(
    configured("the loss of pairs is smoothed as configured", label_smoothing=0.0)
)
dpo_beta_at_default = of_formula(needs={Feature.DPO})(configured("pairs are held to the base as configured", beta=0.1))
_BY_DEFAULT: dict[str, Any] = {"loss": "sigmoid", "loss_weights": [], "discopop_tau": Dpo.discopop_tau}
pair_loss_at_default = of_formula(needs={Feature.OTHER_PAIR_LOSS})(
    configured("the loss of pairs is the one that is configured", **_BY_DEFAULT)
)
pair_losses_weighted_alike = of_formula(needs={Feature.LOSS_WEIGHTS})(
    configured("each of several losses has its weight", loss_weights=[])
)
alpha_at_default = around(pairs, "score", needs={Feature.ALPHA})(
    configured("the alpha of a divergence is as configured", f_alpha=Dpo.f_alpha)
)
simpo_without_margin = of_formula(needs={Feature.SIMPO})(
    configured("the better answer is to be ahead by the margin that is configured", gamma=0.0)
)
simpo_beta_at_default = of_formula(needs={Feature.SIMPO})(
    configured("the difference of two answers weighs as configured", beta=Simpo.beta)
)
simpo_labels_not_smoothed = of_formula(needs={Feature.SIMPO, Feature.SMOOTHING})(
    configured("the loss without a reference is smoothed as configured", label_smoothing=0.0)
)
orpo_beta_at_default = of_formula(needs={Feature.ORPO})(configured("the odds ratio weighs as configured", beta=0.1))
kto_beta_at_default = of_formula(needs={Feature.KTO})(
    configured("answers are held to the base as configured", beta=0.1)
)
reward_center_at_default = of_head(needs={Feature.REWARD})(
    configured("scores are held around 0 as configured", center=0.0)
)

# --- sums over the tokens of an answer in place of means, and over one rank

simpo_not_length_normalised = instead_of(preferences, "mean_log_p", needs={Feature.SIMPO})(
    stating("answers are compared by the mean over their tokens", lambda seen: seen.log_p.sum(1))
)
orpo_not_length_normalised = instead_of(preferences, "mean_log_p", needs={Feature.ORPO})(
    stating("odds are of the mean over the tokens of an answer", lambda seen: seen.log_p.sum(1))
)
pairs_ordered_on_one_rank = instead_of(ordered_pairs, "all_reduce_sum", needs={Feature.ORDERED_PAIRS, Feature.DP})(
    unreduced("pairs are put in order over those of all ranks")
)
kto_point_of_one_rank = instead_of(objectives, "all_reduce_sum", needs={Feature.KTO_POINT, Feature.DP})(
    unreduced("rewards are compared with the divergence over the sequences of all ranks")
)

# --- other arguments and results

shorter_answer_of_the_next_pair = around(pairs, "length_weights", needs={Feature.LENGTH_WEIGHT})(
    passing("lengths are compared within a pair", is_trained=lambda is_trained: is_trained.roll(1, 0))
)
orpo_odds_upside_down = after(preferences, "log_odds", needs={Feature.ORPO})(
    result("the odds of the better answer are to exceed those of the worse", torch.neg)
)
kto_point_of_base_from_policy = after(objectives, "gained", needs={Feature.KTO_POINT})(
    result("rewards are compared with the divergence of the policy from the base", torch.neg)
)
reward_margin_added = after(preferences, "margins", needs={Feature.REWARD})(
    result("the better answer is to lead by its margin", torch.neg)
)
reward_margin_of_next_pair = after(preferences, "margins", needs={Feature.REWARD})(
    result("each pair has its own margin", lambda found: found.roll(1))
)
longer_answer_counts_whole = after(pairs, "length_weights", needs={Feature.LENGTH_WEIGHT})(
    result("the end of the longer answer of a pair is weighted", torch.ones_like)
)
dpo_per_token = instead_of(trainer, "count", needs={Feature.DPO})(
    stating("the loss of pairs is a mean over the pairs of all ranks", lambda _, batch: batch.num_trained_tokens)
)
orpo_odds_of_probabilities = instead_of(preferences, "log_odds", needs={Feature.ORPO})(
    stating("odds are p / (1 - p)", lambda log_p: log_p)
)

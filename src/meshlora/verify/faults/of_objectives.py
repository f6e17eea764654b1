"""Faults of objectives: policies, preferences, labels, embeddings."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from meshlora.adapter.attach import disable_adapter
from meshlora.model import regions
from meshlora.plan.rules import Domain, ModelPlan
from meshlora.run import advantages, heads, objectives, trainer
from meshlora.run.trainer import Trainer
from meshlora.train import batches
from meshlora.train.batch import Batch
from meshlora.verify.faults.fault import after, around, fault, instead_of
from meshlora.verify.features import Feature
from meshlora.wings.experts import routing
from meshlora.wings.experts.routing import RunRouting
from meshlora_ground.errors import UserError, did_you_mean
from meshlora_ground.objective import Classify, ClassifyTokens, Dpo, Embed, Grpo, Kto, Objective, Orpo, Policy, Sft

# Kind -> objective that the command proves: no value is a default, or equal to that of another parameter.
PROVED: dict[str, Objective] = {
    "sft": Sft(label_smoothing=0.1),
    "policy": Policy(clip_low=0.15, clip_high=0.3, kl_coef=0.1, importance_cap=1.2, reference="base"),
    "grpo": Grpo(
        clip_low=0.15, clip_high=0.3, importance_cap=1.3, kl_coef=0.1, kl="k2", entropy_coef=0.07, scale_rewards="batch"
    ),
    "gspo": Grpo(ratio="sequence", mean_over="sequence", clip_low=0.03, clip_high=0.05, importance_cap=1.2),
    "dr_grpo": Grpo(
        scale_rewards="none",
        mean_over="constant",
        max_completion_length=9,
        clip_low=0.1,
        clip_high=0.25,
        importance_cap=None,
        kl_coef=0.2,
        kl="k1",
    ),
    "cispo": Grpo(loss="cispo", clip_low=0.4, clip_high=0.1, importance_cap=1.1, kl_coef=0.1, entropy_coef=0.3),
    "dpo": Dpo(beta=0.3, label_smoothing=0.1),
    "orpo": Orpo(beta=0.4),
    "kto": Kto(beta=0.3, desirable_weight=1.3, undesirable_weight=0.7, reference="base"),
    "classify": Classify(labels=["Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun"]),
    "classify_multi": Classify(num_labels=5, problem="multi"),
    "regression": Classify(num_labels=2, problem="regression"),
    "classify_tokens": ClassifyTokens(num_labels=5),
    "embed": Embed(pooling="last", temperature=0.3),
    "embed_mean": Embed(temperature=8.0, normalize=False),
    "embed_cls": Embed(pooling="cls", temperature=0.3),
}


def as_proved(kind: str) -> Objective:
    """The objective that `--objective KIND` proves. Raises: UserError: no such kind."""
    if kind not in PROVED:
        raise UserError(f"--objective {kind}", did_you_mean(kind, PROVED))
    return PROVED[kind]


def _in_each(wrong: Any, formulas: Any) -> Any:
    return {kind: functools.partial(wrong, formula) for kind, formula in formulas.items()}


# `fault` of an objective's formula: wrong code takes the original, the objective, and its inputs.
of_formula = functools.partial(fault, _in_each, objectives, "FORMULAS")
of_head = functools.partial(fault, _in_each, heads, "FORMULAS")


@after(batches, "collate", needs={Feature.POLICY_GRADIENT})
def policy_columns_of_next_token(batch: Batch, *_: Any, **__: Any) -> Batch:
    """ratio, advantage and weight of a token are its own"""
    return replace(batch, columns={name: column.roll(1, 1) for name, column in batch.columns.items()})


@of_formula(needs={Feature.POLICY_GRADIENT})
def policy_not_clipped(original: Any, objective: Policy, seen: Any) -> Any:
    """a ratio outside its interval gains nothing"""
    return original(replace(objective, clip_low=1.0, clip_high=1e6), seen)  # ratios are above 0


@after(batches, "collate", needs={Feature.POLICY_GRADIENT})
def policy_ratio_always_one(batch: Batch, *_: Any, **__: Any) -> Batch:
    """the ratio is to the policy that wrote the record"""
    unknown = torch.full_like(batch.columns["old_log_prob"], float("nan"))  # then the present policy is the old one
    return replace(batch, columns={**batch.columns, "old_log_prob": unknown})


@after(batches, "collate", needs={Feature.POLICY_GRADIENT})
def policy_weights_ignored(batch: Batch, *_: Any, **__: Any) -> Batch:
    """the loss of each token has its weight"""
    return replace(batch, columns={**batch.columns, "weight": torch.ones_like(batch.columns["weight"])})


@of_formula(needs={Feature.POLICY_GRADIENT})
def policy_sign(original: Any, objective: Policy, seen: Any) -> Any:
    """tokens with a positive advantage become more likely"""
    losses, values = original(objective, seen)
    return -losses, values


@instead_of(objectives, "reference_in_use", needs={Feature.BASE})
def base_with_adapter_on(model: Any) -> Any:
    """the divergence is from a frozen policy, not from the one that is trained"""
    return contextlib.nullcontext()  # so that the adapter stays on


@instead_of(objectives, "reference_in_use", needs={Feature.REFERENCE})
def reference_is_base(model: Any) -> Any:
    """the divergence is from the policy that the run starts from, not from the base"""
    return disable_adapter(model)


@after(Trainer, "_reference_log_probabilities", needs={Feature.BASE})
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


@instead_of(trainer, "count", needs={Feature.DPO})
def dpo_per_token(objective: Objective, batch: Batch) -> int:
    """the loss of pairs is a mean over the pairs of all ranks"""
    return batch.num_trained_tokens


@of_formula(needs={Feature.DPO, Feature.SMOOTHING})
def dpo_labels_not_smoothed(original: Any, objective: Dpo, seen: Any) -> Any:
    """the loss of pairs is smoothed as configured"""
    return original(replace(objective, label_smoothing=0.0), seen)


@of_formula(needs={Feature.POLICY_GRADIENT})
def policy_clip_sides_swapped(original: Any, objective: Policy, seen: Any) -> Any:
    """a ratio is clipped below at 1 - clip_low, above at 1 + clip_high"""
    return original(replace(objective, clip_low=objective.clip_high, clip_high=objective.clip_low), seen)


@of_formula(needs={Feature.POLICY_GRADIENT})
def policy_clip_at_default(original: Any, objective: Policy, seen: Any) -> Any:
    """a ratio is clipped as configured"""
    return original(replace(objective, clip_low=0.2, clip_high=0.2), seen)


@of_formula(needs={Feature.POLICY_GRADIENT, Feature.BASE})
def policy_kl_doubled(original: Any, objective: Policy, seen: Any) -> Any:
    """the divergence from the base weighs as configured"""
    return original(replace(objective, kl_coef=2 * objective.kl_coef), seen)


@after(batches, "collate", needs={Feature.POLICY_GRADIENT})
def policy_old_log_probs_of_next_token(batch: Batch, *_: Any, **__: Any) -> Batch:
    """the ratio of a token is to the old probability of that token"""
    return replace(batch, columns={**batch.columns, "old_log_prob": batch.columns["old_log_prob"].roll(1, 1)})


@after(objectives, "log_ratio", needs={Feature.POLICY_GRADIENT})
def policy_ratio_upside_down(found: Tensor, *_: Any) -> Tensor:
    """the ratio is of the new probability to the old one"""
    return -found


@after(batches, "collate", needs={Feature.POLICY_GRADIENT})
def policy_ratio_to_the_engine(batch: Batch, *_: Any, **__: Any) -> Batch:
    """the ratio is to the trainer's own old probability, not the engine's"""
    engine, old = (batch.columns[name] for name in ("engine_log_prob", "old_log_prob"))
    return replace(batch, columns={**batch.columns, "old_log_prob": torch.where(engine.isnan(), old, engine)})


@around(objectives, "importance", needs={Feature.IMPORTANCE})
def engine_weight_not_truncated(original: Any, objective: Any, old: Tensor, engine: Tensor) -> Tensor:
    """the weight that corrects for the engine is at most the cap"""
    found: Tensor = original(replace(objective, importance_cap=1e6), old, engine)
    return found


@around(objectives, "importance", needs={Feature.IMPORTANCE})
def engine_weight_upside_down(original: Any, objective: Any, old: Tensor, engine: Tensor) -> Tensor:
    """the weight that corrects for the engine is of the trainer's probability to the engine's"""
    found: Tensor = original(objective, torch.where(engine.isnan(), old, engine), old)
    return found


@after(objectives, "importance", needs={Feature.IMPORTANCE})
def engine_not_corrected_for(found: Tensor, *_: Any) -> Tensor:
    """tokens are weighted for the engine that sampled them"""
    return torch.ones_like(found)


@after(objectives, "log_ratio", needs={Feature.SEQUENCE_RATIO})
def sequence_ratio_not_normalised(found: Tensor, objective: Any, old: Tensor, seen: Any) -> Tensor:
    """the ratio of a sequence is the mean over its tokens, by its length"""
    return found * seen.is_trained.sum(1, keepdim=True)


@instead_of(objectives, "num_tokens", needs={Feature.MEANS_OF_SEQUENCES})
def sequence_length_counts_the_prompt(seen: Any) -> Tensor:
    """the length of a sequence is that of its completion"""
    return torch.full_like(seen.is_trained[:, :1], seen.is_trained.shape[1], dtype=torch.int64)


@instead_of(trainer, "count", needs={Feature.POLICY_GRADIENT, Feature.EXAMPLES})
def sequence_means_per_token(objective: Objective, batch: Batch) -> int:
    """a mean over sequences is one over those of all ranks"""
    return batch.num_trained_tokens


@around(objectives, "surrogate", needs={Feature.CISPO})
def cispo_weight_with_gradient(original: Any, objective: Any, ratio: Tensor, advantage: Tensor, log_p: Tensor) -> Any:
    """the clipped ratio is a weight without gradient"""
    clipped = ratio.clamp(1 - objective.clip_low, 1 + objective.clip_high)
    return clipped * advantage * log_p, clipped != ratio


@around(objectives, "surrogate", needs={Feature.CISPO})
def cispo_gains_by_the_ratio(original: Any, objective: Any, *seen: Tensor) -> Any:
    """the loss is the one that is configured"""
    return original(replace(objective, loss="clipped"), *seen)


@of_formula(needs={Feature.ENTROPY})
def entropy_punished(original: Any, objective: Any, seen: Any) -> Any:
    """the entropy is raised, not lowered"""
    return original(objective, replace(seen, entropy=-seen.entropy))


@of_formula(needs={Feature.ENTROPY})
def entropy_coef_halved(original: Any, objective: Any, seen: Any) -> Any:
    """the entropy weighs as configured"""
    return original(replace(objective, entropy_coef=objective.entropy_coef / 2), seen)


@around(objectives, "divergence", needs={Feature.KL_ESTIMATE})
def divergence_estimated_by_default(original: Any, objective: Any, difference: Tensor) -> Tensor:
    """the divergence is estimated as configured"""
    found: Tensor = original(replace(objective, kl="k3"), difference)
    return found


@around(advantages, "group_advantages", needs={Feature.GRPO})
def grpo_advantage_of_another_group(original: Any, objective: Any, rewards: Any, groups: Any) -> Any:
    """a rollout is compared with those of its own group"""
    return original(objective, rewards, np.roll(groups, 1))


@around(advantages, "group_advantages", needs={Feature.GRPO})
def grpo_reward_of_another_completion(original: Any, objective: Any, rewards: Any, groups: Any) -> Any:
    """each completion has its own reward"""
    return original(objective, np.roll(rewards, 1), groups)


@after(advantages, "group_advantages", needs={Feature.GRPO})
def grpo_advantage_of_next_record(found: Any, *_: Any) -> Any:
    """each completion has its own advantage"""
    return np.roll(found, 1)


@around(advantages, "group_advantages", needs={Feature.GRPO})
def grpo_rewards_not_centred(original: Any, objective: Any, rewards: Any, groups: Any) -> Any:
    """an advantage is the difference to the mean of the group"""
    return original(objective, rewards, groups) + rewards.mean()


@around(advantages, "group_advantages", needs={Feature.SCALED_OTHERWISE})
def grpo_scaled_by_default(original: Any, objective: Any, rewards: Any, groups: Any) -> Any:
    """rewards are scaled as configured"""
    return original(replace(objective, scale_rewards="group"), rewards, groups)


@around(RunRouting, "before", needs={Feature.ROUTED})
def experts_of_next_token(original: Any, routing: Any, number: int, batch: Batch) -> None:
    """each token goes to the experts that its rollout says"""
    original(routing, number, batch)
    tokens = routing._routing.tokens
    routing._routing.tokens = torch.where((tokens >= 0) & (tokens.roll(1) >= 0), tokens.roll(1), tokens)


@around(routing, "check_routed", needs={Feature.ROUTED})
def experts_of_another_layer(original: Any, routed: Any, plan: ModelPlan) -> dict[str, int]:
    """each layer has its own experts of the record"""
    return {block: (column + 1) % routed.shape[1] for block, column in original(routed, plan).items()}


@instead_of(RunRouting, "before", needs={Feature.ROUTED})
def experts_of_the_record_ignored(routing: Any, number: int, batch: Batch) -> None:
    """routers do not choose for a token whose experts its rollout says"""
    routing._routing.tokens = routing.mesh.own_tokens(batch.held(torch.full_like(batch.input_ids, -1)))


_NEVER_OFF = (RunRouting, "off", lambda _: lambda _: contextlib.nullcontext())


@around(Trainer, "_forward", needs={Feature.ROUTED, Feature.BASE}, also=(_NEVER_OFF,))
def base_goes_to_the_experts_of_the_engine(original: Any, self: Any, number: int, micro: Any, **rest: Any) -> Any:
    """the frozen base is another policy and chooses its own experts"""
    for part in self.parts:
        part.before(number, micro.batch)
    return original(self, number, micro, **rest)


@around(batches, "collate", needs={Feature.GRPO})
def grpo_prompts_trained(original: Any, sequences: Any, **rest: Any) -> Batch:
    """the tokens of the prompt are not trained"""
    every = [replace(one, is_trained=np.ones_like(one.is_trained)) for one in sequences]
    found: Batch = original(every, **rest)
    return found


@of_formula(needs={Feature.DPO})
def dpo_beta_at_default(original: Any, objective: Dpo, seen: Any) -> Any:
    """pairs are held to the base as configured"""
    return original(replace(objective, beta=0.1), seen)


@instead_of(objectives, "mean_log_p", needs={Feature.ORPO})
def orpo_not_length_normalised(seen: Any) -> Tensor:
    """odds are of the mean over the tokens of an answer"""
    return seen.log_p.sum(1)


@after(objectives, "log_odds", needs={Feature.ORPO})
def orpo_odds_upside_down(found: Tensor, *_: Any) -> Tensor:
    """the odds of the better answer are to exceed those of the worse"""
    return -found


@instead_of(objectives, "log_odds", needs={Feature.ORPO})
def orpo_odds_of_probabilities(log_p: Tensor) -> Tensor:
    """odds are p / (1 - p)"""
    return log_p


@of_formula(needs={Feature.ORPO})
def orpo_without_likelihood(original: Any, objective: Orpo, seen: Any) -> Any:
    """the better answer is trained as text too"""
    losses, values = original(objective, seen)
    return losses - values["nll"], values  # leaves the term of the odds


@of_formula(needs={Feature.ORPO})
def orpo_beta_at_default(original: Any, objective: Orpo, seen: Any) -> Any:
    """the odds ratio weighs as configured"""
    return original(replace(objective, beta=0.1), seen)


@around(objectives, "reference_point", needs={Feature.KTO, Feature.STEPS})
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


@instead_of(objectives, "all_reduce_sum", needs={Feature.KTO, Feature.DP})
def kto_point_of_one_rank(tensor: Tensor, axis: Any) -> Tensor:
    """rewards are compared with the divergence over the sequences of all ranks"""
    return tensor


@after(objectives, "gained", needs={Feature.KTO})
def kto_point_of_base_from_policy(found: Tensor, *_: Any) -> Tensor:
    """rewards are compared with the divergence of the policy from the base"""
    return -found


@of_formula(needs={Feature.KTO})
def kto_beta_at_default(original: Any, objective: Kto, seen: Any) -> Any:
    """answers are held to the base as configured"""
    return original(replace(objective, beta=0.1), seen)


@after(batches, "collate", needs={Feature.CLASSIFY})
def label_of_next_text(batch: Batch, *_: Any, **__: Any) -> Batch:
    """each text is trained with its own label"""
    return replace(batch, targets=None if batch.targets is None else batch.targets.roll(1, 0))


@instead_of(trainer, "count", needs={Feature.CLASSIFY})
def classify_per_token(objective: Objective, batch: Batch) -> int:
    """the loss of texts is a mean over the texts of all ranks"""
    return batch.num_trained_tokens


@around(ModelPlan, "domain_of", needs={Feature.CLASSIFY, Feature.TP})
def head_gradient_summed_over_tp(original: Any, plan: Any, module: str) -> Any:
    """every tp rank has the whole gradient of the head"""
    return Domain.PARTIAL if not module.startswith(plan.layers) else original(plan, module)


@around(regions.TokenCut, "whole", needs={Feature.CLASSIFY, Feature.SP})
def hidden_states_summed_twice(original: Any, cut: Any, x: Tensor, *, terms: bool) -> Tensor:
    """without a vocabulary every tp rank has the whole gradient of the hidden states"""
    return original(cut, x, terms=True)  # as if ranks had terms of it


@of_head(needs={Feature.CLASSIFY_TOKENS})
def label_of_next_word(original: Any, objective: Any, outputs: Tensor, batch: Batch, point: Any) -> Any:
    """each word is trained with its own label"""
    return original(objective, outputs.roll(1, 1), batch, point)


@instead_of(heads, "all_reduce_sum", needs={Feature.EMBED, Feature.DP})
def embed_texts_of_own_rank(tensor: Tensor, axis: Any) -> Tensor:
    """a text is compared with those of all ranks"""
    return tensor


@around(heads, "info_nce", needs={Feature.EMBED})
def embed_gradient_of_others_lost(original: Any, objective: Embed, texts: Tensor) -> Any:
    """a text has the gradient of each comparison with it"""
    return original(objective, torch.cat([texts[:, :1], texts[:, 1:].detach()], 1))  # that of anchors stays


@around(heads, "info_nce", needs={Feature.EMBED})
def embed_without_negatives(original: Any, objective: Embed, texts: Tensor) -> Any:
    """an anchor is compared with the negatives of all records"""
    return original(objective, texts[:, :2])


@around(heads, "embeddings", needs={Feature.EMBED, Feature.POOLS_TO_THE_END})
def embed_padding_pooled(original: Any, objective: Embed, hidden: Tensor, mask: Tensor) -> Tensor:
    """the padding is no part of an embedding"""
    return original(objective, hidden, torch.ones_like(mask))


@around(heads, "info_nce", needs={Feature.EMBED})
def embed_temperature_at_default(original: Any, objective: Embed, texts: Tensor) -> Any:
    """similarities are divided by the temperature as configured"""
    return original(replace(objective, temperature=0.05), texts)


@around(heads, "embeddings", needs={Feature.EMBED})
def embed_normalized_the_other_way(original: Any, objective: Embed, hidden: Tensor, mask: Tensor) -> Tensor:
    """embeddings are normalized as configured"""
    return original(replace(objective, normalize=not objective.normalize), hidden, mask)


@instead_of(heads, "places_of", needs={Feature.EMBED})
def embed_places_of_micro_batch(batch: Batch) -> Tensor:
    """the second pass finds the gradients of its own texts"""
    return torch.arange(len(batch.input_ids), device=batch.input_ids.device)

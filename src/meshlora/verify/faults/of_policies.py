"""Faults of policy gradients: ratios, engines, entropy, groups, experts of rollouts."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from meshlora.plan.rules import ModelPlan
from meshlora.run import advantages, entropies, trainer
from meshlora.run.formulas import policies
from meshlora.run.trainer import Trainer
from meshlora.train import batches
from meshlora.train.batch import Batch
from meshlora.verify.faults.fault import after, around, configured, instead_of, passing, result, stating, unreduced
from meshlora.verify.faults.formulas import of_formula
from meshlora.verify.features import Feature
from meshlora.wings.experts import routing
from meshlora.wings.experts.routing import RunRouting
from meshlora_ground.dataset import TokenizedDataset
from meshlora_ground.objective import Objective
from meshlora_ground.objectives.policies import Policy


@after(batches, "collate", needs={Feature.POLICY_GRADIENT})
def policy_columns_of_next_token(batch: Batch, *_: Any, **__: Any) -> Batch:
    """ratio, advantage and weight of a token are its own"""
    return replace(batch, columns={name: column.roll(1, 1) for name, column in batch.columns.items()})


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


@of_formula(needs={Feature.CLIPS})
def policy_clip_sides_swapped(original: Any, objective: Policy, seen: Any) -> Any:
    """a ratio is clipped below at 1 - clip_low, above at 1 + clip_high"""
    return original(replace(objective, clip_low=objective.clip_high, clip_high=objective.clip_low), seen)


@after(batches, "collate", needs={Feature.POLICY_GRADIENT})
def policy_old_log_probs_of_next_token(batch: Batch, *_: Any, **__: Any) -> Batch:
    """the ratio of a token is to the old probability of that token"""
    return replace(batch, columns={**batch.columns, "old_log_prob": batch.columns["old_log_prob"].roll(1, 1)})


@after(batches, "collate", needs={Feature.POLICY_GRADIENT})
def policy_ratio_to_the_engine(batch: Batch, *_: Any, **__: Any) -> Batch:
    """the ratio is to the trainer's own old probability, not the engine's"""
    engine, old = (batch.columns[name] for name in ("engine_log_prob", "old_log_prob"))
    return replace(batch, columns={**batch.columns, "old_log_prob": torch.where(engine.isnan(), old, engine)})


@after(policies, "log_ratio", needs={Feature.SEQUENCE_RATIO})
def sequence_ratio_not_normalised(found: Tensor, objective: Any, old: Tensor, seen: Any) -> Tensor:
    """the ratio of a sequence is the mean over its tokens, by its length"""
    return found * seen.is_trained.sum(1, keepdim=True)


@instead_of(policies, "num_tokens", needs={Feature.MEANS_OF_SEQUENCES})
def sequence_length_counts_the_prompt(seen: Any) -> Tensor:
    """the length of a sequence is that of its completion"""
    return torch.full_like(seen.is_trained[:, :1], seen.is_trained.shape[1], dtype=torch.int64)


@instead_of(policies, "is_kept", needs={Feature.OFF_POLICY_MASK})
def sequences_far_off_kept(objective: Any, sampled: Tensor, seen: Any) -> Tensor:
    """a bad sequence far from the policy gains nothing"""
    return torch.ones_like(seen.is_trained)


@around(policies, "is_kept", needs={Feature.OFF_POLICY_MASK})
def sequences_left_out_by_their_sum(original: Any, objective: Any, sampled: Tensor, seen: Any) -> Any:
    """how far a sequence is off is the mean over its tokens"""
    return original(objective, seen.log_p + (sampled - seen.log_p) * policies.num_tokens(seen), seen)


@instead_of(advantages, "without_truncated", needs={Feature.MASKS_TRUNCATED})
def truncated_rollouts_trained(data: TokenizedDataset) -> TokenizedDataset:
    """rollouts that were cut off train nothing"""
    columns = {name: column for name, column in data.columns.items() if name != "truncated"}
    return replace(data, columns=columns)


@after(advantages, "without_truncated", needs={Feature.MASKS_TRUNCATED, Feature.GRPO})
def truncated_rollouts_not_compared(data: TokenizedDataset, *_: Any) -> TokenizedDataset:
    """rollouts that were cut off count in the mean of their group"""
    if data.targets is None:
        return data
    is_kept = np.maximum.reduceat(data.is_trained, data.offsets[:-1])
    rewards = np.where(is_kept, data.targets[:, 0], 0.0)
    return replace(data, targets=np.stack([rewards, data.targets[:, 1]], axis=1))


@instead_of(trainer, "count", needs={Feature.MASKS_TRUNCATED, Feature.EXAMPLES})
def truncated_rollouts_not_counted(objective: Objective, batch: Batch) -> int:
    """a mean over sequences counts those that were cut off"""
    return int((batch.labels >= 0).any(1).sum()) * batch.counts_rows


@instead_of(policies, "uncertain", needs={Feature.TOP_ENTROPY})
def certain_tokens_trained(seen: Any) -> tuple[Tensor, Tensor]:
    """only the tokens of the highest entropy are trained"""
    return torch.ones_like(seen.log_p), torch.ones_like(seen.log_p)


@around(policies, "uncertain", needs={Feature.TOP_ENTROPY})
def certain_tokens_chosen(original: Any, seen: Any) -> tuple[Tensor, Tensor]:
    """the tokens that are trained are those above the quantile"""
    found, _ = original(seen)
    return 1 - found, (1 - found) / (1 - seen.point[1])


@around(policies, "surrogate", needs={Feature.SAPO})
def sapo_temperatures_exchanged(original: Any, objective: Any, *seen: Tensor) -> Any:
    """each sign of the advantage has its temperature"""
    above, below = objective.sapo_temperature_pos, objective.sapo_temperature_neg
    return original(replace(objective, sapo_temperature_pos=below, sapo_temperature_neg=above), *seen)


@around(policies, "surrogate", needs={Feature.SAPO})
def sapo_temperatures_at_default(original: Any, objective: Any, *seen: Tensor) -> Any:
    """the ratio is squashed by the temperatures that are configured"""
    return original(type(objective)(loss="sapo"), *seen)


@around(policies, "sequence_weight", needs={Feature.VESPO})
def vespo_sides_exchanged(original: Any, objective: Any, *seen: Any) -> Any:
    """each sign of the advantage has its k and lambda"""
    names = {"vespo_k_pos": "vespo_k_neg", "vespo_lambda_pos": "vespo_lambda_neg"}
    names |= {other: name for name, other in names.items()}
    return original(replace(objective, **{a: getattr(objective, b) for a, b in names.items()}), *seen)


@around(policies, "sequence_weight", needs={Feature.VESPO})
def vespo_at_default(original: Any, objective: Any, *seen: Any) -> Any:
    """the weight of a sequence falls and rises as configured"""
    return original(type(objective)(loss="vespo"), *seen)


@around(policies, "surrogate", needs={Feature.CISPO})
def cispo_weight_with_gradient(original: Any, objective: Any, ratio: Tensor, advantage: Tensor, log_p: Tensor) -> Any:
    """the clipped ratio is a weight without gradient"""
    clipped = ratio.clamp(1 - objective.clip_low, 1 + objective.clip_high)
    return clipped * advantage * log_p, clipped != ratio


@around(advantages, "group_advantages", needs={Feature.GRPO})
def grpo_rewards_not_centred(original: Any, objective: Any, rewards: Any, groups: Any) -> Any:
    """an advantage is the difference to the mean of the group"""
    return original(objective, rewards, groups) + rewards.mean()


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
def grpo_prompts_trained(original: Any, sequences: Any, **rest: Any) -> Any:
    """the tokens of the prompt are not trained"""
    every = [replace(one, is_trained=np.ones_like(one.is_trained)) for one in sequences]
    return original(every, **rest)


# --- options that are not those of the run

policy_not_clipped = of_formula(needs={Feature.CLIPS})(  # ratios are above 0
    configured("a ratio outside its interval gains nothing", clip_low=1.0, clip_high=1e6)
)
policy_clip_at_default = of_formula(needs={Feature.CLIPS})(
    configured("a ratio is clipped as configured", clip_low=0.2, clip_high=0.2)
)
large_ratios_not_bounded = of_formula(needs={Feature.DELTA})(
    configured("a ratio is bounded where clipping does not hold it", delta=None)
)
divergence_not_corrected = of_formula(needs={Feature.KL_CORRECTION})(
    configured("the estimate of the divergence is weighted by the ratio", kl_correction=False)
)
engine_weight_not_truncated = around(policies, "importance", needs={Feature.IMPORTANCE})(
    configured("the weight that corrects for the engine is at most the cap", importance_cap=1e6)
)
engine_weight_cut_not_masked = around(policies, "importance", needs={Feature.MASKS_WEIGHTS})(
    configured("what is out of the bounds of the weight is left out", correction="token_truncate")
)
engine_weight_without_floor = around(policies, "importance", needs={Feature.IMPORTANCE_FLOOR})(
    configured("the weight that corrects for the engine has the lower bound that is configured", importance_floor=0.0)
)
engine_weight_of_each_token = around(policies, "engine_gap", needs={Feature.CORRECTS_SEQUENCES})(
    configured("the weight that corrects for the engine is of the whole sequence", correction="token_truncate")
)
cispo_gains_by_the_ratio = around(policies, "surrogate", needs={Feature.CISPO})(
    configured("the loss is the one that is configured", loss="clipped")
)
divergence_estimated_by_default = around(policies, "divergence", needs={Feature.KL_ESTIMATE})(
    configured("the divergence is estimated as configured", kl="k3")
)
grpo_scaled_by_default = around(advantages, "group_advantages", needs={Feature.SCALED_OTHERWISE})(
    configured("rewards are scaled as configured", scale_rewards="group")
)
entropies_of_one_rank = instead_of(entropies, "all_reduce_sum", needs={Feature.TOP_ENTROPY, Feature.DP})(
    unreduced("tokens are chosen among those of all ranks")
)

# --- other arguments and results

policy_kl_doubled = of_formula(needs={Feature.POLICY_GRADIENT, Feature.BASE})(
    configured("the divergence from the base weighs as configured", kl_coef=lambda objective: 2 * objective.kl_coef)
)
share_of_least_entropy = around(entropies, "least_kept", needs={Feature.TOP_ENTROPY})(
    passing("the share is of the tokens that are trained", share=lambda share: 1 - share)
)
vespo_not_corrected_for_the_engine = around(policies, "sequence_weight", needs={Feature.VESPO})(
    passing("the weight of a sequence is corrected for the engine", weight=torch.ones_like)
)
entropy_coef_halved = of_formula(needs={Feature.ENTROPY})(
    configured("the entropy weighs as configured", entropy_coef=lambda objective: objective.entropy_coef / 2)
)
entropy_punished = of_formula(needs={Feature.ENTROPY})(
    passing("the entropy is raised, not lowered", seen=lambda seen: replace(seen, score=-seen.score))
)
grpo_advantage_of_another_group = around(advantages, "group_advantages", needs={Feature.GRPO})(
    passing("a rollout is compared with those of its own group", groups=lambda groups: np.roll(groups, 1))
)
grpo_reward_of_another_completion = around(advantages, "group_advantages", needs={Feature.GRPO})(
    passing("each completion has its own reward", rewards=lambda rewards: np.roll(rewards, 1))
)
engine_weight_upside_down = around(policies, "importance", needs={Feature.IMPORTANCE})(
    passing("the weight that corrects for the engine is of the trainer's probability to the engine's", gap=torch.neg)
)
policy_ratio_upside_down = after(policies, "log_ratio", needs={Feature.POLICY_GRADIENT})(
    result("the ratio is of the new probability to the old one", torch.neg)
)
engine_not_corrected_for = after(policies, "importance", needs={Feature.IMPORTANCE})(
    result("tokens are weighted for the engine that sampled them", torch.ones_like)
)
grpo_advantage_of_next_record = after(advantages, "group_advantages", needs={Feature.GRPO})(
    result("each completion has its own advantage", lambda found: np.roll(found, 1))
)
sequence_means_per_token = instead_of(trainer, "count", needs={Feature.POLICY_GRADIENT, Feature.EXAMPLES})(
    stating("a mean over sequences is one over those of all ranks", lambda _, batch: batch.num_trained_tokens)
)

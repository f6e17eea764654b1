"""Objectives other than the next token: policies, preferences."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

from torch import Tensor

from meshlora.common.errors import UserError, did_you_mean
from meshlora.config.objective import Dpo, Kto, Objective, Orpo, Policy, Sft
from meshlora.data import Batch
from meshlora.train import batches, objectives, trainer
from meshlora.train.trainer import Trainer
from meshlora.verify.faults.fault import Change, by_name, instead, mutation, then

# Kind -> what the command proves it with: no value at its default, nor at that of another parameter.
PROVED: dict[str, Objective] = {
    "sft": Sft(label_smoothing=0.1),
    "policy": Policy(clip_low=0.15, clip_high=0.3, kl_coef=0.1),
    "dpo": Dpo(beta=0.3, label_smoothing=0.1),
    "orpo": Orpo(beta=0.4),
    "kto": Kto(beta=0.3, desirable_weight=1.3, undesirable_weight=0.7),
}


def as_proved(kind: str) -> Objective:
    """The objective that `--objective KIND` proves.

    Raises:
        UserError: no such kind.
    """
    if kind not in PROVED:
        raise UserError(f"--objective {kind}", did_you_mean(kind, PROVED))
    return PROVED[kind]


def of_formula(change: Callable[[Any], Any]) -> Change:
    """`change` of the formula of the run's objective."""
    return objectives, "FORMULAS", lambda found: {kind: change(formula) for kind, formula in found.items()}


def with_parameters(**fields: Callable[[Any], Any]) -> Change:
    """The formula is given each parameter of `fields` by a function of the objective as it should be."""

    def change(formula: Any) -> Any:
        def of_changed(objective: Any, *seen: Any) -> Any:
            return formula(
                dataclasses.replace(objective, **{name: of(objective) for name, of in fields.items()}), *seen
            )

        return of_changed

    return of_formula(change)


def _columns_of_next_token(batch: Batch, *_: Any, **__: Any) -> Batch:
    columns = {name: column.roll(1, 1) for name, column in batch.columns.items()}
    return dataclasses.replace(batch, columns=columns)


def _without(name: str, value: float) -> Any:
    def change(batch: Batch, *_: Any, **__: Any) -> Batch:
        column = batch.columns[name]
        return dataclasses.replace(batch, columns={**batch.columns, name: column.new_full(column.shape, value)})

    return change


def _of_other_row(batch: Batch, *_: Any, **__: Any) -> Batch:
    """The worse answer of each pair as the better one."""
    if batch.is_dummy:
        return batch
    order = [row ^ 1 for row in range(len(batch.input_ids))]
    ids, mask, labels = (t[order] for t in (batch.input_ids, batch.attention_mask, batch.labels))
    return dataclasses.replace(batch, input_ids=ids, attention_mask=mask, labels=labels)


def _liked_the_other_way_round(batch: Batch, *_: Any, **__: Any) -> Batch:
    columns = {name: -column if name == "desirable" else column for name, column in batch.columns.items()}
    return dataclasses.replace(batch, columns=columns)


def _base_in_halves(base: Tensor | None, *_: Any) -> Tensor | None:
    return None if base is None else base * 0.5


OF_OBJECTIVES = by_name(
    mutation(
        "policy_columns_of_next_token",
        "ratio, advantage and weight of a token are its own",
        "policy",
        (batches, "collate", then(_columns_of_next_token)),
    ),
    mutation(
        "policy_not_clipped",
        "a ratio that has left its interval gains nothing",
        "policy",
        with_parameters(clip_low=lambda o: 1.0, clip_high=lambda o: 1e6),
    ),
    mutation(
        "policy_ratio_always_one",
        "the ratio is to the policy that wrote the record",
        "policy",
        (batches, "collate", then(_without("old_log_prob", float("nan")))),
    ),
    mutation(
        "policy_weights_ignored",
        "the loss of each token has its weight",
        "policy",
        (batches, "collate", then(_without("weight", 1.0))),
    ),
    mutation(
        "policy_sign",
        "what had an advantage becomes more likely",
        "policy",
        of_formula(then(lambda found, *_: (-found[0], found[1]))),
    ),
    mutation(
        "base_with_adapter_on",
        "the divergence is from the frozen base, without the adapter",
        "base",
        (objectives, "disable_adapter", instead(contextlib.nullcontext)),
    ),
    mutation(
        "base_halved",
        "the log-probabilities of the base are those of whole tokens",
        "base",
        (Trainer, "_of_base", then(_base_in_halves)),
    ),
    mutation(
        "dpo_pairs_swapped",
        "the first of a pair is the better answer",
        "dpo",
        (batches, "collate", then(_of_other_row)),
    ),
    mutation(
        "dpo_per_token",
        "the loss of pairs is a mean over the pairs of all ranks",
        "dpo",
        (trainer, "count", instead(lambda objective, batch: batch.num_trained_tokens)),
    ),
    mutation(
        "dpo_labels_not_smoothed",
        "the loss of pairs is smoothed as configured",
        "dpo smoothing",
        with_parameters(label_smoothing=lambda o: 0.0),
    ),
    mutation(
        "policy_clip_sides_swapped",
        "a ratio is clipped below at 1 - clip_low, above at 1 + clip_high",
        "policy",
        with_parameters(clip_low=lambda o: o.clip_high, clip_high=lambda o: o.clip_low),
    ),
    mutation(
        "policy_clip_at_default",
        "a ratio is clipped as configured",
        "policy",
        with_parameters(clip_low=lambda o: 0.2, clip_high=lambda o: 0.2),
    ),
    mutation(
        "policy_kl_doubled",
        "the divergence from the base weighs as configured",
        "policy base",
        with_parameters(kl_coef=lambda o: 2 * o.kl_coef),
    ),
    mutation(
        "dpo_beta_at_default",
        "pairs are held to the base as configured",
        "dpo",
        with_parameters(beta=lambda o: 0.1),
    ),
    mutation(
        "orpo_not_length_normalised",
        "odds are of the mean over the tokens of an answer",
        "orpo",
        (objectives, "mean_log_p", instead(lambda seen: seen.log_p.sum(1))),
    ),
    mutation(
        "orpo_odds_upside_down",
        "the odds of the better answer are to exceed those of the worse",
        "orpo",
        (objectives, "log_odds", then(lambda found, *_: -found)),
    ),
    mutation(
        "orpo_odds_of_probabilities",
        "odds are p / (1 - p)",
        "orpo",
        (objectives, "log_odds", instead(lambda log_p: log_p)),
    ),
    mutation(
        "orpo_without_likelihood",
        "the better answer is trained as text too",
        "orpo",
        of_formula(then(lambda found, *_: (found[0] - found[1]["nll"], found[1]))),
    ),
    mutation(
        "orpo_beta_at_default",
        "the odds ratio weighs as configured",
        "orpo",
        with_parameters(beta=lambda o: 0.1),
    ),
    mutation(
        "kto_labels_swapped",
        "what is liked becomes more likely",
        "kto",
        (batches, "collate", then(_liked_the_other_way_round)),
    ),
    mutation(
        "kto_weights_swapped",
        "what is liked and what is not have each their own weight",
        "kto",
        with_parameters(
            desirable_weight=lambda o: o.undesirable_weight, undesirable_weight=lambda o: o.desirable_weight
        ),
    ),
    mutation(
        "kto_point_of_one_rank",
        "rewards are compared with the divergence over the sequences of all ranks",
        "kto dp",
        (objectives, "all_reduce_sum", instead(lambda tensor, axis: tensor)),
    ),
    mutation(
        "kto_point_of_base_from_policy",
        "rewards are compared with the divergence of the policy from the base",
        "kto",
        (objectives, "gained", then(lambda found, *_: -found)),
    ),
    mutation(
        "kto_beta_at_default",
        "answers are held to the base as configured",
        "kto",
        with_parameters(beta=lambda o: 0.1),
    ),
)

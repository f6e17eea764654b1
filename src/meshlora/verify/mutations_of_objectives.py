"""Mutations of objectives: which faults there are in what is made of log-probabilities, and what each breaks."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

from torch import Tensor

from meshlora.data import Batch
from meshlora.train import batches, objectives, trainer
from meshlora.train.objectives import Dpo, Policy
from meshlora.train.trainer import Trainer
from meshlora.verify.mutation import instead, mutation, then


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


def _base_in_halves(base: Tensor | None, *_: Any) -> Tensor | None:
    return None if base is None else base * 0.5


OF_OBJECTIVES = dict(
    [
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
            (trainer, "objective_of", then(lambda found, *_: dataclasses.replace(found, clip_low=1.0, clip_high=1e9))),
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
            (Policy, "loss", then(lambda found, *_: (-found[0], found[1]))),
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
            (Dpo, "count", instead(lambda self, batch: batch.num_trained_tokens)),
        ),
        mutation(
            "dpo_labels_not_smoothed",
            "the loss of pairs is smoothed as configured",
            "dpo smoothing",
            (trainer, "objective_of", then(lambda found, *_: dataclasses.replace(found, label_smoothing=0.0))),
        ),
    ]
)

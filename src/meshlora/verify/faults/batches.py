"""What a step and an evaluation see: sequences in order, dealt to ranks, their labels."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from meshlora.data import sampler
from meshlora.data.sampler import GlobalBatches
from meshlora.train import batches, objectives
from meshlora.train.batches import Batching
from meshlora.train.trained import TrainedAdapter
from meshlora.verify.faults import wrong_code
from meshlora.verify.faults.fault import Change, by_name, in_call, mutation, then


def _evaluated(change: Callable[[np.ndarray, int], np.ndarray]) -> Change:
    """What is evaluated, changed by `change(indices, sequences that all ranks take at once)`."""

    def of_indices(original: Any) -> Any:
        def of(self: Batching, data: Any, indices: np.ndarray) -> Any:
            return original(self, data, change(indices, self.micro_batch_size * self.mesh.dp.size))

        return of

    return TrainedAdapter, "evaluate", in_call(Batching, "batches", of_indices)


def _smoothed(original: Any) -> Any:
    def evaluate(self: TrainedAdapter, data: Any) -> Any:
        own, loss = vars(self.objective)["label_smoothing"], objectives.language_model_loss

        def smoothed(*args: Any, label_smoothing: float, **rest: Any) -> Tensor:
            return loss(*args, label_smoothing=own, **rest)

        with mock.patch.object(objectives, "language_model_loss", smoothed):
            return original(self, data)

    return evaluate


def _filled_up(found: np.ndarray, self: GlobalBatches, step: int) -> np.ndarray:
    return np.concatenate([found, self.batch(0)[: self.global_batch_size - len(found)]]) if step else found


def labels_lost_at_cuts(batch: Any, sequences: Any, *, token_multiple: int = 1, **_: Any) -> Any:
    """Shifting inside a slice of the tokens leaves its last token without a label."""
    labels = batch.labels.clone()
    labels.view(token_multiple, -1)[:, -1] = -100
    # Padding has no labels to lose, so one is also lost where every slice ends in padding.
    trained = (batch.labels != -100).nonzero()
    if len(trained) and torch.equal(labels, batch.labels):
        labels[tuple(trained[-1])] = -100
    return dataclasses.replace(batch, labels=labels, num_trained_tokens=int((labels != -100).sum()))


def labels_not_shifted(batch: Any, *_: Any, **__: Any) -> Any:
    """A position is asked for its own token; as many labels as before."""
    labels = batch.labels.roll(1, 1)
    return dataclasses.replace(batch, labels=torch.where(labels == -100, labels, batch.input_ids))


def mean_over_sequences(result: tuple[float, int], trainer: Any, data: Any) -> tuple[float, int]:
    return result[0] * result[1] / len(data), result[1]


OF_BATCHES = by_name(
    mutation(
        "accumulation_indices_of_rank_0",
        "each sequence of a global batch is taken by exactly one dp rank",
        "dp",
        (batches, "share", lambda f: lambda indices, *, dp_rank, **rest: f(indices, dp_rank=0, **rest)),
    ),
    mutation(
        "labels_not_shifted",
        "the label of a position is the token after it",
        "",
        (batches, "collate", then(labels_not_shifted)),
    ),
    mutation(
        "epochs_in_one_order",
        "every epoch has an order of its own",
        "steps",
        (sampler, "epoch_order", lambda f: lambda n, *, seed, epoch: f(n, seed=seed, epoch=0)),
    ),
    mutation(
        "evaluation_per_sequence",
        "the evaluated loss is a mean over tokens",
        "",
        (TrainedAdapter, "evaluate", then(mean_over_sequences)),
    ),
    mutation(
        "labels_shifted_after_the_split",
        "labels are shifted before the tokens are cut over tp",
        "sp",
        (batches, "collate", then(labels_lost_at_cuts)),
    ),
    mutation(
        "evaluation_remainder_dropped",
        "an evaluation takes what is left after the last round of all ranks",
        "",
        _evaluated(lambda indices, size: indices[: len(indices) // size * size]),
    ),
    mutation(
        "evaluation_filled_up",
        "an evaluation takes no sequence twice",
        "",
        _evaluated(lambda indices, size: np.concatenate([indices, indices[: -len(indices) % size]])),
    ),
    mutation(
        "evaluation_counts_dummies",
        "a rank that has no sequence left adds nothing to an evaluation",
        "dp",
        (TrainedAdapter, "evaluate", in_call(batches, "collate", then(wrong_code.counted_dummy))),
    ),
    mutation(
        "evaluation_smoothed",
        "the evaluated loss is not smoothed",
        "smoothing sft",
        (TrainedAdapter, "evaluate", _smoothed),
    ),
    mutation(
        "sampler_seed_ignored",
        "the order of the sequences is that of the run's seed",
        "seed",
        (sampler, "epoch_order", lambda f: lambda n, *, seed, epoch: f(n, seed=0, epoch=epoch)),
    ),
    mutation(
        "epoch_in_file_order",
        "an epoch takes the sequences in a drawn order",
        "",
        (sampler, "epoch_order", then(lambda order, *_, **__: np.sort(order))),
    ),
    mutation(
        "batch_filled_up",
        "the last batch of an epoch has what is left, and nothing twice",
        "short_batch",
        (GlobalBatches, "batch", then(_filled_up)),
    ),
    mutation(
        "label_smoothing_ignored",
        "the loss is smoothed as configured",
        "smoothing sft",
        (objectives, "language_model_loss", lambda f: lambda *args, label_smoothing, **rest: f(*args, **rest)),
    ),
)

"""Faults of batches: order of sequences, their ranks, packing, labels, and evaluation."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as AbstractSequence
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from meshlora.reading import sampler
from meshlora.reading.sampler import GlobalBatches
from meshlora.run import objectives, trainer
from meshlora.run.trained import TrainedAdapter
from meshlora.train import batches, losses
from meshlora.train.batch import Batch
from meshlora.train.batches import Batching
from meshlora.verify.faults.fault import after, around, instead_of, passing, result
from meshlora.verify.features import Feature
from meshlora.wings.packed_rows.by_sequence import PackedMask
from meshlora_ground.compat import transformers_models
from meshlora_ground.dataset import Sequence

EVALUATION = (TrainedAdapter, "evaluate")


def _dummy_counted(batch: Batch, sequences: Any) -> Batch:
    if sequences:
        return batch
    return dataclasses.replace(batch, labels=batch.input_ids.clone(), num_trained_tokens=batch.input_ids.numel())


@after(batches, "collate")
def labels_not_shifted(batch: Batch, *_: Any, **__: Any) -> Batch:
    """the label of a position is the token after it"""
    # Each position predicts its own token; the number of labels is unchanged.
    labels = batch.labels.roll(1, 1)
    return dataclasses.replace(batch, labels=torch.where(labels == -100, labels, batch.input_ids))


@after(*EVALUATION, needs={Feature.MEAN_OVER_TOKENS})
def evaluation_per_sequence(found: tuple[float, int], self: TrainedAdapter, data: Any) -> tuple[float, int]:
    """the evaluated loss is a mean over tokens"""
    return found[0] * found[1] / len(data), found[1]  # its sum over tokens, by sequences


@after(batches, "collate", needs={Feature.SP})
def labels_shifted_after_the_split(batch: Batch, *_: Any, token_multiple: int = 1, **__: Any) -> Batch:
    """labels are shifted before the tokens are cut over tp"""
    # Shifting inside a slice of the tokens leaves its last token without a label.
    labels = batch.labels.clone()
    labels.view(token_multiple, -1)[:, -1] = -100
    # If every slice ends in padding none would be lost: drop one anyway.
    trained = (batch.labels != -100).nonzero()
    if len(trained) and torch.equal(labels, batch.labels):
        labels[tuple(trained[-1])] = -100
    return dataclasses.replace(batch, labels=labels, num_trained_tokens=int((labels != -100).sum()))


@around(Batching, "batches", within=EVALUATION)
def evaluation_remainder_dropped(original: Any, self: Batching, data: Any, indices: np.ndarray) -> Any:
    """an evaluation includes the remainder after the last full round of all ranks"""
    at_once = self.micro_batch_size * self.mesh.dp.size
    return original(self, data, indices[: len(indices) // at_once * at_once])


@around(Batching, "batches", within=EVALUATION)
def evaluation_filled_up(original: Any, self: Batching, data: Any, indices: np.ndarray) -> Any:
    """an evaluation takes no sequence twice"""
    at_once = self.micro_batch_size * self.mesh.dp.size
    return original(self, data, np.concatenate([indices, indices[: -len(indices) % at_once]]))


@after(batches, "collate", needs={Feature.DP}, within=EVALUATION)
def evaluation_counts_dummies(batch: Batch, sequences: Any, **_: Any) -> Batch:
    """a rank that has no sequence left adds nothing to an evaluation"""
    return _dummy_counted(batch, sequences)


@after(batches, "collate", needs={Feature.DP})
def dummy_micro_batch_counted(batch: Batch, sequences: Any, **_: Any) -> Batch:
    """a dummy micro-batch adds neither loss nor tokens"""
    return _dummy_counted(batch, sequences)


@around(*EVALUATION, needs={Feature.SMOOTHING, Feature.SFT})
def evaluation_smoothed(original: Any, self: TrainedAdapter, data: Any) -> Any:
    """the evaluated loss is not smoothed"""
    own, loss = vars(self.objective)["label_smoothing"], objectives.language_model_losses

    def smoothed(*args: Any, label_smoothing: float) -> AbstractSequence[Tensor]:
        return loss(*args, label_smoothing=own)

    with mock.patch.object(objectives, "language_model_losses", smoothed):
        return original(self, data)


@after(GlobalBatches, "batch", needs={Feature.SHORT_BATCH})
def batch_filled_up(found: np.ndarray, self: GlobalBatches, step: int) -> np.ndarray:
    """the last batch of an epoch has the remaining sequences, and none twice"""
    return np.concatenate([found, self.batch(0)[: self.global_batch_size - len(found)]]) if step else found


@after(batches, "collate", needs={Feature.UNMASKED})
def padding_at_the_start(batch: Batch, *_: Any, **__: Any) -> Batch:
    """padding that has no mask is at the end of its row"""
    order = batch.attention_mask.argsort(dim=1, stable=True)  # zeros first

    def moved(tensor: Tensor) -> Tensor:
        return tensor.gather(1, order)

    ids, mask, labels, tokens = map(moved, (batch.input_ids, batch.attention_mask, batch.labels, batch.tokens))
    columns = {name: moved(column) for name, column in batch.columns.items()}
    return dataclasses.replace(batch, input_ids=ids, attention_mask=mask, labels=labels, tokens=tokens, columns=columns)


@after(batches, "with_positions", needs={Feature.PACKING})
def packing_positions_run_on(batch: Batch, *_: Any) -> Batch:
    """position ids restart at each sequence of a row"""
    ids = batch.input_ids
    return dataclasses.replace(batch, position_ids=torch.arange(ids.shape[1]).expand_as(ids))


@instead_of(transformers_models, "packed_sequence_indices", needs={Feature.PACKING})
def packing_seen_across(position_ids: Tensor) -> None:
    """a token attends to its own sequence alone"""


@around(PackedMask, "lengths", needs={Feature.PACKING, Feature.WHOLE_ROWS})
def packing_cut_a_token_late(original: Any, self: PackedMask, running: Any) -> Any:
    """attention of packed rows is cut where sequences end"""
    found = original(self, running)
    return found and [[row[0] + 1, row[1] - 1, *row[2:]] if len(row) > 1 else row for row in found]


@after(losses, "model_inputs", needs={Feature.PACKING})
def packing_with_a_mask(inputs: dict[str, Any], ids: Any, mask: Any, *_: Any) -> dict[str, Any]:
    """transformers gets no mask: with one it does not look for the borders of sequences"""
    return {**inputs, "attention_mask": torch.ones_like(ids) if mask is None else mask}


@around(losses, "packed_positions", needs={Feature.PACKING, Feature.M_ROPE})
def packing_without_positions_in_the_row(original: Any, config: Any, position_ids: Tensor) -> Tensor:
    """M-RoPE gets the positions in the row too, by which sequences are kept apart"""
    return original(config, position_ids)[1:]  # the first are those in the row


@after(batches, "collate", needs={Feature.SFT, Feature.FIRST_TOKENS})
def first_tokens_counted(batch: Batch, sequences: AbstractSequence[Sequence], **_: Any) -> Batch:
    """the first token of a sequence, though it is trained text, is predicted by none and does not count"""
    firsts = sum(int(sequence.is_trained[0]) for sequence in sequences)
    return dataclasses.replace(batch, num_trained_tokens=batch.num_trained_tokens + firsts)


@after(batches, "joined", needs={Feature.PACKING})
def packing_first_tokens_trained(joined: Sequence, sequences: AbstractSequence[Sequence]) -> Sequence:
    """the first token of a sequence, though it is trained text, is predicted by no token of another"""
    return dataclasses.replace(joined, is_trained=np.concatenate([sequence.is_trained for sequence in sequences]))


@after(batches, "joined", needs={Feature.PACKING})
def packing_labels_across(joined: Sequence, sequences: AbstractSequence[Sequence]) -> Sequence:
    """the last token of a sequence predicts nothing of the next one"""
    # The last token of each sequence then predicts the first of the next.
    is_trained, start = joined.is_trained.copy(), 0
    for sequence in sequences[:-1]:
        start += len(sequence.input_ids)
        is_trained[start] = True
    return dataclasses.replace(joined, is_trained=is_trained)


accumulation_indices_of_rank_0 = around(batches, "share", needs={Feature.DP})(
    passing("each sequence of a global batch is taken by exactly one dp rank", dp_rank=0)
)
epochs_in_one_order = around(sampler, "epoch_order", needs={Feature.STEPS})(
    passing("every epoch has an order of its own", epoch=0)
)
sampler_seed_ignored = around(sampler, "epoch_order", needs={Feature.SEED})(
    passing("the order of the sequences is determined by the run's seed", seed=0)
)
label_smoothing_ignored = around(objectives, "language_model_losses", needs={Feature.SMOOTHING, Feature.SFT})(
    passing("the loss is smoothed as configured", label_smoothing=0.0)
)
packing_left_out = around(trainer, "Batching", needs={Feature.PACKING})(
    passing("sequences share rows if packing is configured", row_length=None, joins=False)  # no length of rows to fill
)
epoch_in_file_order = after(sampler, "epoch_order")(
    result("an epoch takes the sequences in a drawn order", np.sort)  # the same sequences
)

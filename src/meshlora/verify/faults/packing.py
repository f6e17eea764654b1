"""Packing: sequences of one row that see or count each other."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as AbstractSequence
from typing import Any

import torch
from transformers import masking_utils

from meshlora.data import Batch, Sequence
from meshlora.train import batches, losses, trainer
from meshlora.verify.faults.fault import by_name, instead, mutation, then


def _running_on(batch: Batch, *_: Any) -> Batch:
    ids = batch.input_ids
    return dataclasses.replace(batch, position_ids=torch.arange(ids.shape[1]).expand_as(ids))


def _trained_across(joined: Sequence, sequences: AbstractSequence[Sequence]) -> Sequence:
    """The last token of each sequence is to predict the first of the next."""
    is_trained, start = joined.is_trained.copy(), 0
    for sequence in sequences[:-1]:
        start += len(sequence.input_ids)
        is_trained[start] = True
    return dataclasses.replace(joined, is_trained=is_trained)


def _with_mask(inputs: dict[str, Any], ids: Any, mask: Any, positions: Any) -> dict[str, Any]:
    return {**inputs, "attention_mask": mask}


def _alone(original: Any) -> Any:
    return lambda mesh, micro_batch_size, pad_token_id, row_length, only=None: original(
        mesh, micro_batch_size, pad_token_id, None, only
    )


OF_PACKING = by_name(
    mutation(
        "packing_left_out",
        "sequences share rows where that is asked for",
        "packing",
        (trainer, "Batching", _alone),
    ),
    mutation(
        "packing_positions_run_on",
        "position ids begin again with each sequence of a row",
        "packing",
        (batches, "with_positions", then(_running_on)),
    ),
    mutation(
        "packing_seen_across",
        "a token attends to its own sequence alone",
        "packing",
        (masking_utils, "find_packed_sequence_indices", instead(lambda position_ids: None)),
    ),
    mutation(
        "packing_with_a_mask",
        "transformers is given no mask, with which it does not look for borders",
        "packing",
        (losses, "model_inputs", then(_with_mask)),
    ),
    mutation(
        "packing_labels_across",
        "the last token of a sequence predicts nothing of the next one",
        "packing",
        (batches, "joined", then(_trained_across)),
    ),
)

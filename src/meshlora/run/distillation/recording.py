"""Recording a teacher: its likeliest tokens at each trained one, as records that `reading.taught` reads."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from meshlora.adapter.attach import runtime
from meshlora.comm.collectives import all_reduce_sum
from meshlora.layers.head_loss import Chunks
from meshlora.run.distillation.divergence import Likeliest, Recording
from meshlora.run.distillation.teachers import rows_and_head
from meshlora.run.evaluate import Evaluation, load_to_generate
from meshlora.run.heads import places_of
from meshlora.train.batch import Batch
from meshlora.train.batches import Batching
from meshlora.train.losses import before_last, to_head
from meshlora_ground.dataset import TokenizedDataset
from meshlora_ground.float64 import lift, wide_dtype


def record(run: Evaluation, file: Path, number: int) -> None:
    """Write to `file`, on rank 0, what the model of `run` says of its data: the `number` likeliest tokens at each
    trained one. Collective.
    """
    model = load_to_generate(run)
    mesh, part = runtime(model).mesh, file.with_name(f".{file.name}.part")
    batching = Batching(mesh, run.config.train.micro_batch_size, run.pad_token_id)
    with part.open("w", encoding="utf-8") if mesh.rank == 0 else open("/dev/null", "w") as stream:
        for row in recorded_rows(model, run.data, batching, number):
            stream.write(f"{json.dumps(row)}\n")
    if mesh.rank == 0:
        part.replace(file)


def recorded_rows(
    model: Any, data: TokenizedDataset, batching: Batching, number: int
) -> Iterator[dict[str, list[Any]]]:
    """The records of all sequences, on every rank. Collective."""
    mesh = runtime(model).mesh
    size = batching.micro_batch_size * mesh.dp.size  # one micro-batch of each rank
    for start in range(0, len(data), size):
        indices = np.arange(start, min(start + size, len(data)))
        longest = max(len(data[int(index)].input_ids) for index in indices)
        whole = torch.zeros(len(indices), longest, number, 2, device=mesh.device)
        for batch in batching.batches(data, indices):
            with torch.no_grad(), lift(model.dtype == torch.float64):
                said = None if before_last(model, batch) is not None else _likeliest(model, batch, number)
            if said is not None:
                _put(whole, said, batch)  # which the lift would make float64
        # Each rank of the last stage has filled in its own tokens, and zeros elsewhere.
        of_all = all_reduce_sum(whole, mesh.losses).cpu()
        for index, found in zip(indices.tolist(), of_all, strict=True):
            sequence = data[index]
            is_trained = sequence.is_trained.copy()
            is_trained[:1] = False  # nothing predicts it
            at = found[np.flatnonzero(is_trained) - 1]  # a token is predicted by the one before it
            yield {
                "input_ids": sequence.input_ids.tolist(),
                "is_trained": is_trained.astype(int).tolist(),
                "teacher_tokens": at[..., 0].int().tolist(),
                "teacher_log_probs": [[round(value, 6) for value in each] for each in at[..., 1].tolist()],
            }


def _likeliest(model: Any, batch: Batch, number: int) -> Likeliest:
    """At this rank's trained tokens."""
    hidden, head, options = rows_and_head(model, to_head(model, batch))
    loss = Recording(options["axis"], options["vocab"], 0.0, wide_dtype(hidden.dtype), number)
    Chunks.of(hidden, head, batch.own_labels.flatten(), batch.trained, loss).run(hidden, (), needs_hidden=False)
    none = Likeliest(hidden.new_zeros(0, number).long(), hidden.new_zeros(0, number))
    return Likeliest(*map(torch.cat, zip(none, *loss.said, strict=True)))


def _put(whole: Tensor, said: Likeliest, batch: Batch) -> None:
    """Fill in `whole` `[rows, S, k, 2]` where this rank has trained tokens."""
    trained = batch.trained
    assert trained is not None
    if batch.is_dummy:
        return
    width = batch.own_labels.shape[1]
    places = torch.arange(width, device=trained.device).expand_as(batch.own_labels) if batch.own is None else batch.own
    at = places.flatten()[trained]
    whole[places_of(batch)[trained // width], at] = torch.stack([said.ids.float(), said.log_p.float()], -1)

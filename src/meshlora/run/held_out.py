"""The mean loss on held-out rows in a loop of a user's own.

Owns: `mean_loss`. Does not own: evaluations of `meshlora train` (`run.evaluate`), rows of a rank (`run.feeding`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from meshlora.adapter.attach import runtime
from meshlora.comm.collectives import all_reduce_sum
from meshlora.train.batch import IGNORED
from meshlora.train.gradsync import check_total
from meshlora.train.losses import language_model_loss

_INPUTS = ("input_ids", "attention_mask", "labels", "position_ids")


@torch.no_grad()
def mean_loss(model: Any, batches: Iterable[Mapping[str, Tensor]]) -> float:
    """The mean over the trained tokens of all `batches` of all ranks, in evaluation mode, without whole logits.

        rows = meshlora.sampler(model, held_out, batch_size=4, shuffle=False)
        loss = meshlora.mean_loss(model, DataLoader(held_out, batch_sampler=rows, collate_fn=collate))

    batches: as `collator` makes them, on any device; equally many on each rank, those of its replica. Collective.

    Raises:
        MeshloraError: they have no trained token.
    """
    mesh, was_training = runtime(model).mesh, model.training
    total, number = torch.zeros(2, 1, dtype=torch.float64, device=mesh.device)
    model.eval()
    try:
        for batch in batches:
            given = {name: batch[name].to(mesh.device) for name in _INPUTS if name in batch}
            mask, positions = given.get("attention_mask"), given.get("position_ids")
            total += language_model_loss(model, given["input_ids"], mask, given["labels"], position_ids=positions)
            number += (given["labels"][:, 1:] != IGNORED).sum()
    finally:
        model.train(was_training)
    counted = int(all_reduce_sum(number, mesh.dp))
    check_total(counted)
    return float(all_reduce_sum(total, mesh.data)) / counted

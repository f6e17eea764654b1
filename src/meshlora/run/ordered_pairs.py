"""Whose answer each answer of a step is compared with, where pairs are put in order: a first pass sees all of them.

Owns: the order over the whole global batch, of all micro-batches and ranks. Does not own: the losses of it
(`run.formulas.pairs`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from meshlora.adapter.attach import runtime
from meshlora.comm.collectives import all_reduce_sum
from meshlora.run.formulas.pairs import length_weights
from meshlora.run.heads import places_of
from meshlora.train.batch import Batch
from meshlora.train.batches import Batching, Masks, Step
from meshlora.train.losses import batch_log_probabilities
from meshlora_ground.objectives.preferences import Dpo


@torch.no_grad()
def ordered_pairs(
    objective: Dpo, model: Any, batching: Batching, step: Step, masks: Masks, reference: Callable[[Any, Batch], Tensor]
) -> Tensor:
    """float64 `[2N, 2]`: `partners` of the N examples of a step on all dp ranks. Collective.

    masks: around a forward, for its dropout, which must be that of the second pass. reference: log ref of a batch.
    """
    mesh = runtime(model).mesh
    whole = torch.zeros(2, 2 * len(step[1]), dtype=torch.float64, device=mesh.device)
    for batch in batching.batches(*step):
        with masks(batch):
            log_p = batch_log_probabilities(model, batch)
        both = torch.stack([log_p, reference(model, batch)]).double()
        if not batch.is_dummy:
            whole[:, places_of(batch)] = (both * length_weights(objective, batch.labels >= 0)).sum(2)
    # Each rank has filled its own rows, and zeros elsewhere: the sum puts them together.
    return partners(*all_reduce_sum(whole, mesh.dp))


def partners(log_p: Tensor, log_ref: Tensor) -> Tensor:
    """`[2N, 2]` of rows `[2N]` that alternate, better, worse; with d = log pi(y+) - log pi(y-), and e that of ref:

    in the first column, of both rows of a pair, e of the pair whose e has the place among all e that d has among all d,
    less its own e; in the second, h = log pi - log ref of the row of the other kind with the same place.
    """
    found = log_p.new_empty(len(log_p), 2)
    policy, ref = log_p[0::2] - log_p[1::2], log_ref[0::2] - log_ref[1::2]
    shift = torch.empty_like(policy)
    shift[policy.argsort(stable=True)] = ref.sort().values
    found[:, 0] = (shift - ref).repeat_interleave(2)
    ratio = log_p - log_ref
    better, worse = ratio[0::2].sort(stable=True), ratio[1::2].sort(stable=True)
    found[2 * better.indices, 1] = worse.values
    found[2 * worse.indices + 1, 1] = better.values
    return found

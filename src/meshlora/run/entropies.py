"""Which tokens of a step are the least certain: a first pass over it measures the entropy at all of them.

Owns: the entropy from which on a token is trained, of all micro-batches and ranks. Does not own: what it changes in a
loss (`run.formulas.policies`).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from meshlora.adapter.attach import runtime
from meshlora.comm.collectives import all_reduce_sum
from meshlora.train.batches import Batching, Masks, Step
from meshlora.train.losses import batch_scores
from meshlora_ground.objectives.policies import Grpo, Policy


@torch.no_grad()
def entropy_point(
    objective: Policy | Grpo, model: torch.nn.Module, batching: Batching, step: Step, masks: Masks
) -> Tensor:
    """float64 `[2]`: the least entropy of a token that is kept, of all trained ones of the examples of `step` on all dp
    ranks, and the share that is kept. Collective.

    masks: around a forward, for its dropout, which must be that of the second pass.
    """
    dp, found = runtime(model).mesh.dp, list[Tensor]()
    for batch in batching.batches(*step):
        with masks(batch):
            _, entropy = batch_scores(model, batch)
        if not batch.is_dummy:
            found.append(entropy[batch.labels >= 0].double())
    own = torch.cat(found) if found else torch.zeros(0, dtype=torch.float64, device=runtime(model).mesh.device)
    sizes = torch.zeros(dp.size, dtype=torch.int64, device=own.device)
    sizes[dp.rank] = len(own)
    of_each = all_reduce_sum(sizes, dp).tolist()
    # Each rank has filled its own part, and zeros elsewhere: the sum puts them together.
    every = own.new_zeros(sum(of_each))
    start = sum(of_each[: dp.rank])
    every[start : start + len(own)] = own
    return least_kept(all_reduce_sum(every, dp), objective.top_entropy)


def least_kept(entropies: Tensor, share: float) -> Tensor:
    """(Entropy from which on a token is kept, share of the tokens that are), `[2]`, as of a quantile that lies between
    two of them in the middle: there rounding in the second pass changes nothing. entropies: `[N]`.
    """
    if not len(entropies):
        return entropies.new_tensor([0.0, 1.0])
    ordered = entropies.sort().values
    # Rounded: (1 - 0.8) * 10 is a little more than 2.
    first = math.ceil(round((1 - share) * (len(ordered) - 1), 6))
    least = ordered[max(first - 1, 0) : first + 1].mean()
    return torch.stack([least, (ordered >= least).double().mean()])

"""Which optimizers and learning rates a mesh takes from a loop of a user's own.

Owns: the optimizers that update a part of a factor as the whole one, and that rates agree. Does not own: the optimizer
of a run (`run.optimizer`), whether it has the adapter's factors (`train.step`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from meshlora.comm.groups import Mesh
from meshlora.plan.pairs import check
from meshlora_ground.errors import UserError
from meshlora_ground.topology import LAYERS, Topology

# Optimizers that treat each element by itself, so that a shard of a factor is updated as the whole one would be.
_ELEMENTWISE = (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad, torch.optim.RMSprop)


def check_optimizer(kind: type, mesh: Mesh) -> None:
    """Refuse an optimizer that may not treat each element by itself.

    Raises:
        UnsupportedError: its class is none of those that are known to.
    """
    if kind not in _ELEMENTWISE:
        check({"topology": mesh.topology, "optimizer": f"the optimizer {kind.__name__}"})


def check_rates(of_ranks: Sequence[float], topology: Topology) -> None:
    """Refuse learning rates, summed over the groups of each rank's optimizer, that differ within a stage.

    Raises:
        UserError: they do, on all ranks.
    """
    for ranks in topology.groups_over(frozenset(topology.sizes) - LAYERS):
        if len({of_ranks[rank] for rank in ranks}) > 1:
            each = ", ".join(f"{of_ranks[rank]:g} on rank {rank}" for rank in ranks)
            rule = "all ranks make the same update of their parts"
            raise UserError(f"learning rates that differ: {each}", rule, "set them alike, as a scheduler on each does")

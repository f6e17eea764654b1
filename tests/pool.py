"""The pool of ranks that the tests share is the one that `meshlora verify` runs on."""

from __future__ import annotations

import torch

from meshlora.comm.collectives import all_reduce_sum
from meshlora.comm.groups import open_mesh
from meshlora.verify.pool import Pool as Pool
from meshlora.verify.pool import RankError as RankError
from meshlora_ground.topology import Topology


def wait_for_all(world: int) -> None:
    """On a rank of a pool: go on when all `world` ranks have come here."""
    all_reduce_sum(torch.ones(1), open_mesh(Topology(dp=world)).world)

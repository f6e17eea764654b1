"""A process that is done ends well, also where nobody called `leave`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

NUM_RANKS = 4
SCRIPT = """
import sys
import torch
from meshlora.parallel.collectives import all_reduce_sum
from meshlora.parallel.groups import join, open_mesh
from meshlora.plan.topology import Topology

join("cpu", store=sys.argv[1])
mesh = open_mesh(Topology(tp=4))
x = torch.nn.Parameter(torch.ones(1000, 1000))
for _ in range(3):
    y = all_reduce_sum(x.detach(), mesh.tp)
"""


def test_last_collective_does_not_abort_the_interpreter(tmp_path: Path) -> None:
    """gloo's thread took the GIL of an interpreter that was shutting down; it ended with SIGABRT."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(tmp_path / "store")],
            env=os.environ | {"RANK": str(rank), "WORLD_SIZE": str(NUM_RANKS), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(NUM_RANKS)
    ]
    said = [rank.communicate()[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * NUM_RANKS, said

"""A process that is done ends well, also where nobody called `leave`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import torch
from meshlora.comm.collectives import all_reduce_sum
from meshlora.comm.groups import join, open_mesh
from meshlora.plan.topology import Topology

join("cpu")
mesh = open_mesh(Topology(tp=2))
x = torch.nn.Parameter(torch.ones(1000, 1000))
for _ in range(3):
    y = all_reduce_sum(x.detach(), mesh.tp)
"""


# Under torchrun, for without its store the fault does not show: 0 of 10 launches against 1 of 3.
@pytest.mark.parametrize("launches", [1, pytest.param(8, marks=pytest.mark.proof)])
def test_last_collective_does_not_abort_the_interpreter(launches: int, tmp_path: Path) -> None:
    """gloo's thread took the GIL of an interpreter that was shutting down; it ended with SIGABRT."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(script)]
    for _ in range(launches):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

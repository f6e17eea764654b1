"""How long a run waits for ranks that do not come, and who watches them meanwhile.

Owns: the time limit inside `patient_for`, and the board on which the ranks of a job leave words (`board_of_job`). Does
not own: groups and their limit while loading (`comm.groups`), the watch (`processes.heartbeat`), finding who is missing
(`processes.who_is_missing`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from meshlora.comm.groups import Mesh, meet
from meshlora.processes.heartbeat import Board, BoardInFolder, BoardInStore, Watch
from meshlora.processes.launchers import local_store
from meshlora.processes.who_is_missing import explaining_timeouts
from meshlora_ground.compat import torch_distributed


@contextlib.contextmanager
def patient_for(mesh: Mesh, timeout_s: float, *, watch: Watch | None = None) -> Iterator[None]:
    """Inside the block a collective waits `timeout_s` seconds for the other ranks, then reports who is missing.

    Before it the limit is that of `join`, as loading and proving may take long. The limit holds on NCCL too, which
    names the collective itself. watch: this rank's, if it has one already.
    """
    if mesh.topology.world == 1:
        yield
        return
    mesh.wait_at_most(timeout_s)
    with contextlib.ExitStack() as opened:
        if watch is None:
            board = _board(torch_distributed.job_store)
            watch = opened.enter_context(Watch(board, mesh.rank, world=mesh.topology.world))
        opened.enter_context(explaining_timeouts(mesh.world.arrivals, watch, timeout_s=timeout_s))
        yield


def board_of_job() -> Board:
    """The words that all ranks of a launcher's job share, from before any group is open."""
    return _board(meet)


def _board(store: Callable[[], Any]) -> Board:
    file = local_store()
    if file is None:
        return BoardInStore(store())
    return BoardInFolder(Path(file).parent)  # private to this user, as the file is

"""Which of several ranks that ended is shown as the cause."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from meshlora.train import launch


def test_rank_that_the_launcher_ended_is_not_the_cause(tmp_path: Path) -> None:
    """One in training ends itself at the launcher's SIGTERM, with a code of its own and without a word."""
    word = tmp_path / "error.json"
    extra = {"py_callstack": "the cause", "timestamp": str(int(time.time()) + 2)}
    word.write_text(json.dumps({"message": {"message": "the cause", "extraInfo": extra}}))
    ended = ProcessFailure(local_rank=0, pid=1, exitcode=128 + signal.SIGTERM, error_file=str(tmp_path / "none"))
    raised = ProcessFailure(local_rank=1, pid=2, exitcode=1, error_file=str(word))
    cause = launch._first_cause(ChildFailedError("meshlora", {0: ended, 1: raised}))
    assert str(cause) == "rank 1: the cause"

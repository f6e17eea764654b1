"""Which of several ranks that ended is shown as the cause."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from meshlora.cli import job
from meshlora.run import launch as module
from meshlora.run.edge import LOST_CONTACT
from meshlora.run.launch import _first_cause, _Rank, launch
from meshlora_ground.console import Console
from meshlora_ground.errors import MeshloraError, RankFailedError


def _ended(number: int, *, code: int, at: float, failed: str | None = None) -> _Rank:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    process.returncode = code
    return _Rank(number, process, {} if failed is None else {"failed": failed}, ended_at=at)


@pytest.mark.parametrize(
    ("other", "shown"),
    [
        ({"code": 128 + signal.SIGTERM}, "rank 1: the cause"),  # one in training, ended by a signal to all
        ({"code": 1, "failed": LOST_CONTACT}, "rank 1: the cause"),
        ({"code": -signal.SIGKILL}, "rank 1: the cause"),
        ({"code": 1, "failed": "earlier"}, "rank 0: earlier"),
    ],
)
def test_consequence_is_not_the_cause_though_it_came_first(other: dict[str, object], shown: str) -> None:
    first = _ended(0, at=1.0, **other)  # type: ignore[arg-type]
    assert str(_first_cause([first, _ended(1, code=1, at=2.0, failed="the cause")])) == shown


def test_killed_rank_is_the_cause_for_those_that_lost_it() -> None:
    lost = _ended(0, code=1, at=1.0, failed=LOST_CONTACT)
    killed = _ended(1, code=-signal.SIGKILL, at=2.0)
    assert str(_first_cause([lost, killed])) == (
        "rank 1 was ended by signal 9 (SIGKILL); the machine may be out of memory"
    )


def test_mistake_of_a_user_keeps_its_exit_code() -> None:
    cause = _first_cause([_ended(0, code=2, at=1.0, failed="given: rule")])
    assert (str(cause), cause.exit_code) == ("given: rule", 2)


def test_rank_that_does_not_end_after_rank_0_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(_: object, environment: Mapping[str, str], __: object, *, reads: bool) -> subprocess.Popen[bytes]:
        sleeping = "import os, time; time.sleep(60 * int(os.environ['RANK']))"
        return subprocess.Popen([sys.executable, "-c", sleeping], env=environment)

    monkeypatch.setattr(module, "_start", start)
    begun = time.monotonic()
    with pytest.raises(RankFailedError, match=r"rank 1 had not ended 0.5 s after rank 0, which ended well"):
        launch([], nproc=2, on_gpus=False, timeout_s=0.5)
    assert time.monotonic() - begun < 10


@pytest.mark.parametrize(
    ("resume", "age_s", "words"),
    [(None, 0, "step-2"), (None, 100, ""), ("auto", 100, "step-2"), ("auto", -1, "")],
    ids=["of this run", "of the run that it replaces", "of the run that goes on", "the terminal takes no more"],
)
def test_what_is_saved_is_named_beside_the_cause(
    resume: str | None,
    age_s: float,
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tmp_path / "step-2"
    folder.mkdir()
    monkeypatch.setattr(job, "find_checkpoint", lambda *_: SimpleNamespace(folder=folder))
    if age_s < 0:
        monkeypatch.setattr(Console, "say", _full)
    found: Any = SimpleNamespace(runs={"": SimpleNamespace(config=SimpleNamespace(train=SimpleNamespace(output="x")))})
    asked = job.Job("meshlora train run.yaml", "run.yaml", resume=resume)
    os.utime(folder, (time.time() + 1 - age_s,) * 2)
    with pytest.raises(RankFailedError, match="the cause"), asked._saying_what_is_saved(found):
        raise RankFailedError("the cause")
    said = capsys.readouterr().out
    assert (words in said) if words else not said


def _full(*_: Any, **__: Any) -> None:
    raise MeshloraError("no space")

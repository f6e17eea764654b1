"""The sandbox of a completion's code: nothing hostile comes out of it, and tests meet the rest as if beside it."""

from __future__ import annotations

import json
import logging
import os
import secrets
import subprocess
from pathlib import Path
from typing import Any

import pytest

from meshlora.run.config.rl import UnitTestsReward
from meshlora_extra.rl.rewards import Rewards
from meshlora_extra.rl.sandbox import PACKAGES, PYTHON, as_nobody, bubblewrap
from meshlora_extra.rl.unit_tests import run_tests
from meshlora_ground.errors import MeshloraError, UserError
from tests.extra import hostile_code
from tests.extra.two_sides import CODE, TESTS

ROOT = Path(__file__).resolve().parents[2]
LIMITS = UnitTestsReward(cpu_s=5, wall_s=60.0, memory_mb=4096)


def _has_held(found: dict[str, Any]) -> None:
    assert found.pop("is alive")
    assert (found.pop("left"), found.pop("outside"), found.pop("came in")) == ([], [], [])
    assert {name: found.pop(name) for name in ("tries", "lives on")} == dict.fromkeys(("tries", "lives on"), "passed")
    assert [name for name, how in found.items() if how == "passed"] == []


@pytest.mark.sandbox
def test_nothing_hostile_comes_out_or_passes() -> None:
    """And each is a reward, not the end of the run."""
    found = hostile_code.run([*hostile_code.KILLERS])
    assert found.pop("cheats") == "passed"  # the tests' own word, which say what has passed
    assert found["stops itself"] == "took longer than 1 s"
    assert len(found) >= len(hostile_code.KILLERS) + 3
    _has_held(found)


@pytest.mark.sandbox
def test_a_user_without_rights_is_kept_from_it_alike() -> None:
    """Whose other processes have the same user as the code."""
    names = ["kills its parent", "stops its parent", "kills all", "ends at once"]
    before = as_nobody(bubblewrap(), [str(ROOT / "src"), str(ROOT / "tests")]) if os.geteuid() == 0 else []
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), *PACKAGES])
    given = {"PYTHONPATH": path, "HOME": "/tmp", "PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1"}
    words = [*before, PYTHON, "-m", "tests.extra.hostile_code", *names]
    done = subprocess.run(words, env=given, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["uid"] != 0
    _has_held(found)


@pytest.mark.sandbox
def test_tests_use_what_a_completion_defines_as_if_beside_it() -> None:
    """Data, functions, classes, errors, what is changed in place, printed and read."""
    assert run_tests([CODE], LIMITS, [TESTS]) == ["passed"]


@pytest.mark.sandbox
@pytest.mark.parametrize(
    ("tests", "says"),
    [
        ("assert Vector(3) * 2 == Vector(6)", "mul of an object of the other side and plain data"),
        ("class Own(Vector): pass", "a class of the tests cannot derive from one of the completion"),
    ],
    ids=["operator", "class"],
)
def test_what_two_interpreters_cannot_do_is_said(tests: str, says: str, caplog: pytest.LogCaptureFixture) -> None:
    code = "class Vector:\n def __init__(self, x): self.x = x\n def __mul__(self, n): return Vector(self.x * n)"
    with caplog.at_level(logging.WARNING):
        (how,) = run_tests([code], LIMITS, [tests])
    assert how == f"failed: UnlikeError: {says}"
    assert "what two interpreters cannot do: docs/rl.md" in caplog.text


def _found(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """`script` is the bwrap of this machine; none where it is empty."""
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr("meshlora_extra.rl.unit_tests._WAIT_S", 0)
    bubblewrap.cache_clear()
    if script:
        (folder / "bwrap").write_text(f"#!/bin/sh\n{script}\n")
        (folder / "bwrap").chmod(0o755)
        (folder / "setpriv").symlink_to("/bin/true")


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("", "there is no bwrap; install bubblewrap 0.8 or later"),
        ("echo bubblewrap 0.6.1", r"bubblewrap 0\.6\.1 is older than 0\.8"),
        (
            "[ $1 = --version ] && echo bubblewrap 0.9.0 && exit; echo bwrap: No permissions to create a namespace >&2",
            r"could not be run: bwrap: No permissions to create a namespace.*; install .* where user namespaces are",
        ),
    ],
    ids=["missing", "old", "refused"],
)
def test_a_machine_without_a_sandbox_is_refused_before_the_run(
    script: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _found(tmp_path, monkeypatch, script)
    try:
        with pytest.raises(UserError, match=rf"rl\.rewards\.0 \(tests\).*{says}"):
            Rewards([UnitTestsReward()])
        with pytest.raises(MeshloraError):
            run_tests(["pass"], LIMITS)
    finally:
        bubblewrap.cache_clear()


def test_without_a_sandbox_where_the_run_file_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends what it can, and who ends what runs it gets no reward."""
    _found(tmp_path, monkeypatch, "")
    token = f"alive-{secrets.token_hex(8)}"
    codes = ["def f(x): return 2 * x", "def f(x): return 1", f"token = {token!r}{hostile_code.LIVES_ON}"]
    codes += [hostile_code.KILLERS["kills its parent"], hostile_code.KILLERS["prints without end"]]
    try:
        limits = UnitTestsReward(cpu_s=2, memory_mb=256, wall_s=60.0, sandbox="none")
        found = run_tests(codes, limits, ["assert f(3) == 6"] * len(codes))
    finally:
        bubblewrap.cache_clear()
    assert [how == "passed" for how in found] == [True, False, True, False, False]
    assert hostile_code.processes(token) == []

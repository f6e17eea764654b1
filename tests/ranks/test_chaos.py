"""A run that is disturbed ends in the bytes of the run that is not, or in one clear line, and leaves nothing behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "chaos.py"
# A launch takes seconds of imports. The rest of what kills and full disks leave is in test_failures and test_full_disk.
REPRESENTATIVE = "save:SIGKILL launcher"


def _chaos(*arguments: str) -> list[str]:
    done = subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def test_disturbed_runs_end_in_the_same_bytes_or_one_clear_line() -> None:
    lines = _chaos("--rounds", "1", "--only", REPRESENTATIVE)
    assert lines[-1] == "1 of 1: same bytes or one clear line; no process, no file left"


@pytest.mark.proof
@pytest.mark.timeout(5400)
def test_every_fault_at_every_moment() -> None:
    lines = _chaos()
    assert "FAILED" not in "\n".join(lines)

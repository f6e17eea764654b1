"""A run that is disturbed ends in the bytes of the run that is not, or in one clear line, and leaves nothing behind."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.pool import Pool
from tests.ranks.test_trainer import run_and_keep_groups
from tests.scripts import load_script

SCRIPT = Path(__file__).parents[2] / "scripts" / "chaos.py"


@pytest.mark.proof  # by default what is killed in a save is in test_failures, and that it goes on in test_resume
def test_disturbed_runs_end_in_the_same_bytes_or_one_clear_line(tmp_path: Path, pools: Callable[[int], Pool]) -> None:
    """A launch takes seconds of imports, so it is one fault, and what nothing disturbs runs in a pool. The rest of what
    kills and full disks leave is in test_failures and test_full_disk.
    """
    chaos = load_script("chaos")
    undisturbed = chaos._prepared(tmp_path / "undisturbed")
    pools(2).run(run_and_keep_groups, undisturbed / "run.yaml", 2)
    expected = undisturbed / "output" / "adapter"
    said = chaos._round(chaos._prepared(tmp_path / "disturbed"), "save", "SIGKILL launcher", expected)
    assert said.startswith("ended (")
    assert said.endswith("; resumed: same bytes")


@pytest.mark.proof
@pytest.mark.timeout(5400)
def test_every_fault_at_every_moment() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "FAILED" not in done.stdout
    assert "same bytes or one clear line; no process, no file left" in done.stdout.splitlines()[-1]

"""Unit tests as a reward: a completion's code and the tests of its prompt, run in a process of their own.

Owns: which code of a completion is run, the files of a run, several runs at once. Does not own: limits and the end of
what was started (`rl.contained`).
"""

from __future__ import annotations

import concurrent.futures
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from meshlora.common.errors import MeshloraError
from meshlora.config.rl import UnitTestsReward

_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)
_CONTAINED = Path(__file__).with_name("contained.py")
_MORE_S = 30.0  # than the wall time, to start and to end all


def code_in(text: str) -> str:
    """The code of a completion: that of its first fenced block, or all of it."""
    found = _BLOCK.search(text)
    return found[1] if found else text


def run_tests(programs: Sequence[str], limits: UnitTestsReward) -> list[str]:
    """How each of `programs` ended: `passed`, or a reason. As many at once as this process may use processors.

        run_tests(["assert 1 + 1 == 2"], UnitTestsReward())     # ["passed"]

    Raises:
        MeshloraError: they cannot be run here.
    """
    with concurrent.futures.ThreadPoolExecutor(max(1, len(os.sched_getaffinity(0)))) as pool:
        return list(pool.map(lambda program: _run(program, limits), programs))


def _run(program: str, limits: UnitTestsReward) -> str:
    with tempfile.TemporaryDirectory(prefix="meshlora-tests-", ignore_cleanup_errors=True) as folder:
        (Path(folder) / "main.py").write_text(program, encoding="utf-8", errors="replace")
        given = [folder, str(limits.cpu_s), str(limits.wall_s), str(limits.memory_mb * 2**20)]
        try:
            done = subprocess.run(
                [sys.executable, "-P", "-I", str(_CONTAINED), *given],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                check=False,
                timeout=limits.wall_s + _MORE_S,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise MeshloraError(f"the tests of a completion could not be run ({error})") from None
    if done.returncode != 0 or not done.stdout:
        raise MeshloraError(f"the tests of a completion could not be run: {done.stderr[-400:]}")
    return done.stdout.strip()

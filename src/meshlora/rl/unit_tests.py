"""Unit tests as a reward: a completion's code and the tests of its prompt, run in a process of their own.

Owns: which code of a completion is run, the files of a run, whether its tests came to their end, several runs at once.
Does not own: limits and the end of what was started (`rl.contained`).
"""

from __future__ import annotations

import concurrent.futures
import os
import re
import secrets
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


# A program that ends itself is no success, unless it is the tests that do, as `unittest.main()` does at their end.
_MAIN = """
import sys
def run(code, tests, file):
    space = sys.modules["__main__"].__dict__
    exec(compile(code, "completion", "exec"), space)
    try:
        exec(compile(tests, "tests", "exec"), space)
    except SystemExit as end:
        trace, files = end.__traceback__, set()
        while trace is not None:
            files.add(trace.tb_frame.f_code.co_filename)
            trace = trace.tb_next
        if end.code or "completion" in files:
            raise SystemExit(end.code or 1) from None
    open(file, "w").close()
"""


def code_in(text: str) -> str:
    """The code of a completion: that of its first fenced block, or all of it."""
    found = _BLOCK.search(text)
    return found[1] if found else text


def run_tests(programs: Sequence[str], limits: UnitTestsReward, tests: Sequence[str] | None = None) -> list[str]:
    """How each of `programs` ended: `passed`, or a reason. As many at once as this process may use processors.

        run_tests(["def f(x): return 2 * x"], UnitTestsReward(), ["assert f(3) == 6"])     # ["passed"]

    tests: of each, run after it in the same namespace; a program that ends before they do has not passed.

    Raises:
        MeshloraError: they cannot be run here.
    """
    each = zip(programs, tests if tests is not None else [""] * len(programs), strict=True)
    with concurrent.futures.ThreadPoolExecutor(max(1, len(os.sched_getaffinity(0)))) as pool:
        return list(pool.map(lambda one: _run(one[0], one[1], limits), each))


def _run(program: str, tests: str, limits: UnitTestsReward) -> str:
    with tempfile.TemporaryDirectory(prefix="meshlora-tests-", ignore_cleanup_errors=True) as folder:
        end = Path(folder) / secrets.token_hex()  # which a program does not write by accident
        main = f"{_MAIN}\nrun({program!r}, {tests!r}, {str(end)!r})\n"
        (Path(folder) / "main.py").write_text(main, encoding="utf-8", errors="replace")
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
        has_ended = end.exists()
    if done.returncode != 0 or not done.stdout:
        raise MeshloraError(f"the tests of a completion could not be run: {done.stderr[-400:]}")
    how = done.stdout.strip()
    return how if how != "passed" or has_ended else "ended before its tests did"

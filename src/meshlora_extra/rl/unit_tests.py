"""Unit tests as a reward: a completion's code and the tests of its prompt, in two sandboxes that a socket connects.

Owns: which code of a completion is run, starting and ending both sides, how it went, several runs at once. Does not
own: the sandbox (`rl.sandbox`), what happens in it (`rl.apart`).
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import logging
import os
import re
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import IO

from meshlora.run.config.rl import UnitTestsReward
from meshlora_extra.rl.sandbox import MOST_PROCESSES, PACKAGES, PROGRAM, PYTHON, sandbox
from meshlora_ground.errors import MeshloraError

_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)
_END_S = 5.0  # for a process that is told to end
_DEAD_S = 0.5  # for one that has ended, to be seen
_TRIES, _WAIT_S = 3, 1.0  # for a sandbox, where the machine has no room for one
_LONGEST = 1000  # characters of a reason
GONE = "failed: the completion's process has ended"  # as `rl.apart` says it
_NOT_STARTED = ("bwrap: ", "setpriv: ", "not started")  # before any code of the completion

logger = logging.getLogger(__name__)


def code_in(text: str) -> str:
    """The code of a completion: that of its first fenced block, or all of it."""
    if found := _BLOCK.search(text):
        return found[1]
    return text


def run_tests(programs: Sequence[str], limits: UnitTestsReward, tests: Sequence[str] | None = None) -> list[str]:
    """How each of `programs` ended: `passed`, or a reason. As many at once as this process may use processors.

        run_tests(["def f(x): return 2 * x"], UnitTestsReward(), ["assert f(3) == 6"])     # ["passed"]

    tests: of each, run in an interpreter of their own, with the names of the program.

    Raises:
        UserError: there is no sandbox. MeshloraError: none could be started, whatever the program.
    """
    if tests is None:
        tests = [""] * len(programs)
    each = zip(programs, tests, strict=True)
    with concurrent.futures.ThreadPoolExecutor(max(1, len(os.sched_getaffinity(0)))) as pool:
        found = list(pool.map(lambda one: _run(one[0], one[1], limits), each))
    if any("UnlikeError" in how for how in found):
        logger.warning("tests asked of a completion what two interpreters cannot do: docs/rl.md says what that is")
    return found


def _run(program: str, tests: str, limits: UnitTestsReward) -> str:
    for attempt in range(_TRIES):
        time.sleep(_WAIT_S * attempt)  # at first not at all
        try:
            how = _run_once(program, tests, limits)
        except OSError as error:
            how = f"not started: {error}"
        if not how.startswith(_NOT_STARTED):
            return how
    raise MeshloraError(f"the tests of a completion could not be run: {how}")


def _run_once(program: str, tests: str, limits: UnitTestsReward) -> str:
    with contextlib.ExitStack() as stack:
        said = stack.enter_context(tempfile.TemporaryFile())
        before = sandbox(limits.sandbox, stack)
        code_end, tests_end = socket.socketpair()
        with code_end, tests_end:
            code = stack.enter_context(_started([*before, *_words("code", code_end, limits)], code_end))
            judge = stack.enter_context(_started([*before, *_words("tests", tests_end, limits)], tests_end, said))
        try:
            judge.communicate(json.dumps({"code": program, "tests": tests}).encode(), timeout=limits.wall_s)
        except subprocess.TimeoutExpired:
            return f"took longer than {limits.wall_s:g} s"
        said.seek(0)
        how = said.read(_LONGEST).decode(errors="replace")
        if how == GONE:
            with contextlib.suppress(subprocess.TimeoutExpired):
                how = _end_of(code.wait(_DEAD_S), limits) or how
        return how or _end_of(judge.returncode, limits) or f"ended with {judge.returncode}"


def _words(side: str, channel: socket.socket, limits: UnitTestsReward) -> list[str]:
    """The command of one side, as `rl.apart` reads it."""
    processes = 0 if limits.sandbox == "none" else MOST_PROCESSES  # without a sandbox the limit would be the user's own
    numbers = [channel.fileno(), limits.cpu_s, limits.memory_mb * 2**20, processes]
    return [PYTHON, "-I", "-S", str(PROGRAM), side, *map(str, numbers), *PACKAGES]


@contextlib.contextmanager
def _started(
    command: Sequence[str], channel: socket.socket, said: IO[bytes] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is no more at the end of the block, nor is what it started. said: where its words go."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL if said is None else subprocess.PIPE,
        stdout=said or subprocess.DEVNULL,
        stderr=said or subprocess.DEVNULL,
        pass_fds=[channel.fileno()],
    )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:  # stopped, where there is no sandbox
            process.kill()
            process.wait()
        if process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()


def _end_of(code: int, limits: UnitTestsReward) -> str:
    """The signal that a side ended by, in words; empty if it was none."""
    number = -code  # as Python says it
    if code > 128:
        number = code - 128  # as a shell, and bubblewrap, say it
    if number == signal.SIGXCPU:
        return f"used more than {limits.cpu_s} s of a processor"
    if number > 0:
        return f"was ended by signal {number}"
    return ""

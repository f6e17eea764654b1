"""Whether tests see a change of the product: pytest on a copy of the package that has it, in all processes."""

from __future__ import annotations

import ast
import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

import meshlora
from meshlora_ground.versions import OWN, file_of

SRC = Path(meshlora.__file__).parents[1]
# The ids of all that a session has collected, also of what it then leaves out, but for those that are marked `proof`.
COLLECTED = pytest.StashKey[frozenset[str]]()
ROOT = Path(__file__).resolve().parents[1]
_ABORT_S, _WRITES_S = 30.0, 0.3


@dataclass(frozen=True)
class Fault:
    """A change of the package, and what fails with it.

    Attributes:
        breaks: the invariant that does not hold any more.
        file: of the package. old, new: text that is in it exactly once, and what takes its place.
        test: id of the test that fails.
    """

    breaks: str
    file: str
    old: str
    new: str
    test: str

    def sources(self) -> dict[str, str]:
        """The file of the package, with its text, that has this fault; for `run_under`."""
        text = file_of(self.file).read_text("utf-8")
        assert text.count(self.old) == 1, f"{self.file} has {text.count(self.old)} times: {self.old}"
        return {self.file: text.replace(self.old, self.new)}


def is_there(test: str, config: pytest.Config | None = None) -> bool:
    """Whether there is a test of this id, as in `tests/unit/test_file.py::test_name[case]`.

    config: of pytest. With it the case must be there too, and be one of `make test`, if the session has collected its
    file; without, any case will do.
    """
    file, _, name = test.partition("::")
    if name.partition("[")[0] not in _functions_of(ROOT / file):
        return False
    if config is None or any("::" in word for word in config.args):
        return True
    own = [name for name in config.stash[COLLECTED] if name.startswith(f"{file}::")]
    return not own or any(name == test or name.startswith(f"{test}[") for name in own)


@functools.cache
def _functions_of(file: Path) -> frozenset[str]:
    found = ast.parse(file.read_text("utf-8")).body if file.is_file() else []
    return frozenset(node.name for node in found if isinstance(node, ast.FunctionDef))


def run_under(
    sources: Mapping[str, str], tests: Sequence[str], *, timeout_s: float | None = None
) -> subprocess.CompletedProcess[str]:
    """Run pytest on `tests` until one fails. sources: file of the package, as in `train/gradsync.py` -> its new text.

    Raises:
        AssertionError: it took longer than `timeout_s`. It says where each process stood.
    """
    with tempfile.TemporaryDirectory() as folder:
        for package in OWN:  # what is compiled too, which is known by size and time: half the seconds
            shutil.copytree(SRC / package, Path(folder) / package)
        for file, text in sources.items():
            (Path(folder) / file_of(file).relative_to(SRC)).write_text(text, encoding="utf-8")
        process = subprocess.Popen(
            # Ranks write where they stood to their file number 2, which would be hidden with `fd`.
            [sys.executable, "-m", "pytest", "-q", "-x", "--no-header", "--tb=line", "--capture=sys", *tests],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": folder, "PYTHONFAULTHANDLER": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            said, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            for number in sorted(_group_of(process.pid), reverse=True):  # ranks before those who wait for them
                with contextlib.suppress(ProcessLookupError):
                    os.kill(number, signal.SIGABRT)  # at which it writes its stacks
                time.sleep(_WRITES_S)  # one after the other: all write to one pipe
            said, _ = process.communicate(timeout=_ABORT_S)
            raise AssertionError(f"no end after {timeout_s} s\n{said}") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        return subprocess.CompletedProcess(process.args, process.returncode, said)


def _group_of(leader: int) -> list[int]:
    """The processes of a process group."""
    found = []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(ProcessLookupError, ValueError):  # it has ended, or it is no process
            if os.getpgid(int(folder.name)) == leader:
                found.append(int(folder.name))
    return found

"""A command of Python's, and the ranks that it starts, forked from processes that have imported the libraries.

`Forked` stands for `subprocess.Popen([sys.executable, *words])` where the start itself is not what is tested: five
seconds less for each process. As there, `sitecustomize.py` on PYTHONPATH comes first, `words` are `-m MODULE ...` or
`SCRIPT ...`, and ranks of `meshlora train --nproc` and of torchrun are processes with files, signals and a session of
their own. Not as there: the interpreter is not shut down, and modules are imported already.
"""

from __future__ import annotations

import atexit
import math
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from meshlora.verify import pool

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class Forked:
    """The process of a command, with what tests ask of a `Popen`.

    It runs in `folder`; what it says lies in two files of `said`, or else there.
    """

    def __init__(
        self, folder: Path, words: Sequence[str], environment: Mapping[str, str], said: Path | None = None
    ) -> None:
        self._said = [(said or folder) / "said-out", (said or folder) / "said-err"]
        context, _ = pool._context("cpu")
        arguments = (str(folder), list(words), dict(environment), [str(file) for file in self._said])
        self._process = context.Process(target=_command, args=arguments, daemon=True)
        self._process.start()
        self.pid: int = self._process.pid

    @property
    def returncode(self) -> int | None:
        code: int | None = self._process.exitcode
        return code

    def poll(self) -> int | None:
        return self.returncode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("a forked command", timeout or 0.0)
        out, err = (file.read_text() if file.exists() else "" for file in self._said)
        return out, err


def _command(folder: str, words: list[str], environment: dict[str, str], said: list[str]) -> None:
    """Body of the first process."""
    for number, file in enumerate(said, start=1):
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(folder)
    _become(words, environment)


def _become(words: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Go on as `python WORDS` does, to the end of this process."""
    atexit._clear()  # what others want done at the end of their process
    for number in _SIGNALS:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # as the environment says
    code = 1
    try:
        code = _code_of(lambda: _run(words))
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    finally:
        os._exit(code)


def _code_of(body: Callable[[], None]) -> int:
    """The exit code of an interpreter that runs `body`."""
    try:
        body()
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException as error:  # noqa: BLE001 - the interpreter's own way to end
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    return 0


def _run(words: Sequence[str]) -> None:
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    from meshlora.run import launch

    for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep):
        first = Path(entry) / "sitecustomize.py"
        if first.exists():
            names = {"__file__": str(first), "__name__": "sitecustomize"}
            exec(compile(first.read_text(), str(first), "exec"), names)
    names_of = types.SimpleNamespace(Popen=_Started, DEVNULL=subprocess.DEVNULL)
    vars(launch)["subprocess"] = names_of
    vars(subprocess_handler)["Popen"] = _Started
    if words[0] == "-m":
        sys.argv = [words[1], *words[2:]]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(words)
        runpy.run_path(words[0], run_name="__main__")


class _Started:
    """What launchers use of a `Popen` of Python: a fork of the launcher."""

    def __init__(self, args: Sequence[str], *, env: Mapping[str, str], **options: Any) -> None:
        assert args[0] == sys.executable
        assert options.keys() <= {"stdin", "stdout", "stderr", "pass_fds", "start_new_session"}
        assert options["start_new_session"]
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            os.setsid()
            for number, name in ((1, "stdout"), (2, "stderr")):
                if options.get(name) is not None:
                    os.dup2(options[name].fileno(), number)
            kept = {0, 1, 2, *options.get("pass_fds", ())}
            for descriptor in {int(name) for name in os.listdir("/proc/self/fd")} - kept:
                try:
                    os.close(descriptor)
                except OSError:  # that of the listing itself
                    continue
            _become([word for word in args[1:] if word not in ("-u", "-P")], env)

    def poll(self) -> int | None:
        if self.returncode is None:
            number, status = os.waitpid(self.pid, os.WNOHANG)
            if number:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int | None:
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("a forked rank", timeout or 0.0)
            time.sleep(0.01)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

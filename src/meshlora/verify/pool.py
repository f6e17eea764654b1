"""A pool of ranks on this machine: seconds to start the first, tenths for each further one, milliseconds a call.

`pool.run(function, *args)` calls a module-level function on every rank and returns the list of results. An error on a
rank is raised here with its traceback; a rank that does not answer ends the pool, and the next call restarts it. Does
not own: the launcher of training (`run.launch`): a pool is for many short runs in sequence.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from meshlora.processes.launchers import gpus_hidden
from meshlora.run.edge import LOST_PEER
from meshlora_ground.errors import MeshloraError
from meshlora_ground.lifetime import Janitor, end_with
from meshlora_ground.private import no_code_of_working_folder

# After one rank fails, how long the others may take to fail too before they are killed.
_GRACE_S = 5.0
# From the end of a rank's pipe to the exit of its process.
_EXIT_S = 2.0

# Scratch folders are in memory if they fit: a proof writes its files with fsync, as a run does, and on a busy disk a
# small one would wait for other writers.
_MEMORY = Path("/dev/shm")
# Larger runs go to disk: fsync does not dominate their time, and memory is scarce.
_MOST_BYTES = 2**30
# A run may take one part in so many of the free memory: others use it too.
_PART = 4
# How long dying processes may go on writing to a folder that is removed.
_REMOVE_S = 5.0

# Imported once, before ranks are forked, as it dominates start-up. Libraries only, to keep the reference free of our
# code, but for the few lines that silence libraries.
_LIBRARIES = ["meshlora.verify.forked", "torch.distributed", "transformers.models.auto.modeling_auto"]
_LIBRARIES += ["transformers.modeling_utils", "peft"]

# Numbers of the fork servers that pools have started.
_own: set[int] = set()

# A socket's path is limited to 107 bytes; multiprocessing appends "/listener-" and eight characters.
_LONGEST_FOLDER_OF_SOCKETS = 85

# In the text of exceptions that blame the machine, not the code.
_NO_ROOM = ("MemoryError", "can't allocate memory", "Cannot allocate memory", "No space left on device")

# (success, result or traceback, the exception if it is one of our own).
Answer = tuple[bool, Any, MeshloraError | None]


class RankError(MeshloraError, AssertionError):
    """A rank raised; the message is its traceback, `cause` the exception if it is one of our own."""

    is_report = True

    def __init__(self, message: str, cause: MeshloraError | None = None) -> None:
        super().__init__(message)
        self.cause = cause


class RankEndedError(MeshloraError):
    """A rank did not finish and none raised a cause: it was killed, hangs, or the machine ran out of memory or disk.

    This is no verdict on the code that ran: neither a difference nor a caught fault.
    """

    is_report = True


class Pool:
    """`size` processes that share one process group; of size 1, a plain process. `ranks_per_gpu` share each GPU."""

    def __init__(self, size: int, *, device: str = "cpu", ranks_per_gpu: int = 1) -> None:
        self.size, self.device, self.ranks_per_gpu = size, device, ranks_per_gpu
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        self._folders: list[Path] = []
        self._janitor: Janitor | None = None

    def start(self) -> None:
        """Start the ranks without waiting for them."""
        if self._pipes:
            return
        with contextlib.ExitStack() as stack:
            stack.enter_context(no_code_of_working_folder())
            stack.enter_context(_signals_held())
            if self.device == "cpu":
                stack.enter_context(gpus_hidden())
            context, folders_of_it = _context(self.device)
            self._folders = new_scratch()
            self._janitor = Janitor([*self._folders, *folders_of_it])
            for rank in range(self.size):
                ours, theirs = context.Pipe()
                store = str(self._folders[0] / "store")
                arguments = (rank, self.size, self.device, store, self.ranks_per_gpu, theirs)
                process = context.Process(target=_serve, args=arguments, daemon=True)
                process.start()
                theirs.close()  # else the end of a rank would not close the pipe
                self._pipes.append(ours)
                self._processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any, timeout_s: float = 300.0) -> list[Any]:
        """Results of `function(*args)` by rank. Raises: RankError: a rank raised. RankEndedError: a rank died or timed
        out, and none raised but for losing contact. Either way the ranks are killed."""
        self.start()
        try:
            return self._run(function, args, timeout_s)
        except BaseException:
            self.close()
            raise

    @contextlib.contextmanager
    def scratch(self, num_bytes: int) -> Iterator[Path]:
        """A folder for `num_bytes`, in memory if it fits; removed after the block, or with the ranks."""
        self.start()
        folder = Path(tempfile.mkdtemp(dir=with_room(self._folders, num_bytes)))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _run(self, function: Callable[..., Any], args: tuple[Any, ...], timeout_s: float) -> list[Any]:
        for pipe in self._pipes:
            with contextlib.suppress(OSError):  # the rank has died; its pipe is still read below
                pipe.send((function, args))
        answers: dict[int, Answer] = {}
        ended: dict[int, str] = {}
        deadline = time.monotonic() + timeout_s
        while len(answers) + len(ended) < self.size and time.monotonic() < deadline:
            waiting = {p: rank for rank, p in enumerate(self._pipes) if rank not in answers and rank not in ended}
            ready = wait(list(waiting), timeout=0.2)
            for pipe, rank in waiting.items():
                if pipe not in ready:
                    continue
                try:
                    answers[rank] = pipe.recv()
                except (EOFError, ConnectionResetError):
                    ended[rank] = self._how_it_ended(rank)
                if rank in ended or not answers[rank][0]:
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
        failed = {rank: answer for rank, answer in answers.items() if not answer[0]}
        if not failed and len(answers) == self.size:
            return [answers[rank][1] for rank in range(self.size)]
        waited_s = _GRACE_S if failed or ended else timeout_s
        silent = ""
        if ranks := sorted(set(range(self.size)) - answers.keys() - ended.keys()):
            silent = f"ranks without an answer in {waited_s:.0f} s: {ranks}"
        raise _first_error(failed, ended, silent=silent)

    def _how_it_ended(self, rank: int) -> str:
        process = self._processes[rank]
        process.join(_EXIT_S)
        code = process.exitcode
        if not code:
            return "the process ended by itself"
        if code > 0:
            return f"the process ended by itself with exit code {code}"
        how = f"the process was ended by signal {-code} ({signal.Signals(-code).name})"
        if code == -signal.SIGKILL:  # which the kernel sends
            how += "; the machine may be out of memory"
        return how

    def close(self) -> None:
        """Kill all ranks."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        remove(self._folders)
        if self._janitor is not None:
            self._janitor.dismiss()
        self._pipes, self._processes, self._folders, self._janitor = [], [], [], None


def _first_error(failed: dict[int, Answer], ended: dict[int, str], *, silent: str) -> RankError | RankEndedError:
    """The error of a call that did not succeed on every rank.

    Losing contact with another rank is no cause: such a rank counts as silent. If one raised, the report lists silent
    ranks, those that lost contact, and last, as in a traceback, the root cause.
    """
    raised, lost = dict[int, Answer](), dict[int, str]()
    for rank, answer in failed.items():
        if any(sign in answer[1] for sign in LOST_PEER):
            lost[rank] = answer[1]
        elif isinstance(answer[2], RankEndedError):  # no room
            return RankEndedError(f"rank {rank}: {answer[2]}")
        else:
            raised[rank] = answer
    if not raised:
        for rank, how in ended.items():
            return RankEndedError(f"rank {rank}: {how}")
        return RankEndedError(silent or "\n".join(f"rank {rank}:\n{text}" for rank, text in lost.items()))
    report = [silent]
    texts = {rank: text for rank, (_, text, _) in raised.items()}
    for found in (ended, dict(reversed(lost.items())), dict(reversed(texts.items()))):
        report += [f"rank {rank}:\n{text}" for rank, text in found.items()]
    return RankError("\n".join(report).strip(), next(iter(raised.values()))[2])


def _context(device: str) -> tuple[Any, list[Path]]:
    """(multiprocessing context, its folders that would outlive this process if it is killed).

    Ranks are forked from a server that has only imported the libraries, which saves five seconds each. With CUDA they
    are spawned: an import may query devices, after which a fork cannot use CUDA. For the same reason the server sees no
    GPU: a library in a rank would take one that was only counted in the server.
    """
    if device == "cpu" and sys.platform == "linux":
        folder = Path(util.get_temp_dir())  # of the fork server's socket
        if len(os.fsencode(folder)) <= _LONGEST_FOLDER_OF_SOCKETS:
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload(_LIBRARIES)
            if _server_is_ours():
                return context, [folder]
    return multiprocessing.get_context("spawn"), []


def _server_is_ours() -> bool:
    """Start the fork server if none runs; whether the one that runs is that of a pool.

    A process has one. If others have started it, as workers of a DataLoader may, it has not imported our libraries, so
    nothing is lost by spawning; and it may have counted GPUs.
    """
    server: Any = _server()
    before = server._forkserver_pid
    with gpus_hidden():
        forkserver.ensure_running()
    if server._forkserver_pid != before:
        _own.add(server._forkserver_pid)
    return server._forkserver_pid in _own


def _server() -> Any:
    """The fork server of this process; its number and `_stop`, which is meant for tests, are there for nobody else."""
    return vars(forkserver)["_forkserver"]


def stop_forking() -> None:
    """Kill the fork server of pools, which holds some 300 MB, if no rank is left. The next rank restarts it."""
    server: Any = _server()
    if server._forkserver_pid not in _own or multiprocessing.active_children():
        return
    os.kill(server._forkserver_pid, signal.SIGKILL)  # it has nothing to clean up
    server._stop()


@contextlib.contextmanager
def _signals_held() -> Iterator[None]:
    """Block signals between the start of a rank and its entry in the list of ranks to kill.

    Ranks inherit the mask: Ctrl-C reaches every process of a terminal, but only this one should act on it.
    """
    resource_tracker.ensure_running()  # else starting the first process does, and unblocks the signals
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _serve(rank: int, size: int, device: str, store: str, ranks_per_gpu: int, pipe: Connection) -> None:
    """Main loop of a rank: answer calls until the pipe closes or the parent dies."""
    end_with(os.getppid())
    # multiprocessing terminates unclosed processes with it
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    with contextlib.suppress(EOFError, ConnectionError):
        try:
            _become_rank(rank, size, store, device, ranks_per_gpu)
        except BaseException as error:  # noqa: BLE001 - returned as the answer to the first call
            pipe.send(_failure(error))
            return
        while True:
            function, args = pipe.recv()
            try:
                answer: Answer = (True, function(*args), None)
            except BaseException as error:  # noqa: BLE001 - returned to the caller as text
                answer = _failure(error)
            pipe.send(answer)


def _become_rank(rank: int, size: int, store: str, device: str, ranks_per_gpu: int) -> None:
    import torch
    from transformers.utils import logging

    from meshlora.comm.groups import become_rank

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    # PEFT calls what transformers deprecates.
    warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*")
    torch.set_num_threads(1)
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False  # float32 is meant
    become_rank(rank, size, device, store=store, ranks_per_gpu=ranks_per_gpu)


def _failure(error: BaseException) -> Answer:
    said = f"{type(error).__name__}: {error}"
    if any(sign in said for sign in _NO_ROOM):
        return False, traceback.format_exc(), RankEndedError(f"the machine has no room for it ({said})")
    return False, traceback.format_exc(), error if isinstance(error, MeshloraError) else None


def new_scratch() -> list[Path]:
    """New folders of this process: one in memory, if that is writable, then one on disk. Raises: OSError: it is not."""
    # Names the owner, for whoever cleans up after a crash of the machine.
    prefix = f"meshlora-{os.getpid()}-"
    folders: list[Path] = []
    with contextlib.suppress(OSError):
        folders.append(Path(tempfile.mkdtemp(prefix=prefix, dir=_MEMORY)))
    try:
        folders.append(Path(tempfile.mkdtemp(prefix=prefix)))
    except OSError:
        remove(folders)
        raise
    return folders


def with_room(folders: list[Path], num_bytes: int) -> Path:
    """The first of `folders` with room for `num_bytes`; by default the last, which is on disk."""
    for folder in folders[:-1]:
        if num_bytes <= min(_MOST_BYTES, shutil.disk_usage(folder).free // _PART):
            return folder
    return folders[-1]


def remove(folders: Iterable[Path]) -> None:
    """Remove `folders`, even while a dying process still writes to them."""
    deadline = time.monotonic() + _REMOVE_S
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
        while folder.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
            shutil.rmtree(folder, ignore_errors=True)

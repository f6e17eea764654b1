"""Processes of the systems that a benchmark compares: they wait on their pipes while another one is measured."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import transformers
from torch import Tensor


class System(Protocol):
    """One competitor, and on how many processes it runs."""

    @property
    def name(self) -> str: ...
    @property
    def num_ranks(self) -> int: ...


class Group:
    """The processes of one system. They live as long as the benchmark."""

    def __init__(self, system: System, folder: Path, num_threads: int) -> None:
        self.system: Any = system
        context = multiprocessing.get_context("spawn")
        store = str(folder / f"store-{system.name}".replace(" ", "-"))
        self.pipes, self.processes = [], []
        for rank in range(system.num_ranks):
            ours, theirs = context.Pipe()
            arguments = (rank, system.num_ranks, store, num_threads, theirs)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def call(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Results of `function(*args)` by rank.

        Raises:
            RuntimeError: a rank raised something.
        """
        for pipe in self.pipes:
            pipe.send((function, args))
        answers = [pipe.recv() for pipe in self.pipes]
        for ok, value in answers:
            if not ok:
                raise RuntimeError(f"{self.system.name}:\n{value}")
        return [value for _, value in answers]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


@contextlib.contextmanager
def open_groups(
    num_threads: Mapping[System, int], folder: Path, load: Callable[..., None], *args: Any
) -> Iterator[dict[str, Group]]:
    """All systems by name, each with its number of threads, after `load(system, *args)` on all of its ranks."""
    groups: dict[str, Group] = {}
    try:
        for system, number in num_threads.items():
            groups[system.name] = Group(system, folder, number)
            groups[system.name].call(load, system, *args)
        yield groups
    finally:
        for group in groups.values():
            group.close()


def batch_of(batch_size: int, seq_len: int, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Token ids and labels (shifted already, all trained), each `[B, S]`: the same in every process."""
    generator = torch.Generator().manual_seed(seq_len)
    ids, labels = torch.randint(0, vocab_size, (2, batch_size, seq_len), generator=generator)
    return ids, labels


def memory_bytes(field: str) -> int:
    """`VmRSS`, resident memory now, or `VmHWM`, the most it was."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {field} in /proc/self/status: this benchmark needs Linux")


def begin_high_water_mark() -> int:
    """What is resident now, once the allocator has given back what nobody uses; `VmHWM` begins anew."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return memory_bytes("VmRSS")


def be_quiet() -> None:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def _serve(rank: int, num_ranks: int, store: str, num_threads: int, pipe: Any) -> None:
    """Body of one process: answer calls until the pipe closes."""
    be_quiet()
    torch.set_num_threads(num_threads)
    if num_ranks > 1:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num_ranks))
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks)
    with contextlib.suppress(EOFError):
        while True:
            function, args = pipe.recv()
            try:
                answer = (True, function(*args))
            except Exception:  # noqa: BLE001 - whatever it was, it travels to the parent as text
                answer = (False, traceback.format_exc())
            pipe.send(answer)

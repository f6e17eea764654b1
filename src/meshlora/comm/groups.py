"""Process groups: the only file that opens them, and one of two that read the launcher's environment.

Owns: where ranks speak before any group is open (`meet`), joining the job (`join`), the mesh of a topology
(`open_mesh`), the group of ranks on one machine (`LocalGroup`), and `Axis`, the handle that collectives take.
Does not own: the collectives themselves (`comm.collectives`), starting processes (`train.launch`).
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import re
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Backend, Store
from torch.distributed.device_mesh import DeviceMesh

from meshlora.comm.links import Links
from meshlora.comm.who_is_missing import Arrivals, Board, telling_the_others
from meshlora.common import compat
from meshlora.common.errors import UserError
from meshlora.plan.topology import DATA, FEATURES, SEQUENCES, Topology, axis_sets

_GLOO_SETTLES_S = 0.2
# Names the file by which ranks meet that were started on one machine, in a folder of this user alone.
STORE = "MESHLORA_STORE"
BACKEND = "meshlora_local"  # as torch.distributed knows `LocalGroup`


class LocalGroup(compat.NamedGroup):
    """The process group of ranks on one machine: nothing of it can be reached by anybody else. Made by
    torch.distributed for the backend `BACKEND`.

    gloo would listen on a port, and any user of the machine may connect to a port, on loopback too. So these ranks have
    no gloo at all: they find each other through their store, a file in a folder of this user alone, and have sockets in
    another (`comm.links`). torch's own collectives are refused by torch on such a group: it has no backend for them.

    Attributes:
        store: of this group alone. timeout_s: how long a rank waits for the others.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self.store, self.timeout_s = store, timeout.total_seconds()
        self._rank, self._size, self._round = rank, size, 0

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank

    def name(self) -> str:
        return BACKEND

    def told_to_all(self, own: bytes) -> list[bytes]:
        """`own` of every rank, in their order. Every rank of the group calls it equally often.

        Raises:
            RuntimeError: a rank did not come in time.
        """
        self._round += 1
        self.store.set(f"{self._round}/{self._rank}", own.hex())
        keys = [f"{self._round}/{rank}" for rank in range(self._size)]
        try:
            self.store.wait(keys, timedelta(seconds=self.timeout_s))
        except RuntimeError as error:
            raise RuntimeError(f"Timed out waiting {self.timeout_s:g} s for ranks of the group to come") from error
        return [bytes.fromhex(self.store.get(key).decode()) for key in keys]


@dataclass(frozen=True)
class Axis:
    """The group of ranks along one or more mesh axes, as seen by this rank.

    Attributes:
        size: number of ranks. rank: this rank's place among them.
        ranks: their global ranks, in order. group: the process group, None where size is 1.
        arrivals: of this rank at the collectives of all its groups.
        links: sockets to the other ranks, or None where there are none; empty until they are first needed.
    """

    size: int
    rank: int
    ranks: tuple[int, ...]
    group: dist.ProcessGroup | None
    arrivals: Arrivals = field(default_factory=Arrivals, compare=False)
    links: list[Links | None] = field(default_factory=list, compare=False, repr=False)

    @functools.cached_property
    def is_direct(self) -> bool:
        """Whether what CPUs say to each other goes by direct messages (`comm.direct`)."""
        return self.group is not None and dist.get_backend(self.group) in ("gloo", BACKEND)

    def as_torch_mesh(self, device_type: str) -> DeviceMesh:
        """This group in torch's words, for what torch does with it; opens nothing. size is above 1."""
        assert self.group is not None
        return DeviceMesh.from_group(self.group, device_type)


class Mesh:
    """A topology with open process groups. Made by `open_mesh`; handed down, never looked up."""

    def __init__(self, topology: Topology, rank: int, device: torch.device, axes: dict[frozenset[str], Axis]) -> None:
        self.topology, self.rank, self.device = topology, rank, device
        self._axes = axes

    @property
    def tp(self) -> Axis:
        """The tensor-parallel group of this rank."""
        return self.over(FEATURES)

    @property
    def dp(self) -> Axis:
        """The data-parallel group of this rank: each of its ranks reads rows of its own."""
        return self.over(SEQUENCES)

    @property
    def data(self) -> Axis:
        """The ranks that each have tokens of their own: losses, counts and gradients are sums over them."""
        return self.over(DATA)

    @property
    def same_rows(self) -> Axis:
        """The ranks that are given the same rows as this one."""
        return self.over(frozenset(self.topology.sizes) - SEQUENCES)

    @property
    def token_cut(self) -> Axis:
        """The ranks over which the tokens of one batch are cut between regions; this rank alone where they are not."""
        return self.over(self.topology.token_cut)

    @property
    def world(self) -> Axis:
        """All ranks."""
        return self.over(set(self.topology.sizes))

    def over(self, axes: set[str] | frozenset[str]) -> Axis:
        """The group that spans `axes`: the ranks that agree with this one on every other axis; alone over none."""
        return self._axes[frozenset(axes)]

    def own_tokens(self, tokens: Tensor) -> Tensor:
        """Of tokens `[B, S]` of a forward, flat, those that modules between regions see on this rank: all, or its part.

        The one place that says which these are (`model.regions.TokenCut` cuts the residual stream so).
        """
        return tokens.flatten().tensor_split(self.token_cut.size)[self.token_cut.rank]

    @contextlib.contextmanager
    def patient_for(self, timeout_s: float) -> Iterator[None]:
        """Inside the block a collective waits `timeout_s` seconds for the other ranks, and then says who is missing.

        Before it the limit is that of `join`, for ranks may load and prove for long. On NCCL the limit holds too, and
        NCCL itself names the collective.
        """
        if self.topology.world == 1:
            yield
            return
        for axis in self._axes.values():
            if axis.group is not None and not isinstance(axis.group, LocalGroup):
                compat.set_timeout(axis.group, timeout_s)
        file = os.environ.get(STORE)
        store: Any = Board(Path(file).parent) if file else compat.job_store()
        arrivals, world = self.world.arrivals, self.topology.world
        with telling_the_others(arrivals, store, rank=self.rank, world=world, timeout_s=timeout_s):
            yield

    def __deepcopy__(self, memo: dict[int, object]) -> Mesh:
        return self  # process groups cannot be copied, and copies of a model share them


@dataclass(frozen=True)
class Place:
    """What the launcher says: who am I among how many, and which device is mine."""

    rank: int
    world: int
    local_rank: int


def launcher_place() -> Place | None:
    """This process' place according to torchrun's or SLURM's variables; None outside a launcher."""
    env = os.environ
    if "RANK" in env and "WORLD_SIZE" in env:
        return Place(int(env["RANK"]), int(env["WORLD_SIZE"]), int(env.get("LOCAL_RANK", "0")))
    # Of the step, not of the job: a batch script has SLURM_PROCID=0 and SLURM_NTASKS too, and is alone.
    if "SLURM_PROCID" in env and int(env.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        # With --gpus-per-task=1 each task sees its own GPU alone, as number 0.
        local_rank = 0 if torch.cuda.device_count() == 1 else int(env.get("SLURM_LOCALID", "0"))
        return Place(int(env["SLURM_PROCID"]), int(env["SLURM_STEP_NUM_TASKS"]), local_rank)
    return None


def num_processes() -> int:
    """Processes of this job, as far as they are known: of the open group, else of the launcher, else one."""
    if dist.is_initialized():
        return dist.get_world_size()
    place = launcher_place()
    return place.world if place else 1


def become_rank(rank: int, world: int, device_type: str, *, store: str) -> torch.device:
    """Make this process rank `rank` of a job of its parent's, on one machine; the ranks meet in the file `store`.

    Whatever launcher the parent was started by, this process is not a rank of that job.
    """
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_PROCID", STORE):
        os.environ.pop(name, None)
    if world > 1:
        os.environ.update(place_in_environment(rank, world, store=store))
    return join(device_type)


def place_in_environment(rank: int, world: int, *, store: str) -> dict[str, str]:
    """Variables that make a process rank `rank` of `world` on this machine, which meet in the file `store`."""
    return {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), STORE: store}


def meet(*, timeout_s: float = 600.0) -> dist.Store | None:
    """The store by which the ranks of this job speak before any group is open; None for a process that is alone.

    A file where meshlora started the ranks, on this machine. Else that of the launcher: under SLURM the first host of
    the step has it, unless MASTER_ADDR says else.
    """
    place = launcher_place()
    if place is None:
        return None
    _set_slurm_rendezvous()
    return _store(os.environ.get(STORE), place.rank, place.world, timeout_s)


@functools.cache
def _store(file: str | None, rank: int, world: int, timeout_s: float) -> dist.Store:
    """Made once in a process: a second one would take the port, or the file, of the first."""
    if file is not None:
        return dist.FileStore(file, world)
    store, _, _ = next(dist.rendezvous("env://", rank, world, timeout=timedelta(seconds=timeout_s)))
    return store


def join(device_type: str = "auto", *, timeout_s: float = 600.0) -> torch.device:
    """Join the job that the launcher started, or stay alone; returns this rank's device.

    NCCL on GPUs. On CPUs a group of this machine's own (`LocalGroup`) where meshlora started the ranks, else
    gloo.

    Raises:
        UserError: what `on_gpus` refuses.
    """
    place = launcher_place()
    if dist.is_initialized() and place is None:  # the script opened the group, and chose its device
        on_gpu = on_gpus(device_type, num_ranks=1)
        return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    on_gpu = on_gpus(device_type, num_ranks=place.local_rank + 1 if place else 1)
    device = torch.device("cuda", place.local_rank if place else 0) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
        # Autograd has threads of its own, and cuBLAS warns of one in which a product is the first thing that happens.
        torch.zeros((), device=device, requires_grad=True).mul(2).backward()
    if place is None or dist.is_initialized():
        return device
    store = meet(timeout_s=timeout_s)
    assert store is not None
    is_local = STORE in os.environ and not on_gpu
    if is_local:
        if BACKEND not in Backend.backend_list:
            Backend.register_backend(BACKEND, LocalGroup, devices=["cpu"])
    elif not on_gpu:
        # Also for a script that never calls `leave`.
        atexit.register(leave)
    dist.init_process_group(
        "nccl" if on_gpu else BACKEND if is_local else "gloo",
        store=dist.PrefixStore("group", store),
        rank=place.rank,
        world_size=place.world,
        timeout=timedelta(seconds=timeout_s),
        device_id=device if on_gpu else None,
    )
    return device


def on_gpus(device_type: str, *, num_ranks: int) -> bool:
    """Whether the `num_ranks` ranks of this machine compute on its GPUs.

    Raises:
        UserError: `device_type` is cuda and there is none, or there are fewer GPUs than ranks.
    """
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device_type == "cpu" or (device_type == "auto" and not num_gpus):
        return False
    if not num_gpus:
        raise UserError("device: cuda", "this machine has no CUDA device that torch can use", "use device: cpu")
    if num_gpus < num_ranks:
        raise UserError(
            f"{num_ranks} processes on this machine",
            f"each needs a GPU of its own, and there are {num_gpus}",
            "start fewer, or use device: cpu",
        )
    return True


def leave() -> None:
    """Close all process groups, where any are open. Runs by itself at the end of a process that used `join` on CPUs."""
    if not dist.is_initialized():
        return
    is_gloo = dist.get_backend() == "gloo"
    dist.destroy_process_group()
    if not is_gloo:
        return
    # A thread of gloo drops the tensors of a collective a moment after the collective has returned, and needs the GIL
    # for it. In an interpreter that is shutting down this ends the process with SIGABRT (seen in 3 of 8 runs, torch
    # 2.13), so the GIL is given away once while there still is one.
    time.sleep(_GLOO_SETTLES_S)


@contextlib.contextmanager
def simulated_job(world: int) -> Iterator[None]:
    """Inside, this process is rank 0 of a job of `world` ranks that do not exist: torch's fake backend, no messages.

    Raises:
        UserError: the process has a job already.
    """
    if dist.is_initialized():
        raise UserError("a simulated job", "this process is a rank of a job already", "start it by itself")
    dist.init_process_group("fake", rank=0, world_size=world, store=compat.fake_store())
    try:
        yield
    finally:
        dist.destroy_process_group()


def open_mesh(
    topology: Topology,
    *,
    device: torch.device | None = None,
    copies: Collection[int] = (),
    has_experts: bool = False,
) -> Mesh:
    """Open the groups of `topology`. Every rank of the job must call this, with the same arguments.

    copies: numbers of neighbouring tp ranks that hold the same key/value heads, which get groups too.
    has_experts: whether the axes of experts get groups.

    Raises:
        UserError: the job does not have `topology.world` ranks.
    """
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    if world != topology.world:
        raise UserError(
            f"topology {topology} needs {topology.world} processes",
            f"this job has {world}",
            f"start it with `torchrun --nproc-per-node {topology.world}` or `meshlora train --nproc {topology.world}`",
        )
    opened: dict[tuple[tuple[int, ...], ...], Axis] = {}  # two sets of axes may span the same ranks
    arrivals, axes = Arrivals(), {}
    for names in axis_sets(copies, has_experts=has_experts):
        groups = topology.groups_over(names)
        key = tuple(map(tuple, groups))
        if key not in opened:
            opened[key] = _open_axis(groups, rank, world, arrivals)
        axes[names] = opened[key]
    return Mesh(topology, rank, device or torch.device("cpu"), axes)


def _open_axis(groups: list[list[int]], rank: int, world: int, arrivals: Arrivals) -> Axis:
    ranks = next(group for group in groups if rank in group)
    group: dist.ProcessGroup | None = None
    if len(ranks) == world > 1:
        group = dist.group.WORLD
    elif len(ranks) > 1:
        group, _ = dist.new_subgroups_by_enumeration(groups)
    return Axis(len(ranks), ranks.index(rank), tuple(ranks), group, arrivals)


def _set_slurm_rendezvous() -> None:
    """Give torch the variables that `srun` does not set itself."""
    env = os.environ
    if "MASTER_ADDR" in env or "SLURM_PROCID" not in env:
        return
    hosts = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or "127.0.0.1"
    env["MASTER_ADDR"] = first_host(hosts)
    env.setdefault("MASTER_PORT", str(20000 + int(env.get("SLURM_JOB_ID", "0")) % 20000))


def first_host(hosts: str) -> str:
    """The first host of a SLURM list: `node[03-07,12],other` -> `node03`."""
    match = re.match(r"([^,\[]+)(?:\[([^\],-]+))?", hosts)
    return (match[1] + (match[2] or "")) if match else hosts

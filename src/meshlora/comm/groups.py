"""Process groups: the only file that opens them.

Owns: the ranks' store before any group is open (`meet`), joining the job (`join`), the mesh of a topology
(`open_mesh`), the group of ranks on one machine (`LocalGroup`), and `Axis`, the handle that collectives take.
Does not own: the collectives themselves (`comm.collectives`), what a launcher says (`processes.launchers`), starting
processes (`run.launch`).
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Backend, Store
from torch.distributed.device_mesh import DeviceMesh

from meshlora.processes import launchers
from meshlora.processes.arrivals import Arrivals
from meshlora.processes.links import Links, Outbox
from meshlora_ground.compat import torch_distributed
from meshlora_ground.errors import UserError
from meshlora_ground.topology import DATA, FEATURES, LAYERS, SEQUENCES, TOKENS, Topology, axis_sets

_GLOO_SETTLES_S = 0.2
# Bytes of a rank on CPUs, before its model: more ranks than the memory holds take the machine down before they fail.
_LEAST_OF_RANK = 10**8
# There where an NVIDIA driver is loaded.
_DRIVER = [Path("/proc/driver/nvidia/version"), Path("/dev/nvidiactl")]
# How long the first rank waits for the last one to be started.
_MEETING_S = 600.0
# How long ranks wait for each other while they load: a cold file system takes its time, and is no hang. A rank that
# fails tells the others (`processes.heartbeat`).
LOADING_S = 7200.0
BACKEND = "meshlora_local"  # torch.distributed's name for `LocalGroup`


class SharedByCopies:
    """What is of a model and of its layers: copies of these share it."""

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        return self


class LocalGroup(torch_distributed.NamedGroup):
    """A process group on one machine, out of reach of other users. Made by torch.distributed for backend `BACKEND`.

    gloo would listen on a port, and any user of the machine can connect to a port, even on loopback. So these ranks use
    no gloo at all: they find each other through their store, a file in a folder private to this user, and have sockets
    in another (`processes.links`). torch refuses its own collectives on such a group: it has no backend for them.

    Attributes:
        store: private to this group. timeout_s: how long a rank waits for the others.
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
        """All-gather `own`, in rank order. Every rank of the group must call it equally often.

        Raises:
            RuntimeError: a rank did not arrive in time.
        """
        self._round += 1  # keys of earlier rounds stay in the store
        self.store.set(f"{self._round}/{self._rank}", own.hex())
        keys = [f"{self._round}/{rank}" for rank in range(self._size)]  # of this round
        try:
            self.store.wait(keys, timedelta(seconds=self.timeout_s))
        except RuntimeError as error:
            raise RuntimeError(f"Timed out waiting {self.timeout_s:g} s for ranks of the group to come") from error
        return [bytes.fromhex(self.store.get(key).decode()) for key in keys]


@dataclass(frozen=True)
class Axis:
    """The group of ranks along one or more mesh axes, as seen by this rank.

    Attributes:
        size: number of ranks. rank: this rank's index among them.
        ranks: their global ranks, in order. group: the process group, None if size is 1.
        arrivals: this rank's arrivals at the collectives of all its groups.
        links: the sockets to the other ranks, or None if there are none; empty until first needed.
        outbox: messages that leave while this rank computes. leaving: those of torch, kept until they have left.
    """

    size: int
    rank: int
    ranks: tuple[int, ...]
    group: dist.ProcessGroup | None
    arrivals: Arrivals = field(default_factory=Arrivals, compare=False)
    links: list[Links | None] = field(default_factory=list, compare=False, repr=False)
    outbox: Outbox = field(default_factory=Outbox, compare=False, repr=False)
    leaving: list[Any] = field(default_factory=list, compare=False, repr=False)

    @functools.cached_property
    def is_direct(self) -> bool:
        """Whether CPU tensors are sent by direct messages (`comm.direct`)."""
        return self.group is not None and dist.get_backend(self.group) in ("gloo", BACKEND)

    def as_torch_mesh(self, device_type: str) -> DeviceMesh:
        """This group as torch's DeviceMesh; opens no new group. Requires size > 1."""
        assert self.group is not None
        return DeviceMesh.from_group(self.group, device_type)


@dataclass(frozen=True)
class Channels:
    """Groups of two ranks: this one and that at its place in the stage before or after. Each is used in one direction,
    so that no message waits behind one the other way. None where there is no such stage.
    """

    from_before: Axis | None = None
    to_before: Axis | None = None
    from_next: Axis | None = None
    to_next: Axis | None = None
    in_order: tuple[Axis, ...] = ()  # in which all ranks open them


class Mesh(SharedByCopies):
    """A topology with open process groups. Made by `open_mesh`; passed down, never looked up."""

    def __init__(
        self,
        topology: Topology,
        rank: int,
        device: torch.device,
        axes: dict[frozenset[str], Axis],
        channels: Channels | None = None,
    ) -> None:
        self.topology, self.rank, self.device = topology, rank, device
        self._axes, self.channels = axes, channels or Channels()

    @property
    def tp(self) -> Axis:
        """The tensor-parallel group of this rank."""
        return self.over(FEATURES)

    @property
    def dp(self) -> Axis:
        """The data-parallel group of this rank: each of its ranks reads different rows."""
        return self.over(SEQUENCES)

    @property
    def cp(self) -> Axis:
        """The context-parallel group of this rank: each of its ranks has its own tokens of the same sequences."""
        return self.over(TOKENS)

    @property
    def data(self) -> Axis:
        """The ranks with distinct tokens: losses, counts and gradients are summed over them."""
        return self.over(DATA)

    @property
    def same_rows(self) -> Axis:
        """The ranks of this stage that receive the same rows as this one."""
        return self.over(frozenset(self.topology.sizes) - SEQUENCES - LAYERS)

    @property
    def pp(self) -> Axis:
        """The pipeline-parallel group of this rank: each of its ranks has its own decoder layers."""
        return self.over(LAYERS)

    @property
    def stage(self) -> Axis:
        """All ranks of this stage."""
        return self.over(frozenset(self.topology.sizes) - LAYERS)

    @property
    def losses(self) -> Axis:
        """The ranks over which losses are summed: those with distinct tokens, of all stages, of which one has them."""
        return self.over(DATA | LAYERS)

    @property
    def token_cut(self) -> Axis:
        """The ranks over which a batch's tokens are split between regions; this rank alone if they are not."""
        return self.over(self.topology.token_cut)

    @property
    def world(self) -> Axis:
        """All ranks."""
        return self.over(set(self.topology.sizes))

    @property
    def is_counted(self) -> bool:
        """Whether this rank's tokens count in sums over `losses`: all stages see them, the last has their loss."""
        return self.pp.rank == self.pp.size - 1

    def over(self, axes: set[str] | frozenset[str]) -> Axis:
        """The group spanning `axes`: the ranks that agree with this one on all other axes; this rank alone for none."""
        return self._axes[frozenset(axes)]

    def own_tokens(self, tokens: Tensor) -> Tensor:
        """The flat tokens, of those `[B, S/cp]` of this cp rank, that modules between regions see: all, or its slice.

        The only definition of that slice; `model.regions.TokenCut` splits the residual stream the same way.
        """
        axis = self.over(self.topology.token_cut - TOKENS)
        return tokens.flatten().tensor_split(axis.size)[axis.rank]

    def wait_at_most(self, timeout_s: float) -> None:
        """From now on a collective that waits longer for the other ranks raises an error."""
        for axis in (*self._axes.values(), *self.channels.in_order):
            if isinstance(axis.group, LocalGroup):
                axis.group.timeout_s = timeout_s
            elif axis.group is not None:  # None of a rank alone
                torch_distributed.set_timeout(axis.group, timeout_s)


def num_processes() -> int:
    """Number of processes of this job, from the open group, else the launcher, else one."""
    if dist.is_initialized():
        return dist.get_world_size()
    place = launchers.launcher_place()
    return place.world if place else 1


def become_rank(rank: int, world: int, device_type: str, *, store: str, ranks_per_gpu: int = 1) -> torch.device:
    """Make this process rank `rank` of its parent's local job; the ranks rendezvous through the file `store`.

    Whatever launcher started the parent, this process is not a rank of that job.
    """
    launchers.enter_place(rank, world, store=store, ranks_per_gpu=ranks_per_gpu)
    return join(device_type)


def meet() -> dist.Store | None:
    """The store shared by the ranks of this job before any group is open; None for a single process.

    A file if meshlora started the ranks, on this machine. Else the launcher's store, on the host of rank 0.

    Raises:
        UserError: see `launchers.set_rendezvous`.
    """
    place = launchers.launcher_place()
    if place is None:
        return None
    file = launchers.local_store()
    if file is None:
        launchers.set_rendezvous()
    return _store(file, place.rank, place.world)


@functools.cache
def _store(file: str | None, rank: int, world: int) -> dist.Store:
    """Made once per process: a second store would claim the port, or the file, of the first."""
    if file is not None:
        return dist.FileStore(file, world)
    try:
        store, _, _ = next(dist.rendezvous("env://", rank, world, timeout=timedelta(seconds=_MEETING_S)))
    except dist.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        given = f"MASTER_PORT={launchers.master_port()}"
        raise UserError(given, "another process of this host listens there", "set it to a free one") from None
    if launchers.is_by_torchrun():
        return launchers.part_of_attempt(store, rank, world, timeout_s=_MEETING_S)
    return store


def join(device_type: str = "auto", *, timeout_s: float = LOADING_S) -> torch.device:
    """Join the launcher's job, or run alone; returns this rank's device, of which it takes its share if others have it.

    NCCL on GPUs. On CPUs a `LocalGroup` if meshlora started the ranks, else gloo. timeout_s: of its collectives, until
    `comm.patience`.

    Raises:
        UserError: see `on_gpus`.
    """
    place = launchers.launcher_place()
    if dist.is_initialized() and place is None:  # the script opened the group, and chose its device
        if on_gpus(device_type, num_ranks=1):
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")
    own = place or launchers.Place(rank=0, world=1, local_rank=0)
    # As many as this rank knows of.
    on_gpu = on_gpus(device_type, num_ranks=own.local_rank + 1, ranks_per_gpu=own.ranks_per_gpu)
    device = _take_gpu(own) if on_gpu else torch.device("cpu")
    if place is None or dist.is_initialized():
        return device
    store = meet()
    assert store is not None
    if on_gpu:
        backend = "nccl"
    elif launchers.local_store() is not None:
        backend = BACKEND
        if BACKEND not in Backend.backend_list:
            Backend.register_backend(BACKEND, LocalGroup, devices=["cpu"])
    else:
        backend = "gloo"
        atexit.register(leave)  # also for a script that never calls `leave`
    dist.init_process_group(
        backend,
        store=dist.PrefixStore("group", store),
        rank=place.rank,
        world_size=place.world,
        timeout=timedelta(seconds=timeout_s),
        device_id=device if on_gpu else None,  # NCCL connects at once, and can be split
    )
    return device


def _take_gpu(place: launchers.Place) -> torch.device:
    """The GPU of a rank, made this process' own: the default of all that names no device."""
    device = torch.device("cuda", place.gpu)
    torch.cuda.set_device(device)
    if place.ranks_per_gpu > 1:
        torch.cuda.set_per_process_memory_fraction(1 / place.ranks_per_gpu, device)
    # Autograd runs in its own threads, and cuBLAS warns if a matmul is the first CUDA work of a thread.
    torch.zeros((), device=device, requires_grad=True).mul(2).backward()
    return device


def on_gpus(device_type: str, *, num_ranks: int, ranks_per_gpu: int = 1) -> bool:
    """Whether the `num_ranks` ranks of this machine compute on its GPUs, `ranks_per_gpu` on each.

    Raises:
        UserError: `device_type` is cuda and there is none, or there are too few GPUs, or too little memory, for the
            ranks; or it is auto, and this machine has a GPU that torch cannot use; or ranks on CPUs, or a single one,
            are to share GPUs.
    """
    if ranks_per_gpu < 1:
        raise UserError(f"--ranks-per-gpu {ranks_per_gpu}", "at least 1 rank computes on each GPU", "leave it out")
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device_type == "auto" and not num_gpus and not launchers.hides_gpus() and any(f.exists() for f in _DRIVER):
        way_out = "does the build of torch fit the driver, and was the process given a GPU? Or give device: cpu"
        raise UserError("device: auto", f"torch {torch.__version__} cannot use the NVIDIA GPU of this machine", way_out)
    if device_type == "cpu" or (device_type == "auto" and not num_gpus):
        if ranks_per_gpu > 1:
            rule = "it needs CUDA: these ranks would compute on CPUs, which they share anyway"
            raise UserError(f"--ranks-per-gpu {ranks_per_gpu}", rule, "leave it out")
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if num_ranks > (most := max(1, memory // _LEAST_OF_RANK)):
            rule = f"on CPUs each takes at least {_LEAST_OF_RANK / 1e9:.1f} GB, and there are {memory / 1e9:,.1f}"
            raise UserError(f"{num_ranks:,} processes on this machine", rule, f"start at most {most:,}")
        return False
    if not num_gpus:
        raise UserError("device: cuda", "this machine has no CUDA device that torch can use", "use device: cpu")
    if num_gpus * ranks_per_gpu < num_ranks:
        rule = f"each needs a GPU of its own, and there are {num_gpus}"
        if ranks_per_gpu > 1:
            rule = f"--ranks-per-gpu {ranks_per_gpu} has room for {ranks_per_gpu * num_gpus}"
        needed = -(-num_ranks // num_gpus)  # rounded up
        raise UserError(
            f"{num_ranks} processes on this machine",
            rule,
            "start fewer, use device: cpu, or let ranks share a GPU, to try and to prove (train --nproc, verify, "
            f"check --prove): --ranks-per-gpu {needed}",
        )
    return True


def sharing_note(ranks_per_gpu: int) -> str:
    """The words on ranks that share GPUs, with which a run or a proof begins."""
    return f"{ranks_per_gpu} ranks share each GPU: for trying and proving; not for speed"


def leave() -> None:
    """Close all open process groups. Runs at exit of a process that joined over gloo."""
    if not dist.is_initialized():
        return
    is_gloo = dist.get_backend() == "gloo"
    dist.destroy_process_group()
    if not is_gloo:
        return
    # A gloo thread releases a collective's tensors a moment after the collective returns, and needs the GIL for it. In
    # an interpreter that is shutting down this ends the process with SIGABRT (seen in 3 of 8 runs, torch 2.13), so the
    # GIL is released once while it still exists.
    time.sleep(_GLOO_SETTLES_S)


@contextlib.contextmanager
def simulated_job(world: int, rank: int = 0) -> Iterator[None]:
    """Inside, this process is `rank` of a fake job of `world` ranks: torch's fake backend, no messages.

    Raises:
        UserError: the process is part of a job already.
    """
    if dist.is_initialized():
        raise UserError("a simulated job", "this process is a rank of a job already", "start it by itself")
    dist.init_process_group("fake", rank=rank, world_size=world, store=torch_distributed.fake_store())
    try:
        yield
    finally:
        dist.destroy_process_group()


def open_mesh(
    topology: Topology, *, device: torch.device | None = None, copies: Collection[int] = (), has_experts: bool = False
) -> Mesh:
    """Open the groups of `topology`. Every rank of the job must call this, with the same arguments.

    copies: numbers of neighbouring tp ranks that hold the same key/value heads; these get groups too.
    has_experts: whether expert axes get groups.

    Raises:
        UserError: the job does not have `topology.world` ranks.
    """
    rank, world = 0, 1
    if dist.is_initialized():
        rank, world = dist.get_rank(), dist.get_world_size()
    if world != topology.world:
        way_out = (
            f"start it with `torchrun --nproc-per-node {topology.world}` or `meshlora train --nproc {topology.world}`"
        )
        raise UserError(f"topology {topology} needs {topology.world} processes", f"this job has {world}", way_out)
    opened: dict[tuple[tuple[int, ...], ...], Axis] = {}  # two sets of axes may span the same ranks
    # One count for all groups: an answer of this rank has all that it has entered.
    arrivals, axes = Arrivals(), {}
    for names in axis_sets(copies, has_experts=has_experts):
        groups = topology.groups_over(names)
        key = tuple(map(tuple, groups))
        if key not in opened:
            opened[key] = _open_axis(groups, rank, world, arrivals)
        axes[names] = opened[key]
    return Mesh(topology, rank, device or torch.device("cpu"), axes, _open_channels(topology, rank, arrivals))


def _open_channels(topology: Topology, rank: int, arrivals: Arrivals) -> Channels:
    """The groups between neighbouring stages, opened in one order on every rank."""
    stride, num_borders = topology.per_stage, topology.size_over(LAYERS)
    if topology.interleave == 1:  # else the last rank's stages are followed by the first rank's
        num_borders -= 1
    found: dict[str, Axis] = {}
    for border in range(num_borders):
        pairs: list[list[int]] = []
        own, is_before = None, False
        for before in range(border * stride, (border + 1) * stride):
            pair = sorted((before, (before + stride) % topology.world))
            pairs.append(pair)
            if rank in pair:
                own, is_before = pair, rank == before
        arrivals.partitions.append(list(map(tuple, pairs)))
        for here, there in (("to_next", "from_before"), ("from_next", "to_before")):
            group = _opened(pairs)  # by all ranks, also those that are in none of the pairs
            if own is not None:
                found[here if is_before else there] = Axis(2, own.index(rank), tuple(own), group, arrivals)
    return Channels(**found, in_order=tuple(found.values()))


def _opened(groups: list[list[int]]) -> dist.ProcessGroup | None:
    """This rank's group of `groups`, which have no common rank; None if it is in none. Collective over all ranks."""
    if torch_distributed.can_split_groups():
        # On NCCL each group opened by itself would be a split of the world in which all ranks take part: at dp=512,tp=8
        # hundreds. This is one for all groups, connected at once.
        return dist.split_group(split_ranks=groups, timeout=timedelta(seconds=LOADING_S))
    if dist.get_backend() == "fake":  # no other rank is there to open its own, of thousands
        groups = [group for group in groups if dist.get_rank() in group]
    group: dist.ProcessGroup | None = None
    if groups:
        group, _ = dist.new_subgroups_by_enumeration(groups)
    return group


def _open_axis(groups: list[list[int]], rank: int, world: int, arrivals: Arrivals) -> Axis:
    ranks = next(group for group in groups if rank in group)
    arrivals.partitions.append(list(map(tuple, groups)))
    group: dist.ProcessGroup | None = None
    if len(ranks) == world > 1:
        group = dist.group.WORLD  # open already: a second one would take memory of its own on a GPU
    elif len(ranks) > 1:
        group = _opened(groups)
    return Axis(len(ranks), ranks.index(rank), tuple(ranks), group, arrivals)

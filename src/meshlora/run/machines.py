"""The machines of a job: what each rank computes on, compared before any group is open.

Owns: a rank's device and free memory, their exchange through the job's store, the refusals, the words on them that
begin a run, and which rank looks after the others of its machine. Does not own: versions and files, which are compared
before (`run.agreement`), the watch itself (`processes.heartbeat`).
"""

from __future__ import annotations

import json
import os
import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any

import torch

from meshlora.comm.groups import meet, on_gpus, sharing_note
from meshlora.processes.heartbeat import Post, Watch, this_machine
from meshlora.processes.launchers import Place, launcher_place
from meshlora.run.agreement import VERSION
from meshlora.wings.kernels.liger import liger_version
from meshlora_ground.errors import UserError
from meshlora_ground.versions import digest, own_sources, versions

_PATIENCE_S = 600.0
_VERDICT, _SEAT, _POST = "machines/verdict", "machines/{}", "machines/post/{}"
# A rank with less than this share of what another has free is named.
_LITTLE = 0.8
_NAMED = 4


@dataclass(frozen=True)
class Seat:
    """What one rank computes on.

    Attributes:
        machine: names the machine, as host does, but so that no two machines have the same. pid: of the process.
        device: `cuda` or `cpu`. name: of the GPU. unit: names the GPU among all there are.
        free_bytes: its share of the memory of the device that nobody uses. ranks_per_gpu: so many share each GPU.
        mistake: the parts of a user error instead of a device.
    """

    rank: int
    host: str
    machine: str
    pid: int
    device: str
    name: str = ""
    unit: str = ""
    free_bytes: int = 0
    ranks_per_gpu: int = 1
    mistake: tuple[str, ...] = ()

    @property
    def where(self) -> str:
        """For messages: `rank 3 (node2)`."""
        return f"rank {self.rank} ({self.host})"

    @property
    def on(self) -> str:
        """Its device, for messages."""
        return f"a GPU ({self.name})" if self.device == "cuda" else "the CPU"


@dataclass(frozen=True)
class Machines:
    """The machines of a job, as one rank knows them.

    Attributes:
        line: the first line of a run, on rank 0.
        post: what this rank looks after.
    """

    line: str
    post: Post


def machines(device_type: str, watch: Watch | None = None) -> str:
    """The first line of a run on the machines of this job, which fit together; empty on other ranks than the first.

    Every rank calls this before any group opens. device_type: as in the run file. watch: from then on has its post.

    Raises:
        UserError: a rank's device, or that of two; the same on all ranks.
    """
    place = launcher_place() or Place(0, 1, 0)
    found = compared(place, seat_of(place, device_type))
    if watch is not None:
        watch.looks_after(found.post)
    return found.line


def compared(place: Place, seat: Seat) -> Machines:
    """The machines of the job, of which this process' part is `seat`. Errors as of `machines`."""
    store = meet() if place.world > 1 else None
    if store is None:
        _raise(mistake_of([seat]))
        return Machines(line_of([seat]), Post(is_first=True))
    store.set(_SEAT.format(place.rank), json.dumps(asdict(seat)))  # no group is open yet, the store alone
    if place.rank == 0:
        seats = [_read(store, rank) for rank in range(place.world)]
        parts, posts = mistake_of(seats), posts_of(seats)
        for rank, post in posts.items():
            store.set(_POST.format(rank), json.dumps(asdict(post)))
        store.set(_VERDICT, json.dumps(parts))
        _raise(parts)
        return Machines(line_of(seats), posts.get(0, Post()))
    store.wait([_VERDICT], timedelta(seconds=_PATIENCE_S))
    _raise(json.loads(store.get(_VERDICT)))
    if not store.check([_POST.format(place.rank)]):  # others look after this one, and it after none
        return Machines("", Post())
    given = json.loads(store.get(_POST.format(place.rank)))
    given["pids"] = {int(rank): pid for rank, pid in given["pids"].items()}  # keys of JSON are text
    return Machines("", Post(**given))


def seat_of(place: Place, device_type: str) -> Seat:
    """What this process computes on, without a context on its GPU if its rank has none."""
    here, shares = Seat(place.rank, socket.gethostname(), this_machine(), os.getpid(), "cpu"), place.ranks_per_gpu
    try:
        is_on_gpu = on_gpus(device_type, num_ranks=place.local_rank + 1, ranks_per_gpu=shares)
    except UserError as error:
        return replace(here, device="", mistake=(error.given, error.rule, error.way_out))
    if not is_on_gpu:
        return here
    unit, (free, _) = torch.cuda.get_device_properties(place.gpu), torch.cuda.mem_get_info(place.gpu)
    unit_id, free_bytes = str(unit.uuid), free // shares
    return replace(here, device="cuda", name=unit.name, unit=unit_id, free_bytes=free_bytes, ranks_per_gpu=shares)


def mistake_of(seats: Sequence[Seat]) -> tuple[str, ...]:
    """The parts of a user error, if these ranks cannot train together."""
    for seat in seats:
        if seat.mistake:
            given, *rest = seat.mistake
            return (f"{seat.where}: {given}", *rest)
    first = seats[0]
    for seat in seats:
        if seat.device != first.device:
            return (
                f"{seat.where} would compute on {seat.on}, {first.where} on {first.on}",
                "all ranks of a run compute on one kind of device",
                "can torch use the GPUs of all machines (driver, container, build of torch)? Or use device: cpu",
            )
    taken: dict[tuple[str, str], list[Seat]] = {}
    for seat in seats:
        sharing = taken.setdefault((seat.machine, seat.unit), [])
        sharing.append(seat)
        if seat.device == "cuda" and len(sharing) > seat.ranks_per_gpu:
            return (
                f"{sharing[0].where} and {seat.where} would compute on one GPU ({seat.name})",
                "each rank needs a GPU of its own",
                "start fewer ranks on that machine, or give each its GPU, as --gpus-per-task=1 does under SLURM",
            )
    return ()


def posts_of(seats: Sequence[Seat]) -> dict[int, Post]:
    """Who looks after whom, by rank: the first of a machine after its others and the next one, the second after it."""
    homes: dict[str, list[Seat]] = {}
    for seat in seats:
        homes.setdefault(seat.machine, []).append(seat)
    posts, in_turn = {}, [*homes.values()]
    for number, (first, *others) in enumerate(in_turn):
        follower = in_turn[(number + 1) % len(in_turn)][0]
        pids = {seat.rank: seat.pid for seat in others}
        posts[first.rank] = Post(pids, follower.rank, follower.host, True)
        if follower is first:  # there is one machine
            posts[first.rank] = Post(pids, is_first=True)
        if others:
            posts[others[0].rank] = Post({first.rank: first.pid})
    return posts


def line_of(seats: Sequence[Seat]) -> str:
    """The first line of a run: its machines, devices, and the versions that compute."""
    hosts = list({seat.machine: seat.host for seat in seats}.values())  # two may have one host name
    shown = ", ".join(hosts[:_NAMED])
    if len(hosts) > _NAMED:
        shown += ", ..."
    words = [f"{_count(len(hosts), 'machine')} ({shown}): {_count(len(seats), 'rank')} on "]
    if seats[0].device == "cpu":
        words[0] += "CPUs"
    else:
        # By unit: ranks that share a GPU count it once.
        names = Counter({(seat.machine, seat.unit): seat.name for seat in seats}.values())
        words[0] += ", ".join(f"{number} x {name}" for name, number in names.items())
        if seats[0].ranks_per_gpu > 1:
            words.append(sharing_note(seats[0].ranks_per_gpu))
        least = min(seats, key=lambda seat: seat.free_bytes)
        most = max(seat.free_bytes for seat in seats)
        words.append(f"{least.free_bytes / 1e9:.1f} GB free")
        if least.free_bytes < _LITTLE * most:
            words[-1] += f" on {least.where}, up to {most / 1e9:.1f} GB on others: is another process there?"
    return "; ".join([*words, ", ".join(f"{name} {version}" for name, version in own_versions().items())])


def own_versions() -> dict[str, str]:
    """Name -> version of what computes, where there is a GPU also of NCCL and of liger-kernel."""
    found = versions()
    if torch.cuda.is_available():
        found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
        if version := liger_version():
            found["liger-kernel"] = version
    return found


def own_words() -> dict[str, str]:
    """What all ranks must share before they read anything, for `agreement.agreed`."""
    every = own_versions() | {"meshlora's code": digest(own_sources())}
    return {f"{VERSION}{name}": version for name, version in every.items()}


def _read(store: Any, rank: int) -> Seat:
    store.wait([_SEAT.format(rank)], timedelta(seconds=_PATIENCE_S))
    given = json.loads(store.get(_SEAT.format(rank)))
    return Seat(**{**given, "mistake": tuple(given["mistake"])})  # JSON made it a list


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def _raise(parts: Sequence[str]) -> None:
    if parts:
        raise UserError(*parts)

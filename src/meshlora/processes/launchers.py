"""Launchers: what torchrun, SLURM, mpirun and our own tell a rank by its environment.

Owns: a rank's place in the job (`launcher_place`), where the ranks meet (`set_rendezvous`), and which of a job's
attempts they are in (`part_of_attempt`). Does not own: groups (`comm.groups`), starting (`run.launch`).

In the order of search: RANK and WORLD_SIZE (torchrun, our `--nproc`, PyTorchJob of Kubernetes, Ray), Open MPI, MPICH
and Intel MPI, SLURM's `srun`, any other that speaks PMI. `mpirun` within a SLURM job starts its helpers by `srun`, so
what SLURM says to ranks is about those: MPI is asked first.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import socket
import subprocess
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch.distributed import PrefixStore, Store

from meshlora_ground.errors import UserError

# Names the rendezvous file of ranks that were started on one machine, in a folder private to this user.
STORE = "MESHLORA_STORE"
# How many of the ranks that were started on one machine share each GPU, where more than one does.
RANKS_PER_GPU = "MESHLORA_RANKS_PER_GPU"
# (rank, number of ranks, rank on this host, ranks on this host) of launchers that speak MPI or PMI.
_OPEN_MPI = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")
_HYDRA = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
_PALS = ("PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE")
_SLURM = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")
# Ranks of one mpirun share these, and those of another on the same host do not.
_MPI_JOB = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_JOBID")
_FIRST_PORT, _NUM_PORTS = 20000, 12768  # below 32768, where Linux begins to give ports to whoever asks for any
# With it a process sees no GPU, whatever library asks: of CUDA, and of ROCm, which takes an empty text for none given.
NO_GPUS = {"CUDA_VISIBLE_DEVICES": "-1", "HIP_VISIBLE_DEVICES": "-1"}
# In Kubernetes the name of another pod is known only once that pod has started.
_RESOLVES_IN_S = 30.0
_AGAIN_S = 1.0
_SCONTROL_S = 10.0  # the longest that SLURM is asked for an address
# Between two looks, the first and the longest: thousands of ranks may wait for rank 0.
_LOOK_S, _MOST_S = 0.05, 2.0
_ATTEMPT, _DRAWN, _ANSWERED = "attempt", "{}/drawn/{}", "{}/answered/{}"  # of an attempt's name and a rank


@dataclass(frozen=True)
class Place:
    """What the launcher assigned: this process' rank, the world size, and the rank on this host.

    ranks_per_gpu: of `--ranks-per-gpu`; 1 under any launcher but ours.
    """

    rank: int
    world: int
    local_rank: int
    ranks_per_gpu: int = 1

    @property
    def gpu(self) -> int:
        """The number of this rank's GPU on this host, if it computes on one."""
        return self.local_rank // self.ranks_per_gpu


def launcher_place() -> Place | None:
    """This process' place according to its launcher; None outside a launcher.

        srun --ntasks 2 ...   ->   Place(rank=0, world=2, local_rank=0) and Place(rank=1, world=2, local_rank=1)

    Raises:
        UserError: the launcher's variables are no numbers, or contradict each other.
    """
    env = os.environ
    if "RANK" in env and "WORLD_SIZE" in env:
        return _place("RANK", "WORLD_SIZE", "LOCAL_RANK")
    if _is_one_of_several(*_OPEN_MPI[:2]):
        return _place(*_OPEN_MPI[:3])
    if "MPI_LOCALRANKID" in env and _is_one_of_several(*_HYDRA[:2]):
        return _place(*_HYDRA[:3])
    # The step's, not the job's: a batch script has SLURM_PROCID=0 and SLURM_NTASKS too, and runs alone.
    if _is_one_of_several(*_SLURM[:2]):
        place = _place(*_SLURM)
        return Place(place.rank, place.world, 0) if _sees_its_own_gpu() else place
    if _is_one_of_several(*_PALS[:2]):
        return _place(*_PALS[:3])
    return None


def ranks_on_host(world: int) -> int:
    """How many of a run's `world` ranks are on this host, as its launcher says; all, where this process starts them."""
    env = os.environ
    if launcher_place() is None:
        return world
    for name in ("LOCAL_WORLD_SIZE", _OPEN_MPI[3], _HYDRA[3], _PALS[3]):
        if name in env:
            return _number(name)
    # Of SLURM, for each node: "4(x2),1".
    counts = re.findall(r"(\d+)(?:\(x\d+\))?(?:,|$)", env.get("SLURM_STEP_TASKS_PER_NODE", ""))
    return max(map(int, counts), default=min(world, max(1, torch.cuda.device_count())))


def _is_one_of_several(rank: str, world: str) -> bool:
    return rank in os.environ and _number(world, 1) > 1


def _place(rank: str, world: str, local_rank: str) -> Place:
    shares = _number(RANKS_PER_GPU, 1) if STORE in os.environ else 1
    place = Place(_number(rank), _number(world), _number(local_rank, 0), shares)
    if not 0 <= place.rank < place.world:
        rule = f"ranks are 0 to {place.world - 1}"
        raise UserError(f"{rank}={place.rank} with {world}={place.world}", rule, "mend the launcher")
    return place


def _number(name: str, default: int | None = None) -> int:
    text = os.environ.get(name, "" if default is None else str(default))
    if not re.fullmatch(r"\s*\d{1,9}\s*", text):
        raise UserError(f"{name}={text}", "a launcher sets it to a whole number", "unset it to run as one process")
    return int(text)


def _sees_its_own_gpu() -> bool:
    """Whether a task of SLURM sees a single GPU, as number 0, and its neighbours see others.

    With --gpus-per-task=1 they do; where all tasks see the one GPU of their node, they must not share it.
    """
    if torch.cuda.device_count() != 1:
        return False
    if "SLURM_GPUS_ON_NODE" in os.environ:  # of the step, whichever of them this task sees
        return _number("SLURM_GPUS_ON_NODE") > _number("SLURM_LOCALID", 0)
    # SLURM counts no GPUs here: whoever restricted this task to one did so by hand.
    return "CUDA_VISIBLE_DEVICES" in os.environ


def hides_gpus() -> bool:
    """Whether this process was asked to see no GPU."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1")


@contextlib.contextmanager
def gpus_hidden() -> Iterator[None]:
    """Interpreters that are started in the block see no GPU. This process sees those that it has asked for before."""
    before = {name: os.environ.get(name) for name in NO_GPUS}
    os.environ.update(NO_GPUS)
    try:
        yield
    finally:
        for name, value in before.items():
            del os.environ[name]
            if value is not None:
                os.environ[name] = value


def is_by_torchrun() -> bool:
    """Whether the ranks meet in the store of torchrun's agents, which outlives an attempt."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def local_store() -> str | None:
    """The file in which the ranks of `meshlora train --nproc N` meet; None under any other launcher."""
    return os.environ.get(STORE)


def place_in_environment(rank: int, world: int, *, store: str, ranks_per_gpu: int = 1) -> dict[str, str]:
    """Environment of rank `rank` of `world` processes on this machine, which rendezvous through the file `store`.

    ranks_per_gpu: so many share each GPU, by NCCL, which refuses two ranks of a host on one GPU: each says that it is
    a host of its own, and nothing but sockets over loopback is left to reach the others by.
    """
    own, every = str(rank), str(world)
    place = {"RANK": own, "WORLD_SIZE": every, "LOCAL_RANK": own, "LOCAL_WORLD_SIZE": every, STORE: store}
    if ranks_per_gpu == 1:
        return place
    place |= {RANKS_PER_GPU: str(ranks_per_gpu), "NCCL_HOSTID": f"meshlora-rank-{rank}"}
    place |= {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_IB_DISABLE": "1"}
    return place | {"NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo"}


def enter_place(rank: int, world: int, *, store: str, ranks_per_gpu: int = 1) -> None:
    """Make this process rank `rank` of a job on this machine, whatever launcher started it."""
    own = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", STORE, RANKS_PER_GPU)
    for name in (*own, *_OPEN_MPI, *_HYDRA, *_PALS, *_SLURM):
        os.environ.pop(name, None)
    if world > 1:
        os.environ.update(place_in_environment(rank, world, store=store, ranks_per_gpu=ranks_per_gpu))


def set_rendezvous() -> None:
    """Set MASTER_ADDR and MASTER_PORT, which torch needs, where the launcher did not. Raises: UserError: the host is
    unknown, or has no address."""
    env = os.environ
    if is_by_torchrun():
        return
    if "MASTER_ADDR" not in env:
        env["MASTER_ADDR"] = _host_of_rank_0()
    env.setdefault("MASTER_PORT", str(_port()))
    master_port()
    host, deadline = env["MASTER_ADDR"], time.monotonic() + _RESOLVES_IN_S
    while not _resolves(host):
        if time.monotonic() > deadline:
            way_out = "set MASTER_ADDR to a name or an address of rank 0's host"
            raise UserError(f"MASTER_ADDR={host}", "cannot resolve it", way_out)
        time.sleep(_AGAIN_S)


def master_port() -> int:
    """The port at which ranks meet, once `set_rendezvous` was called."""
    return _number("MASTER_PORT")


def _host_of_rank_0() -> str:
    """As SLURM has it, or this host if it has all ranks."""
    env = os.environ
    if _is_by_slurm():
        if _number("SLURM_STEP_NUM_NODES", 0) == 1:
            return "127.0.0.1"
        name = first_host(env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or "127.0.0.1")
        return name if _resolves(name) else _slurms_address_of(name) or name
    for _, world, _, on_this_host in (_OPEN_MPI, _HYDRA, _PALS):
        if world in env and env.get(on_this_host) == env[world]:
            return "127.0.0.1"
    rule = "this launcher does not say where rank 0 is"
    raise UserError("MASTER_ADDR", rule, "set it, to a host that all others can reach")


def _is_by_slurm() -> bool:
    """Whether `srun` started the ranks themselves, and not a helper of mpirun or torchrun on each node."""
    tasks = os.environ.get("SLURM_STEP_NUM_TASKS")
    is_by_mpi = not {_OPEN_MPI[0], "MPI_LOCALRANKID"}.isdisjoint(os.environ)
    return tasks is not None and not is_by_mpi and os.environ.get("WORLD_SIZE", tasks) == tasks


def first_host(hosts: str) -> str:
    """The first host of a SLURM list: `node[03-07,12],other` -> `node03`, `rack[1-2]node[01-04]` -> `rack1node01`."""
    first = re.match(r"(?:\[[^\]]*\]|[^,\[])+", hosts)
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0]) if first else hosts


def _slurms_address_of(node: str) -> str:
    """By which SLURM itself reaches a node whose name is unknown to DNS; empty if it cannot be asked."""
    if shutil.which("scontrol") is None:
        return ""
    try:
        words = ["scontrol", "--oneliner", "show", "node", node]
        said = subprocess.run(words, capture_output=True, text=True, timeout=_SCONTROL_S, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
    found = re.search(r"\bNodeAddr=(\S+)", said)
    return found[1] if found else ""


def _port() -> int:
    """One for each step of SLURM, or each mpirun; else torch's own default."""
    env = os.environ
    if _is_by_slurm():
        # Steps of a job never meet, nor do jobs of near numbers with few steps.
        step = env.get("SLURM_STEP_ID", "0")
        number = 101 * _number("SLURM_JOB_ID", 0) + (int(step) if step.isdecimal() else 0)
        return _FIRST_PORT + number % _NUM_PORTS
    if job := next((env[name] for name in _MPI_JOB if name in env), None):
        return _FIRST_PORT + zlib.crc32(job.encode()) % _NUM_PORTS
    return 29500


def _resolves(host: str) -> bool:
    try:
        socket.getaddrinfo(host, None)
    except (OSError, UnicodeError):
        return False
    return True


def part_of_attempt(store: Store, rank: int, world: int, *, timeout_s: float) -> Store:
    """The part of `store` without words of earlier attempts of a job that torchrun restarts. Every rank calls this.

    torchrun's agents keep one store over all restarts, and nothing in a rank's environment counts attempts the same on
    all nodes: after a node was lost, the others' counts differ from a new one's. So rank 0 draws a name, and each rank
    accepts only the name with which rank 0 has answered the rank's own draw.

    Raises:
        RuntimeError: a rank did not come in time.
    """
    own = secrets.token_hex(8)
    if rank == 0:
        store.set(_ATTEMPT, own)
        for other in range(1, world):
            drawn = _DRAWN.format(own, other)
            store.wait([drawn], timedelta(seconds=timeout_s))
            store.set(_ANSWERED.format(own, other), store.get(drawn).decode())
        return PrefixStore(own, store)
    deadline, told, pause_s = time.monotonic() + timeout_s, "", _LOOK_S
    while time.monotonic() < deadline:
        if store.check([_ATTEMPT]) and (name := store.get(_ATTEMPT).decode()) != told:
            store.set(_DRAWN.format(name, rank), own)
            told = name
        answered = _ANSWERED.format(told, rank)
        if told and store.check([answered]) and store.get(answered).decode() == own:
            return PrefixStore(told, store)
        time.sleep(pause_s)
        pause_s = min(1.5 * pause_s, _MOST_S)
    raise RuntimeError(f"Timed out waiting {timeout_s:g} s for rank 0 to begin")

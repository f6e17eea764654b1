"""What launchers tell a rank: its place, its GPU, and where the ranks meet."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from meshlora.cli import main as command_line
from meshlora.comm import groups
from meshlora.processes import launchers
from meshlora.processes.launchers import Place, first_host, launcher_place, ranks_on_host, set_rendezvous
from meshlora_ground.errors import UserError
from tests.for_each import for_each

LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_", "TORCHELASTIC_", "SLURM_", "OMPI_", "PMI", "MPI_", "CUDA_")
SRUN = {"SLURM_PROCID": 1, "SLURM_STEP_NUM_TASKS": 2, "SLURM_LOCALID": 1, "SLURM_JOB_ID": 7, "SLURM_STEP_ID": 0}
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": 3,
    "OMPI_COMM_WORLD_SIZE": 4,
    "OMPI_COMM_WORLD_LOCAL_RANK": 1,
    "OMPI_COMM_WORLD_LOCAL_SIZE": 2,
}


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nor do variables stay that are set in a test."""
    monkeypatch.setattr(launchers, "_RESOLVES_IN_S", 0.0)
    with mock.patch.dict(os.environ):
        for name in [name for name in os.environ if name.startswith(LAUNCHERS)]:
            del os.environ[name]
        yield


def _set(**variables: object) -> None:
    os.environ.update({name: str(value) for name, value in variables.items()})


def test_torchrun_is_found_before_slurm() -> None:
    _set(RANK=3, WORLD_SIZE=4, LOCAL_RANK=1, SLURM_PROCID=0, SLURM_STEP_NUM_TASKS=2)
    assert launcher_place() == Place(3, 4, 1)


def test_srun_step_is_a_launcher() -> None:
    _set(SLURM_PROCID=5, SLURM_NTASKS=8, SLURM_STEP_NUM_TASKS=8, SLURM_LOCALID=1)
    assert launcher_place() == Place(5, 8, 1)


@for_each(
    ("variables", "number"),
    [
        ({}, 8),  # started by this process, all of them
        ({"RANK": 1, "WORLD_SIZE": 8, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 4}, 4),
        (MPIRUN, 2),
        ({"PMI_RANK": 3, "PMI_SIZE": 8, "MPI_LOCALRANKID": 1, "MPI_LOCALNRANKS": 2}, 2),
        ({"PMI_RANK": 3, "PMI_SIZE": 8, "PMI_LOCAL_RANK": 1, "PMI_LOCAL_SIZE": 4}, 4),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "3(x2),2"}, 3),
        (SRUN, 1),  # this machine has no GPU
    ],
)
def test_ranks_of_a_host_are_counted_as_the_launcher_says(
    variables: dict[str, object], number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with mock.patch.dict(os.environ, {name: str(value) for name, value in variables.items()}):
        assert ranks_on_host(8) == number


def test_batch_script_is_not_a_rank_of_its_job() -> None:
    _set(SLURM_PROCID=0, SLURM_NTASKS=8, SLURM_LOCALID=0)
    assert launcher_place() is None


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        (MPIRUN, Place(3, 4, 1)),
        # Its helpers are tasks of a step of SLURM, one a node.
        (MPIRUN | {"SLURM_PROCID": 1, "SLURM_STEP_NUM_TASKS": 3, "SLURM_LOCALID": 0}, Place(3, 4, 1)),
        ({"PMI_RANK": 3, "PMI_SIZE": 4, "MPI_LOCALRANKID": 1, "MPI_LOCALNRANKS": 2}, Place(3, 4, 1)),
        ({"PMI_RANK": 3, "PMI_SIZE": 4, "PMI_LOCAL_RANK": 1}, Place(3, 4, 1)),
        (SRUN | {"PMI_RANK": 1, "PMI_SIZE": 2}, Place(1, 2, 1)),
        ({"OMPI_COMM_WORLD_RANK": 0, "OMPI_COMM_WORLD_SIZE": 1}, None),
    ],
    ids=["Open MPI", "Open MPI in SLURM", "MPICH", "PALS", "srun --mpi=pmi2", "a single process"],
)
def test_mpirun_is_a_launcher(variables: dict[str, int], place: Place | None) -> None:
    _set(**variables)
    assert launcher_place() == place


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"RANK": "one", "WORLD_SIZE": 2}, "RANK=one: a launcher sets it to a whole number; unset it"),
        ({"RANK": 2, "WORLD_SIZE": 2}, "RANK=2 with WORLD_SIZE=2: ranks are 0 to 1"),
    ],
)
def test_variables_that_make_no_sense_are_named(variables: dict[str, object], words: str) -> None:
    _set(**variables)
    with pytest.raises(UserError, match=words):
        launcher_place()


@pytest.mark.parametrize(
    ("variables", "num_gpus", "local_rank"),
    [
        # As SLURM 22.05 sets them with a node of two GPUs and --gpus-per-node=1, --gpus-per-task=1, and neither.
        ({"SLURM_GPUS_ON_NODE": 1, "SLURM_STEP_GPUS": "0", "CUDA_VISIBLE_DEVICES": "0"}, 1, 1),
        ({"SLURM_GPUS_ON_NODE": 2, "SLURM_STEP_GPUS": "1", "CUDA_VISIBLE_DEVICES": "1"}, 1, 0),
        ({"SLURM_GPUS_ON_NODE": 2, "SLURM_STEP_GPUS": "0,1", "CUDA_VISIBLE_DEVICES": "0,1"}, 2, 1),
        ({}, 1, 1),
        ({"CUDA_VISIBLE_DEVICES": "1"}, 1, 0),  # by hand, where SLURM counts no GPUs
        ({}, 0, 1),
    ],
)
def test_tasks_that_see_one_gpu_share_it_only_if_it_is_their_own(
    variables: dict[str, object], num_gpus: int, local_rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Number 0 on both tasks was one GPU for two ranks; number 1 is refused, as there is none."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: num_gpus > 0)
    _set(**SRUN, **variables)
    place = launcher_place()
    assert place == Place(1, 2, local_rank)
    if local_rank >= num_gpus > 0:
        with pytest.raises(
            UserError, match="2 processes on this machine: each needs a GPU of its own, and there are 1"
        ):
            groups.on_gpus("auto", num_ranks=place.local_rank + 1)


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("node1", "node1"),
        ("node[03-07,12],other", "node03"),
        ("a1,b2", "a1"),
        ("gpu-[2,5]", "gpu-2"),
        ("rack[1-2]node[01-04]", "rack1node01"),
        ("gpu-a[01-02]-ib", "gpu-a01-ib"),
        ("gpu-a[01,03]-ib,other[1-2]", "gpu-a01-ib"),
    ],
)
def test_first_host_of_a_node_list(hosts: str, first: str) -> None:
    assert first_host(hosts) == first


def _rendezvous() -> tuple[str, str]:
    set_rendezvous()
    return os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]


def test_steps_of_a_job_have_ports_of_their_own_below_the_ephemeral_ones() -> None:
    ports = set()
    for job, step in [(1, 0), (1, 1), (2, 0), (9_999_999, 0), (9_999_999, 4_294_967_290)]:
        _set(**SRUN | {"SLURM_JOB_ID": job, "SLURM_STEP_ID": step, "MASTER_ADDR": "127.0.0.1"})
        os.environ.pop("MASTER_PORT", None)
        ports.add(int(_rendezvous()[1]))
    assert len(ports) == 5
    assert all(20000 <= port < 32768 for port in ports)


def test_address_without_a_port_gets_one() -> None:
    _set(RANK=0, WORLD_SIZE=2, MASTER_ADDR="127.0.0.1")
    assert _rendezvous() == ("127.0.0.1", "29500")


def test_address_and_port_of_the_user_are_kept() -> None:
    _set(**SRUN, MASTER_ADDR="localhost", MASTER_PORT=4321)
    assert _rendezvous() == ("localhost", "4321")


def test_ranks_of_one_host_meet_there() -> None:
    _set(**SRUN, SLURM_STEP_NUM_NODES=1, SLURM_STEP_NODELIST="nowhere.invalid")
    assert _rendezvous()[0] == "127.0.0.1"


def test_ranks_of_one_mpirun_on_one_host_meet_at_a_port_of_their_own() -> None:
    _set(**MPIRUN | {"OMPI_COMM_WORLD_LOCAL_SIZE": 4, "PMIX_NAMESPACE": "prterun-4711@1"})
    assert _rendezvous() == ("127.0.0.1", str(launchers._port()))
    first = os.environ.pop("MASTER_PORT")
    os.environ["PMIX_NAMESPACE"] = "prterun-4712@1"
    assert _rendezvous()[1] != first


@pytest.mark.parametrize("variables", [MPIRUN, {"PMI_RANK": 0, "PMI_SIZE": 2}, {"RANK": 0, "WORLD_SIZE": 2}])
def test_launcher_that_does_not_say_where_rank_0_is_asks_for_it(variables: dict[str, int]) -> None:
    _set(**variables)
    with pytest.raises(UserError, match="MASTER_ADDR: this launcher does not say where rank 0 is; set it"):
        set_rendezvous()


def test_node_that_dns_does_not_know_is_reached_as_slurm_reaches_it(tmp_path: Path) -> None:
    scontrol = tmp_path / "scontrol"
    scontrol.write_text("#!/bin/sh\necho NodeName=$4 Arch=x86_64 NodeAddr=127.0.0.2 NodeHostName=gpu-node01\n")
    scontrol.chmod(scontrol.stat().st_mode | stat.S_IXUSR)
    _set(**SRUN, PATH=f"{tmp_path}:/usr/bin:/bin", SLURM_STEP_NODELIST="gpu-node[01-02].invalid")
    assert _rendezvous()[0] == "127.0.0.2"


def test_host_that_does_not_resolve_is_said_in_one_line() -> None:
    """torch's own warnings came every few seconds, for ten minutes."""
    _set(**SRUN, PATH="", SLURM_STEP_NODELIST="gpu-node[01-02].invalid")
    with pytest.raises(UserError, match=r"MASTER_ADDR=gpu-node01.invalid: cannot resolve it; set MASTER_ADDR"):
        set_rendezvous()


def test_host_that_is_known_a_little_later_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pods of Kubernetes start in any order."""
    answers = iter([OSError("Name or service not known"), None])

    def ask(*_: object) -> None:
        if (error := next(answers)) is not None:
            raise error

    monkeypatch.setattr(launchers, "_RESOLVES_IN_S", 30.0)
    monkeypatch.setattr(launchers, "_AGAIN_S", 0.0)
    monkeypatch.setattr(socket, "getaddrinfo", ask)
    _set(RANK=0, WORLD_SIZE=2, MASTER_ADDR="run-0.run")
    assert _rendezvous()[0] == "run-0.run"


def test_port_that_is_taken_is_said_in_one_line() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        _set(RANK=0, WORLD_SIZE=2, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        with pytest.raises(UserError, match=f"MASTER_PORT={port}: another process of this host listens there; set it"):
            groups.meet()


@pytest.mark.parametrize(
    "words",
    [["--local-rank=3", "train", "run.yaml"], ["train", "run.yaml", "--local_rank", "3", "--no-preflight"]],
    ids=["torch.distributed.launch", "behind the words"],
)
def test_local_rank_of_an_old_launcher_is_taken(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """And is no part of the command that goes on with the run."""
    seen: list[tuple[str, Place | None]] = []
    monkeypatch.setattr("meshlora.cli.train._train", lambda options: seen.append((options.words, launcher_place())))
    _set(RANK=3, WORLD_SIZE=4)
    assert command_line.main(words) == 0
    rest = " --no-preflight" if "--no-preflight" in words else ""
    assert seen == [(f"meshlora train run.yaml{rest}", Place(3, 4, 3))]


def test_local_rank_that_the_environment_contradicts_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    _set(RANK=3, WORLD_SIZE=4, LOCAL_RANK=1)
    assert command_line.main(["--local-rank=3", "train", "run.yaml"]) == 2
    assert capsys.readouterr().err == "error: --local-rank 3: LOCAL_RANK is 1; leave it out\n"


def test_rank_of_our_own_launcher_forgets_the_one_that_started_its_parent() -> None:
    _set(**MPIRUN, **SRUN, PMI_RANK=0, PMI_SIZE=2)
    launchers.enter_place(0, 1, store="")
    assert launcher_place() is None
    launchers.enter_place(1, 2, store="file")
    assert (launcher_place(), launchers.local_store()) == (Place(1, 2, 1), "file")


def test_a_rank_of_torchrun_has_its_own_gpu_though_the_script_opened_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the script has set a device, the current one is the first on every rank."""
    taken: list[torch.device] = []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(groups, "on_gpus", lambda *_, **__: True)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setattr(torch, "zeros", lambda *_, device, requires_grad: torch.ones((), requires_grad=requires_grad))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    _set(RANK=3, WORLD_SIZE=4, LOCAL_RANK=1)
    assert groups.join() == torch.device("cuda", 1)
    assert taken == [torch.device("cuda", 1)]
    del os.environ["RANK"]  # it opened the group by itself, and chose
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    assert groups.join() == torch.device("cuda", 2)

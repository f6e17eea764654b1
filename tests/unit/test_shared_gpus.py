"""`--ranks-per-gpu`: what each rank is told, which GPU it has, where it is refused. That NCCL does it: tests/gpu."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from meshlora.cli.main import main
from meshlora.comm import groups
from meshlora.comm.groups import join, on_gpus
from meshlora.processes import launchers
from meshlora.processes.launchers import Place, enter_place, launcher_place, place_in_environment
from meshlora.run import launch as launching
from meshlora.run import together
from meshlora.run.machines import Seat, line_of, mistake_of, seat_of
from meshlora.verify import preflight
from meshlora.verify.proof import Processes
from meshlora_ground.errors import UserError
from tests.pool import RankError

_TRANSPORTS = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_IB_DISABLE": "1", "NCCL_NET": "Socket"}


@pytest.fixture(autouse=True)
def _no_launcher() -> Iterator[None]:
    """Nor do variables stay that are set in a test."""
    with mock.patch.dict(os.environ):
        for name in [name for name in os.environ if name.startswith(("NCCL_", "MESHLORA_", "RANK", "WORLD_SIZE"))]:
            del os.environ[name]
        yield


@pytest.fixture
def see_gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Let torch say that there are so many GPUs."""

    def see(number: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: number > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: number)
        gpus = [SimpleNamespace(name="H100", uuid=f"GPU-{index}") for index in range(number)]
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpus[index])
        monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 3))
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (60 * 10**9, 80 * 10**9))

    return see


# --- what a rank is told ----------------------------------------------------------------------------------------------


def test_each_rank_is_a_host_of_its_own_that_has_nothing_but_sockets() -> None:
    """NCCL refuses two ranks of one host on one GPU ("Duplicate GPU detected")."""
    told = [place_in_environment(rank, 4, store="file", ranks_per_gpu=2) for rank in range(4)]
    assert len({one["NCCL_HOSTID"] for one in told}) == 4
    for one in told:
        assert one.items() >= {**_TRANSPORTS, "NCCL_SOCKET_IFNAME": "lo", launchers.RANKS_PER_GPU: "2"}.items()


def test_ranks_with_gpus_of_their_own_are_told_nothing_more() -> None:
    told = place_in_environment(1, 2, store="file")
    assert not [name for name in told if name.startswith("NCCL_")]
    assert launchers.RANKS_PER_GPU not in told


def test_neighbours_share_a_gpu() -> None:
    places = []
    for rank in range(5):
        enter_place(rank, 5, store="file", ranks_per_gpu=2)
        places.append(launcher_place())
    assert [place.gpu for place in places if place] == [0, 0, 1, 1, 2]
    enter_place(3, 5, store="file")  # a rank of another job
    place = launcher_place()
    assert place == Place(3, 5, 3)
    assert place.gpu == 3


def test_ranks_of_another_launcher_share_nothing() -> None:
    os.environ |= {launchers.RANKS_PER_GPU: "2", "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}
    place = launcher_place()
    assert place is not None
    assert place.gpu == 1


def test_launched_ranks_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[dict[str, str]] = []

    def start(arguments: Any, environment: dict[str, str], words: Any, *, reads: bool) -> Any:
        started.append(environment)
        return mock.Mock(returncode=0)

    monkeypatch.setattr(launching, "_start", start)
    monkeypatch.setattr(launching, "_watch", lambda *_: None)
    launching.launch(["train"], nproc=3, on_gpus=True, ranks_per_gpu=2)
    assert [(one["RANK"], one[launchers.RANKS_PER_GPU]) for one in started] == [("0", "2"), ("1", "2"), ("2", "2")]
    assert len({one["NCCL_HOSTID"] for one in started}) == 3
    started.clear()
    launching.launch(["train"], nproc=2, on_gpus=True)
    assert not any("NCCL_HOSTID" in one or launchers.RANKS_PER_GPU in one for one in started)


def test_ranks_of_a_proof_are_told() -> None:
    """On CPUs they refuse, each by itself: so it has come to them."""
    with Processes() as processes:
        pool = processes.ranks(2, "cpu", ranks_per_gpu=2)
        assert pool is not processes.ranks(2, "cpu")
        with pytest.raises(RankError, match="--ranks-per-gpu 2: it needs CUDA"):
            pool.run(os.getpid)


# --- what a rank takes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shares", [1, 2])
def test_a_rank_takes_its_gpu_and_no_more_than_its_share(
    shares: int, see_gpus: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    see_gpus(4)
    taken: list[object] = []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *given: taken.append(given))
    monkeypatch.setattr(torch, "zeros", lambda *_, device, requires_grad: torch.ones((), requires_grad=requires_grad))
    enter_place(3, 4, store="file", ranks_per_gpu=shares)
    device = torch.device("cuda", 3 // shares)
    assert join() == device
    assert taken == ([device] if shares == 1 else [device, (0.5, device)])


def test_ranks_that_share_are_compared_and_shown_as_such(see_gpus: Callable[[int], None]) -> None:
    see_gpus(1)
    seats = [seat_of(Place(rank, 2, rank, ranks_per_gpu=2), "auto") for rank in range(2)]
    assert mistake_of(seats) == ()
    line = line_of(seats)
    assert ": 2 ranks on 1 x H100; 2 ranks share each GPU: for trying and proving; not for speed; 30.0 GB free" in line
    third = dataclasses.replace(seats[0], rank=2)
    assert "would compute on one GPU" in mistake_of([*seats, third])[0]  # more than agreed
    own = [dataclasses.replace(seat, ranks_per_gpu=1) for seat in seats]
    assert "would compute on one GPU" in mistake_of(own)[0]


def test_several_gpus_are_counted_once_each() -> None:
    seats = [Seat(r, "a", "a boot", 7, "cuda", "H100", f"GPU-{r // 2}", 10**9, ranks_per_gpu=2) for r in range(4)]
    assert ": 4 ranks on 2 x H100; 2 ranks share each GPU" in line_of(seats)


def test_devices_of_a_run_are_proved_by_ranks_that_share_them(
    see_gpus: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    see_gpus(1)
    run: Any = SimpleNamespace(
        topology=groups.Topology(pp=2),
        config=SimpleNamespace(preflight="device", device="auto"),
        blueprint=SimpleNamespace(options=SimpleNamespace(kernels="none")),
    )
    (place,), note = preflight._devices_of(run, 2)
    assert (place.most_ranks, place.ranks_per_gpu) == (2, 2)
    assert note == "2 ranks share each GPU: for trying and proving; not for speed"
    with pytest.raises(UserError, match="let ranks share GPUs for it: --ranks-per-gpu 2"):
        preflight._devices_of(run)


# --- where it is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_gpus", "device", "num_ranks", "shares", "words"),
    [
        (0, "auto", 2, 2, "--ranks-per-gpu 2: it needs CUDA"),
        (1, "cpu", 2, 2, "--ranks-per-gpu 2: it needs CUDA"),
        (0, "cuda", 2, 2, "device: cuda: this machine has no CUDA device"),
        (1, "auto", 2, 0, "--ranks-per-gpu 0: at least 1 rank computes on each GPU"),
        (1, "auto", 3, 2, "3 processes on this machine: --ranks-per-gpu 2 has room for 2; .*--ranks-per-gpu 3"),
        (2, "auto", 3, 1, "each needs a GPU of its own, and there are 2; start fewer, .*: --ranks-per-gpu 2"),
    ],
)
def test_what_cannot_be_shared_is_refused(
    num_gpus: int, device: str, num_ranks: int, shares: int, words: str, see_gpus: Callable[[int], None]
) -> None:
    see_gpus(num_gpus)
    with pytest.raises(UserError, match=words):
        on_gpus(device, num_ranks=num_ranks, ranks_per_gpu=shares)


def test_gpus_with_room_for_all_ranks_are_taken(see_gpus: Callable[[int], None]) -> None:
    see_gpus(2)
    assert on_gpus("auto", num_ranks=4, ranks_per_gpu=2)
    assert on_gpus("cuda", num_ranks=3, ranks_per_gpu=2)


def test_check_counts_all_ranks_that_share_gpus_as_of_this_machine(
    see_gpus: Callable[[int], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By which it says what a run takes of the host's memory; ranks with a GPU each may be of several machines."""
    see_gpus(2)
    seen = []

    def prepare(_: Any, *, world: int | None) -> Any:
        seen.append(world)
        raise UserError("a run", "it is not prepared here", "")

    monkeypatch.setattr(together, "prepare_runs", prepare)
    (tmp_path / "run.yaml").write_text(
        "model: {path: base}\nlora: {r: 4, target_modules: all-linear}\ndata: {train: train.jsonl}\n"
        "train: {output: out, steps: 1}\ntopology: tp=4\n"
    )
    for words in ([], ["--prove", "--ranks-per-gpu", "2"]):
        assert main(["check", f"{tmp_path / 'run.yaml'}", *words]) == 2
    assert seen == [None, 4]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "run.yaml"], "--ranks-per-gpu 2: ranks share GPUs only where this command starts them"),
        (["train", "run.yaml", "--nproc", "2", "--hardware", "h.json"], "--ranks-per-gpu 2 with --hardware: a planned"),
        (["check", "run.yaml"], "--ranks-per-gpu 2: it has no effect without --prove; give both"),
        (["verify", "--family", "llama", "--device", "cpu"], "--ranks-per-gpu 2: it needs CUDA"),
        (["verify", "--family", "llama"], "--ranks-per-gpu 2: it needs CUDA"),
    ],
    ids=["alone", "planned", "unproved", "cpus", "no_gpu"],
)
def test_commands_refuse_what_they_could_not_follow(
    arguments: list[str], words: str, see_gpus: Callable[[int], None], capsys: pytest.CaptureFixture[str]
) -> None:
    see_gpus(0)
    assert main([*arguments, "--ranks-per-gpu", "2"]) == 2
    assert words in capsys.readouterr().err


def test_a_rank_of_torchrun_is_told_that_it_shares_nothing(
    capsys: pytest.CaptureFixture[str], see_gpus: Callable[[int], None]
) -> None:
    see_gpus(1)
    os.environ |= {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}
    assert main(["train", "run.yaml", "--ranks-per-gpu", "2"]) == 2
    assert "give --nproc N, without another launcher" in capsys.readouterr().err

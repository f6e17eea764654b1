"""What the ranks of a job compute on: who does not fit is named before any group is open."""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch.distributed import HashStore

from meshlora.comm import groups
from meshlora.processes.heartbeat import Post
from meshlora.processes.launchers import Place
from meshlora.run import machines as module
from meshlora.run.machines import Machines, Seat, line_of, machines, mistake_of, posts_of
from meshlora_ground.errors import UserError


def _gpu(rank: int, *, per_machine: int = 2, name: str = "H100", free: float = 79.0) -> Seat:
    number, unit = divmod(rank, per_machine)
    machine = f"node{number + 1}"
    return Seat(rank, machine, f"{machine} boot", 100 + rank, "cuda", name, f"GPU-{unit}", int(free * 1e9))


def _cpu(rank: int) -> Seat:
    return Seat(rank, "node1", "node1 boot", 100 + rank, "cpu")


def test_ranks_on_gpus_of_their_own_fit_together() -> None:
    assert mistake_of([_gpu(rank) for rank in range(4)]) == ()


def test_a_rank_that_would_fall_to_the_cpu_is_named() -> None:
    """`device: auto` decided on each rank by itself, and trained on both kinds."""
    given, rule, _ = mistake_of([_gpu(0), _gpu(1), _gpu(2), dataclasses.replace(_cpu(3), host="node2")])
    assert given == "rank 3 (node2) would compute on the CPU, rank 0 (node1) on a GPU (H100)"
    assert rule == "all ranks of a run compute on one kind of device"


def test_two_ranks_on_one_gpu_are_named_and_the_same_number_on_two_machines_is_not_one() -> None:
    twice = dataclasses.replace(_gpu(3), unit="GPU-0")
    given, *_ = mistake_of([_gpu(0), _gpu(1), _gpu(2), twice])
    assert given == "rank 2 (node2) and rank 3 (node2) would compute on one GPU (H100)"


def test_mistake_of_one_rank_is_that_of_all() -> None:
    wrong = dataclasses.replace(_cpu(1), mistake=("device: cuda", "there is none", "use device: cpu"))
    assert mistake_of([_cpu(0), wrong]) == ("rank 1 (node1): device: cuda", "there is none", "use device: cpu")


def test_each_rank_is_looked_after_by_another_of_its_machine_and_each_machine_by_another() -> None:
    assert posts_of([_gpu(rank) for rank in range(4)]) == {
        0: Post({1: 101}, 2, "node2", is_first=True),
        1: Post({0: 100}),
        2: Post({3: 103}, 0, "node1", is_first=True),
        3: Post({2: 102}),
    }
    assert posts_of([_cpu(0)]) == {0: Post(is_first=True)}


def test_the_first_line_names_machines_devices_and_versions() -> None:
    line = line_of([_gpu(0), _gpu(1), _gpu(2, name="A100"), _gpu(3)])
    assert line.startswith("2 machines (node1, node2): 4 ranks on 3 x H100, 1 x A100; 79.0 GB free; meshlora ")
    assert f"torch {torch.__version__}" in line
    assert line_of([_cpu(0)]).startswith("1 machine (node1): 1 rank on CPUs; ")
    many = line_of([_gpu(rank, per_machine=1) for rank in range(6)])
    assert many.startswith("6 machines (node1, node2, node3, node4, ...): 6 ranks")


def test_a_gpu_that_another_process_uses_is_named() -> None:
    assert "12.0 GB free on rank 1 (node1), up to 79.0 GB on others" in line_of([_gpu(0), _gpu(1, free=12)])


def _all_ranks(monkeypatch: pytest.MonkeyPatch, seats: list[Seat]) -> list[Machines | UserError]:
    """What each rank, a thread, is told."""
    store = HashStore()
    monkeypatch.setattr(module, "meet", lambda: store)

    def rank(number: int) -> Machines | UserError:
        try:
            return module.compared(Place(number, len(seats), 0), seats[number])
        except UserError as error:
            return error

    with ThreadPoolExecutor(len(seats)) as threads:
        return list(threads.map(rank, range(len(seats))))


def test_all_ranks_are_told_their_posts(monkeypatch: pytest.MonkeyPatch) -> None:
    found = _all_ranks(monkeypatch, [_gpu(rank) for rank in range(4)])
    assert [one.post for one in found if isinstance(one, Machines)] == [
        Post({1: 101}, 2, "node2", is_first=True),
        Post({0: 100}),
        Post({3: 103}, 0, "node1", is_first=True),
        Post({2: 102}),
    ]


def test_all_ranks_end_with_the_same_words(monkeypatch: pytest.MonkeyPatch) -> None:
    found = _all_ranks(monkeypatch, [_gpu(0), _cpu(1), _gpu(2)])
    assert {str(one) for one in found} == {str(found[0])}
    assert "rank 1 (node1) would compute on the CPU" in str(found[0])


def test_a_gpu_that_torch_cannot_use_is_no_reason_to_train_on_the_cpu_in_silence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(groups, "_DRIVER", [Path("/proc/version")])  # any file that is there
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "on CPUs" in machines("auto")  # as asked
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(UserError, match=r"torch .* cannot use the NVIDIA GPU"):
        machines("auto")
    assert "on CPUs" in machines("cpu")

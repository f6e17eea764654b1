"""What torchrun and SLURM tell a rank."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from meshlora.comm import groups
from meshlora.comm.groups import Place, first_host, launcher_place

VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "SLURM_PROCID",
    "SLURM_NTASKS",
    "SLURM_LOCALID",
    "SLURM_STEP_NUM_TASKS",
)


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def _set(monkeypatch: pytest.MonkeyPatch, **variables: int) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))


def test_torchrun_is_found_before_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    _set(monkeypatch, RANK=3, WORLD_SIZE=4, LOCAL_RANK=1, SLURM_PROCID=0, SLURM_STEP_NUM_TASKS=2)
    assert launcher_place() == Place(3, 4, 1)


def test_srun_step_is_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    _set(monkeypatch, SLURM_PROCID=5, SLURM_NTASKS=8, SLURM_STEP_NUM_TASKS=8, SLURM_LOCALID=1)
    assert launcher_place() == Place(5, 8, 1)


def test_batch_script_is_not_a_rank_of_its_job(monkeypatch: pytest.MonkeyPatch) -> None:
    _set(monkeypatch, SLURM_PROCID=0, SLURM_NTASKS=8, SLURM_LOCALID=0)
    assert launcher_place() is None


@pytest.mark.parametrize(
    ("hosts", "first"),
    [("node1", "node1"), ("node[03-07,12],other", "node03"), ("a1,b2", "a1"), ("gpu-[2,5]", "gpu-2")],
)
def test_first_host_of_a_node_list(hosts: str, first: str) -> None:
    assert first_host(hosts) == first


def test_a_rank_of_torchrun_has_its_own_gpu_though_the_script_opened_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the script has set a device, the current one is the first on every rank."""
    taken: list[torch.device] = []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(groups, "on_gpus", lambda *_, **__: True)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setattr(torch, "zeros", lambda *_, device, requires_grad: torch.ones((), requires_grad=requires_grad))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    _set(monkeypatch, RANK=3, WORLD_SIZE=4, LOCAL_RANK=1)
    assert groups.join() == torch.device("cuda", 1)
    assert taken == [torch.device("cuda", 1)]
    monkeypatch.delenv("RANK")  # it opened the group by itself, and chose
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    assert groups.join() == torch.device("cuda", 2)

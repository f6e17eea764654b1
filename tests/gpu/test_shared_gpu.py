"""Two ranks on one GPU over NCCL, as `--ranks-per-gpu 2` has them: every axis with the streams and kernels of a run."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from meshlora.cli.main import main
from meshlora.comm.collectives import all_reduce_sum
from meshlora.comm.groups import open_mesh
from meshlora.comm.messages import hand_on, take_over
from meshlora_ground.topology import Topology
from tests.conftest import Prove
from tests.pool import Pool
from tests.run_files import TINY, metrics_of, write_run_file

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("family", "topology"),
    [
        ("llama", "dp=2"),
        ("llama", "dp=2,dp_shard"),
        ("llama", "tp=2,sp"),
        ("llama", "cp=2"),
        ("llama", "cp=2,ring"),
        ("bamba", "cp=2"),
        ("llama", "pp=2"),
        ("llama", "pp=2,interleave=2"),
        ("qwen3_moe", "dp=2,ep=2"),
        ("qwen3_moe", "tp=2,sp,etp=2"),
        ("qwen3_moe", "pp=2"),
    ],
)
def test_two_ranks_on_one_gpu_match_one_process_over_nccl(family: str, topology: str, prove: Prove) -> None:
    (outcome,) = prove(family=family, topologies=(topology,), steps=2, device="cuda", ranks_per_gpu=2)
    assert outcome.passed, (outcome.divergence, outcome.error)


def _handed_on(number: int) -> tuple[list[float], list[float]]:
    """(what came from the stage before, the gradients of what was sent on): `number` forwards, then the backwards."""
    device = torch.device("cuda", 0)
    mesh = open_mesh(Topology(pp=2), device=device)
    channels, came, streams, ends = mesh.channels, [], [], []
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns of a message outside a batch
        for micro in range(number):
            x = torch.full((512, 512), float(micro), device=device, dtype=torch.float64).requires_grad_()
            streams.append(x)
            if mesh.rank == 0:
                ends.append(hand_on(x, channels.to_next, channels.from_next))
            else:
                got = take_over(torch.empty_like(x), channels.from_before, channels.to_before)
                came.append(float(got.detach().mean()))
                ends.append(((got + x) * (micro + 2)).sum())
        for end in ends:
            end.backward()
    all_reduce_sum(torch.zeros(1, device=device), mesh.world)
    return came, [float(x.grad.mean()) for x in streams if x.grad is not None]


def test_messages_over_nccl_arrive_in_order_and_no_send_is_waited_for() -> None:
    """Eight forwards before the first backward: where a send waited to be taken, both ranks would wait."""
    pool = Pool(2, device="cuda", ranks_per_gpu=2)  # of its own: torch warns once
    try:
        (_, of_first), (came, of_last) = pool.run(_handed_on, 8, timeout_s=120)
    finally:
        pool.close()
    assert came == [float(micro) for micro in range(8)]
    assert of_first == of_last == [micro + 2.0 for micro in range(8)]


def test_a_run_of_two_ranks_on_one_gpu_is_proved_there_and_has_the_losses_of_one(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.jsonl").write_text('{"prompt": "def f(x):", "completion": " return x"}\n' * 8)
    losses = []
    given: dict[str, Any] = {"model": {"path": str(TINY), "dtype": "float32"}, "device": "cuda"}
    for name, mesh, words in (("one", "dp=1", ["1"]), ("two", "pp=2", ["2", "--ranks-per-gpu", "2"])):
        file = write_run_file(tmp_path / f"{name}.yaml", **given, topology=mesh)
        assert main(["train", str(file), "--nproc", *words]) == 0, capfd.readouterr().err
        losses.append([line["loss"] for line in metrics_of(tmp_path / name) if "loss" in line])
    assert capfd.readouterr().out.count("2 ranks share each GPU") >= 2  # before the proof, and on the machines
    assert losses[0]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)

"""On a machine with a GPU: proofs on CPUs see none, those on it are spawned, and nothing forks that has opened it.

The GPU is pretended (`tests/pretended_gpu`), so a command that is right to use it ends where it does.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from meshlora.processes.launchers import NO_GPUS
from meshlora.verify import pool as module
from tests.one_step import adapter, meshlora, on_trainer, rl_file, run_file
from tests.pool import Pool
from tests.processes import Started
from tests.run_files import TINY

TESTS = Path(__file__).parents[1]
PRETENDED = "this GPU is only pretended"


def _ended(folder: Path, *words: str, gpus: int = 1) -> tuple[int, str, list[str]]:
    """(exit code, what it said, what its processes did with GPUs) of `python WORDS` where there are `gpus`."""
    log = folder / "log"
    log.touch()
    path = f"{TESTS / 'pretended_gpu'}:{Path(module.__file__).parents[2]}"
    more = {"PYTHONPATH": path, "PRETENDED_GPUS": str(gpus), "PRETENDED_GPU_LOG": str(log)}
    with Started(folder, *words, **more) as run:
        code, out, err = run.end(timeout_s=900)
    return code, out + err, log.read_text().splitlines()


def _assert_it_came_to_the_gpu(code: int, said: str, did: list[str]) -> None:
    assert code == 1, said
    assert PRETENDED in said
    assert _kinds(did) == {"opened"}, did


def _kinds(did: list[str]) -> set[str]:
    return {line.partition(":")[0] for line in did}


@pytest.mark.long
@pytest.mark.timeout(900)
def test_train_proves_on_cpus_in_forks_and_then_on_the_gpu_in_what_it_spawns(tmp_path: Path) -> None:
    """The first command of a user: PEFT's loader took the GPU in the reference on CPUs, which was forked."""
    code, said, did = _ended(tmp_path, *meshlora("train", run_file(tmp_path)))
    assert "preflight: llama on dp=1 proved in" in said, said
    assert "preflight: proving a twin of llama on dp=1 on NVIDIA H200" in said, "and then the proof on the GPU"
    _assert_it_came_to_the_gpu(code, said, did)


ON_CPUS: dict[str, Callable[[Path], list[str]]] = {
    "train": lambda folder: meshlora("train", run_file(folder, device="cpu")),
    "train, two ranks": lambda folder: meshlora(
        "train", run_file(folder, device="cpu", topology="tp=2,sp"), "--nproc", "2"
    ),
    "train, device proof": lambda folder: meshlora("train", run_file(folder, device="cpu", preflight="device")),
    "check": lambda folder: meshlora("check", run_file(folder, device="cpu"), "--prove"),
    "verify": lambda _: meshlora("verify", "--family", "llama", "--topology", "dp=2", "--device", "cpu"),
    "evaluate": lambda folder: meshlora(
        "evaluate", run_file(folder, device="cpu", topology="dp=2"), "--base", "--nproc", "2"
    ),
    "rl": lambda folder: meshlora("rl", rl_file(folder, device="cpu", topology="dp=2"), "--nproc", "2"),
    "merge": lambda folder: meshlora(
        "merge", "--model", str(TINY), "--adapter", adapter(folder), "--out", str(folder / "merged")
    ),
    "MeshTrainer": lambda folder: on_trainer(folder, "cpu"),
}
ON_GPUS: dict[str, Callable[[Path], list[str]]] = {
    "train, two ranks": lambda folder: meshlora("train", run_file(folder, topology="dp=2"), "--nproc", "2"),
    "check": lambda folder: meshlora("check", run_file(folder), "--prove"),
    "verify": lambda _: meshlora("verify", "--family", "llama", "--topology", "", "--device", "cuda"),
    "evaluate": lambda folder: meshlora("evaluate", run_file(folder), "--base"),
    "generate": lambda _: meshlora("generate", "--model", str(TINY), "--prompt", "def f(x):", "--nproc", "2"),
    "rl": lambda folder: meshlora("rl", rl_file(folder), "--no-preflight"),
    "MeshTrainer": lambda folder: on_trainer(folder, "cuda"),
}


@pytest.mark.proof  # each starts three interpreters or more
@pytest.mark.timeout(900)
@pytest.mark.parametrize("command", ON_CPUS)
def test_command_on_cpus_passes_where_there_is_a_gpu(command: str, tmp_path: Path) -> None:
    """Torch's optimizers look at the GPU of a process that sees one; ranks and references see none."""
    code, said, did = _ended(tmp_path, *ON_CPUS[command](tmp_path), gpus=2)
    assert code == 0, said
    assert _kinds(did) <= {"opened"}, did


@pytest.mark.proof
@pytest.mark.timeout(900)
@pytest.mark.parametrize("command", ON_GPUS)
def test_command_on_gpus_comes_to_them_without_a_fork(command: str, tmp_path: Path) -> None:
    _assert_it_came_to_the_gpu(*_ended(tmp_path, *ON_GPUS[command](tmp_path), gpus=2))


def test_ranks_of_a_pool_on_cpus_see_no_gpu(pools: Callable[[int], Pool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    pools(1).start()
    (seen,) = pools(1).run(_visible)
    assert seen == list(NO_GPUS.values())
    assert _visible() != seen, "this process sees those that it saw before"


def _visible() -> list[str | None]:
    return [os.environ.get(name) for name in NO_GPUS]


def test_ranks_are_not_forked_from_the_server_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have counted GPUs, and has imported nothing for us."""
    assert module._context("cpu")[0].get_start_method() == "forkserver"
    monkeypatch.setattr(module, "_own", set())
    assert module._context("cpu")[0].get_start_method() == "spawn"
    module.stop_forking()  # nor is it ended
    assert module._context("cpu")[0].get_start_method() == "spawn"

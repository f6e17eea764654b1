"""What a user types on a machine with a GPU, each from empty caches: it proves itself, trains, and says so.

The same commands with a GPU that is only pretended, where there is none: `tests/verify/test_pretended_gpu.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.one_step import adapter, meshlora, on_trainer, rl_file, run_file
from tests.processes import Started
from tests.run_files import TINY, metrics_of

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


def _said(folder: Path, *words: str) -> str:
    """What `python WORDS` says, once it has ended well."""
    with Started(folder, *words) as run:
        code, out, err = run.end(timeout_s=240)
    assert code == 0, out + err
    return out


def test_train_proves_itself_on_cpus_and_on_its_gpu(tmp_path: Path) -> None:
    said = _said(tmp_path, *meshlora("train", run_file(tmp_path)))
    assert said.count(" proved in ") == 2, said


def test_train_of_a_bfloat16_base_proves_itself_too(tmp_path: Path) -> None:
    said = _said(tmp_path, *meshlora("train", run_file(tmp_path, model={"dtype": "bfloat16"}, preflight="device")))
    assert said.count(" proved in ") == 2, said


COMMANDS: dict[str, Callable[[Path], list[str]]] = {
    "train, a launched rank": lambda folder: meshlora("train", run_file(folder), "--nproc", "1", "--no-preflight"),
    "check": lambda folder: meshlora("check", run_file(folder, preflight="device"), "--prove"),
    "verify": lambda _: meshlora("verify", "--family", "llama", "--topology", "", "--device", "cuda", "--steps", "1"),
    "evaluate": lambda folder: meshlora("evaluate", run_file(folder), "--adapter", adapter(folder)),
    "generate": lambda _: meshlora("generate", "--model", str(TINY), "--prompt", "def f(x):", "--max-new-tokens", "4"),
    "generate, a launched rank": lambda folder: meshlora(
        *("generate", "--model", str(TINY), "--adapter", adapter(folder), "--prompt", "def f(x):"),
        *("--max-new-tokens", "4", "--nproc", "1", "--topology", "dp=1"),
    ),
    "rl": lambda folder: meshlora("rl", rl_file(folder)),
    "MeshTrainer": lambda folder: on_trainer(folder, "cuda"),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_command_ends_well(command: str, tmp_path: Path) -> None:
    _said(tmp_path, *COMMANDS[command](tmp_path))


def test_losses_are_those_of_the_cpu(tmp_path: Path) -> None:
    """In float32, whose rounding is all that differs."""
    found = {}
    for device in ("cuda", "cpu"):
        folder = tmp_path / device
        folder.mkdir()
        file = run_file(folder, device=device, train={"steps": 8, "log_every": 1, "lr": 1e-2})
        _said(folder, *meshlora("train", file, "--no-preflight"))
        found[device] = [line["loss"] for line in metrics_of(folder / "run") if "loss" in line]
    assert len(found["cpu"]) == 8
    assert found["cuda"] == pytest.approx(found["cpu"], rel=1e-3)

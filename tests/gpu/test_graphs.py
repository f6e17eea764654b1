"""`train.cuda_graphs` on a GPU: real records. What a CPU shows of them: `tests/ranks/test_graphs.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from meshlora.run.graphs.recorder import CudaRecorder, Run
from meshlora_judge.compare import largest_loss_gap, read_losses
from meshlora_judge.inputs import write_twin
from meshlora_judge.twin import twin_config
from tests.ranks.test_trainer import _train
from tests.run_files import TINY, copy_lines, copy_tokenizer, write_run_file

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """[records, replays]."""
    found, record = [0, 0], CudaRecorder.record

    def counting(recorder: CudaRecorder, run: Run) -> Run:
        replay = record(recorder, run)
        found[0] += 1

        def count() -> None:
            found[1] += 1
            replay()

        return count

    monkeypatch.setattr(CudaRecorder, "record", counting)
    return found


MODELS: dict[str, dict[str, str]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "float8": {"dtype": "bfloat16", "compute": "fp8"},
    "fused": {"dtype": "bfloat16", "kernels": "fused"},
    "fused, float8": {"dtype": "bfloat16", "kernels": "fused", "compute": "fp8"},
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.liger) if "fused" in name else name for name in MODELS]
)
@pytest.mark.parametrize("packing", [False, "auto", True])
def test_replayed_steps_are_the_eager_ones(name: str, packing: Any, tmp_path: Path, counted: list[int]) -> None:
    """The first replay of each record has compared all gradients. Joined rows have a kernel for records in bfloat16
    alone: in float32 `auto` runs on without."""
    copy_lines("train", tmp_path / "train.jsonl", 0, 19)
    losses = {}
    for wanted in ("off", "auto"):
        options = {"steps": 12, "batch_size": 7, "micro_batch_size": 2, "cuda_graphs": wanted}
        file = write_run_file(
            tmp_path / f"{wanted}.yaml",
            model=MODELS[name],
            data={"packing": packing},
            train=options,
            topology="",
            device="cuda",
        )
        _train(file, 1)
        losses[wanted] = read_losses(tmp_path / wanted / "metrics.jsonl")
    assert largest_loss_gap(losses["auto"], losses["off"]) < (1e-4 if name == "float32" else 3e-2)
    records, replays = counted
    if name != "float32" or packing is False:
        assert records
        assert replays > records


@pytest.mark.parametrize("packing", [False, "auto"])
def test_replayed_steps_of_a_mixture_are_the_eager_ones(packing: Any, tmp_path: Path, counted: list[int]) -> None:
    """In bfloat16 on GPUs of compute capability 9 and 10; on others `auto` runs on without."""
    copy_lines("train", tmp_path / "train.jsonl", 0, 19)
    size = json.loads((TINY / "config.json").read_text())["vocab_size"]
    config = twin_config("qwen3_moe", vocab_size=size, max_position_embeddings=256)
    write_twin(config, tmp_path / "base", dtype=torch.bfloat16, seed=0)
    copy_tokenizer(tmp_path / "base")
    losses = {}
    for wanted in ("off", "auto"):
        file = write_run_file(
            tmp_path / f"{wanted}.yaml",
            model={"path": str(tmp_path / "base"), "dtype": "bfloat16"},
            lora={"r": 8, "target_modules": ["q_proj", "o_proj"], "target_parameters": ["mlp.experts.gate_up_proj"]},
            data={"packing": packing},
            train={"steps": 12, "batch_size": 7, "micro_batch_size": 2, "cuda_graphs": wanted},
            topology="",
            device="cuda",
        )
        _train(file, 1)
        losses[wanted] = read_losses(tmp_path / wanted / "metrics.jsonl")
    assert largest_loss_gap(losses["auto"], losses["off"]) < 3e-2
    records, replays = counted
    if torch.cuda.get_device_capability()[0] in (9, 10):
        assert records
        assert replays > records


@pytest.mark.parametrize(
    ("recompute", "kernels", "dropout"),
    [
        *(("full", "none", 0.1), ("keep_attention", "none", 0.1)),
        *(pytest.param(recompute, "fused", 0.0, marks=pytest.mark.liger) for recompute in ("none", "keep_attention")),
    ],
)
def test_micro_batches_of_one_length_replay(
    recompute: str, kernels: str, dropout: float, tmp_path: Path, counted: list[int]
) -> None:
    """Recomputed, and with our kernels. The first of a step runs without a record, the second is recorded in the same
    step: nothing of the graph of the first may be there any more."""
    copy_lines("train", tmp_path / "train.jsonl", 0, 19)
    losses = {}
    for wanted in ("off", "on"):
        options = {"steps": 6, "batch_size": 4, "micro_batch_size": 1, "cuda_graphs": wanted, "recompute": recompute}
        file = write_run_file(
            tmp_path / f"{wanted}.yaml",
            model={"dtype": "bfloat16", "kernels": kernels},
            lora={"r": 4, "target_modules": "all-linear", "lora_dropout": dropout},
            data={"packing": False, "max_length": 48},
            train=options,
            topology="",
            device="cuda",
        )
        _train(file, 1)
        losses[wanted] = read_losses(tmp_path / wanted / "metrics.jsonl")
    assert largest_loss_gap(losses["on"], losses["off"]) < 3e-2
    records, replays = counted
    assert records
    assert replays > records

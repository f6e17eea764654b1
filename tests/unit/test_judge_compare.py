"""Comparing results by their folders: as texts too, and a folder that is none is named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from meshlora_ground.errors import UserError
from meshlora_judge.compare import compare_adapters, read_losses


def test_folders_may_be_given_as_texts(tmp_path: Path) -> None:
    for name, value in (("a", 1.0), ("b", 1.5)):
        (tmp_path / name).mkdir()
        save_file({"w": torch.full((2,), value)}, tmp_path / name / "adapter_model.safetensors")
    (tmp_path / "metrics.jsonl").write_text('{"loss": 2.0}\n{"eval_loss": 1.0}\n')
    assert compare_adapters(f"{tmp_path}/a", tmp_path / "b").relative == pytest.approx(1 / 3)
    assert read_losses(f"{tmp_path}/metrics.jsonl") == [2.0]
    with pytest.raises(UserError, match=r"adapter .*/c: it holds no adapter_model.safetensors"):
        compare_adapters(f"{tmp_path}/a", f"{tmp_path}/c")

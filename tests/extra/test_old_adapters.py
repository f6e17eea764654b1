"""Folders of PEFT before safetensors, with an adapter_model.bin: read as tensors alone, by every command."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import meshlora
from meshlora.adapter.formats.adapter_file import read_adapter_tensors
from meshlora.cli.main import main
from meshlora_ground.errors import UserError
from tests.for_each import for_each
from tests.twins import make_batches, make_twin

WEIGHTS, OLD = "adapter_model.safetensors", "adapter_model.bin"


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`model`, `adapter`, and `old`: the adapter as PEFT wrote it once."""
    folder = make_twin(tmp_path_factory.mktemp("old") / "twin", "llama")
    shutil.copytree(folder / "adapter", folder / "old")
    torch.save(load_file(folder / "old" / WEIGHTS), folder / "old" / OLD)
    (folder / "old" / WEIGHTS).unlink()
    return folder


def _logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model.eval()(input_ids=make_batches().input_ids).logits
    return found


def test_an_old_folder_is_read_and_saved_as_safetensors(twin: Path, tmp_path: Path) -> None:
    old = meshlora.load(twin / "model", adapter=twin / "old")
    assert torch.equal(_logits(old), _logits(meshlora.load(twin / "model", adapter=twin / "adapter")))
    meshlora.save_adapter(old, tmp_path / "saved")
    assert not (tmp_path / "saved" / OLD).exists()
    saved, given = load_file(tmp_path / "saved" / WEIGHTS), load_file(twin / "adapter" / WEIGHTS)
    assert saved.keys() == given.keys()
    assert all(torch.equal(saved[key], given[key].to(saved[key].dtype)) for key in given)


def test_commands_read_an_old_folder(twin: Path, tmp_path: Path) -> None:
    assert main(["export", str(twin / "old"), "--layout", "peft", "--out", str(tmp_path / "peft")]) == 0
    exported = load_file(tmp_path / "peft" / WEIGHTS)
    assert all(torch.equal(exported[key], value) for key, value in load_file(twin / "adapter" / WEIGHTS).items())
    for name in ("old", "adapter"):
        out = str(tmp_path / f"merged-{name}")
        assert main(["merge", "--model", str(twin / "model"), "--adapter", str(twin / name), "--out", out]) == 0
    one, other = (load_file(tmp_path / f"merged-{name}" / "model.safetensors") for name in ("old", "adapter"))
    assert all(torch.equal(one[key], other[key]) for key in one)
    assert main(["inspect", str(twin / "old")]) == 0


class _Runs:
    def __reduce__(self) -> Any:
        return os.mkdir, ("ran",)


@for_each(
    ("content", "words"),
    [
        ({"x": _Runs()}, "weights_only=True"),
        ([torch.zeros(1)], "no dict from names to tensors"),
        ({"base_model.model.q.lora_A.weight": torch.zeros(1).expand(2**40)}, "no plain tensor"),
        ({"base_model.model.q.lora_A.weight": torch.tensor([float("nan")])}, "not finite"),
    ],
)
def test_what_is_more_than_tensors_is_refused_and_not_run(
    content: Any, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(content, tmp_path / OLD)
    with pytest.raises(UserError, match=words):
        read_adapter_tensors(tmp_path / WEIGHTS)
    assert not (tmp_path / "ran").exists()


def test_safetensors_beside_it_are_what_is_read(twin: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(twin / "adapter", tmp_path / "both")
    torch.save({"x": _Runs()}, folder / OLD)
    assert read_adapter_tensors(folder / WEIGHTS).keys() == load_file(folder / WEIGHTS).keys()

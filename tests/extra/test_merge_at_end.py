"""A run that merges at its end leaves a plain checkpoint beside the adapter, or says first that it cannot."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from meshlora.cli.main import main
from meshlora_extra.merging import merge
from meshlora_ground.errors import UnsupportedError
from tests.pool import Pool, RankError
from tests.ranks.test_trainer import folder, run_and_keep_groups, run_file, small_base

__all__ = ["folder"]  # a fixture
MERGES = {
    "train__steps": 2,
    "train__warmup_steps": 0,
    "train__lr": 2e-2,
    "train__eval_every": 0,
    "train__save_every": 0,
    "train__merge_at_end": True,
}


@pytest.mark.long
def test_merged_model_lies_beside_the_adapter(
    folder: Path, pools: Callable[[int], Pool], capsys: pytest.CaptureFixture[str]
) -> None:
    file, output = run_file(folder, "merging", "tp=2", **MERGES), folder / "merging"
    pools(2).run(run_and_keep_groups, file, 2)
    ids = torch.arange(3, 19).view(1, 16)
    base = AutoModelForCausalLM.from_pretrained(small_base(), dtype="float32")
    merged = AutoModelForCausalLM.from_pretrained(output / "merged", dtype="float32")
    with torch.no_grad():
        plain = base(ids).logits
        adapted = PeftModel.from_pretrained(base, output / "adapter")(ids).logits
        ours = merged(ids).logits
    distance = float((ours - adapted).norm() / (adapted - plain).norm())
    assert distance < 0.2, "the file is bfloat16, as the base's"
    weights = (output / "merged" / "model.safetensors").read_bytes()
    shutil.rmtree(output / "merged")  # as where the run was killed in the midst of it
    assert main(["train", str(file), "--nproc", "2", "--resume", "auto"]) == 0
    said = capsys.readouterr().out
    assert said.count("all 2 steps are done") == 1
    assert f"merged: {output / 'merged'} (" in said.replace("\n", "")
    assert (output / "merged" / "model.safetensors").read_bytes() == weights


def _refused(file: Path) -> None:
    """A run on one process, whose adapter has what a plain checkpoint cannot hold."""
    with pytest.MonkeyPatch.context() as patch:

        def refuse(*_: object) -> None:
            raise UnsupportedError("LoRA on model.router", "merging it into a Router is not supported")

        patch.setattr(merge, "read_changes", refuse)
        run_and_keep_groups(file, 1)


def test_what_cannot_be_merged_ends_the_run_before_its_first_step(folder: Path, pools: Callable[[int], Pool]) -> None:
    file = run_file(folder, "not-merging", "", **MERGES)
    with pytest.raises(
        RankError, match=r"train\.merge_at_end: it would fail at the end .LoRA on model\.router: merging"
    ):
        pools(1).run(_refused, file)
    assert (folder / "not-merging" / "metrics.jsonl").read_text() == ""

"""What PEFT and torch can do on one process: proved, or refused in words; no false alarm, no traceback."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.judged import loops
from tests.judged.patients import ATTENTION, write_model
from tests.judged.ranks import assert_proved, judged, on_ranks


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With a model in it."""
    write_model(tmp_path / "model")
    return tmp_path


FEATURES: dict[str, dict[str, Any]] = {
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "modules to save": {"modules_to_save": ["lm_head"]},
    "embeddings": {"target_modules": ["embed_tokens", *ATTENTION]},
    "ranks by pattern": {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"q_proj": 32}},
    "trained biases": {"bias": "lora_only"},
}


@pytest.mark.parametrize("name", FEATURES)
def test_an_option_of_lora_is_proved(name: str, folder: Path) -> None:
    on_ranks(loops.plain, folder, "", FEATURES[name], world=1)
    assert_proved(folder)


pytestmark = pytest.mark.long

HOW = ["checkpointing", "reentrant", "two adapters", "autocast", "compiled"]


@pytest.mark.parametrize("how", HOW)
def test_a_way_of_running_is_proved(how: str, folder: Path) -> None:
    on_ranks(loops.otherwise, folder, how, world=1)
    assert_proved(folder)


def test_a_quantised_base_is_proved_or_refused_in_words(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    on_ranks(loops.otherwise, folder, "nf4", world=1)
    code, _ = judged(folder)
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert code == 2
    assert said.startswith("error: "), said
    assert "quant" in said

"""Presets: the values of others' recipes, and that the run file wins."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from meshlora.common.errors import UserError
from meshlora.config.file import read_run
from meshlora.config.objective import Sft
from meshlora.config.presets import PRESETS
from meshlora.config.run import RunConfig

BARE = {"preset": "microsoft-e2e", "model": {"path": "gpt2"}, "data": {"train": "x"}, "train": {"output": "out"}}


def read(folder: Path, *overrides: str, **groups: object) -> RunConfig:
    (folder / "run.yaml").write_text(yaml.safe_dump({**BARE, **groups}))
    return read_run(folder / "run.yaml", list(overrides))


def test_microsoft_e2e_is_the_recipe_of_the_paper(tmp_path: Path) -> None:
    """E2E with GPT-2, as examples/NLG of microsoft/LoRA runs it; its decoding too."""
    run = read(tmp_path)
    train, lora, generate = run.train, run.lora, run.generate
    assert lora is not None
    assert (train.lr, train.beta1, train.beta2, train.eps, train.weight_decay) == (2e-4, 0.9, 0.999, 1e-6, 0.01)
    assert (train.warmup_steps, train.epochs, train.steps, train.batch_size) == (500, 5, None, 8)
    assert (train.schedule, train.objective, train.max_grad_norm) == ("linear", Sft(label_smoothing=0.1), 0)
    assert (train.min_lr, train.decay_biases_and_norms, train.lora_plus_ratio) == (0, True, None)
    assert (lora["r"], lora["lora_alpha"], lora["lora_dropout"]) == (4, 32, 0.1)
    assert (lora["target_modules"], lora["pieces"]) == (["c_attn"], {"c_attn": ["q", "v"]})
    assert (run.data.max_length, run.data.loss_on) == (512, "completion")
    assert (generate.num_beams, generate.length_penalty, generate.no_repeat_ngram_size) == (10, 0.8, 4)
    assert not generate.do_sample


def test_values_of_the_file_and_of_the_command_line_win(tmp_path: Path) -> None:
    run = read(tmp_path, "train.eps=1e-8", train={"output": "out", "lr": 1e-3}, lora={"r": 8})
    assert (run.train.lr, run.train.eps, run.train.beta2, run.train.batch_size) == (1e-3, 1e-8, 0.999, 8)
    assert run.lora is not None
    assert (run.lora["r"], run.lora["lora_alpha"]) == (8, 32)


def test_steps_of_the_file_take_the_place_of_the_epochs(tmp_path: Path) -> None:
    run = read(tmp_path, "train.steps=300")
    assert (run.train.steps, run.train.epochs) == (300, None)


def test_targets_of_the_file_take_the_place_of_targets_and_pieces(tmp_path: Path) -> None:
    run = read(tmp_path, lora={"target_modules": ["q_proj", "v_proj"]})
    assert run.lora is not None
    assert run.lora["target_modules"] == ["q_proj", "v_proj"]
    assert "pieces" not in run.lora


def test_an_adapter_to_go_on_from_keeps_its_own_options(tmp_path: Path) -> None:
    run = read(tmp_path, adapter="./some/adapter")
    assert (run.lora, run.adapter, run.train.lr) == (None, "./some/adapter", 2e-4)


def test_unknown_preset_names_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"'microsoft'.*no such preset.*microsoft-e2e"):
        read(tmp_path, preset="microsoft")


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_made_of_known_keys(name: str, tmp_path: Path) -> None:
    assert read(tmp_path, preset=name).preset == name

"""`meshlora judge adapter --run`: an adapter's file beside the recording of its training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

import meshlora_judge
from meshlora_judge.adapter_files.verdict import judge_folder
from meshlora_judge.command import main
from meshlora_judge.recording.files import Recording, Step
from meshlora_judge.recording.recorder import _plain_config
from tests.for_each import for_each
from tests.unit.test_names_in_file import RENAMED, _adapter, _model

SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the recording `seen` of two steps, and adapters saved after each: `0`, `1`, `2`."""
    root = tmp_path_factory.mktemp("trained")
    torch.manual_seed(0)
    base = LlamaForCausalLM(LlamaConfig(vocab_size=40, **SIZES))
    model: Any = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    model.save_pretrained(root / "0")
    with meshlora_judge.record(model, root / "seen", steps=2):
        for step in (1, 2):
            ids = torch.randint(0, 40, (2, 8))
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            model.save_pretrained(root / f"{step}")
    return root


def test_the_adapter_of_the_last_recorded_step_is_sound(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And it says so from the command line, with the recording and without."""
    for words in ([], ["--run", f"{trained / 'seen'}"]):
        assert main(["adapter", f"{trained / '2'}", *words]) == 0
        assert "sound" in capsys.readouterr().out
    assert main(["adapter", f"{trained / '1'}", "--run", f"{trained / 'seen'}"]) == 1
    assert "of step 1" in capsys.readouterr().err


def _without_one(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[next(key for key in tensors if "lora_B" in key)]


def _half(tensors: dict[str, torch.Tensor]) -> None:
    key = next(key for key in tensors if "lora_B" in key)
    tensors[key][len(tensors[key]) // 2 :] = 0


def _doubled(tensors: dict[str, torch.Tensor]) -> None:
    for key in tensors:
        tensors[key] *= 2


@for_each(
    ("change", "said"),
    [
        (_without_one, "not saved, of 8 trained tensors"),
        (_half, "a shard: part 1 of 2 of dim 0, the others zero"),
        (_doubled, "scaled by 2"),
    ],
    ids=["one is missing", "half of one is zero", "all are doubled"],
)
def test_a_file_that_is_not_what_was_trained_is_named(
    change: Callable[[dict[str, torch.Tensor]], None], said: str, trained: Path, tmp_path: Path
) -> None:
    (tmp_path / "adapter_config.json").write_bytes((trained / "2" / "adapter_config.json").read_bytes())
    tensors = load_file(trained / "2" / "adapter_model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    verdict = judge_folder(tmp_path, run=trained / "seen")
    assert not verdict.is_sound
    assert said in verdict.words()


def test_the_adapter_of_an_earlier_step_is_named(trained: Path) -> None:
    for step in (0, 1):
        verdict = judge_folder(trained / f"{step}", run=trained / "seen")
        assert f"what is saved is of step {step}, of 8 trained tensors" in verdict.words()


@for_each("family", RENAMED)
def test_tensors_that_peft_renames_are_found_under_the_names_it_loads(family: str, tmp_path: Path) -> None:
    """In their file they have other names than in the training; one of other values is named all the same."""
    options, module, written = RENAMED[family]
    planned = _adapter(family, **options)
    names = {target.in_file[0]: target.in_file[1] for target in planned.targets.values() if target.in_file[0]}
    assert names[module] == written
    wrapped: Any = get_peft_model(_model(family), planned.stored)
    trained, saved = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    for name, parameter in wrapped.named_parameters():
        if parameter.requires_grad:
            trained[name] = torch.randn(parameter.shape)
    for key, of_name in get_peft_model_state_dict(wrapped, state_dict=trained).items():
        own = next((own for own in names if key.startswith(f"base_model.model.{own}.")), "")
        saved[key.replace(own, names[own]) if own else key] = of_name
    config, before = _plain_config(wrapped.get_base_model().config), {n: value.clone() for n, value in trained.items()}
    Recording(rank=0, world_size=1, config=config, steps=[Step(before=before, after=trained)]).write(tmp_path / "seen")
    planned.stored.save_pretrained(tmp_path)
    save_file(saved, tmp_path / "adapter_model.safetensors")
    assert judge_folder(tmp_path, run=tmp_path / "seen").is_sound
    saved[next(key for key in saved if written in key)] *= 2
    save_file(saved, tmp_path / "adapter_model.safetensors")
    assert "scaled by 2, of" in judge_folder(tmp_path, run=tmp_path / "seen").words()


@for_each(
    ("config", "said"),
    [
        ({"model_type": "of tomorrow"}, "has no model_type 'of tomorrow', so trained tensors are looked for under"),
        ({}, "has no model_type None, so"),
        ({"model_type": "llama", "hidden_size": "wide"}, "cannot build its llama ("),
    ],
)
def test_a_model_that_cannot_be_asked_for_names_is_said(
    config: dict[str, Any], said: str, trained: Path, tmp_path: Path
) -> None:
    """Where a name is not found PEFT may have changed it, and then the finding itself may be wrong."""
    value = {"base_model.model.model.layers.0.mlp.other.lora_A.default.weight": torch.ones(4, 16)}
    after = {name: 2 * one for name, one in value.items()}
    Recording(rank=0, world_size=1, config=config, steps=[Step(before=value, after=after)]).write(tmp_path / "seen")
    verdict = judge_folder(trained / "2", run=tmp_path / "seen")
    assert "not saved, of 1 trained tensors" in verdict.words()
    assert said in verdict.words()
    assert [note["kind"] for note in verdict.as_json()["notes"]] == ["names"]
    assert "Note: " not in judge_folder(trained / "1", run=trained / "seen").words(), "all names are there"

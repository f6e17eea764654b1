"""Presets: the values of others' recipes, and that the run file wins."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import yaml

from meshlora.run.config.file import read_run
from meshlora.run.config.presets import presets, resolved
from meshlora.run.config.run_file import RunConfig
from meshlora_ground.errors import UserError
from meshlora_ground.objective import Sft
from meshlora_ground.objectives.preferences import Dpo
from tests.run_files import TINY
from tests.same_sequences import assert_same_sequences

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
    assert (run.data.max_length, run.data.train_on) == (512, "all")
    assert (run.data.separator, run.model.disable_dropout, train.warmup_from_zero) == ("<|endoftext|>", True, True)
    assert (generate.num_beams, generate.length_penalty, generate.no_repeat_ngram_size) == (10, 0.8, 4)
    assert (generate.search, generate.max_new_tokens, generate.stop) == ("gpt2_beam", 64, ["\n\n"])
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


def on(folder: Path, preset: str, config: dict[str, object], **groups: object) -> RunConfig:
    """The run of a preset on a model with this config.json."""
    (folder / "base").mkdir(exist_ok=True)
    (folder / "base" / "config.json").write_text(json.dumps(config))
    own: dict[str, object] = {"model": {"path": str(folder / "base")}, "train": {"output": "out", "steps": 9}}
    return read(folder, preset=preset, **(own | groups))


@pytest.mark.parametrize(
    ("config", "lr"),
    [
        # 5e-5 * 10 * (2000 / hidden) ** exponent, by hand.
        ({"model_type": "llama", "hidden_size": 4096}, 2.856e-4),
        ({"model_type": "qwen3", "hidden_size": 4096}, 4.729e-4),
        ({"model_type": "qwen3_5", "text_config": {"model_type": "qwen3_5_text", "hidden_size": 2560}}, 4.905e-4),
    ],
)
def test_lora_without_regret_has_the_rate_of_tinkers_formula(
    config: dict[str, object], lr: float, tmp_path: Path
) -> None:
    run = on(tmp_path, "lora-without-regret", config)
    train = run.train
    assert train.lr == pytest.approx(lr, rel=1e-3)
    assert (train.beta1, train.beta2, train.eps, train.weight_decay, train.max_grad_norm) == (0.9, 0.95, 1e-12, 0, 0)
    assert (train.schedule, train.batch_size) == ("constant", 32)
    assert run.lora == {"r": 32, "lora_alpha": 32, "lora_dropout": 0.0, "target_modules": "all-linear"}


def test_experts_have_the_rank_divided_by_how_many_a_token_sees(tmp_path: Path) -> None:
    config: dict[str, object] = {"model_type": "qwen3_moe", "hidden_size": 2048, "num_experts_per_tok": 8}
    lora = on(tmp_path, "lora-without-regret", config).lora
    assert lora is not None
    assert (lora["r"], lora["lora_alpha"]) == (32, 32)
    assert lora["rank_pattern"] == dict.fromkeys(["experts.gate_up_proj", "experts.down_proj"], 4)
    assert lora["target_parameters"] == ["experts.gate_up_proj", "experts.down_proj"]
    wider = on(tmp_path, "lora-without-regret", config, lora={"r": 64}).lora
    assert wider is not None
    assert wider["rank_pattern"]["experts.down_proj"] == 8
    other = on(tmp_path, "lora-without-regret", config, lora={"target_modules": ["q_proj"]}).lora
    assert other == {"r": 32, "lora_alpha": 32, "lora_dropout": 0.0, "target_modules": ["q_proj"]}


def test_rate_of_another_family_is_asked_for(tmp_path: Path) -> None:
    config: dict[str, object] = {"model_type": "gemma3_text", "hidden_size": 640}
    with pytest.raises(UserError, match=r"known for llama and qwen, and this is gemma3_text.*give train.lr"):
        on(tmp_path, "lora-without-regret", config)
    train = {"output": "out", "steps": 9, "lr": 1e-3}
    assert on(tmp_path, "lora-without-regret", config, train=train).train.lr == 1e-3


@pytest.mark.parametrize(("width", "lr", "dropout"), [(5120, 2e-4, 0.1), (6656, 1e-4, 0.05)])
def test_qlora_is_the_recipe_of_its_paper(width: int, lr: float, dropout: float, tmp_path: Path) -> None:
    run = on(tmp_path, "qlora", {"model_type": "llama", "hidden_size": width})
    train = run.train
    assert run.model.quantization == "nf4"
    assert run.lora == {"r": 64, "lora_alpha": 16, "lora_dropout": dropout, "target_modules": "all-linear"}
    assert (train.lr, train.schedule, train.batch_size, train.max_grad_norm) == (lr, "constant", 16, 0.3)
    assert (train.beta1, train.beta2, train.weight_decay) == (0.9, 0.999, 0)


def test_dpo_is_the_recipe_of_the_alignment_handbook(tmp_path: Path) -> None:
    run = read(tmp_path, preset="dpo")
    train, lora = run.train, run.lora
    assert (train.objective, train.lr, train.schedule) == (Dpo(beta=0.01), 5e-6, "cosine")
    assert (train.epochs, train.batch_size, run.data.max_length) == (1, 16, 1024)
    assert (train.warmup_ratio, train.warmup_from_zero) == (0.1, True)
    assert "warmup_ratio 0.1, warmup_from_zero True" in resolved(run)
    in_whole_steps = dataclasses.replace(train, warmup_ratio=0.0, warmup_steps=9)
    assert "warmup_steps 9, warmup_from_zero True" in resolved(dataclasses.replace(run, train=in_whole_steps))
    own = read(tmp_path, preset="dpo", train={"output": "out", "warmup_steps": 7}).train
    assert (own.warmup_steps, own.warmup_ratio) == (7, 0.0)
    assert lora is not None
    assert (lora["r"], lora["lora_alpha"], lora["lora_dropout"], len(lora["target_modules"])) == (128, 128, 0.05, 7)


def test_a_model_that_cannot_be_read_is_said_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere': there is no such folder"):
        read(tmp_path, preset="qlora", model={"path": str(tmp_path / "nowhere")})


@pytest.mark.parametrize("name", presets())
def test_every_preset_is_made_of_known_keys(name: str, tmp_path: Path) -> None:
    run = on(tmp_path, name, {"model_type": "llama", "hidden_size": 4096})
    assert run.preset == name


@pytest.mark.parametrize("preset", presets())
def test_train_and_evaluate_read_the_same_sequences(preset: str, tmp_path: Path) -> None:
    """Of the same texts in one form that the preset trains on, and in another."""
    texts = [("name : Aromi", "Aromi is Thai."), ("name : Strada", "A place named Strada.")]
    if preset == "dpo":
        rows = [{"prompt": prompt, "chosen": f" {answer}", "rejected": " no"} for prompt, answer in texts]
        others = [{"chosen": row["prompt"] + row["chosen"], "rejected": row["prompt"] + " no"} for row in rows]
    else:
        rows = [{"prompt": prompt, "completion": f" {answer}"} for prompt, answer in texts]
        others = [{"context": prompt, "completion": answer} for prompt, answer in texts]
    for name, records in {"one": rows, "other": others}.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in records))
    file = tmp_path / "run.yaml"
    groups = {"model": {"path": str(TINY)}, "data": {"train": "x", "cache_dir": str(tmp_path / "cache")}}
    file.write_text(yaml.safe_dump({"preset": preset, **groups, "train": {"output": "out", "epochs": 1, "lr": 1e-4}}))
    assert_same_sequences(file, tmp_path / "one.jsonl", tmp_path / "other.jsonl")

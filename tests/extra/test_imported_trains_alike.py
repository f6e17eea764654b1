"""A run file that was imported trains what the other trainer's own package does with the recipe, on one process.

A batch is the whole set, so that no order matters, and both begin from the same adapter. Does not show: packing, and
trainers whose packages cannot be installed beside ours.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from meshlora.cli.main import main
from tests.run_files import TINY, metrics_of

_ROWS, _FILE = 8, "adapter_model.safetensors"
_RECIPE: dict[str, Any] = {
    "model_name_or_path": str(TINY),
    "dataset_name": "train.jsonl",
    "use_peft": True,
    "lora_r": 4,
    "lora_alpha": 16,
    "lora_dropout": 0.0,
    "dtype": "float32",
    "bf16": False,
    "learning_rate": 3e-3,
    "weight_decay": 0.05,
    "adam_beta2": 0.95,
    "adam_epsilon": 1e-5,  # else Adam makes steps of the float32 noise of their loss where a gradient is none
    "lr_scheduler_type": "cosine",
    "warmup_steps": 2,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "num_train_epochs": 6,
    "max_length": 80,
    "max_grad_norm": 0.5,
    "logging_steps": 1,
    "activation_checkpointing": False,
    "use_cpu": True,
    "seed": 3,
    "output_dir": "theirs",
}
# Keys of TRL's scripts that its configurations have not: of the model and the data.
_OF_SCRIPT = ("model_name_or_path", "dataset_name", "use_peft", "lora_r", "lora_alpha", "lora_dropout", "dtype")


def _rows(kind: str) -> list[dict[str, Any]]:
    questions = [f"Return the {'sum of ' * (k % 5)}item {k * 7} of the list." for k in range(_ROWS)]
    answers = [f"The item is {k} " + "and more " * (k % 3) for k in range(_ROWS)]
    if kind == "conversations":
        turns = [("user", "assistant")] * _ROWS
        return [
            {"messages": [{"role": user, "content": q}, {"role": assistant, "content": a}]}
            for (user, assistant), q, a in zip(turns, questions, answers, strict=True)
        ]
    if kind == "pairs":
        return [
            {"prompt": q, "chosen": f" {a}", "rejected": " no" * (k % 4 + 1)}
            for k, (q, a) in enumerate(zip(questions, answers, strict=True))
        ]
    return [{"prompt": q, "completion": f" {a}"} for q, a in zip(questions, answers, strict=True)]


def _theirs(kind: str, recipe: dict[str, Any], folder: Path) -> list[float]:
    """Train with TRL; the loss of each step. Its adapter before and after is in `first` and `theirs`."""
    import trl

    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float64)
    config = LoraConfig(
        r=4, lora_alpha=16, lora_dropout=0.0, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"
    )
    torch.manual_seed(0)
    adapted = get_peft_model(model, config)
    adapted.save_pretrained(folder / "first")
    arguments = {key: value for key, value in recipe.items() if key not in _OF_SCRIPT}
    arguments |= {"save_strategy": "no", "report_to": [], "disable_tqdm": True, "output_dir": str(folder / "theirs")}
    cls, options = (trl.DPOTrainer, trl.DPOConfig) if kind == "pairs" else (trl.SFTTrainer, trl.SFTConfig)
    trainer = cls(
        model=adapted,
        args=options(**arguments),
        train_dataset=Dataset.from_list(_rows(kind)),
        processing_class=AutoTokenizer.from_pretrained(TINY),
    )
    trainer.train()
    trainer.model.save_pretrained(folder / "theirs")
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "own"),
    [
        ("completions", {}),
        ("conversations", {"assistant_only_loss": False}),
        ("pairs", {"beta": 0.2, "learning_rate": 1e-3}),
    ],
)
def test_an_imported_run_has_the_losses_and_the_adapter_of_trl(
    kind: str, own: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in _rows(kind)))
    recipe = _RECIPE | own
    theirs = _theirs(kind, recipe, tmp_path)
    given = recipe | ({"completion_only_loss": True} if kind == "completions" else {})  # their default of such rows
    (tmp_path / "trl.yaml").write_text(yaml.safe_dump(given))
    assert main(["import", "trl.yaml"]) == 0
    tree = yaml.safe_load((tmp_path / "run.yaml").read_text())
    tree.pop("lora")
    tree["adapter"] = "first"
    tree["model"]["dtype"] = "float64"  # both sides, as the base above
    tree["train"] |= {"output": "ours"}
    tree["data"] |= {"cache_dir": "cache"}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree))
    assert main(["train", "run.yaml", "--no-preflight"]) == 0
    ours = [line["loss"] for line in metrics_of(tmp_path / "ours") if "loss" in line]
    assert len(ours) == len(theirs) == 6
    assert ours == pytest.approx(theirs, abs=1e-5)
    own, other = load_file(tmp_path / "ours/adapter" / _FILE), load_file(tmp_path / "theirs" / _FILE)
    assert own.keys() == other.keys()
    for name, tensor in other.items():
        assert torch.allclose(own[name], tensor, rtol=0, atol=1e-5), name

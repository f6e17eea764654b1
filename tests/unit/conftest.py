"""The good run that `test_user_mistakes*.py` break, and the proof that nothing has happened when they are found; the
folders of models that tests of the export for serving engines read.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

import meshlora.loading.blueprint
import meshlora.model.weights
import meshlora.run.launch
import meshlora.run.run
from meshlora_extra.engine_export import export_per_expert
from meshlora_judge.twin import twin_config
from tests.run_files import copy_tokenizer
from tests.unit.engine_adapters import KINDS, meta, twin
from tests.unit.mistakes import Setup

# Published chat templates with what is to be trained under them, which not every machine has.
TEMPLATES = Path(os.environ.get("MESHLORA_TEMPLATES", Path(__file__).parents[3] / "shared" / "templates" / "given"))
collect_ignore = [] if TEMPLATES.is_dir() else ["test_data_given_templates.py"]


@pytest.fixture(scope="session")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that each case copies: model, tokenizer, adapter, data."""
    folder = tmp_path_factory.mktemp("good")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(twin_config("llama", vocab_size=2048), dtype=torch.float32)
    model.save_pretrained(folder / "model")
    copy_tokenizer(folder / "model")
    lora = LoraConfig(r=4, target_modules=["q_proj", "up_proj", "down_proj"])
    get_peft_model(model, lora).save_pretrained(folder / "adapter")
    for name in ("train", "eval"):
        lines = [json.dumps({"prompt": f"def f_{i}():", "completion": f" return {i}"}) for i in range(8)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture
def setups(good: Path, tmp_path: Path) -> Callable[[], Setup]:
    """Makes good runs, each in the place of the one before."""
    numbers = itertools.count()

    def make() -> Setup:
        number = next(numbers)
        shutil.rmtree(tmp_path / f"run{number - 1}", ignore_errors=True)
        folder = tmp_path / f"run{number}" / "case"
        shutil.copytree(good, folder)
        tree = {
            "model": {"path": str(folder / "model")},
            "data": {
                "train": str(folder / "train.jsonl"),
                "eval": str(folder / "eval.jsonl"),
                "max_length": 64,
                "cache_dir": str(folder.parent / "cache"),
            },
            "train": {"output": str(folder / "output"), "steps": 4, "batch_size": 4, "lr": 1e-3},
            "lora": {"r": 4, "target_modules": ["q_proj", "up_proj"]},
            "topology": "tp=2",
            "device": "cpu",
        }
        return Setup(folder, tree)

    return make


@pytest.fixture
def setup(setups: Callable[[], Setup]) -> Setup:
    return setups()


@pytest.fixture
def nothing_has_happened_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """No rank, no weight: a mistake must be found without them."""
    import meshlora_extra.merging.merge  # noqa: F401  # it takes `read_slice` by name: not that of a test

    def too_late(*_: Any, **__: Any) -> None:
        raise AssertionError("the mistake went unnoticed until ranks were started or weights were read")

    monkeypatch.setattr(meshlora.run.launch, "launch", too_late)
    monkeypatch.setattr(meshlora.run.run, "train", too_late)
    read, has_own_head = meshlora.model.weights.read_slice, meshlora.model.weights.has_own_head

    def own_head(folder: Path) -> bool:  # to know which model it is
        with monkeypatch.context() as while_it_compares:
            while_it_compares.setattr(meshlora.model.weights, "read_slice", read)
            return has_own_head(folder)

    monkeypatch.setattr(meshlora.loading.blueprint, "has_own_head", own_head)
    monkeypatch.setattr(meshlora.model.weights, "read_slice", too_late)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Family -> folder that holds its config.json, and no weights."""
    root = tmp_path_factory.mktemp("models")

    def make(family: str) -> Path:
        if not (root / family).is_dir():
            twin(family).config.save_pretrained(root / family)
        return root / family

    return make


@pytest.fixture(scope="session")
def engine(models: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter of qwen3_moe with one pair of factors for each expert."""
    folder = tmp_path_factory.mktemp("engine")
    export_per_expert(KINDS["qwen3_moe"][1](folder / "adapter"), folder / "engine", **meta(models("qwen3_moe")))
    return folder / "engine"

"""`meshlora.hf.MeshTrainer` ends where transformers' Trainer with PEFT ends on one process, in float64."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq, Trainer, TrainingArguments

import meshlora
from meshlora.common.errors import UserError
from meshlora.oracle.compare import compare_adapters
from meshlora.plan.topology import Topology
from tests.pool import Pool

ROOT = Path(__file__).parents[2]
BASE = str(ROOT / "examples/tiny_base")
LIMIT = 1e-9


def _rows(number: int, seed: int) -> list[dict[str, list[int]]]:
    """Rows of unequal lengths, the first third of each untrained."""
    numbers = torch.Generator().manual_seed(seed)
    found = []
    for length in torch.randint(5, 40, (number,), generator=numbers).tolist():
        ids = torch.randint(3, 200, (length,), generator=numbers).tolist()
        found.append({"input_ids": ids, "labels": [-100] * (length // 3) + ids[length // 3 :]})
    return found


def _arguments(out: Path, *, batch: int, **more: Any) -> TrainingArguments:
    """Options away from their defaults; 22 rows in batches of 4, so that the last one is smaller."""
    options = {
        "num_train_epochs": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 3e-3,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 2,
        "max_grad_norm": 0.1,
        "weight_decay": 0.1,
        "adam_beta2": 0.95,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_steps": 2,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": 7,
    }
    return TrainingArguments(
        str(out), per_device_train_batch_size=batch, per_device_eval_batch_size=batch, **{**options, **more}
    )


def _accuracy(found: Any) -> dict[str, float]:
    labels, tokens = found.label_ids[:, 1:], found.predictions.argmax(-1)[:, :-1]
    counted = labels != -100
    of_rows = [float(row[:5].sum()) for row in found.predictions]
    return {"tokens": float(tokens[counted].mean()), "logits": float(np.dot(of_rows, np.arange(len(of_rows))))}


def _trained(trainer: Trainer, resume: str | None = None) -> list[dict[str, float]]:
    with meshlora.lift():
        trainer.train(resume_from_checkpoint=resume)
    names = ("loss", "eval_loss", "grad_norm", "learning_rate", "eval_tokens", "eval_logits", "train_loss")
    return [{name: line[name] for name in names if name in line} for line in trainer.state.log_history]


def _with(model: Any, arguments: TrainingArguments, kind: Any, **options: Any) -> Any:
    collator = DataCollatorForSeq2Seq(AutoTokenizer.from_pretrained(BASE))
    data = {"train_dataset": _rows(22, 0), "eval_dataset": _rows(7, 1)}
    return kind(model=model, args=arguments, data_collator=collator, **data, **options)


def _alone(start: Path, out: Path, batch: int, metrics: bool, **more: Any) -> list[dict[str, float]]:
    """transformers and PEFT on one process."""
    model = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float64)
    model = PeftModel.from_pretrained(model, str(start), is_trainable=True)
    trainer = _with(
        model, _arguments(out, batch=batch, **more), Trainer, compute_metrics=_accuracy if metrics else None
    )
    said = _trained(trainer)
    model.save_pretrained(str(out / "adapter"))
    return said


def _on_mesh(
    topology: str, start: Path, out: Path, batch: int, metrics: bool, resume: str | None, more: dict[str, Any]
) -> list[dict[str, float]]:
    """Body of a rank."""
    from meshlora.hf import MeshTrainer

    model = meshlora.load(BASE, adapter=str(start), topology=topology, dtype="float64")
    arguments = _arguments(out, batch=batch, **more)
    trainer = _with(model, arguments, MeshTrainer, compute_metrics=_accuracy if metrics else None)
    said = _trained(trainer, resume)
    trainer.save_model(str(out / "adapter"))
    return said


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter with both factors away from zero."""
    folder = tmp_path_factory.mktemp("start") / "adapter"
    lora = LoraConfig(r=4, lora_alpha=16, target_modules="all-linear", init_lora_weights=False)
    model = meshlora.load(BASE, lora=lora, dtype="float64", seed=3)
    meshlora.save_adapter(model, folder)
    return folder


@pytest.fixture(scope="module")
def alone(start: Path, tmp_path_factory: pytest.TempPathFactory, pools: Callable[[int], Pool]) -> tuple[Path, Any]:
    out = tmp_path_factory.mktemp("alone")
    return out, pools(1).run(_alone, start, out, 4, True)[0]


@pytest.mark.parametrize(
    ("topology", "batch", "resume"),
    [
        ("tp=2,sp", 4, ""),
        # From the fourth of six steps, in the second epoch, of what Trainer and PEFT saved.
        pytest.param("dp=2", 2, "checkpoint-4", marks=pytest.mark.proof),
        pytest.param("dp=2", 2, "", marks=pytest.mark.proof),
        pytest.param("tp=2", 4, "checkpoint-2", marks=pytest.mark.proof),
        pytest.param("cp=2", 4, "", marks=pytest.mark.proof),
        pytest.param("dp=2,tp=2,sp", 2, "", marks=pytest.mark.proof),
    ],
)
def test_ends_with_the_adapter_of_trainer_and_peft(
    topology: str, batch: int, resume: str, alone: Any, start: Path, pools: Callable[[int], Pool], tmp_path: Path
) -> None:
    """With accumulation, unequal lengths, a smaller last batch, evaluation in mid-run, and resume."""
    folder, said = alone
    given = str(folder / resume) if resume else None
    ranks = pools(Topology.parse(topology).world).run(_on_mesh, topology, start, tmp_path, batch, True, given, {})
    found = ranks[0]  # rank 0 logs
    assert len(found) == len(said)
    skipped = found.index(next(line for line in found if line not in said), 0) if resume else 0
    for ours, theirs in zip(found[skipped:], said[skipped:], strict=True):
        for name, value in ours.items():
            limit = 1e-6 if name in ("loss", "train_loss") else LIMIT  # Trainer adds up losses in float32
            if not (resume and name == "train_loss"):
                assert value == pytest.approx(theirs[name], rel=limit), (name, ours, theirs)
    worst = compare_adapters(tmp_path / "adapter", folder / "adapter")
    assert worst.relative <= LIMIT, worst


@pytest.mark.proof
def test_what_a_checkpoint_holds_is_that_of_one_process(
    alone: Any, start: Path, pools: Callable[[int], Pool], tmp_path: Path
) -> None:
    """Trainer and PEFT go on from a checkpoint of two ranks."""
    folder, _ = alone
    pools(2).run(_on_mesh, "tp=2,sp", start, tmp_path, 4, False, None, {"logging_steps": 5})
    saved = str(tmp_path / "checkpoint-2")
    model = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float64)
    model = PeftModel.from_pretrained(model, saved, is_trainable=True)
    _trained(_with(model, _arguments(tmp_path / "on", batch=4), Trainer), saved)
    model.save_pretrained(str(tmp_path / "adapter"))
    worst = compare_adapters(tmp_path / "adapter", folder / "adapter")
    assert worst.relative <= LIMIT, worst


def _refused(topology: str, arguments: dict[str, Any]) -> str:
    """Body of a rank: the message with which MeshTrainer refuses its arguments."""
    from meshlora.hf import MeshTrainer

    model = meshlora.load(BASE, lora=LoraConfig(r=2, target_modules="all-linear"), topology=topology, dtype="float32")
    with pytest.raises(UserError) as caught:
        _with(model, _arguments(Path("unused"), batch=2, **arguments), MeshTrainer)
    return str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"optim": "adafactor"}, "optim=adafactor: it uses whole matrices"),
        ({"bf16": True}, "bf16=True and a base in float32"),
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha=5.0: it is not proved on a mesh"),
    ],
)
def test_what_a_mesh_cannot_keep_is_refused(arguments: dict[str, Any], said: str, pools: Callable[[int], Pool]) -> None:
    assert said in pools(2).run(_refused, "tp=2", arguments)[0]

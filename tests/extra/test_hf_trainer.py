"""`meshlora_extra.hf.MeshTrainer` ends where transformers' Trainer with PEFT ends on one process, in float64."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel
from torch.utils.data import IterableDataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import meshlora
from meshlora.plan.derive import decoder_layers
from meshlora.run import recompute
from meshlora_extra.hf.rows import SharedRows
from meshlora_ground.errors import UserError
from meshlora_ground.topology import Topology
from meshlora_judge.compare import compare_adapters
from tests.pool import Pool
from tests.ranks.masked import MaskedPeft

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


def _alone(
    start: Path, out: Path, batch: int, metrics: bool, kind: Any = Trainer, **more: Any
) -> list[dict[str, float]]:
    """transformers and PEFT on one process."""
    model = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float64)
    model = PeftModel.from_pretrained(model, str(start), is_trainable=True)
    trainer = _with(model, _arguments(out, batch=batch, **more), kind, compute_metrics=_accuracy if metrics else None)
    said = _trained(trainer)
    model.save_pretrained(str(out / "adapter"))
    return said


def _on_mesh(
    topology: str,
    start: Path,
    out: Path,
    batch: int,
    metrics: bool,
    resume: str | None,
    more: dict[str, Any],
    kind: Any = None,
) -> list[dict[str, float]]:
    """Body of a rank."""
    from meshlora_extra.hf import MeshTrainer, on_mesh

    model = meshlora.load(BASE, adapter=str(start), topology=topology, dtype="float64")
    arguments = _arguments(out, batch=batch, **more)
    made = MeshTrainer if kind is None else on_mesh(kind)
    trainer = _with(model, arguments, made, compute_metrics=_accuracy if metrics else None)
    _arguments(out / "of another trainer", batch=1)  # undoes what accelerate was told of the processes
    said = _trained(trainer, resume)
    assert trainer.accelerator.num_processes == 1
    if more.get("gradient_checkpointing"):
        functions = {layer._gradient_checkpointing_func for layer in decoder_layers(model)[1]}
        assert functions == {recompute._checkpointed}, "not transformers' own"
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


@pytest.mark.long
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
    more = {"gradient_checkpointing": topology == "tp=2,sp"}
    ranks = pools(Topology.parse(topology).world).run(_on_mesh, topology, start, tmp_path, batch, True, given, more)
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


class _Twice(Trainer):
    """A loss of a user's own, divided by the tokens of all."""

    loss_is_scaled_for_ga = True

    def compute_loss(self, *args: Any, return_outputs: bool = False, **options: Any) -> Any:
        found: Any = super().compute_loss(*args, return_outputs=return_outputs, **options)
        return (2 * found[0], *found[1:]) if return_outputs else 2 * found


def _entropies(outputs: Any, labels: Any, reduction: str) -> torch.Tensor:
    tokens, right = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return torch.nn.functional.cross_entropy(tokens, right, reduction=reduction)


class _OfFunction(Trainer):
    """With a `compute_loss_func` that divides by the tokens of all, as transformers asks for."""

    def __init__(self, *args: Any, **options: Any) -> None:
        def summed(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
            return _entropies(outputs, labels, "sum") / num_items_in_batch

        super().__init__(*args, **options, compute_loss_func=summed)


@pytest.mark.long
@pytest.mark.parametrize("kind", [pytest.param(_Twice, marks=pytest.mark.proof), _OfFunction])
def test_loss_of_a_users_own_is_that_of_one_process(
    kind: Any, start: Path, pools: Callable[[int], Pool], tmp_path: Path
) -> None:
    more = {"max_steps": 2, "eval_strategy": "no"}
    said = pools(1).run(functools.partial(_alone, **more), start, tmp_path / "alone", 4, False, kind)[0]
    found = pools(2).run(_on_mesh, "dp=2", start, tmp_path / "mesh", 2, False, None, more, kind)[0]
    for ours, theirs in zip(found[:2], said[:2], strict=True):
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=LIMIT)
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-6)
    worst = compare_adapters(tmp_path / "mesh/adapter", tmp_path / "alone/adapter")
    assert worst.relative <= LIMIT, worst


class _Masked(Trainer):
    """With the masks of dropout that a mesh has."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.masks = MaskedPeft(cast(Any, self.model), seed=self.args.seed)

    def training_step(self, *args: Any, **options: Any) -> Any:
        self.masks.step = self.state.global_step
        return super().training_step(*args, **options)


@pytest.mark.proof
@pytest.mark.parametrize(("topology", "batch"), [("tp=2,sp", 4), ("dp=2", 2)])
def test_dropout_is_that_of_one_process(
    topology: str, batch: int, pools: Callable[[int], Pool], tmp_path: Path
) -> None:
    """Also where layers run again in the backward (tp)."""
    lora = LoraConfig(r=4, lora_alpha=16, target_modules="all-linear", init_lora_weights=False, lora_dropout=0.2)
    start = tmp_path / "start"
    meshlora.save_adapter(meshlora.load(BASE, lora=lora, dtype="float64", seed=3), start)
    more = {"max_steps": 3, "eval_strategy": "no"}
    said = pools(1).run(functools.partial(_alone, **more), start, tmp_path / "alone", 4, False, _Masked)[0]
    more["gradient_checkpointing"] = topology == "tp=2,sp"
    found = pools(2).run(_on_mesh, topology, start, tmp_path / "mesh", batch, False, None, more)[0]
    for ours, theirs in zip(found[:3], said[:3], strict=True):
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=LIMIT)
    worst = compare_adapters(tmp_path / "mesh/adapter", tmp_path / "alone/adapter")
    assert worst.relative <= LIMIT, worst


class _OwnLoss(Trainer):
    def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
        return model(**inputs).loss


class _Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(_rows(4, 0))


# What a mesh refuses of arguments: (topology, what TrainingArguments are given, the message).
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("tp=2", {"optim": "adafactor"}, "optim=adafactor on tp=2: it uses whole matrices"),
    ("tp=2", {"bf16": True}, "bf16=True and a base in float32"),
    ("tp=2", {"fp16": True}, "fp16=True on tp=2: its loss scale"),
    ("tp=2", {"neftune_noise_alpha": 5.0}, "neftune_noise_alpha=5.0 on tp=2: it is not proved on a mesh"),
    ("tp=2", {"gradient_checkpointing_kwargs": {"use_reentrant": True}}, "checkpointing_kwargs="),
    ("tp=2", {"enable_jit_checkpoint": True}, "enable_jit_checkpoint=True on tp=2: it is not proved"),
    ("dp=2", {"train_sampling_strategy": "group_by_length"}, "train_sampling_strategy=group_by_length on dp=2"),
]


def _refused() -> list[str]:
    """Body of a rank: the messages with which MeshTrainer refuses arguments, and what else it is given."""
    from meshlora_extra.hf import MeshTrainer, OnMesh, on_mesh

    class Before(OnMesh, Trainer):
        compute_loss = _OwnLoss.compute_loss

    lora = LoraConfig(r=2, target_modules="all-linear")
    by_topology = {t: meshlora.load(BASE, lora=lora, topology=t, dtype="float32") for t in ("tp=2", "dp=2")}
    adafactor = (torch.optim.Adafactor, {"lr": 1.0})
    given: list[tuple[str, dict[str, Any], Any, dict[str, Any]]] = [
        *((topology, arguments, MeshTrainer, {}) for topology, arguments, _ in REFUSED),
        ("tp=2", {}, MeshTrainer, {"optimizer_cls_and_kwargs": adafactor}),
        ("tp=2", {}, Before, {}),
        ("dp=2", {}, on_mesh(_OwnLoss), {}),
        ("dp=2", {}, MeshTrainer, {"eval_dataset": _Stream()}),
        ("tp=2", {}, MeshTrainer, {"optimizers": (torch.optim.Adafactor([torch.zeros(1)]), None)}),
    ]
    said = []
    for topology, arguments, kind, options in given:
        with pytest.raises(UserError) as caught:
            kind(
                model=by_topology[topology],
                args=_arguments(Path("unused"), batch=2, **arguments),
                **{"train_dataset": _rows(4, 0), "eval_dataset": _rows(4, 0), **options},
            )
        said.append(str(caught.value))
    model = by_topology["dp=2"]
    model.accepts_loss_kwargs = False
    with pytest.raises(UserError) as caught:
        _with(model, _arguments(Path("unused"), batch=2), MeshTrainer)
    return [*said, str(caught.value)]


def test_what_a_mesh_cannot_keep_is_refused(pools: Callable[[int], Pool]) -> None:
    rights = [
        *(right for _, _, right in REFUSED),
        "the optimizer Adafactor on tp=2: it uses whole matrices",
        "compute_loss of a class before OnMesh",
        "a compute_loss of your own on dp=2",
        "an iterable dataset on dp=2",
        "the optimizer Adafactor on tp=2: it uses whole matrices",
        "its loss is a mean of a rank's own rows",
    ]
    for said, right in zip(pools(2).run(_refused)[0], rights, strict=True):
        assert right in said


@pytest.mark.parametrize("rank", [0, 1])
def test_too_few_rows_without_labels_are_refused_on_all_ranks(rank: int) -> None:
    shared = SharedRows(lambda rows: {"input_ids": torch.tensor(rows)}, cast(Any, SimpleNamespace(size=2, rank=rank)))
    assert len(shared([[1], [2]])["input_ids"]) == 1
    with pytest.raises(UserError, match="a batch of 1 rows for dp=2"):
        shared([[1]])


class _Asks(TrainerCallback):
    """One rank alone asks for the end, after the second step, before the first, or within it."""

    def __init__(self, event: str, step: int) -> None:
        def ask(args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop |= state.global_step == step and torch.distributed.get_rank() == 1

        setattr(self, event, ask)


def _precision() -> str:
    """Body of a rank: the precision of the accelerator for `bf16=True` and a base in bfloat16."""
    from meshlora_extra.hf import MeshTrainer

    lora = LoraConfig(r=2, target_modules="all-linear")
    model = meshlora.load(BASE, lora=lora, topology="tp=2", dtype="bfloat16")
    found: str = _with(model, _arguments(Path("unused"), batch=2, bf16=True), MeshTrainer).accelerator.mixed_precision
    return found


def test_bf16_is_the_dtype_of_the_base_without_autocast(pools: Callable[[int], Pool]) -> None:
    assert pools(2).run(_precision) == ["no", "no"]


def _stopped(out: Path, optim: str) -> list[int]:
    """Body of a rank: the steps until one rank stopped all; and resumed from there, those of the whole run."""
    from meshlora_extra.hf import MeshTrainer

    steps, resume = [], None
    lora = LoraConfig(r=2, target_modules="all-linear")
    model = meshlora.load(BASE, lora=lora, topology="dp=2", dtype="float32")
    for event in ("on_step_begin", "on_substep_end"):  # Trainer leaves the step that has begun
        args = _arguments(out / event, batch=2, optim=optim, max_steps=3, eval_strategy="no", save_strategy="no")
        trainer = _with(model, args, MeshTrainer, callbacks=[_Asks(event, 0)])
        _trained(trainer)
        steps.append(trainer.state.global_step)
        model.zero_grad()
    for callbacks in ([_Asks("on_step_end", 2)], []):
        args = _arguments(out, batch=2, optim=optim, max_steps=3, eval_strategy="no")
        trainer = _with(model, args, MeshTrainer, callbacks=callbacks)
        _trained(trainer, resume)
        steps.append(trainer.state.global_step)
        resume = str(out / "checkpoint-2")
    return steps


@pytest.mark.long
def test_one_rank_stops_all_and_a_run_without_moments_resumes(pools: Callable[[int], Pool], tmp_path: Path) -> None:
    """An optimizer without a state of its own leaves none in a checkpoint."""
    assert pools(2).run(_stopped, tmp_path, "sgd") == [[0, 0, 2, 3]] * 2

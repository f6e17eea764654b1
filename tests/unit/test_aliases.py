"""Keys of other tools: the message names ours, or says why there is none."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
import yaml
from transformers import SchedulerType

from meshlora.adapter.targets.resolve import SUPPORTED
from meshlora.run.config import aliases
from meshlora.run.config.file import read_run
from meshlora.run.config.foreign.trainers import INHERITED, KNOWN, TRAINERS
from meshlora.run.config.run_file import SCHEDULES_TOO, TrainConfig
from meshlora.run.config.types import groups
from meshlora_ground.errors import UserError
from tests.for_each import for_each
from tests.scripts import load_script

GOOD = {"model": {"path": "x"}, "data": {"train": "a.jsonl"}, "train": {"output": "o", "steps": 3}, "lora": {"r": 4}}


def _message(group: str, key: str, folder: Path) -> str:
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump({**GOOD, group: {**GOOD[group], key: 1}} if group else {**GOOD, key: 1}))
    with pytest.raises(UserError) as caught:
        read_run(file)
    return str(caught.value)


@for_each(
    ("group", "key", "said"),
    [
        ("train", "learning_rate", "train.learning_rate: unknown key; here it is train.lr"),
        ("", "learning_rate", "learning_rate: unknown key; here it is train.lr"),
        ("train", "logging_steps", "here it is train.log_every"),
        ("train", "num_train_epochs", "here it is train.epochs"),
        ("train", "per_device_train_batch_size", "here it is train.micro_batch_size, and train.batch_size is of all"),
        ("train", "lr_scheduler_type", "here it is train.schedule"),
        ("train", "lr_warmup_ratio", "here it is train.warmup_ratio"),
        ("", "val_set_size", "here it is data.eval, as in eval: 0.05"),
        ("train", "evals_per_epoch", "here it is train.eval_every, as in eval_every: epoch/4"),
        ("", "sample_packing", "here it is data.packing, as in packing: rows"),
        # Four that were wrong: 4 bits in each example; of training, too; a mode of products; the losses of SFT.
        ("", "quantization_bit", "here it is model.quantization, as in quantization: nf4 (4) or int8 (8)"),
        ("train", "max_samples", "here it is data.max_samples"),
        ("train", "tf32", "there is no such key; it is a mode of products in float32"),
        ("train", "loss_type", "here it is train.objective, as in objective: {kind: dpo, loss: ipo}"),
        ("train", "output_dir", "here it is train.output"),
        ("train", "report_to", "here it is train.track"),
        ("train", "gradient_checkpointing", "here it is train.recompute"),
        ("train", "bf16", "here it is model.dtype"),
        ("train", "deepspeed", "here it is topology"),
        ("train", "fsdp", "here it is topology"),
        ("train", "max_seq_length", "here it is data.max_length"),
        ("train", "epsilon_high", "here it is train.objective, as in {kind: grpo, clip_high: 0.28}"),
        ("train", "label_smoothing", "here it is train.objective, as in objective: {kind: sft, label_smoothing: 0.1}"),
        ("train", "kl_coef", "here it is train.objective, as in {kind: grpo, kl_coef: 0.01}"),
        ("data", "loss_on", "here it is data.train_on"),
        ("", "lora-r", "lora-r: unknown key; here it is lora.r"),
        ("", "lora_target", "here it is lora.target_modules"),
        ("", "base_model", "here it is model.path"),
        ("", "cutoff_len", "here it is data.max_length"),
        # Ours, in another place.
        ("", "batch_size", "batch_size: unknown key; here it is train.batch_size"),
        ("train", "max_length", "train.max_length: unknown key; here it is data.max_length"),
        ("model", "topology", "model.topology: unknown key; here it is topology"),
        # None.
        ("train", "gradient_accumulation_steps", "there is no such key; it follows from train.batch_size"),
        ("train", "resume_from_checkpoint", "there is no such key; give --resume auto"),
        # A slip of the finger.
        ("train", "warmup_step", "unknown key; did you mean 'warmup_steps'?"),
    ],
)
def test_key_of_another_tool(group: str, key: str, said: str, tmp_path: Path) -> None:
    assert said in _message(group, key, tmp_path)


def test_what_is_named_is_there() -> None:
    known = {f"{group}.{key}".strip(".") for group, keys in groups().items() for key in keys}
    known |= {f"lora.{key}" for key in SUPPORTED}
    rows = [*KNOWN.values(), *INHERITED, *(fact for trainer in TRAINERS.values() for fact in trainer.facts)]
    named = {fact.names: re.match(r"[\w.]*", fact.here)[0] for fact in rows if fact.here}  # type: ignore[index]
    assert {names: key for names, key in named.items() if key not in known} == {}
    for trainer in TRAINERS.values():
        assert trainer.defaults.keys() <= known


def test_page_of_other_trainers_is_what_the_table_says() -> None:
    written = load_script("write_coming_from")
    assert written.PAGE.read_text("utf-8") == written.text(), "run scripts/write_coming_from.py"
    for trainer in TRAINERS.values():
        assert f"## {trainer.title}\n" in written.text()
    for name in KNOWN:
        assert name in written.text()


def test_key_of_ours_in_another_place_goes_before_a_trainers_of_its_name(tmp_path: Path) -> None:
    ours: dict[str, str] = {}
    for group, keys in groups().items():
        for key in keys if group else ():
            ours.setdefault(key, group)
    shared = sorted(ours.keys() & KNOWN.keys())
    assert "micro_batch_size" in shared  # axolotl's, of one process
    for key in shared:
        elsewhere = "model" if ours[key] != "model" else "data"
        if key not in groups()[elsewhere]:
            assert f"here it is {ours[key]}.{key}" in _message(elsewhere, key, tmp_path)


@for_each(
    ("objective", "words"),
    [
        ({"kind": "dpo", "loss_type": "ipo"}, "loss_type: there is no such key; here it is loss"),
        ("ipo", "'ipo': it is not there by this name; objective: {kind: dpo, loss: ipo}"),
        ("luspo", "ratio: sequence, mean_over: constant, max_completion_length: 1"),
        ({"kind": "grpo", "loss": "luspo"}, "ratio: sequence, mean_over: constant, max_completion_length: 1"),
        ({"kind": "grpo", "loss": "dapo"}, "it is not there by this name; objective: grpo"),
        ({"kind": "dpo", "loss": "dft"}, "objective: {kind: sft, loss: dft}"),
        ({"kind": "dpo", "loss": "aot_pair"}, "objective: {kind: dpo, loss: aot}"),
        ({"kind": "dpo", "loss": ["sigmoid", "bco"]}, "objective: {kind: dpo, loss: bco_pair}"),
        ({"kind": "dpo", "loss": "sigmoyd"}, "did you mean 'sigmoid'?"),
        ("cpo", "this loss of preferences is not there; of pairs there are dpo"),
        ("nonsense", "train.objective"),
        ({"kind": "dpo", "loss": ["sigmoid", "sigmoid"]}, "name each loss once"),
        ({"kind": "dpo", "loss": "sft"}, "it is of better answers alone; give kind: sft, or a loss beside it"),
        ({"kind": "dpo", "loss": ["ipo", "sft"], "loss_weights": [1.0]}, "1 loss_weights for 2 losses"),
        ({"kind": "dpo", "loss": "hinge", "label_smoothing": 0.1}, "an effect with loss sigmoid, exo_pair, robust"),
        ({"kind": "dpo", "loss": "exo_pair"}, "give label_smoothing: 0.001"),
        ({"kind": "dpo", "loss": "nca_pair", "f_divergence": "forward_kl"}, "in differences of two answers alone"),
        ({"kind": "dpo", "loss": "aot", "f_divergence": "forward_kl"}, "in differences of two answers alone"),
        ({"kind": "dpo", "loss": "aot", "weighted": True}, "the answers compared are not of one pair"),
        ({"kind": "dpo", "f_alpha": 0.7}, "no effect without f_divergence=alpha_divergence"),
        ({"kind": "dpo", "f_divergence": "alpha_divergence", "f_alpha": 1.0}, "that is reverse_kl"),
        ({"kind": "dpo", "discopop_tau": 0.7}, "no effect without loss: discopop"),
        ({"kind": "sft", "loss": "dft", "label_smoothing": 0.1}, "leave out one of the two"),
        ({"kind": "grpo", "kl_correction": True}, "no effect without kl_coef"),
        ({"kind": "grpo", "loss": "sapo", "clip_low": 0.1}, "it has an effect with loss clipped or cispo"),
        ({"kind": "grpo", "loss": "cispo", "delta": 2.0}, "it has an effect with loss clipped"),
        ({"kind": "grpo", "vespo_k_neg": 2.0}, "it has an effect with loss vespo"),
        ({"kind": "grpo", "loss": "vespo", "ratio": "sequence"}, "its weight is of the sequence already"),
        ({"kind": "grpo", "importance_cap": None, "correction": "token_mask"}, "without a cap nothing is corrected"),
    ],
)
def test_loss_that_is_not_here_is_said_with_the_one_that_is(objective: object, words: str, tmp_path: Path) -> None:
    run = {"model": {"path": "m"}, "data": {"train": "d"}, "train": {"output": "o", "objective": objective}}
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(run))
    with pytest.raises(UserError) as error:
        read_run(file)
    assert words in str(error.value)


@for_each(
    ("name", "said"),
    [
        ("cosine_warmup_with_min_lr", "cosine with train.warmup_steps and train.min_lr"),
        ("reduce_lr_on_plateau", "it follows a measured loss"),
        ("greedy", "it follows a measured loss"),
        ("cosin", "one of 'linear', 'cosine'"),
    ],
)
def test_schedules_of_transformers_are_said_by_their_meaning(name: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump({**GOOD, "train": {**GOOD["train"], "schedule": name}}))
    with pytest.raises(UserError) as caught:
        read_run(file)
    assert str(caught.value).startswith(f"train.schedule: {name!r}: ")
    assert said in str(caught.value)


def test_no_schedule_of_transformers_is_unknown_here() -> None:
    ours = set(get_args(get_type_hints(TrainConfig)["schedule"]))
    ours |= SCHEDULES_TOO.keys()
    assert {kind.value for kind in SchedulerType} <= ours | aliases._SCHEDULES_ELSEWHERE.keys()
    assert not ours & aliases._SCHEDULES_ELSEWHERE.keys()

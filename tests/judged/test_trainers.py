"""Trainers of transformers and TRL on two gloo ranks: proved as they are, and a planted fault is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.judged import trainers
from tests.judged.patients import write_model
from tests.judged.ranks import assert_proved, assert_refuted, judged, on_ranks

pytestmark = pytest.mark.long


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With a model in it."""
    write_model(tmp_path / "model")
    return tmp_path


@pytest.mark.parametrize("trainer", [trainers.transformers_trainer, trainers.sft, trainers.dpo, trainers.grpo])
def test_a_trainer_as_it_is_is_proved(trainer: Callable[..., Any], folder: Path) -> None:
    on_ranks(trainer, folder, "")
    assert_proved(folder)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"loss_type": "grpo"},
        {"importance_sampling_level": "sequence"},
        {"beta": 0.1, "use_bias_correction_kl": True, "delta": 1.5},
        {"loss_type": "sapo"},
        {"loss_type": "cispo", "epsilon_high": 2.0},
    ],
    ids=str,
)
def test_grpo_with_options_as_trl_has_them_is_proved(more: dict[str, Any], folder: Path) -> None:
    on_ranks(trainers.grpo, folder, "", more)
    assert_proved(folder)


@pytest.mark.parametrize(
    ("trainer", "more"),
    [
        (trainers.sft, {"loss_type": "dft"}),
        (trainers.dpo, {"loss_type": ["ipo"]}),
        (trainers.dpo, {"loss_type": ["hinge", "apo_zero"], "loss_weights": [1.0, 0.5]}),
        (trainers.dpo, {"loss_type": ["robust"], "label_smoothing": 0.1, "f_divergence_type": "js_divergence"}),
        (trainers.dpo, {"loss_type": ["sigmoid_norm"], "ld_alpha": 0.5}),
    ],
    ids=lambda value: value.__name__ if callable(value) else str(value),
)
def test_other_losses_of_trl_are_proved(trainer: Callable[..., Any], more: dict[str, Any], folder: Path) -> None:
    on_ranks(trainer, folder, "", more)
    assert_proved(folder)


def test_a_loss_taken_for_another_is_refuted(folder: Path) -> None:
    """The recording says hinge, and ipo was trained."""
    on_ranks(trainers.dpo, folder, "mislabelled", {"loss_type": ["ipo"]})
    code, _ = judged(folder)
    assert code == 1


def test_the_callback_records_what_the_block_does(folder: Path) -> None:
    on_ranks(trainers.transformers_trainer, folder, "", "callback")
    assert_proved(folder)


def test_dpo_against_the_adapter_that_was_there_is_proved(folder: Path) -> None:
    """TRL then compares with a copy of it, not with the base."""
    on_ranks(trainers.dpo, folder, "ref")
    assert_proved(folder)


@pytest.mark.parametrize(
    ("trainer", "fault", "cause"),
    [
        (trainers.transformers_trainer, "per device", "mean of ranks' means"),
        (trainers.sft, "mean of means", "mean of means"),
        (trainers.dpo, "exchanged", "chosen and rejected are exchanged"),
        (trainers.grpo, "not summed", "not summed over ranks"),
    ],
)
def test_a_fault_of_a_trainer_is_named(trainer: Callable[..., Any], fault: str, cause: str, folder: Path) -> None:
    on_ranks(trainer, folder, fault)
    assert_refuted(folder, cause)

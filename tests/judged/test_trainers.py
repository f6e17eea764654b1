"""Trainers of transformers and TRL on two gloo ranks: proved as they are, and a planted fault is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.judged import trainers
from tests.judged.patients import write_model
from tests.judged.ranks import assert_proved, assert_refuted, on_ranks

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


@pytest.mark.parametrize("more", [{}, {"loss_type": "grpo"}, {"importance_sampling_level": "sequence"}], ids=str)
def test_grpo_with_options_as_trl_has_them_is_proved(more: dict[str, Any], folder: Path) -> None:
    on_ranks(trainers.grpo, folder, "", more)
    assert_proved(folder)


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

"""Loops of one's own on two gloo ranks: the right one is proved, a fault is refuted by its name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.judged import loops
from tests.judged.patients import write_model
from tests.judged.ranks import assert_proved, assert_refuted, on_ranks


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With a model in it."""
    write_model(tmp_path / "model")
    return tmp_path


@pytest.mark.parametrize(
    ("loop", "fault", "cause"),
    [
        (loops.ddp, "not summed", "not summed over ranks"),
        (loops.ddp, "mean of means", "mean of means"),
        (loops.fsdp2, "base first", "not summed over ranks"),
        (loops.fsdp1, "averaged twice", "averaged twice"),
    ],
)
def test_a_fault_of_two_ranks_is_named(loop: Callable[..., Any], fault: str, cause: str, folder: Path) -> None:
    on_ranks(loop, folder, fault)
    assert_refuted(folder, cause)


@pytest.mark.parametrize("loop", [loops.ddp, loops.fsdp2, loops.fsdp1])
def test_a_right_loop_of_two_ranks_is_proved(loop: Callable[..., Any], folder: Path) -> None:
    on_ranks(loop, folder, "")
    assert_proved(folder)

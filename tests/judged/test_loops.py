"""Loops of one's own on two gloo ranks: the right one is proved, a fault is refuted by its name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.judged import loops
from tests.judged.patients import write_model
from tests.judged.ranks import assert_proved, assert_refuted, judged, on_ranks


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
        (loops.accelerated, "mean of means", "mean of means"),
        (loops.megatron, "labels not shifted", "labels not shifted"),
    ],
)
def test_a_fault_of_two_ranks_is_named(loop: Callable[..., Any], fault: str, cause: str, folder: Path) -> None:
    on_ranks(loop, folder, fault)
    assert_refuted(folder, cause)


@pytest.mark.parametrize("loop", [loops.ddp, loops.fsdp2, loops.fsdp1, loops.accelerated, loops.megatron])
def test_a_right_loop_of_two_ranks_is_proved(loop: Callable[..., Any], folder: Path) -> None:
    on_ranks(loop, folder, "")
    assert_proved(folder)


@pytest.mark.parametrize(
    ("fault", "cause"), [("lost accumulation", "lost accumulation"), ("mean of means", "mean of means")]
)
def test_a_fault_of_one_process_is_named(fault: str, cause: str, folder: Path) -> None:
    on_ranks(loops.plain, folder, fault, {}, world=1)
    assert_refuted(folder, cause)


@pytest.mark.parametrize("targets", [["q_proj"], ["q_proj", "o_proj"]], ids="-".join)
def test_tensor_parallelism_of_transformers_is_proved_and_shown(targets: list[str], folder: Path) -> None:
    on_ranks(loops.tensor_parallel, folder, "", targets)
    facts = assert_proved(folder)["facts"]
    assert "frozen parameters are sharded" in facts["base"]
    assert facts["processes"] == "2 processes, 1 with rows of their own"


def test_replicas_that_drifted_under_tensor_parallelism_are_named(folder: Path) -> None:
    on_ranks(loops.tensor_parallel, folder, "drifted", ["q_proj"])
    assert_refuted(folder, "replicas drifted")


def test_a_plan_that_shards_nothing_is_shown(folder: Path) -> None:
    """Without a launcher's variables transformers ignores its tp_plan, and says nothing."""
    on_ranks(loops.tensor_parallel, folder, "not split", ["q_proj"], launcher=False)
    code, verdict = judged(folder)
    assert verdict["facts"]["base"].startswith("nothing is sharded"), verdict
    assert code == 1
    assert verdict["findings"][0]["cause"] == "same rows"


def test_the_variable_asks_for_a_recording_and_its_absence_for_none(folder: Path) -> None:
    on_ranks(loops.left_alone, folder, "not asked", world=1)
    assert not (folder / "seen").exists()
    on_ranks(loops.left_alone, folder, "", world=1)
    assert_proved(folder)
    with pytest.raises(AssertionError, match="it holds a recording"):
        on_ranks(loops.left_alone, folder, "", world=1)


def test_clipping_by_code_of_a_loops_own_is_judged_by_the_norm_that_is_said(folder: Path) -> None:
    on_ranks(loops.clips_by_hand, folder, 0.05, world=1)
    assert_proved(folder)


@pytest.mark.parametrize(("max_norm", "cause"), [(0.1, "clipped by another norm"), (None, "changed before the step")])
def test_clipping_by_hand_that_is_not_said_or_said_otherwise_is_named(
    max_norm: float | None, cause: str, folder: Path
) -> None:
    on_ranks(loops.clips_by_hand, folder, max_norm, world=1)
    assert_refuted(folder, cause)


def test_where_float64_does_not_fit_the_reference_is_float32_and_says_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshlora_judge.steps.reference._SHARE", 0.0)
    on_ranks(loops.fsdp1, folder, "")
    verdict = assert_proved(folder)
    assert any("in float32" in note for note in verdict["notes"])


def test_a_reference_in_float32_names_a_fault(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshlora_judge.steps.reference._SHARE", 0.0)
    on_ranks(loops.fsdp1, folder, "averaged twice")
    assert_refuted(folder, "averaged twice")

"""What a run says of a step on the terminal."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from meshlora.console import Console
from meshlora.train.metrics import Reporter, StepMetrics


@pytest.mark.parametrize("is_terminal", [False, True])
def test_line_of_a_step_has_what_its_objective_reports(is_terminal: bool, tmp_path: Path) -> None:
    said = io.StringIO()
    console = Console(file=said, force_terminal=is_terminal, width=200)
    with Reporter(tmp_path / "metrics.jsonl", steps=2, log_every=1, is_main=True, console=console) as reporter:
        reporter.step(StepMetrics(1, 0.5, 1e-3, 2.0, 100, 0.5, means={"accuracy": 0.75, "margin": 0.0123456}))
        reporter.step(StepMetrics(2, 0.4, 1e-3, float("inf"), 100, 0.5, skipped=True))
    text = said.getvalue()
    if is_terminal:
        assert "loss 0.4000  200 tokens/s  left out" in text
        return
    first, second = text.splitlines()
    assert first == "step 1/2  loss 0.5000  accuracy 0.75  margin 0.01235  lr 1.00e-03  grad_norm 2.000  200 tokens/s"
    assert second == "step 2/2  loss 0.4000  lr 1.00e-03  grad_norm inf  200 tokens/s  left out"

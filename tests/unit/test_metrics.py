"""What a run says of a step on the terminal."""

from __future__ import annotations

import io
import json
import math
import re
from pathlib import Path

import pytest

from meshlora.run.early_stopping import values_until
from meshlora.run.watch.metrics import Planned, Reporter, StepMetrics
from meshlora.run.watch.samples import forget_after
from meshlora_extra.page.seen import Runs
from meshlora_extra.plot import read_metrics
from meshlora_ground.console import Console


@pytest.mark.parametrize("is_terminal", [False, True])
def test_line_of_a_step_has_what_its_objective_reports(is_terminal: bool, tmp_path: Path) -> None:
    said = io.StringIO()
    console = Console(file=said, force_terminal=is_terminal, width=200)
    with Reporter(tmp_path / "metrics.jsonl", steps=2, log_every=1, is_main=True, console=console) as reporter:
        reporter.step(
            StepMetrics(1, 0.5, 1e-3, 2.0, 100, 0.5, means={"accuracy": 0.75, "margin": 0.0123456, "engine_kl": 0.5})
        )
        reporter.step(StepMetrics(2, 0.4, 1e-3, float("inf"), 100, 0.5, skipped=True))
    first_line = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])
    assert first_line["engine_kl"] == 0.5, "it is in the file, and not in the line"
    assert first_line["steps"] == 2
    text = said.getvalue()
    if is_terminal:
        assert "loss 0.4000  200 tokens/s  left out" in text, "in the bar"
        assert re.search(r"\d:\d\d\S* left\b", text), "what the time of the bar is"
    # A bar is drawn again from the beginning of its line.
    lines = [line.rpartition("\r")[2].removeprefix("\x1b[2K") for line in text.splitlines()]
    first, second = [line for line in lines if line.startswith("step ") and "grad_norm" in line]
    assert first == "step 1/2  loss 0.5000  accuracy 0.75  margin 0.01235  lr 1.00e-03  grad_norm 2.000  200 tokens/s"
    assert second == "step 2/2  loss 0.4000  lr 1.00e-03  grad_norm inf  200 tokens/s  left out"


def test_evaluation_that_is_not_finite_is_no_damage_to_the_file(tmp_path: Path) -> None:
    file, nan = tmp_path / "run" / "metrics.jsonl", float("nan")
    file.parent.mkdir()
    with Reporter(file, steps=2, log_every=1, is_main=True, console=Console(file=io.StringIO())) as reporter:
        reporter.step(StepMetrics(1, 0.5, 1e-3, 2.0, 100, 0.5))
        reporter.evaluation(1, nan, 8, perplexity=nan, means={"margin": nan, "accuracy": 0.5})
    assert json.loads(file.read_text().splitlines()[1]) == {"step": 1, "eval_tokens": 8, "eval_accuracy": 0.5}
    assert [math.isnan(loss) for loss in values_until(file, 1, every=1).values()] == [True]
    assert read_metrics(file.parent).evaluations == []
    (shown,) = Runs(tmp_path).shown(None)["runs"]
    assert (len(shown["steps"]), shown["evaluations"]) == (1, [])


DAMAGED = (
    b"\xff\xfe\n",
    b'{"step": 1, "los\n',
    b"null\n",
    b"[1]\n",
    b'{"loss": 1}\n',
    b'{"step": Infinity}\n',
    b"[" * 9999 + b"\n",
)


def test_a_damaged_line_is_left_out_where_a_run_goes_on(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    good = [b'{"step": %d, "loss": 0.5}\n' % step for step in (1, 2, 3, 4)]
    file.write_bytes(b"".join([*good[:2], *DAMAGED, *good[2:], b'{"step": 5']))
    said = io.StringIO()
    console = Console(file=said, width=1000)
    with Reporter(file, steps=9, log_every=1, is_main=True, console=console, done=3):
        pass
    assert file.read_bytes() == b"".join(good[:3])
    assert f"{len(DAMAGED)} damaged lines are left out" in said.getvalue()


def test_a_sample_is_kept_whatever_it_holds_and_a_damaged_one_is_not(tmp_path: Path) -> None:
    file = tmp_path / "samples.jsonl"
    texts = ["a\u2028b", "\x85", "c\x0bd"]  # lines end there to str.splitlines
    lines = [json.dumps({"step": 2, "text": text}, ensure_ascii=False) + "\n" for text in texts]
    file.write_bytes("".join(lines).encode() + b"".join(DAMAGED) + b'{"step": 3}\n')
    forget_after(file, 2)
    assert file.read_text(encoding="utf-8") == "".join(lines)


def test_what_was_planned_is_said_and_written_beside_what_is_seen(tmp_path: Path) -> None:
    said, file = io.StringIO(), tmp_path / "metrics.jsonl"
    console = Console(file=said, force_terminal=False, width=200)
    with Reporter(file, steps=5, log_every=1, is_main=True, console=console) as reporter:
        reporter.planned = Planned(0.4, "2 x cpu", {"compute": 0.3, "update": 0.1, "recomputation": 0.0})
        for step, seconds in enumerate((9.0, 5.0, 0.5, 0.6, 0.5), start=1):
            reporter.step(StepMetrics(step, 0.5, 1e-3, 2.0, 100, seconds))
        reporter.compare_with_plan()
    *_, step, end = said.getvalue().splitlines()
    assert step.endswith("200 tokens/s  500 ms (planned 400 ms)")
    # The first steps, in which memory is touched and connections are opened, do not count.
    assert end == "planned 400 ms a step, seen 500 ms: 1.25 x the plan (compute 300 ms, update 100 ms)"
    assert {json.loads(line)["planned_step_time_s"] for line in file.read_text().splitlines()} == {0.4}


def test_a_run_without_a_plan_says_nothing_of_one(tmp_path: Path) -> None:
    said, file = io.StringIO(), tmp_path / "metrics.jsonl"
    with Reporter(file, steps=3, log_every=1, is_main=True, console=Console(file=said, width=200)) as reporter:
        for step in (1, 2, 3):
            reporter.step(StepMetrics(step, 0.5, 1e-3, 2.0, 100, 0.5))
        reporter.compare_with_plan()
    assert "planned" not in said.getvalue() + file.read_text()

"""`make bench`: what it makes of scripts that are right, that disagree, that fail, that hang, that are not there."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

# A benchmark as benchmarks/README.md describes it, with no torch in it.
SCRIPT = """
import sys, time
sys.path.insert(0, {benchmarks!r})
from table import Findings, Parity, ParityError, faster, parser, run

def measure(options):
    assert options.quick
    {body}
    names = dict(unit="ms", ours_name="meshlora", peer_name="PEFT")
    rows = [faster("a step", [1, 1, 1], [2, 1, 3], target={target}, **names)]
    return Findings(Parity("loss", 1e-7, 1e-4, agrees=True), rows)

if __name__ == "__main__":
    sys.exit(run("T", parser("A benchmark.").parse_args(), measure, name="t"))
"""


@pytest.fixture
def run_all(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module, with its folder in the path as a script has it."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import run_all

    for name in ("run_all", "table"):
        monkeypatch.delitem(sys.modules, name)
    return run_all


def _script(path: Path, body: str = "pass", target: float = 1.5) -> Path:
    path.write_text(SCRIPT.format(benchmarks=str(BENCHMARKS), body=body, target=target))
    return path


def test_one_table_of_all_and_a_missed_target_is_no_failure(run_all: ModuleType, tmp_path: Path) -> None:
    items = {1: _script(tmp_path / "good.py"), 2: _script(tmp_path / "slow.py", target=2.5)}
    outcomes = run_all.run_items(items)
    assert [row.what for row in run_all.numbered(outcomes)] == ["1. a step", "2. a step"]
    assert [row.is_met for row in run_all.numbered(outcomes)] == [True, False]
    assert run_all.exit_code(outcomes) == 0
    assert run_all.conclusion(outcomes)[-1].startswith("1 targets met, 1 missed; parity in 2 of 2 items; ")
    assert "| 2. a step | 1.00 ms (meshlora) | 2.00 ms (PEFT) | 2.00 (1.00..3.00) peer / ours | ≥ 2.50 | NO |" in (
        run_all.page(outcomes)
    )


def test_parity_that_fails_is_told_from_what_did_not_run(run_all: ModuleType, tmp_path: Path) -> None:
    wrong = _script(tmp_path / "wrong.py", "raise ParityError('theirs', 0.5, 1e-4)")
    broken = _script(tmp_path / "broken.py", "raise ValueError('no')")
    hangs = _script(tmp_path / "hangs.py", "time.sleep(60)")
    quick = {1: wrong, 2: broken, 3: tmp_path / "absent.py"}
    outcomes = run_all.run_items(quick)
    assert [outcome.code for outcome in outcomes] == [1, 2, 2]
    assert run_all.numbered(outcomes) == []
    assert run_all.exit_code(outcomes) == 1
    assert run_all.exit_code(outcomes[1:]) == 2
    assert "PARITY FAILED: theirs, 5.0e-01 off" in run_all.page(outcomes)
    (outcome,) = run_all.run_items({4: hangs}, total_s=0.5)
    assert (outcome.code, outcome.trouble) == (2, "it took more than 1 s")


def test_the_items_are_those_of_the_page(run_all: ModuleType) -> None:
    page = (BENCHMARKS / "README.md").read_text()
    for item, script in run_all.ITEMS.items():
        assert f"| {item} | `{script.name}` |" in page


def test_items_that_take_all_they_may_leave_time_for_the_others(run_all: ModuleType) -> None:
    left, items = float(run_all.TOTAL_S), list(run_all.ITEMS)
    while items:
        budget, limit = run_all.time_for(items, left)
        assert limit >= run_all.LEAST_S
        assert 0 < budget <= limit
        left -= limit
        items.pop(0)
    assert left >= 0
    assert run_all.TOTAL_S < 15 * 60


def test_no_turn_begins_that_would_end_after_the_budget(run_all: ModuleType) -> None:
    def options(budget_s: float | None) -> argparse.Namespace:
        return argparse.Namespace(budget_s=budget_s)

    assert list(run_all.table.turns_within(3, options(None))) == [0, 1, 2]
    assert list(run_all.table.turns_within(3, options(1e6))) == [0, 1, 2]
    assert list(run_all.table.turns_within(3, options(0.0))) == [0], "one at least"
    assert run_all.table.seconds_left(options(None)) == float("inf")

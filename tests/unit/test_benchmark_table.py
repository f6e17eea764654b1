"""The form of benchmark results: ratios by turn, targets, JSON, exit codes."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks import table

NAMES = {"unit": "ms", "ours_name": "ours", "peer_name": "theirs"}


def test_the_ratio_is_the_median_of_the_turns_not_the_ratio_of_the_medians() -> None:
    # The machine was slow in the second turn, for both.
    row = table.faster("a step", [1.0, 10.0, 1.0], [2.0, 15.0, 4.0], **NAMES)
    assert (row.ratio, row.low, row.high, row.num_turns) == (2.0, 1.5, 4.0, 3)
    assert (row.ours, row.peer) == (1.0, 4.0)


@pytest.mark.parametrize(
    ("make", "ours", "peer", "target", "met"),
    [
        (table.faster, 1.0, 1.4, 1.5, False),
        (table.faster, 1.0, 1.5, 1.5, True),
        (table.smaller, 71.0, 100.0, 0.7, False),
        (table.smaller, 70.0, 100.0, 0.7, True),
        (table.greater, 290.0, 100.0, 3.0, False),
        (table.greater, 310.0, 100.0, 3.0, True),
        (table.faster, 1.0, 9.0, None, None),
    ],
)
def test_a_missed_target_is_shown(make: Any, ours: float, peer: float, target: float | None, met: bool | None) -> None:
    row = make("it", [ours], [peer], target=target, **NAMES)
    assert row.is_met is met
    for shown in (table.markdown_table([row]), table.plain_table([row])):
        assert {True: " yes", False: " NO", None: " –"}[met] in shown.splitlines()[-1]


def _run(tmp_path: Path, measure: Any) -> tuple[int, dict[str, Any]]:
    file = tmp_path / "a.b" / "found.json"
    code = table.run("A title", argparse.Namespace(json=file, quick=True), measure, name="t")
    assert (file.parent / "found.md").read_text().startswith("# A title\n")
    return code, json.loads(file.read_text())


def test_rows_come_back_from_the_file(tmp_path: Path) -> None:
    rows = [table.faster("a", [1.0], [2.0], target=3.0, **NAMES), table.smaller("b", [1.0], [2.0], **NAMES)]
    code, document = _run(tmp_path, lambda _: table.Findings(table.Parity("loss", 1e-6, 1e-4, True), rows, {"n": 1}))
    assert code == table.DONE  # a missed target is no failure
    assert table.rows_of(document) == rows
    assert [row["is_met"] for row in document["rows"]] == [False, None]
    assert document["details"] == {"n": 1}
    assert document["parity"]["agrees"]


def test_no_number_is_written_where_systems_disagree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def measure(_: argparse.Namespace) -> table.Findings:
        raise table.ParityError("theirs, seq 32", 0.5, 1e-4)

    code, document = _run(tmp_path, measure)
    assert code == table.PARITY_FAILED
    assert document["rows"] == []
    assert not document["parity"]["agrees"]
    assert "theirs, seq 32: 5.0e-01 off" in capsys.readouterr().err
    assert "FAILED" in (tmp_path / "a.b" / "found.md").read_text()


def test_an_error_is_told_from_a_difference(tmp_path: Path) -> None:
    def measure(_: argparse.Namespace) -> table.Findings:
        raise RuntimeError("no memory")

    assert (
        table.run("T", argparse.Namespace(json=tmp_path / "found.json", quick=True), measure, name="t") == table.NOT_RUN
    )
    assert not list(tmp_path.iterdir())

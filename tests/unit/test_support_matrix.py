"""README's support matrix and docs/support.md say what the record of proofs says."""

from __future__ import annotations

import json

from meshlora.plan.families import PROVED
from meshlora.verify.mutations import MUTATIONS
from tests.scripts import ROOT, load_script


def test_matrix_in_the_readme_is_written_from_the_record() -> None:
    script = load_script("prove_families")
    record = json.loads(script.RECORD.read_text())
    block = (ROOT / "README.md").read_text().partition(script.BEGIN)[2].partition(script.END)[0]
    assert block.strip() == script.matrix(record["families"]).strip()
    assert max(error for found in record["families"].values() for error in found.values()) <= 1e-11


def test_no_family_has_failed_and_the_proved_ones_are_those_of_the_record() -> None:
    rows = [line.split(" | ") for line in (ROOT / "docs" / "support.md").read_text().splitlines() if line[:2] == "| "]
    statuses = {row[0].removeprefix("| "): row[1] for row in rows if len(row) == 3 and row[1]}
    assert set(statuses.values()) == {"proved", "refused"}
    assert {family for family, status in statuses.items() if status == "proved"} == PROVED


def test_readme_counts_the_deliberate_faults() -> None:
    assert f"{len(MUTATIONS)} deliberate" in " ".join((ROOT / "README.md").read_text().split())

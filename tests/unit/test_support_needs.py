"""docs/support.md begins with its counts, and says what each refusal would need."""

from __future__ import annotations

import re

from tests.scripts import ROOT, load_script

PAGE = (ROOT / "docs/support.md").read_text()


def test_counts_on_top_are_those_of_the_rows() -> None:
    families, needs = load_script("prove_families"), load_script("support_needs")
    text, _, after = PAGE.partition(families.AFTER)
    rows = families.rows_of(text)
    proved = {
        part.name: sum(cells[part.name].startswith("proved") for cells in rows.values()) for part in families.PARTS
    }
    line = needs.counts_line(len(rows), proved, needs.checkpoints_on(after))
    assert line in PAGE.splitlines()[:4]
    assert re.search(r"[1-9]\d* ready", line)


def test_a_row_says_what_it_needs_where_something_of_it_is_refused_and_only_there() -> None:
    found = [line.strip("| ").split(" | ") for line in PAGE.splitlines() if re.match(r"\| [^|]+ \| .*refused", line)]
    assert len(found) > 50
    rows = [line for line in PAGE.splitlines() if re.match(r"\| [\w./-]+ \| ", line) and "proved: " in line]
    for row in rows:
        assert ("refused" in row) == (row.rstrip("| ").count(" | ") > 3), row


def test_a_reason_that_nobody_knows_is_said_and_stands_on_no_page() -> None:
    needs = load_script("support_needs")
    assert needs.need("model_type 'x': of encoder-decoders, those that read text alone are supported").startswith(
        "an encoder"
    )
    assert needs.need("it is blue") == needs.UNKNOWN
    assert needs.UNKNOWN not in PAGE
    assert needs.needs_of(["proved: 1e-15"]) == ""

"""docs/security-tests.md names a test for each attack, and the tests are there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.for_each import for_each

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "security-tests.md").read_text()
HOSTILE = "tests/unit/test_user_mistakes_hostile.py"
ATTACKS = [*(f"A{number}" for number in range(1, 13)), "A6b", "A15", "A16"]
IDS = re.findall(r"`(tests/[\w/]+\.py)::(\w+)(?:\[([^\]]+)\])?`", PAGE)
MISTAKES = re.findall(r"`H\[([^\]]+)\]`", PAGE)


@for_each("attack", ATTACKS)
def test_attack_without_a_test(attack: str) -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith(f"| {attack} |")]
    assert rows
    assert all(re.search(r"`(tests/|H\[)|the same", row.rpartition(" | ")[2]) for row in rows), rows


def test_named_tests_exist() -> None:
    assert len(IDS) > 40
    missing = [f"{file}::{name}" for file, name, _ in IDS if name not in _functions(ROOT / file)]
    assert not missing, missing


def test_named_mistakes_exist() -> None:
    assert len(MISTAKES) > 20
    files = {HOSTILE: MISTAKES}
    for file, _, mistake in IDS:
        files.setdefault(file, []).extend([mistake] if mistake else [])
    missing = [name for file, names in files.items() for name in names if not _has(ROOT / file, name)]
    assert not missing, missing


def test_security_md_leads_to_the_page() -> None:
    assert "docs/security-tests.md" in (ROOT / "SECURITY.md").read_text()


def _functions(file: Path) -> set[str]:
    return {node.name for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)}


def _has(file: Path, mistake: str) -> bool:
    """Whether a table of the file has a row of this name, or rows for each of several names."""
    text = file.read_text()
    begin, _, end = mistake.rpartition("_")
    return f'"{mistake}"' in text or (f'f"{begin}_{{' in text and f'"{end}"' in text)

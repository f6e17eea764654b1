"""A run that is disturbed ends in the bytes of the run that is not, or in one clear line, and leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scripts import load_script

CHAOS = load_script("chaos")


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return CHAOS.undisturbed(tmp_path_factory.mktemp("chaos"))


@pytest.mark.proof  # by default what is killed in a save is in test_failures, and that it goes on in test_resume
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("moment", "fault"), CHAOS.PAIRS)
def test_disturbed_runs_end_in_the_same_bytes_or_one_clear_line(
    moment: str, fault: str, tmp_path: Path, expected: Path
) -> None:
    """More of what kills and full disks leave is in test_failures and test_full_disk."""
    said = CHAOS.disturbed(tmp_path / "disturbed", moment, fault, expected)
    assert "same bytes" in said

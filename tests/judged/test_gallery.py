"""The gallery: public faults in others' released code are refuted and named, and proved with the fault taken out."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.scripts import ROOT, load_script

GALLERY = ROOT / "examples" / "judge" / "gallery"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return load_script("judge_gallery")


def run(*words: str) -> tuple[int, str]:
    """In a process of its own: it forks, which one with threads must not."""
    command = [sys.executable, str(ROOT / "scripts" / "judge_gallery.py"), *words]
    env = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.long
def test_three_faults_in_rotation_are_refuted_and_their_repairs_proved() -> None:
    code, said = run("--few", "3")
    assert code == 0, said
    assert "3 of 3 named, and proved with the fault taken out" in said


def test_every_script_is_of_the_gallery_and_short(script: object) -> None:
    faults = script.FAULTS  # type: ignore[attr-defined]
    there = {file.stem for file in GALLERY.glob("*.py")} - {"common"}
    assert there == set(faults)
    assert len([name for name, fault in faults.items() if not fault.raises]) >= 10
    assert all(fault.says for fault in faults.values())
    assert max(len(file.read_text("utf-8").splitlines()) for file in GALLERY.glob("*.py") if file.stem in faults) <= 60


def test_the_page_has_a_row_for_each(script: object) -> None:
    page = (ROOT / "docs" / "judge.md").read_text("utf-8")
    named = re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)
    faults = script.FAULTS  # type: ignore[attr-defined]
    assert set(named) >= set(faults)
    for name, fault in faults.items():
        row = next(line for line in page.splitlines() if line.startswith(f"| `{name}` |"))
        assert fault.thread in row
        assert fault.says in row


def test_a_fault_that_is_not_named_fails(script: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """What makes the exit code 1: other words, a fault that is proved, a repair that is refuted."""
    made, tmp = script.Ended, ROOT / "nowhere"  # type: ignore[attr-defined]
    both = script._both  # type: ignore[attr-defined]
    monkeypatch.setattr("pathlib.Path.mkdir", lambda *_, **__: None)
    for fault, repair, expected in (
        ("refuted", "proved", "refuted"),
        ("FAILED", "proved", "FAILED"),
        ("refuted", "FAILED", "FAILED"),
    ):
        ends = {False: made("fsdp2_order", fault, 1.0, ""), True: made("fsdp2_order", repair, 1.0, "")}
        monkeypatch.setattr(script, "judged", lambda *_, is_repaired, ends=ends: ends[is_repaired])
        assert both("fsdp2_order", tmp, tmp).how == expected

"""docs/tutorial.md word for word: its files and commands, in order, in an empty folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.scripts import ROOT

PAGE = ROOT / "docs" / "tutorial.md"
# ```sh: commands; ```LANGUAGE title="NAME": a file; ```text: what is printed.
BLOCK = re.compile(r'^```(\w+)(?: title="(.*?)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)


@pytest.mark.proof
@pytest.mark.timeout(1200)
def test_the_tutorial_works_word_for_word(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    for name, words in (("meshlora", "-m meshlora "), ("python", "")):  # as in an environment that has meshlora
        program = tmp_path / "bin" / name
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" {words}"$@"\n')
        program.chmod(0o755)
    folder = tmp_path / "empty"
    folder.mkdir()
    environment = os.environ | {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT / "src"),
        "CLONE": str(ROOT),
    }
    printed = ""
    for language, name, text in BLOCK.findall(PAGE.read_text("utf-8")):
        if name:
            (folder / name).write_text(text)
        elif language == "sh":
            done = subprocess.run(
                ["sh", "-e", "-c", text], cwd=folder, env=environment, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, f"{text}\n{done.stdout}{done.stderr}"
            printed += done.stdout
    perplexities = [float(number) for number in re.findall(r"perplexity ([\d.]+)", printed)]
    before, after = perplexities[-2:]  # of evaluate --base and evaluate
    assert after < before / 2
    assert (folder / "merged" / "config.json").exists()
    assert "proved" in printed

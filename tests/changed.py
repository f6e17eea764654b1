"""Whether tests see a change of the product: pytest on a copy of the package that has it, in all processes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import meshlora

PACKAGE = Path(meshlora.__file__).parent
ROOT = Path(__file__).resolve().parents[1]


def run_under(
    sources: Mapping[str, str], tests: Sequence[str], *, timeout_s: float | None = None
) -> subprocess.CompletedProcess[str]:
    """Run pytest on `tests` until one fails. sources: file of the package, as in `train/gradsync.py` -> its new text.

    Raises:
        subprocess.TimeoutExpired: it took longer than `timeout_s`.
    """
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / PACKAGE.name
        shutil.copytree(PACKAGE, copy)  # what is compiled too, which is known by size and time: half the seconds
        for file, text in sources.items():
            (copy / file).write_text(text, encoding="utf-8")
        return subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-x", "--no-header", "--tb=line", *tests],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": folder},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
            check=False,
        )

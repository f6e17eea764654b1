"""Run a fortieth of the tests that are marked `proof`: the one whose turn it is at this commit.

    .venv/bin/python scripts/proof_slice.py [--slice K]

All of them take hours, which nobody has at every commit. A test is in the same slice at every commit, so forty commits
in a row run each of them once; the number of commits says whose turn it is. It prints the slice, the commit, the time
and every test. Exit code: pytest's.
"""

from __future__ import annotations

import argparse
import datetime
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SLICES = 40


def turn() -> tuple[int, str]:
    """(a number that rises by one with each commit, what it is in words)."""
    commit, number = _git("rev-parse", "--short=12", "HEAD"), _git("rev-list", "--count", "HEAD")
    if not commit or not number:
        now = datetime.datetime.now(datetime.UTC).date()
        return now.toordinal(), f"by the day, {now}: there is no git here to count commits"
    if _git("rev-parse", "--is-shallow-repository") == "true":
        return int(commit, 16), f"by the hash of commit {commit}: a shallow clone cannot count its commits"
    return int(number), f"commit {commit}, number {number}"


def _git(*words: str) -> str:
    try:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slice", type=int, choices=range(SLICES), metavar="K", help=f"from 0 to {SLICES - 1}")
    options = parser.parse_args()
    number, why = turn()
    chosen = number % SLICES if options.slice is None else options.slice
    why = why if options.slice is None else "--slice"
    now = datetime.datetime.now(datetime.UTC)
    print(f"slice {chosen} of {SLICES} of the tests marked proof, {now:%Y-%m-%d %H:%M} UTC ({why})", flush=True)
    pytest = [sys.executable, "-m", "pytest", "-v", "-n", "2", "--dist", "loadfile", "--no-loadscope-reorder"]
    return subprocess.run([*pytest, "-m", "proof", "--slice", f"{chosen}/{SLICES}"], cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())

"""Run every script that stands behind a claim of a page in small, and say of each whether the claim holds.

    .venv/bin/python scripts/run_claims.py [--only NAME ...] [--turn N]

A script that nobody runs proves nothing: it breaks unseen, and the page goes on saying what it once printed. Two run at
a time, but what is timed alone, each in a process group of its own that ends with it, and none ends the others. What is
drawn or takes turns (chaos, generated faults) goes on with the number of commits, or --turn, so that the next commit
runs others. What this machine does not allow is said and is no failure. Exit code 1 when one failed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from proof_slice import turn

ROOT = Path(__file__).resolve().parents[1]
AT_ONCE = 2
# Of one that hangs: on two idle cores all of them take less than four minutes together.
LIMIT_S, ENDING_S = 900.0, 10.0
DATA = "examples/docstrings/train.jsonl"
SHAPE = "examples/llama-3.1-70b-shape.json"


@dataclass(frozen=True)
class Claim:
    """A command, and what may be said of it.

    Attributes:
        words: in the repository, with {turn} for a number that rises by one with each commit, {tenth} for its last
            digit, and {folder} for an empty folder.
        is_timed: it is about seconds, too. may_refuse: an error that ends it with 2 says what this machine lacks.
        says: what its last line holds, where the exit code alone does not tell.
    """

    words: str
    is_timed: bool = False
    may_refuse: bool = False
    says: str = ""


# The longest first.
CLAIMS: dict[str, Claim] = {
    "chaos": Claim("scripts/chaos.py --rounds 3 --start {turn}", is_timed=True),
    "generated faults": Claim(
        "scripts/generate_faults.py --sample 50 --case 'llama tp=2,sp' --slice {tenth}/10 --verdicts {folder}/verdicts"
    ),
    "two nodes": Claim("scripts/two_nodes.sh -k 'one_process and dp and 2-1'", may_refuse=True),
    "one GPU": Claim("scripts/prove_on_gpu.py --dry-run"),
    "judge": Claim("scripts/judge_trials.py --slice {tenth}/10"),
    "same adapter": Claim(f"scripts/same_adapter.py --data {DATA} --steps 4 --dtype float64 --topology tp=2,sp"),
    "simulate": Claim(f"-m meshlora plan --model {SHAPE} --gpus 16384 --gpu h200 --seq 8192 --simulate"),
    "prices": Claim("benchmarks/planned_gpu.py"),
    "families": Claim("scripts/prove_families.py --family llama qwen3_moe --topology tp=2,sp --out {folder}/out.md"),
    "float8": Claim(
        "scripts/gate_float8.py --model examples/tiny_base --folder {folder} --seeds 1 --steps 2 --prompts 2 "
        "--dtype float32",
        says="| fp8 |",
    ),
    "peers": Claim("scripts/try_peers.py --slice {turn}/20", may_refuse=True),
    "imports": Claim("scripts/import_against_peers.py trl", says="the same"),
    "gallery": Claim("scripts/judge_gallery.py --few 4", says="4 of 4 named, and proved"),
    "found plans": Claim("scripts/keep_plans.py --check bert pegasus xlnet", says="the same plans"),
    "published": Claim("scripts/prove_published.py --only Qwen--Qwen3-8B --tp 2"),
}


@dataclass(frozen=True)
class Ended:
    """How one ended. said: its last line, or all of it where it failed."""

    name: str
    how: str
    seconds: float
    said: str


def run(name: str, claim: Claim, number: int) -> Ended:
    """Run one claim until it ends, or LIMIT_S; nothing of its process group is alive then. number: whose turn it is."""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="claim-") as folder:
        words = shlex.split(claim.words.format(turn=number, tenth=number % 10, folder=folder))
        own = [] if words[0].endswith(".sh") else [sys.executable]
        env = os.environ | {"PYTHON": sys.executable}
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        with subprocess.Popen([*own, *words], cwd=ROOT, env=env, start_new_session=True, **pipes) as process:
            try:
                said, _ = process.communicate(timeout=LIMIT_S)
            except subprocess.TimeoutExpired:
                said = f"it had not ended after {LIMIT_S:g} s"
                process.send_signal(signal.SIGINT)  # it may have started sessions of its own, which it then ends
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(ENDING_S)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
    said = said.strip()
    last = next((line for line in reversed(said.splitlines()) if re.search(r"\w", line)), "")  # no border of a table
    code = process.returncode
    how = "holds" if code == 0 and claim.says in last else "FAILED"
    if claim.may_refuse and code == 2 and last.startswith("error: "):
        how = "not here"
    return Ended(name, how, time.monotonic() - begun, said if how == "FAILED" else last)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CLAIMS, metavar="NAME", help=f"of {', '.join(CLAIMS)}")
    parser.add_argument("--turn", type=int, help="default: the number of commits")
    options = parser.parse_args(arguments)
    number, why = turn() if options.turn is None else (options.turn, "--turn")
    print(f"claims in small, turn {number} ({why})", flush=True)
    begun, ended, names = time.monotonic(), list[Ended](), options.only or list(CLAIMS)
    for is_timed, at_once in ((True, 1), (False, AT_ONCE)):
        own = [name for name in names if CLAIMS[name].is_timed is is_timed]
        with ThreadPoolExecutor(at_once) as threads:
            for one in threads.map(lambda name: run(name, CLAIMS[name], number), own):
                print(f"{one.how:8s} {one.seconds:4.0f} s  {one.name}: {one.said}", flush=True)
                ended.append(one)
    failed = [one.name for one in ended if one.how == "FAILED"]
    print(f"{len(ended)} claims in {time.monotonic() - begun:.0f} s; failed: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

"""Kill random ranks of a run at random moments, let it go on each time, and compare what it ends in, byte for byte.

    .venv/bin/python scripts/kill_and_resume.py --kills 20 [--nproc 2] [--seed 0]

The run is that of examples/demo.yaml in small batches, with checkpoints. First it runs without a kill. Then one of its
ranks gets SIGKILL: while it starts, while it trains, or while it saves, in turn and each at a random moment; after each
kill `--resume auto` goes on. At the end the adapter must be that of the run that nobody killed. Exit code 0 when every
byte is, else 1.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# A run of which a rank was killed must have ended by itself in this time.
PATIENCE_S = 30.0
MOMENTS = ("while it trains", "inside a save", "while it starts")


def main() -> int:
    options = _options()
    choose = random.Random(options.seed)
    steps = options.steps or max(24, 6 * options.kills)
    with tempfile.TemporaryDirectory(prefix="kill-and-resume-") as folder:
        whole, killed = Path(folder) / "whole", Path(folder) / "killed"
        begun = time.monotonic()
        process = _start(whole, steps, options)
        process.wait()
        start_s = min(20.0, (time.monotonic() - begun) / 2)
        if process.returncode:
            print(f"the run without a kill ended with {process.returncode}")
            return 1
        print(f"the run without a kill: {steps} steps, {time.monotonic() - begun:.0f} s", flush=True)
        inside = 0
        for number in range(options.kills):
            moment = MOMENTS[number % len(MOMENTS)]
            said = _kill_once(killed, steps, options, choose, moment, start_s)
            if said is None:
                print(f"the run ended before kill {number + 1}: give more --steps")
                return 1
            inside += "inside a save" in said
            print(f"kill {number + 1}/{options.kills}: {said}", flush=True)
        process = _start(killed, steps, options)
        process.wait()
        if process.returncode:
            print(f"the last part ended with {process.returncode}")
            return 1
        print(f"{options.kills} kills, {inside} of them inside a save, {time.monotonic() - begun:.0f} s")
        different = _differences(whole / "adapter", killed / "adapter")
        for line in different:
            print(line)
        if not different:
            print("byte-identical")
        return 1 if different else 0


def _start(output: Path, steps: int, options: argparse.Namespace) -> subprocess.Popen[bytes]:
    topology = f"tp={options.nproc},sp" if options.nproc > 1 else ""
    values = {
        "output": output,
        "steps": steps,
        "save_every": options.save_every,
        "batch_size": 4,
        "eval_every": 0,
        "keep_last": 3,
    }
    overrides = [f"train.{key}={value}" for key, value in values.items()] + [f"topology={topology}", "data.eval=null"]
    words = [word for each in overrides for word in ("--set", each)]
    ranks = ["--nproc", str(options.nproc), "--no-preflight", "--resume", "auto"]
    return subprocess.Popen(
        [sys.executable, "-m", "meshlora", "train", "examples/demo.yaml", *words, *ranks],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def _kill_once(
    output: Path, steps: int, options: argparse.Namespace, choose: random.Random, moment: str, start_s: float
) -> str | None:
    """Start, kill one rank, wait for the end; what happened, or None where the run ended first."""
    metrics = _metrics(output)

    def trains() -> bool:
        return _metrics(output)[0] not in (metrics[0], 0) and _metrics(output)[1] > _kept(output)

    process = _start(output, steps, options)
    _wait(process, lambda: len(_ranks(process)) == options.nproc, pause_s=0.05)
    ranks = _ranks(process)
    if moment == "while it starts":
        # No longer than it starts, which may be faster than the run without a kill has let expect.
        until = time.monotonic() + choose.uniform(0.0, start_s)
        _wait(process, lambda: time.monotonic() > until or trains(), pause_s=0.05)
    else:
        _wait(process, trains, pause_s=0.01)
        if moment == "inside a save":
            _wait(process, lambda: _is_saving(output))
            time.sleep(choose.uniform(0.0, 0.004))
        else:
            time.sleep(choose.uniform(0.0, 0.5))
    if process.poll() is not None:
        return None
    rank = choose.randrange(len(ranks))
    is_inside = _is_saving(output)
    with contextlib.suppress(ProcessLookupError):
        os.kill(ranks[rank], signal.SIGKILL)
    killed_at = time.monotonic()
    try:
        process.wait(timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        for number in [*_ranks(process), process.pid]:
            os.kill(number, signal.SIGKILL)
        raise SystemExit(f"error: the run had not ended {PATIENCE_S:.0f} s after rank {rank} was killed") from None
    if process.returncode == 0:
        return None
    seconds, where = (
        time.monotonic() - killed_at,
        "inside a save" if is_inside else moment.replace("inside", "just after"),
    )
    done = f"{_metrics(output)[1]} steps done, latest is {_latest(output)}"
    return f"rank {rank} {where}, {done}; all ended in {seconds:.1f} s"


def _wait(process: subprocess.Popen[bytes], ready: Callable[[], bool], *, pause_s: float = 0.001) -> None:
    """Until `ready()`, or the process has ended. pause_s: looking takes time from the ranks."""
    while process.poll() is None and not ready():
        time.sleep(pause_s)


def _metrics(output: Path) -> tuple[int, int]:
    """(which file it is, for a run that goes on writes it anew; its lines)."""
    try:
        with (output / "metrics.jsonl").open("rb") as file:
            return os.fstat(file.fileno()).st_ino, file.read().count(b"\n")
    except FileNotFoundError:
        return 0, 0


def _kept(output: Path) -> int:
    """Steps of the last checkpoint: lines about later ones are of the run that is going on."""
    latest = _latest(output)
    return int(latest.removeprefix("step-")) if latest != "none" else 0


def _latest(output: Path) -> str:
    latest = output / "checkpoints" / "latest"
    return os.readlink(latest) if latest.is_symlink() else "none"


def _is_saving(output: Path) -> bool:
    folder = output / "checkpoints"
    return folder.is_dir() and any(folder.glob(".step-*.tmp"))


def _ranks(process: subprocess.Popen[bytes]) -> list[int]:
    """The processes of the ranks: children of the launcher, in the order in which they were started."""
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal():
            continue
        with contextlib.suppress(OSError):
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == process.pid and b"meshlora" in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
    return sorted(found)


def _differences(one: Path, other: Path) -> list[str]:
    names = sorted({file.name for folder in (one, other) for file in folder.iterdir()})
    return [
        f"{name} differs"
        for name in names
        if not ((one / name).is_file() and (other / name).is_file())
        or (one / name).read_bytes() != (other / name).read_bytes()
    ]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--steps", type=int, help="default: enough for the kills")
    parser.add_argument("--save-every", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

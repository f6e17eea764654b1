"""Disturb runs of two ranks at chosen moments, let each go on, and compare what it ends in with the undisturbed run.

    .venv/bin/python scripts/chaos.py --rounds 40 [--seed 0] [--start N] [--only MOMENT:FAULT ...]

A round starts a run and holds it at a moment: as its ranks start, in a step, in a save, right before a folder gets its
name, or at the end. There it puts in a fault: a process is killed or stopped (the launcher, a rank, the shell that
cleans up after the launcher), the disk is full or read-only, or the output folder is gone. What follows must be the
adapter of the undisturbed run, byte for byte, or one clear line; then `--resume auto` must end in that adapter. After
each of the two no process of the run is alive 5 s later, and no file is left. Every pair of moment and fault comes once
before one comes again; --start N begins where N times as many rounds have been. Exit code 0 when all end so, else 1.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.processes import Started, wait_until  # noqa: E402 - the path comes first

MOMENTS = ("start", "step", "save", "rename", "end")
PROCESSES = ("launcher", "rank 0", "rank 1", "janitor")
FAULTS = (
    *(f"SIGKILL {name}" for name in PROCESSES),
    *(f"SIGSTOP {name} for a while" for name in PROCESSES[:3]),
    *(f"SIGSTOP {name} for good" for name in PROCESSES[1:3]),
    "ENOSPC",
    "EROFS",
    "folder removed",
)
# No limit holds yet while ranks start: they may load for long. What is stopped then is waited for.
PAIRS = [pair for pair in itertools.product(MOMENTS, FAULTS) if not (pair[0] == "start" and pair[1].endswith("good"))]
# Of a rank that is stopped; `train.timeout_s`; from a fault to the end of all processes; patience with everything else.
STOPPED_S, LIMIT_S, END_S, WHOLE_S = 3.0, 8.0, 5.0, 600.0

# Every rank imports this first. Where it stands at the chosen moment it says so, and waits for the fault to be done.
# And bitsandbytes is not there: PEFT imports it, a fifth of the start of a process.
FIRST = '''
import errno, io, os, sys, time
from pathlib import Path

sys.modules["bitsandbytes"] = None
here, moment = Path(__file__).parent, (Path(__file__).parent / "moment").read_text()
output = str(here.parent / "output")

def hold():
    if (here / "held").exists() and moment != "start":
        return
    (here / ("held" if moment != "start" else f"held-{rank}")).touch()
    while not (here / "go").exists():
        time.sleep(0.01)
    if (here / "errno").exists() and rank == 0:
        break_disk(int((here / "errno").read_text()))

def break_disk(number):
    """From here on nothing can be written below the output."""
    import builtins
    from safetensors import SafetensorError
    from meshlora.adapter.formats import peft_format
    from meshlora.run.checkpoint import state as checkpoint

    def check(path):
        if not isinstance(path, int) and os.path.abspath(os.fspath(path)).startswith(output):
            raise OSError(number, os.strerror(number), os.fspath(path))

    def refusing(function, is_writing=lambda *args, **kwargs: True):
        def call(path, *args, **kwargs):
            if is_writing(*args, **kwargs):
                check(path)
            return function(path, *args, **kwargs)
        return call

    def full(*_, **__):
        raise SafetensorError(f"Error while serializing: I/O error: {os.strerror(number)} (os error {number})")

    for name in ("mkdir", "replace", "rename", "symlink"):
        setattr(os, name, refusing(getattr(os, name)))
    os.open = refusing(os.open, lambda flags, *_, **__: flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
    builtins.open = io.open = refusing(io.open, lambda mode="r", *_, **__: set(mode) & set("wax+"))
    peft_format.save_file = checkpoint.save_file = full

if "RANK" in os.environ and moment:
    rank = int(os.environ["RANK"])
    (here / f"pid-{rank}").write_text(str(os.getpid()))
    if moment == "start":
        hold()
    if rank == 0 and moment == "step":
        from meshlora.run import trainer
        train_step = trainer.Trainer.train_step

        def held_step(self, adapters):
            if adapters[0].done == 1:
                hold()
            return train_step(self, adapters)

        trainer.Trainer.train_step = held_step
    if rank == 0 and moment == "save":
        from meshlora.run.checkpoint import state as checkpoint
        save_file = checkpoint.save_file

        def held_save(tensors, file, **kwargs):
            if "step-000004" in str(file):
                hold()
            return checkpoint_save(tensors, file, **kwargs)

        checkpoint_save, checkpoint.save_file = save_file, held_save
    if rank == 0 and moment in ("rename", "end"):
        import pathlib
        replace = pathlib.Path.replace
        name = "step-000004" if moment == "rename" else "adapter"

        def held_replace(self, target):
            if Path(target).name == name and Path(target).parent != here:
                hold()
            return replace(self, target)

        pathlib.Path.replace = held_replace
'''


@dataclass(frozen=True)
class Ended:
    """How a disturbed run ended."""

    code: int
    error: str
    seconds: float


def main() -> int:
    options = _options()
    pairs = [tuple(each.split(":")) for each in options.only] or PAIRS
    choose, good, begun = random.Random(options.seed), 0, time.monotonic()
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        expected = undisturbed(Path(folder) / "undisturbed")
        order: list[Sequence[str]] = []
        first = options.start * options.rounds
        while len(order) < first + options.rounds:
            order += choose.sample(pairs, len(pairs))
        for number, (moment, fault) in enumerate(order[first : first + options.rounds], start=1):
            own = Path(folder) / f"round-{number}"
            try:
                said, is_good = disturbed(own, moment, fault, expected), True
            except AssertionError as failed:
                said, is_good = f"FAILED: {failed}", False
            good += is_good
            print(f"{number}/{options.rounds} {moment}, {fault}: {said}", flush=True)
            if is_good:
                shutil.rmtree(own)
    print(f"{time.monotonic() - begun:.0f} s")
    print(f"{good} of {options.rounds}: same bytes or one clear line; no process, no file left")
    return 0 if good == options.rounds else 1


def undisturbed(folder: Path) -> Path:
    """The adapter of a run that nothing disturbs."""
    with _run(_prepared(folder)) as run:
        code, _, error = run.end(WHOLE_S)
    assert code == 0, f"the undisturbed run ended with {code}: {error}"
    return folder / "output" / "adapter"


def _prepared(folder: Path) -> Path:
    """A run file, its data, and the hook of its ranks."""
    (folder / "faults").mkdir(parents=True)
    text = "".join(f'{{"prompt": "f_{i}():", "completion": " return {i}"}}\n' for i in range(8))
    (folder / "train.jsonl").write_text(text)
    train = {"steps": 6, "batch_size": 2, "log_every": 1, "save_every": 2, "timeout_s": LIMIT_S}
    tree = {
        "model": {"path": str(ROOT / "examples" / "tiny_base"), "dtype": "float32"},
        "data": {"train": str(folder / "train.jsonl"), "max_length": 32, "cache_dir": str(folder / "cache")},
        "train": {"output": str(folder / "output"), **train},
        "lora": {"r": 2, "target_modules": ["q_proj", "down_proj"]},
        "topology": "tp=2,sp",
        "device": "cpu",
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(tree))
    return folder


def _run(folder: Path, *more: str, moment: str = "") -> Started:
    """The run in `folder`; its ranks wait at `moment`, if any."""
    (folder / "faults" / "moment").write_text(moment)
    (folder / "faults" / "sitecustomize.py").write_text(FIRST)
    words = ("-m", "meshlora", "train", str(folder / "run.yaml"), "--nproc", "2", "--no-preflight", *more)
    path = os.pathsep.join([str(folder / "faults"), *filter(None, [os.environ.get("PYTHONPATH")])])
    # torch keeps a cache of its own, which is none of the run's files.
    return Started(folder, *words, PYTHONPATH=path, TORCHINDUCTOR_CACHE_DIR=str(folder / "inductor"))


def disturbed(folder: Path, moment: str, fault: str, expected: Path) -> str:
    """What came of a round, in words.

    Raises:
        AssertionError: something else than the bytes of `expected` or one clear line; or something is left.
    """
    adapter = _prepared(folder) / "output" / "adapter"
    with _run(folder, moment=moment) as run:
        ended = _disturbed(run, folder, moment, fault)
        if ended.code == 0:
            assert _same(adapter, expected), f"it ended well, with other bytes: {_contents(adapter)}"
            said = "same bytes"
        else:
            lines = ended.error.splitlines()
            is_silent = fault == "SIGKILL launcher"
            assert len(lines) == (0 if is_silent else 1), f"{len(lines)} lines: {ended.error}"
            assert is_silent or lines[0].startswith("error: "), ended.error
            said = lines[0].replace(str(folder), "") if lines else "ended"
        _check_nothing_lives(run)
    with _run(folder, "--resume", "auto") as again:
        code, _, error = again.end(WHOLE_S)
        assert code == 0, f"{said}; resumed it ended with {code}: {error}"
        assert _same(adapter, expected), f"{said}; resumed it ended in other bytes"
        _check_nothing_lives(again)
    left = [file.name for part in ("", "checkpoints") for file in (folder / "output" / part).glob(".*")]
    assert not left, f"left in the output: {left}"
    return f"{said} ({ended.seconds:.1f} s after the fault)" + ("" if ended.code == 0 else "; resumed: same bytes")


def _disturbed(run: Started, folder: Path, moment: str, fault: str) -> Ended:
    """Put `fault` in when the run is held at `moment`; how the run ends."""
    faults = folder / "faults"
    number = 2 if moment == "start" else 1
    wait_until(lambda: len(list(faults.glob("held*"))) == number or run.process.poll() is not None, WHOLE_S)
    assert run.process.poll() is None, f"it ended before the fault: {run.end()}"
    pids = {f"rank {rank}": int((faults / f"pid-{rank}").read_text()) for rank in range(2)}
    pids["launcher"] = run.process.pid
    (pids["janitor"],) = set(run.living()) - set(pids.values())
    begun = time.monotonic()
    kind, _, victim = fault.partition(" ")
    limit_s = END_S
    if kind == "SIGKILL":
        os.kill(pids[victim], signal.SIGKILL)
    elif kind == "SIGSTOP":
        name = victim.removesuffix(" for a while").removesuffix(" for good")
        os.kill(pids[name], signal.SIGSTOP)
        (faults / "go").touch()
        limit_s = WHOLE_S
        if victim.endswith("for a while"):
            time.sleep(STOPPED_S)
            os.kill(pids[name], signal.SIGCONT)
    elif kind in ("ENOSPC", "EROFS"):
        (faults / "errno").write_text(str({"ENOSPC": 28, "EROFS": 30}[kind]))
        limit_s = WHOLE_S
    else:
        shutil.rmtree(folder / "output", ignore_errors=True)
        limit_s = WHOLE_S
    (faults / "go").touch()
    try:
        code, _, error = run.end(limit_s)
    except subprocess.TimeoutExpired:
        raise AssertionError(f"the launcher had not ended {limit_s:g} s after the fault") from None
    return Ended(code, error, time.monotonic() - begun)


def _check_nothing_lives(run: Started) -> None:
    def is_clean() -> bool:
        return not run.living() and not run.folders()

    _within(is_clean, END_S, lambda: f"{END_S:g} s later there are processes {run.living()}, files {run.folders()}")


def _within(ready: Callable[[], bool], seconds: float, words: Callable[[], str]) -> None:
    deadline = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < deadline, words()
        time.sleep(0.05)


def _contents(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir()) if folder.is_dir() else []


def _same(one: Path, other: Path) -> bool:
    """Whether two folders hold the same files, byte for byte."""
    names = _contents(one)
    return names == _contents(other) != [] and all((one / n).read_bytes() == (other / n).read_bytes() for n in names)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=len(PAIRS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=int, default=0, metavar="N", help="as after N calls with as many rounds")
    parser.add_argument("--only", nargs="+", default=[], metavar="MOMENT:FAULT", help="as in 'save:SIGKILL rank 0'")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

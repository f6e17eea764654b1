"""Put the judge of other people's steps on trial: right loops that it must prove, faults that it must refute and name.

.venv/bin/python scripts/judge_trials.py [--right 40] [--faults 100] [--few] [--turn N] [--only NAME ...]
"""

from __future__ import annotations

import argparse
import logging
import random
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformers
from judge_faults import KINDS, plant
from judge_loops import Loop, Trainer, base_of, drawn

from meshlora_ground.errors import MeshloraError
from meshlora_judge.recording.files import read_recordings
from meshlora_judge.steps.judge import judge_steps

LIMIT_S = 120.0


@dataclass(frozen=True)
class Trial:
    """A loop, and the kind of fault in it; "": none."""

    loop: Loop
    kind: str = ""


@dataclass(frozen=True)
class Result:
    """said: the verdict's cause, or what ended it. words: of the verdict."""

    trial: Trial
    refuted: bool
    said: str
    words: str
    failed: bool = False


def _rank(rank: int, trial: Trial, base: Path, folder: Path) -> None:
    torch.set_num_threads(1)
    try:
        if trial.loop.world > 1:
            store = f"file://{folder}.store"
            dist.init_process_group("gloo", init_method=store, rank=rank, world_size=trial.loop.world)
        cls = plant(trial.kind) if trial.kind else Trainer
        cls(trial.loop, rank, base).run(folder)
        if trial.loop.world > 1:
            dist.destroy_process_group()
    except Exception:  # noqa: BLE001 - whatever a planted fault makes torch say
        Path(f"{folder}.error-{rank}").write_text(traceback.format_exc())
        raise SystemExit(1) from None


def run(trial: Trial, work: Path) -> Result:
    """Train it in processes of its own, and judge what they recorded."""
    base = base_of(trial.loop, work)
    folder = Path(tempfile.mkdtemp(dir=work)) / "seen"
    torch.set_num_threads(1)
    context = mp.get_context("fork")
    processes = [context.Process(target=_rank, args=(rank, trial, base, folder)) for rank in range(trial.loop.world)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(LIMIT_S)
        if process.is_alive():
            process.kill()
    errors = sorted(folder.parent.glob("*.error-*"))
    if errors or any(process.exitcode for process in processes):
        said = errors[0].read_text() if errors else "it did not end"
        return Result(trial, False, "the loop failed", said, failed=True)
    try:
        verdict = judge_steps(read_recordings(folder), str(base))
    except MeshloraError as error:
        return Result(trial, True, f"cannot be replayed: {error}", str(error))
    except (RuntimeError, TypeError, ValueError, KeyError, IndexError):
        return Result(trial, False, "the judge failed", traceback.format_exc(), failed=True)
    finally:
        shutil.rmtree(folder.parent)
    if verdict.is_proved:
        return Result(trial, False, "", f"{verdict.compared}")
    return Result(trial, True, verdict.first.cause, " | ".join(map(str, verdict.findings)))


def _drawn_faults(number: int, seed: int, kinds: Sequence[str]) -> list[Trial]:
    """Kinds in an order that is drawn, each once before any a second time, each in a loop drawn for it."""
    draw, found = random.Random(seed), list[Trial]()
    while len(found) < number:
        for name in draw.sample(list(kinds), len(kinds)):
            found.append(Trial(KINDS[name].loop(draw.randrange(10_000)), name))
    return found[:number]


def _is_named(result: Result) -> bool:
    return any(key in result.said for key in KINDS[result.trial.kind].keys)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--right", type=int, default=40)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="of all that is drawn")
    parser.add_argument("--slice", default="0/1", help="K/N: every Nth of them, from the Kth")
    parser.add_argument("--jobs", type=int, default=2, help="trials at a time")
    parser.add_argument("--only", nargs="+", choices=KINDS)
    parser.add_argument("--say", action="store_true", help="the verdict in words, of all of them")
    options = parser.parse_args(arguments)
    transformers.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    place, number = map(int, options.slice.split("/"))
    right = [Trial(drawn(options.seed + k)) for k in range(options.right)][place::number]
    faults = _drawn_faults(options.faults, options.seed, options.only or list(KINDS))[place::number]
    begun = time.monotonic()
    results = []
    trials = [*right, *faults]
    with tempfile.TemporaryDirectory(prefix="trials-") as work:
        for trial in trials:
            base_of(trial.loop, Path(work))
        with ProcessPoolExecutor(options.jobs, mp_context=mp.get_context("fork")) as pool:
            for result in pool.map(run, trials, [Path(work)] * len(trials)):
                results.append(result)
                _say(result, options.say)
    return _sum_up(results, time.monotonic() - begun)


def _sum_up(results: Sequence[Result], seconds: float) -> int:
    """Print the table of kinds and the sums; returns the exit code."""
    right = [each for each in results if not each.trial.kind]
    planted = [each for each in results if each.trial.kind]
    alarms, failed = [each for each in right if each.refuted], [each for each in results if each.failed]
    refuted = [each for each in planted if each.refuted]
    named = [each for each in refuted if _is_named(each)]
    kinds = {each.trial.kind for each in planted}
    for kind in sorted(kinds):
        of = [each for each in planted if each.trial.kind == kind]
        print(
            f"{kind:40s} refuted {sum(each in refuted for each in of)}/{len(of)}, named "
            f"{sum(each in named for each in of)}/{len(of)}"
        )
    number = len(planted)
    print(
        f"{len(right)} right loops, {len(alarms)} false alarms; {number} faults of {len(kinds)} kinds: "
        f"{len(refuted)} refuted, {len(named)} named; {len(failed)} loops failed; {seconds:.0f} s"
    )
    return 1 if alarms or failed or len(refuted) < 0.95 * number or len(named) < 0.8 * number else 0


def _mark(result: Result) -> str:
    if result.failed:
        return "FAILED"
    if not result.trial.kind:
        return "ALARM" if result.refuted else "proved"
    if not result.refuted:
        return "missed"
    return "named" if _is_named(result) else "misnamed"


def _say(result: Result, everything: bool) -> None:
    mark, loop = _mark(result), result.trial.loop
    print(f"{mark:9s} {result.trial.kind or 'right'}: {result.said[:90]!r}  [{loop.seed}: {loop}]", flush=True)
    if everything or mark in ("FAILED", "ALARM", "missed", "misnamed"):
        print("          " + result.words[-1500:].replace("\n", "\n          "), flush=True)


if __name__ == "__main__":
    sys.exit(main())

"""Public faults of other trainers, in their own released code on this machine, each before the judge.

    .venv/bin/python scripts/judge_gallery.py [--only NAME ...] [--few N] [--markdown] [--releases FOLDER]

Every fault is a script of `examples/judge/gallery` that records a step, or writes an adapter, a merged checkpoint or
what a server says; then one command of `meshlora judge` must refute it, in the words that name it, and with the fault
taken out the same command must prove it. Those of an older release fetch it by pip into a folder of its own; where that
cannot be had it is said, and is no failure. Exit code 1 if one is not refuted, not named, or not proved when repaired.

The seconds are those of script and judge together; what both import (5 s) is read once for all of them.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import os
import runpy
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from proof_slice import turn

ROOT = Path(__file__).resolve().parents[1]
GALLERY = ROOT / "examples" / "judge" / "gallery"
LIMIT_S = 60.0
OLD_LIMIT_S = 180.0  # an older release imports everything of its own
STEP = "step {folder}/seen --model {folder}/base"
ADAPTER = "adapter {folder}/adapter --model {folder}/base"
MERGE = "merge {folder}/merged --model {folder}/base --adapter {folder}/adapter"
SERVED = "served http://127.0.0.1:{port} --model {folder}/base --adapter {folder}/adapter --name adapter"

# What an old transformers needs beside itself: it reads the hub by another client.
_OLD = "huggingface-hub==0.36.0 requests urllib3 idna charset_normalizer certifi datasets==3.1.0 aiohttp multidict "
_OLD += "yarl aiosignal frozenlist attrs propcache aiohappyeyeballs "
OLD_45 = _OLD + "transformers==4.45.2 tokenizers==0.20.3 peft==0.13.2 accelerate==1.0.1"
OLD_57 = _OLD + "transformers==4.57.3 tokenizers==0.22.1 trl==0.24.0 peft==0.18.0 accelerate==1.12.0"


@dataclass(frozen=True)
class Fault:
    """A script of the gallery, and what the judge must say of it.

    Attributes:
        thread: where it is public. says: words of the verdict. judge: its command. release: of an older one what pip
            installs, without dependencies. serves: the script serves until it is ended.
    """

    thread: str
    says: str
    judge: str = STEP
    release: str = ""
    serves: bool = False
    raises: bool = False


FAULTS: dict[str, Fault] = {
    "fsdp2_order": Fault("transformers #48792, #48873", "was not summed over ranks"),
    "seeds_per_rank": Fault("transformers #48792", "2 ranks train adapters of their own"),
    "tokens_of_devices": Fault("transformers #34242", "the mean of the ranks' means"),
    "own_compute_loss": Fault("transformers #37110, #43651", "the sum of the micro-batches' means"),
    "accelerate_loop": Fault("accelerate #3193", "the mean of the micro-batches' means"),
    "packed_with_mask": Fault("transformers #46634", "attention crosses the borders of packed sequences"),
    "optimizer_before": Fault("pytorch #149205", "no group of the optimizer has it"),
    "fsdp1_clipping": Fault("pytorch #72548, HALOs #15", "it was clipped by a norm of"),
    "same_rows": Fault("yaak-ai/rbyte #106", "the very rows of another rank"),
    "tp_row_parallel": Fault("none found; ezpz #208", "is invalid for input of size", raises=True),
    "fsdp1_save": Fault("trl #4416, peft #2450", "factors are empty or have one dim", ADAPTER),
    "fsdp2_shard_saved": Fault("axolotl #3772", "only part 1 of 2 of the rows of B is not zero", ADAPTER),
    "compiled_save": Fault("peft #2892, Soup #335", "holds no tensor", ADAPTER),
    "merged_tied": Fault("peft #2777, #2018", "no adapter is on it, and it is changed", MERGE),
    "merged_4bit": Fault("peft #2321, #1043", "merged on a base rounded to nf4, and rounded again", MERGE),
    "served_base": Fault("vllm #34186, #55193", "the bare base", SERVED, serves=True),
    "old_accumulation": Fault("transformers #34191", "the mean of the micro-batches' means", release=OLD_45),
    "old_checkpoints": Fault("transformers #42489, open-unlearning #178", "no gradient reached it", release=OLD_57),
    "old_dpo_reference": Fault("trl #1193, #4723", "the reference is the bare base", release=OLD_57),
}


@dataclass(frozen=True)
class Ended:
    """How one ended: `refuted`, `proved`, `not here` or `FAILED`, with its verdict or what went wrong."""

    name: str
    how: str
    seconds: float
    said: str


class NotHereError(Exception):
    """A release that pip cannot get here."""


def judged(name: str, folder: Path, releases: Path, *, is_repaired: bool) -> Ended:
    """Run the script of one fault, then the judge."""
    fault, words = FAULTS[name], [f"{folder}", *(["--repaired"] if is_repaired else [])]
    try:
        path = _installed(fault.release, releases) if fault.release and not is_repaired else None
    except NotHereError as error:
        return Ended(name, "not here", 0.0, f"{error}")
    begun = time.monotonic()
    limit = LIMIT_S if path is None else OLD_LIMIT_S
    script = _Child(lambda: _script(name, words, path), folder / "script.log", limit)
    try:
        code = script.wait_for(folder / "port") if fault.serves else script.wait()
        if fault.raises and code and not is_repaired:
            said = next((line for line in _lines(folder / "script.log") if fault.says in line), "")
            return Ended(name, "raises" if said else "FAILED", time.monotonic() - begun, said)
        if code:
            return Ended(name, "FAILED", time.monotonic() - begun, _tail(folder / "script.log", 12))
        port = (folder / "port").read_text() if fault.serves else ""
        command = shlex.split(fault.judge.format(folder=shlex.quote(f"{folder}"), port=port))
        code = _Child(lambda: _judge(command), folder / "judge.log").wait()
    finally:
        script.end()
    said, seconds = _tail(folder / "judge.log", 1), time.monotonic() - begun
    how = {0: "proved", 1: "refuted"}.get(code, "FAILED")
    is_right = how == "proved" if is_repaired else how == "refuted" and fault.says in said
    return Ended(name, how if is_right and seconds <= limit else "FAILED", seconds, said)


def _installed(release: str, releases: Path) -> Path:
    """The folder of an older release, for PYTHONPATH. Raises: NotHereError."""
    packages = release.split()
    target = releases / packages[-1]
    if not target.is_dir():
        given = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", f"{target}", *packages]
        done = subprocess.run(given, capture_output=True, text=True, check=False, timeout=600)
        if done.returncode:
            shutil.rmtree(target, ignore_errors=True)
            last = (done.stderr.strip().splitlines() or ["it says nothing"])[-1]
            raise NotHereError(f"pip cannot get the older release: {last}")
    return target


def _script(name: str, words: Sequence[str], release: Path | None) -> int:
    if release is not None:  # begin anew: this process has modules of the same names
        env = os.environ | {"PYTHONPATH": os.pathsep.join([f"{release}", f"{ROOT / 'src'}"])}
        os.execve(sys.executable, [sys.executable, f"{GALLERY / name}.py", *words], env)
    sys.argv = [name, *words]
    runpy.run_path(f"{GALLERY / name}.py", run_name="__main__")
    return 0


def _judge(command: Sequence[str]) -> int:
    from meshlora_judge.command import main

    return main(command)


class _Child:
    """A fork of this process, which has imported what scripts and judge need. Its output goes to a file."""

    def __init__(self, work: Callable[[], int], log: Path, limit: float = LIMIT_S) -> None:
        self.code: int | None = None
        self.limit = limit
        self.pid = os.fork()
        if self.pid == 0:
            self._run(work, log)

    @staticmethod
    def _run(work: Callable[[], int], log: Path) -> None:
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.setpgid(0, 0)
        code: Any = 1
        try:
            code = work()
        except SystemExit as ended:
            code = ended.code
        finally:  # nothing of the parent goes on here
            if (error := sys.exception()) is not None:
                print(f"{type(error).__name__}: {error}")
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code if isinstance(code, int) else 1)

    def wait(self) -> int:
        """Its exit code; 124 if it takes longer than the limit."""
        return self._wait(lambda: False)

    def wait_for(self, file: Path) -> int:
        """0 as soon as there is `file`."""
        return self._wait(file.exists)

    def _wait(self, is_ready: Callable[[], bool]) -> int:
        until = time.monotonic() + self.limit
        while time.monotonic() < until:
            found, status = os.waitpid(self.pid, os.WNOHANG)
            if found:
                self.code = os.waitstatus_to_exitcode(status)
                return self.code
            if is_ready():
                return 0
            time.sleep(0.02)
        self.end()
        return 124

    def end(self) -> None:
        if self.code is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, 9)
            os.waitpid(self.pid, 0)
            self.code = 137


def _lines(file: Path) -> list[str]:
    return [line for line in file.read_text(errors="replace").splitlines() if line.strip()]


def _tail(file: Path, lines: int) -> str:
    return "\n".join(_lines(file)[-lines:]) or "it says nothing"


def _imported() -> None:
    """What scripts and judge import, once, in a process of one thread: it is forked."""
    sys.path[:0] = [f"{GALLERY}", f"{ROOT / 'src'}"]
    import common
    from transformers import Trainer

    import meshlora_judge.recording.recorder
    import meshlora_judge.steps.judge

    assert Trainer is not None  # transformers imports it when it is first named
    assert meshlora_judge is not None
    assert common.torch.get_num_threads() == 1


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=FAULTS, metavar="NAME", help=f"of {', '.join(FAULTS)}")
    words = "N of those that need no older release, others with each commit"
    parser.add_argument("--few", type=int, metavar="N", help=words)
    parser.add_argument("--markdown", action="store_true", help="print the table of docs/judge.md")
    parser.add_argument("--releases", type=Path, metavar="FOLDER", help="keep older releases there")
    options = parser.parse_args(arguments)
    names = options.only or list(FAULTS)
    if options.few:
        names = [name for name in names if not FAULTS[name].release]
        first = turn()[0] * options.few
        names = [names[(first + place) % len(names)] for place in range(min(options.few, len(names)))]
    _imported()
    ended = []
    with tempfile.TemporaryDirectory(prefix="gallery-") as made:
        folder = Path(made)
        for name in names:
            ended.append(_both(name, folder, options.releases or folder))
            if not options.markdown:
                _print(ended[-1], folder)
    if options.markdown:
        print(table(ended))
    of_how: dict[str, list[str]] = {}
    for each in ended:
        of_how.setdefault(each.how, []).append(each.name)
    bad = [*of_how.get("FAILED", []), *of_how.get("not here", [])]
    counted = ", ".join(f"{len(which)} {how}" for how, which in of_how.items())
    print(f"{len(ended) - len(bad)} of {len(ended)} named, and proved with the fault taken out: {counted}", end="")
    print(f" ({', '.join(bad)})" if bad else "")
    failed = "FAILED" in of_how
    return 1 if failed else 0


def _both(name: str, folder: Path, releases: Path) -> Ended:
    """The fault, and FAILED if it is not proved when the fault is taken out."""
    with_it, without = folder / name, folder / f"{name}-repaired"
    with_it.mkdir()
    without.mkdir()
    found = judged(name, with_it, releases, is_repaired=False)
    repaired = judged(name, without, releases, is_repaired=True)
    if found.how == "FAILED" or repaired.how == "proved":
        return found
    return Ended(name, "FAILED", found.seconds, f"with the fault taken out: {repaired.said}")


def _print(each: Ended, folder: Path) -> None:
    said = each.said.replace(f"{folder}/", "")
    print(f"{each.name} ({FAULTS[each.name].thread}): {each.how}, {each.seconds:.1f} s\n    {said}", flush=True)


def table(ended: Sequence[Ended]) -> str:
    """The table of docs/judge.md."""
    rows = ["| script | what happens | thread | the judge says | s |", "|---|---|---|---|--:|"]
    for each in ended:
        fault = FAULTS[each.name]
        happens = ast.get_docstring(ast.parse((GALLERY / f"{each.name}.py").read_text("utf-8"))) or ""
        verb = "(the trainer)" if fault.raises else f"`{fault.judge.partition(' ')[0]}`"
        first = happens.splitlines()[0].rstrip(".")
        rows.append(f"| `{each.name}` | {first} | {fault.thread} | {verb}: {fault.says} | {each.seconds:.0f} |")
    return "\n".join(rows)


if __name__ == "__main__":
    sys.exit(main())

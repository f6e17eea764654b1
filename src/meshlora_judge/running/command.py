"""Run somebody's command so that it records itself, and what it said: its output, what was changed, why it failed.

FOLDER/settings.json  start/ (for PYTHONPATH)  twins/  recording/  said/  output.txt
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

import meshlora_ground
import meshlora_judge
from meshlora_ground.errors import UserError, numbered, one_line
from meshlora_judge.running.child import START, environment

# Of launchers, which fail because one of their processes did.
_OF_LAUNCHERS = ("ChildFailedError", "CalledProcessError", "ProcessExitedException", "SystemExit")
_ERROR = re.compile(r"^(?:\[rank\d+\]: ?)?((?:\w+\.)*\w*(?:Error|Exception|Interrupt|Exit)\b.*)$")
_OF_RANK = re.compile(r"^\[\w+:\d+\]:|^\[rank\d+\]: ?")


def prepare(folder: Path, *, steps: int, has_twins: bool) -> None:
    """Make the folder of a run. Raises: UserError: it holds files."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"--keep {folder}", "it is not an empty folder", "give another one")
    for name in ("start", "twins", "said", "done"):
        (folder / name).mkdir(parents=True)
    settings = {"steps": steps, "has_twins": has_twins}
    (folder / "settings.json").write_text(json.dumps(settings), encoding="utf-8")
    (folder / "start" / "sitecustomize.py").write_text(START, encoding="utf-8")
    # The command may have an environment of its own, without the judge.
    for package in (meshlora_ground, meshlora_judge):
        where = Path(package.__path__[0]).resolve()
        (folder / "start" / where.name).symlink_to(where)


def run(command: Sequence[str], folder: Path) -> int:
    """The exit code of `command`, whose output goes to output.txt. Raises: UserError: it cannot be started."""
    with (folder / "output.txt").open("wb") as output:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment(folder),
                start_new_session=True,  # so that its ranks can be ended together
            )
        except OSError as error:
            rule = f"it cannot be started ({error.strerror})"
            raise UserError(command[0], rule, "give a command as a shell has it") from error
        before = signal.signal(signal.SIGTERM, _leave)  # as a CI ends a job
        try:
            return process.wait()
        finally:
            signal.signal(signal.SIGTERM, before)
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _leave(*_: object) -> None:
    raise SystemExit(128 + signal.SIGTERM)


def said(folder: Path) -> list[str]:
    """What the processes of the command changed, in the order in which they first said it."""
    files = sorted((folder / "said").iterdir(), key=lambda file: file.stat().st_mtime_ns)
    return [one_line(file.read_text(encoding="utf-8"), 400) for file in files]


def last_lines(folder: Path, number: int) -> list[str]:
    """Of the command's output."""
    text = (folder / "output.txt").read_text(encoding="utf-8", errors="replace")
    return [line.rpartition("\r")[2] for line in text.splitlines() if line.strip()][-number:]


def failure(folder: Path, code: int) -> UserError | None:
    """Why there is no recording of all ranks; None: there is one, so that an exit code tells nothing of it."""
    if (folder / "refused.json").exists():
        return UserError(*json.loads((folder / "refused.json").read_text(encoding="utf-8")))
    recorded = [*(folder / "recording").glob("rank-*")]
    done = {int(file.name) for file in (folder / "done").iterdir()}
    if code:
        if recorded and len(done) == len(recorded):
            return None
        rule = f"it failed with exit code {code}: {_error(last_lines(folder, 10_000))}"
        return UserError("the command", rule, "mend it; it runs on CPUs, without a GPU")
    if not recorded:
        rule = "it ended without a step of a torch optimizer on a model of transformers"
        return UserError("the command", rule, "give one that trains; a Python started with -I or -E is not seen")
    ranks = sorted(int(file.name.removeprefix("rank-").partition(".")[0]) for file in recorded)
    if done and len(done) < len(recorded):
        missing = sorted({*ranks} - done)
        return UserError("the command", f"{numbered('rank', missing)} did not record all steps", "give fewer --steps")
    return None


def _error(lines: Sequence[str]) -> str:
    """The last line that names an exception, of a rank rather than of its launcher."""
    found = [match[1] for line in lines if (match := _ERROR.match(_OF_RANK.sub("", line.strip())))]
    own = [line for line in found if not any(name in line.partition(":")[0] for name in _OF_LAUNCHERS)]
    return one_line((own or found or list(lines) or ["it said nothing"])[-1], 400)

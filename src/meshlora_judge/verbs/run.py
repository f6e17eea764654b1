"""`meshlora judge run -- CMD`: is what a training command does that of a single process? On a twin, in a minute."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import Any


def add(verbs: Any) -> None:
    run = verbs.add_parser(
        "run",
        help="run a training command with a tiny model, and judge its first steps",
        description="Run a training command unchanged (python, torchrun, accelerate launch, trl) on CPUs, with each "
        "model that it reads replaced by a tiny one of the same kind; record its first optimizer steps, end it, and "
        "judge them as `judge step` does. Exit code 0: proved; 1: refuted; 2: it could not be run or judged.",
    )
    run.add_argument(
        "--steps",
        metavar="N",
        type=int,
        default=2,
        help="optimizer steps to record (default 2: in the first one A of a fresh LoRA has no gradient yet, as B = 0)",
    )
    run.add_argument("--keep", metavar="FOLDER", help="keep recording, twin and output there (default: removed)")
    run.add_argument("--no-twin", action="store_true", help="train the model in its full size")
    run.add_argument("--json", metavar="FILE", help="write the verdict, and what was replaced")
    run.add_argument("--junit", metavar="FILE", help="write the verdict as JUnit's XML, for a CI")
    run.add_argument("cmd", metavar="-- CMD", nargs=argparse.REMAINDER, help="the command, after --")
    run.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> None:
    import tempfile

    from meshlora_ground.errors import UserError
    from meshlora_ground.files import check_result_file

    command = options.cmd[1:] if options.cmd[:1] == ["--"] else options.cmd
    if not command:
        raise UserError("meshlora judge run", "it needs a command", "meshlora judge run -- python train.py")
    if options.steps < 1:
        raise UserError(f"--steps {options.steps}", "it must be at least 1")
    for file in (options.json, options.junit):
        if file:
            check_result_file(Path(file), file)
    if options.keep:
        return _judge(options, command, Path(options.keep).absolute())
    with tempfile.TemporaryDirectory(prefix="meshlora-judge-") as folder:
        return _judge(options, command, Path(folder).resolve())


def _judge(options: argparse.Namespace, command: list[str], folder: Path) -> None:
    from meshlora_ground.console import Console
    from meshlora_judge.running import command as running
    from meshlora_judge.verbs.step import conclude, judged

    console = Console()
    running.prepare(folder, steps=options.steps, has_twins=not options.no_twin)
    with console.busy(f"running {command[0]} on CPUs, until it has made {options.steps} steps"):
        code = running.run(command, folder)
    changed = {f"replaced ({number})": line for number, line in enumerate(running.said(folder), 1)}
    if error := running.failure(folder, code):
        for line in changed.values():
            console.say(f"replaced: {line}")
        if not (folder / "refused.json").exists():
            for line in running.last_lines(folder, 20):
                console.say(f"  | {line}")
        raise error
    verdict = judged(folder / "recording", None)
    verdict.facts = {"command": shlex.join(command)} | changed | verdict.facts
    conclude(verdict, console, json_file=options.json, junit_file=options.junit)

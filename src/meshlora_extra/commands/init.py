"""`meshlora init`: five questions, or flags, and a run file that runs at once.

Owns: also what is found of the devices. Does not own: what stands in the file (`meshlora_extra.commands.first_run`).
"""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path
from typing import Any

from meshlora_extra.commands.schema import first_line
from meshlora_ground.errors import UserError

_GOALS = ("sft", "qlora", "dpo")
_LENGTH = re.compile(r"(?P<number>\d+(\.\d+)?)\s*(?P<unit>epochs?|steps?)")


def add(commands: Any) -> None:
    init = commands.add_parser(
        "init",
        help="write a run file for a model and data",
        description="Asks for what is not given: model, data, GPUs, goal, length. Looks at the data, plans the "
        "topology, takes a published recipe, and writes a run file with the reasons.",
    )
    init.add_argument("--yes", action="store_true", help="ask nothing: take the defaults for what is not given")
    init.add_argument("--model", metavar="FOLDER", help="checkpoint, or its name on the hub")
    init.add_argument("--data", metavar="FILE", help="training data")
    init.add_argument("--eval", metavar="FILE", help="held-out data (default: none)")
    init.add_argument("--gpus", type=int, metavar="N", help="processes, one a GPU (default: those of this machine)")
    init.add_argument("--gpu", metavar="NAME", help="a100, h100, h200, b200 or l40s, if it is not this machine's")
    init.add_argument("--hardware", metavar="FILE", help="of meshlora calibrate: measured numbers")
    init.add_argument("--goal", choices=_GOALS, help="answers, the same with a 4-bit base, or preferences")
    init.add_argument("--length", metavar="TEXT", help='as in "3 epochs" or "200 steps"')
    init.add_argument("--columns", metavar="OURS=THEIRS", action="append", default=[], help="as data.columns")
    init.add_argument("--out", default="run.yaml", metavar="RUN.yaml", help="the file to write (default run.yaml)")
    init.add_argument("--force", action="store_true", help="replace a file that is there")
    init.set_defaults(run=_init)


def _init(options: argparse.Namespace) -> None:
    from meshlora_ground.console import Console
    from meshlora_ground.files import check_result_file, write_text_atomically

    file = Path(options.out)
    check_result_file(file, f"--out {file}")
    if file.exists() and not options.force:
        raise UserError(f"--out {file}", "it is there already", "choose another, or --force")
    given = _answers(options)
    epochs, steps = _length(given["length"])
    from meshlora_extra.commands.first_run import Wish, first_run

    gpus = _number(given["gpus"])
    wish = Wish(
        model=given["model"],
        data=given["data"],
        eval=options.eval,
        output=f"runs/{file.stem}",
        gpus=gpus,
        hardware=_hardware(options, gpus),
        goal=given["goal"] or None,  # type: ignore[arg-type] # one of them
        epochs=epochs,
        steps=steps,
        columns=dict(_columns(each) for each in options.columns) or None,
    )
    text = first_run(wish, file=file, schema=first_line())
    write_text_atomically(file, text)
    say = Console().say
    say(text.rstrip("\n"))
    say(f"written: {file}. meshlora check {file} looks it over; its first lines say how to start it.")


def _answers(options: argparse.Namespace) -> dict[str, str]:
    """The answers: given, asked for, or the default. Raises: UserError: nobody to ask, or no answer and no default."""
    import torch

    gpus = options.gpus
    if gpus is None:  # those of this machine, or two processes on its CPUs if it has two
        gpus = torch.cuda.device_count() or min(2, os.cpu_count() or 1)
    questions = {
        "model": ("Model: a folder, or a name on the hub", None),
        "data": ("Training data: a file, or a name on the hub", None),
        "gpus": ("Processes, one a GPU", str(gpus)),
        "goal": ("Goal: sft (answers), qlora (the same, base in 4 bits), dpo (preferences); empty: by the data", ""),
        "length": ('Length, as in "3 epochs" or "200 steps"; empty: by the data', ""),
    }
    found = {}
    for name, (question, default) in questions.items():
        value = getattr(options, name)
        found[name] = str(value) if value is not None else _asked(name, question, default, asks=not options.yes)
    if found["goal"] not in ("", *_GOALS):
        raise UserError(f"goal {found['goal']}", f"it is one of {', '.join(_GOALS)}")
    return found


def _asked(name: str, question: str, default: str | None, *, asks: bool) -> str:
    from meshlora_ground.console import ask

    given, answer = f"--yes without --{name}", default
    if asks:
        given, answer = f"--{name}", ask(question, default)
        if answer is None:
            raise UserError(given, "there is nobody to ask", "give --model and --data, and --yes for the rest")
    if not answer and default is None:
        raise UserError(given, "it has no default", f"give --{name}")
    return answer or default or ""


def _length(text: str) -> tuple[float | None, int | None]:
    """(epochs, steps) of words as in "3 epochs"; both None if they are empty."""
    if not text.strip():
        return None, None
    found = _LENGTH.fullmatch(text.strip().lower())
    is_steps = found is not None and found["unit"].startswith("step")
    if found is None or float(found["number"]) <= 0 or (is_steps and "." in found["number"]):
        raise UserError(f"--length {text!r}", "it is a number of epochs or steps", 'as in "3 epochs" or "200 steps"')
    return (None, int(found["number"])) if is_steps else (float(found["number"]), None)


def _number(text: str) -> int:
    if not (text.isascii() and text.isdecimal()) or not 1 <= int(text) <= 10**5:
        raise UserError(f"--gpus {text}", "it is a number of processes, at least 1")
    return int(text)


def _columns(text: str) -> tuple[str, str]:
    ours, equals, theirs = text.partition("=")
    if not (ours and equals and theirs):
        raise UserError(f"--columns {text}", "it must read OURS=THEIRS", "as in --columns prompt=question")
    return ours, theirs


def _hardware(options: argparse.Namespace, gpus: int) -> Any:
    """Numbers of the devices: the user's, those of the GPUs here, or guesses for CPUs, which say that they are."""
    import dataclasses

    import torch

    from meshlora_extra.planner.hardware import GPUS, Hardware, hardware_named

    if options.gpu or options.hardware:
        return hardware_named(options.gpu, options.hardware)
    if torch.cuda.is_available():
        here = torch.cuda.get_device_properties(0)
        known = next((gpu for name, gpu in GPUS.items() if name in here.name.lower()), None)
        slowest = GPUS["l40s"]
        return known or dataclasses.replace(
            slowest, name=f"{here.name} (speeds of {slowest.name})", memory_gb=here.total_memory / 1e9
        )
    page, pages = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_AVPHYS_PAGES")
    memory_gb = page * pages / 1e9 / gpus
    name = "CPU process, its speed guessed"
    return Hardware(name, memory_gb, 0.1, 0.1, 10, 5, 1, usable_memory=0.8, device="cpu")

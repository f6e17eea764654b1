"""`meshlora init`: five questions, or flags, and a run file that runs at once.

Owns: also what is found of the devices. Does not own: what stands in the file (`meshlora_extra.commands.first_run`).
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshlora_extra.commands.schema import first_line
from meshlora_ground.errors import UserError

if TYPE_CHECKING:
    from meshlora.run.run_data import RunData

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
    init.add_argument("--eval", metavar="FILE", help="held-out data (default: 0.05 of the rows of --data)")
    init.add_argument("--gpus", type=int, metavar="N", help="processes, one a GPU (default: those of this machine)")
    init.add_argument("--gpu", metavar="NAME", help="as in rtx4090 or h100, if it is not this machine's")
    init.add_argument("--hardware", metavar="FILE", help="of meshlora calibrate: measured numbers")
    init.add_argument("--goal", metavar="|".join(_GOALS), help="answers, the same with a 4-bit base, or preferences")
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
    given, was_asked = _answers(options)
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
        columns=dict(map(_columns, options.columns)) or None,
    )
    say = Console().say
    try:
        text = first_run(wish, file=file, schema=first_line(), show=_show_first)
    except UserError:
        if was_asked:  # the answers are not lost
            say(f"Your answers, to correct and go on with:\n  {_command(options, given)}")
        raise
    write_text_atomically(file, text)
    say(text.rstrip("\n"))
    say(f"written: {file}. meshlora check {file} looks it over; its first lines say how to start it.")


@dataclass(frozen=True)
class _Question:
    """What is asked where `--name` is not given. check: refuses an answer. default: "" has one that the data decide."""

    name: str
    text: str
    default: str | None
    check: Callable[[str], object]

    def answer(self, *, asks: bool) -> str:
        """A right answer: asked for until it is one, or the default. Raises: UserError: nobody to ask, no default."""
        if not asks:
            if self.default is None:
                raise UserError(f"--yes without --{self.name}", "it has no default", f"give --{self.name}")
            return self.default
        from meshlora_ground.console import Console, ask

        while True:
            answer = ask(self.text, self.default)
            if answer is None:
                way_out = "give --model and --data, and --yes for the rest"
                raise UserError(f"--{self.name}", "there is nobody to ask", way_out)
            answer = answer or self.default
            if answer is None:
                continue
            try:
                self.check(answer)
            except UserError as error:
                Console().say(f"  {error}")
                continue
            return answer


def _answers(options: argparse.Namespace) -> tuple[dict[str, str], bool]:
    """(the answers: given, asked for, or the default; whether any was asked for), each checked as it comes. Raises:
    UserError: what is given is wrong; nobody to ask, or no answer and no default."""
    import torch

    gpus = options.gpus
    if gpus is None:  # those of this machine, or two processes on its CPUs if it has two
        gpus = torch.cuda.device_count() or min(2, os.cpu_count() or 1)
    goal = "Goal: sft (answers), qlora (the same, base in 4 bits), dpo (preferences); empty: by the data"
    questions = (
        _Question("model", "Model: a folder, or a name on the hub", None, _check_model),
        _Question("data", "Training data: a file, or a name on the hub", None, _check_data),
        _Question("gpus", "Processes, one a GPU", str(gpus), _number),
        _Question("goal", goal, "", _check_goal),
        _Question("length", 'Length, as in "3 epochs" or "200 steps"; empty: by the data', "", _length),
    )
    found, was_asked = {}, False
    for question in questions:
        value = getattr(options, question.name)
        if value is not None:  # before the first question: nobody should answer in vain
            question.check(str(value))
    for question in questions:
        value = getattr(options, question.name)
        if value is None:
            value = question.answer(asks=not options.yes)
            was_asked = was_asked or not options.yes
        found[question.name] = str(value)
    return found, was_asked


def _check_model(given: str) -> None:
    """Of a name on the hub the small files are downloaded; its weights are once they are needed."""
    from meshlora.loading.blueprint import read_model_config
    from meshlora_ground.hub import located

    read_model_config(located(given, "--model", kind="config"))


def _check_data(given: str) -> None:
    from meshlora.reading.places import files_of
    from meshlora_ground.hub import located_files

    for path in located_files(given, "--data", split="train"):
        files_of(path)


def _check_goal(given: str) -> None:
    if given in ("", *_GOALS):
        return
    way_out = ""
    if given in ("grpo", "rl", "ppo"):
        way_out = "rewards are trained on by meshlora rl: docs/rl.md"
    elif given in ("orpo", "kto", "classify", "embed"):
        way_out = f"write train.objective: {given} into the file of sft or dpo: docs/objectives.md"
    raise UserError(f"--goal {given}", f"it is one of {', '.join(_GOALS)}", way_out)


def _command(options: argparse.Namespace, given: Mapping[str, str]) -> str:
    """The command with the answers in it."""
    words = ["meshlora", "init"]
    for name, answer in given.items():
        if answer:
            words += [f"--{name}", answer]
    for name in ("eval", "gpu", "hardware"):
        if value := getattr(options, name):
            words += [f"--{name}", value]
    for each in options.columns:
        words += ["--columns", each]
    return shlex.join([*words, "--yes", "--out", options.out])


def _show_first(data: RunData) -> None:
    """Print the first sequence, with what is trained of it: what all that follows stands on."""
    from meshlora_extra.commands.data import show_sequence
    from meshlora_ground.console import Console

    show_sequence(data.train, 0, data.tokenizer, Console())


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

    from meshlora_extra.planner.hardware import GPUS, Hardware, card_of, hardware_named

    if options.gpu or options.hardware:
        return hardware_named(options.gpu, options.hardware)
    if torch.cuda.is_available():
        here = torch.cuda.get_device_properties(0)
        slowest = GPUS["l40s"]
        return card_of(here.name) or dataclasses.replace(
            slowest, name=f"{here.name} (speeds of {slowest.name})", memory_gb=here.total_memory / 1e9
        )
    page, pages = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_AVPHYS_PAGES")
    memory_gb = page * pages / 1e9 / gpus
    name = "CPU process, its speed guessed"
    return Hardware(name, memory_gb, 0.1, 0.1, 10, 5, 1, usable_memory=0.8, device="cpu")

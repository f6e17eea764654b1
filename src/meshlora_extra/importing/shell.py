"""Commands of trainers in scripts of a shell, read word by word; nothing is run.

Owns: which words are a trainer's command, its options, and what launchers before it say. Does not own: what options
mean.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_ASSIGNED = re.compile(r"(?:export )?([A-Za-z_]\w*)=(.*)")
_VARIABLE = re.compile(r"\$\{?([A-Za-z_]\w*)\}?")
# `$(expr 16 / 4)` and `$((16 / 4))`: whole numbers, multiplied and divided from left to right.
_COMPUTED = re.compile(r"\$\((?:expr |\()\s*(\d{1,9}(?:\s*\\?[*/]\s*\d{1,9})*)\s*\)?\)")
_FACTOR = re.compile(r"([*/])\s*(\d+)")
_COMMENT = re.compile(r"(?:^|(?<=\s))#.*$", re.MULTILINE)
_METHODS = ("sft", "dpo", "kto", "orpo", "grpo", "rlhf", "pt", "reward", "rloo", "cpo", "gkd")
# Program -> (its trainer, the words behind it that train).
_PROGRAMS: dict[str, tuple[str, tuple[str, ...]]] = {"swift": ("swift", _METHODS), "trl": ("trl", _METHODS)}
_PROGRAMS |= {"axolotl": ("axolotl", ("train",)), "tune": ("torchtune", ("run",))}
_PROGRAMS |= dict.fromkeys(("llamafactory-cli", "lmf"), ("llama-factory", ("train",)))
# Options of launchers that say how many processes there are.
_COUNTS = ("num_processes", "nproc_per_node", "num_gpus")


@dataclass
class Command:
    """A trainer's command.

    Attributes:
        trainer: its name. method: sft, dpo, ...: the word behind it, or the name of a script. options: as typed values.
        config: a YAML file that it names. processes: that it is started with; 0: not said. files: those of launchers.
        lost: options whose value is not in the file.
    """

    trainer: str
    method: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    config: str | None = None
    processes: int = 0
    files: list[str] = field(default_factory=list)
    lost: tuple[tuple[str, Any, str], ...] = ()


def commands_in(text: str) -> list[Command]:
    """The commands of trainers in a script, or in text that shows them."""
    variables: dict[str, str] = {}
    found = []
    for words in _lines(text, variables):
        while words and (assigned := _ASSIGNED.fullmatch(words[0])):
            variables[assigned[1]] = assigned[2]
            words = words[1:]
        if (command := _command(words)) is not None:
            if not command.processes and variables.get("NPROC_PER_NODE", "").isdecimal():
                command.processes = int(variables["NPROC_PER_NODE"])
            found.append(command)
    return found


def _with_values(line: str, variables: Mapping[str, str]) -> str:
    """A line with the variables that the script sets, and with what it computes of whole numbers."""
    line = _VARIABLE.sub(lambda name: variables.get(name[1], name[0]), line)
    return _COMPUTED.sub(lambda found: _result(found[1]), line)


def _result(text: str) -> str:
    value = int(re.match(r"\d+", text)[0])  # type: ignore[index] # it begins so
    for sign, digits in _FACTOR.findall(text):
        other = int(digits)
        if sign == "*":
            value *= other
        else:
            value = value // other if other else 0
    return str(value)


def _lines(text: str, variables: Mapping[str, str]) -> Iterator[list[str]]:
    """The words of each line, and of quoted text over several. variables: those set so far."""
    waiting = ""
    for line in text.replace("\\\r\n", " ").replace("\\\n", " ").splitlines():
        waiting = f"{waiting}\n{line}" if waiting else line.strip().removeprefix("$ ").removeprefix("!")
        try:
            words = _words(_with_values(waiting, variables))
        except ValueError:
            # An apostrophe of prose ends with its line; quotes of a command go on.
            if " --" not in waiting:
                waiting = ""
            continue
        waiting = ""
        if words[:1] == ["export"]:
            words = words[1:]
        if words:
            yield words


def _words(line: str) -> list[str]:
    """The words before a comment, which begins with a word, as in a shell. Raises: ValueError: a quote is open."""
    try:
        words = shlex.split(line)
    except ValueError:
        words = shlex.split(_COMMENT.sub("", line))  # the quote may be the comment's
    for place, word in enumerate(words):
        if word.startswith("#"):
            return words[:place]
    return words


def _command(words: Sequence[str]) -> Command | None:
    """The command of a trainer in the words of a line; None: there is none."""
    for place, word in enumerate(words):
        rest = words[place + 1 :]
        name = word.rpartition("/")[2]
        trainer, verbs = _PROGRAMS.get(name, ("", ()))
        if rest and rest[0] in verbs:
            method = rest[0] if verbs is _METHODS else ""
            return _filled(Command(trainer, method), words[:place], rest[1:])
        script = name.removesuffix(".py")
        if name.endswith(".py") and script in _METHODS and place:
            return _filled(Command("trl", script), words[:place], rest)
    return None


def _filled(command: Command, before: Sequence[str], words: Sequence[str]) -> Command:
    """`command` with its options, and those of the launcher before it."""
    launcher, _ = _options(before)
    for name in _COUNTS:
        if str(launcher.get(name, "")).isdecimal():
            command.processes = int(launcher[name])
    for name in ("config_file", "deepspeed_config_file"):
        if name in launcher:
            command.files.append(str(launcher[name]))
    options, loose = _options(words)
    config = options.pop("config", None)
    named = [word for word in loose if word.endswith((".yaml", ".yml", ".json"))]
    if config is not None and str(config).endswith((".yaml", ".yml")):
        command.config = str(config)
    elif named:
        command.config = named[0]
    if command.trainer == "trl" and "accelerate_config" in options:
        command.files.append(str(options.pop("accelerate_config")))
    if command.trainer == "torchtune":
        options |= {word.partition("=")[0]: _typed(word.partition("=")[2]) for word in loose if "=" in word}
    unknown = [name for name, value in options.items() if isinstance(value, str) and _VARIABLE.search(value)]
    command.lost = tuple((name, options.pop(name), "the variable is not set in this file") for name in unknown)
    command.options = options
    return command


def _options(words: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """(options with their values, the words that are none). A flag is true, `--no_flag` false."""
    options: dict[str, Any] = {}
    loose: list[str] = []
    name = ""
    for word in words:
        if word in ("|", "&&", ";", ">", "2>&1", "&", "||", ">>"):
            break
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            options[name] = _typed(value) if equals else True
            if equals:
                name = ""
        elif name:
            value = _typed(word)
            if options[name] is True:
                options[name] = value
            else:
                before = options[name]
                options[name] = [*before, value] if isinstance(before, list) else [before, value]
        else:
            loose.append(word)
    for flag in [each for each in options if each.startswith("no_") and options[each] is True]:
        if flag not in ("no_cuda", "no_remove_unused_columns"):
            del options[flag]
            options[flag.removeprefix("no_")] = False
    return options, loose


def _typed(word: str) -> Any:
    """A word of a command as a number, true or false; else the text."""
    low = word.lower()
    if low in ("true", "false"):
        return low == "true"
    if re.fullmatch(r"[-+]?\d+", word) and len(word) < 20:
        return int(word)
    if re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", word) and len(word) < 40:
        return float(word)
    return word

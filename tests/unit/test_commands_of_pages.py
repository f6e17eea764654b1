"""Commands that pages show: they parse, what they name is there, and a test runs each or it is said why none does."""

from __future__ import annotations

import argparse
import functools
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from meshlora.cli.main import _parser
from tests.changed import is_there
from tests.commands import Command, commands, words_of_meshlora
from tests.for_each import for_each
from tests.scripts import ROOT

COMMANDS = list(commands())


def _filled(word: str, before: str) -> str:
    """A number where a page has a letter for one."""
    return "2" if word in ("N", "T", "S", "X") and before != "--topology" else word


@functools.cache
def _arguments() -> Any:
    return _parser()


def _subparsers() -> dict[str, Any]:
    (action,) = [a for a in _arguments()._actions if isinstance(a, argparse._SubParsersAction)]
    return dict(action.choices)


def test_commands_are_found() -> None:
    assert sum(command.is_whole for command in COMMANDS) > 80
    assert len({command.page for command in COMMANDS}) > 25


@for_each("page", sorted({command.page for command in COMMANDS}))
def test_commands_of_a_page_are_what_there_is(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    faults = [fault for c in COMMANDS if c.page == page and (fault := _fault(c))]
    assert not faults, capsys.readouterr().err


def _fault(command: Command) -> str:
    """What is wrong with it; "" for nothing."""
    if (words := words_of_meshlora(command.words)) is not None:
        return _fault_of_arguments(command, words)
    text = command.text
    if command.words[0] == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        unknown = {word for word in command.words[1:] if re.fullmatch(r"[a-z][a-z-]*", word)} - set(targets)
        return f"{text}: no target {unknown}" if unknown and command.is_whole else ""
    for extra in re.findall(r"(?:meshlora|\.)\[([\w,]+)\]", text):
        declared = (ROOT / "pyproject.toml").read_text()
        if missing := [name for name in extra.split(",") if f"\n{name} = [" not in declared]:
            return f"{text}: no extra {missing}"
    if "pytest" in command.words:
        paths = [word for word in command.words if word.startswith("tests/")]
        wrong = [path for path in paths if not (is_there(path) if "::" in path else any(ROOT.glob(path)))]
        return f"{text}: no {wrong}" if wrong else ""
    for script in re.findall(r"(?:examples|scripts|benchmarks)/[\w/]+\.\w+", text):
        if not (ROOT / script).exists() and script != "benchmarks/NAME.py":
            return f"{text}: no {script}"
        files = (ROOT / "benchmarks").glob("*.py") if script.startswith("benchmarks/") else [ROOT / script]
        known, given = "".join(file.read_text() for file in files), text.partition(script)[2].split()
        if unknown := [word for word in given if re.fullmatch(r"--[a-z][\w-]+", word) and word not in known]:
            return f"{text}: {script} has no {unknown}"
    return ""


def _fault_of_arguments(command: Command, words: list[str]) -> str:
    parsers = _subparsers()
    if words and command.is_whole and not words[0].startswith("-") and words[0] not in parsers:
        return f"{command.text}: no such command"
    if not words or words[0] not in parsers:  # the program itself, or a sentence
        return ""
    name, *rest = words
    if not command.is_whole or {"...", "ARGUMENTS"} & set(rest):
        verbs = [a for a in parsers[name]._actions if isinstance(a, argparse._SubParsersAction)]  # of `judge`
        asked = [parsers[name], *(verb for action in verbs for verb in action.choices.values())]
        flags = {flag for parser in asked for action in parser._actions for flag in action.option_strings}
        unknown = [word for word in rest if re.fullmatch(r"--[a-z][\w-]*", word) and word not in flags]
        return f"{command.text}: meshlora {name} has no {unknown}" if unknown else ""
    if "--help" in rest:
        return ""
    try:
        _arguments().parse_args([name, *(_filled(word, before) for before, word in zip(words, rest, strict=False))])
    except SystemExit:
        return f"{command.text}: it does not parse"
    examples = [word for word in rest if re.fullmatch(r"examples/[\w.-]+", word)]
    return f"{command.text}: no such file" if any(not (ROOT / example).exists() for example in examples) else ""


def test_each_command_is_run_by_a_test_or_said_why_not() -> None:
    whole = [command for command in COMMANDS if command.is_whole]
    assert not [f"{c.page}: {c.text}" for c in whole if c.run_by is None]
    named = {name for c in whole for name in re.findall(r"tests/[\w/]+\.py", c.run_by or "")}
    assert not [name for name in named if not (ROOT / name).exists()]


MINE = [c for c in COMMANDS if c.is_whole and c.run_by == "tests/unit/test_commands_of_pages.py"]


@pytest.mark.proof
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", sorted({command.page for command in MINE}))
def test_commands_of_a_page_run(page: str, tmp_path: Path) -> None:
    """In the order of the page, in a copy of the examples, so that nothing is left in the clone."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "examples").symlink_to(ROOT / "examples")
    for command in dict.fromkeys(c for c in MINE if c.page == page):
        given = words_of_meshlora(command.words)
        words = ["-m", "meshlora", *given] if given is not None else list(command.words[1:])
        done = subprocess.run(
            [sys.executable, *words], cwd=tmp_path / "here", capture_output=True, text=True, check=False
        )
        said = f"{command.text}\n{done.stdout}{done.stderr}"
        assert done.returncode == (2 if command.error else 0), said
        assert command.error in done.stderr, said

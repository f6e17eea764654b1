"""The parser of all commands: our form of errors, paths that can be paths, and the nearest name for a slip.

Owns: what argparse says. Does not own: commands and their arguments.
"""

from __future__ import annotations

import argparse
import itertools
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from meshlora_ground.errors import MeshloraError, UserError, did_you_mean
from meshlora_ground.reading import path_argument

# Metavars of arguments that are paths.
_PATHS = {"FILE", "FOLDER", "FOLDER|FILE", "auto|FOLDER", "PATH", "ADAPTER", "RUN", "RUN.yaml"}
_NOT_A_CHOICE = re.compile(
    r"argument (?P<name>.*?): invalid choice: '(?P<given>.*)' \(choose from (?P<known>.*)\)", re.S
)

_COLOUR = re.compile(r"\x1b\[[\d;]*m")


class Parser(argparse.ArgumentParser):
    """argparse with our error format and exit code 2; rejects strings that cannot be a path."""

    has_commands = False

    def add_argument(self, *names: Any, **options: Any) -> argparse.Action:
        if options.get("metavar") in _PATHS:
            options["type"] = path_argument
        return super().add_argument(*names, **options)

    def add_subparsers(self, **options: Any) -> Any:
        self.has_commands = True
        return super().add_subparsers(**options)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse does, but an option that there is not is the first thing said, with the nearest name."""
        words = sys.argv[1:] if args is None else args
        ours = itertools.takewhile(lambda word: word != "--" and (not self.has_commands or word[:1] == "-"), words)
        given = [word.partition("=")[0] for word in ours if word.startswith("--")]
        known = self._known() if given else []  # --help is costly to format
        for name in given:
            is_known = any(option.startswith(name) for option in known)  # argparse takes an unambiguous beginning, too
            if not is_known and (near := self._near(name, known)):
                self.error(f"{self.prog} has no option {name}; {near}")
        found, rest = super().parse_known_args(args, namespace)
        if rest and not self.has_commands:  # argparse would name the help of all commands
            self.error(f"unrecognized arguments: {' '.join(rest)}")
        return found, rest

    def _known(self) -> list[str]:
        """All options, from the lines of --help that begin with one: argparse has no public list."""
        text = _COLOUR.sub("", self.format_help())
        lines = re.findall(r"(?m)^ {2}(-.*?)(?: {2}|$)", text)  # up to the help, which may name options of others
        return re.findall(r"--[\w-]+", "\n".join(lines))

    def error(self, message: str) -> None:  # type: ignore[override]
        if (wrong := _NOT_A_CHOICE.fullmatch(message)) and (near := self._near(wrong["given"], _words(wrong["known"]))):
            message = f"{wrong['name']} {wrong['given']!r}: it is none of {', '.join(_words(wrong['known']))}; {near}"
        said = MeshloraError(f"{message}; see {self.prog} --help")  # escaped: it repeats the arguments
        print(f"error: {said}", file=sys.stderr)
        raise SystemExit(UserError.exit_code)

    @staticmethod
    def _near(word: str, known: Iterable[str]) -> str:
        if not word:
            return ""
        said = did_you_mean(word, known)
        return said if said.startswith("did you mean") else ""  # else it lists all, which argparse does, too


def _words(choices: str) -> Sequence[str]:
    """Of `'a', 'b'`, or `a, b` as newer versions of Python have it."""
    return [word.strip(" '\"") for word in choices.split(",")]

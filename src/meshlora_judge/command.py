"""`meshlora judge`, and `meshlora-judge` where the engine is not installed: what others trained, saved or serve.

Owns: its verbs and the edge where an error becomes one line and an exit code: 0 proved, 1 refuted, 2 a wrong request.
Does not own: the verbs, each in the file of its name.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

from meshlora_ground.errors import MeshloraError
from meshlora_ground.parser import Parser

# Each module's `add` declares the verb's arguments and what runs it.
VERBS = {name: f"meshlora_judge.verbs.{name}" for name in ("step", "run", "adapter", "served", "merge")}
_HELP = "prove or refute what any trainer did: a recorded step, an adapter's files, a server's answers"


def add(commands: Any) -> None:
    judge = commands.add_parser("judge", help=_HELP, description=f"{_HELP[0].upper()}{_HELP[1:]}.")
    _add_verbs(judge)


def _add_verbs(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="verb", required=True, parser_class=Parser)
    for module in VERBS.values():  # in the order of --help
        importlib.import_module(module).add(verbs)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb; returns the exit code."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    parser = Parser(prog="meshlora-judge", description=f"{_HELP[0].upper()}{_HELP[1:]}.")
    _add_verbs(parser)
    try:
        options = parser.parse_args(arguments)
        options.run(options)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)
        return 130
    except MeshloraError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0

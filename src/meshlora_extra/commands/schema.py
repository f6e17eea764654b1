"""`meshlora schema`: the JSON schema of a run file, as shipped (scripts/write_schema.py writes it)."""

from __future__ import annotations

import argparse
from importlib import resources
from typing import Any

_FILE = resources.files("meshlora") / "run" / "config" / "run-file.schema.json"


def add(commands: Any) -> None:
    schema = commands.add_parser(
        "schema",
        help="print the JSON schema of a run file, for editors and other checkers",
        description="An editor with a YAML language server checks and completes a run file whose first line names the "
        "schema, as --line prints it.",
    )
    schema.add_argument("--line", action="store_true", help="print that line instead, for the installed file")
    schema.set_defaults(run=_schema)


def first_line() -> str:
    """The comment by which an editor finds the schema of this installation."""
    return f"# yaml-language-server: $schema={_FILE}"


def _schema(options: argparse.Namespace) -> None:
    from meshlora_ground.console import hand_over

    hand_over(first_line() if options.line else _FILE.read_text("utf-8").rstrip())

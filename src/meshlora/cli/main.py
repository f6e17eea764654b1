"""The command line: `meshlora train | verify | check | ...`.

Owns: the edge where an error becomes one line and an exit code: 0 success, 1 failure, 2 a wrong request. Does not own:
the commands, each in the file of its name, and finding those of other packages (`run.extras`).
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import shlex
import shutil
import sys
import textwrap
import traceback
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Without it a rank whose peers have ended prints forty lines of C++ addresses before the cause.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
# Only the process that downloads a name of the hub goes online (`meshlora_ground.hub`), as the user's own value lets
# it.
os.environ.setdefault("MESHLORA_HF_HUB_OFFLINE", os.environ.get("HF_HUB_OFFLINE", ""))
os.environ["HF_HUB_OFFLINE"] = "1"

from meshlora.cli.arguments import add_local_rank
from meshlora.run.extras import COMMANDS, GROUPS, table_of
from meshlora_ground.errors import MeshloraError, UserError, report
from meshlora_ground.lifetime import end_with, note_interrupts
from meshlora_ground.parser import Parser
from meshlora_ground.versions import version_of

# Always there, and never another package's. Each module's `add` declares the command's arguments and what runs it.
_OWN = {name: f"meshlora.cli.{name}" for name in ("train", "verify", "check")}
# Of commands that no package gives a heading.
_NO_HEADING = "more commands"
# Among words that are joined by NUL: not part of a command that a user would give.
_LOCAL_RANK = re.compile(r"\0--local[-_]rank[=\0][^\0]*")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    interrupts: list[int] = []
    if "MESHLORA_LAUNCHER" in os.environ:  # `run.edge` takes seconds to import
        end_with(int(os.environ["MESHLORA_LAUNCHER"]))
    elif "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun: its ranks would train on, unseen, after it was killed
        end_with(os.getppid())
    if arguments is None:  # the process is ours
        sys.excepthook = _say_fault
    try:
        note_interrupts(interrupts)
        parser = _parser()
        if "_ARGCOMPLETE" in os.environ:  # a shell asks what may follow; ends this process
            import argcomplete

            argcomplete.autocomplete(parser)
        options = parser.parse_args(arguments)
        given = sys.argv[1:] if arguments is None else arguments
        words = _LOCAL_RANK.sub("", "\0".join(["meshlora", *given]))  # NUL is in no argument
        options.words = shlex.join(words.split("\0"))
        rank = options.local_rank  # of launchers without LOCAL_RANK in the environment
        if rank is not None and os.environ.setdefault("LOCAL_RANK", str(rank)) != str(rank):
            raise UserError(f"--local-rank {rank}", f"LOCAL_RANK is {os.environ['LOCAL_RANK']}", "leave it out")
        _locate(options)
        run: Callable[[argparse.Namespace], None] = options.run
        run(options)
    except BaseException as error:
        # Libraries turn an interrupt into errors of their own.
        if interrupts or isinstance(error, KeyboardInterrupt):
            print("interrupted", file=sys.stderr, flush=True)
            return 130
        if not isinstance(error, MeshloraError):
            raise
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _locate(options: argparse.Namespace) -> None:
    """Replace names of the hub in `--model` and `--adapter` by their folders."""
    from meshlora_ground.hub import located

    trust = getattr(options, "trust_remote_code", False)
    is_shape = options.command in ("plan", "export") or getattr(options, "twin", False)
    kinds: dict[str, Any] = {"model": "config" if is_shape else "model", "adapter": "adapter"}
    for name, kind in kinds.items():
        if given := getattr(options, name, None):
            setattr(options, name, located(given, f"--{name}", kind=kind, trust_remote_code=trust))
    model, adapter = getattr(options, "model", None), getattr(options, "adapter", None)
    if isinstance(model, str) and isinstance(adapter, str) and not is_shape:
        from meshlora.run.grown import with_vocabulary_of  # torch, which other commands need not wait for

        options.model = with_vocabulary_of(model, adapter, trust_remote_code=trust)


def _say_fault(_: type[BaseException], error: BaseException, __: TracebackType | None) -> None:
    """Print an unexpected error with its traceback, escaped: it may contain a user's values."""
    print(report("".join(traceback.format_exception(error)).rstrip()), file=sys.stderr)


class _Commands:
    """Takes the commands that modules add, and keeps what each is for: --help lists them in groups."""

    def __init__(self, commands: Any) -> None:
        self._commands = commands
        self.helps: dict[str, str] = {}

    def add_parser(self, name: str, **options: Any) -> Any:
        self.helps[name] = options.pop("help", "")  # argparse would list it once more, in one heap
        return self._commands.add_parser(name, **options)

    def listed(self) -> str:
        """The commands under their headings, in the order in which they were added."""
        headings, width = table_of(GROUPS), max(map(len, self.helps)) + 4
        by_heading: dict[str, list[str]] = {}
        for name in self.helps:
            by_heading.setdefault(headings.get(name, _NO_HEADING), []).append(name)
        columns, lines = shutil.get_terminal_size().columns - 2, []
        for heading, names in by_heading.items():
            lines += ["", heading]
            for name in names:
                first = f"  {name}".ljust(width)
                lines += textwrap.wrap(
                    self.helps[name], max(columns, 2 * width), initial_indent=first, subsequent_indent=" " * width
                ) or [first.rstrip()]
        return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    about = "LoRA adapters on any mesh of processes."
    parser = Parser(
        prog="meshlora",
        usage="%(prog)s [--help] [--version] command ...",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"meshlora {version_of('meshlora')}")
    add_local_rank(parser, default=None)
    commands = _Commands(
        parser.add_subparsers(
            dest="command",
            required=True,
            parser_class=Parser,
            prog="meshlora",
            metavar="command",
            help=argparse.SUPPRESS,  # the groups say it
        )
    )
    for module in {**table_of(COMMANDS), **_OWN}.values():  # in the order of --help
        importlib.import_module(module).add(commands)
    parser.description = f"{about}\n{commands.listed()}\n\nmeshlora command --help says more of each."
    return parser

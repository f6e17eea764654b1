"""`meshlora import`: a recipe of another trainer becomes a run file, with what differs in it.

Owns: the command. Does not own: what keys mean (`meshlora.run.config.foreign`), and how they are read
(`meshlora_extra.importing`).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshlora_extra.commands.schema import first_line
from meshlora_ground.errors import UserError, one_line
from meshlora_ground.reading import path_argument

if TYPE_CHECKING:
    from meshlora_extra.importing.draft import Draft

# Of a message, which has 1,960 characters.
_ROOM = 1_500


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "import",
        help="turn a recipe of another trainer into a run file",
        description="Reads an axolotl, LLaMA-Factory, ms-swift, torchtune, TRL or NeMo AutoModel recipe, or an unsloth "
        "notebook, and writes a run file that says what each key became and what differs. Nothing of it is run.",
    )
    parser.add_argument("file", type=path_argument, metavar="FILE", help="YAML, a shell or Python script, a notebook")
    parser.add_argument("--from", dest="whose", metavar="NAME", help="whose it is (default: as its keys say)")
    parser.add_argument(
        "--nproc",
        type=int,
        metavar="N",
        help="processes that sizes are multiplied by (default: as a launcher beside it says, or 1)",
    )
    parser.add_argument(
        "--beside",
        type=path_argument,
        metavar="FILE",
        action="append",
        default=[],
        help="an accelerate YAML, a DeepSpeed JSON or a dataset_info.json",
    )
    parser.add_argument("--out", default="run.yaml", metavar="RUN.yaml", help="the file to write (default run.yaml)")
    parser.add_argument("--allow-missing", action="store_true", help="leave out what has no answer here, and say it")
    parser.add_argument("--force", action="store_true", help="replace a file that is there")
    parser.set_defaults(run=_import)


def _import(options: argparse.Namespace) -> None:
    from meshlora_extra.importing.imported import imported
    from meshlora_extra.importing.write import text_of
    from meshlora_ground.console import Console
    from meshlora_ground.files import check_result_file, write_text_atomically

    out = Path(options.out)
    check_result_file(out, f"--out {out}")
    if out.exists() and not options.force:
        raise UserError(f"--out {out}", "it is there already", "choose another, or --force")
    if options.nproc is not None and not 1 <= options.nproc <= 10**5:
        raise UserError(f"--nproc {options.nproc}", "it is a number of processes, at least 1")
    draft = imported(
        Path(options.file), whose=options.whose, processes=options.nproc, beside=list(map(Path, options.beside))
    )
    if draft.gaps and not options.allow_missing:
        raise _refusal(draft)
    write_text_atomically(out, text_of(draft, file=str(out), schema=first_line()))
    say = Console().say
    say(out.read_text("utf-8").rstrip("\n"))
    missing = f", without {len(draft.gaps)} that have no answer here" if draft.gaps else ""
    say(f"written: {out}, from {draft.title}{missing}. meshlora check {out} looks it over.")


def _refusal(draft: Draft) -> UserError:
    """All gaps in one message."""
    room = max(60, _ROOM // len(draft.gaps))
    lines = [f"\n  {one_line(f'{gap.key}: {one_line(str(gap.value), 60)}: {gap.why}', room)}" for gap in draft.gaps]
    count = len(draft.gaps)
    rule = f"{count} of its keys {'has' if count == 1 else 'have'} no answer here:{''.join(lines)}"
    return UserError(f"{draft.recipe.file} ({draft.title})", rule, "--allow-missing leaves them out, and says so")

"""What the code itself can write: tables of pages in docs, all of docs/coming-from.md, and a run file's JSON schema.

    .venv/bin/python scripts/describe_house.py           # write them
    .venv/bin/python scripts/describe_house.py --check   # exit code 1 where they differ

Packages are those of `ALLOWED` in tests/unit/test_architecture.py; a file's row is the first paragraph of its
docstring; features are those of plan/pairs.py, private names those of tests/unit/test_compat_names.py. The schema is
that of scripts/write_schema.py, coming-from.md that of scripts/write_coming_from.py.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import write_coming_from
import write_schema
from tests.unit.test_architecture import ALLOWED, FREE
from tests.unit.test_compat_names import PRIVATE, Private

from meshlora.plan.features import Feature
from meshlora.plan.pairs import GROUPS, PROVED, REFUSED
from meshlora_extra import engines
from meshlora_ground.versions import name_of, own_files

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "architecture.md"
SUPPORT = ROOT / "docs" / "support.md"
LIBRARIES = ROOT / "docs" / "adding" / "transformers.md"
ENGINES = ROOT / "docs" / "merge-and-export.md"


def imports() -> str:
    """The table of packages."""
    rows = [f"| {_names(FREE)} | nothing of meshlora but each other |"]
    rows += [f"| `{name}` | {_names(allowed) or '–'} |" for name, allowed in ALLOWED.items() if name not in FREE]
    return "\n".join(["| package | may import, besides the first row |", "|---|---|", *rows])


def files() -> str:
    """The table of files."""
    found = {name_of(path): ast.get_docstring(ast.parse(path.read_text("utf-8"))) for path in own_files()}
    rows = [f"| `{name}` | {_first_paragraph(text)} |" for name, text in found.items() if text]
    return "\n".join(["| file | what it is |", "|---|---|", *rows])


def refused() -> str:
    """The table of what is refused together."""
    lines = ["| what | with | why not | instead |", "|---|---|---|---|"]
    for row in REFUSED:
        first, *others = (_words(side) for side in row.sides)
        lines.append(f"| {first} | {'; and '.join(others)} | {row.because} | {row.way_out} |")
    return "\n".join(lines)


def proved() -> str:
    """The tables of groups, and of the test that shows any two features of them that are not refused."""
    lines = ["| group | features |", "|---|---|"]
    lines += [f"| {name} | {_words(group)} |" for name, group in GROUPS.items()]
    lines += ["", "| what | with | shown by |", "|---|---|---|"]
    lines += [f"| {_groups(row.one)} | {_groups(row.other)} | `{row.by}` |" for row in PROVED]
    return "\n".join(lines)


def private() -> str:
    """The table of private names of libraries, each once."""
    rows = [f"| `{row.name}` | `{row.ours}` | {row.need}{_when(row)} |" for row in PRIVATE]
    return "\n".join(["| name | ours | needed |", "|---|---|---|", *dict.fromkeys(rows)])


def _when(row: Private) -> str:
    if row.since:
        return f" (from {row.since} on)"
    return f" (before {row.until})" if row.until else ""


def _words(side: frozenset[Feature]) -> str:
    return ", ".join(feature.of_docs for feature in Feature if feature in side)


def _groups(side: frozenset[Feature]) -> str:
    if side == frozenset().union(*GROUPS.values()):
        return "every other"
    names = [name for name, group in GROUPS.items() if group <= side]
    return ", ".join(names) or _words(side)


def described(page: str, tables: Mapping[str, str]) -> str:
    """`page` with its tables as the code has them."""
    for name, table in tables.items():
        before, mark, rest = page.partition(f"<!-- {name}, written by scripts/describe_house.py -->\n\n")
        _, end, after = rest.partition("\n\n<!-- end -->")
        assert end, f"there is no place for {name}"
        page = f"{before}{mark}{table}{end}{after}"
    return page


def _names(packages: set[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(packages))


def _first_paragraph(text: str) -> str:
    return " ".join(text.partition("\n\n")[0].split()).replace("|", "\\|")


def main() -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 where something differs")
    written = {
        PAGE: described(PAGE.read_text("utf-8"), {"imports": imports(), "files": files()}),
        LIBRARIES: described(LIBRARIES.read_text("utf-8"), {"private": private()}),
        SUPPORT: described(SUPPORT.read_text("utf-8"), {"refused": refused(), "proved": proved()}),
        ENGINES: described(ENGINES.read_text("utf-8"), {"engines": engines.table()}),
        write_schema.FILE: write_schema.text(),
        write_coming_from.PAGE: write_coming_from.text(),
    }
    changed = [file for file, text in written.items() if not file.is_file() or text != file.read_text("utf-8")]
    if parser.parse_args().check:
        for file in changed:
            print(f"{file.name} differs from the code: run scripts/describe_house.py", file=sys.stderr)
        return int(bool(changed))
    for file in changed:
        file.write_text(written[file], "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

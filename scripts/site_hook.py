"""Hook of mkdocs for `make docs`: files outside docs that pages link to, README among them, as pages.

Owns: links that lead out of docs. A page of the repository stays one; a program, a run file or a folder becomes a page
that shows it. So the site is whole without a server of code, and the pages' links work on both.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(\]\()(?!https?:|#|mailto:)([^)#\s]+)(#[^)\s]*)?(\))")
LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".sh": "sh", ".json": "json", ".jsonl": "json"}
OUTSIDE = "repository"  # folder of the site


def on_files(files: Files, config: Any) -> Files:
    """Add every file outside docs that a page links to, however far."""
    waiting = [*(ROOT / "docs").rglob("*.md")]
    seen = set(waiting)
    while waiting:
        page = waiting.pop()
        for target in _targets(page):
            if target in seen or target.is_relative_to(ROOT / "docs"):
                continue
            seen.add(target)
            files.append(_page(config, target))
            if target.suffix == ".md":
                waiting.append(target)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point the links of a page to the pages of the site."""
    uri = page.file.src_uri
    source = ROOT / "docs" / uri
    if uri.startswith(f"{OUTSIDE}/"):
        if not getattr(page.file, "is_of_repository", False):
            return markdown
        source = ROOT / uri.removeprefix(f"{OUTSIDE}/")

    def moved(match: re.Match[str]) -> str:
        before, target, place, after = match.groups()
        there = _uri((source.parent / target).resolve())
        return f"{before}{os.path.relpath(there, PurePosixPath(uri).parent)}{place or ''}{after}"

    return _deeper_lists(LINK.sub(moved, markdown))


def _deeper_lists(markdown: str) -> str:
    """Lists in lists with four spaces instead of two, as Python's Markdown wants them, outside blocks of code."""
    parts = re.split(r"(^ *```.*?^ *```)", markdown, flags=re.MULTILINE | re.DOTALL)
    return "".join(
        part if "```" in part else re.sub(r"^  (?=[-*] )", "    ", part, flags=re.MULTILINE) for part in parts
    )


def _targets(page: Path) -> list[Path]:
    found = [(page.parent / match[2]).resolve() for match in LINK.finditer(page.read_text("utf-8"))]
    return [path for path in found if path.exists() and path.is_relative_to(ROOT)]


def _uri(path: Path) -> str:
    """Where the site has the file or folder `path` of the repository."""
    if path.is_relative_to(ROOT / "docs"):
        path = min(path.glob("*.md")) if path.is_dir() else path
        return path.relative_to(ROOT / "docs").as_posix()
    name = path.relative_to(ROOT).as_posix()
    return f"{OUTSIDE}/{name}" if path.suffix == ".md" else f"{OUTSIDE}/{name}.md"


def _page(config: Any, path: Path) -> File:
    name = path.relative_to(ROOT).as_posix()
    if path.suffix == ".md":
        text = path.read_text("utf-8")
    elif path.suffix == ".ipynb":
        cells = json.loads(path.read_text("utf-8"))["cells"]
        text = "\n\n".join(_shown(cell["cell_type"], "".join(cell["source"])) for cell in cells)
    elif path.is_dir():
        text = f"# {name}\n\n" + "\n".join(f"- `{child.name}`" for child in sorted(path.iterdir()))
    else:
        fence = "`" * 5
        text = f"# {name}\n\n{fence}{LANGUAGES.get(path.suffix, 'text')}\n{path.read_text('utf-8')}\n{fence}\n"
    file = File.generated(config, _uri(path), content=text)
    file.is_of_repository = path.suffix == ".md"  # type: ignore[attr-defined]
    return file


def _shown(kind: str, source: str) -> str:
    """A cell of a notebook."""
    return source if kind == "markdown" else f"```python\n{source}\n```"

"""No example, page or notebook imports, or names by its dots, what meshlora does not promise."""

from __future__ import annotations

import ast
import json
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import meshlora
from tests.for_each import for_each

ROOT = Path(__file__).parents[2]
_BLOCK = re.compile(r"^( *)```python\n(.*?)^\1```", re.DOTALL | re.MULTILINE)


def _texts() -> Iterator[tuple[str, str]]:
    """(where, code) of every example, cell of a notebook, and block of a page that is Python."""
    for file in sorted((ROOT / "examples").glob("*.py")):
        yield file.name, file.read_text(encoding="utf-8")
    for file in sorted((ROOT / "examples" / "notebooks").glob("*.ipynb")):
        cells = json.loads(file.read_text(encoding="utf-8"))["cells"]
        code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
        yield (
            file.name,
            "\n".join(line for line in "\n".join(code).splitlines() if not line.lstrip().startswith(("!", "%"))),
        )
    for file in (ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))):
        for number, (_, block) in enumerate(_BLOCK.findall(file.read_text(encoding="utf-8"))):
            yield f"{file.name}, block {number}", textwrap.dedent(block)


TEXTS = dict(_texts())


def _is_promised(name: str) -> bool:
    """Whether `meshlora.name` is a promised name."""
    module, _, leaf = name.rpartition(".")
    return name == "meshlora" or (module == "meshlora" and leaf in {*meshlora._HOME, "__version__"})


def _names(code: str) -> set[str]:
    """All that is imported from meshlora, and each `meshlora.x`; of text that only looks like Python, by its lines."""
    try:
        nodes = list(ast.walk(ast.parse(code)))
    except SyntaxError:  # a signature as a page shows it
        imported = re.findall(r"^ *from (meshlora[\w.]*) import (.+)$", code, re.MULTILINE)
        found = {f"{module}.{name.strip()}" for module, names in imported for name in names.split(",")}
        return found | set(re.findall(r"^(?:.*[ =(])?(meshlora\.\w+)\(", code, re.MULTILINE))
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.split(".")[0] == "meshlora"}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "meshlora":
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "meshlora":
            found.add(f"meshlora.{node.attr}")
    return found


@for_each("where", TEXTS)
def test_what_is_shown_uses_what_is_promised(where: str) -> None:
    assert [name for name in sorted(_names(TEXTS[where])) if not _is_promised(name)] == []


def test_a_private_name_would_be_seen() -> None:
    code = "import meshlora.comm\nfrom meshlora.train.losses import shifted_loss\nmeshlora.lod('x')"
    assert [name for name in sorted(_names(code)) if not _is_promised(name)] == [
        "meshlora.comm",
        "meshlora.lod",
        "meshlora.train.losses.shifted_loss",
    ]
    assert {"meshlora.x.y", "meshlora.lod"} == _names("from meshlora.x import y\nmeshlora.lod(model, *, n=1) -> int")
    assert sum(bool(_names(code)) for code in TEXTS.values()) >= 10


def test_public_names_in_words_of_a_page_are_there() -> None:
    page = (ROOT / "docs" / "python-api.md").read_text(encoding="utf-8")
    named = {name.rstrip(".") for name in re.findall(r"`(meshlora\.[\w.]+)", page)}
    assert len(named) >= 10
    assert [name for name in sorted(named) if not _is_promised(name)] == []

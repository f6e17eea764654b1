"""`import meshlora` is light, and still has every name that it promises, to a person and to a type checker."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import meshlora
from tests.for_each import for_each

PROMISED = [
    (alias.name, node.module)
    for node in ast.walk(ast.parse(Path(meshlora.__file__).with_suffix(".pyi").read_text()))
    if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("meshlora")
    for alias in node.names
]


@for_each(("name", "module"), PROMISED)
def test_name_is_what_its_file_has(name: str, module: str) -> None:
    assert getattr(meshlora, name) is getattr(importlib.import_module(module), name)
    assert name in dir(meshlora)


def test_no_other_name_is_given() -> None:
    assert dict(PROMISED) == meshlora._HOME
    with pytest.raises(AttributeError, match="has no attribute 'lod'"):
        _ = meshlora.lod  # type: ignore[attr-defined]


@pytest.mark.long
def test_command_line_and_package_are_there_before_torch_is() -> None:
    """And when they are there, what they made is not looked through any more, and what is made after them is."""
    code = "import gc, sys, meshlora.cli.main; libraries = {'torch', 'transformers', 'peft'}"
    before = "assert not libraries & sys.modules.keys()"
    after = "assert libraries <= sys.modules.keys() and gc.isenabled() and gc.get_freeze_count() > 100_000"
    code = f"{code}\n{before}\nsys.modules['meshlora_ground.lifetime'].import_libraries()\n{after}"
    subprocess.run([sys.executable, "-c", code], check=True)

"""Commands and parts of other packages are found by entry points; without them there are train, verify and check."""

from __future__ import annotations

import importlib
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshlora.cli.main import main
from meshlora.run.extras import COMMANDS, PARTS, part, table_of
from meshlora_ground.errors import UnsupportedError


@pytest.fixture(autouse=True)
def _looked_up_anew() -> Iterator[None]:
    table_of.cache_clear()
    yield
    table_of.cache_clear()


def _package(folder: Path, text: str, *, name: str) -> None:
    """A package of somebody else's, installed in `folder`, with one command."""
    (folder / f"{name}.py").write_text(text)
    info = folder / f"{name}-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[meshlora.commands]\nmine = {name}:COMMANDS\n")


def _without_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if only meshlora were installed: neither its extras nor their registration."""
    monkeypatch.setattr("meshlora.run.extras.entry_points", lambda group: [])
    found = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "meshlora_extra" else found(name))


def _help(capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit):
        main(["--help"])
    return capsys.readouterr().out


def _listed(said: str) -> dict[str, list[str]]:
    """Heading -> commands, of --help."""
    found: dict[str, list[str]] = {}
    for block in said.partition("\noptions:")[0].split("\n\n"):
        heading, *lines = block.splitlines()
        names = re.findall(r"^  ([a-z-]+)(?: +\S|$)", "\n".join(lines), re.MULTILINE)
        if names:
            found[heading.partition(":")[0]] = names
    return found


def test_help_lists_each_command_once_in_its_group(capsys: pytest.CaptureFixture[str]) -> None:
    listed = _listed(_help(capsys))
    assert list(listed) == ["start", "train", "look", "use", "prove", "beside"]
    assert [name for names in listed.values() for name in names] == list(table_of(COMMANDS))
    assert listed["start"][0] == "init"
    assert {"train", "rl"} <= set(listed["train"])
    assert {"generate", "merge"} <= set(listed["use"])
    assert listed["prove"] == ["verify", "judge"]
    assert listed["beside"][-1] == "from-nlg"


def test_tables_name_what_is_there() -> None:
    """Ours are found whatever the metadata on the path say: those of a source tree may be missing."""
    commands = table_of(COMMANDS)
    assert list(commands)[:4] == ["init", "import", "data", "check"]
    for module in commands.values():
        assert callable(importlib.import_module(module).add), module
    for name in table_of(PARTS):
        assert part(name, "an option").__name__ == table_of(PARTS)[name]


def test_command_of_another_package_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (
        "COMMANDS = {'mine': 'of_mine', 'plan': 'of_mine'}\n"
        "def add(commands):\n    commands.add_parser('mine').set_defaults(run=lambda options: print('ran'))\n"
    )
    _package(tmp_path, text, name="of_mine")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["mine"]) == 0
    assert capsys.readouterr().out == "ran\n"
    assert table_of(COMMANDS)["plan"] == "meshlora_extra.commands.plan"  # it replaces no other
    assert _listed(_help(capsys))["more commands"] == ["mine"]


def test_without_extras_there_are_three_commands(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _without_ours(monkeypatch)
    assert _listed(_help(capsys)) == {"more commands": ["train", "verify", "check"]}
    with pytest.raises(UnsupportedError, match="meshlora_extra"):
        part("merging", "train.merge_at_end")


def test_command_line_imports_only_what_declares_commands() -> None:
    """The response to a first Tab or `--help` waits for none of the rest."""
    code = (
        "import sys, meshlora.cli.main as cli; cli._parser();"
        "print(*(name for name in sys.modules if name.startswith('meshlora_extra.')))"
    )
    said = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    light = ("meshlora_extra.commands", "meshlora_extra.paper")
    assert [name for name in said.stdout.split() if not name.startswith(light)] == []

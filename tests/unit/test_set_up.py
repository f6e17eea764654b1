"""`make` takes any Python from 3.11 on, says so where there is none, and installs with uv where it is there."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.scripts import ROOT, load_script

# A real one that says it is of another version; else it notes how it was called.
PYTHON = """#!/bin/sh
if [ "$1" = -c ]; then
    exec {real} -S -c 'import sys; sys.version_info, sys.version = {numbers}, "{version} of"; exec(sys.argv[1])' "$2"
fi
echo "$(basename "$0") $*" >> "{log}"
[ "$2" != venv ] || {{ mkdir -p "$3/bin" && cp "$0" "$3/bin/python"; }}
"""
UV = """#!/bin/sh
echo "uv $*" >> "{log}"
"""


def _set_up(folder: Path, *words: str, constraints: Path | None = None, **pythons: str) -> tuple[int, str, list[str]]:
    """(exit code, what it printed, the commands it gave) where `pythons`, name -> version, is all there is."""
    binaries, log = folder / "bin", folder / "log"
    binaries.mkdir()
    for tool in ("sh", "dirname", "basename", "grep", "mkdir", "cp"):
        (binaries / tool).symlink_to(f"/bin/{tool}" if Path(f"/bin/{tool}").exists() else f"/usr/bin/{tool}")
    for name, version in pythons.items():
        numbers = tuple(map(int, version.split(".")))
        text = UV if name == "uv" else PYTHON
        (binaries / name.replace("_", ".")).write_text(
            text.format(real=sys.executable, numbers=numbers, version=version, log=log)
        )
        (binaries / name.replace("_", ".")).chmod(0o755)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHON"} | {"PATH": str(binaries)}
    if constraints is not None:
        environment["CONSTRAINTS"] = str(constraints)
    done = subprocess.run(
        [ROOT / "scripts" / "set_up.sh", *words], env=environment, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout + done.stderr, log.read_text().splitlines() if log.exists() else []


@pytest.mark.parametrize(
    ("pythons", "taken"),
    [
        ({"python3": "3.14.1"}, "python3"),
        ({"python3": "3.9.2", "python3_13": "3.13.0"}, "python3.13"),
        ({"python3": "3.14.1", "python3_11": "3.11.7"}, "python3.11"),
        ({"python3": "3.10.4", "python": "3.12.0"}, "python"),
    ],
)
def test_any_python_from_3_11_on_is_taken(pythons: dict[str, str], taken: str, tmp_path: Path) -> None:
    assert _set_up(tmp_path, "--python", **pythons) == (0, f"{taken}\n", [])


@pytest.mark.parametrize(("pythons", "said"), [({"python3": "3.9.2"}, "is Python 3.9.2"), ({}, "does not run")])
def test_one_line_says_that_no_python_is_new_enough(pythons: dict[str, str], said: str, tmp_path: Path) -> None:
    code, text, _ = _set_up(tmp_path, "--python", **pythons)
    assert (code, text.count("\n")) == (2, 1)
    assert text.startswith(f"error: python3 {said}: meshlora needs Python 3.11 or later")
    assert "make PYTHON=" in text


@pytest.mark.parametrize("has_uv", [False, True], ids=["pip", "uv"])
def test_torch_is_installed_alone_and_first(has_uv: bool, tmp_path: Path) -> None:
    folder, pythons = tmp_path / "env", {"python3_12": "3.12.1"} | ({"uv": "1.0"} if has_uv else {})
    code, text, commands = _set_up(tmp_path, str(folder), "-e", ".[dev]", **pythons)
    assert (code, text) == (0, "")
    made, torch, rest = commands
    assert made.startswith("uv venv" if has_uv else f"python3.12 -m venv {folder}")
    for command in (torch, rest):
        assert command.startswith(f"uv pip install --quiet --python {folder}" if has_uv else "python -m pip install")
    assert "torch==" in torch
    assert torch.endswith(next(x for x in (ROOT / "constraints.txt").read_text().split() if x.startswith("torch==")))
    assert rest.endswith("-c constraints.txt -e .[dev]")


@pytest.mark.parametrize(("given", "torch"), [("peft==0.21\ntorch==2.11.0\n", "torch==2.11.0"), ("", "torch")])
def test_other_constraints_have_their_own_torch_or_the_newest(given: str, torch: str, tmp_path: Path) -> None:
    file = tmp_path / "floor.txt"
    file.write_text(given)
    code, _, commands = _set_up(tmp_path, str(tmp_path / "env"), "-e", ".", constraints=file, python3_12="3.12.1")
    assert code == 0
    assert commands[1].endswith(f" {torch}")
    assert commands[2].endswith(f"-c {file} -e .")


def test_the_floor_is_every_lower_bound_of_the_project() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    found = dict(line.split("==") for line in load_script("floor").floor(project, "2.13.0"))
    assert found["torch"] == "2.13.0"
    assert found["trl"], "extras too"
    for each in tomllib.loads(project)["project"]["dependencies"]:
        name, _, bound = each.partition(">=")
        assert bound, f"{each} has no lower bound: nobody knows the oldest that works"
        assert name == "torch" or found[name] == bound

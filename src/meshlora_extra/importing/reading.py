"""Recipes as they are read: YAML, JSON, scripts of a shell, Python scripts and notebooks, none of which is run.

Owns: which kind of file it is, and whose. Does not own: what its keys mean.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshlora.run.config.foreign.fact import Trainer
from meshlora.run.config.foreign.trainers import TRAINERS
from meshlora_extra.importing.draft import Recipe
from meshlora_extra.importing.python import read_python
from meshlora_extra.importing.shell import Command, commands_in
from meshlora_ground.errors import UserError, did_you_mean
from meshlora_ground.reading import read_text
from meshlora_ground.yaml_reading import parse_yaml

_INTERPOLATED = re.compile(r"\$\{([\w.]+)\}")
_KINDS = (
    "axolotl, LLaMA-Factory, ms-swift, torchtune, TRL and NeMo AutoModel in YAML, scripts with a command of ms-swift "
)
_KINDS += "or TRL, and notebooks or scripts of unsloth and TRL are read"


def read_recipe(file: Path, whose: str | None = None) -> Recipe:
    """Read a recipe. whose: name of its trainer; default: as its keys say.

    Raises:
        UserError: missing, not readable, nobody's, or of several trainers.
    """
    text = text_of(file)
    if whose is not None and whose not in TRAINERS:
        raise UserError(f"--from {whose}", "no such trainer is known", did_you_mean(whose, TRAINERS))
    if file.suffix in (".py", ".ipynb"):
        return read_python(file, text, TRAINERS[whose] if whose else None)
    if file.suffix not in (".yaml", ".yml", ".json") and (found := commands_in(text)):
        return _of_command(file, found, whose)
    return _of_tree(file, _tree(file, text), whose)


def text_of(file: Path) -> str:
    """The text of a file that the user named."""
    try:
        return read_text(file)
    except FileNotFoundError:
        near = did_you_mean(file.name, [each.name for each in file.parent.glob("*.*")][:200])
        raise UserError(f"{file}", "there is no such file", near.partition("known: ")[0]) from None
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", error)
        raise UserError(f"{file}", f"it cannot be read ({why})") from None


def _tree(file: Path, text: str) -> dict[str, Any]:
    try:
        tree = parse_yaml(text)
    except ValueError as error:
        raise UserError(f"{file}", f"it is not readable YAML ({error})", _KINDS) from None
    if not isinstance(tree, dict):
        raise UserError(f"{file}", "it is no recipe: no mapping of keys, and no command of a trainer", _KINDS)
    if {"model", "data", "train"} <= tree.keys() and isinstance(tree["train"], dict):
        raise UserError(f"{file}", "it is a run file already", "meshlora check looks it over")
    return tree


def _of_tree(file: Path, tree: Mapping[str, Any], whose: str | None) -> Recipe:
    given = flat(tree)
    trainer = TRAINERS[whose] if whose else _guess(file, given)
    return Recipe(file, trainer, {name: _resolved(value, given) for name, value in given.items()})


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Keys of groups with dots between; lists and empty groups stay values."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found


def _resolved(value: Any, given: Mapping[str, Any]) -> Any:
    """`value` with `${key}` of the same file replaced."""
    if not isinstance(value, str):
        return value
    return _INTERPOLATED.sub(lambda found: str(given.get(found[1], found[0])), value)


def _guess(file: Path, given: Mapping[str, Any]) -> Trainer:
    """The trainer most of whose own keys are there."""
    groups = {name.partition(".")[0] for name in given}
    scores = {}
    for trainer in TRAINERS.values():
        scores[trainer.name] = sum(sign in given or sign in groups for sign in trainer.signs)
    best = max(scores.values())
    names = [name for name, score in scores.items() if score == best]
    if not best:
        raise UserError(f"{file}", "its keys are no trainer's that is known", _KINDS)
    if len(names) > 1:
        way_out = f"say whose it is: --from {' or --from '.join(names)}"
        raise UserError(f"{file}", f"it has keys of {' and of '.join(names)}", way_out)
    return TRAINERS[names[0]]


def _of_command(file: Path, found: list[Command], whose: str | None) -> Recipe:
    """The recipe of the first command of a trainer in a script."""
    first = found[0]
    if first.config is not None:  # it names a YAML file, which its options override
        path = next((each for each in (file.parent / first.config, Path(first.config)) if each.is_file()), None)
        if path is None:
            raise UserError(f"{file}: {first.config}", "there is no such file", "import the file that it names")
        inner = _of_tree(path, _tree(path, text_of(path)), whose or first.trainer or None)
        given = {**inner.given, **first.options}
    else:
        given = dict(first.options)
        inner = Recipe(file, TRAINERS[whose or first.trainer], given)
    if first.processes and "num_processes" not in given:
        given["num_processes"] = first.processes
    notes = []
    if len(found) > 1:
        notes.append(f"the file has {len(found)} commands; this is the first")
    beside = tuple(map(Path, first.files))
    return Recipe(file, inner.trainer, given, method=first.method, beside=beside, notes=tuple(notes), lost=first.lost)

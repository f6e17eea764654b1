"""All that is wrong with the keys and values of a run file, found by mending it.

Owns: which mistakes one reading hides from the next, and which only follow from another. Does not own: the words of
each (`run.config.types`, `run.config.aliases`), what files and the model say (`run.mistakes`).

A wrong key or value hides the rules of its group, and a broken rule hides all others. So what is wrong is taken out and
the rest is read again, until it is a run or nothing more can be taken out.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pydantic

from meshlora.run.config.aliases import unknown_key
from meshlora.run.config.run_file import RunConfig
from meshlora.run.config.types import Mistake, adapter, groups, mistakes_of
from meshlora_ground.errors import UserError, at_once

# Readings of a file with mistakes, at most.
_MOST_READINGS = 50
_NAME = re.compile(r"(?<![\w.])[a-z]\w*(?:\.[a-z]\w*)*")  # of a key with its groups
_ABSENT = object()


@dataclass
class Mended:
    """A run file without what is wrong in it.

    tree: what is left of it. config: the run that it is; None if it is none. mistakes: what is wrong, in the order to
    mend it. spoken_of: the keys that the mistakes name.
    """

    tree: Any
    config: RunConfig | None = None
    mistakes: list[UserError] = field(default_factory=list)
    spoken_of: set[str] = field(default_factory=set)

    def add(self, error: UserError, path: Sequence[str] = ()) -> None:
        """Note a mistake, at `path` if it is at a key."""
        self.mistakes.append(error)
        self.spoken_of |= _names_in(error) | {".".join(path)}

    def follows(self, error: UserError) -> bool:
        """Whether a refusal may be due to what was taken out: it speaks of a key that is not there any more, or that
        has another name in the file, and of which the user hears already."""
        return any(_at(self.tree, name.split(".")) is _ABSENT for name in self.spoken_of & _names_in(error))


def checked(tree: Mapping[str, Any]) -> RunConfig:
    """The run of a tree of plain values. Raises: UserError: each of its mistakes: an unknown key (with the nearest
    name), a missing one, a wrong type, a rule broken."""
    found = mended(tree)
    if found.mistakes:
        raise at_once(found.mistakes)
    assert found.config is not None, "without a mistake it is a run"
    return found.config


def mended(tree: Mapping[str, Any]) -> Mended:
    """`tree` without what is wrong in it."""
    found = Mended(json.loads(json.dumps(tree)))
    new = _unknown_of_lora(found.tree)
    for _ in range(_MOST_READINGS):
        for each in new:
            is_known = each.is_rule and found.follows(each.error)
            if each.is_missing:
                is_known = _is_mentioned(each, found.spoken_of)
            if not is_known:
                found.add(each.error, each.path)
        num_taken_out = 0
        for each in new:
            num_taken_out += _take_out(found.tree, each.path)
        if new and not num_taken_out:
            break
        try:
            # As JSON: strict types, and yet a group of keys makes a dataclass.
            found.config = adapter().validate_json(json.dumps(found.tree))
            break
        except pydantic.ValidationError as error:
            new = mistakes_of(error, found.tree)
        except UserError as error:
            # Messages of the topology name axes in the place of its key.
            new = [Mistake(_place_in(found.tree, error) or ("topology",), error, is_rule=True)]
    return found


def check_lora_keys(values: Mapping[str, Any]) -> None:
    """Refuse fields that `peft.LoraConfig` has not. Raises: UserError: all of them, with their names here."""
    if found := _unknown_of_lora({"lora": {str(key): value for key, value in values.items()}}):
        raise at_once(each.error for each in found)


def _unknown_of_lora(tree: Any) -> list[Mistake]:
    """The keys of `lora` that peft has not, which pydantic leaves to it."""
    lora = tree.get("lora")
    if not isinstance(lora, dict):
        return []
    from meshlora.adapter.formats.peft_format import OPTIONS  # here: peft takes seconds to import

    found = []
    for key in lora:
        if key in OPTIONS:
            continue
        path = ("lora", key)
        error = unknown_key(path, OPTIONS, groups())
        if f"lora_{key}" in OPTIONS:  # alpha, dropout
            error = UserError(f"lora.{key}", "unknown key", f"here it is lora.lora_{key}")
        found.append(Mistake(path, error))
    return found


def _is_mentioned(mistake: Mistake, spoken_of: set[str]) -> bool:
    """Whether a key that is not there, or one in it, is spoken of already."""
    where = ".".join(mistake.path)
    return any(name == where or name.startswith(f"{where}.") for name in spoken_of)


def _place_in(tree: Any, error: UserError) -> tuple[str, ...]:
    """The path of the first key that a message names and that is there."""
    for name in _NAME.findall(f"{error}"):
        path = tuple(name.split("."))
        found = _at(tree, path)
        if found is not _ABSENT and (len(path) > 1 or not isinstance(found, dict)):
            return path
    return ()


def _at(tree: Any, path: Sequence[str]) -> Any:
    """What is at `path`, or `_ABSENT`."""
    for key in path:
        tree = tree.get(key, _ABSENT) if isinstance(tree, dict) else _ABSENT
    return tree


def _names_in(error: UserError) -> set[str]:
    """The keys that a message speaks of, with their groups; `train.lr` does not speak of `train`."""
    words = {*_NAME.findall(f"{error}")}
    names = words & _every_name()
    if any(word.startswith("lora.") for word in words):  # whose keys are those of peft
        names.add("lora")
    return names


@functools.cache
def _every_name() -> set[str]:
    """All keys of a run file, with their groups."""
    found = set[str]()
    for group, keys in groups().items():
        found |= {f"{group}.{key}".lstrip(".") for key in keys}
    return found


def _take_out(tree: Any, path: Sequence[str]) -> bool:
    """Remove what is at `path`, a list as a whole. Returns whether anything was there."""
    for depth, key in enumerate(path):
        if not isinstance(tree, dict) or key not in tree:
            return False
        if depth == len(path) - 1 or not isinstance(tree[key], dict):
            del tree[key]
            return True
        tree = tree[key]
    return False

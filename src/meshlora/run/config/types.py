"""The types of a run file, checked by pydantic, with messages in our words: key, value, rule, way out.

Owns: the wording of what pydantic finds, and the names of all keys. Does not own: names, defaults and rules of the
fields (`run.config.run_file`), which of them are checked once another is wrong (`run.config.mending`).
"""

from __future__ import annotations

import dataclasses
import functools
import re
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pydantic

from meshlora.run.config.aliases import unknown_key, unknown_loss, unknown_schedule
from meshlora.run.config.run_file import RunConfig
from meshlora_ground.errors import UserError, did_you_mean

# Of pydantic's types of errors, which are said before the others, or after them.
_ORDER = {"unexpected_keyword_argument": 0, "missing": 2}
# What a value must be, by pydantic's type of error.
_WORDS = {
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "string_type": "text",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "a group of keys",
}


@functools.cache
def adapter() -> pydantic.TypeAdapter[RunConfig]:
    """What reads and describes a run file. Built once: it takes tenths of a second."""
    return pydantic.TypeAdapter(RunConfig)


@dataclass(frozen=True)
class Mistake:
    """What is wrong with the key at `path` of a run file. is_missing: it is not there. is_rule: of the values of keys
    that are each right."""

    path: tuple[str, ...]
    error: UserError
    is_missing: bool = False
    is_rule: bool = False


def mistakes_of(error: pydantic.ValidationError, tree: Any) -> list[Mistake]:
    """What pydantic finds wrong with `tree`, in our words: first the unknown keys, last those that are not there."""
    left, mistakes = [(_path(each, tree), each) for each in error.errors(include_url=False)], []
    left.sort(key=lambda each: _ORDER.get(each[1]["type"], 1))
    while left:
        path, _ = left[0]
        inside = [each for each in left if each[0][: len(path)] == path]
        path = max(inside, key=lambda each: len(each[0]))[0]  # the alternative of a union that came furthest
        is_missing = all(each["type"] == "missing" for at, each in left if at == path)
        mistakes.append(Mistake((*path,), _message(path, left), is_missing))
        # The others of a union failed for the same reason, at the places around it.
        left = [each for each in left if each[0][: len(path)] != path and each[0] != path[: len(each[0])]]
    return mistakes


def _message(path: list[str], found: list[tuple[list[str], Any]]) -> UserError:
    """The error for what is at `path`. found: path and pydantic's error of each."""
    error = next(each for at, each in found if at == path)
    where, value, kind = ".".join(path), error["input"], error["type"]
    if kind == "unexpected_keyword_argument":
        return _misplaced(path) or unknown_key(path, _keys(error["loc"][:-1]), groups())
    if kind == "missing":
        return UserError(where, "this key is required")
    if kind == "union_tag_not_found":
        return UserError(f"{where}.kind", "this key is required")
    if kind == "union_tag_invalid":
        where, value = f"{where}.kind", error["ctx"]["tag"]
    of_objective = "objective" in path and {"objective", "loss", "kind"} & {*path[-2:]}
    if of_objective and isinstance(value, str) and (mistake := unknown_loss(where, value)) is not None:
        return mistake
    if (mistake := unknown_schedule(where, value)) is not None:
        return mistake
    words = list(dict.fromkeys(_word(each) for at, each in found if at == path))
    rule, near = f"it must be {' or '.join(words)}", ""
    if words[0].startswith("'") and not words[1:]:
        rule = f"one of {words[0]}"
    if isinstance(value, str):
        near = did_you_mean(value, re.findall("'([^']*)'", " ".join(words)))
    return UserError(f"{where or 'the run file'}: {value!r}", rule, near.partition("known: ")[0])


def _misplaced(path: Sequence[str]) -> UserError | None:
    """The error for a key whose meaning has a place here that no name of it leads to; None for all others."""
    where, name = ".".join(path), path[-1]
    if "liger" in name.lower():
        return UserError(where, "unknown key", "here it is model.kernels: auto, which takes liger's")
    if len(path) == 2 and path[0] == "data" and name in _keys(["data", "train", "Source"]):
        way_out = f"each source has its own, as in train: {{path: FILE, {name}: …}}"
        if name == "path":
            way_out = "here it is data.train"
        return UserError(where, "unknown key", way_out)
    return None


def _path(error: Any, tree: Any) -> list[str]:
    """Where in the file an error is: pydantic's location without the names of a union's alternatives."""
    path = []
    for part in error["loc"]:
        is_place = isinstance(tree, list) and part in range(len(tree))
        if is_place or (isinstance(tree, dict) and part in tree):  # else the name of an alternative
            path.append(str(part))
            tree = tree[part]
    if error["type"] == "missing":
        path.append(error["loc"][-1])
    return path


def _word(error: Any) -> str:
    """What the value must be."""
    if error["type"] == "dataclass_type":
        return f"a group of keys: {', '.join(_keys(error['loc']))}"
    context = error.get("ctx", {})
    return str(_WORDS.get(error["type"]) or context.get("expected") or context.get("expected_tags") or error["msg"])


def groups() -> dict[str, list[str]]:
    """Name of each group of a run file -> its keys; "" are the keys outside of groups."""
    return {"": _keys([]), **{item.name: _keys([item.name]) for item in dataclasses.fields(RunConfig)}}


def _keys(location: Sequence[Any]) -> list[str]:
    """The keys of the group at a location of pydantic; none if it is no group."""
    hint: Any = RunConfig
    for part in location:
        inside = _inside(hint)
        if part in inside:
            hint = inside[part]
        elif len(inside) == 1:
            (only,) = inside.values()
            hint = typing.get_type_hints(only).get(part, hint)
    return [item.name for group in _inside(hint).values() for item in dataclasses.fields(group)]


def _inside(hint: Any) -> dict[str, Any]:
    """The dataclasses in a declared type, by the names that pydantic has for them in a union."""
    if dataclasses.is_dataclass(hint):
        return {getattr(hint, "kind", getattr(hint, "__name__", "")): hint}
    found: dict[str, Any] = {}
    for part in typing.get_args(hint):
        found |= _inside(part)
    return found

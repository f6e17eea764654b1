"""Reading a run file: one YAML -> one tree of dataclasses, every value checked where it stands.

Owns: YAML, overrides, and the words for a value of the wrong type or an unknown key. Does not own: names, defaults and
rules of the fields (`config`).
"""

from __future__ import annotations

import dataclasses
import sys
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import yaml

from meshlora.config import RunConfig
from meshlora.errors import UserError, did_you_mean
from meshlora.presets import with_preset


class _Loader(yaml.SafeLoader):
    """YAML, but a key that is given twice is an error rather than won by the second."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if key.value in lines:
                raise yaml.YAMLError(
                    f"{key.value} is given twice, in lines {lines[key.value]} and {key.start_mark.line + 1}"
                )
            lines[str(key.value)] = key.start_mark.line + 1
        return super().construct_mapping(node, deep)


def read_run(path: str | Path, overrides: list[str] | None = None) -> RunConfig:
    """Read a run file, apply `--set key.path=value` overrides, and fill in what its preset says.

    Raises:
        UserError: not readable, not YAML, unknown key (with the nearest name), wrong type, or a rule broken.
    """
    file = Path(path)
    try:
        tree = yaml.load(file.read_text(encoding="utf-8"), _Loader)
    except FileNotFoundError:
        near = did_you_mean(file.name, [p.name for p in file.parent.glob("*.y*ml")]) if file.parent.is_dir() else ""
        raise UserError(f"{file}", "there is no such run file", near.removesuffix("known: ")) from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"{file}", f"it is not readable YAML ({' '.join(str(error).split())})") from None
    if not isinstance(tree, dict):
        raise UserError(f"{file}", "a run file is a mapping with model:, data:, train: and lora:")
    for override in overrides or []:
        _apply(tree, override)
    config = _build(RunConfig, with_preset(tree), "")
    assert isinstance(config, RunConfig)
    return config


def _apply(tree: dict[str, Any], override: str) -> None:
    """Set `a.b=value` in the tree; the value is YAML."""
    path, equals, text = override.partition("=")
    if not equals or not path:
        raise UserError(f"--set {override}", "it must read key.path=value, as in --set train.lr=1e-4")
    *parents, last = path.split(".")
    for key in parents:
        tree = tree.setdefault(key, {})
        if not isinstance(tree, dict):
            raise UserError(f"--set {override}", f"{key} is a value, not a group of keys")
    try:
        tree[last] = yaml.safe_load(text)
    except yaml.YAMLError:
        raise UserError(f"--set {override}", f"{text!r} is not a YAML value", "put it in quotes") from None


def _build(cls: type, tree: Any, path: str) -> Any:
    """An instance of the dataclass `cls` from plain values."""
    if not isinstance(tree, Mapping):
        raise UserError(f"{path or 'the run file'}: {tree!r}", f"it must be a group of keys: {_keys(cls)}")
    hints = typing.get_type_hints(cls)
    values = {}
    for key, value in tree.items():
        where = f"{path}.{key}" if path else str(key)
        if key not in hints:
            raise UserError(f"{where}", "unknown key", did_you_mean(str(key), hints))
        values[key] = _convert(value, hints[key], where)
    for item in dataclasses.fields(cls):
        required = item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING
        if required and item.name not in values:
            raise UserError(f"{path + '.' if path else ''}{item.name}", "this key is required")
    return cls(**values)


def _convert(value: Any, hint: Any, where: str) -> Any:
    """`value` as the type that the field declares."""
    if dataclasses.is_dataclass(hint):
        assert isinstance(hint, type)
        return _build(hint, value, where)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        if value not in arguments:
            raise UserError(f"{where}: {value!r}", f"one of {', '.join(map(repr, arguments))}", _near(value, arguments))
        return value
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in arguments:
            return None
        for option in (a for a in arguments if a is not type(None)):
            if _is(value, option):
                return _convert(value, option, where)
        raise UserError(f"{where}: {value!r}", f"it must be {_words(hint)}")
    if hint is float and isinstance(value, str):
        value = _as_number(value)  # YAML 1.1 reads 1e-4 as text
    if not _is(value, hint):
        raise UserError(f"{where}: {value!r}", f"it must be {_words(hint)}")
    if hint is float and not abs(value) <= sys.float_info.max:  # nor NaN, nor a whole number beyond all floats
        raise UserError(f"{where}: {value!r}", "it must be a finite number")
    if origin is dict and arguments[1] is not Any:
        return {key: _convert(item, arguments[1], f"{where}.{key}") for key, item in value.items()}
    return float(value) if hint is float else value


def _is(value: Any, hint: Any) -> bool:
    if hint is float:
        return isinstance(_as_number(value), int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if typing.get_origin(hint) is Literal:
        return value in typing.get_args(hint)
    if typing.get_origin(hint) is list:
        return isinstance(value, list) and bool(value) and all(_is(v, typing.get_args(hint)[0]) for v in value)
    if typing.get_origin(hint) is dict:
        key, item = typing.get_args(hint)
        return isinstance(value, dict) and all(_is(k, key) and (item is Any or _is(v, item)) for k, v in value.items())
    return isinstance(value, hint)


def _as_number(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return float(value)
    except ValueError:
        return value


def _words(hint: Any) -> str:
    words = {float: "a number", int: "a whole number", str: "text", bool: "true or false", type(None): "nothing"}
    if hint in words:
        return words[hint]
    if typing.get_origin(hint) is Literal:
        return " or ".join(map(repr, typing.get_args(hint)))
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return " or ".join(_words(a) for a in typing.get_args(hint) if a is not type(None))
    return "a list of text" if typing.get_origin(hint) is list else "a group of keys"


def _near(value: Any, options: tuple[Any, ...]) -> str:
    return did_you_mean(str(value), map(str, options)) if isinstance(value, str) else ""


def _keys(cls: type) -> str:
    return ", ".join(item.name for item in dataclasses.fields(cls))

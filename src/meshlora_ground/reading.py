"""Untrusted paths, text files, JSON and YAML, read as plain values.

Owns: the limits of reading (regular files, bytes, depth, digits), so that nothing hangs, fills the memory
or fails inside a library. Does not own: the meaning of the values.
"""

from __future__ import annotations

import json
import os
import re
import stat
import textwrap
from collections import Counter
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from meshlora_ground.errors import UserError

# Far above any run file, configuration or checkpoint index.
_YAML_BYTES = 2**20
_YAML_VALUES = 30_000
_DEPTH = 50
_DIGITS = 1_000
# File systems allow names of 255 bytes, and a file is first written under a longer temporary name.
_NAME_BYTES, _PATH_BYTES = 240, 4000
_LONGEST_QUOTE = 60


def path_argument(text: str) -> str:
    """The `type=` of an argparse option that is a path: returns `text` unchanged.

    Raises:
        UserError: no file can have this name.
    """
    check_path("path", text)
    return text


def check_path(option: str, text: str, *, knows_home: bool = False) -> None:
    """Refuse an impossible path. knows_home: the reader of the option expands a leading `~`.

    Raises:
        UserError: names `option`.
    """
    given = f"{option}={text[:_LONGEST_QUOTE]!a}{'…' * (len(text) > _LONGEST_QUOTE)}"
    if "\0" in text:
        raise UserError(given, "a path has no NUL character")
    try:
        path = os.fsencode(text)
    except UnicodeEncodeError:
        raise UserError(given, "it holds characters that no path has") from None
    if len(path) > _PATH_BYTES or any(len(name) > _NAME_BYTES for name in path.split(b"/")):
        rule = f"a path has at most {_PATH_BYTES} bytes, and a name in it at most {_NAME_BYTES}"
        raise UserError(given, rule, "choose a shorter one")
    if not text.startswith("~"):
        return
    if not knows_home:
        raise UserError(given, "~ is not replaced here", "write the path in full, or begin it with ./")
    try:
        Path(text).expanduser()
    except RuntimeError:
        raise UserError(given, "there is no such user, or no home folder", "write the path in full") from None


def read_text(file: Path, *, most_bytes: int = _YAML_BYTES) -> str:
    """The text of a regular file.

    Raises:
        OSError: it is missing, or cannot be opened. ValueError: it is not a text file, or too large.
    """
    # Never block on a pipe.
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as opened:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("it is a folder, a pipe or a device, no file")
        content = opened.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise ValueError(f"it has more than the {most_bytes:,} bytes that are read of such a file")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"it is no text in UTF-8 ({error.reason} at byte {error.start:,})") from None


def parse_json(text: str) -> Any:
    """Parse JSON of bounded depth and numbers, without duplicate keys.

    Raises:
        ValueError: it is not such JSON.
    """
    try:
        value = json.loads(text, object_pairs_hook=once, parse_int=_integer)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    level = [value]
    for _ in range(_DEPTH):
        level = [part for value in level for part in _parts(value) if isinstance(part, dict | list)]
    if level:
        raise ValueError(_TOO_DEEP)
    return value


_TOO_DEEP = f"it is nested more than {_DEPTH} deep"


def _parts(value: Any) -> Any:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The `object_pairs_hook=` that refuses duplicate keys in JSON. Raises: ValueError."""
    values = dict(pairs)
    if len(values) < len(pairs):
        times = Counter(key for key, _ in pairs)
        raise ValueError(f"the key {max(times, key=times.__getitem__)[:_LONGEST_QUOTE]!r} is given twice")
    return values


def _integer(text: str) -> int:
    if len(text) > _DIGITS:
        raise ValueError(f"a number of {len(text):,} digits")
    return int(text)


def parse_yaml(text: str) -> Any:
    """Parse YAML of text, numbers, lists and mappings with text or number keys, without anchors, tags or aliases.

    Raises:
        ValueError: it is not such YAML.
    """
    if len(text) > _YAML_BYTES:
        raise ValueError(f"it has more than the {_YAML_BYTES:,} characters that are read")
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise ValueError(textwrap.shorten(str(error), 400, placeholder=" …")) from None


_HALF = re.compile("[\ud800-\udfff]")  # of a pair of surrogates
_TAGS = {f"tag:yaml.org,2002:{name}" for name in ("null", "bool", "int", "float", "str", "seq", "map")}


class _Loader(yaml.SafeLoader):
    """YAML without anchors and aliases, which expand few bytes to many values, and without duplicate keys."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = self._num_values = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()
        where = f"in line {event.start_mark.line + 1}"
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            raise yaml.YAMLError(f"an anchor or alias {where}: write the value out where it is needed")
        self._num_values += 1
        if self._num_values > _YAML_VALUES:
            raise yaml.YAMLError(f"more than {_YAML_VALUES:,} values")
        self._depth += 1
        if self._depth > _DEPTH:
            raise yaml.YAMLError(f"{_TOO_DEEP}, {where}")
        node = super().compose_node(parent, index)
        self._depth -= 1
        if node is not None and node.tag not in _TAGS:
            kind = node.tag.rpartition(":")[2].rpartition("!")[2]
            raise yaml.YAMLError(f"a value of the kind {kind!r} {where}: put it in quotes if it is text")
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.YAMLError(f"a key in line {key.start_mark.line + 1} is no text and no number")
            if key.value in lines:
                raise yaml.YAMLError(
                    f"{key.value} is given twice, in lines {lines[key.value]} and {key.start_mark.line + 1}"
                )
            lines[str(key.value)] = key.start_mark.line + 1
        return super().construct_mapping(node, deep)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            value = super().construct_object(node, deep)
        except (ValueError, OverflowError) as error:  # thousands of digits, or of groups as in 1:30:59
            raise yaml.YAMLError(f"a number in line {node.start_mark.line + 1} is too long") from error
        if isinstance(value, int) and value.bit_length() > 4 * _DIGITS:
            raise yaml.YAMLError(f"a number in line {node.start_mark.line + 1} is too long")
        if isinstance(value, str) and _HALF.search(value):
            raise yaml.YAMLError(f"characters that no path has, nor any text, in line {node.start_mark.line + 1}")
        return value


# YAML 1.2, and so every editor, reads 1e-4 as a number, and yes, no, on, off and days as text; YAML 1.1 does not.
_FLOAT = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$")
_BOOL, _TIME = "tag:yaml.org,2002:bool", "tag:yaml.org,2002:timestamp"
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in (_BOOL, _TIME)]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))
_Loader.add_implicit_resolver(_BOOL, re.compile(r"(true|True|TRUE|false|False|FALSE)$"), list("tTfF"))

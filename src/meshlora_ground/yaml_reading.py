"""Untrusted YAML, read as plain values: its limits, and which of YAML is taken."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Hashable
from typing import Any

import yaml

from meshlora_ground.reading import MOST_BYTES, MOST_DEPTH, MOST_DIGITS, TOO_DEEP

_VALUES = 30_000


def parse_yaml(text: str) -> Any:
    """Parse YAML of text, numbers, lists, mappings, without anchors, tags, aliases. Raises: ValueError: it is other."""
    if len(text) > MOST_BYTES:
        raise ValueError(f"it has more than the {MOST_BYTES:,} characters that are read")
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
        if self._num_values > _VALUES:
            raise yaml.YAMLError(f"more than {_VALUES:,} values")
        self._depth += 1
        if self._depth > MOST_DEPTH:
            raise yaml.YAMLError(f"{TOO_DEEP}, {where}")
        node = super().compose_node(parent, index)
        self._depth -= 1
        if node is not None and node.tag not in _TAGS:
            kind = node.tag.rpartition(":")[2].rpartition("!")[2]
            raise yaml.YAMLError(f"a value of the kind {kind!r} {where}: put it in quotes if it is text")
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        lines: dict[str, int] = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.YAMLError(f"a key in line {line} is no text and no number")
            if key.value in lines:
                raise yaml.YAMLError(f"{key.value} is given twice, in lines {lines[key.value]} and {line}")
            lines[str(key.value)] = line
        return super().construct_mapping(node, deep)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            value = super().construct_object(node, deep)
        except (ValueError, OverflowError) as error:  # thousands of digits, or of groups as in 1:30:59
            raise yaml.YAMLError(f"a number in line {node.start_mark.line + 1} is too long") from error
        if isinstance(value, int) and value.bit_length() > 4 * MOST_DIGITS:
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

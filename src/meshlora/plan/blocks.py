"""Blocks of a decoder layer: their head counts, the layouts that follow, and the attributes to set on each rank.

Owns: reading head counts from transformers' attention modules, the layouts of their linears and parameters, and the
attributes that must hold local counts. Does not own: which linears are split (`wings.tables`,
`plan.families.styles`).
"""

from __future__ import annotations

import operator
import re
from dataclasses import dataclass
from typing import Any

from torch import nn

from meshlora.plan.families.family import Leaf
from meshlora.plan.layout import Layout, Piece, Split
from meshlora_ground.errors import UnsupportedError

# Attributes of transformers' attention modules, by what they count.
_QUERY_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "kv_heads")
_GROUPS = ("num_key_value_groups",)
_HEAD_SIZES = ("head_dim", "head_size", "attention_head_size", "depth")
_KEY_OR_VALUE = re.compile(r"(k|v|key|value|k_lin|v_lin)(_proj|_linear)?")
_OF_KEYS = re.compile(r"(k|v|key|value)_")


@dataclass(frozen=True)
class Heads:
    """Global head counts of one attention module."""

    query: int
    kv: int

    @classmethod
    def of(cls, block: nn.Module, config: Any) -> Heads | None:
        """Read them from a block; None if it has no heads (an MLP)."""
        owner = next((module for module in block.modules() if _has_heads(module)), None)
        if owner is None:
            return None
        text = config.get_text_config()
        query = _first(owner, _QUERY_HEADS) or getattr(owner, "num_heads", None) or text.num_attention_heads
        kv = _first(owner, _KV_HEADS)
        if kv is None and (groups := _first(owner, _GROUPS)):
            kv = query // groups
        return cls(query, kv or getattr(text, "num_key_value_heads", None) or query)

    def units(self, piece: str) -> int:
        """Number of heads in piece `q`, `k` or `v`; `q1` and `q2` have half each."""
        number = self.kv if piece[0] in "kv" else self.query
        if piece[1:]:
            return number // 2
        return number


def leaf_layout(path: str, leaf: Leaf, width: int, heads: Heads | None) -> Layout:
    """The layout of the split dim (`width` features) of the linear at `path`."""
    if leaf.pieces:
        return _fused_layout(path, leaf, width, heads)
    if heads is None:
        return Layout.plain(width)
    # Of grouped-query attention: its keys and values are fewer than its queries.
    is_shared = leaf.split is Split.COLUMN and any(map(_KEY_OR_VALUE.fullmatch, path.split(".")))
    number = heads.kv if is_shared else heads.query
    if width % number:
        raise UnsupportedError(path, f"its {width} features are not {number} heads of one size", "use tp=1")
    return Layout.plain(number, width // number, can_replicate=is_shared and heads.kv < heads.query)


def parameter_layout(path: str, width: int, heads: Heads | None) -> Layout:
    """The layout of a parameter's split dim: one or more values per head, or plain features if there are no heads."""
    if heads is None:
        return Layout.plain(width)
    number = heads.query
    if any(map(_OF_KEYS.match, path.split("."))):
        number = heads.kv
    return Layout.plain(number, width // number, can_replicate=number < heads.query)


def _fused_layout(path: str, leaf: Leaf, width: int, heads: Heads | None) -> Layout:
    names = leaf.pieces.split()
    if heads is None:
        assert isinstance(leaf.groups, int), (path, leaf.groups)
        assert width % len(names) == 0, (path, width)
        pieces = tuple(Piece(name, width // len(names), 1) for name in names)
        return Layout(pieces, leaf.groups, leaf.local_groups)
    number = sum(map(heads.units, names))
    if width % number:
        raise UnsupportedError(path, f"its {width} features are not {number} heads of one size", "use tp=1")
    found = []
    for name in names:
        is_served = name[0] in "kv" and heads.kv < heads.query  # one of these serves several query heads
        found.append(Piece(name, heads.units(name), width // number, can_replicate=is_served))
    groups = leaf.groups
    if isinstance(groups, str):
        groups = heads.query if groups == "heads" else heads.kv
    return Layout(tuple(found), groups, leaf.local_groups)


def local_attributes(module: nn.Module, heads: Heads, named: tuple[str, ...], *, tp: int) -> dict[str, int]:
    """Attribute -> its local value, for attributes known by name and those listed by the family (`named`)."""
    # At least one: with fewer key/value heads than ranks, several ranks hold each.
    query, kv = heads.query // tp, max(1, heads.kv // tp)
    values: dict[str, int] = {}
    for name in _QUERY_HEADS:
        if getattr(module, name, None) == heads.query:  # else it counts something else by that name
            values[name] = query
    for name in _KV_HEADS:
        if getattr(module, name, None) == heads.kv:
            values[name] = kv
    for name in _GROUPS:
        if hasattr(module, name):
            values[name] = query // kv
    for name in named:
        if not hasattr(module, name.partition(".")[0]):  # not in this layer
            continue
        value = operator.attrgetter(name)(module)  # "config.x" is of its configuration
        values[name] = value * query // heads.query
        if name.rpartition(".")[2] in _KV_HEADS and value == heads.kv:
            values[name] = kv
    return values


def kept_whole(module: nn.Module) -> bool:
    """Whether an unsplit block must be a region, i.e. is not token-wise (a norm, a dropout, an activation)."""
    kind = type(module).__name__
    # By its form too: a module called a norm may mix tokens with matrices inside.
    is_norm = "Norm" in kind and all(p.ndim <= 1 for p in module.parameters()) and not list(module.children())
    is_activation = type(module).__module__ in ("transformers.activations", "torch.nn.modules.activation")
    return not (isinstance(module, nn.Dropout | nn.Identity) or is_norm or is_activation)


def _has_heads(module: nn.Module) -> bool:
    return any(hasattr(module, name) for name in (*_QUERY_HEADS, *_HEAD_SIZES))


def _first(module: nn.Module, names: tuple[str, ...]) -> int | None:
    values = (getattr(module, name, None) for name in names)
    return next((value for value in values if isinstance(value, int)), None)

"""Blocks of a decoder layer: their head counts, the layouts that follow, and the attributes to set on each rank.

Owns: reading head counts from transformers' attention modules, the layouts of their linears and parameters, and the
attributes that must hold local counts. Does not own: which linears are split (`plan.families.explicit`,
`plan.families.styles`).
"""

from __future__ import annotations

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
        owner = next((m for m in block.modules() if any(hasattr(m, n) for n in (*_QUERY_HEADS, *_HEAD_SIZES))), None)
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
        return (self.kv if piece[0] in "kv" else self.query) // (2 if piece[1:] else 1)


def leaf_layout(path: str, leaf: Leaf, width: int, heads: Heads | None) -> Layout:
    """The layout of the split dim (`width` features) of the linear at `path`."""
    if leaf.pieces:
        return _fused_layout(path, leaf, width, heads)
    if heads is None:
        return Layout.plain(width)
    is_shared = leaf.split is Split.COLUMN and bool(_KEY_OR_VALUE.fullmatch(path.rpartition(".")[2]))
    number = heads.kv if is_shared else heads.query
    if width % number:
        raise UnsupportedError(path, f"its {width} features are not {number} heads of one size", "use tp=1")
    return Layout.plain(number, width // number, can_replicate=is_shared and heads.kv < heads.query)


def parameter_layout(path: str, width: int, heads: Heads | None) -> Layout:
    """The layout of a parameter's split dim: one or more values per head, or plain features if there are no heads."""
    if heads is None:
        return Layout.plain(width)
    number = heads.kv if any(_OF_KEYS.match(part) for part in path.split(".")) else heads.query
    return Layout.plain(number, width // number, can_replicate=number < heads.query)


def _fused_layout(path: str, leaf: Leaf, width: int, heads: Heads | None) -> Layout:
    names = leaf.pieces.split()
    groups = leaf.groups
    if isinstance(groups, str):
        assert heads is not None, path
        groups = heads.query if groups == "heads" else heads.kv
    if heads is None:
        assert width % len(names) == 0, (path, width)
        return Layout(tuple(Piece(n, width // len(names), 1) for n in names), groups, leaf.local_groups)
    numbers = [heads.units(name) for name in names]
    if width % sum(numbers):
        raise UnsupportedError(path, f"its {width} features are not {sum(numbers)} heads of one size", "use tp=1")
    unit = width // sum(numbers)
    pieces = (
        Piece(name, number, unit, can_replicate=name[0] in "kv" and heads.kv < heads.query)
        for name, number in zip(names, numbers, strict=True)
    )
    return Layout(tuple(pieces), groups, leaf.local_groups)


def local_attributes(module: nn.Module, heads: Heads, named: tuple[str, ...], *, tp: int) -> dict[str, int]:
    """Attribute -> its local value, for attributes known by name and those listed by the family (`named`)."""
    query, kv = heads.query // tp, max(1, heads.kv // tp)
    values = {name: query for name in _QUERY_HEADS if getattr(module, name, None) == heads.query}
    values |= {name: kv for name in _KV_HEADS if getattr(module, name, None) == heads.kv}
    values |= {name: query // kv for name in _GROUPS if hasattr(module, name)}
    for name in named:
        owner, _, field = name.rpartition(".")
        value = getattr(getattr(module, owner) if owner else module, field)
        values[name] = kv if field in _KV_HEADS and value == heads.kv else value * query // heads.query
    return values


def kept_whole(module: nn.Module) -> bool:
    """Whether an unsplit block must be a region, i.e. is not token-wise (a norm, a dropout, an activation)."""
    kind = type(module).__name__
    is_norm = "Norm" in kind and all(p.ndim <= 1 for p in module.parameters()) and not list(module.children())
    is_activation = type(module).__module__ in ("transformers.activations", "torch.nn.modules.activation")
    return not (isinstance(module, nn.Dropout | nn.Identity) or is_norm or is_activation)


def _first(module: nn.Module, names: tuple[str, ...]) -> int | None:
    return next((v for name in names if isinstance(v := getattr(module, name, None), int)), None)

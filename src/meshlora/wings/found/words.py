"""The words of a plan that say which rows of each linear belong together: found by trying them against dependencies.

The rows of a column linear that one rank must hold are those on which the rank's inputs of the row linear depend. A
word of `plan.families.family` (plain heads, "q k v" in blocks or per head, gate and up, ...) is right if its layout
gives each rank these rows, for every number of ranks that it can split over. So a word is symbolic, as a table's: it
holds for any size of the model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

from meshlora.plan.blocks import Heads, leaf_layout
from meshlora.plan.families.family import COLUMN, ROW, Leaf, fused
from meshlora.plan.layout import Layout
from meshlora.wings.found.probe import Seen, gradients, rows_in
from meshlora_ground.errors import UnsupportedError

# (number of ranks, rank) -> column linear -> the rows that the rank needs.
Needs = dict[tuple[int, int], dict[str, set[int]]]

# Numbers of ranks that words are tried on: a twin has up to eight heads.
_SIZES = (2, 4, 8)
_OF_FEATURES = (COLUMN, fused("gate up"), fused("a b c"))
_OF_HEADS = (
    *(COLUMN, fused("q"), fused("k"), fused("q k v")),
    *(fused("q k v", groups="heads"), fused("q k v", groups="kv_heads")),
    *(fused("k v"), fused("k v", groups="kv_heads"), fused("q1 q2"), fused("k1 k2")),
    fused("q v k", groups=4, local_groups=4),
)


def needs_of(seen: Seen, rows: Mapping[str, Sequence[str]], layouts: Mapping[str, Layout]) -> Needs:
    """What each rank needs. rows, layouts: row linear -> the column linears that it reads; how its inputs are split."""
    needs: Needs = {}
    for size in _SIZES:
        if not all(layout.can_split(size) for layout in layouts.values()):
            continue
        for rank in range(size):
            own = needs.setdefault((size, rank), {})
            for row, columns in rows.items():
                features = layouts[row].rows(rank=rank, size=size)
                found = gradients(seen.read[row], [seen.made[name] for name in columns], features=features)
                for name, each in zip(columns, found, strict=True):
                    own[name] = own.get(name, set()) | rows_in(each)
    return needs


def row_layout(path: str, width: int, heads: Heads | None) -> Layout | None:
    """How the inputs of a row linear are split; None if its width is not that of the heads."""
    try:
        return leaf_layout(path, ROW, width, heads)
    except UnsupportedError:
        return None


def word_of(path: str, width: int, heads: Heads | None, needs: Needs) -> Leaf | None:
    """The first word whose layout gives each rank the rows of the column linear at `path` that it needs."""
    sizes = sorted({size for size, _ in needs})
    for leaf, layout in _layouts(path, width, heads):
        own = [size for size in sizes if layout.can_split(size)]
        if own[:1] == sizes[:1] and all(_fits(layout, path, size, needs) for size in own):
            return leaf
    return None


def _layouts(path: str, width: int, heads: Heads | None) -> Iterator[tuple[Leaf, Layout]]:
    """The words that are possible at `path`, with their layouts."""
    for leaf in _OF_FEATURES if heads is None else _OF_HEADS:
        pieces = leaf.pieces.split()
        if heads is None:
            is_possible = not pieces or width % len(pieces) == 0
        else:
            groups = {"heads": heads.query, "kv_heads": heads.kv}.get(str(leaf.groups), leaf.groups)
            assert isinstance(groups, int)
            units = [heads.units(piece) for piece in pieces]
            is_possible = all(number and number % groups == 0 for number in units)
        if is_possible:
            with contextlib.suppress(UnsupportedError):  # its width is not that of so many heads
                yield leaf, leaf_layout(path, leaf, width, heads)


def _fits(layout: Layout, path: str, size: int, needs: Needs) -> bool:
    for rank in range(size):
        held, needed = set(layout.rows(rank=rank, size=size).tolist()), needs[size, rank].get(path, set())
        # Of what nobody reads each rank may hold some, but no rank all.
        if not needed <= held or (held != needed and len(held) * size > layout.size):
            return False
    return True

"""The words of a plan that say which rows of each linear belong together: found by trying them against dependencies.

The rows of a column linear that one rank must hold are those on which the rank's inputs of the row linear depend. A
word of `plan.families.family` (plain heads, "q k v" in blocks or per head, gate and up, ...) is right if its layout
gives each rank these rows, for every number of ranks that it can split over. So a word is symbolic, as a table's: it
holds for any size of the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from meshlora.plan.blocks import Heads, leaf_layout, parameter_layout
from meshlora.plan.families.family import COLUMN, ROW, Leaf, fused
from meshlora.plan.layout import Layout
from meshlora.wings.found.probe import Seen, gradients, rows_in
from meshlora_ground.errors import UnsupportedError

# Numbers of ranks that words are tried on: a twin has up to eight heads.
_SIZES = (2, 4, 8)
_OF_FEATURES = (COLUMN, fused("gate up"), fused("a b c"))
_OF_HEADS = (
    COLUMN,
    fused("q"),
    fused("k"),
    fused("q k v"),
    fused("q k v", groups="heads"),
    fused("q k v", groups="kv_heads"),
    fused("k v"),
    fused("k v", groups="kv_heads"),
    fused("q1 q2"),
    fused("k1 k2"),
    fused("q v k", groups=4, local_groups=4),
)


@dataclass(frozen=True)
class Needs:
    """What the ranks' inputs of row linears depend on.

    Attributes:
        rows: (number of ranks, rank) -> column linear -> the rows that the rank needs.
        entries: the same -> parameter -> for each of its dims the indices that the rank needs.
    """

    rows: Mapping[tuple[int, int], Mapping[str, set[int]]]
    entries: Mapping[tuple[int, int], Mapping[str, list[set[int]]]]

    @property
    def sizes(self) -> list[int]:
        """The numbers of ranks, small ones first."""
        return sorted({size for size, _ in self.rows})


def needs_of(
    seen: Seen,
    rows: Mapping[str, Sequence[str]],
    layouts: Mapping[str, Layout],
    parameters: Mapping[str, nn.Parameter],
) -> Needs:
    """What each rank needs. rows, layouts: row linear -> the column linears that it reads; how its inputs are split."""
    of_rows: dict[tuple[int, int], dict[str, set[int]]] = {}
    of_entries: dict[tuple[int, int], dict[str, list[set[int]]]] = {}
    for size in _SIZES:
        if not all(layout.can_split(size) for layout in layouts.values()):
            continue
        for rank in range(size):
            own = of_rows.setdefault((size, rank), {})
            entries = of_entries.setdefault((size, rank), {})
            for row, columns in rows.items():
                features = layouts[row].rows(rank=rank, size=size)
                to = [*(seen.made[name] for name in columns), *parameters.values()]
                found = gradients(seen.read[row], to, features=features)
                for name, each in zip(columns, found, strict=False):
                    own[name] = own.get(name, set()) | rows_in(each)
                for (name, tensor), each in zip(parameters.items(), found[len(columns) :], strict=True):
                    before = entries.setdefault(name, [set() for _ in range(tensor.ndim)])
                    for dim in range(tensor.ndim):
                        before[dim] |= rows_in(each, dim)
    return Needs(of_rows, of_entries)


def row_layout(path: str, width: int, heads: Heads | None) -> Layout | None:
    """How the inputs of a row linear are split; None if its width is not that of the heads."""
    try:
        return leaf_layout(path, ROW, width, heads)
    except UnsupportedError:
        return None


def word_of(path: str, width: int, heads: Heads | None, needs: Needs) -> Leaf | None:
    """The first word whose layout gives each rank the rows of the column linear at `path` that it needs."""
    for leaf, layout in _layouts(path, width, heads):
        sizes = [size for size in needs.sizes if layout.can_split(size)]
        if sizes[:1] == needs.sizes[:1] and all(_fits(layout, path, size, needs) for size in sizes):
            return leaf
    return None


def _layouts(path: str, width: int, heads: Heads | None) -> Iterator[tuple[Leaf, Layout]]:
    """The words that are possible at `path`, with their layouts."""
    for leaf in _OF_FEATURES if heads is None else _OF_HEADS:
        pieces = leaf.pieces.split()
        if heads is None and pieces and width % len(pieces):
            continue
        if heads is not None and pieces:
            units = [heads.units(piece) for piece in pieces]
            groups = {"heads": heads.query, "kv_heads": heads.kv}.get(str(leaf.groups), leaf.groups)
            assert isinstance(groups, int)
            if 0 in units or any(number % groups for number in units):
                continue
        try:
            yield leaf, leaf_layout(path, leaf, width, heads)
        except UnsupportedError:  # its width is not that of so many heads
            continue


def _fits(layout: Layout, path: str, size: int, needs: Needs) -> bool:
    for rank in range(size):
        held, needed = set(layout.rows(rank=rank, size=size).tolist()), needs.rows[size, rank].get(path, set())
        # Of what nobody reads each rank may hold some, but no rank all.
        if not needed <= held or (held != needed and len(held) * size > layout.size):
            return False
    return True


def split_dim(path: str, shape: Sequence[int], heads: Heads | None, needs: Needs) -> int | None:
    """The dim along which the parameter at `path` is split; -1: each rank needs all of it. None: neither is right."""
    sizes = needs.sizes
    for dim, width in enumerate(shape):
        number = 1 if heads is None else heads.query
        if width < 2 or width % number:
            continue
        layout = parameter_layout(path, width, heads)
        if all(layout.can_split(size) and _is_split(layout, path, dim, size, needs) for size in sizes[:1]):
            return dim
    whole = [set(range(width)) for width in shape]
    for size in sizes:
        for rank in range(size):
            if needs.entries[size, rank].get(path) != whole:
                return None
    return -1


def _is_split(layout: Layout, path: str, dim: int, size: int, needs: Needs) -> bool:
    for rank in range(size):
        needed = needs.entries[size, rank].get(path)
        if needed is None or needed[dim] != set(layout.rows(rank=rank, size=size).tolist()):
            return False
    return True

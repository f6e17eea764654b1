"""Roles of the linears of a decoder layer, by which of them reads what: row-parallel, column-parallel or whole.

A *row* linear reads nothing of the residual stream itself, only what other linears of its block have made, and gives to
the stream. A *column* linear is one that a row linear reads, and that nothing else does. All others are whole: what
brings to a low rank (its products are read by further linears), gates of the stream, indexers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from meshlora.wings.found.probe import Seen, gradients, is_nonzero


@dataclass(frozen=True)
class Roles:
    """rows: row linear -> the column linears that it reads, in the order of the layer."""

    rows: Mapping[str, tuple[str, ...]]

    @property
    def columns(self) -> set[str]:
        """All column linears."""
        return set().union(*self.rows.values())


def roles_of(seen: Seen) -> Roles:
    """The roles of the linears of a layer of which `seen` is a forward."""
    names = list(seen.made)
    made = [seen.made[name] for name in names]
    reads: dict[str, set[str]] = {}
    enters: set[str] = set()  # those that read the residual stream
    for name in names:
        found = gradients(seen.read[name], [*made, *seen.entered])
        reads[name] = {other for other, each in zip(names, found, strict=False) if is_nonzero(each)}
        if any(map(is_nonzero, found[len(made) :])):
            enters.add(name)
    assert seen.left is not None
    leaving = gradients(seen.left, made)
    leaves = {name for name, each in zip(names, leaving, strict=True) if is_nonzero(each)}
    readers: dict[str, set[str]] = {name: set() for name in names}
    for name, others in reads.items():
        for other in others:
            readers[other].add(name)
    rows = []
    for name in names:
        # What gives to the stream has its width: a router's scores leave the layer too.
        has_width = seen.made[name].shape[-1] == seen.left.shape[-1]
        is_inner = name not in enters and bool(reads[name]) and has_width
        if is_inner and (name in leaves or readers[name] & enters):
            rows.append(name)
    found_rows: dict[str, tuple[str, ...]] = {}
    for name in rows:
        columns = []
        for other in names:
            feeds_rows_alone = other not in leaves and readers[other] <= set(rows)
            if other in reads[name] and other not in rows and feeds_rows_alone:
                columns.append(other)
        if columns:
            found_rows[name] = tuple(columns)
    return Roles(found_rows)

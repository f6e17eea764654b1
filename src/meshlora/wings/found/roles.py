"""Roles of the linears of a decoder layer, by which of them reads what: row-parallel, column-parallel or whole.

A *row* linear reads nothing of the residual stream itself, only what other linears of its block have made, and gives to
the stream. A *column* linear is one that a row linear reads, and that nothing else does. All others are whole: those to
a low rank (whose products further linears read), gates of the stream, indexers.
"""

from __future__ import annotations

from meshlora.wings.found.probe import Seen, gradients, is_nonzero


def roles_of(seen: Seen) -> dict[str, tuple[str, ...]]:
    """Row linear -> the column linears that it reads, of a layer of which `seen` is a forward."""
    names, made = list(seen.made), list(seen.made.values())
    reads: dict[str, set[str]] = {}
    readers: dict[str, set[str]] = {name: set() for name in names}
    enters = set()  # those that read the residual stream
    for name in names:
        found = gradients(seen.read[name], [*made, *seen.entered])
        reads[name] = {other for other, each in zip(names, found, strict=False) if is_nonzero(each)}
        for other in reads[name]:
            readers[other].add(name)
        if any(map(is_nonzero, found[len(made) :])):
            enters.add(name)
    leaving = gradients(seen.left, made)
    leaves = {name for name, each in zip(names, leaving, strict=True) if is_nonzero(each)}
    rows = set()
    for name in names:
        # What gives to the stream has its width: a router's scores leave the layer too.
        gives = seen.made[name].shape[-1] == seen.left.shape[-1] and (name in leaves or readers[name] & enters)
        if gives and name not in enters:
            rows.add(name)
    roles = {}
    for row in [name for name in names if name in rows]:
        inner = [other for other in names if other in reads[row] and other not in rows | leaves]
        if columns := tuple(other for other in inner if readers[other] <= rows):
            roles[row] = columns
    return roles

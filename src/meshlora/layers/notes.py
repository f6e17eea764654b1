"""Notes on a tensor: what is known of its values beside them, for a layer that is called with it later.

Owns: writing a note, and reading one that still holds. Does not own: what is noted, which is the writer's:
`layers.shared_input`, `layers.early_a`, `layers.gate_recompute`. Why notes: docs/decisions/016.

The model's own code lies between who knows and who asks, and hands on tensors alone. A note holds for this very tensor,
unchanged: a copy, a view and a tensor that was changed in place have none, and whoever finds none computes as always.
"""

from __future__ import annotations

from typing import TypeVar

from torch import Tensor

from meshlora.common.compat import version_of

_Note = TypeVar("_Note")
_NOTES = "_meshlora_notes"  # kind -> (the note, the version of the tensor then)


def note(x: Tensor, found: _Note) -> _Note:
    """Write `found` on x itself, so that it is gone with x: a table of ours would keep a graph alive."""
    notes = getattr(x, _NOTES, None)
    if notes is None:
        notes = {}
        setattr(x, _NOTES, notes)
    notes[type(found)] = (found, version_of(x))
    return found


def noted(x: Tensor, kind: type[_Note]) -> _Note | None:
    """The note of that kind on x, where x was not changed since."""
    found = getattr(x, _NOTES, {}).get(kind)
    return found[0] if found is not None and found[1] == version_of(x) else None

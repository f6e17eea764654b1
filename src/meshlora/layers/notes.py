"""Notes on a tensor: facts about its values, for a layer that is called with it later.

Owns: writing a note, and reading one that is still valid. Does not own: the contents, which belong to the writers:
`wings.kernels.shared_input`, `wings.kernels.early_a`, `wings.kernels.gate_recompute`, `layers.rounded`. Why notes:
docs/decisions/016.

The model's own code lies between writer and reader, and passes tensors alone. A note is valid for this very tensor,
unchanged: a copy, a view and a tensor modified in place have none, and a reader that finds none computes as usual.
"""

from __future__ import annotations

from typing import TypeVar

from torch import Tensor

from meshlora_ground.compat.torch_tensors import version_of

_Note = TypeVar("_Note")
_NOTES = "_meshlora_notes"  # kind -> (the note, the version of the tensor then)


def note(x: Tensor, found: _Note) -> _Note:
    """Attach `found` to x itself, so that it is freed with x: a global table would keep a graph alive."""
    notes = getattr(x, _NOTES, None)
    if notes is None:
        notes = {}
        setattr(x, _NOTES, notes)
    notes[type(found)] = (found, version_of(x))  # one of a kind: a second takes the place of the first
    return found


def noted(x: Tensor, kind: type[_Note]) -> _Note | None:
    """The note of that kind on x, if x has not been modified since."""
    found = getattr(x, _NOTES, {}).get(kind)
    return found[0] if found is not None and found[1] == version_of(x) else None


def forget(x: Tensor, kind: type) -> None:
    """Remove the note of that kind from x, if it has one."""
    getattr(x, _NOTES, {}).pop(kind, None)

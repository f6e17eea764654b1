"""Indices that a block computes from split rows: each rank would choose by its own rows alone.

A graph does not show them, as an index has no gradient: what column linears make is followed through all operations.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from meshlora.model.regions import tensors_in
from meshlora_ground.compat.torch_operators import TorchDispatchMode


class _Following(TorchDispatchMode):
    """Follows tensors that come of those in `marked`; `found`: whether an index that does is used."""

    def __init__(self) -> None:
        super().__init__()
        self.marked: dict[int, Tensor] = {}  # which keeps them, so that no other has their id
        self.found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        known = [t for t in tensors_in((args, kwargs)) if id(t) in self.marked]
        # A maximum has an index too, which is used by nobody.
        self.found = self.found or any(t.dtype in (torch.int64, torch.int32) for t in known)
        if known:
            self.marked |= {id(t): t for t in tensors_in(out)}
        return out


def chooses_by(block: nn.Module, columns: Collection[str], args: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether `block`, called with `args` and `kwargs`, computes an index from what `columns` (paths in it) make."""
    own, following = copy.deepcopy(block), _Following()
    for path in columns:
        own.get_submodule(path).register_forward_hook(lambda _, __, out: following.marked.update({id(out): out}))
    with torch.no_grad(), following:
        own(*args, **kwargs)
    return following.found

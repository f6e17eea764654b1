"""Indices that a block computes from split rows: each rank would choose by its own rows alone.

A graph does not show them, as an index has no gradient: what comes of column linears is followed through all operations.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_INTEGERS = (torch.int64, torch.int32, torch.int16)


class _Following(TorchDispatchMode):
    """Follows tensors that come of those in `marked`; `found`: whether an index that does is used."""

    def __init__(self) -> None:
        super().__init__()
        self.marked: dict[int, Tensor] = {}  # which keeps them, so that no other has their id
        self.found = False

    def mark(self, value: Tensor) -> None:
        self.marked[id(value)] = value

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = tree_leaves((args, kwargs))
        known = [self.marked[id(value)] for value in given if id(value) in self.marked]
        # A maximum has an index too, which is used by nobody.
        self.found = self.found or any(value.dtype in _INTEGERS for value in known)
        if known:
            for value in tree_leaves(out):
                if isinstance(value, Tensor):
                    self.mark(value)
        return out


def chooses_by(block: nn.Module, columns: Collection[str], args: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether `block`, called with `args` and `kwargs`, computes an index from what `columns` (paths in it) make."""
    own, following = copy.deepcopy(block), _Following()
    for path in columns:

        def mark(_: nn.Module, __: Any, output: Tensor) -> None:
            following.mark(output)

        own.get_submodule(path).register_forward_hook(mark)
    with torch.no_grad(), following:
        own(*args, **kwargs)
    return following.found

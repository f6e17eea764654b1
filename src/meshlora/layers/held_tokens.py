"""The tokens of a forward that a rank has, of every sequence a part.

Owns: which they are (`HeldTokens`), whether the running forward is cut (`ContextCut`), and the cut of activations. Does
not own: how tokens are dealt to ranks (`plan.token_order`), what becomes of tokens that see others of other ranks
(`wings.context`). A forward that nobody has cut (`ContextCut.next`) runs whole on every cp rank: what generation does.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from meshlora.comm.collectives import gather_each_to_each
from meshlora.comm.groups import Axis, SharedByCopies
from meshlora_ground.transfer import to_device


class HeldTokens:
    """The tokens of one forward on a cp rank.

    order: int64 `[B, S]`, on the host: of each row the positions of rank 0's tokens, then rank 1's, each ascending.

    Attributes:
        own: `[B, S/cp]`, the positions of this rank's. places: `[B, S]`, where each position is in `order`; None if
            every rank has a contiguous part.
    """

    def __init__(self, order: np.ndarray, axis: Axis, device: torch.device) -> None:
        self.rows, self.length = order.shape
        self.axis, self.per_rank = axis, self.length // axis.size
        self.is_uniform = bool((order == order[:1]).all())
        first = axis.rank * self.per_rank
        self.own_on_host = order[:, first : first + self.per_rank]
        self.order = order
        self.own = to_device(torch.from_numpy(np.ascontiguousarray(self.own_on_host)), device)
        is_contiguous = bool((order == np.arange(self.length)).all())
        places = None if is_contiguous else torch.from_numpy(np.argsort(order, axis=1))
        self.places = None if places is None else to_device(places, device)

    def cut(self, x: Tensor, dim: int, *, rows: int | None = None) -> Tensor:
        """This rank's entries of `x` along `dim`, which has S entries. The gradient is that of its own entries, 0
        elsewhere.

        rows: the dim of rows, before `dim`, next to it if None; they may be one for all.
        """
        dim %= x.ndim
        if self.is_uniform or dim == 0:
            return x.index_select(dim, self.own[0])  # one order for all rows: no index as large as x
        rows = dim - 1 if rows is None else rows % x.ndim
        shape, own = list(x.shape), [1] * x.ndim
        shape[rows] = own[rows] = self.rows  # a mask that is one for all rows is expanded
        x = x.expand(shape)
        shape[dim] = own[dim] = self.per_rank
        return x.gather(dim, self.own.view(own).expand(shape))

    def gathered(self, x: Tensor) -> Tensor:
        """`[B, S/cp, ...]` of each rank -> `[B, S, ...]` of all, in the order of the row; its gradient is summed."""
        every = gather_each_to_each(x.contiguous(), self.axis)
        rows = every.unflatten(0, (self.axis.size, self.rows)).transpose(0, 1).flatten(1, 2)
        if self.places is None:
            return rows
        if self.is_uniform:
            return rows.index_select(1, self.places[0])
        index = self.places.view(*self.places.shape, *[1] * (x.ndim - 2)).expand_as(rows)
        return rows.gather(1, index)

    def of_rank(self, rank: int) -> np.ndarray:
        """`[B, S/cp]`, the positions of the tokens of a rank."""
        return self.order[:, rank * self.per_rank : (rank + 1) * self.per_rank]


class ContextCut(SharedByCopies):
    """The cut of a model's forwards over `axis`: whether, and how, the running one is cut. One object per model.

    Attributes:
        balances: whether ranks are to get heads and tails of sequences, as the later tokens have more work, or
            contiguous parts.
        held: the tokens of the running forward on this rank; None: it is whole.
    """

    def __init__(self, axis: Axis, device: torch.device) -> None:
        self.axis, self.device = axis, device
        self.balances = True
        self.held: HeldTokens | None = None
        self._next: np.ndarray | None = None

    def next(self, order: np.ndarray | None) -> None:
        """Cut the next forward of the model by `order`, of `HeldTokens`; without a call it is whole on every rank."""
        self._next = order

    def begin(self) -> None:
        """A forward of the model begins. What it says holds in its backward too, where layers may run again."""
        order, self._next = self._next, None  # a forward that nobody announces is whole
        self.held = None if order is None else HeldTokens(order, self.axis, self.device)

    def cut(self, x: Tensor) -> Tensor:
        """The residual stream `[B, S, H]` -> `[B, S/cp, H]`."""
        return x if self.held is None else self.held.cut(x, 1)

    def of_tokens(self, values: Tensor) -> Tensor:
        """`[B*S]` of the running forward's tokens -> `[B, S/cp]`, or `[B, S]` if it is whole."""
        return values if self.held is None else self.held.cut(values.view(self.held.rows, -1), 1)

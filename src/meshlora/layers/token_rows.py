"""Rows of a vocabulary that take the place of those of the base: in a lookup, and in logits.

Owns: the computation with them, on the part of the vocabulary that a rank has. Does not own: who has which rows
(`adapter.targets.token_rows`).

Every rank of tp holds all n rows, and uses those of its own tokens. So its gradient has the terms of these alone: a sum
over tp, of the embedding as of the head.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshlora.comm.collectives import all_reduce_sum
from meshlora.comm.groups import Axis


class ReplacedRows(nn.Module):
    """Rows `[n, H]` of the tokens `ids`, beside a slice of a vocabulary.

    Attributes:
        values: the rows, of all ids. numbers: int64 `[n]`, the ids, from the first token of the slice: some may be
            outside. ordered, order: these in ascending order, and the row of each. here, local: rows of the ids that
            are inside, and these.
    """

    def __init__(self, values: nn.Parameter, ids: Sequence[int], *, first: int, num_local: int) -> None:
        super().__init__()
        self.values = values
        # Of lists: on a GPU the counts of rows would have to be waited for.
        numbers = [number - first for number in ids]
        here = [row for row, number in enumerate(numbers) if 0 <= number < num_local]
        order = sorted(range(len(numbers)), key=numbers.__getitem__)

        def held(values_of: list[int]) -> Tensor:
            return torch.tensor(values_of, dtype=torch.int64, device=values.device)

        self.numbers, self.order, self.ordered = held(numbers), held(order), held(sorted(numbers))
        self.here, self.local = held(here), held([numbers[row] for row in here])

    def looked_up(self, y: Tensor, ids: Tensor, *, padding: int | None, scale: Tensor | None) -> Tensor:
        """y `[..., H]`, the lookup of local ids `[...]` -> with the rows in place of those of the base.

        padding: the local id whose row gets no gradient, as of any embedding. scale: what the lookup multiplies.
        """
        # Where an id is, or would be: past the end there is no entry to compare with.
        place = torch.searchsorted(self.ordered, ids).clamp_(max=len(self.ordered) - 1)
        is_listed = self.ordered[place] == ids
        values = self.values.to(y.dtype)
        if padding is not None:
            # A detached row has a value, and no gradient.
            values = values.detach().where((self.numbers == padding).unsqueeze(1), values)
        rows = F.embedding(self.order[place], values)  # of all tokens: those that are not listed are left out below
        if scale is not None:
            rows = rows * scale.to(rows.dtype)
        return rows.where(is_listed.unsqueeze(-1), y)

    def put_into(self, logits: Tensor, x: Tensor) -> Tensor:
        """logits `[..., V_local]` of x `[..., H]` -> with those of the rows in place, in the same memory."""
        return logits.index_copy_(-1, self.local, x @ self.values[self.here].to(x.dtype).mT)


def rows_of(replaced: nn.ModuleDict, adapter: str | None) -> ReplacedRows | None:
    """The rows of `adapter` among those of a leaf, by adapter; None: it has none."""
    if adapter is None or adapter not in replaced:
        return None
    rows = replaced[adapter]
    assert isinstance(rows, ReplacedRows)
    return rows


def base_rows(weight: Tensor, ids: Sequence[int], *, first: int, tp: Axis | None) -> Tensor:
    """The rows `[n, H]` of `ids` in a vocabulary of which this rank has `weight` `[V_local, H]`, from token `first`.

    tp: the ranks that have the others; None: none has. Exact: a row is summed with zeros.
    """
    numbers = torch.tensor(ids, device=weight.device) - first
    is_here = (numbers >= 0) & (numbers < len(weight))
    own = weight.detach()[numbers.where(is_here, 0)]
    own = own.masked_fill(~is_here.unsqueeze(1), 0)  # the rank that has the row has the only term
    return own if tp is None else all_reduce_sum(own, tp)

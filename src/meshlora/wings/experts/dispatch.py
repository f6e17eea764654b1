"""Dispatch: tokens travel to their experts, and the experts' outputs travel back.

Owns: the routes over the ranks, the order of rows in transit and at the experts, and the weighted sum at the source.
Does not own: the experts' computation (`wings.experts.module`), routing (the model's router).

A *slot* is one of the k choices of one token. At the source the T k slots are sorted stably by expert, so that the rows
for one rank are contiguous. At an expert, rows are in the order of their source ranks, then of the tokens there, never
in order of arrival, so that the result does not depend on it. Nothing is dropped and nothing is padded; a rank without
rows still takes part in every exchange, forward and backward.

Two exact routes, flat and two-stage, lead to the etp ranks that share an expert: docs/parallelism.md, "Two routes".
Only counts are exchanged in advance, one all-gather of each rank's number of rows per expert: expert ids and routing
weights do not travel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from meshlora.comm.collectives import (
    all_gather,
    exchange_each_to_each,
    gather_each_to_each,
    reduce_scatter_each_to_each,
)
from meshlora.comm.groups import Mesh
from meshlora.wings.experts.products import by_row, inverse_of, sort_by_expert, sum_rows
from meshlora.wings.experts.row_counts import RowCounts
from meshlora_ground.topology import EP, ETP
from meshlora_ground.transfer import to_device


@dataclass(frozen=True)
class Places:
    """A map from n rows to M = n c places, c for each row: a gather in either direction.

    A sum over the places of a row is always taken in their order, forward and backward: no scatter, no atomics.

    Attributes:
        index: int64 `[M]`, the row of each place. places: int64 `[n, c]`, the places of each row; `[n]`, the first one
            of each row, where some rows have more than others, one after another.
    """

    index: Tensor
    places: Tensor

    @classmethod
    def permutation(cls, index: Tensor) -> Places:
        """One place per row."""
        return cls(index, inverse_of(index).unsqueeze(1))

    def to(self, device: torch.device) -> Places:
        """The same on `device`."""
        return Places(to_device(self.index, device), to_device(self.places, device))

    def spread(self, rows: Tensor) -> Tensor:
        """`[n, H]` -> `[M, H]`: a copy of each row in each of its places."""
        return _Moved.apply(rows, self, True)

    def collect(self, rows: Tensor) -> Tensor:
        """`[M, H]` -> `[n, H]`: the sum over the places of each row."""
        return _Moved.apply(rows, self, False)


class _Moved(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, places: Places, spreads: bool) -> Tensor:
        ctx.places, ctx.spreads = places, spreads
        return x.index_select(0, places.index) if spreads else sum_rows(x, places.places)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        g, places = grads[0].contiguous(), ctx.places
        return (sum_rows(g, places.places) if ctx.spreads else g.index_select(0, places.index)), None, None


class _WeightedSum(Function):
    """out[t] = sum_j w[t,j] y[place[t,j]]; y `[T k, H]`, w `[T, k]` -> `[T, H]`, j in order."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, weights: Tensor, places: Places) -> Tensor:
        ctx.save_for_backward(y, weights)
        ctx.places = places
        return sum_rows(y, places.places, weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        y, weights = ctx.saved_tensors
        places: Places = ctx.places
        g = grads[0].index_select(0, places.index)
        dw = (g.to(weights.dtype) * y).sum(1)[places.places]  # summed in the dtype of the weights
        return (g * by_row(weights, places.places).unsqueeze(1)).to(y.dtype), dw, None


@dataclass(frozen=True)
class Slots:
    """The expert choices of one rank's tokens, sorted by expert.

    Attributes:
        places: token -> its k sorted places, in the order of its choices. counts: rows for each of E experts.
    """

    places: Places
    counts: RowCounts

    @classmethod
    def of(cls, top_k_index: Tensor, num_experts: int) -> Slots:
        """top_k_index: int64 `[T, k]`."""
        order, counts = sort_by_expert(top_k_index, num_experts)  # order // k is the token of a slot
        top_k = top_k_index.shape[-1]
        return cls(Places(order // top_k, inverse_of(order).view(-1, top_k)), counts)

    def rows(self, tokens: Tensor) -> Tensor:
        """`[T, H]` -> one row per slot `[T k, H]`, sorted by expert."""
        return self.places.spread(tokens)

    def weighted_sum(self, rows: Tensor, weights: Tensor) -> Tensor:
        """`[T k, H]` and the routing weights `[T, k]` -> `[T, H]`."""
        return _WeightedSum.apply(rows, weights, self.places)


class Journey:
    """The route of one forward's rows to their experts and back. Collective over ep and etp.

    Attributes:
        counts: rows at each of this rank's experts. by_expert: from arrival order to expert order.
    """

    def __init__(self, slots: Slots, mesh: Mesh) -> None:
        self.ep, self.etp = mesh.over({EP}), mesh.over({ETP})
        self.is_flat = not mesh.topology.two_stage
        self.block = mesh.over({EP, ETP})
        device = slots.places.index.device
        on_device = all_gather(slots.counts.sizes.view(1, self.ep.size, -1), self.block)
        every = on_device.cpu()  # [ranks of the block, ep, experts of a rank]: all that the host has to know
        sent = every[self.block.rank].sum(1)  # to each ep rank
        arriving, rows = every[:, self.ep.rank], on_device[:, self.ep.rank]  # [ranks of the block, our experts]
        # Sizes of messages and pieces, which collectives and splits need as numbers.
        self.counts: list[int] = arriving.sum(0).tolist()
        sources = torch.arange(self.block.size, device=device)
        if self.is_flat:
            self.copies = _copies(sent, self.etp.size).to(device) if self.etp.size > 1 else None
            self.send = sent.repeat_interleave(self.etp.size).tolist()
            self.receive = arriving.sum(1).tolist()
        else:
            staged = arriving.view(self.ep.size, self.etp.size, -1).transpose(0, 1)  # [etp, ep, our experts]
            self.send, self.receive = sent.tolist(), staged[self.etp.rank].sum(1).tolist()
            each = staged.sum((1, 2)).tolist()  # rows of each etp rank, all padded to the largest number
            self.most = max(each)
            self.filled = to_device(torch.cat([torch.arange(n) + i * self.most for i, n in enumerate(each)]), device)
            rows = rows.view(self.ep.size, self.etp.size, -1).transpose(0, 1).flatten(0, 1)
            sources = sources.view(self.ep.size, self.etp.size).T.flatten()
        self.by_expert = Places.permutation(_by_expert(rows, sources, sum(self.counts)))

    def there(self, rows: Tensor) -> Tensor:
        """Rows sorted by expert `[T k, H]` -> the rows of our experts, in arrival order `[N, H]`."""
        if self.is_flat:
            rows = self.copies.spread(rows) if self.copies is not None else rows
            return exchange_each_to_each(rows, self.block, self.send, self.receive)
        rows = exchange_each_to_each(rows, self.ep, self.send, self.receive)
        # A gather takes equal parts; `filled` leaves the padding out again.
        rows = torch.cat([rows, rows.new_zeros(self.most - len(rows), rows.shape[1])])
        return gather_each_to_each(rows, self.etp).index_select(0, self.filled)

    def back(self, rows: Tensor) -> Tensor:
        """One term over etp of each row `[N, H]`, in that order -> their sums at the source `[T k, H]`, by expert."""
        if self.is_flat:
            rows = exchange_each_to_each(rows, self.block, self.receive, self.send)
            return self.copies.collect(rows) if self.copies is not None else rows
        padded = rows.new_zeros(self.most * self.etp.size, rows.shape[1]).index_copy(0, self.filled, rows)
        own = reduce_scatter_each_to_each(padded, self.etp)[: sum(self.receive)]
        return exchange_each_to_each(own, self.ep, self.receive, self.send)


def _copies(sent: Tensor, etp: int) -> Places:
    """Rows sorted by ep rank, `sent[i]` each -> those of ep rank 0 once for each etp rank, then those of ep rank 1."""
    index, places, start = [], [], 0
    for number in sent.tolist():
        own = torch.arange(start, start + number, device="cpu")
        index += [own] * etp
        places.append(start * etp + torch.arange(etp * number, device="cpu").view(etp, number).T)
        start += number
    return Places(torch.cat(index), torch.cat(places))


def _by_expert(counts: Tensor, sources: Tensor, number: int) -> Tensor:
    """The permutation of `number` rows from (block, expert) order to (expert, source) order, on their device.

    counts: `[blocks, experts]`. sources: the source rank of each block of rows.
    """
    # Stable: rows of one source keep the order of its tokens.
    keys = torch.arange(counts.shape[1], device=counts.device) * len(sources) + sources.unsqueeze(1)
    return torch.argsort(keys.flatten().repeat_interleave(counts.flatten(), output_size=number), stable=True)

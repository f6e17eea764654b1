"""One rectangular batch of tensors: what it holds, and the part of it that a rank has.

Owns: the tokens and rows of a batch that are one rank's. Does not own: making it of sequences (`train.collation`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from meshlora_ground.transfer import to_device

IGNORED = -100  # the label of a position that predicts nothing; torch's cross_entropy ignores it by default


@dataclass(frozen=True, eq=False)  # eq: tensors have no single truth value
class Batch:
    """One micro-batch.

    Args:
        input_ids: int64 `[B, S]`.
        attention_mask: int64 `[B, S]`, 1 at tokens, 0 at padding.
        labels: int64 `[B, S]`, already shifted: `labels[b, t]` is the target predicted **at** position t, which is
            `input_ids[b, t + 1]` if that token is trained, else -100. A loss over these must not shift again.
        num_trained_tokens: how many labels are not -100.
        columns: name -> float32 `[B, S]`, shifted like labels and 0 where these are -100.
        targets: float32 `[B, K]`, of each text; None: they have none.
        order: int64 `[B, S]`, on the host: whose tokens are which under cp (`plan.token_order`); None: not cut.
        own: int64 `[B, S/cp]`, the positions of this rank's. `num_trained_tokens` and `trained` are of these alone.
        counts_rows: whether this rank counts what is of whole rows; all but the first cp rank leave it to that one.
        rows_per_example: number of neighbouring rows that form an example.
        tokens: int64 `[B, S]`, the number of each token in the optimizer step (`meshlora_ground.masks.token_numbers`),
            the same on every topology. Padding continues the count.
        is_dummy: it holds no sequence and only keeps collectives matched.
        position_ids: int64 `[B, S]` of packed rows (`packing.py`), restarting with each sequence; else None.
        lengths: of packed rows the tokens of each sequence, padding as a last one; None: not packed, or not known.
        has_one_each: each packed row holds one sequence, besides padding.
        more: further inputs of the model: token types int64 `[B, S]`, and tensors of images, whose rows are those of
            the sequences' images one after the other, padded with zeros to one shape.
        pads_right: padding is at the end of rows, as the host knows.
        trained: int64 `[num_trained_tokens]`, indices of (own) flat labels that are not -100; None: not computed yet.
    """

    input_ids: Tensor
    attention_mask: Tensor
    labels: Tensor
    num_trained_tokens: int
    tokens: Tensor
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    is_dummy: bool = False
    position_ids: Tensor | None = None
    lengths: AbstractSequence[AbstractSequence[int]] | None = None
    has_one_each: bool = False
    trained: Tensor | None = None
    more: Mapping[str, Tensor] = field(default_factory=dict)
    targets: Tensor | None = None
    rows_per_example: int = 1
    order: np.ndarray | None = None
    own: Tensor | None = None
    counts_rows: bool = True
    pads_right: bool = False

    def held(self, values: Tensor) -> Tensor:
        """`values` `[B, S]` at this rank's tokens, `[B, S]` or `[B, S/cp]`."""
        return values if self.own is None else values.gather(1, self.own.to(values.device))

    @property
    def own_labels(self) -> Tensor:
        """The labels of this rank's tokens, `[B, S]` or `[B, S/cp]`."""
        return self.held(self.labels)

    def cut(self, order: np.ndarray, *, rank: int, size: int) -> Batch:
        """The batch with the tokens of cp rank `rank` of `size` as its own. Call it on the host: it counts labels."""
        per_rank = order.shape[1] // size
        own = torch.from_numpy(np.ascontiguousarray(order[:, rank * per_rank : (rank + 1) * per_rank]))
        cut = dataclasses.replace(self, order=order, own=own, counts_rows=rank == 0, trained=None)
        return dataclasses.replace(cut, num_trained_tokens=int((cut.own_labels != IGNORED).sum()))

    def rows(self, start: int, stop: int) -> Batch:
        """The rows of one adapter in a batch of several, without `more`. Call it on the host: it counts labels."""
        part = dataclasses.replace(self, trained=None, more={})._mapped(lambda tensor: tensor[start:stop])
        if part.order is not None:
            part = dataclasses.replace(part, order=part.order[start:stop])
        if part.lengths is not None:
            part = dataclasses.replace(part, lengths=part.lengths[start:stop])
        return dataclasses.replace(part, num_trained_tokens=int((part.own_labels != IGNORED).sum()))

    def to(self, device: torch.device | str) -> Batch:
        """The batch on `device`, with `trained` computed from the labels on the host, without a synchronization."""
        trained = self.trained
        if trained is None:
            # On the host: `nonzero` of a device tensor waits for its size.
            trained = (self.own_labels.flatten() != IGNORED).nonzero().squeeze(1)
        return dataclasses.replace(self, trained=trained)._mapped(lambda tensor: to_device(tensor, device))

    def _mapped(self, function: Callable[[Tensor], Tensor]) -> Batch:
        """The batch with `function` applied to each tensor."""
        mapped: dict[str, Any] = {}
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                mapped[name] = function(value)
            elif isinstance(value, Mapping):  # columns, more
                mapped[name] = {key: function(tensor) for key, tensor in value.items()}
        return dataclasses.replace(self, **mapped)

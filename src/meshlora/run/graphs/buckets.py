"""The tensors of fixed shape and place that a recorded micro-batch reads, and how a batch is laid into them.

Owns: which shapes there are (`Bucket`), their tensors (`Static`), and the loss over trained tokens that are padded too.
Does not own: recording (`run.graphs.recorder`), what is recorded (`run.graphs.graphs`).

What differs from one batch of a bucket to the next stands in these tensors alone: a number that the host has read of a
batch would be that of the recorded one in all others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from meshlora.layers.head_loss import ChunkLoss, Chunks, chunk_tokens
from meshlora.train.batch import IGNORED, Batch
from meshlora.train.losses import Lazy
from meshlora_ground.float64 import is_lifted, wide_dtype
from meshlora_ground.transfer import to_device

_LEAST = 16
_SHARES = 4  # of the tokens of a bucket: those that are trained fill as many as they need
_ENDS = 8
# Value of each tensor at padding: it is seen by no token of a sequence, and none of the loss.
_PADDING = {"input_ids": 0, "attention_mask": 0, "labels": IGNORED, "tokens": 0}


@dataclass(frozen=True)
class Bucket:
    """Shape of a recorded micro-batch: `rows` of `length` tokens, of which `trained` have a label, or fewer.

    ends: the most sequences of packed rows, their padding included; 0: a row is one sequence.
    """

    rows: int
    length: int
    trained: int
    ends: int

    @classmethod
    def of(cls, batch: Batch, most: int | None) -> Bucket:
        """The least one that holds `batch`. most: tokens of a row, if the model has positions for so many only."""
        rows, length = batch.input_ids.shape
        wide, ends = rounded_up(length), 0
        if batch.lengths is not None and not batch.has_one_each:
            number = rows + sum(map(len, batch.lengths))  # each row may get padding, or more of it
            ends = max(_ENDS, 2 ** (number - 1).bit_length())
        elif most is not None:
            wide = max(length, min(wide, most))
        share = -(-rows * wide // _SHARES)
        return cls(rows, wide, min(-(-batch.num_trained_tokens // share) * share, rows * wide), ends)


class Static:
    """The tensors of a bucket.

    Attributes:
        batch: as the model takes it; at first padding alone, without a trained token: what no batch has. ends: int32
            `[bucket.ends + 1]`, where sequences of packed rows end in all tokens; None: a row is one sequence.
    """

    def __init__(self, bucket: Bucket, device: torch.device) -> None:
        shape, values = (bucket.rows, bucket.length), dict[str, Any]()
        for name, value in _PADDING.items():
            values[name] = torch.full(shape, value, dtype=torch.int64, device=device)
        self._last = bucket.rows * bucket.length - 1
        self._trained = torch.full((bucket.trained,), self._last, dtype=torch.int64, device=device)
        self.ends: Tensor | None = None
        if bucket.ends:
            self.ends = torch.full((bucket.ends + 1,), self._last + 1, dtype=torch.int32, device=device)
            self.ends[0] = 0
            values["position_ids"] = torch.zeros(shape, dtype=torch.int64, device=device)
            # Of no batch: attention goes by `ends`.
            values["lengths"] = [[bucket.length, 0]] * bucket.rows
        self.batch = Batch(num_trained_tokens=0, trained=self._trained, pads_right=True, **values)

    def fill(self, batch: Batch) -> None:
        """Copy in a batch of the bucket. The host does not wait."""
        length, wide = batch.input_ids.shape[1], self.batch.input_ids.shape[1]
        for name, value in _PADDING.items():
            self._copy(getattr(self.batch, name), getattr(batch, name), value)
        assert batch.trained is not None
        number = len(batch.trained)
        row = batch.trained.div(length, rounding_mode="floor")
        self._trained[:number].copy_(batch.trained + row * (wide - length))
        # The last token of all predicts nothing: trained tokens that are padding stand there.
        self._trained[number:].fill_(self._last)
        if self.ends is None:
            return
        assert self.batch.position_ids is not None
        assert batch.position_ids is not None
        assert batch.lengths is not None
        self._copy(self.batch.position_ids, batch.position_ids, 0)
        ends = [0]
        for row_number, of_row in enumerate(batch.lengths):
            for one in of_row:
                ends.append(ends[-1] + one)
            ends.append((row_number + 1) * wide)
        ends += [self._last + 1] * (len(self.ends) - len(ends))  # sequences without a token
        self.ends.copy_(to_device(torch.tensor(ends, dtype=torch.int32, device="cpu"), self.ends.device))

    @staticmethod
    def _copy(target: Tensor, source: Tensor, padding: int) -> None:
        length = source.shape[1]
        target[:, :length].copy_(source)
        target[:, length:].fill_(padding)


def rounded_up(number: int) -> int:
    """To one of eight sizes between two powers of two: at most an eighth more, and few shapes for all."""
    step = max(_LEAST, 2 ** ((number - 1).bit_length() - 4)) if number > 1 else _LEAST
    return -(-number // step) * step


def padded_loss(found: Lazy, batch: Batch, *, label_smoothing: float) -> Tensor:
    """`layers.head_loss.summed_cross_entropy_from_hidden` of a batch of a bucket, whose `trained` is padded."""
    hidden, head, options = found
    labels = batch.labels.flatten()
    assert batch.trained is not None
    targets = labels[batch.trained]
    loss = ChunkLoss(options["axis"], options["vocab"], label_smoothing, wide_dtype(hidden.dtype))
    number = chunk_tokens(loss.vocab, loss.dtype, is_cpu=hidden.is_cpu)
    chunks = Chunks(head, batch.trained, targets, loss, number, is_lifted())
    summed: Tensor = _PaddedCrossEntropy.apply(hidden, chunks, targets != IGNORED)
    return summed


class _PaddedCrossEntropy(Function):
    """Forward: the sum over tokens with a label, and its gradient, chunk by chunk. Backward: that times the gradient
    of the sum.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, chunks: Chunks, is_trained: Tensor) -> Tensor:
        losses, d_hidden, _ = chunks.run(hidden, (), needs_hidden=True)
        assert d_hidden is not None
        d_hidden[-1].zero_()  # of trained tokens that are padding
        ctx.save_for_backward(d_hidden)
        return losses.where(is_trained, 0.0).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (d_hidden,) = ctx.saved_tensors
        return torch.mul(d_hidden, grads[0].view(1), out=torch.empty_like(d_hidden)), None, None

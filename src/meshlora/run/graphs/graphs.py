"""Forward and backward of a micro-batch, recorded once for each shape and replayed: `train.cuda_graphs`.

Owns: which micro-batches are replayed, their gradients, and the comparison of each record's first replay with the eager
step. Does not own: shapes and their tensors (`run.graphs.buckets`), recording (`run.graphs.recorder`), what is refused
(`plan.pairs`), the step, whose gradients are summed over ranks outside of a record (`run.trainer`).

A record is made on content that no batch has. What a batch has and the record did not read from its tensors thus shows
in the comparison of the first replay.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshlora.adapter.attach import Factor, runtime
from meshlora.layers.row_lengths import lengths_of
from meshlora.layers.tokens import Share
from meshlora.loading.positions import most_positions
from meshlora.run.graphs.buckets import Bucket, Static, padded_loss
from meshlora.run.graphs.recorder import Recorder, Run
from meshlora.train.batch import Batch
from meshlora.train.losses import to_head
from meshlora.wings.experts.row_counts import of_a_record
from meshlora.wings.packed_rows.by_sequence import PackedLengths
from meshlora_ground.errors import MeshloraError, UnsupportedError, reason
from meshlora_ground.float64 import lift
from meshlora_ground.masks import mask_key, words_of
from meshlora_ground.transfer import to_device

_WAY_OUT = "set train.cuda_graphs: off"
_MOST = 32  # records: each keeps little, but costs the time of four micro-batches


@dataclass(frozen=True)
class _Record:
    """A recorded micro-batch: its tensors, its summed loss `[]`, what runs it, and the factors that get a gradient."""

    static: Static
    loss: Tensor
    replay: Run
    reached: frozenset[int]


class Graphs:
    """The records of the micro-batches of one adapter's training.

    factors: those that are trained. masks, share: the context and the tokens of a micro-batch. eager: its summed loss
    without a record. say: called once where there can be no record, and the run goes on; None: that ends the run.
    """

    def __init__(
        self,
        model: Any,
        factors: Sequence[Factor],
        recorder: Recorder,
        *,
        label_smoothing: float,
        masks: Callable[[Batch], AbstractContextManager[None]],
        share: Callable[[Batch], Share],
        eager: Callable[[Batch], Tensor],
        say: Callable[[str], None] | None,
    ) -> None:
        self._model, self._factors, self._recorder = model, factors, recorder
        self._label_smoothing, self._masks, self._eager, self._say = label_smoothing, masks, eager, say
        self._share, self._has_failed = share, False
        self._modules: dict[str, int] = {}  # with dropout -> place of the key of their masks
        number = len(list(model.modules()))
        self._keys = torch.zeros(2 * number, 2, dtype=torch.int64, device=factors[0].parameter.device)
        self._most = most_positions(model.config, model)
        self._records: dict[Bucket, _Record] = {}
        self._seen = set[Bucket]()
        self._parameters = [factor.parameter for factor in factors]
        first = self._parameters[0]
        number = sum(parameter.numel() for parameter in self._parameters)
        # Of all records, which add to it; a micro-batch that runs without adds to the factors' own, in its turn.
        self._sums = torch.zeros(number, dtype=first.dtype, device=first.device)
        self._reached = set[int]()  # numbers of the factors that got one: others have none, as in an eager step

    def begin(self) -> None:
        """A step begins: its gradients are 0."""
        self._sums.zero_()
        self._reached.clear()

    def end(self) -> None:
        """All micro-batches of a step have run: give factors the gradients of those that were replayed."""
        self._add(self._sums, self._reached)

    def _add(self, flat: Tensor, reached: Collection[int]) -> None:
        """Add the gradients in `flat` to those of the factors `reached`; they may stay there."""
        for number, own in enumerate(self._of_each(flat)):
            if number not in reached:
                continue
            parameter = self._parameters[number]
            if parameter.grad is None:
                parameter.grad = own  # a new tensor: marks of the last step are not on it
            else:
                parameter.grad.add_(own)

    def takes(self, batch: Batch) -> bool:
        """Whether `batch` is replayed, or recorded now: if one of its shape has come before. Ask once for each."""
        if self._has_failed or batch.is_dummy or not batch.num_trained_tokens:
            return False
        bucket = Bucket.of(batch, self._most)
        has_come = bucket in self._seen
        self._seen.add(bucket)
        return bucket in self._records or (has_come and len(self._records) < _MOST)

    def run(self, batch: Batch) -> Tensor:
        """Forward and backward of `batch`: its summed loss `[]`. The gradients are added to those of the step.

        Raises:
            MeshloraError: the first replay of a record differs from the eager micro-batch; or there can be no record of
                this model, and `say` is None.
        """
        bucket = Bucket.of(batch, self._most)
        record = self._records.get(bucket)
        if record is not None:
            self._replay(record, batch)
            self._reached |= record.reached
            return record.loss.clone()  # the next replay writes there
        with self._masks(batch):
            loss = self._eager(batch)
            expected, reached = self._gradients(loss)
        loss, before = loss.detach(), self._sums.clone()
        if not self._has_failed:
            try:
                record = self._recorded(bucket)
            except (RuntimeError, UnsupportedError) as error:  # what CUDA refuses, or there is no memory
                self._give_up(error)
        if record is not None:
            self._sums.zero_()
            self._replay(record, batch)
            if self._compare(bucket, record.loss, loss, expected):
                self._records[bucket] = record
        self._sums.copy_(before)
        self._add(expected, reached)
        return loss

    def _replay(self, record: _Record, batch: Batch) -> None:
        record.static.fill(batch)
        share = self._share(batch)
        words = [words_of(mask_key(share.seed, share.step, module)) for module in self._modules]
        if words:
            self._keys[: len(words)].copy_(to_device(torch.tensor(words, device="cpu"), self._keys.device))
        record.replay()

    def _key(self, module: str) -> Tensor:
        """The key of the masks of `module`, which the host writes before each replay."""
        return self._keys[self._modules.setdefault(module, len(self._modules))]

    def _recorded(self, bucket: Bucket) -> _Record:
        """A record of what no batch has."""
        static, total, reached = Static(bucket, self._sums.device), self._sums.new_zeros(()), set[int]()
        replay = self._recorder.record(lambda: reached.update(self._both_ways(static, total)))
        return _Record(static, total, replay, frozenset(reached))

    def _give_up(self, error: Exception) -> None:
        self._has_failed = True
        cause = reason(error)
        if self._say is None:
            raise MeshloraError(f"train.cuda_graphs: a micro-batch cannot be recorded: {cause}; {_WAY_OUT}") from error
        self._say(f"train.cuda_graphs: auto: micro-batches run eagerly from now on: {cause}")

    def _both_ways(self, static: Static, total: Tensor) -> frozenset[int]:
        """What is recorded: the loss of `static` into `total`, its gradients added to the sums. Returns who has one."""
        with self._masks(static.batch), self._on_device(static.ends), of_a_record():
            with lift(self._model.dtype == torch.float64):
                found = to_head(self._model, static.batch)
                if isinstance(found, Tensor):
                    raise UnsupportedError("train.cuda_graphs", "the loss of this model is of whole logits", _WAY_OUT)
                loss = padded_loss(found, static.batch, label_smoothing=self._label_smoothing)
            flat, reached = self._gradients(loss)
        self._sums.add_(flat)
        total.copy_(loss.detach())
        return reached

    def _gradients(self, loss: Tensor) -> tuple[Tensor, frozenset[int]]:
        """The gradients of all factors, one after the other, and the numbers of those that the loss depends on."""
        # A layer may be left out, or an expert in a module of its own: other micro-batches reach its factors.
        found = torch.autograd.grad(loss, self._parameters, allow_unused=True)
        grads = []
        for parameter, grad in zip(self._parameters, found, strict=True):
            grads.append(torch.zeros_like(parameter) if grad is None else grad)
        return self._flat(grads), frozenset(number for number, grad in enumerate(found) if grad is not None)

    @contextlib.contextmanager
    def _on_device(self, ends: Tensor | None) -> Iterator[None]:
        """In the block keys of masks, and `ends` of sequences of packed rows, are what the device has, not the host."""
        running, dropout = lengths_of(self._model), runtime(self._model).dropout
        if ends is not None:
            assert isinstance(running, PackedLengths)
            running.ends.fixed = ends
        dropout.keys = self._key
        try:
            yield
        finally:
            dropout.keys = None
            if isinstance(running, PackedLengths):
                running.ends.fixed = None

    def _compare(self, bucket: Bucket, loss: Tensor, eager: Tensor, expected: Tensor) -> bool:
        """Compare loss and gradients of a replay with those of the eager micro-batch, by the rounding of the model.

        Returns False if these are not finite, with which nothing can be compared.
        """
        limit = torch.finfo(self._model.dtype).eps ** 0.5
        whole = expected.norm()
        of_each = [whole + eager, (loss - eager).abs() / eager.abs().clamp(min=1e-6)]
        for found, right in zip(self._of_each(self._sums), self._of_each(expected), strict=True):
            # Of a factor that hardly has a gradient rounding is all there is.
            least = (1e-3 * whole).clamp(min=1e-30)
            of_each.append((found - right).norm() / right.norm().clamp(min=least))
        names = ["the loss", *(f"the gradient of {factor.name}" for factor in self._factors)]
        size, *apart = torch.stack([one.double() for one in of_each]).tolist()
        if not math.isfinite(size):
            return False
        worst = max(range(len(apart)), key=lambda number: (not apart[number] <= limit, apart[number]))
        if not apart[worst] <= limit:  # NaN too
            of = f"{names[worst]} of a recorded micro-batch of {bucket.rows} x {bucket.length} tokens"
            found_apart = f"{apart[worst]:.1e} apart from the eager one (at most {limit:.1e})"
            raise MeshloraError(f"train.cuda_graphs: {of} is {found_apart}; {_WAY_OUT}")
        return True

    def _of_each(self, flat: Tensor) -> list[Tensor]:
        """Gradients one after the other -> that of each factor, a view that lies in memory as the factor does."""
        found, start = [], 0
        for parameter in self._parameters:
            stop = start + parameter.numel()
            part = flat[start:stop]
            found.append(part.view(parameter.shape) if parameter.is_contiguous() else part.view(parameter.mT.shape).mT)
            start = stop
        return found

    def _flat(self, grads: Sequence[Tensor]) -> Tensor:
        """The reverse of `_of_each`, in new memory."""
        parts = []
        for parameter, grad in zip(self._parameters, grads, strict=True):
            parts.append(grad.reshape(-1) if parameter.is_contiguous() else grad.mT.reshape(-1))
        return torch.cat(parts)

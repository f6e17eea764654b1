"""The judge's own batches: the sequences of a step, and the tensors of its micro-batches.

Written a second time from docs/oracle.md. Does not own: the sequences themselves, which both sides share.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from meshlora_ground.dataset import Sequence as TokenSequence
from meshlora_ground.dataset import TokenizedDataset
from meshlora_ground.objectives.policies import Grpo
from meshlora_judge.settings import Training

UNTRAINED = -100


@dataclass(frozen=True)
class MicroBatch:
    """Plain tensors of one micro-batch: `[B, S]` each; labels are shifted already and -100 where untrained.

    columns: name -> float32 `[B, S]`, aligned with the labels. first_place: place of its first sequence in the global
    batch; the others follow at distance `stride`. other: the untrained rows of the same examples. more: further inputs
    of the model; is_of_images: the data have images, if not these sequences. targets: `[B, K]`, of each text. each:
    rows of an example. Labels of the tokens themselves, not of the next ones, are not shifted.
    """

    input_ids: Tensor
    attention_mask: Tensor
    labels: Tensor
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    first_place: int = 0
    stride: int = 1
    other: MicroBatch | None = None
    more: Mapping[str, Tensor] = field(default_factory=dict)
    is_of_images: bool = False
    targets: Tensor | None = None
    each: int = 1

    @property
    def num_tokens(self) -> int:
        """Trained tokens."""
        return int((self.labels != UNTRAINED).sum())

    def every_second(self, first: int) -> MicroBatch:
        """Every second row, starting at `first`."""
        return self._each(lambda t: t[first::2], first_place=self.first_place + first, stride=2)

    def to(self, device: str) -> MicroBatch:
        """A copy on `device`."""
        more = {name: value.to(device) for name, value in self.more.items()}
        other = self.other.to(device) if self.other is not None else None
        return self._each(lambda t: t.to(device), other=other, more=more)

    def _each(self, change: Callable[[Tensor], Tensor], **rest: Any) -> MicroBatch:
        changed: dict[str, Any] = {"columns": {name: change(column) for name, column in self.columns.items()}}
        for name in ("input_ids", "attention_mask", "labels", "targets"):
            tensor = getattr(self, name)
            if tensor is not None:
                changed[name] = change(tensor)
        return replace(self, **changed, **rest)


def micro_batches_of(data: TokenizedDataset, settings: Training, step: int, *, pad_token_id: int) -> list[MicroBatch]:
    """The sequences of optimizer step `step`, in the run's global order, as micro-batches."""
    return list(micro_batches(data, order_of_step(data, settings, step), settings, pad_token_id=pad_token_id))


def order_of_step(data: TokenizedDataset, settings: Training, step: int) -> list[int]:
    """The sequences of optimizer step `step`, in the run's global order.

    An epoch takes every sequence once, in ceil(n / batch_size) steps, the last with the rest. Its order sorts the
    sequences by the raw 64-bit numbers of PCG64, seeded with (seed, epoch). The same holds for pairs, and for examples
    of any number of sequences, of which a step has all.
    """
    number, batch_size = len(data) // data.rows_per_example, settings.batch_size
    if data.examples is not None:
        number = len(data.examples) - 1
    steps_per_epoch = (number + batch_size - 1) // batch_size
    # Another order each epoch, which no earlier epoch has to be drawn for.
    stream = np.random.SeedSequence(settings.seed, spawn_key=(step // steps_per_epoch,))
    keys = np.random.PCG64(stream).random_raw(number).tolist()
    # Equal keys are taken in the order of the data.
    order = sorted(range(number), key=lambda index: (keys[index], index))
    first = step % steps_per_epoch * batch_size
    chosen = order[first : first + batch_size]
    if data.examples is None:
        return chosen
    return [sequence for one in chosen for sequence in range(data.examples[one], data.examples[one + 1])]


def micro_batches(
    data: TokenizedDataset, indices: Sequence[int], settings: Training, *, pad_token_id: int
) -> Iterator[MicroBatch]:
    """The sequences, or pairs, `indices` as micro-batches, padded on the right."""
    each, size, trained_row = data.rows_per_example, settings.micro_batch_size, settings.objective.trained_row
    compared = list[float]()
    if isinstance(settings.objective, Grpo):
        compared = advantages(settings.objective, data)
    for start in range(0, len(indices), size):
        chosen = indices[start : start + size]
        rows = [data[index * each + row] for index in chosen for row in range(each)]
        ids, mask, labels, columns = _padded(rows, data, pad_token_id)
        if getattr(settings.objective, "mask_truncated", False):
            is_cut_off = columns.pop("truncated").amax(1) > 0
            labels[is_cut_off] = UNTRAINED
        if compared:
            of_rows = torch.tensor([compared[index] for index in chosen], dtype=torch.float32).unsqueeze(1)
            columns["advantage"] = torch.where(labels == UNTRAINED, 0.0, of_rows)
        found = MicroBatch(ids, mask, labels, columns, start * each, is_of_images=data.images is not None, each=each)
        if data.targets is not None:
            found = replace(found, targets=torch.tensor([row.targets.tolist() for row in rows]))  # type: ignore[union-attr]
        length = ids.shape[1]
        if trained_row is None:
            yield replace(found, more=further_inputs(rows, length))
            continue
        by_row = [replace(found.every_second(row), more=further_inputs(rows[row::2], length)) for row in (0, 1)]
        yield replace(by_row[trained_row], other=by_row[1 - trained_row])


def _padded(
    rows: Sequence[TokenSequence], data: TokenizedDataset, pad_token_id: int
) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    """(ids, mask, labels, columns) of `rows`, `[B, S]` each. Token by token, as the rule says it."""
    shape = (len(rows), max(len(row.input_ids) for row in rows))
    ids, mask, labels = torch.full(shape, pad_token_id), torch.zeros(shape).long(), torch.full(shape, UNTRAINED)
    columns = {name: torch.zeros(shape) for name in data.columns}
    # The position before a trained token predicts it, where it is predicted at all.
    shift = 1 if data.predicts_next else 0
    for place, row in enumerate(rows):
        for position, token in enumerate(row.input_ids.tolist()):
            ids[place, position], mask[place, position] = token, 1
            own = position - shift
            if own >= 0 and row.is_trained[position]:
                labels[place, own] = token
                for name, column in columns.items():
                    column[place, own] = float(row.columns[name][position])
    return ids, mask, labels, columns


def advantages(objective: Grpo, data: TokenizedDataset) -> list[float]:
    """How much better each rollout is than those of its group: A of DeepSeekMath's section 4.1.2, with 1e-4 added to
    the standard deviation as TRL does; that of all rollouts, or none, if the objective says so.
    """
    assert data.targets is not None
    groups: dict[int, list[float]] = {}
    for number, (reward, since) in enumerate(data.targets.tolist()):
        groups.setdefault(number - int(since), []).append(reward)
    everyone = data.targets[:, 0].tolist()
    found = []
    for number, (reward, since) in enumerate(data.targets.tolist()):
        group = groups[number - int(since)]
        divisor = 1.0
        if objective.scale_rewards != "none":
            over = {"group": group, "batch": everyone}[objective.scale_rewards]
            spread = statistics.stdev(over) if len(over) > 1 else 0.0  # of one rollout there is none
            divisor = spread + 1e-4
        found.append((reward - statistics.fmean(group)) / divisor)
    return found


def further_inputs(rows: Sequence[TokenSequence], length: int) -> dict[str, Tensor]:
    """Token types of `rows`, 0 at padding, and the tensors of their images, one row's after the other's."""
    given: dict[str, list[Tensor]] = {}
    for row in rows:
        for name, value in row.more().items():
            given.setdefault(name, []).append(value)
    found: dict[str, Tensor] = {}
    for name, values in sorted(given.items()):
        if name.endswith("token_type_ids"):
            found[name] = torch.zeros(len(rows), length, dtype=torch.int64)
            for place, types in enumerate(values):
                found[name][place, : len(types)] = types
        else:
            found[name] = _stacked([entry for tensor in values for entry in tensor])
    return found


def _stacked(entries: list[Tensor]) -> Tensor:
    """`entries` as one tensor, `[N, ...]`: images of unequal size are padded with zeros."""
    largest = torch.tensor([entry.shape for entry in entries], device="cpu").amax(0)
    found = torch.zeros(len(entries), *largest.tolist(), dtype=entries[0].dtype)
    for whole, entry in zip(found, entries, strict=True):
        whole[tuple(slice(0, size) for size in entry.shape)] = entry
    return found

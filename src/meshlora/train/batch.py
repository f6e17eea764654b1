"""Collation of sequences of unequal length into one rectangular batch of tensors.

Owns: padding, the shift of labels by one, and the dummy batch. Does not own: which sequences (`train.batches`), or how
a batch is split over the mesh.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from meshlora.plan.token_order import FEWEST
from meshlora_ground.dataset import Sequence
from meshlora_ground.further_inputs import TOKEN_TYPES
from meshlora_ground.masks import token_numbers
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


def collate(
    sequences: AbstractSequence[Sequence],
    *,
    pad_token_id: int,
    token_multiple: int = 1,
    row_multiple: int = 1,
    columns: AbstractSequence[str] = (),
    places: AbstractSequence[int] | None = None,
    num_targets: int = 0,
    predicts_next: bool = True,
) -> Batch:
    """Pad on the right to the longest sequence, then further until S is divisible by `row_multiple`, which leaves at
    least `FEWEST` tokens, and what is then left of each row, B·S / row_multiple, by `token_multiple`.

    S is the smallest such length, so it never exceeds a `max_length` that is a multiple of both's product.

    Without sequences, return a dummy batch `[1, S]` without labels: a rank that has run out runs the same collectives
    as the others and adds nothing.

    Args:
        pad_token_id: fills the padding; never seen by the loss.
        token_multiple: divisor required by sequence parallelism. row_multiple: of S, required by context parallelism.
        columns: names of sequence columns to include.
        places: positions of the sequences in the global batch; None: 0, 1, 2 ...
        num_targets: K of the targets of each sequence, 0: none. predicts_next: as in `TokenizedDataset`.
    """
    assert token_multiple >= 1, token_multiple
    if not sequences:
        length = cut_length(2, parts=row_multiple, multiple=token_multiple)
        return _dummy(length, pad_token_id, columns=columns, num_targets=num_targets)
    num_rows = len(sequences)
    longest = max(len(sequence.input_ids) for sequence in sequences)
    length = cut_length(longest, parts=row_multiple, multiple=token_multiple // math.gcd(num_rows, token_multiple))

    input_ids_np = np.full((num_rows, length), pad_token_id, dtype=np.int64)
    attention_mask = np.zeros((num_rows, length), dtype=np.int64)
    labels = np.full((num_rows, length), IGNORED, dtype=np.int64)
    shifted = {name: np.zeros((num_rows, length), dtype=np.float32) for name in columns}
    # Position t predicts token t + 1; token 0 is predicted by nothing.
    own = slice(int(predicts_next), None)
    for row, sequence in enumerate(sequences):
        ids, is_trained = sequence.input_ids, sequence.is_trained
        input_ids_np[row, : len(ids)] = ids
        attention_mask[row, : len(ids)] = 1
        here = slice(0, len(ids[own]))
        labels[row, here] = np.where(is_trained[own], ids[own], IGNORED)
        for name, column in shifted.items():
            column[row, here] = np.where(is_trained[own], sequence.columns[name][own], 0)
    if places is None:
        places = range(num_rows)
    targets = None
    if num_targets:
        targets = torch.from_numpy(np.stack([sequence.targets for sequence in sequences]))  # type: ignore[misc]
    return Batch(
        input_ids=torch.from_numpy(input_ids_np),
        attention_mask=torch.from_numpy(attention_mask),
        labels=torch.from_numpy(labels),
        num_trained_tokens=int((labels != IGNORED).sum()),
        tokens=token_numbers(torch.as_tensor(places), length),
        columns={name: torch.from_numpy(column) for name, column in shifted.items()},
        more=_more([sequence.more() for sequence in sequences], length),
        targets=targets,
        pads_right=True,
    )


def _dummy(length: int, pad_token_id: int, *, columns: AbstractSequence[str], num_targets: int) -> Batch:
    """The batch of a rank that has run out. Its attention mask is all ones: attention to nothing is 0/0."""
    input_ids = torch.full((1, length), pad_token_id, dtype=torch.int64)
    mask, untrained = torch.ones_like(input_ids), torch.full_like(input_ids, IGNORED)
    nowhere = token_numbers(torch.zeros(1, dtype=torch.int64), length)
    zeros = {name: torch.zeros(1, length) for name in columns}
    targets = torch.zeros(1, num_targets) if num_targets else None
    return Batch(input_ids, mask, untrained, 0, nowhere, zeros, is_dummy=True, targets=targets, pads_right=True)


def _more(each: AbstractSequence[Mapping[str, Tensor]], length: int) -> dict[str, Tensor]:
    """The further inputs of each sequence as those of a batch. length: of its rows."""
    found: dict[str, Tensor] = {}
    of_names: dict[str, list[Tensor]] = {}
    for of_one in each:
        for name, part in of_one.items():
            of_names.setdefault(name, []).append(part)
    for name, parts in of_names.items():
        if name in TOKEN_TYPES:
            found[name] = torch.stack([F.pad(part, (0, length - len(part))) for part in parts])
        else:
            # One row for each image, padded to the largest sizes: images have more patches, or tiles, than others.
            sizes = torch.tensor([part.shape[1:] for part in parts]).amax(0).tolist()
            found[name] = torch.cat([_padded(part, sizes) for part in parts])
    return found


def _padded(part: Tensor, sizes: AbstractSequence[int]) -> Tensor:
    """`part` `[n, ...]` with zeros at the ends of its other dims, up to `sizes`."""
    padding: list[int] = []
    for size, most in zip(reversed(part.shape[1:]), reversed(sizes), strict=True):  # F.pad begins with the last dim
        padding += (0, most - size)
    return F.pad(part, padding)


def cut_length(length: int, *, parts: int, multiple: int = 1) -> int:
    """The least length of a row, from `length` on, of which each of `parts` cp ranks takes a multiple of `multiple`."""
    least = length if parts == 1 else max(length, FEWEST * parts)
    return -(-least // (parts * multiple)) * parts * multiple

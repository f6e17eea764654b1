"""Collation of sequences of unequal length into one rectangular batch of tensors.

Owns: padding, the shift of labels by one, and the dummy batch. Does not own: which sequences (`train.batches`), or how
a batch is split over the mesh.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Sequence as AbstractSequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from meshlora.plan.token_order import FEWEST
from meshlora.train.batch import IGNORED, Batch
from meshlora_ground.dataset import Sequence
from meshlora_ground.further_inputs import TOKEN_TYPES
from meshlora_ground.masks import token_numbers


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
    targets = None
    if num_targets:
        targets = torch.zeros(1, num_targets)
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
            sizes = torch.tensor([part.shape[1:] for part in parts], device="cpu").amax(0).tolist()
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

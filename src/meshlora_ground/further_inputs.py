"""What a model takes beside the tokens of sequences: token types, and tensors of images.

Does not own: making them of files (`reading.images`), random ones for a proof (`meshlora_judge.images`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

# One number per token, and the only inputs of a processor that are not rows of images.
TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids")


class FurtherInputs(Protocol):
    """What a model takes beside the tokens of the sequences of a dataset."""

    @property
    def has_images(self) -> bool:
        """Whether some sequences may have images."""

    @property
    def token(self) -> int | None:
        """The id of an image's placeholder; None: no sequence has one."""

    def number(self, index: int) -> int:
        """How many images sequence `index` has."""

    def inputs(self, index: int, input_ids: np.ndarray) -> Mapping[str, Tensor]:
        """Those of sequence `index` of ids `[S]`: token types int64 `[S]`; tensors of its images, of rows for each."""

    def digest(self) -> np.ndarray:
        """uint8: a hash of all of them."""

    def chosen(self, indices: Sequence[int]) -> FurtherInputs:
        """Those of the sequences `indices`, in this order."""


@dataclass(frozen=True, eq=False)
class KnownInputs:
    """Those of sequences in memory, with the methods of `FurtherInputs`. numbers: of each one's images; empty: none."""

    each: Sequence[Mapping[str, np.ndarray]]
    numbers: Sequence[int] = ()
    token: int | None = None

    @property
    def has_images(self) -> bool:
        return any(self.numbers)

    def number(self, index: int) -> int:
        return self.numbers[index] if self.numbers else 0

    def inputs(self, index: int, input_ids: np.ndarray) -> dict[str, Tensor]:
        return {name: torch.from_numpy(value) for name, value in self.each[index].items()}

    def digest(self) -> np.ndarray:
        found = hashlib.sha256(repr(self.numbers).encode())
        for inputs in self.each:
            for name, value in inputs.items():
                found.update(f"{name} {value.dtype} {value.shape}".encode() + np.ascontiguousarray(value).tobytes())
        return np.frombuffer(found.digest(), dtype=np.uint8)

    def chosen(self, indices: Sequence[int]) -> KnownInputs:
        numbers = [self.numbers[index] for index in indices] if self.numbers else ()
        return KnownInputs([self.each[index] for index in indices], numbers, self.token)

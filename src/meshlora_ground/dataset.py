"""Tokenised records: one, and all of a dataset.

Does not own: making them of records (`reading.tokenization`), batches of them (`train.collation`).
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from meshlora_ground.further_inputs import FurtherInputs


@dataclass(frozen=True, eq=False)
class Sequence:
    """One tokenised record. `input_ids`: int32 `[S]`. `is_trained`: bool `[S]`, True where the token is a target.

    columns: name -> float32 `[S]`, further values per token for an objective. targets: float32 `[K]`, of the text.
    more: makes the model's further inputs (`FurtherInputs.inputs`), of its images too.
    """

    input_ids: np.ndarray
    is_trained: np.ndarray
    columns: Mapping[str, np.ndarray] = field(default_factory=dict)
    more: Callable[[], Mapping[str, Tensor]] = dict
    targets: np.ndarray | None = None


@dataclass(frozen=True)
class Taken:
    """What became of the records of a dataset.

    Attributes:
        num_records: of its files, each answer of a pair by itself. num_too_long: longer than `max_length`. num_dropped:
            left out, as they are too long, or beside one that is. first: origin of the first that is too long.
    """

    num_records: int
    max_length: int
    too_long: str = "truncate"
    num_too_long: int = 0
    num_dropped: int = 0
    first: str = ""

    def words(self, num_sequences: int) -> str:
        """One line on records that are too long; empty if there are none. num_sequences: that came of all records."""
        if not self.num_too_long:
            return ""
        done = {
            "truncate": "cut there (data.too_long: drop, split or error do otherwise)",
            "drop": "left out" + f", {self.num_dropped:,} in all" * (self.num_dropped != self.num_too_long),
            "split": f"split: {num_sequences:,} sequences of {self.num_records:,} records",
        }[self.too_long]
        given = f"{self.num_too_long:,} of {self.num_records:,} records, {self.first} first, are"
        return f"{given} longer than max_length={self.max_length}: {done}"


@dataclass(frozen=True, eq=False)
class TokenizedDataset:
    """All sequences, end to end. Sequence i is `[offsets[i], offsets[i + 1])`.

    Args:
        input_ids: int32 `[N]`.
        is_trained: bool `[N]`, True where the token is a prediction target.
        offsets: int64 `[num_sequences + 1]`.
        columns: name -> float32 `[N]`, further values per token for an objective (`reading.rollouts`).
        rows_per_example: adjacent sequences that form one example: 2 for pairs (`reading.preferences`).
        further: what the model takes beside the tokens, if anything.
        targets: float32 `[num_sequences, K]`, what is to be said of each text (`reading.labelled`).
        predicts_next: a trained token is predicted by the one before it, and so are its columns; else both are at the
            token's own place.
        sources: int64 `[num_sequences]`, the index of the record that each sequence is of; None: one of each, in order.
        routed: int16 `[N, L, k]`, the experts of each token in L layers, of rollouts whose engine said them; -1 where
            it did not.
        taken: what became of the records that are longer than a sequence may be, if it was asked.
        parts: (examples of a source, its weight), of several sources with weights (`reading.mixture`).
        examples: int64 `[num_examples + 1]`, the first sequence of each, where examples have any number of them
            (`reading.answers_apart`); None: as many each.
        lost_words: of a sequence: texts that the chat template leaves out, each with the number of the tokens before
            it; None: there are none.
        origins: of each sequence the row of a file that it was made of, while that is asked for (`reading.held_rows`).
    """

    input_ids: np.ndarray
    is_trained: np.ndarray
    offsets: np.ndarray
    columns: Mapping[str, np.ndarray] = field(default_factory=dict)
    rows_per_example: int = 1
    further: FurtherInputs | None = None
    targets: np.ndarray | None = None
    predicts_next: bool = True
    sources: np.ndarray | None = None
    routed: np.ndarray | None = None
    taken: Taken | None = None
    parts: tuple[tuple[int, float], ...] = ()
    examples: np.ndarray | None = None
    lost_words: Callable[[int], AbstractSequence[tuple[int, str]]] | None = None
    origins: AbstractSequence[str] | None = None

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> Sequence:
        """Views, not copies. Raises: IndexError outside `range(len(self))`; negative indices are not supported."""
        index = operator.index(index)
        if not 0 <= index < len(self):
            raise IndexError(f"sequence {index} of {len(self)}")
        part = slice(self.offsets[index], self.offsets[index + 1])
        columns = {name: column[part] for name, column in self.columns.items()}
        ids = self.input_ids[part]
        more = dict if self.further is None else functools.partial(self.further.inputs, index, ids)
        targets = None if self.targets is None else self.targets[index]
        return Sequence(ids, self.is_trained[part], columns, more, targets)

    def __iter__(self) -> Iterator[Sequence]:
        return (self[index] for index in range(len(self)))

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """All of its content by name; of further inputs their hash."""
        # What is absent has no entry, so that a hash over these stays as it was before there was such a part.
        found = {"input_ids": self.input_ids, "is_trained": self.is_trained, "offsets": self.offsets, **self.columns}
        if self.further is not None:
            found["further"] = self.further.digest()
        if self.targets is not None:
            found["targets"] = self.targets
        if self.parts:
            found["parts"] = np.array(self.parts)
        if self.examples is not None:
            found["examples"] = self.examples
        if self.routed is not None:
            found["routed"] = self.routed
        return found

    @property
    def images(self) -> FurtherInputs | None:
        """The further inputs, if some sequences may have images."""
        if self.further is None or not self.further.has_images:
            return None
        return self.further

    def has_images(self, indices: Iterable[int]) -> bool:
        """Whether one of the examples `indices` has an image."""
        images, each = self.images, self.rows_per_example
        return images is not None and any(images.number(i * each + row) for i in indices for row in range(each))

    @property
    def num_examples(self) -> int:
        """The number of examples, the unit of batch sizes."""
        return len(self) // self.rows_per_example if self.examples is None else len(self.examples) - 1

    def rows_of(self, examples: np.ndarray) -> np.ndarray:
        """What a step on `examples` is made of: all their sequences, where they have any number; else themselves."""
        if self.examples is None:
            return examples
        return np.concatenate([np.arange(self.examples[one], self.examples[one + 1]) for one in examples])

    def first(self, num: int | None) -> TokenizedDataset:
        """The first `num` examples, or all."""
        if num is None or num >= self.num_examples:
            return self
        rows, examples, targets, routed = num * self.rows_per_example, None, None, None
        if self.examples is not None:
            rows, examples = int(self.examples[num]), self.examples[: num + 1]
        end = int(self.offsets[rows])
        if self.targets is not None:
            targets = self.targets[:rows]
        if self.routed is not None:
            routed = self.routed[:end]
        return dataclasses.replace(
            self,
            input_ids=self.input_ids[:end],
            is_trained=self.is_trained[:end],
            offsets=self.offsets[: rows + 1],
            columns={name: column[:end] for name, column in self.columns.items()},
            targets=targets,
            routed=routed,
            examples=examples,
        )

    def chosen(self, examples: np.ndarray) -> TokenizedDataset:
        """The examples of these numbers, int64 `[M]`, in their order, as copies."""
        if self.examples is None:
            each = self.rows_per_example
            rows = (examples[:, None] * each + np.arange(each)).ravel()
        else:
            rows = self.rows_of(examples) if len(examples) else examples
        lengths = np.diff(self.offsets)[rows]
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        # Token j of the new arrays is as far behind the start of its sequence as it is in the old ones.
        tokens = np.arange(offsets[-1]) + np.repeat(self.offsets[rows] - offsets[:-1], lengths)
        found: dict[str, Any] = {"columns": {name: column[tokens] for name, column in self.columns.items()}}
        if self.examples is not None:
            sizes = np.diff(self.examples)[examples]
            found["examples"] = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        if self.further is not None:
            found["further"] = self.further.chosen(rows.tolist())
        for name, at in {"targets": rows, "sources": rows, "routed": tokens}.items():
            if (array := getattr(self, name)) is not None:
                found[name] = array[at]
        if self.lost_words is not None:
            own = self.lost_words
            found["lost_words"] = lambda index: own(int(rows[index]))
        found |= {"input_ids": self.input_ids[tokens], "is_trained": self.is_trained[tokens], "offsets": offsets}
        # What is said of all records is not said of some.
        return dataclasses.replace(self, taken=None, origins=None, **found)

    @property
    def num_trained_tokens(self) -> int:
        """The number of predictable targets: the first token of a sequence has no predecessor and does not count."""
        return int(self.is_trained.sum() - self.predicts_next * self.is_trained[self.offsets[:-1]].sum())

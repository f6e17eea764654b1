"""A part of the training data that is evaluated and never trained: `data.eval: 0.05`.

Owns: which rows are held out, and the cut. Does not own: reading and tokens (`tokenization.py`), joining sources
(`mixture.py`).

The choice is of rows of files, not of sequences: what one row has become (windows of a long text, answers apart, both
texts of a pair, several entries of WebNLG's, whatever a user's function makes of it) is all on one side. It is a
function of the rows, the number and the seed: the same on any mesh, and after any resumption.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from meshlora.reading.shuffling import shuffled
from meshlora_ground.dataset import TokenizedDataset
from meshlora_ground.errors import UserError

# In the key of the permutation: no order of an epoch has a key of three numbers.
_SPLIT = 1


def held_rows(found: Sequence[TokenizedDataset], wanted: float, *, seed: int) -> frozenset[str]:
    """The names of the rows to hold out of the sources `found`.

        held_rows([tokens], 0.05, seed=0)

    wanted: a share of all rows, rounded up to whole ones, or their number. Each source gives its share of them, and at
    least one if it has two and there are as many as sources. A row that several sources have counts as the first's.

    Raises:
        UserError: nothing would be left to train.
    """
    rows_of = _rows_of(found)
    counts = [*map(len, rows_of)]
    number = _number(wanted, sum(counts))
    given = f"data.eval={wanted:g} of {sum(counts):,} rows"
    if number > sum(count - 1 for count in counts if count):
        rule = "each source keeps a row, or nothing of it would be trained"
        raise UserError(given, rule, "give fewer, more data, or data.eval: FILE")
    held = set[str]()
    for source, (rows, quota) in enumerate(zip(rows_of, _quotas(counts, number), strict=True)):
        order = shuffled(len(rows), seed=seed, key=(source, 0, _SPLIT))
        held.update(rows[place] for place in order[:quota])
    return frozenset(held)


def split_off(
    found: Sequence[TokenizedDataset], held: frozenset[str]
) -> tuple[list[TokenizedDataset], list[TokenizedDataset]]:
    """(what is trained, what is evaluated) of each source, in the order of its rows; of sources without any of the
    held rows there is nothing to evaluate. Raises: UserError: of one there is nothing to train."""
    trained, evaluated = list[TokenizedDataset](), list[TokenizedDataset]()
    for source, data in enumerate(found):
        is_held = np.array([name in held for name in _names(data, source)], dtype=bool)
        if is_held.all():
            rule = "all of its rows are held out, as other sources have them, too"
            raise UserError(f"data.eval with source {source + 1} of data.train", rule, "leave it out")
        trained.append(data.chosen(np.flatnonzero(~is_held)))
        if is_held.any():
            evaluated.append(data.chosen(np.flatnonzero(is_held)))
    return trained, evaluated


def _names(data: TokenizedDataset, source: int) -> list[str]:
    """The row of each example."""
    if data.origins is None:  # records of which each is an example, and each row a record
        return [f"{source}:{index}" for index in range(data.num_examples)]
    if data.examples is None:
        return [data.origins[index * data.rows_per_example] for index in range(data.num_examples)]
    return [data.origins[first] for first in data.examples[:-1]]


def _rows_of(found: Sequence[TokenizedDataset]) -> list[list[str]]:
    """The rows of each source that no source before it has, in order."""
    seen, rows_of = set[str](), list[list[str]]()
    for source, data in enumerate(found):
        own = [name for name in dict.fromkeys(_names(data, source)) if name not in seen]
        seen.update(own)
        rows_of.append(own)
    return rows_of


def _number(wanted: float, num_rows: int) -> int:
    """The rows to hold out. As in `datasets.train_test_split`, a share is rounded up, but exactly: 0.07 is 7/100."""
    if isinstance(wanted, int):
        return wanted
    return math.ceil(Fraction(str(wanted)) * num_rows)


def _quotas(counts: Sequence[int], number: int) -> list[int]:
    """How many rows of each source are held out; at most all but one."""
    exact = [Fraction(number * count, sum(counts)) for count in counts]
    most = [max(count - 1, 0) for count in counts]
    least = [0] * len(counts)
    if number >= len(counts):  # each is represented
        least = [min(1, top) for top in most]
    found = [max(math.floor(share), low) for share, low in zip(exact, least, strict=True)]
    while sum(found) != number:
        step, ends = (1, most) if sum(found) < number else (-1, least)
        free = [source for source, quota in enumerate(found) if quota != ends[source]]
        # That which lacks the most, or has the most too many; of several the first.
        found[max(free, key=lambda source: (step * (exact[source] - found[source]), -source))] += step
    return found

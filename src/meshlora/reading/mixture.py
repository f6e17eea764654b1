"""Several sources as one dataset, and how often each is drawn.

Owns: joining tokens, shares of draws, and the order of the examples of an epoch. Does not own: reading the sources, or
how an epoch is cut into batches (`sampler.py`).

An epoch has as many draws as there are examples in all sources. Each source has its share of them, rounded to whole
draws, at places that the seed says; its own examples come in an order of their own, each once before any comes again,
and go on where the epoch before stopped. All of it is a function of seed and step: on any mesh, after any resumption.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from fractions import Fraction

import numpy as np

from meshlora.reading.shuffling import shuffled
from meshlora_ground.dataset import TokenizedDataset
from meshlora_ground.errors import UnsupportedError, UserError

Parts = tuple[tuple[int, float], ...]  # (examples of a source, its weight)


def joined_sources(
    found: Sequence[TokenizedDataset], names: Sequence[str], weights: Sequence[float]
) -> TokenizedDataset:
    """All sequences of `found`, one dataset after the other. weights: of each, or none: every example once an epoch.

    Raises:
        UserError: a weight so small that its source would never be drawn; examples of other kinds. UnsupportedError:
            several with images.
    """
    first = found[0]
    _check_alike(found, f"several sources, {', '.join(names)}")
    parts: Parts = ()
    if weights:
        counts = [each.num_examples for each in found]
        parts = tuple(zip(counts, weights, strict=True))
        for name, number in zip(names, num_draws(parts), strict=True):
            if not number:
                rule = f"its share of the {sum(counts)} draws of an epoch is none"
                raise UserError(f"{name}: weight", rule, "raise it, or leave the source out")
    return dataclasses.replace(
        first,
        input_ids=np.concatenate([each.input_ids for each in found]),
        is_trained=np.concatenate([each.is_trained for each in found]),
        offsets=_end_to_end([each.offsets for each in found], [len(each.input_ids) for each in found]),
        columns={name: np.concatenate([each.columns[name] for each in found]) for name in first.columns},
        targets=_joined([each.targets for each in found]),
        parts=parts,
        routed=_joined([each.routed for each in found]),
        # What is said of records is said where they are read, and their indices are not those of all.
        sources=None,
        taken=None,
        origins=None,
        lost_words=_lost_words(found),
        examples=_examples(found),
    )


def _check_alike(found: Sequence[TokenizedDataset], given: str) -> None:
    """Raises: UserError: examples of other kinds. UnsupportedError: several with images."""
    kinds = set[object]()
    for each in found:
        if each.further is not None and len(found) > 1:
            raise UnsupportedError(given, "one has images or segments, and these are not joined", "use one file")
        layers_and_k = None if each.routed is None else each.routed.shape[1:]
        kinds.add((each.rows_per_example, each.predicts_next, layers_and_k, *sorted(each.columns)))
    if len(kinds) > 1:
        rule = "their examples are not of one kind, as of so many rows each (negatives) or with the same fields"
        raise UserError(given, rule, "give all rows alike")


def _joined(each: Sequence[np.ndarray | None]) -> np.ndarray | None:
    """Those of all sources, which have one each, or none."""
    there = [own for own in each if own is not None]
    assert len(there) in (0, len(each)), "some sources have what others have not"
    return np.concatenate(there) if there else None


def _end_to_end(starts: Sequence[np.ndarray], sizes: Sequence[int]) -> np.ndarray:
    """Where things begin, and the last ends, numbered over all sources. sizes: how far the numbers of each go."""
    found, before = list[np.ndarray](), 0
    for own, size in zip(starts, sizes, strict=True):
        found.append(own[:-1] + before)  # its end is where those of the next begin
        before += size
    return np.append(np.concatenate(found), before).astype(np.int64)


def _examples(found: Sequence[TokenizedDataset]) -> np.ndarray | None:
    """`TokenizedDataset.examples` of all: sources are read with the same options, so that all or none have some."""
    each = [data.examples for data in found if data.examples is not None]
    assert len(each) in (0, len(found)), "some sources have examples of any number of sequences"
    return _end_to_end(each, [*map(len, found)]) if each else None


def _lost_words(found: Sequence[TokenizedDataset]) -> Callable[[int], Sequence[tuple[int, str]]] | None:
    """Of a sequence of all, what its own source says."""
    if all(each.lost_words is None for each in found):
        return None
    ends = list(itertools.accumulate(map(len, found)))

    def of(index: int) -> Sequence[tuple[int, str]]:
        source = bisect.bisect_right(ends, index)
        own = found[source].lost_words
        return () if own is None else own(index - ends[source] + len(found[source]))

    return of


def num_draws(parts: Parts) -> list[int]:
    """How many draws of an epoch each source has: its share, rounded so that the largest remainders go up."""
    numbers, weights = zip(*parts, strict=True)
    every, total = sum(numbers), sum(map(Fraction, weights))  # exact: a rounded share could go up or down
    exact = [Fraction(weight) / total * every for weight in weights]
    found = [*map(int, exact)]
    by_rest = sorted(range(len(parts)), key=lambda index: (found[index] - exact[index], index))
    for index in by_rest[: every - sum(found)]:
        found[index] += 1
    return found


@functools.lru_cache(maxsize=2)
def mixed_order(parts: Parts, *, seed: int, epoch: int) -> np.ndarray:
    """The examples of an epoch: int64 `[sum of examples]`, numbered over all sources, read-only."""
    draws = num_draws(parts)
    of_source = np.repeat(np.arange(len(parts)), draws)[shuffled(sum(draws), seed=seed, key=(epoch,))]
    order = np.empty(len(of_source), dtype=np.int64)
    start = 0
    for source, (number, _) in enumerate(parts):
        own = np.arange(epoch * draws[source], (epoch + 1) * draws[source])  # numbered since the run began
        passes = range(int(own[0]) // number, int(own[-1]) // number + 1)
        examples = np.concatenate([shuffled(number, seed=seed, key=(each, source)) for each in passes])
        order[of_source == source] = start + examples[own - passes[0] * number]
        start += number
    order.flags.writeable = False
    return order

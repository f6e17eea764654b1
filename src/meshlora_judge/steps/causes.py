"""From the coefficients of micro-batches in a gradient (`steps.fit`) to what a trainer did, in words.

The words are those of `meshlora verify` where it has them. A cause has a key, which tests and tools compare, and a
sentence.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

CAUSES = {
    "not summed over ranks": "each rank has the gradient of its own rows alone: it was not summed over ranks",
    "one rank's only": "the gradient is of one rank's rows alone",
    "lost accumulation": "only one micro-batch of each rank counts: accumulation was lost",
    "left out": "rows of some micro-batches are left out",
    "counted twice": "rows of some micro-batches count twice",
    "summed, not averaged": "it was summed over ranks where it is to be averaged",
    "averaged twice": "it was divided by the number of ranks once too often",
    "accumulation not divided": "it is the sum of the micro-batches' means, not divided by their number",
    "accumulation divided twice": "it was divided by the number of micro-batches once too often",
    "mean of means": "it is the mean of the micro-batches' means, though they have unequal numbers of trained tokens",
    "mean of ranks' means": "it is the mean of the ranks' means, though they have unequal numbers of trained tokens",
    "scaled": "it is a multiple of the right one",
    "of another micro-batch": "it holds the gradient of rows of another step",
    "zero": "it is zero",
    "a shard": "only a part of it is there, the rest is zero",
    "of another parameter": "it is that of another parameter",
    "not finite": "it holds NaN or infinity",
    "permuted": "its elements are the right ones in another order",
    "divided by all positions": "it was divided by the number of all positions, not by that of the trained tokens",
    "not cleared": "gradients of before the step were not cleared: they are added to its own",
    "of the step before": "it is the gradient of the step before",
    "a penalty on the weights": "it holds a multiple of the weights too: a penalty in the loss, beside the optimizer's",
    "clipped before accumulation ended": "it was clipped between micro-batches: the earlier ones count less",
    "unknown": "no combination of this step's micro-batches gives it",
}
# Mistakes of a loss or a forward that the judge computes too, to recognise them.
OVER_BORDERS = "attention crosses the borders of packed sequences"
BARE_REFERENCE = "the reference is the bare base, and the run began from a trained adapter"
VARIANTS = {
    "sft": (
        "labels not shifted",
        "labels shifted twice",
        "prompts are trained too",
        "padding is trained too",
        "no attention mask",
        "no positions",
        "mean of rows' means",
        "the last token is not trained",
        "labels are smoothed",
        "not causal",
        "positions are one too far",
        OVER_BORDERS,
    ),
    "dpo": ("labels shifted twice", "no attention mask", "chosen and rejected are exchanged", BARE_REFERENCE),
    "simpo": ("labels shifted twice", "no attention mask", "chosen and rejected are exchanged"),
    "orpo": ("labels shifted twice", "no attention mask", "chosen and rejected are exchanged"),
    "grpo": ("no attention mask", BARE_REFERENCE),
}
# Variants whose gradients come to the right ones, by any share.
ADDED = ("labels are smoothed",)
# How an adapter is scaled by mistake, after the first of `NUMBERS`.
SCALES = (
    " by nothing, alpha / r is left out",
    " twice by alpha / r",
    " once too often by 1 / r",
    " by alpha / sqrt(r) where it is to be by alpha / r",
    " by alpha / r where it is to be by alpha / sqrt(r)",
)
# Mistakes by a number, which is looked for.
NUMBERS = ("the adapter is scaled", "logits are divided")
# Causes that say little: another finding of the same verdict may say more.
VAGUE = ("unknown", "disturbed")


@dataclass(frozen=True)
class Cause:
    """key: of `CAUSES`, or a variant. ratio: how many times too large, where that is one number. words: of the case."""

    key: str
    words: str
    ratio: float | None = None


def known(key: str) -> Cause:
    """The cause of `key`, in its own words."""
    return Cause(key, CAUSES[key])


def cause_of_sum(
    coefficients: Sequence[float],
    counts: Sequence[int],
    ranks: Sequence[int],
    own: int,
    *,
    limit: float,
    positions: Sequence[int] = (),
) -> Cause | None:
    """What a combination of the micro-batches is instead of the mean over all tokens of the step; None: it is right.

    coefficients: c_i. counts: trained tokens (pairs, sequences) of each. ranks: data rank of each, in order. own: the
    data rank whose gradient it is. limit: the largest relative error of a coefficient.
    positions: of each, trained or not.
    """
    spread = sum(counts) / sum(positions) if sum(positions) else 0.0  # what dividing by all positions comes to
    number = Counter(ranks)
    total = sum(counts)
    shares, counted, of = list[float](), list[int](), list[int]()
    for coefficient, count, rank in zip(coefficients, counts, ranks, strict=True):
        if count:  # the others have no gradient, so their coefficient is any number
            shares.append(coefficient * total)  # 1 each, if right
            counted.append(count)
            of.append(rank)
    if max(map(abs, shares), default=0.0) < limit:
        return Cause("zero", CAUSES["zero"])
    if _near(shares, [1.0] * len(shares), limit):
        return None
    present = {i for i, share in enumerate(shares) if abs(share) > max(limit, 1e-3)}
    missing = {*range(len(shares))} - present
    if missing:
        return _of_missing(shares, present, missing, of, own, limit)
    if spread and spread != 1 and _near(shares, [spread] * len(shares), limit):
        return Cause("divided by all positions", CAUSES["divided by all positions"], spread)
    return _of_shares(shares, counted, of, number, limit)


def _of_missing(
    shares: Sequence[float], present: set[int], missing: set[int], ranks: Sequence[int], own: int, limit: float
) -> Cause:
    """Some micro-batches have no share."""
    there, absent = _owners(present, ranks), _owners(missing, ranks)
    if len(there) == 1 and not there & absent and len(set(ranks)) > 1:
        (rank,) = there
        if rank == own:
            return Cause("not summed over ranks", CAUSES["not summed over ranks"])
        return Cause("one rank's only", f"it is the gradient of rank {rank}'s rows alone")
    # One micro-batch read again in the place of another: as many count twice as lack, on the same ranks.
    twice = [i for i in sorted(present) if abs(shares[i] / 2 - 1) < limit]
    if len(twice) == len(missing) and _owners(twice, ranks) == absent:
        words = (
            f"rows of micro-batch {_places(twice, ranks)} count twice, and those of {_places(sorted(missing), ranks)}"
        )
        return Cause("counted twice", f"{words} not at all")
    first_of, last_of = dict[int, int](), dict[int, int]()
    for i, rank in enumerate(ranks):
        first_of.setdefault(rank, i)
        last_of[rank] = i
    first, last = {*first_of.values()}, {*last_of.values()}
    own_last = {last_of.get(own, -1)}  # -1: it has no trained tokens
    # With one micro-batch a rank nothing is accumulated, so nothing of it can be lost.
    if present in (last, first, own_last) and len(last) < len(ranks):
        which = "first" if present == first else "last"
        whose = "each rank" if len(present) > 1 else "a rank"
        words = f"only the {which} micro-batch of {whose} counts"
        return Cause("lost accumulation", f"{words}: accumulation was lost")
    places = _places(sorted(missing), ranks)
    return Cause("left out", f"rows of micro-batch {places} are left out")


def _owners(numbers: Iterable[int], ranks: Sequence[int]) -> set[int]:
    """The ranks that have the micro-batches `numbers`."""
    return {ranks[i] for i in numbers}


def _of_shares(
    shares: Sequence[float], counts: Sequence[int], ranks: Sequence[int], number: Mapping[int, int], limit: float
) -> Cause:
    """All micro-batches are there, with wrong weights. number: of micro-batches of each rank, the empty ones too."""
    total, world = sum(counts), len(number)
    of_rank = Counter[int]()
    for count, rank in zip(counts, ranks, strict=True):
        of_rank[rank] += count
    # The shares that each micro-batch has by the two wrong means: of all micro-batches' means, and of all ranks'.
    of_micro, of_ranks = list[float](), list[float]()
    for count, rank in zip(counts, ranks, strict=True):
        of_micro.append(total / (world * number[rank] * count))
        of_ranks.append(total / (world * of_rank[rank]))
    micro = max(number.values())
    if (ratio := _ratio(shares, [1.0] * len(shares), limit)) is not None:
        named = {world: "summed, not averaged", 1 / world: "averaged twice"}
        # Of as many micro-batches as ranks the number alone cannot tell which: it is called accumulation.
        if micro > 1:
            named |= {micro: "accumulation not divided", 1 / micro: "accumulation divided twice"}
        for expected, key in named.items():
            if expected != 1 and abs(ratio / expected - 1) < limit:
                return Cause(key, f"{CAUSES[key]} ({ratio:.4g} times)", ratio)
        return Cause("scaled", f"it is {ratio:.4g} times the right one", ratio)
    if (ratio := _ratio(shares, of_ranks, limit)) is not None:
        return Cause("mean of ranks' means", CAUSES["mean of ranks' means"] + _times(ratio), ratio)
    if (ratio := _ratio(shares, of_micro, limit)) is not None:
        return Cause("mean of means", CAUSES["mean of means"] + _times(ratio), ratio)
    twice, others = list[int](), list[float]()
    for i, share in enumerate(shares):
        if abs(share / 2 - 1) < limit:
            twice.append(i)
        else:
            others.append(share)
    if twice and _near(others, [1.0] * len(others), limit):
        places = _places(twice, ranks)
        return Cause("counted twice", f"rows of micro-batch {places} count twice")
    said = ", ".join(f"{share:.3g}" for share in shares[:8])
    return Cause("scaled", f"the micro-batches count {said} times")


def _places(numbers: Sequence[int], ranks: Sequence[int]) -> str:
    return ", ".join(f"{i - ranks.index(ranks[i])} of rank {ranks[i]}" for i in numbers[:4])


def _times(ratio: float) -> str:
    return "" if abs(ratio - 1) < 1e-3 else f" ({ratio:.4g} times)"


def _near(a: Sequence[float], b: Sequence[float], limit: float) -> bool:
    return all(abs(x - y) <= limit * max(abs(y), 1e-300) for x, y in zip(a, b, strict=True))


def _ratio(shares: Sequence[float], expected: Sequence[float], limit: float) -> float | None:
    """k, if `shares` are k times `expected`."""
    ratios = [share / other for share, other in zip(shares, expected, strict=True)]
    middle = sum(ratios) / len(ratios)
    return middle if _near(ratios, [middle] * len(ratios), limit) else None

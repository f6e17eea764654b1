"""Scores of the E2E challenge that no kept library computes: NIST, ROUGE-L and CIDEr over tokens.

Owns: their formulas, as tuetschek/e2e-metrics has them (`metrics/pymteval.py`, `pycocoevalcap`). Does not own: the
tokens (`meshlora_extra.paper.caption_tokens`, sacrebleu's 13a), nor BLEU, METEOR, TER and chrF
(`meshlora_extra.paper.scores`).
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise

Tokens = Sequence[str]
Counts = list[Counter[tuple[str, ...]]]  # by n - 1

_BETA_ROUGE = 1.2  # recall counts a little more than precision
_SIGMA_CIDER = 6.0  # of the penalty for another length
_NIST_ORDER, _CIDER_ORDER = 5, 4
_BETA_NIST = -math.log(0.5) / math.log(1.5) ** 2  # half at two thirds of the length


def ngrams(tokens: Tokens, n: int) -> Iterator[tuple[str, ...]]:
    return (tuple(tokens[start : start + n]) for start in range(len(tokens) - n + 1))


def nist(hypotheses: Sequence[Tokens], references: Sequence[Sequence[Tokens]]) -> float:
    """NIST-5 of a corpus: matched n-grams weighted by their information in all references, times a length penalty."""
    counts = [Counter[tuple[str, ...]]() for _ in range(_NIST_ORDER + 1)]
    for own in references:
        for reference in own:
            counts[0][()] += len(reference)  # the empty n-gram: the history of unigrams
            for n in range(1, _NIST_ORDER + 1):
                counts[n].update(ngrams(reference, n))
    found, lengths = [0.0] * _NIST_ORDER, [0] * _NIST_ORDER
    for tokens, own in zip(hypotheses, references, strict=True):
        for n in range(1, _NIST_ORDER + 1):
            lengths[n - 1] += len(tokens) - (n - 1)  # a shorter text counts below zero, as in the original
            most: Counter[tuple[str, ...]] = Counter()
            for reference in own:
                most |= Counter(ngrams(reference, n))  # the maximum over references, as BLEU clips
            for ngram, number in (Counter(ngrams(tokens, n)) & most).items():
                found[n - 1] += number * math.log2(counts[n - 1][ngram[:-1]] / counts[n][ngram])
    mean_length = sum(sum(map(len, own)) / len(own) for own in references)
    ratio = lengths[0] / mean_length
    penalty = 1.0
    if ratio <= 0:
        penalty = 0.0
    elif ratio < 1:
        penalty = math.exp(-_BETA_NIST * math.log(ratio) ** 2)
    return penalty * sum(value / length for value, length in zip(found, lengths, strict=True) if length)


def rouge_l(hypotheses: Sequence[Tokens], references: Sequence[Sequence[Tokens]]) -> float:
    """Mean over texts of the F-measure of the longest common subsequence: the best precision among the references with
    the best recall, which may be another's."""
    total = 0.0
    for tokens, own in zip(hypotheses, references, strict=True):
        lengths = [(_common_length(tokens, reference), len(reference)) for reference in own]
        precision = max(common for common, _ in lengths) / max(1, len(tokens))
        recall = max(common / max(1, length) for common, length in lengths)
        if precision and recall:
            total += (1 + _BETA_ROUGE**2) * precision * recall / (recall + _BETA_ROUGE**2 * precision)
    return total / len(hypotheses)


def _common_length(one: Tokens, other: Tokens) -> int:
    row = [0] * (len(other) + 1)
    for token in one:
        below = [0]
        for (left, above), match in zip(pairwise(row), other, strict=True):
            below.append(left + 1 if token == match else max(above, below[-1]))
        row = below
    return row[-1]


def cider(hypotheses: Sequence[Tokens], references: Sequence[Sequence[Tokens]]) -> float:
    """CIDEr-D, times 10: the mean clipped cosine of tf-idf vectors of n-grams, over n = 1 to 4 and references.

    Document frequencies are those of the references; with one text alone every frequency is 1, and CIDEr 0.
    """
    documents: Counter[tuple[str, ...]] = Counter()
    counted = []
    for own in references:
        counted.append(list(map(_counts, own)))
        documents.update(set().union(*itertools.chain.from_iterable(counted[-1])))  # once for a text's references
    total = 0.0
    for tokens, own, each in zip(hypotheses, references, counted, strict=True):
        vector = _weighted(_counts(tokens), documents, len(references))
        for reference, counts in zip(own, each, strict=True):
            cosine = _clipped_cosine(vector, _weighted(counts, documents, len(references)))
            # Of bigrams, as in the original: texts of no and of one token have the same length.
            difference = max(0, len(tokens) - 1) - max(0, len(reference) - 1)
            total += cosine * math.exp(-(difference**2) / (2 * _SIGMA_CIDER**2)) / len(own)
    return 10 * total / len(hypotheses)


def _counts(tokens: Tokens) -> Counts:
    return [Counter(ngrams(tokens, n)) for n in range(1, _CIDER_ORDER + 1)]


def _weighted(counts: Counts, documents: Counter[tuple[str, ...]], number: int) -> list[dict[tuple[str, ...], float]]:
    """Term frequency times log inverse document frequency, by n - 1."""
    weighted: list[dict[tuple[str, ...], float]] = []
    for by_n in counts:
        weighted.append({})
        for ngram, count in by_n.items():
            weighted[-1][ngram] = count * (math.log(number) - math.log(max(1, documents[ngram])))
    return weighted


def _clipped_cosine(one: list[dict[tuple[str, ...], float]], reference: list[dict[tuple[str, ...], float]]) -> float:
    """Mean over n; a weight above the reference's counts as the reference's, so that repetition gains nothing."""
    total = 0.0
    for found, meant in zip(one, reference, strict=True):
        norms = math.sqrt(sum(value**2 for value in found.values()) * sum(value**2 for value in meant.values()))
        product = sum(min(value, meant[ngram]) * meant[ngram] for ngram, value in found.items() if ngram in meant)
        if norms:
            total += product / norms
    return total / len(one)

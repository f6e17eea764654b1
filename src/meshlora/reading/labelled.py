"""Texts with what is to be said of them: labels of a text, labels of its words, texts that mean the same.

Owns: the fields of such records and their values. Texts are tokenised as their tokenizer does it by default, with its
special tokens, since no text is generated after them. Does not own: labels (`meshlora_ground.objective` has their
names), losses (`run.objectives`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from meshlora.reading.formats import Format
from meshlora.reading.records import MalformedError, Problems, checked_text, is_number, json_type, quoted
from meshlora.reading.sources import read_rows
from meshlora_ground.dataset import TokenizedDataset
from meshlora_ground.errors import UserError, did_you_mean, reason
from meshlora_ground.further_inputs import TOKEN_TYPES, KnownInputs

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BLOCK = 4096  # texts per call to the tokenizer
_UNLABELLED = -100  # transformers' label of a word that is not trained
_SEGMENTS = TOKEN_TYPES[0]


def read_labelled(
    source: str | list[str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    objective: Any,
    max_length: int,
    vocab_size: int,
    columns: Mapping[str, str] | None = None,
    format: str = "auto",
    say: Callable[[str], None] | None = None,
) -> TokenizedDataset:
    """One sequence per row, with `targets` `[N, K]`: the number of its label (K = 1), 0 or 1 for each of K labels, or K
    numbers.

    A row has `text`, maybe `text_pair`, and `label`: a name or number of `objective.names`; for `multi` a list of them;
    for `regression` a number or a list of K.

    Raises:
        UserError: malformed rows, the first five with file and line; as `read_rows`.
    """

    def checked(row: dict[str, Any], origin: str) -> tuple[str, str, str | None, list[float]]:
        pair = _text(row, "text_pair") if "text_pair" in row else None
        return origin, _text(row, "text"), pair, _targets(row, objective)

    known = [Format("labelled", ("text", "label"), checked, ("text_pair",))]
    rows = read_rows(source, known, columns=columns, format=format, say=say)
    if len({pair is None for _, _, pair, _ in rows}) > 1:
        raise UserError(f"{rows[0][0]} and others", "text_pair in some records and not in others", "give it in all")
    texts = [text for _, text, _, _ in rows]
    pairs = [pair for _, _, pair, _ in rows if pair is not None] or None
    origins = [origin for origin, *_ in rows]
    ids, segments, _ = _encoded(texts, pairs, tokenizer, origins, max_length=max_length, vocab_size=vocab_size)
    targets = np.array([target for *_, target in rows], dtype=np.float32)
    further = KnownInputs([{_SEGMENTS: own} for own in segments]) if segments else None
    return _dataset(ids, columns={}, targets=targets, further=further)


def read_labelled_words(
    source: str | list[str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    objective: Any,
    max_length: int,
    vocab_size: int,
    columns: Mapping[str, str] | None = None,
    format: str = "auto",
    say: Callable[[str], None] | None = None,
) -> TokenizedDataset:
    """One sequence per row; the first token of each word is trained, with its label in the column `label`, float32.

    A row has `tokens`, the words of a text, and as many `labels`: names or numbers of `objective.names`; -100 for a
    word without.

    Raises:
        UserError: malformed rows, the first five with file and line; a tokenizer that does not say which token is of
            which word; as `read_rows`.
    """

    def checked(row: dict[str, Any], origin: str) -> tuple[str, list[str], list[int]]:
        words, labels = row.get("tokens"), row.get("labels")
        if not isinstance(words, list) or not words or not all(isinstance(word, str) and word for word in words):
            raise MalformedError("tokens is not a list of words")
        if not isinstance(labels, list) or len(labels) != len(words):
            raise MalformedError(f"labels is not a list of one label for each of {len(words)} tokens")
        found = [_UNLABELLED if label in (None, _UNLABELLED) else _number(label, objective) for label in labels]
        return origin, words, found

    known = [Format("labelled_words", ("tokens", "labels"), checked)]
    rows = read_rows(source, known, columns=columns, format=format, say=say)
    if not getattr(tokenizer, "is_fast", False):
        raise UserError(f"tokenizer {type(tokenizer).__name__}", "it does not say which token is of which word")
    words, origins = [words for _, words, _ in rows], [origin for origin, *_ in rows]
    ids, _, of_words = _encoded(words, None, tokenizer, origins, max_length=max_length, vocab_size=vocab_size)
    labels, problems = [], Problems("{tokens, labels}: words, and a label for each")
    for (origin, _, given), places in zip(rows, of_words, strict=True):
        own = np.full(len(places), _UNLABELLED, dtype=np.float32)
        for token, word in enumerate(places):
            if word is not None and (token == 0 or places[token - 1] != word):
                own[token] = given[word]
        if (own == _UNLABELLED).all():
            problems.add(origin, f"no labelled word within max_length={max_length}")
        labels.append(own)
    problems.raise_if_any()
    return _dataset(ids, columns={"label": labels}, is_trained=np.concatenate(labels) != _UNLABELLED)


def read_similar(
    source: str | list[str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    objective: Any,
    max_length: int,
    vocab_size: int,
    columns: Mapping[str, str] | None = None,
    format: str = "auto",
    say: Callable[[str], None] | None = None,
) -> TokenizedDataset:
    """Adjacent sequences of each row: its anchor, its positive, its negatives, of which all rows have as many.

    A row has `anchor` and `positive`, texts that belong together, and maybe `negative` or `negatives`, which do not.

    Raises:
        UserError: malformed rows, the first five with file and line; as `read_rows`.
    """
    numbers: set[int] = set()

    def checked(row: dict[str, Any], origin: str) -> tuple[str, list[str]]:
        if "negative" in row and "negatives" in row:
            raise MalformedError("has negative and negatives: one of the two")
        negatives = [_text(row, "negative")] if "negative" in row else row.get("negatives", [])
        if not isinstance(negatives, list) or not all(isinstance(text, str) and text.strip() for text in negatives):
            raise MalformedError("negatives is not a list of texts")
        if numbers - {len(negatives)}:
            raise MalformedError(f"{len(negatives)} negatives, where the records before have {min(numbers)}")
        numbers.add(len(negatives))
        return origin, [_text(row, "anchor"), _text(row, "positive"), *negatives]

    known = [Format("similar", ("anchor", "positive"), checked, ("negative", "negatives"))]
    rows = read_rows(source, known, columns=columns, format=format, say=say)
    texts = [text for _, texts in rows for text in texts]
    origins = [origin for origin, texts in rows for _ in texts]
    ids, _, _ = _encoded(texts, None, tokenizer, origins, max_length=max_length, vocab_size=vocab_size)
    return _dataset(ids, columns={}, rows_per_example=len(rows[0][1]))


def _dataset(ids: list[np.ndarray], *, columns: Mapping[str, list[np.ndarray]], **rest: Any) -> TokenizedDataset:
    offsets = np.cumsum([0, *map(len, ids)], dtype=np.int64)
    joined = {name: np.concatenate(parts) for name, parts in columns.items()}
    every: dict[str, Any] = {"is_trained": np.ones(int(offsets[-1]), dtype=bool), "columns": joined}
    return TokenizedDataset(np.concatenate(ids), offsets=offsets, predicts_next=False, **(every | rest))


def _text(row: Mapping[str, Any], name: str) -> str:
    if name not in row:
        raise MalformedError(f"{name!r} is missing")
    value = checked_text(row[name], name)
    if not value.strip():
        raise MalformedError(f"empty {name}")
    return value


def _number(label: Any, objective: Any) -> int:
    """The number of a label, given by its name or number."""
    numbers = objective.numbers
    if isinstance(label, str) and label in numbers:
        return int(numbers[label])
    if isinstance(label, str):
        raise MalformedError(f"unknown label {quoted(label)}; {did_you_mean(label[:60], numbers)}")
    if type(label) is not int:
        raise MalformedError(f"a label is {json_type(label)}, not a name or a whole number")
    if not 0 <= label < len(numbers):
        raise MalformedError(f"label {label} is not one of 0 to {len(numbers) - 1}")
    return label


def _targets(row: Mapping[str, Any], objective: Any) -> list[float]:
    if "label" not in row:
        raise MalformedError("'label' is missing")
    label = row["label"]
    if objective.problem == "single":
        return [_number(label, objective)]
    size = len(objective.names)
    if objective.problem == "multi":
        if not isinstance(label, list):
            raise MalformedError(f"label is {json_type(label)}, not a list of labels")
        own = {_number(one, objective) for one in label}
        return [float(number in own) for number in range(size)]
    values = label if isinstance(label, list) else [label]
    if len(values) != size or not all(is_number(value) for value in values):
        raise MalformedError(f"label is not {size} finite number{'s' if size > 1 else ''}")
    return values


def _encoded(
    texts: Sequence[Any],
    pairs: Sequence[str] | None,
    tokenizer: PreTrainedTokenizerBase,
    origins: Sequence[str],
    *,
    max_length: int,
    vocab_size: int,
) -> tuple[list[np.ndarray], list[np.ndarray], list[list[int | None]]]:
    """(token ids of each text, int32; segments of the tokens, empty unless texts are pairs and the tokenizer has them;
    the word of each token, for texts given as words).
    """
    ids, segments, words = list[np.ndarray](), list[np.ndarray](), list[list[int | None]]()
    is_words = isinstance(texts[0], list)
    for start in range(0, len(texts), _BLOCK):
        part = slice(start, start + _BLOCK)
        options = {"truncation": True, "max_length": max_length, "is_split_into_words": is_words}
        try:
            found = tokenizer(list(texts[part]), list(pairs[part]) if pairs else None, **options)
        except Exception as error:  # an untrusted tokenizer may raise anything
            raise UserError(
                f"tokenizer {type(tokenizer).__name__}", f"it fails on these texts ({reason(error)})", "is it whole?"
            ) from error
        ids += [np.array(own, dtype=np.int64) for own in found["input_ids"]]
        if pairs and _SEGMENTS in found:
            segments += [np.array(own, dtype=np.int64) for own in found[_SEGMENTS]]
        if is_words:
            words += [found.word_ids(index) for index in range(len(found["input_ids"]))]
    problems = Problems("a text of one token or more")
    for origin, own in zip(origins, ids, strict=True):
        if not len(own):
            problems.add(origin, "no token")
        elif own.min() < 0 or own.max() >= vocab_size:
            rule = f"the model has embeddings for {vocab_size}"
            raise UserError(f"{origin}: token {own.max()}", rule, "is it the tokenizer of another model?")
    problems.raise_if_any()
    return [own.astype(np.int32) for own in ids], segments, words

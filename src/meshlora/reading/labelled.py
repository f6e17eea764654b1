"""Texts with what is to be said of them: labels of a text, of its words, texts that mean the same, completions.

Owns: the fields of such records and their values. Texts are tokenised as their tokenizer does it by default, with its
special tokens, since no text is generated after them. Does not own: labels (`meshlora_ground.objective` has their
names), losses (`run.objectives`), what a decoder begins with (`meshlora_ground.encoded`). Of each reader, `reading` are
options of `Reading`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from meshlora.reading.formats import Format
from meshlora.reading.records import MalformedError, Problems, filled_text, is_number, json_type, quoted
from meshlora.reading.sources import Reading, read_rows
from meshlora_ground.dataset import TokenizedDataset
from meshlora_ground.encoded import prompts, with_start
from meshlora_ground.errors import UserError, did_you_mean, reason
from meshlora_ground.further_inputs import TOKEN_TYPES, KnownInputs

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

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
    **reading: Any,
) -> TokenizedDataset:
    """One sequence per row, with `targets` `[N, K]`: its label's number (K = 1), 0 or 1 for each of K, or K numbers.

    A row has `text`, maybe `text_pair`, and `label`: a name or number of `objective.names`; for `multi` a list of them;
    for `regression` a number or a list of K.

    Raises:
        UserError: malformed rows, the first five with file and line; as `read_rows`.
    """

    def checked(row: dict[str, Any], origin: str) -> tuple[str, list[str], list[float]]:
        names = ["text", "text_pair"] if "text_pair" in row else ["text"]
        return origin, [filled_text(row[name], name) for name in names], _targets(row, objective)

    known = [Format("labelled", ("text", "label"), checked, ("text_pair",))]
    rows = read_rows(source, known, Reading(**reading))
    origins, texts, targets = zip(*rows, strict=True)
    if len({*map(len, texts)}) > 1:
        raise UserError(f"{origins[0]} and others", "text_pair in some records and not in others", "give it in all")
    columns = [*zip(*texts, strict=True)]  # the texts, and maybe their pairs
    ids, segments = encoded(columns, tokenizer, origins, max_length=max_length, vocab_size=vocab_size)
    further = KnownInputs([{_SEGMENTS: own} for own in segments]) if segments else None
    return _dataset(ids, targets=np.array(targets, dtype=np.float32), further=further)


def read_labelled_words(
    source: str | list[str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    objective: Any,
    max_length: int,
    vocab_size: int,
    **reading: Any,
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
        if not words or not _are_texts(words):
            raise MalformedError("tokens is not a list of words")
        if not isinstance(labels, list) or len(labels) != len(words):
            raise MalformedError(f"labels is not a list of one label for each of {len(words)} tokens")
        found = [_UNLABELLED] * len(words)
        for place, label in enumerate(labels):
            if label not in (None, _UNLABELLED):
                found[place] = _number(label, objective)
        return origin, words, found

    known = [Format("labelled_words", ("tokens", "labels"), checked)]
    rows = read_rows(source, known, Reading(**reading))
    if not getattr(tokenizer, "is_fast", False):  # `word_ids` is of fast ones alone
        raise UserError(f"tokenizer {type(tokenizer).__name__}", "it does not say which token is of which word")
    origins, words, given = zip(*rows, strict=True)
    ids, places = encoded([words], tokenizer, origins, max_length=max_length, vocab_size=vocab_size)
    labels, problems = [], Problems("{tokens, labels}: words, and a label for each")
    for origin, of_words, of_tokens in zip(origins, given, places, strict=True):
        own, before = np.full(len(of_tokens), _UNLABELLED, dtype=np.float32), None
        for token, word in enumerate(of_tokens):
            if word not in (None, before):  # None: of a special token. The first token of a word has its label.
                own[token] = of_words[word]
            before = word
        if (own == _UNLABELLED).all():
            problems.add(origin, f"no labelled word within max_length={max_length}")
        labels.append(own)
    problems.raise_if_any()
    label = np.concatenate(labels)
    return _dataset(ids, columns={"label": label}, is_trained=label != _UNLABELLED)


def read_similar(
    source: str | list[str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    objective: Any,
    max_length: int,
    vocab_size: int,
    **reading: Any,
) -> TokenizedDataset:
    """Adjacent sequences of each row: its anchor, its positive, its negatives, of which all rows have as many.

    A row has `anchor` and `positive`, texts that belong together, and maybe `negative` or `negatives`, which do not.

    Raises:
        UserError: malformed rows, the first five with file and line; as `read_rows`.
    """
    numbers: set[int] = set()  # of negatives: one, or the rows are malformed

    def checked(row: dict[str, Any], origin: str) -> tuple[str, list[str]]:
        if "negative" in row and "negatives" in row:
            raise MalformedError("has negative and negatives: one of the two")
        negatives = [filled_text(row["negative"], "negative")] if "negative" in row else row.get("negatives", [])
        if not _are_texts(negatives) or any(map(str.isspace, negatives)):
            raise MalformedError("negatives is not a list of texts")
        if numbers - {len(negatives)}:
            raise MalformedError(f"{len(negatives)} negatives, where the records before have {min(numbers)}")
        numbers.add(len(negatives))
        anchor, positive = filled_text(row["anchor"], "anchor"), filled_text(row["positive"], "positive")
        return origin, [anchor, positive, *negatives]

    known = [Format("similar", ("anchor", "positive"), checked, ("negative", "negatives"))]
    rows = read_rows(source, known, Reading(**reading))
    origins, texts = list[str](), list[str]()
    for origin, own in rows:
        texts += own
        origins += [origin] * len(own)
    ids, _ = encoded([texts], tokenizer, origins, max_length=max_length, vocab_size=vocab_size)
    return _dataset(ids, rows_per_example=len(rows[0][1]))


def _dataset(ids: list[np.ndarray], **rest: Any) -> TokenizedDataset:
    """rest: other fields; of all sequences every token is trained, unless they say otherwise."""
    offsets = np.cumsum([0, *map(len, ids)], dtype=np.int64)
    every: dict[str, Any] = {"is_trained": np.ones(int(offsets[-1]), dtype=bool), "columns": {}}
    return TokenizedDataset(np.concatenate(ids), offsets=offsets, predicts_next=False, **(every | rest))


def _are_texts(value: Any) -> bool:
    """Whether it is a list of texts, of which none is empty."""
    return isinstance(value, list) and all(isinstance(text, str) and text for text in value)


def _number(label: Any, objective: Any) -> int:
    """The number of a label, given by its name or number."""
    numbers = objective.numbers
    if isinstance(label, str):
        if label not in numbers:
            raise MalformedError(f"unknown label {quoted(label)}; {did_you_mean(label[:60], numbers)}")
        return int(numbers[label])
    if type(label) is not int:  # neither a float nor a bool, which Python takes for one
        raise MalformedError(f"a label is {json_type(label)}, not a name or a whole number")
    if not 0 <= label < len(numbers):
        raise MalformedError(f"label {label} is not one of 0 to {len(numbers) - 1}")
    return label


def _targets(row: Mapping[str, Any], objective: Any) -> list[float]:
    label = row["label"]
    if objective.problem == "single":
        return [_number(label, objective)]
    size = len(objective.names)
    if objective.problem == "multi":
        if not isinstance(label, list):
            raise MalformedError(f"label is {json_type(label)}, not a list of labels")
        found = [0.0] * size
        for one in label:
            found[_number(one, objective)] = 1.0
        return found
    if not isinstance(label, list):
        label = [label]
    if len(label) != size or not all(map(is_number, label)):
        raise MalformedError(f"label is not {size} finite number{'s' * (size > 1)}")
    return label


def encoded(
    columns: Sequence[Sequence[Any]],
    tokenizer: PreTrainedTokenizerBase,
    origins: Sequence[str],
    *,
    max_length: int,
    vocab_size: int,
    is_target: bool = False,
) -> tuple[list[np.ndarray], list[Any]]:
    """(token ids of each text, int32; of pairs the segments of the tokens, if the tokenizer has them, and
    of words the word of each token; else nothing).

    columns: the texts, or the words of each, and maybe the second text of each. is_target: they are written, not read,
    which some tokenizers mark otherwise.
    """
    ids, beside, is_words = list[np.ndarray](), list[Any](), isinstance(columns[0][0], list)
    options = {"truncation": True, "max_length": max_length, "is_split_into_words": is_words}
    for start in range(0, len(columns[0]), _BLOCK):
        texts = [list(column[start : start + _BLOCK]) for column in columns]
        try:
            found = tokenizer(text_target=texts[0], **options) if is_target else tokenizer(*texts, **options)
        except Exception as error:  # an untrusted tokenizer may raise anything
            rule = f"it fails on these texts ({reason(error)})"
            raise UserError(f"tokenizer {type(tokenizer).__name__}", rule, "is it whole?") from error
        ids += [np.array(own, dtype=np.int64) for own in found["input_ids"]]
        if is_words:
            beside += map(found.word_ids, range(len(found["input_ids"])))
        elif len(columns) > 1 and _SEGMENTS in found:
            beside += [np.array(own, dtype=np.int64) for own in found[_SEGMENTS]]
    problems = Problems("a text of one token or more")
    for origin, own in zip(origins, ids, strict=True):
        if not len(own):
            problems.add(origin, "no token")
        elif own.min() < 0 or own.max() >= vocab_size:
            rule = f"the model has embeddings for {vocab_size}"
            raise UserError(f"{origin}: token {own.max()}", rule, "is it the tokenizer of another model?")
    problems.raise_if_any()
    return [own.astype(np.int32) for own in ids], beside  # checked as int64: a larger id would have become a small one


def read_prompted(
    source: str | list[str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    model: PretrainedConfig,
    max_length: int,
    vocab_size: int,
    **reading: Any,
) -> TokenizedDataset:
    """One sequence per row, what the decoder reads; the prompts are further inputs. max_length: of either.

    Raises:
        UserError: malformed rows, the first five with file and line; as `read_rows`.
    """

    def checked(row: dict[str, Any], origin: str) -> tuple[str, str, str]:
        return origin, filled_text(row["prompt"], "prompt"), filled_text(row["completion"], "completion")

    rows = read_rows(source, [Format("prompted", ("prompt", "completion"), checked)], Reading(**reading))
    origins, asked, answers = zip(*rows, strict=True)
    read, _ = encoded([asked], tokenizer, origins, max_length=max_length, vocab_size=vocab_size)
    limit = max_length - 1  # behind the start token
    written, _ = encoded([answers], tokenizer, origins, max_length=limit, vocab_size=vocab_size, is_target=True)
    ids = [with_start(model, own) for own in written]
    offsets = np.cumsum([0, *map(len, ids)], dtype=np.int64)
    is_trained = np.ones(int(offsets[-1]), dtype=bool)
    is_trained[offsets[:-1]] = False  # nothing predicts a start
    return TokenizedDataset(np.concatenate(ids), is_trained, offsets, further=prompts(read))

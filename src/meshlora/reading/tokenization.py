"""Tokenisation of records, with the trained tokens marked.

Owns: concatenation of prompt and completion, bos and eos, and the flat arrays of a dataset. Does not own: finding turns
in a conversation (`chat.py`) and which are trained (`train_on.py`), what becomes of long records (`too_long.py`), how
much of a long text is tokenised (`leading.py`), caching the arrays (`cache.py`), or batches (`train.collation`).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from meshlora.reading.answers_apart import Chats, beginnings, can_be_apart, examples_of, words_of
from meshlora.reading.bad_rows import ERROR, SKIP, words_of_bad
from meshlora.reading.cache import Arrays, RecordsDigest, cache_key, load_or_make
from meshlora.reading.chat import Row, Seen, tokenize_conversations
from meshlora.reading.images import Images, images_of
from meshlora.reading.leading import leading_tokens
from meshlora.reading.lost import CUT, NOTHING, Lost, as_array
from meshlora.reading.records import MAX_SHOWN, Record
from meshlora.reading.system_turn import with_system
from meshlora.reading.too_long import Found, check_too_long, is_cut_turn, windows
from meshlora.reading.train_on import TrainOn, check_train_on, is_of
from meshlora_ground.dataset import Taken, TokenizedDataset
from meshlora_ground.errors import UserError, reason

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Records per call to the tokenizer: enough to keep its threads busy, few enough to bound the Python lists it returns.
_BLOCK = 4096
_ALL_TOKENS = 2**40  # as a maximum: more than any text has


def tokenize(
    records: AbstractSequence[Record] | AbstractSequence[tuple[Record, ...]],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int,
    train_on: TrainOn = "all",
    too_long: str = "truncate",
    cache_dir: Path | None = None,
    vocab_size: int | None = None,
    say: Callable[[str], None] | None = None,
    processor: Callable[[], Any] | None = None,
    on_bad_row: str = ERROR,
    names_rows: bool = False,
    **chats: Any,
) -> TokenizedDataset:
    """The sequences of the records, in order.

    - prompt and completion: `bos? + ids(prompt) + ids(separator) + ids(completion) + eos`. They are tokenised
      separately, so the boundary is exact in tokens, and the prompt's ids are the same as in generation. Completion and
      eos are trained.
    - text: `bos? + ids(text) + eos`, all trained.
    - tokens: as they are.
    - messages: as the chat template renders them, nothing added. The assistant's turns are trained. With images the
      tokenizer is the processor's.

    `bos?` is whatever this tokenizer puts before a text by default, found by trying (Llama: bos; GPT-2: nothing).
    eos is always added, and must exist: without it the adapter would never learn to stop. Neither is repeated
    if the text already contains it. Truncation is on the right, so a truncated sequence has no eos.

    Args:
        records: or tuples of as many, each an example of several sequences.
        max_length: maximum tokens of a sequence, including bos and eos.
        train_on: as in `data.train_on`. A turn with `weight: 0` is never trained, nor are images.
        too_long: what becomes of a longer record: truncate; drop, with its whole example; split into windows of
            max_length tokens, without those that train nothing; error. on_bad_row: whether a record that cannot be
            trained is an error or is passed over, with its whole example (`bad_rows`).
        cache_dir: folder of cached arrays; None: no cache. Safe for concurrent processes: one makes the arrays, the
            others wait and read.
        vocab_size: of the model that will see the tokens, if any. say: told of message keys that the chat template
            does not name, and how many records are too long. processor: loads transformers' processor of the model;
            called if there are images. names_rows: give each sequence the origin of its record. chats: `turns`,
            `system` and the like, of `Chats`.

    Raises:
        UserError: no records; a tokenizer without eos; records without trained tokens, with images that would be cut,
            or too long where that is an error (the first five are named); a token beyond the vocabulary; images without
            a processor; as `tokenize_conversations` and `images_of`; a `cache_dir` that cannot be written, or that
            others can write.
    """
    if max_length < 2:
        raise UserError(f"max_length={max_length}", "must be at least 2: one token to see and one to predict")
    check_train_on(train_on)
    check_too_long(too_long)
    rows_per_example, records = _flat(records)  # from here on examples are records one after the other
    how, counts = Chats(**chats), None  # counts: of sequences, where a record is several
    how.check(train_on, rows_per_example=rows_per_example)
    if how.system is not None:
        records = [*with_system(records, how.system, say)]
    if how.is_apart:
        counts, records = _apart(records, train_on)
    images, used = _images(records, processor, skips=on_bad_row == SKIP), None
    if images is not None:
        tokenizer, used = images.processor.tokenizer, images.processor
    making = Making(
        tokenizer,
        max_length=max_length,
        train_on=train_on,
        too_long=too_long,
        rows_per_example=rows_per_example,
        on_bad_row=on_bad_row,
        are_generated=how.are_generated,
        processor=used,
    )
    options = making.key() | _seen(records).tell(tokenizer, say)
    if images is not None:
        options |= {"images": images.digest().tobytes().hex(), "processor": images.processor.to_json_string()}
    if cache_dir is not None and (key := cache_key(RecordsDigest(records), tokenizer, options)) is not None:
        size: dict[str, Any] = {"num_records": len(records), "max_length": max_length}
        arrays = load_or_make(cache_dir, key, lambda: list(token_blocks(records, making)), **size)
    else:
        arrays = _flat_arrays(records, making)
    for array in arrays.values():
        array.flags.writeable = False  # sequences are views of these
    if images is not None:  # those of records so far: a record may be no sequence, or several
        images = dataclasses.replace(images, files=[images.files[index] for index in arrays["sources"]])
    more: dict[str, Any] = {"further": images, "rows_per_example": rows_per_example}
    more["origins"] = [records[index].origin for index in arrays["sources"]] if names_rows else None
    tokens = Read(records.__getitem__, len(records), making).dataset(arrays, how, counts, say=say, **more)
    if vocab_size is not None:
        check_vocabulary(tokens, records.__getitem__, vocab_size)
    if images is not None:
        _check_placeholders(tokens, records, images.processor)
    return tokens


def _seen(records: Iterable[Record]) -> Seen:
    """What there is in the messages of the records."""
    seen = Seen()
    for record in records:
        seen.add(record)
    return seen


@dataclass(frozen=True, kw_only=True)
class Making:
    """How records become sequences.

    Attributes:
        max_length, train_on, too_long, on_bad_row, processor: as of `tokenize`, of which the processor is loaded here.
        rows_per_example: adjacent sequences of an example. are_generated: as of `Chats`.
    """

    tokenizer: PreTrainedTokenizerBase = field(kw_only=False)
    max_length: int
    train_on: TrainOn = "all"
    too_long: str = "truncate"
    rows_per_example: int = 1
    on_bad_row: str = ERROR
    are_generated: bool = False
    processor: Any = None

    @property
    def skips(self) -> bool:
        """Whether a record that cannot be trained is passed over."""
        return self.on_bad_row == SKIP

    @property
    def most_tokens(self) -> int:
        """How many leading tokens of a record are made."""
        if self.too_long == "split":
            return _ALL_TOKENS
        return self.max_length + 1  # one more tells a record that is too long

    def key(self) -> dict[str, Any]:
        """What of it decides the arrays, for the key of the cache; the tokenizer and the processor have their own."""
        found: dict[str, Any] = {"max_length": self.max_length, "too_long": self.too_long}
        found |= {"rows_per_example": self.rows_per_example, "on_bad_row": self.on_bad_row}
        found["train_on"] = self.train_on if isinstance(self.train_on, str) else sorted(self.train_on)
        if self.are_generated:  # only then: keys of older files were made without it
            found["are_generated"] = True
        return found


def _apart(records: AbstractSequence[Record], train_on: TrainOn) -> tuple[list[int], list[Record]]:
    """(how many beginnings each record has, all of them one after the other)."""
    counts, found = list[int](), list[Record]()
    for record in records:
        before = len(found)
        found += beginnings(record, train_on)
        counts.append(len(found) - before)
    return counts, found


def _images(records: AbstractSequence[Record], processor: Callable[[], Any] | None, *, skips: bool) -> Images | None:
    """The images of records; None if there are none. processor: loads it, which takes seconds."""
    for record in records:
        if record.images:
            if processor is None:
                raise UserError(f"{record.origin}: a record with an image", "images are not read here", "leave it out")
            return images_of(records, processor(), skips=skips)
    return None


@dataclass(frozen=True)
class Read:
    """Records that were tokenised, for what is said of them."""

    record_at: Callable[[int], Record]
    number: int
    making: Making

    def dataset(
        self,
        arrays: Arrays,
        how: Chats,
        counts: AbstractSequence[int] | None,
        *,
        say: Callable[[str], None] | None,
        **more: Any,
    ) -> TokenizedDataset:
        """Their sequences. counts: beginnings of each record, where each is a sequence. more: further fields. Raises:
        UserError: what a template leaves out is refused."""
        train_on, is_alone = self.making.train_on, self.making.rows_per_example == 1
        lost = Lost(
            arrays.pop("lost"),
            self.record_at,
            self.number,
            can_be_apart=is_alone and not how.is_apart and can_be_apart(train_on),
            can_be_generated=is_alone and not how.are_generated and train_on in ("all", "last"),
            trains_all=train_on == "all",
        )
        said = self._bad(arrays["bad"])
        of_lost = lost.words(how.lost_text)
        if of_lost:
            more["lost_words"] = functools.partial(self._lost_words, arrays["sources"])
        said += of_lost
        taken = self._taken(arrays)
        if counts is not None:
            more["examples"] = examples_of(counts, arrays["sources"])
            said.append(words_of(more["examples"], np.diff(arrays["offsets"])))
        said.append(taken.words(len(arrays["sources"])))
        for words in said:
            if say is not None and words:
                say(words)
        return TokenizedDataset(**{**arrays, **more}, taken=taken)

    def _taken(self, arrays: Arrays) -> Taken:
        """What became of the records. Takes the indices `too_long` and `bad` out of `arrays`."""
        long, num_bad = arrays.pop("too_long"), len(arrays.pop("bad"))
        dropped, first = 0, ""
        if self.making.too_long == "drop":
            dropped = self.number - num_bad - len(arrays["sources"])
        if len(long):
            first = self.record_at(int(long[0])).origin
        return Taken(self.number, self.making.max_length, self.making.too_long, len(long), dropped, first)

    def _bad(self, bad: np.ndarray) -> list[str]:
        """What is said of records that were passed over: the first are tried once more, for what is wrong."""
        each, first = self.making.rows_per_example, list[str]()
        for index in bad[::each][:MAX_SHOWN].tolist():
            first.append(_why_bad([self.record_at(index + row) for row in range(each)], self.making))
        if not first:
            return []
        return [words_of_bad(len(bad) // each, self.number // each, first)]

    def _lost_words(self, sources: np.ndarray, index: int) -> AbstractSequence[tuple[int, str]]:
        """`TokenizedDataset.lost_words`. sources: of each sequence its record."""
        if index and sources[index - 1] == sources[index]:  # another window of a long record begins elsewhere
            return ()
        record = self.record_at(int(sources[index]))
        if record.messages is None:
            return ()
        # As if split: all of its tokens are made.
        (row,) = _rows_of_chats([record], dataclasses.replace(self.making, too_long="split", on_bad_row=ERROR))
        return () if row is None else row.lost_words


def _flat(
    records: AbstractSequence[Record] | AbstractSequence[tuple[Record, ...]],
) -> tuple[int, AbstractSequence[Record]]:
    """(number of sequences of an example, the records one after the other). Raises: UserError: there are none."""
    if not records:
        raise UserError("records=[]", "there is nothing to tokenise")
    if isinstance(first := records[0], Record):
        return 1, records  # type: ignore[return-value]
    return len(first), list(itertools.chain.from_iterable(records))  # type: ignore[arg-type]


def _check_placeholders(tokens: TokenizedDataset, records: AbstractSequence[Record], processor: Any) -> None:
    """Refuse placeholders of images in text: they would take the features of other sequences' images."""
    assert tokens.sources is not None
    marks = [*{*processor.image_token_ids} - {None}]  # None: of a kind that the model has not
    for source, sequence in zip(tokens.sources, tokens, strict=True):
        record, found = records[int(source)], np.isin(sequence.input_ids, marks)
        if not record.images and found.any():
            number = int(sequence.input_ids[found][0])
            raise UserError(f"{record.origin}: token {number}", "it stands for an image, but the record has none")


def check_vocabulary(tokens: TokenizedDataset, record_at: Callable[[int], Record], vocab_size: int) -> None:
    """Check token ids, cached ones too. The tokenizer's size does not bound them: few tokens may have large ids.
    Raises: UserError: names the record, which `record_at` gives for its index."""
    assert tokens.sources is not None
    if int(tokens.input_ids.min()) >= 0 and int(tokens.input_ids.max()) < vocab_size:
        return
    for source, sequence in zip(tokens.sources, tokens, strict=True):  # a mask of all may be larger than memory
        wrong = sequence.input_ids[(sequence.input_ids < 0) | (sequence.input_ids >= vocab_size)]
        if len(wrong):
            raise _outside(record_at(int(source)), int(wrong[0]), f"the model has embeddings for {vocab_size}")


def _outside(record: Record, token: int, rule: str) -> UserError:
    return UserError(f"{record.origin}: token {token}", rule, "is it the tokenizer of another model?")


def _why_bad(example: AbstractSequence[Record], making: Making) -> str:
    try:
        for _ in token_blocks(example, dataclasses.replace(making, on_bad_row=ERROR)):
            pass
    except UserError as error:
        return f"{error.given}: {error.rule}"
    return example[0].origin  # as where a template took too long the first time alone


def _flat_arrays(records: Iterable[Record], making: Making) -> Arrays:
    """The arrays of all sequences, and of what `token_blocks` says of records."""
    blocks = list(token_blocks(records, making))
    # There is one: of no records none is asked, and each block has all arrays.
    arrays = {name: np.concatenate([block[name] for block in blocks]) for name in blocks[0]}
    lengths = arrays.pop("lengths")
    return {**arrays, "offsets": np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)}


def token_blocks(records: Iterable[Record], making: Making) -> Iterator[Arrays]:
    """The sequences of some thousand records at a time: `input_ids`, `is_trained`, their `lengths` and `sources`; the
    indices `too_long` of records; and what is `lost` of them (`lost.py`).

    Raises:
        UserError: at the end, as `tokenize`: use none of it before.
    """
    found, number, num_sequences = Found(), 0, 0
    first_bad: AbstractSequence[Record] = ()
    each, rest = making.rows_per_example, iter(records)
    while block := list(itertools.islice(rest, _BLOCK - _BLOCK % each)):  # whole examples
        made, rows = _Block(making, found), _rows(block, making)
        for start in range(0, len(block), each):
            example = block[start : start + each]
            is_used = made.add(number + start, example, rows[start : start + each])
            if not is_used and not first_bad:
                first_bad = example
        number += len(block)
        num_sequences += len(made.ids)
        yield made.arrays()
    if first_bad and not num_sequences:
        words_of_bad(number, number, [_why_bad(first_bad, making)])
    found.refuse(Taken(number, making.max_length, making.too_long), num_sequences)


@dataclass
class _Block:
    """The sequences of some records, as they are made, and what is so of the records. Indices are of all records.

    found: records that cannot be used. lost: (index, kinds of `lost.py`) of each record that is not bad.
    """

    making: Making
    found: Found
    ids: list[np.ndarray] = field(default_factory=list)
    masks: list[np.ndarray] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)
    too_long: list[int] = field(default_factory=list)
    bad: list[int] = field(default_factory=list)
    lost: list[tuple[int, AbstractSequence[str]]] = field(default_factory=list)

    def add(self, first: int, example: AbstractSequence[Record], rows: AbstractSequence[Row | None]) -> bool:
        """Add an example, whose first record has the index `first`. False: it is passed over, as a whole."""
        is_whole, is_used, found, making = True, True, self.found, self.making
        for place, row in enumerate(rows):
            if row is None:
                is_whole = False
                continue
            if len(row.ids) > making.max_length:
                self.too_long.append(first + place)
                is_used &= making.too_long != "drop"
                if making.too_long == "error":  # else they are counted: there may be more than memory holds
                    found.too_long.append(_with_length(example[place], row, making.max_length))
            if NOTHING in row.lost:
                found.nothing.append(example[place].origin)
                is_used = False
        num_sequences, num_untrained = len(self.ids), len(found.untrained)
        cut = self._add_sequences(first, example, rows) if is_whole and is_used else ()
        # Without a trained token a record cannot be used either; where none is passed over, it is an error at the end.
        if not is_whole or (making.skips and len(found.untrained) > num_untrained):
            del found.untrained[num_untrained:]
            del self.ids[num_sequences:], self.masks[num_sequences:], self.sources[num_sequences:]
            self.bad += range(first, first + len(rows))
            return False
        for index, row in enumerate(rows, start=first):
            if row is not None:
                self.lost.append((index, [*row.lost, CUT] if index in cut else row.lost))
        return True

    def _add_sequences(
        self, first: int, example: AbstractSequence[Record], rows: AbstractSequence[Row | None]
    ) -> list[int]:
        """Add the sequences of an example. Returns: the records of which a turn is trained without its end."""
        cut = []
        for index, (record, row) in enumerate(zip(example, rows, strict=True), start=first):
            assert row is not None
            parts, is_cut = _sequences(record, row, self.found, self.making)
            for ids, mask in parts:
                self.ids.append(ids)
                self.masks.append(mask)
                self.sources.append(index)
            if is_cut:
                cut.append(index)
        return cut

    def arrays(self) -> Arrays:
        # An empty one before them keeps the type where there are none.
        return {
            "input_ids": np.concatenate([np.empty(0, dtype=np.int32), *self.ids]),
            "is_trained": np.concatenate([np.empty(0, dtype=bool), *self.masks]),
            "lengths": np.array([*map(len, self.ids)], dtype=np.int64),
            "sources": np.array(self.sources, dtype=np.int64),
            "too_long": np.array(self.too_long, dtype=np.int64),
            "bad": np.array(self.bad, dtype=np.int64),
            "lost": as_array(self.lost),
        }


def _sequences(
    record: Record, row: Row, found: Found, making: Making
) -> tuple[list[tuple[np.ndarray, np.ndarray]], bool]:
    """(the sequences of a record, whether a turn is trained without its end). In `found`: why it cannot be used."""
    for token in (min(row.ids, default=0), max(row.ids, default=0)):  # numpy would wrap a larger one around
        if not 0 <= token <= np.iinfo(np.int32).max:
            raise _outside(record, token, "no model has embeddings for so many")
    max_length, is_split = making.max_length, making.too_long == "split"
    ids, is_long, is_cut = np.array(row.ids, dtype=np.int32), len(row.ids) > max_length, False
    if is_split and is_long:
        if row.whole:
            found.split_images.append(_with_length(record, row, max_length))
        parts, is_cut = windows(ids, row.is_trained, max_length, at_turns=record.kind == "messages", ends=row.ends)
    else:
        parts = [(ids[:max_length], row.is_trained[:max_length])]
        is_cut = is_long and is_cut_turn(row.is_trained, max_length)
        if row.whole > max_length:
            found.cut_images.append(f"{record.origin} ({row.whole} tokens)")
            return parts, False
    if not any(mask[1:].any() for _, mask in parts):  # the first token is never a target
        words = found.cut_off if is_long and not is_split else found.untrained
        words.append(f"{record.origin} ({_why_untrained(record, row, max_length)})")
    return parts, is_cut and record.kind in ("messages", "completion")


def _num_tokens(row: Row, max_length: int) -> str:
    """In words. Of a very long record the first tokens alone were made."""
    more = " or more" if len(row.ids) == max_length + 1 else ""
    return f"{len(row.ids)} tokens{more}"


def _with_length(record: Record, row: Row, max_length: int) -> str:
    return f"{record.origin} ({_num_tokens(row, max_length)})"


def _why_untrained(record: Record, row: Row, max_length: int) -> str:
    weights = [message.get("weight") for message in record.messages or () if message["role"] == "assistant"]
    if weights and not any(weight != 0 for weight in weights):
        return "every turn of the assistant has weight 0"
    return _num_tokens(row, max_length)


def _rows(block: AbstractSequence[Record], making: Making) -> list[Row | None]:
    """The rows of a block, in order, with one call per kind of record. None: of a record that is passed over."""
    positions: dict[str, list[int]] = {}
    for position, record in enumerate(block):
        positions.setdefault(record.kind, []).append(position)
    rows: list[Row | None] = [None] * len(block)
    for kind, rows_of in _ROWS_OF.items():  # whichever kind comes first, the same mistake is named
        own = positions.get(kind)
        if own is not None:
            made = rows_of([block[position] for position in own], making)
            for position, row in zip(own, made, strict=True):
                rows[position] = row
    return rows


def _rows_of_text(records: list[Record], making: Making) -> list[Row]:
    bos, eos, rows = _leading_ids(making.tokenizer), _eos_id(making.tokenizer), list[Row]()
    for ids in _plain_ids([record.text or "" for record in records], making):
        whole = _with_start(_with_end(ids, eos), bos)
        rows.append(Row(whole, np.ones(len(whole), dtype=bool)))
    return rows


def _rows_of_completions(records: list[Record], making: Making) -> list[Row]:
    tokenizer, train_on, rows = making.tokenizer, making.train_on, list[Row]()
    bos, eos = _leading_ids(tokenizer), _eos_id(tokenizer)
    prompts = _plain_ids([record.prompt or "" for record in records], making)
    completions = _plain_ids([record.completion or "" for record in records], making)
    separators = {text: separator_ids(tokenizer, text) for text in {record.separator for record in records}}
    for record, prompt, completion in zip(records, prompts, completions, strict=True):
        before, after = _with_start(prompt, bos) + separators[record.separator], _with_end(completion, eos)
        mask = np.full(len(before) + len(after), is_of("user", train_on))
        mask[len(before) :] = is_of("assistant", train_on)
        rows.append(Row(before + after, mask))
    return rows


def separator_ids(tokenizer: PreTrainedTokenizerBase, separator: str) -> list[int]:
    """The tokens between a prompt and its completion; special tokens may be spelt, as in `"<|endoftext|>"`."""
    if not separator:
        return []
    ids: list[int] = tokenizer(separator, add_special_tokens=False, verbose=False).input_ids
    return ids


def _rows_of_chats(records: list[Record], making: Making) -> list[Row | None]:
    return tokenize_conversations(
        records,
        making.tokenizer,
        max_length=making.most_tokens,
        train_on=making.train_on,
        processor=making.processor,
        are_generated=making.are_generated,
        skips=making.skips,
    )


def _rows_of_tokens(records: list[Record], making: Making) -> list[Row]:
    """As they are: which are trained is said by the record."""
    del making
    return [Row(list(record.tokens[0]), np.array(record.tokens[1], bool)) for record in records if record.tokens]


_ROWS_OF: Mapping[str, Callable[[list[Record], Making], AbstractSequence[Row | None]]] = {
    "text": _rows_of_text,
    "completion": _rows_of_completions,
    "messages": _rows_of_chats,
    "tokens": _rows_of_tokens,
}


def _plain_ids(texts: list[str], making: Making) -> list[list[int]]:
    return [tokens.ids for tokens in leading_tokens(texts, making.tokenizer, max_length=making.most_tokens)]


def _leading_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The ids that the tokenizer puts before a text by default: `[bos]`, or nothing.

    Found by tokenising the same text with and without special tokens, since neither the presence of a bos token nor
    `add_bos_token` says what its post-processor does. Tokens after a text (eos, sep) do not matter.
    """
    try:
        with_special = list(tokenizer("x").input_ids)
        plain = list(tokenizer("x", add_special_tokens=False).input_ids)
    except Exception as error:  # an untrusted tokenizer may raise anything
        rule = f"fails on one letter ({reason(error)})"
        raise UserError(f"tokenizer {type(tokenizer).__name__}", rule, "is it whole?") from error
    for start in range(len(with_special) - len(plain) + 1):
        if with_special[start : start + len(plain)] == plain:
            return with_special[:start]
    rule = "gives a text other ids with special tokens than without, so what it puts before a text cannot be told"
    raise UserError(f"tokenizer {type(tokenizer).__name__}", rule)


def _eos_id(tokenizer: PreTrainedTokenizerBase) -> int:
    eos_token_id: int | None = tokenizer.eos_token_id
    if eos_token_id is None:
        given = f"tokenizer {tokenizer.name_or_path or type(tokenizer).__name__}"
        rule = "has no eos token, so the adapter would never learn to stop"
        raise UserError(given, rule, "set one (tokenizer.eos_token, or eos_token in tokenizer_config.json)")
    return eos_token_id


def _with_start(ids: list[int], start: list[int]) -> list[int]:
    return ids if ids[: len(start)] == start else start + ids


def _with_end(ids: list[int], eos: int) -> list[int]:
    return ids if ids[-1:] == [eos] else [*ids, eos]

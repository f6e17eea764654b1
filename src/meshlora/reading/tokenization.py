"""Tokenisation of records, with the trained tokens marked.

Owns: concatenation of prompt and completion, bos and eos, and the flat arrays of a dataset. Does not own: finding turns
in a conversation (`chat.py`) and which are trained (`train_on.py`), what becomes of long records (`too_long.py`), how
much of a long text is tokenised (`leading.py`), caching the arrays (`cache.py`), or batches (`train.batch`).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from meshlora.reading.apart import Chats, beginnings, can_be_apart, examples_of, words_of
from meshlora.reading.bad_rows import ERROR, SKIP, words_of_bad
from meshlora.reading.cache import Arrays, cache_key, load_or_make
from meshlora.reading.chat import Row, Seen, tokenize_conversations
from meshlora.reading.images import images_of
from meshlora.reading.leading import leading_tokens
from meshlora.reading.lost import CUT, NOTHING, Lost, as_array
from meshlora.reading.records import MAX_SHOWN, Record
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
            called if there are images. chats: `turns` and the like, of `Chats`.

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
    rows_per_example, records = _flat(records)
    how, counts = Chats(**chats), None
    how.check(train_on, rows_per_example=rows_per_example)
    if how.is_apart:
        parts = [[*beginnings(record, train_on)] for record in records]
        counts, records = [*map(len, parts)], [*itertools.chain.from_iterable(parts)]
    images = None
    if (first := next((record for record in records if record.images), None)) is not None:
        if processor is None:
            raise UserError(f"{first.origin}: a record with an image", "images are not read here", "leave it out")
        images = images_of(records, processor(), skips=on_bad_row == SKIP)
        tokenizer = images.processor.tokenizer
    options: dict[str, Any] = {"max_length": max_length, "too_long": too_long, "rows_per_example": rows_per_example}
    options["train_on"] = train_on if isinstance(train_on, str) else sorted(train_on)
    options |= {"on_bad_row": on_bad_row} | ({"are_generated": True} if how.are_generated else {})
    used = None if images is None else images.processor
    make = functools.partial(_flat_arrays, records, tokenizer, processor=used, **options)
    seen = Seen()
    for record in records:
        seen.add(record)
    options |= seen.tell(tokenizer, say)
    if images is not None:
        options |= {"images": images.digest().tobytes().hex(), "processor": images.processor.to_json_string()}
    if cache_dir is not None and (key := cache_key(records, tokenizer, options)) is not None:
        arrays = load_or_make(cache_dir, key, make, num_records=len(records), max_length=max_length)
    else:
        arrays = make()
    for array in arrays.values():
        array.flags.writeable = False  # sequences are views of these
    if images is not None:
        images = dataclasses.replace(images, files=[images.files[index] for index in arrays["sources"]])
    more: dict[str, Any] = {"further": images, "rows_per_example": rows_per_example}
    records_read = Read(records.__getitem__, len(records), tokenizer, train_on, max_length, too_long, used)
    tokens = records_read.dataset(arrays, how, counts, say=say, **more)
    if vocab_size is not None:
        check_vocabulary(tokens, records.__getitem__, vocab_size)
    if images is not None:
        _check_placeholders(tokens, records, images.processor)
    return tokens


@dataclass(frozen=True)
class Read:
    """Records that were tokenised, for what is said of them."""

    record_at: Callable[[int], Record]
    number: int
    tokenizer: PreTrainedTokenizerBase
    train_on: TrainOn
    max_length: int
    too_long: str
    processor: Any = None

    def dataset(
        self,
        arrays: Arrays,
        how: Chats,
        counts: AbstractSequence[int] | None,
        *,
        say: Callable[[str], None] | None,
        **more: Any,
    ) -> TokenizedDataset:
        """Their sequences. counts: beginnings of each record, where each is a sequence. more: further fields.

        Raises:
            UserError: what a template leaves out is refused.
        """
        is_alone = more.get("rows_per_example", 1) == 1
        lost = Lost(
            arrays.pop("lost"),
            self.record_at,
            self.number,
            can_be_apart=is_alone and not how.is_apart and can_be_apart(self.train_on),
            can_be_generated=is_alone and not how.are_generated and self.train_on in ("all", "last"),
            trains_all=self.train_on == "all",
        )
        options: dict[str, Any] = {"max_length": self.max_length, "too_long": self.too_long}
        of_blocks = {**options, "train_on": self.train_on, "processor": self.processor}
        of_blocks |= {"rows_per_example": more.get("rows_per_example", 1), "are_generated": how.are_generated}
        bad = bad_of(arrays, self.record_at, self.number, self.tokenizer, of_blocks)
        said = lost.words(how.lost_text)
        if said:
            more["lost_words"] = functools.partial(self._lost_words, arrays["sources"], how)
        taken = taken_of(arrays, self.record_at, self.number, **options)
        if counts is not None:
            more["examples"] = examples_of(counts, arrays["sources"])
            said.append(words_of(more["examples"], np.diff(arrays["offsets"])))
        said.append(taken.words(len(arrays["sources"])))
        for words in (*bad, *said):
            if say is not None and words:
                say(words)
        return TokenizedDataset(**{**arrays, **more}, taken=taken)

    def _lost_words(self, sources: np.ndarray, how: Chats, index: int) -> AbstractSequence[tuple[int, str]]:
        """`TokenizedDataset.lost_words`. sources: of each sequence its record."""
        record, is_first = self.record_at(int(sources[index])), not index or sources[index - 1] != sources[index]
        if record.messages is None or not is_first:  # another window of a long record begins elsewhere
            return ()
        options: dict[str, Any] = {"train_on": self.train_on, "processor": self.processor}
        options["are_generated"] = how.are_generated
        (row,) = tokenize_conversations([record], self.tokenizer, max_length=_ALL_TOKENS, **options)
        return () if row is None else row.lost_words


def _flat(
    records: AbstractSequence[Record] | AbstractSequence[tuple[Record, ...]],
) -> tuple[int, AbstractSequence[Record]]:
    """(number of sequences of an example, the records one after the other). Raises: UserError: there are none."""
    if not records:
        raise UserError("records=[]", "there is nothing to tokenise")
    if isinstance(first := records[0], Record):
        return 1, records  # type: ignore[return-value]
    return len(first), [record for example in records for record in example]  # type: ignore[union-attr]


def _check_placeholders(tokens: TokenizedDataset, records: AbstractSequence[Record], processor: Any) -> None:
    """Refuse placeholders of images in text: they would take the features of other sequences' images."""
    assert tokens.sources is not None
    marks = [number for number in processor.image_token_ids if number is not None]
    for source, sequence in zip(tokens.sources, tokens, strict=True):
        record, found = records[int(source)], np.isin(sequence.input_ids, marks)
        if not record.images and found.any():
            number = int(sequence.input_ids[found][0])
            raise UserError(f"{record.origin}: token {number}", "it stands for an image, but the record has none")


def check_vocabulary(tokens: TokenizedDataset, record_at: Callable[[int], Record], vocab_size: int) -> None:
    """Check token ids, cached ones too. The tokenizer's size does not bound them: few tokens may have large ids.

    Raises:
        UserError: names the record, which `record_at` gives for its index.
    """
    assert tokens.sources is not None
    if int(tokens.input_ids.min()) >= 0 and int(tokens.input_ids.max()) < vocab_size:
        return
    source, sequence = next(
        (source, sequence)
        for source, sequence in zip(tokens.sources, tokens, strict=True)
        if sequence.input_ids.min() < 0 or sequence.input_ids.max() >= vocab_size
    )
    wrong = sequence.input_ids[(sequence.input_ids < 0) | (sequence.input_ids >= vocab_size)]
    raise _outside(record_at(int(source)), int(wrong[0]), f"the model has embeddings for {vocab_size}")


def _outside(record: Record, token: int, rule: str) -> UserError:
    return UserError(f"{record.origin}: token {token}", rule, "is it the tokenizer of another model?")


def taken_of(
    arrays: Arrays, record_at: Callable[[int], Record], number: int, *, max_length: int, too_long: str
) -> Taken:
    """What became of `number` records. Takes the indices `too_long` and `bad` out of `arrays`."""
    long, bad = arrays.pop("too_long"), arrays.pop("bad")
    dropped = number - len(bad) - len(arrays["sources"]) if too_long == "drop" else 0
    first = record_at(int(long[0])).origin if len(long) else ""
    return Taken(number, max_length, too_long, num_too_long=len(long), num_dropped=dropped, first=first)


def bad_of(
    arrays: Arrays,
    record_at: Callable[[int], Record],
    number: int,
    tokenizer: PreTrainedTokenizerBase,
    options: Mapping[str, Any],
) -> list[str]:
    """What is said of records that were passed over, of `number`: the first are tried once more, for what is wrong.
    options: of `token_blocks`.

    Raises:
        UserError: they are too many.
    """
    each = options["rows_per_example"]
    first = [
        _why_bad([record_at(int(index) + row) for row in range(each)], tokenizer, options)
        for index in arrays["bad"][::each][:MAX_SHOWN]
    ]
    return [words_of_bad(len(arrays["bad"]) // each, number // each, first)] if first else []


def _why_bad(example: AbstractSequence[Record], tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any]) -> str:
    try:
        for _ in token_blocks(example, tokenizer, **{**options, "on_bad_row": ERROR}):
            pass
    except UserError as error:
        return f"{error.given}: {error.rule}"
    return example[0].origin


def _flat_arrays(records: Iterable[Record], tokenizer: PreTrainedTokenizerBase, **options: Any) -> Arrays:
    """The arrays of all sequences, and of what `token_blocks` says of records. options: of `token_blocks`."""
    blocks = list(token_blocks(records, tokenizer, **options))
    arrays = {name: np.concatenate([block[name] for block in blocks]) for name in blocks[0]}
    lengths = arrays.pop("lengths")
    return {**arrays, "offsets": np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)}


def token_blocks(
    records: Iterable[Record],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int,
    train_on: TrainOn,
    too_long: str,
    rows_per_example: int,
    processor: Any,
    on_bad_row: str = ERROR,
    are_generated: bool = False,
) -> Iterator[Arrays]:
    """The sequences of some thousand records at a time: `input_ids`, `is_trained`, their `lengths` and `sources`; the
    indices `too_long` of records; and what is `lost` of them (`lost.py`).

    Raises:
        UserError: at the end, as `tokenize`: use none of it before.
    """
    found, number, num_sequences, first_bad = Found(), 0, 0, list[Record]()
    # One token more tells a record that is too long.
    most = _ALL_TOKENS if too_long == "split" else max_length + 1
    size, rest, skips = _BLOCK - _BLOCK % rows_per_example, iter(records), on_bad_row == SKIP
    of_conversations = {"processor": processor, "are_generated": are_generated}
    while block := list(itertools.islice(rest, size)):
        made, cut, bad, long = list[tuple[int, np.ndarray, np.ndarray]](), set[int](), list[int](), list[int]()
        of_chats = functools.partial(tokenize_conversations, skips=skips, **of_conversations)
        rows = _rows(block, tokenizer, max_length=most, train_on=train_on, of_chats=of_chats)
        for start in range(0, len(block), rows_per_example):
            places = range(start, start + rows_per_example)
            own = [(place, block[place], row) for place in places if (row := rows[place]) is not None]
            are_long = [place for place, _, row in own if len(row.ids) > max_length]
            long += [number + place for place in are_long]
            if too_long == "error":  # else they are counted: there may be more than memory holds
                found.too_long += [_with_length(record, row, max_length) for at, record, row in own if at in are_long]
            nothing = [record.origin for _, record, row in own if NOTHING in row.lost]
            found.nothing += nothing
            num_untrained = len(found.untrained)
            if len(own) == len(places) and not nothing and not (too_long == "drop" and are_long):
                for place, record, row in own:
                    parts, is_cut = _sequences(record, row, found, max_length=max_length, too_long=too_long)
                    made += [(number + place, *part) for part in parts]
                    cut |= {number + place} if is_cut else set()
            if len(own) < len(places) or (skips and len(found.untrained) > num_untrained):
                del found.untrained[num_untrained:]
                made = [each for each in made if each[0] < number + start]
                bad += [number + place for place in places]
                first_bad = first_bad or [block[place] for place in places]
        first, number, num_sequences = number, number + len(block), num_sequences + len(made)
        yield {
            "input_ids": np.concatenate([np.empty(0, dtype=np.int32), *(ids for _, ids, _ in made)]),
            "is_trained": np.concatenate([np.empty(0, dtype=bool), *(mask for *_, mask in made)]),
            "lengths": np.array([len(ids) for _, ids, _ in made], dtype=np.int64),
            "sources": np.array([index for index, *_ in made], dtype=np.int64),
            "too_long": np.array(long, dtype=np.int64),
            "bad": np.array(bad, dtype=np.int64),
            "lost": as_array(
                (first + at, (*row.lost, *([CUT] if first + at in cut else [])))
                for at, row in enumerate(rows)
                if row and first + at not in bad
            ),
        }
    if first_bad and not num_sequences:
        options: dict[str, Any] = {"max_length": max_length, "train_on": train_on, "too_long": too_long}
        options |= {"rows_per_example": rows_per_example, **of_conversations}
        words_of_bad(number, number, [_why_bad(first_bad, tokenizer, options)])
    found.refuse(Taken(number, max_length, too_long), num_sequences)


def _sequences(
    record: Record, row: Row, found: Found, *, max_length: int, too_long: str
) -> tuple[list[tuple[np.ndarray, np.ndarray]], bool]:
    """(the sequences of a record, whether a turn is trained without its end); where it cannot be used, a note of it in
    `found`.

    Raises:
        UserError: a token that no model has.
    """
    for token in (min(row.ids, default=0), max(row.ids, default=0)):
        if not 0 <= token <= np.iinfo(np.int32).max:
            raise _outside(record, token, "no model has embeddings for so many")
    ids, is_long, is_cut = np.array(row.ids, dtype=np.int32), len(row.ids) > max_length, False
    if too_long == "split" and is_long:
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
        words = found.cut_off if is_long and too_long != "split" else found.untrained
        words.append(f"{record.origin} ({_why_untrained(record, row, max_length)})")
    return parts, is_cut and record.kind in ("messages", "completion")


def _with_length(record: Record, row: Row, max_length: int) -> str:
    """A record that is too long in words. Of a very long one the first tokens alone were made."""
    return f"{record.origin} ({len(row.ids)} tokens{' or more' if len(row.ids) == max_length + 1 else ''})"


def _why_untrained(record: Record, row: Row, max_length: int) -> str:
    turns = [message for message in record.messages or () if message["role"] == "assistant"]
    if turns and all(turn.get("weight") == 0 for turn in turns):
        return "every turn of the assistant has weight 0"
    if len(row.ids) <= max_length:
        return f"{len(row.ids)} tokens"
    return _with_length(record, row, max_length).removeprefix(f"{record.origin} (").removesuffix(")")


def _rows(
    block: AbstractSequence[Record],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int,
    train_on: TrainOn,
    of_chats: Callable[..., list[Row | None]],
) -> list[Row | None]:
    """The rows of a block, in order, with one call per kind of record. None: of a record that is passed over."""
    by_kind: dict[str, Callable[..., AbstractSequence[Row | None]]] = {
        "text": _rows_of_text,
        "completion": _rows_of_completions,
        "messages": of_chats,
        "tokens": _rows_of_tokens,
    }
    rows: dict[int, Row | None] = {}
    for kind, make_rows in by_kind.items():
        positions = [position for position, record in enumerate(block) if record.kind == kind]
        if positions:
            records = [block[position] for position in positions]
            made = make_rows(records, tokenizer, max_length=max_length, train_on=train_on)
            rows.update(zip(positions, made, strict=True))
    return [rows[position] for position in range(len(block))]


def _rows_of_text(
    records: list[Record], tokenizer: PreTrainedTokenizerBase, *, max_length: int, train_on: TrainOn
) -> list[Row]:
    del train_on  # all tokens of a text always are
    bos, eos = _leading_ids(tokenizer), _eos_id(tokenizer)
    rows: list[Row] = []
    for ids in _plain_ids([record.text or "" for record in records], tokenizer, max_length=max_length):
        whole = _with_start(_with_end(ids, eos), bos)
        rows.append(Row(whole, np.ones(len(whole), dtype=bool)))
    return rows


def _rows_of_completions(
    records: list[Record], tokenizer: PreTrainedTokenizerBase, *, max_length: int, train_on: TrainOn
) -> list[Row]:
    bos, eos = _leading_ids(tokenizer), _eos_id(tokenizer)
    prompts = _plain_ids([record.prompt or "" for record in records], tokenizer, max_length=max_length)
    completions = _plain_ids([record.completion or "" for record in records], tokenizer, max_length=max_length)
    rows: list[Row] = []
    separators = {record.separator: separator_ids(tokenizer, record.separator) for record in records}
    for record, prompt, completion in zip(records, prompts, completions, strict=True):
        before, after = _with_start(prompt, bos) + separators[record.separator], _with_end(completion, eos)
        mask = np.full(len(before) + len(after), is_of("user", train_on))
        mask[len(before) :] = is_of("assistant", train_on)
        rows.append(Row(before + after, mask))
    return rows


def separator_ids(tokenizer: PreTrainedTokenizerBase, separator: str) -> list[int]:
    """The tokens between a prompt and its completion; special tokens may be spelt, as in `"<|endoftext|>"`."""
    ids: list[int] = tokenizer(separator, add_special_tokens=False, verbose=False).input_ids if separator else []
    return ids


def _rows_of_tokens(
    records: list[Record], tokenizer: PreTrainedTokenizerBase, *, max_length: int, train_on: TrainOn
) -> list[Row]:
    """As they are: which are trained is said by the record."""
    del tokenizer, max_length, train_on
    return [Row(list(record.tokens[0]), np.array(record.tokens[1], bool)) for record in records if record.tokens]


def _plain_ids(texts: list[str], tokenizer: PreTrainedTokenizerBase, *, max_length: int) -> list[list[int]]:
    return [tokens.ids for tokens in leading_tokens(texts, tokenizer, max_length=max_length)]


def _leading_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The ids that the tokenizer puts before a text by default: `[bos]`, or nothing.

    Found by tokenising the same text with and without special tokens, since neither the presence of a bos token nor
    `add_bos_token` says what its post-processor does. Tokens after a text (eos, sep) do not matter: a sequence always
    ends with eos.
    """
    try:
        with_special = list(tokenizer("x").input_ids)
        plain = list(tokenizer("x", add_special_tokens=False).input_ids)
    except Exception as error:  # an untrusted tokenizer may raise anything
        raise UserError(
            f"tokenizer {type(tokenizer).__name__}", f"fails on one letter ({reason(error)})", "is it whole?"
        ) from error
    for start in range(len(with_special) - len(plain) + 1):
        if with_special[start : start + len(plain)] == plain:
            return with_special[:start]
    raise UserError(
        f"tokenizer {type(tokenizer).__name__}",
        "gives a text other ids with special tokens than without, so what it puts before a text cannot be told",
    )


def _eos_id(tokenizer: PreTrainedTokenizerBase) -> int:
    eos_token_id: int | None = tokenizer.eos_token_id
    if eos_token_id is None:
        raise UserError(
            f"tokenizer {tokenizer.name_or_path or type(tokenizer).__name__}",
            "has no eos token, so the adapter would never learn to stop",
            "set one (tokenizer.eos_token, or eos_token in tokenizer_config.json)",
        )
    return eos_token_id


def _with_start(ids: list[int], start: list[int]) -> list[int]:
    return ids if ids[: len(start)] == start else start + ids


def _with_end(ids: list[int], eos: int) -> list[int]:
    return ids if ids[-1:] == [eos] else [*ids, eos]

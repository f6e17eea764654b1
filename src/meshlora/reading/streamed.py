"""Tokens of files that do not fit into memory: `data.streaming`.

Owns: reading records anew for each pass, and tokens that stay in a file of the cache. Does not own: what the tokens are
(`tokenization.py`), the file (`cache.py`). Records are never held: one pass checks and hashes them, another tokenises
those that are not in the cache yet.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshlora.reading.apart import Chats, beginnings
from meshlora.reading.bad_rows import ERROR
from meshlora.reading.cache import Arrays, RecordsDigest, cache_key, mapped
from meshlora.reading.chat import Seen
from meshlora.reading.formats import RECORDS
from meshlora.reading.records import Record
from meshlora.reading.sources import each_row
from meshlora.reading.tokenization import Read, check_vocabulary, token_blocks
from meshlora.reading.train_on import TrainOn, without_empty
from meshlora_ground.dataset import TokenizedDataset
from meshlora_ground.errors import UnsupportedError, UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def _each(
    source: Any,
    columns: Mapping[str, Any],
    train_on: TrainOn,
    *,
    skips_empty: bool,
    is_apart: bool,
    say: Callable[[str], None] | None = None,
    counts: list[int] | None = None,
) -> Iterator[Record]:
    """The records of `source`, or the beginnings of each, whose numbers are added to `counts`."""
    rows = each_row(source, RECORDS, say=say, has_separator=True, **columns)
    for row in without_empty(rows, train_on, say) if skips_empty else rows:
        parts = [*beginnings(row, train_on)] if is_apart else [row]
        yield from parts
        if counts is not None and is_apart:
            counts.append(len(parts))


def read_streamed(
    source: Any,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int,
    cache_dir: Path,
    vocab_size: int,
    train_on: TrainOn = "all",
    too_long: str = "truncate",
    skips_empty: bool = False,
    on_bad_row: str = ERROR,
    say: Callable[[str], None] = lambda _: None,
    **more: Any,
) -> TokenizedDataset:
    """The tokens of the records of `source`, as of `read_records` and `tokenize`, mapped from the cache.

    more: `columns` and `format` of `read_records`, and those of `Chats`.

    Raises:
        UserError: as `read_records` and `tokenize`; the files changed while they were read. UnsupportedError: images; a
            tokenizer that cannot be hashed.
    """

    columns: dict[str, Any] = {name: more.pop(name) for name in ("columns", "format") if name in more}
    columns["on_bad_row"] = on_bad_row
    how = Chats(**more)
    how.check(train_on)
    records = functools.partial(_each, source, columns, train_on, skips_empty=skips_empty, is_apart=how.is_apart)
    digest, seen = RecordsDigest(), Seen()
    counts = list[int]()
    for record in records(say=say, counts=counts):
        if record.images:
            raise UnsupportedError(
                f"{record.origin}: an image with data.streaming", "it is not proved", "leave out one"
            )
        digest.add(record)
        seen.add(record)
    options: dict[str, Any] = {"max_length": max_length, "too_long": too_long, "rows_per_example": 1}
    options |= {"train_on": train_on if isinstance(train_on, str) else sorted(train_on), "on_bad_row": on_bad_row}
    options |= {"are_generated": True} if how.are_generated else {}
    key = cache_key(digest, tokenizer, options | seen.tell(tokenizer, say))
    if key is None:
        rule = "the cache cannot tell it from another"
        raise UnsupportedError(f"data.streaming with {type(tokenizer).__name__}", rule, "use a fast tokenizer")

    def blocks() -> Iterator[Arrays]:
        again = RecordsDigest()

        def noted() -> Iterator[Record]:
            for record in records():
                again.add(record)
                yield record

        yield from token_blocks(noted(), tokenizer, processor=None, **options)
        if again.hexdigest() != digest.hexdigest():
            raise UserError("data", "the files changed while they were read", "start again")

    arrays = mapped(cache_dir, key, blocks, num_records=digest.number, max_length=max_length)

    def record_at(index: int) -> Record:
        return next(itertools.islice(records(), index, None))

    read = Read(record_at, digest.number, tokenizer, train_on, max_length, too_long)
    tokens = read.dataset(arrays, how, counts if how.is_apart else None, say=say)
    check_vocabulary(tokens, record_at, vocab_size)
    return tokens

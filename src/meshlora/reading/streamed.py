"""Tokens of files that do not fit into memory: `data.streaming`.

Owns: reading records anew for each pass, and tokens that stay in a file of the cache. Does not own: what the tokens are
(`tokenization.py`), the file (`cache.py`). Records are never held: one pass checks and hashes them, another tokenises
those that are not in the cache yet.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshlora.reading.answers_apart import Chats, beginnings
from meshlora.reading.bad_rows import ERROR
from meshlora.reading.cache import Arrays, RecordsDigest, cache_key, load_or_make
from meshlora.reading.chat import Seen
from meshlora.reading.prompt_styles import record_formats
from meshlora.reading.records import Record
from meshlora.reading.sources import Reading, each_row
from meshlora.reading.system_turn import with_system
from meshlora.reading.tokenization import Making, Read, check_vocabulary, token_blocks
from meshlora.reading.train_on import TrainOn, without_empty
from meshlora_ground.dataset import TokenizedDataset
from meshlora_ground.errors import UnsupportedError, UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class _Source:
    """Records that are read anew for each pass. Attributes: as of `read_streamed`; reading: without `say`."""

    source: Any
    reading: Reading
    train_on: TrainOn
    is_apart: bool
    skips_empty: bool
    prompt: str | None
    system: str | None

    def records(self, say: Callable[[str], None] | None = None, counts: list[int] | None = None) -> Iterator[Record]:
        """The records, or the beginnings of each, whose numbers are added to `counts`. say: told what is read."""
        rows = each_row(self.source, record_formats(self.prompt), dataclasses.replace(self.reading, say=say))
        rows = with_system(rows, self.system, say)
        if self.skips_empty:
            rows = without_empty(rows, self.train_on, say)
        if not self.is_apart:
            yield from rows
            return
        for row in rows:
            parts = [*beginnings(row, self.train_on)]
            yield from parts
            if counts is not None:
                counts.append(len(parts))

    def blocks(self, making: Making, digest: str) -> Iterator[Arrays]:
        """`token_blocks` of the records. digest: theirs, as they were. Raises: UserError: at the end, it is another."""
        again = RecordsDigest()

        def noted() -> Iterator[Record]:
            for record in self.records():
                again.add(record)
                yield record

        yield from token_blocks(noted(), making)
        if again.hexdigest() != digest:
            raise UserError("data", "the files changed while they were read", "start again")


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
    prompt: str | None = None,
    columns: Mapping[str, str] | None = None,
    format: str = "auto",
    on_bad_row: str = ERROR,
    say: Callable[[str], None] = lambda _: None,
    **chats: Any,
) -> TokenizedDataset:
    """The tokens of the records of `source`, as of `read_records` and `tokenize`, mapped from the cache.

    Raises:
        UserError: as `read_records` and `tokenize`; the files changed while they were read. UnsupportedError: images; a
            tokenizer that cannot be hashed.
    """
    how = Chats(**chats)
    how.check(train_on)
    has_template = bool(tokenizer.chat_template)
    reading = Reading(columns, format, None, on_bad_row, has_separator=True, has_template=has_template)
    read = _Source(source, reading, train_on, how.is_apart, skips_empty, prompt, how.system)
    digest, seen, counts = RecordsDigest(), Seen(), list[int]()
    for record in read.records(say, counts):  # what is wrong is said once, here
        if record.images:
            given = f"{record.origin}: an image with data.streaming"
            raise UnsupportedError(given, "it is not proved", "leave out one")
        digest.add(record)
        seen.add(record)
    making = Making(
        tokenizer,
        max_length=max_length,
        train_on=train_on,
        too_long=too_long,
        on_bad_row=on_bad_row,
        are_generated=how.are_generated,
    )
    key = cache_key(digest, tokenizer, making.key() | seen.tell(tokenizer, say))
    if key is None:  # the arrays have to lie in a file
        rule = "the cache cannot tell it from another"
        raise UnsupportedError(f"data.streaming with {type(tokenizer).__name__}", rule, "use a fast tokenizer")

    arrays = load_or_make(
        cache_dir,
        key,
        lambda: read.blocks(making, digest.hexdigest()),
        num_records=digest.number,
        max_length=max_length,
        is_mapped=True,
    )

    def record_at(index: int) -> Record:
        return next(itertools.islice(read.records(), index, None))  # slow, and rare: records that are named

    tokens = Read(record_at, digest.number, making).dataset(arrays, how, counts if how.is_apart else None, say=say)
    check_vocabulary(tokens, record_at, vocab_size)
    return tokens

"""The leading tokens of texts, without tokenising all of a long text.

Owns: how much of a long text is tokenised. Does not own: uses of the tokens (`tokenization.py`, `chat.py`).

A text is cut well beyond the tokens to keep. The cut changes the tokens next to it, and these are
dropped: the kept tokens end at least `_MARGIN` tokens before it. With a tokenizer that splits words first, the effect
cannot reach back past a word; BPE merges reach back a few tokens. For a unigram model that does not split words there
are artificial texts (one letter, repeated) where every token depends on the length: these get the tokens of the cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from meshlora_ground.errors import UserError, reason

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Span = tuple[int, int]  # characters [start, end)
Item = TypeVar("Item")

_MARGIN = 1000  # tokens
_CHARACTERS = 8  # per token in the first attempt: most texts have fewer; for others the cut is moved
_BATCH = 2**22  # characters per call to the tokenizer: enough to keep its threads busy, few enough for its memory


@dataclass(frozen=True)
class Leading:
    """The tokens of a text: all if `is_whole`, else the first `max_length`. offsets: per token, if requested."""

    ids: list[int]
    offsets: list[Span]
    is_whole: bool


def leading_tokens(
    texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, *, max_length: int, has_offsets: bool = False
) -> list[Leading]:
    """At least the first `max_length` tokens of each, without special ones. Raises: UserError: the tokenizer fails."""
    found: dict[int, Leading] = {}
    length = _CHARACTERS * (max_length + _MARGIN)
    pending = list(range(len(texts)))
    while pending:
        sizes = [min(length, len(text)) for text in texts]
        for batch in batches(pending, sizes.__getitem__):
            encoded = _encode([texts[index][:length] for index in batch], tokenizer, has_offsets=has_offsets)
            for place, index in enumerate(batch):
                ids = encoded["input_ids"][place]
                offsets = encoded["offset_mapping"][place] if has_offsets else []
                if length >= len(texts[index]):
                    found[index] = Leading(ids, offsets, is_whole=True)
                elif len(ids) >= max_length + _MARGIN:
                    found[index] = Leading(ids[:max_length], offsets[:max_length], is_whole=False)
        pending = [index for index in pending if index not in found]
        length *= 4
    return [found[index] for index in range(len(texts))]  # they were found in another order


def batches(items: Iterable[Item], size_of: Callable[[Item], int]) -> Iterator[list[Item]]:
    """`items` in order, in batches of at most `_BATCH` characters or one item."""
    batch: list[Item] = []
    total = 0
    for item in items:
        size = size_of(item)
        if batch and total + size > _BATCH:
            yield batch
            batch, total = [], 0
        batch.append(item)
        total += size
    if batch:
        yield batch


def _encode(texts: list[str], tokenizer: PreTrainedTokenizerBase, *, has_offsets: bool) -> Any:
    """Not verbose: texts longer than the model's context are truncated by us."""
    options = {"return_offsets_mapping": True, "return_token_type_ids": False} if has_offsets else {}
    try:
        return tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False, **options)
    except Exception as error:  # an untrusted tokenizer may raise anything
        rule = f"fails on the data ({reason(error)})"
        raise UserError(f"tokenizer {type(tokenizer).__name__}", rule, "is it whole?") from error

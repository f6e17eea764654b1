"""The first tokens of texts, however long these are.

Owns: how much of a long text is tokenised. Does not own: what the tokens are for (`tokenization.py`, `chat.py`).

A text is tokenised up to a cut well beyond the tokens that are kept. A cut changes the tokens beside it, and these are
dropped: what is kept ends `_MARGIN` tokens or more before it. A tokenizer that splits words first cannot reach farther
back than a word, and merges (BPE) reach back over a few tokens. Of a unigram model that does not split words there are
made-up texts (one letter, repeated) whose every token depends on their length: these get the tokens of their beginning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from meshlora.common.errors import UserError, reason

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Span = tuple[int, int]  # characters [start, end)
Item = TypeVar("Item")

_MARGIN = 1000  # tokens
_CHARACTERS = 8  # a token, at first: most texts have less, and those that have more are cut again
_BATCH = 2**22  # characters a call to the tokenizer: enough to keep its threads busy, few enough for its memory


@dataclass(frozen=True)
class Leading:
    """The tokens of a text: all where `is_whole`, else the first `max_length`. offsets: of each, where asked for."""

    ids: list[int]
    offsets: list[Span]
    is_whole: bool


def leading_tokens(
    texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, *, max_length: int, has_offsets: bool = False
) -> list[Leading]:
    """The first `max_length` tokens of each text, or a few more, with nothing added.

    Raises:
        UserError: the tokenizer fails on them.
    """
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
    return [found[index] for index in range(len(texts))]


def batches(items: Iterable[Item], size_of: Callable[[Item], int]) -> Iterator[list[Item]]:
    """`items` in order, as many at a time as have `_BATCH` characters together."""
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
    """Not verbose: a text longer than the model is our truncation's business."""
    options = {"return_offsets_mapping": True} if has_offsets else {}
    try:
        return tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False, **options)
    except Exception as error:  # a stranger's tokenizer may raise anything
        raise UserError(
            f"tokenizer {type(tokenizer).__name__}", f"fails on the data ({reason(error)})", "is it whole?"
        ) from error

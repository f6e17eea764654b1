"""Pairs of texts for an encoder-decoder: a prompt that its encoder reads, and the completion that it learns to write.

Owns: the fields of such records, and their tokens, as transformers' own examples make them: both texts by themselves,
with the tokenizer's special tokens. Does not own: what a decoder begins with (`meshlora_ground.encoded`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from meshlora.reading.formats import Format
from meshlora.reading.labelled import encoded
from meshlora.reading.records import filled_text
from meshlora.reading.sources import Reading, read_rows
from meshlora_ground.dataset import TokenizedDataset
from meshlora_ground.encoded import prompts, with_start

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase


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

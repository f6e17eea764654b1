"""From the files of a run to its tokens: one reader for each kind of record.

Owns: which reader an objective's records have. Does not own: any of them.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

from meshlora.reading.bad_rows import ERROR
from meshlora.reading.labelled import read_labelled, read_labelled_words, read_prompted, read_similar
from meshlora.reading.nlg import of_categories, parted
from meshlora.reading.preferences import read_feedback, read_margins, read_preferences
from meshlora.reading.rollouts import read_rollouts
from meshlora.reading.sources import read_records
from meshlora.reading.streamed import read_streamed
from meshlora.reading.taught import read_in_context, read_taught
from meshlora.reading.tokenization import tokenize
from meshlora.reading.train_on import without_empty
from meshlora_ground.dataset import TokenizedDataset


def _read_text(
    source: Any,
    tokenizer: Any,
    *,
    columns: Any,
    say: Any,
    format: str = "auto",
    categories: str = "all",
    separator: str = "",
    prompt: str | None = None,
    skips_empty: bool = False,
    **options: Any,
) -> TokenizedDataset:
    bad = options.get("on_bad_row", ERROR)  # tokenising has to know it, too
    has_template = bool(tokenizer.chat_template) and not separator  # which is of plain text
    written: dict[str, Any] = {"prompt": prompt, "has_template": has_template}
    records = read_records(source, columns=columns, format=format, say=say, on_bad_row=bad, **written)
    records = of_categories(records, categories)
    if skips_empty:
        records = list(without_empty(records, options.get("train_on", "all"), say))
    return tokenize(parted(records, separator), tokenizer, say=say, **options)


# Readers of records, by the `reader` of the objective, or for an encoder-decoder: from paths and a tokenizer to tokens.
READERS: Mapping[str, Callable[..., TokenizedDataset]] = {
    "text": _read_text,
    "streamed": read_streamed,
    "rollouts": read_rollouts,
    "rewarded": functools.partial(read_rollouts, is_rewarded=True),
    "spoken": functools.partial(read_rollouts, is_taught=True),
    "pairs": read_preferences,
    "margins": read_margins,
    "feedback": read_feedback,
    "taught": read_taught,
    "in_context": read_in_context,
    "labelled": read_labelled,
    "labelled_words": read_labelled_words,
    "similar": read_similar,
    "prompted": read_prompted,
}

"""Conversations become tokens, with the assistant's turns marked.

Owns: where in a rendered conversation the assistant speaks. Does not own: the template (the tokenizer's), truncation,
or plain text (`tokenization.py`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence as AbstractSequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from meshlora.data.records import Record
from meshlora.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Messages = AbstractSequence[dict[str, Any]]
Span = tuple[int, int]  # characters [start, end)

_GENERATION_MARKER = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


def tokenize_conversations(
    records: AbstractSequence[Record], tokenizer: PreTrainedTokenizerBase
) -> list[tuple[list[int], np.ndarray]]:
    """(token ids, is assistant `[S]` bool) of each conversation, whole, special tokens as the template writes them.

    Where the template says what the assistant generates (`{% generation %}`), that is what is marked. Otherwise the
    spans are found by rendering prefixes of the conversation: an assistant turn is what it adds to the conversation
    before it with a generation prompt, up to and including the eos token where it holds one (nothing is generated
    after that). A token on the border of a span counts as inside it.

    Both ways map characters to tokens here. The mask that `apply_chat_template` returns (seen in transformers 5.23)
    stops at a span whose first character is a space that the tokenizer trims from its offsets, runs on to the end of
    the conversation where the last one is, and drops the rest of a last character that is split over tokens.

    Raises:
        UserError: no chat template, a template that refuses a conversation or rewrites its earlier turns, or a
            tokenizer without character offsets.
    """
    template = _template(tokenizer)
    if not tokenizer.is_fast:
        raise UserError(
            f"tokenizer {type(tokenizer).__name__}",
            "has no character offsets, which conversations need to find the assistant's turns",
            "use a fast tokenizer (one with a tokenizer.json), or prompt and completion instead of messages",
        )
    has_markers = _GENERATION_MARKER.search(template) is not None
    texts: list[str] = []
    spans: list[list[Span]] = []
    for record in records:
        assert record.messages is not None, record.origin
        chat = _Chat(tokenizer, template, record.origin)
        text, marked = chat.render(record.messages, is_tracked=has_markers)
        texts.append(text)
        spans.append(marked if has_markers else chat.assistant_spans(record.messages, text))

    encoded = tokenizer(
        texts, add_special_tokens=False, return_offsets_mapping=True, return_attention_mask=False, verbose=False
    )
    rows = []
    for ids, offsets, of_one in zip(encoded.input_ids, encoded.offset_mapping, spans, strict=True):
        eos_token_id = None if has_markers else tokenizer.eos_token_id
        rows.append((ids, _is_assistant(ids, offsets, of_one, eos_token_id=eos_token_id)))
    return rows


def _template(tokenizer: PreTrainedTokenizerBase) -> str:
    try:
        template: str = tokenizer.get_chat_template()
    except ValueError:
        raise UserError(
            "records with messages",
            f"need a chat template; {tokenizer.name_or_path or type(tokenizer).__name__} has no default one",
            "use the instruction-tuned model's tokenizer, set tokenizer.chat_template, or give prompt and completion",
        ) from None
    return template


class _Chat:
    """One conversation's template and name."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: str, origin: str) -> None:
        self.tokenizer, self.template, self.origin = tokenizer, template, origin

    def render(
        self, messages: Messages, *, add_generation_prompt: bool = False, is_tracked: bool = False
    ) -> tuple[str, list[Span]]:
        """The text, and with `is_tracked` the spans inside `{% generation %}`: what `apply_chat_template` renders."""
        try:
            texts, spans = render_jinja_template(
                conversations=[list(messages)],
                chat_template=self.template,
                return_assistant_tokens_mask=is_tracked,
                add_generation_prompt=add_generation_prompt,
                **self.tokenizer.special_tokens_map,
            )
        except (TemplateError, TypeError, KeyError) as error:
            raise UserError(
                f"{self.origin}: {len(messages)} messages ({', '.join(message['role'] for message in messages)})",
                f"the chat template refuses them ({error})",
                "reorder or drop these messages, or use another chat template",
            ) from error
        return texts[0], spans[0] if is_tracked else []

    def assistant_spans(self, messages: Messages, text: str) -> list[Span]:
        """Spans of the assistant's turns in `text`, the whole conversation rendered, for a template without markers."""
        if messages[0]["role"] == "assistant":
            raise self._cannot_derive("starts with an assistant turn, which no generation prompt leads to")
        spans = []
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before, _ = self.render(messages[:index], add_generation_prompt=True)
            through, _ = self.render(messages[: index + 1])
            if not through.startswith(before):
                raise self._cannot_derive(f"messages[{index}] does not continue the generation prompt before it")
            if not text.startswith(through):
                raise self._cannot_derive(f"messages[{index}] is rendered differently once later messages follow")
            spans.append((len(before), len(through)))
        return spans

    def _cannot_derive(self, reason: str) -> UserError:
        return UserError(
            f"{self.origin}: a conversation under a chat template without {{% generation %}}",
            f"the assistant's turns cannot be told from the rest: {reason}",
            "put {% generation %} … {% endgeneration %} around the assistant's turns in the chat template, "
            "or give prompt and completion",
        )


def _is_assistant(
    ids: AbstractSequence[int],
    offsets: AbstractSequence[Span],
    spans: AbstractSequence[Span],
    *,
    eos_token_id: int | None,
) -> np.ndarray:
    """bool `[S]`: the tokens that overlap a span, each span cut after its last `eos_token_id` where it has one."""
    starts, ends = np.array(offsets, dtype=np.int64).reshape(-1, 2).T
    # A tokenizer may trim a token of spaces to the empty range at its end: it still stands for the character before.
    starts = np.minimum(starts, ends - 1)
    result = np.zeros(len(ids), dtype=bool)
    for start, end in spans:
        (inside,) = np.nonzero((ends > start) & (starts < end))
        ends_turn = [position for position in inside.tolist() if ids[position] == eos_token_id]
        if ends_turn:
            inside = inside[inside <= ends_turn[-1]]
        result[inside] = True
    return result

"""Conversations become tokens, with the assistant's turns marked.

Owns: where in a rendered conversation the assistant speaks, and which turns are not trained. Does not own: the template
(the tokenizer's), the process in which it runs (`common.limits`), truncation, or plain text (`tokenization.py`).
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator
from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from transformers.utils.chat_template_utils import render_jinja_template

from meshlora.common.errors import UserError
from meshlora.common.limits import Failed, each_apart
from meshlora.data.leading import Leading, Span, batches, leading_tokens
from meshlora.data.records import Record, listed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Messages = AbstractSequence[dict[str, Any]]

_GENERATION_MARKER = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_READ_BY_US = {"role", "content", "weight"}
# transformers shows a template each of them under the names of the others.
_REASONING = {"reasoning_content", "reasoning", "thinking"}
# What a template may take for one conversation, and make of it. An honest one takes milliseconds, and writes little
# more than it was given.
_SECONDS = 5.0
_MEMORY_BYTES = 2**29
_MAX_CHARACTERS = 2**25


@dataclass(frozen=True)
class _Rendered:
    """A conversation as text. turns: of the assistant, those to train. left_out: those with weight 0."""

    text: str
    turns: list[Span]
    left_out: list[Span]


def tokenize_conversations(
    records: AbstractSequence[Record],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int,
    trains_all: bool = False,
) -> list[tuple[list[int], np.ndarray]]:
    """(token ids, is trained `[S]` bool) of each conversation, special tokens as the template writes them: whole, or
    at least its first `max_length` tokens.

    Where the template says what the assistant generates (`{% generation %}`), that is what is marked. Otherwise the
    spans are found by rendering prefixes of the conversation: an assistant turn is what it adds to the conversation
    before it with a generation prompt, up to and including the eos token where it holds one (nothing is generated
    after that). A token on the border of a span counts as inside it. A turn with `weight: 0` is not trained, nor is it
    with `trains_all`, where everything else is.

    Both ways map characters to tokens here. The mask that `apply_chat_template` returns (seen in transformers 5.23)
    stops at a span whose first character is a space that the tokenizer trims from its offsets, runs on to the end of
    the conversation where the last one is, and drops the rest of a last character that is split over tokens.

    Raises:
        UserError: no chat template, a template that refuses a conversation, rewrites its earlier turns or takes too
            long, or a tokenizer without character offsets.
    """
    template = chat_template(tokenizer)
    if not tokenizer.is_fast:
        raise UserError(
            f"tokenizer {type(tokenizer).__name__}",
            "has no character offsets, which conversations need to find the assistant's turns",
            "use a fast tokenizer (one with a tokenizer.json), or prompt and completion instead of messages",
        )
    has_markers = _GENERATION_MARKER.search(template) is not None
    # Where nothing is generated after eos, a span ends with it.
    eos = None if has_markers else tokenizer.eos_token_id
    rows = []
    rendered = _rendered(records, template, dict(tokenizer.special_tokens_map), has_markers=has_markers)
    for batch in batches(rendered, lambda found: len(found.text)):
        texts = [found.text for found in batch]
        for found, tokens in zip(
            batch, leading_tokens(texts, tokenizer, max_length=max_length, has_offsets=True), strict=True
        ):
            inside = functools.partial(_inside, tokens, found.text, eos=eos, eos_text=tokenizer.eos_token or "")
            is_trained = np.ones(len(tokens.ids), dtype=bool) if trains_all else inside(found.turns)
            rows.append((tokens.ids, is_trained & ~inside(found.left_out)))
    return rows


def tell_unnamed_keys(
    records: AbstractSequence[Record], tokenizer: PreTrainedTokenizerBase, say: Callable[[str], None]
) -> None:
    """Say which keys of messages the chat template does not name, and hence does not read.

    Raises:
        UserError: no chat template.
    """
    first: dict[str, str] = {}  # key -> where it was met first
    for record in records:
        for message in record.messages or ():
            for key in message:
                if key not in _READ_BY_US:
                    first.setdefault(key, record.origin)
    template = chat_template(tokenizer) if first else ""
    unnamed = {
        key: origin
        for key, origin in first.items()
        if not any(
            re.search(rf"(?<!\w){re.escape(name)}(?!\w)", template)
            for name in (_REASONING if key in _REASONING else (key,))
        )
    }
    if unnamed:
        say(f"{next(iter(unnamed.values()))}: messages have {listed(unnamed)}, which the chat template does not name")


def chat_template(tokenizer: PreTrainedTokenizerBase) -> str:
    """The default one.

    Raises:
        UserError: there is none.
    """
    name = tokenizer.name_or_path or type(tokenizer).__name__
    try:
        template: object = tokenizer.get_chat_template()
    except ValueError:
        raise UserError(
            "records with messages",
            f"need a chat template; {name} has no default one",
            "use the instruction-tuned model's tokenizer, set tokenizer.chat_template, or give prompt and completion",
        ) from None
    if not isinstance(template, str):
        raise UserError(f"the chat template of {name}", f"is a {type(template).__name__}, not a text")
    return template


def _rendered(
    records: AbstractSequence[Record], template: str, special_tokens: dict[str, Any], *, has_markers: bool
) -> Iterator[_Rendered]:
    def work(record: Record) -> tuple[str, list[Span], list[Span]]:
        return _Chat(template, special_tokens, record, has_markers=has_markers).spans()

    results = each_apart(work, records, seconds=_SECONDS, memory_bytes=_MEMORY_BYTES)
    with contextlib.closing(results):
        for record, result in zip(records, results, strict=False):
            if isinstance(result, Failed):
                messages = record.messages or ()
                roles = ", ".join(message["role"] for message in messages[:10]) + (", …" if len(messages) > 10 else "")
                raise UserError(
                    f"{record.origin}: {len(messages)} messages ({roles})",
                    f"the chat template refuses them, or fails on them ({result.reason})",
                    "reorder or drop these messages, or use another chat template",
                )
            text, turns, left_out = cast(tuple[str, list[Span], list[Span]], result)
            yield _Rendered(text, turns, left_out)


class _Chat:
    """One conversation and its template. Used apart: whatever a template does, it may."""

    def __init__(self, template: str, special_tokens: dict[str, Any], record: Record, *, has_markers: bool) -> None:
        assert record.messages is not None, record.origin
        self.template, self.special_tokens, self.has_markers = template, special_tokens, has_markers
        self.record, self.messages = record, record.messages

    def spans(self) -> tuple[str, list[Span], list[Span]]:
        """(text, turns to train, turns left out)."""
        text, marked = self._render(self.messages)
        turns = [index for index, message in enumerate(self.messages) if message["role"] == "assistant"]
        is_left_out = [self.messages[index].get("weight") == 0 for index in turns]
        if self.has_markers and not any(is_left_out):
            return text, marked, []
        spans = self._marked_turns(turns, marked) if self.has_markers else self._derived_turns(turns, text)
        return (
            text,
            [span for span, is_out in zip(spans, is_left_out, strict=True) if not is_out],
            [span for span, is_out in zip(spans, is_left_out, strict=True) if is_out],
        )

    def _render(self, messages: Messages, *, add_generation_prompt: bool = False) -> tuple[str, list[Span]]:
        """The text, and the spans inside `{% generation %}`: what `apply_chat_template` renders."""
        texts, spans = render_jinja_template(
            conversations=[list(messages)],
            chat_template=self.template,
            return_assistant_tokens_mask=self.has_markers,
            add_generation_prompt=add_generation_prompt,
            **self.special_tokens,
        )
        text: str = texts[0]
        if len(text) > _MAX_CHARACTERS:
            raise ValueError(f"its text is longer than {_MAX_CHARACTERS:,} characters")
        return text, spans[0] if self.has_markers else []

    def _marked_turns(self, turns: list[int], marked: list[Span]) -> list[Span]:
        """`marked`, one span for each of `turns`, shown by how many there are as the conversation grows."""
        for number, index in enumerate(turns, start=1):
            if len(marked) != len(turns) or len(self._render(self.messages[: index + 1])[1]) != number:
                raise UserError(
                    f"{self.record.origin}: a turn with weight 0",
                    "the chat template does not put {% generation %} around each of the assistant's turns once, so it "
                    "cannot be told which is which",
                    "end the conversation before that turn, or use another chat template",
                )
        return marked

    def _derived_turns(self, turns: list[int], text: str) -> list[Span]:
        """Spans of `turns` in `text`, the whole conversation rendered, for a template without markers."""
        if turns[0] == 0:
            raise self._cannot_derive("starts with an assistant turn, which no generation prompt leads to")
        spans = []
        for index in turns:
            before, _ = self._render(self.messages[:index], add_generation_prompt=True)
            through, _ = self._render(self.messages[: index + 1])
            if not through.startswith(before):
                raise self._cannot_derive(f"messages[{index}] does not continue the generation prompt before it")
            if not text.startswith(through):
                raise self._cannot_derive(f"messages[{index}] is rendered differently once later messages follow")
            spans.append((len(before), len(through)))
        return spans

    def _cannot_derive(self, words: str) -> UserError:
        return UserError(
            f"{self.record.origin}: a conversation under a chat template without {{% generation %}}",
            f"the assistant's turns cannot be told from the rest: {words}",
            "put {% generation %} … {% endgeneration %} around the assistant's turns in the chat template, "
            "or give prompt and completion",
        )


def _inside(tokens: Leading, text: str, spans: AbstractSequence[Span], *, eos: int | None, eos_text: str) -> np.ndarray:
    """bool `[S]`: the tokens that overlap a span of `text`, each span cut after its last `eos` where it has one."""
    starts, ends = np.array(tokens.offsets, dtype=np.int64).reshape(-1, 2).T
    # A tokenizer may trim a token of spaces to the empty range at its end: it still stands for the character before.
    starts = np.minimum(starts, ends - 1)
    end_of_tokens = len(text) if tokens.is_whole else int(ends.max())
    result = np.zeros(len(tokens.ids), dtype=bool)
    for start, end in spans:
        if start >= end_of_tokens:
            continue
        (inside,) = np.nonzero((ends > start) & (starts < end))
        ends_turn = [position for position in inside.tolist() if tokens.ids[position] == eos]
        # Of what was not tokenised, the text says whether there is one more.
        if ends_turn and eos_text not in text[end_of_tokens:end]:
            inside = inside[inside <= ends_turn[-1]]
        result[inside] = True
    return result

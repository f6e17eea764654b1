"""Tokenisation of conversations, with the trained turns marked.

Owns: rendering a conversation, the turns of other roles in it, and the placeholders of images. Does not own: which
turns are trained (`train_on.py`), where an answer begins and ends (`turns.py`), the template (the tokenizer's), the
process it runs in (`meshlora_ground.apart`), plain text (`tokenization.py`), reading images (`images.py`).
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import itertools
import json
import re
from collections.abc import Callable, Iterator
from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
from transformers.utils.chat_template_utils import render_jinja_template

from meshlora.reading import lost as kinds
from meshlora.reading.clock import stop_clock, written_day
from meshlora.reading.conversations import REASONING
from meshlora.reading.images import read_image
from meshlora.reading.leading import Leading, Span, batches, leading_tokens
from meshlora.reading.named_templates import fitting_templates
from meshlora.reading.records import Record, listed, without_paths
from meshlora.reading.train_on import TrainOn, chosen, is_empty, left_out
from meshlora.reading.turns import FAILURES, Ends, Messages, NothingError, Turns, UntoldError, after_prompt
from meshlora_ground.apart import Failed, each_apart
from meshlora_ground.errors import UnsupportedError, UserError, reason
from meshlora_ground.files import read_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_GENERATION_MARKER = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
# Attributes of a tokenizer.
_STOPS, _FORM = "further_stop_tokens", "form_of_its_records"
# Forms of records: what asks for an answer is a conversation, or a text.
CONVERSATIONS, TEXTS = "conversations", "texts"
# Keys of messages whose loss is told otherwise: of reasoning by what is rendered (`turns.py`).
_READ_BY_US = {"role", "content", "weight", *REASONING}
# Kinds of marks.
_OF_REASONING, _OF_CONTENT = {"reasoning", "field"}, {"content", "reasoning"}
# Limits of rendering one conversation. An honest template takes milliseconds, and its text is little longer than its
# input.
_SECONDS = 5.0
_MEMORY_BYTES = 2**29
_MAX_CHARACTERS = 2**25
_MOST_ENDED = 20  # processes that conversations may end where these are passed over


class Row(NamedTuple):
    """A tokenised record: all tokens, or at least the first `max_length`.

    is_trained: bool `[S]`. whole: how many of the first tokens must not be cut, as they stand for images. lost: what
    is so of the trained answers (`lost.KINDS`). lost_words: the texts that the template leaves out of them, each with
    the number of the tokens before it. ends: the number of tokens up to the end of each answer, if all is trained.
    """

    ids: list[int]
    is_trained: np.ndarray
    whole: int = 0
    lost: tuple[str, ...] = ()
    lost_words: tuple[tuple[int, str], ...] = ()
    ends: tuple[int, ...] = ()


class _Spans(NamedTuple):
    """A conversation as text. turns: those to train. left_out: those that are not trained, whatever else is. lost: as
    in `Row`; lost_words, ends: too, with places in the text.
    """

    text: str
    turns: list[Span]
    left_out: list[Span]
    lost: list[str]
    lost_words: list[tuple[int, str]]
    ends: AbstractSequence[int] = ()


def tokenize_conversations(
    records: AbstractSequence[Record],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int,
    train_on: TrainOn,
    processor: Any,
    skips: bool = False,
    are_generated: bool = False,
) -> list[Row | None]:
    """The tokens of each conversation, with the special tokens of the template.

    If the template marks what the assistant generates (`{% generation %}`), that is a turn of the assistant. Otherwise
    it is what the assistant writes after the generation prompt, up to the first token that the model stops at
    (`turns.py`). Adjacent messages of another role are one turn: all text that they add, the header that names the role
    included. A token that overlaps a turn counts as inside. A turn with `weight: 0` is never trained; with train_on
    "everything" all else is.

    In both cases characters are mapped to tokens here. The mask of `apply_chat_template` (seen in transformers 5.23)
    stops at a span that starts with a space trimmed from the tokenizer's offsets, runs to the end of the conversation
    if a span ends with one, and drops the rest of a final character that is split over tokens.

    skips: None stands for a conversation that the template refuses, of which it cannot be told what is trained, or
    whose images cannot be read.
    processor: of transformers, if some have images. What it puts into the text for an image is never trained.
    are_generated: a last answer follows the generation prompt as its content is given (`data.answers`).

    Raises:
        UserError: no chat template; a template that refuses a conversation, or takes too long; one under which it
            cannot be told which text is a trained turn; a tokenizer without character offsets.
    """
    template = _template_of(tokenizer)
    for record in records:
        _check_tools(record, tokenizer)
    if not tokenizer.is_fast:
        rule = "has no character offsets, which conversations need to find the assistant's turns"
        way_out = "use a fast tokenizer (one with a tokenizer.json), or prompt and completion instead of messages"
        raise UserError(f"tokenizer {type(tokenizer).__name__}", rule, way_out)
    rows: list[Row | None] = [None] * len(records)
    every = _rendered(records, template, train_on=train_on, skips=skips, are_generated=are_generated)
    rendered = ((place, *found) for place, found in enumerate(every) if found is not None)
    for batch in batches(rendered, lambda one: len(one[2].text)):
        each = []
        for place, record, spans in batch:
            found, with_images, placeholders = spans, None, list[Span]()
            if record.images:
                try:
                    found, with_images, placeholders = _with_placeholders(record, spans, processor)
                except UserError:
                    if skips:
                        continue
                    raise
            each.append((place, found, with_images, placeholders))
        texts = [found.text for _, found, tokens, _ in each if tokens is None]
        of_text = iter(leading_tokens(texts, tokenizer, max_length=max_length, has_offsets=True))
        for place, found, with_images, placeholders in each:
            tokens = with_images or next(of_text)
            rows[place] = _row(tokens, found, placeholders, has_all=train_on == "everything")
    return rows


def _row(tokens: Leading, found: _Spans, placeholders: list[Span], *, has_all: bool) -> Row:
    """The row of a conversation. has_all: everything is trained but what is left out, and placeholders of images."""
    offsets = np.fromiter(itertools.chain.from_iterable(tokens.offsets), np.int64, 2 * len(tokens.ids)).reshape(-1, 2)
    inside = functools.partial(_inside, offsets, len(found.text) if tokens.is_whole else int(offsets[:, 1].max()))
    is_trained = np.ones(len(tokens.ids), dtype=bool) if has_all else inside(found.turns)
    is_trained &= ~inside(found.left_out)
    of_images = inside(placeholders)
    whole = int(of_images.nonzero()[0].max(initial=-1)) + 1
    ends = offsets[:, 1].tolist() if found.lost_words or found.ends else []
    words = tuple((bisect.bisect_right(ends, at), text) for at, text in found.lost_words)
    of_turns = tuple(bisect.bisect_right(ends, at) for at in found.ends)
    return Row(tokens.ids, is_trained & ~of_images, whole, tuple(found.lost), words, of_turns)


def conversation_prompts(records: AbstractSequence[Record], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Each conversation as text, with what leads to the assistant's next turn. Raises: as `tokenize_conversations`."""
    template = _template_of(tokenizer)
    for record in records:
        _check_tools(record, tokenizer)
        if record.images:
            raise UnsupportedError(f"{record.origin}: an image", "nothing is generated from images", "leave it out")
    rendered = _rendered(records, template, leads_on=True, train_on="all")
    return [found[1].text for found in rendered if found is not None]


def _check_tools(record: Record, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse tools that the template at hand was not written for."""
    if record.tools and isinstance(tokenizer.chat_template, dict) and "tool_use" in tokenizer.chat_template:
        rule = "the tokenizer has a template of its own for them, tool_use, and the default one is used here"
        raise UserError(f"{record.origin}: a conversation with tools", rule, "give data.chat_template: tool_use")


def _with_placeholders(record: Record, found: _Spans, processor: Any) -> tuple[_Spans, Leading, list[Span]]:
    """(a conversation whose text has the placeholders of its images, all of its tokens, spans of the placeholders)."""
    origin = record.origin
    images = [read_image(Path(path), origin) for path in record.images]
    try:
        made = processor(
            text=[found.text],
            images=[images],
            add_special_tokens=False,
            return_offsets_mapping=True,
            return_text_replacement_offsets=True,
        )
    except Exception as error:  # processors raise anything
        given = f"{origin}: {len(images)} image{'s' if len(images) > 1 else ''}"
        way_out = f"does the chat template name each once, and no text contain {processor.image_token!r}?"
        raise UserError(given, f"the processor refuses them ({reason(error)})", way_out) from error
    (replaced,) = made["text_replacement_offsets"]
    ends = [one["span"][1] for one in replaced]
    gained = [0, *(one["new_span"][1] - one["span"][1] for one in replaced)]

    def moved(span: Span) -> Span:
        start, end = (at + gained[bisect.bisect_right(ends, at)] for at in span)
        return start, end

    text = found.text
    for one_image in reversed(replaced):
        start, end = one_image["span"]
        text = text[:start] + one_image["replacement"] + text[end:]
    turns, left_out = [*map(moved, found.turns)], [*map(moved, found.left_out)]
    words = [(moved((place, place))[0], lost) for place, lost in found.lost_words]
    (ids,), (offsets,) = made["input_ids"], made["offset_mapping"]
    tokens = Leading(list(ids), list(map(tuple, offsets)), is_whole=True)
    return _Spans(text, turns, left_out, found.lost, words), tokens, [one["new_span"] for one in replaced]


class Seen:
    """What of records concerns the chat template: keys of messages, and tools, that it may not name, so not read."""

    def __init__(self) -> None:
        self._first: dict[str, str] = {}  # key -> origin of the first message with it
        self._has_conversations = self._has_records = False

    def add(self, record: Record) -> None:
        self._has_conversations |= record.messages is not None
        self._has_records = True
        if record.tools:
            self._first.setdefault("tools", record.origin)
        for message in record.messages or ():
            for key in message:
                if key not in _READ_BY_US:
                    self._first.setdefault(key, record.origin)

    def tell(self, tokenizer: PreTrainedTokenizerBase, say: Callable[[str], None] | None) -> dict[str, Any]:
        """What decides the tokens of the records beside the template, for the cache's key. say: told what the template
        does not read, and the date that it writes.

        Raises:
            UserError: no chat template.
        """
        if self._has_records:
            # Beside conversations, texts are further data: the model answers as it is asked in a conversation.
            has_some = self._has_conversations or form_read(tokenizer) == CONVERSATIONS
            setattr(tokenizer, _FORM, CONVERSATIONS if has_some else TEXTS)
        found: dict[str, Any] = {"stops": stop_tokens(tokenizer)}
        if self._has_conversations and (day := written_day(tokenizer)) is not None:
            found["date"] = day
        if say is None:
            return found
        template = chat_template(tokenizer) if self._first else ""
        unnamed = {k: o for k, o in self._first.items() if not re.search(rf"(?<!\w){re.escape(k)}(?!\w)", template)}
        if unnamed:
            first = next(iter(unnamed.values()))
            say(f"{first}: messages have {listed(unnamed)}, which the chat template does not name")
        if "date" in found:
            say(f"the chat template writes the date: {found['date']} (data.date)")
        return found


def form_read(tokenizer: PreTrainedTokenizerBase) -> str:
    """The form of the records that `tokenizer` has read so far: conversations, or texts alone; "" if it has none."""
    form: str = getattr(tokenizer, _FORM, "")
    return form


def chat_template(tokenizer: PreTrainedTokenizerBase) -> str:
    """The tokenizer's default chat template. Raises: UserError: it has none."""
    name = tokenizer.name_or_path or type(tokenizer).__name__
    try:
        template: object = tokenizer.get_chat_template()
    except ValueError:
        named = ", ".join(fitting_templates(tokenizer))
        way_out = f"give data.chat_template: a file, or one of {named}" if named else "give data.chat_template: a file"
        way_out += ", the instruction-tuned model's tokenizer, or prompt and completion"
        raise UserError("records with messages", f"need a chat template; {name} has no default one", way_out) from None
    if not isinstance(template, str):
        raise UserError(f"the chat template of {name}", f"is a {type(template).__name__}, not a text")
    return template


@dataclass(frozen=True)
class _Template:
    """A chat template, and what of its tokenizer it takes: texts of special tokens by name.

    has_markers: it says itself what the assistant generates. day: at which its clock stands, if it asks for it.
    """

    text: str
    special_tokens: dict[str, Any]
    ends: Ends
    has_markers: bool
    day: str | None


def _template_of(tokenizer: PreTrainedTokenizerBase) -> _Template:
    """Raises: UserError: it has none."""
    text = chat_template(tokenizer)
    special = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    ends = Ends.of(stop_tokens(tokenizer), [*special, *tokenizer.all_special_tokens])
    has_markers = _GENERATION_MARKER.search(text) is not None
    return _Template(text, dict(tokenizer.special_tokens_map), ends, has_markers, written_day(tokenizer))


def add_stop_tokens(tokenizer: PreTrainedTokenizerBase, tokens: AbstractSequence[str]) -> None:
    """Let the model stop at these too: `data.stop_tokens`. Raises: UserError: one is no token."""
    ids = []
    for token in tokens:
        found: list[int] = tokenizer(token, add_special_tokens=False, verbose=False).input_ids
        if len(found) != 1:
            rule = f"it is {len(found)} tokens of this tokenizer, and a model stops at one"
            raise UserError(f"data.stop_tokens: {token!r}", rule, "name a token, as in <|im_end|>")
        ids += found
    setattr(tokenizer, _STOPS, ids)


def stop_tokens(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The texts of the tokens at which a model stops: eos, those of the model in the tokenizer's folder, as
    transformers reads them for generation, and those of `add_stop_tokens`.
    """
    eos = tokenizer.eos_token
    further = _ids_of_generation(tokenizer)
    return [*([] if eos is None else [str(eos)]), *(text for each in further if (text := tokenizer.decode([each])))]


def stop_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    eos: list[int] = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return [*eos, *_ids_of_generation(tokenizer)]


def further_stops(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The texts of the tokens of `add_stop_tokens`."""
    return [tokenizer.decode([number]) for number in getattr(tokenizer, _STOPS, [])]


def _ids_of_generation(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Of `generation_config.json` in the tokenizer's folder, without that file of `config.json`; and those added."""
    added: list[int] = getattr(tokenizer, _STOPS, [])
    if not (name := getattr(tokenizer, "name_or_path", "")):
        return added
    folder = Path(name)
    files = [file for name in ("generation_config.json", "config.json") if (file := folder / name).is_file()]
    found = read_json(files[0]) if files else {}
    if not isinstance(found, dict):
        raise UserError(f"{files[0]}", "it must be a JSON object", "copy the file again")
    given = found.get("eos_token_id")
    ids = [] if given is None else given if isinstance(given, list) else [given]
    if not all(type(each) is int for each in ids):  # a bool is none
        raise UserError(f"{files[0]}: eos_token_id={given!r:.60}", "it is a token's number, or a list of numbers")
    return [*(each for each in ids if each >= 0), *added]


def _rendered(
    records: AbstractSequence[Record],
    template: _Template,
    *,
    train_on: TrainOn,
    leads_on: bool = False,
    skips: bool = False,
    are_generated: bool = False,
) -> Iterator[tuple[Record, _Spans] | None]:
    """leads_on: to the assistant's next turn, without spans. skips: None for a conversation that is refused."""

    def work(record: Record) -> _Spans | None:
        if template.day is not None:
            stop_clock(template.day)
        try:
            chat = _Chat(template, record, train_on=train_on, are_generated=are_generated)
            if leads_on:
                return _Spans(chat.text(chat.messages, True), [], [], [], [])
            return chat.spans()
        except (UserError, *FAILURES):
            if skips:
                return None
            raise

    start, ended = 0, 0
    while start < len(records):
        results = each_apart(work, records[start:], seconds=_SECONDS, memory_bytes=_MEMORY_BYTES)
        with contextlib.closing(results):
            for result in results:
                record, start = records[start], start + 1
                if result is None:
                    yield None
                elif not isinstance(result, Failed):
                    yield record, _Spans(*cast(_Spans, result))
                elif skips and ended < _MOST_ENDED:  # the others follow in another process
                    ended += 1
                    yield None
                else:
                    raise _refused(record, result.reason)


def _refused(record: Record, why: str) -> UserError:
    messages = record.messages or ()
    roles = ", ".join(message["role"] for message in messages[:10]) + (", …" if len(messages) > 10 else "")
    given = f"{record.origin}: {len(messages)} messages ({roles})"
    rule = f"the chat template refuses them, or fails on them ({why})"
    return UserError(given, rule, "reorder or drop these messages, or use another chat template")


class _Chat:
    """One conversation and its template, for use in a separate process: the template is untrusted code."""

    def __init__(self, template: _Template, record: Record, *, train_on: TrainOn, are_generated: bool = False) -> None:
        assert record.messages is not None, record.origin
        self.template, self.has_markers = template, template.has_markers
        self.tools = None if record.tools is None else list(record.tools)
        self.record, self.messages = record, [*map(without_paths, record.messages)]
        self.train_on = train_on
        # The answer that is taken as it is given.
        self.generated = len(self.messages) - 1 if are_generated and self.messages[-1]["role"] == "assistant" else None
        if not record.images and any(map(_has_parts, self.messages)) and not self._reads_parts():
            self.messages = [*map(_joined, self.messages)]
        if not _reads_text(template.text) and self._reads_parts():  # as those of LLaVA and Idefics
            self.messages = [*map(_in_parts, self.messages)]
        if any(message.get("content") is None or message.get("tool_calls") for message in self.messages):
            self.messages = self._as_read()

    def spans(self) -> _Spans:
        """Its text, what of it is trained, and what is lost."""
        has_all, wanted = self.train_on == "everything", chosen(self.messages, self.train_on)
        out = [index for index in left_out(self.messages) if has_all or index in wanted]
        trained = [index for index in wanted if index not in out]
        of_assistant = chosen(self.messages, "all")
        # An answer that is not trained has no need of a place, unless all around it is trained.
        answers = [index for index in (*trained, *(out if has_all else ())) if index in of_assistant]
        turns = self._turns()
        marked = self._render(self.messages)[1] if self.has_markers and not has_all else None
        lost, words = self._lost(turns, trained, marked)
        gone = [index for index in trained if turns.is_gone(index)]
        if gone:
            trained, answers = ([index for index in own if index not in gone] for own in (trained, answers))
            lost += [kinds.NOTHING] * (not has_all and not trained)
        if has_all and not out:
            return _Spans(turns.text, [], [], lost, words, turns.ends(of_assistant))
        if self.has_markers:
            marked = self._render(self.messages)[1] if marked is None else marked
            if trained == of_assistant and not out and self.generated is None:
                return _Spans(turns.text, marked, [], lost, words)
            spans = self._marked_turns(turns, answers, marked) if answers else {}
        else:
            placed = {index: self._span(turns, index) for index in answers}
            spans = {index: span for index, span in placed.items() if span is not None}
            if not all(turns.is_ended(spans[index]) for index in answers if index in trained and index in spans):
                lost.append(kinds.NO_END)
            for index in answers:
                if is_empty(self.messages[index]):
                    lost.append(kinds.EMPTY if index in spans else kinds.LEFT_OUT)
        if self.generated is not None and self.generated in trained and self.generated in spans:
            return self._generated(turns, self.generated, spans[self.generated], lost, words)
        spans |= self._turns_of_others([index for index in (*trained, *out) if index not in of_assistant], turns)
        of_each = [[spans[index] for index in own if index in spans] for own in (trained, out)]
        return _Spans(turns.text, of_each[0], of_each[1], lost, words, turns.ends(of_assistant) if has_all else ())

    def _generated(self, turns: Turns, index: int, span: Span, lost: list[str], words: list[tuple[int, str]]) -> _Spans:
        """The generation prompt, the content of message `index`, and what the template writes after it: calls, an end.

        span: of the message in the rendering.
        """
        message, (start, end) = self.messages[index], span
        content, calls = turns.places(index, _OF_CONTENT), turns.places(index, ("call", "name"))
        parts = message["content"] if _has_parts(message) else [{"text": message.get("content") or ""}]
        given = "".join(part.get("text", "") for part in parts)
        if any(map(message.get, REASONING)):
            raise self._has_no_form(index, "reasoning in a field, which has no form of its own")
        if any("text" not in part for part in parts):
            raise self._has_no_form(index, "an image")
        if given.strip() and not content:
            raise self._has_no_form(index, "content of which the template writes nothing")
        if content and calls and min(calls) < max(content):
            raise self._has_no_form(index, "calls that the template writes before its content")
        prompt = self.text(self.messages[:index], True)
        answer, is_open = after_prompt(prompt, given)
        lost += [kinds.UNCLOSED] * is_open
        text = prompt + answer + turns.text[max(content, default=start) : end]
        return _Spans(text, [(len(prompt), len(text))], [], lost, [(len(text), each) for _, each in words])

    def _has_no_form(self, index: int, what: str) -> UserError:
        given, rule = (
            f"{self.record.origin}: messages[{index}]",
            f"it has {what}, and so cannot be taken as it is given",
        )
        return UserError(given, rule, "put reasoning into the content, or leave out data.answers: as_generated")

    def _turns(self) -> Turns:
        try:
            return Turns(self.messages, self.text, self.template.ends, avoid=self.template.text)
        except UntoldError as error:
            raise self._untold("a conversation", str(error)) from None

    def _span(self, turns: Turns, index: int) -> Span | None:
        """None: of an answer that has no place, as it has no text, or the template writes nothing of it."""
        try:
            return turns.span(index)
        except UntoldError as error:
            if is_empty(self.messages[index]) or isinstance(error, NothingError):
                return None
            raise self._untold(f"messages[{index}], an answer to train", str(error)) from None

    def _lost(
        self, turns: Turns, trained: list[int], marked: list[Span] | None
    ) -> tuple[list[str], list[tuple[int, str]]]:
        """(what is so of the trained messages, the words of them that are not rendered). marked: the spans inside
        `{% generation %}`, outside of which no answer is trained; None: they are not what is trained.
        """
        found, words = list[str](), list[tuple[int, str]]()
        for index in trained:
            lost, outside = turns.lost.get(index, set()), set[str]()
            if self.messages[index]["role"] == "assistant":
                if marked is not None and index != self.generated:
                    outside = turns.outside(index, marked)
                    lost = lost | outside
                found.append(kinds.ANSWER)
                reasoned = turns.kinds.get(index, set()) & _OF_REASONING
                if reasoned and (index == self.generated or not lost & _OF_REASONING):
                    found.append(kinds.REASONED)
            if index == self.generated:
                lost = lost - _OF_CONTENT
            if not lost:
                continue
            words += turns.lost_words(index, lost)
            alone = {kinds.AS_KIND[kind] for kind in turns.lost_as_last(index) | outside}
            for kind in sorted({kinds.AS_KIND[kind] for kind in lost}):
                found.append(kind if kind in alone else kinds.earlier(kind))
            found += [kinds.LAST] * (index == trained[-1]) + [kinds.OUTSIDE] * bool(outside)
        if any(own & {"content", "call"} for index, own in turns.lost.items() if index not in trained):
            found.append(kinds.UNREAD)
        return found, words

    def _as_read(self) -> list[dict[str, Any]]:
        """The messages as this template reads them, if it has trouble with what is as good as the same: no content
        beside calls, which some write as the word None, and arguments of calls as an object.
        """
        empty = [{**each, "content": ""} if each.get("content") is None else each for each in self.messages]
        found = [
            (text.count("None"), form) for form in (self.messages, empty) if (text := self._tried(form)) is not None
        ]
        if found:
            return min(found, key=lambda each: each[0])[1]
        as_json = [*map(_with_json, empty)]
        return as_json if self._tried(as_json) is not None else self.messages

    def _tried(self, messages: list[dict[str, Any]]) -> str | None:
        try:
            return self.text(messages, False)
        except FAILURES:
            return None

    def text(self, messages: Messages, leads_on: bool) -> str:
        """leads_on: with what the assistant's next turn follows."""
        return self._render(messages, add_generation_prompt=leads_on)[0]

    def _reads_parts(self) -> bool:
        """Whether the template takes apart a content of parts; others refuse it, or print it as Python would."""
        parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
        try:
            text, _ = self._render([{"role": "user", "content": parts}])
        except FAILURES:
            return False
        return "one" in text and "two" in text and not re.search(r"""['"]text['"]""", text)

    def _render(self, messages: Messages, *, add_generation_prompt: bool = False) -> tuple[str, list[Span]]:
        """The text, and the spans inside `{% generation %}`, as `apply_chat_template` renders them."""
        texts, spans = render_jinja_template(
            conversations=[list(messages)],
            tools=self.tools,
            chat_template=self.template.text,
            return_assistant_tokens_mask=self.has_markers,
            add_generation_prompt=add_generation_prompt,
            **self.template.special_tokens,
        )
        text: str = texts[0]
        if len(text) > _MAX_CHARACTERS:
            raise ValueError(f"its text is longer than {_MAX_CHARACTERS:,} characters")
        text.encode()  # half of a surrogate pair is no text
        return text, spans[0] if self.has_markers else []

    def _marked_turns(self, turns: Turns, needed: list[int], marked: list[Span]) -> dict[int, Span]:
        """The span inside `{% generation %}` of each of the assistant's turns `needed`, without text of others."""
        answers = chosen(self.messages, "all")
        if len(marked) != len(answers) or any(
            turns.owners(span) - {index} for index, span in zip(answers, marked, strict=True)
        ):
            raise UserError(
                f"{self.record.origin}: a conversation of which some turns of the assistant are trained",
                "the chat template does not put {% generation %} around each of the assistant's turns once, so it "
                "cannot be told which is which",
                "train all of them (data.train_on: all, no weight 0), or use another chat template",
            )
        return {index: span for index, span in zip(answers, marked, strict=True) if index in needed}

    def _turns_of_others(self, needed: list[int], turns: Turns) -> dict[int, Span]:
        """First message -> span of the turns of other roles that hold a message of `needed`.

        Templates join adjacent messages of one role, as results of several tools, so these are one turn. What the
        template puts before the first message belongs to it.
        """
        given = "a conversation of which other turns are trained"
        spans = {}
        for first, stop in _runs(self.messages):
            if not any(first <= index < stop for index in needed):
                continue
            if len({self.messages[index].get("weight") for index in range(first, stop)}) > 1:
                raise self._untold(given, f"of messages {first} to {stop - 1}, one turn, some are left out")
            try:
                spans[first] = turns.until_stop(turns.of_others(first, stop))
            except UntoldError as error:
                raise self._untold(given, f"messages[{first}]: {error}") from None
        return spans

    def _untold(self, given: str, words: str) -> UserError:
        rule = f"under this chat template it cannot be told which text is trained, and which is not: {words}"
        ways = [
            "render each answer as the last of a text of its own (data.turns: apart)",
            "use another chat template (data.chat_template: FILE)",
        ]
        if self.train_on == "all":
            ways.insert(0, "train the last answers alone (data.train_on: last)")
        elif self.train_on != "last":
            ways.insert(0, "train on the assistant's turns alone (data.train_on: all)")
        return UserError(f"{self.record.origin}: {given}", rule, ", or ".join(ways))


def _runs(messages: Messages) -> Iterator[tuple[int, int]]:
    """(first, stop) of adjacent messages of one role that is not the assistant's."""
    start = 0
    for role, group in itertools.groupby(messages, key=lambda message: message["role"]):
        first, start = start, start + len(list(group))
        if role != "assistant":
            yield first, start


def _has_parts(message: dict[str, Any]) -> bool:
    return isinstance(message.get("content"), list)


@functools.cache
def _reads_text(template: str) -> bool:
    """Whether it writes a content that is text. Once a process: it is untrusted code."""
    try:
        texts, _ = render_jinja_template(
            conversations=[[{"role": "user", "content": "one"}]], chat_template=template, bos_token="", eos_token=""
        )
    except FAILURES:
        return False
    return "one" in texts[0]


def _in_parts(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its text as a part of text."""
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def _joined(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its parts of text as one text."""
    return (
        {**message, "content": "".join(part["text"] for part in message["content"])} if _has_parts(message) else message
    )


def _inside(offsets: np.ndarray, end_of_tokens: int, spans: AbstractSequence[Span]) -> np.ndarray:
    """bool `[S]`: the tokens that overlap a span of the text. offsets: int64 `[S, 2]`, the characters of each token."""
    result = np.zeros(len(offsets), dtype=bool)
    if not spans:
        return result
    # A tokenizer may trim a token of spaces to the empty range at its end: it still covers the character before.
    ends = offsets[:, 1]
    starts = np.minimum(offsets[:, 0], ends - 1)
    for start, end in spans:
        if start < end_of_tokens:
            result |= (ends > start) & (starts < end)
    return result


def _with_json(message: dict[str, Any]) -> dict[str, Any]:
    """The message with the arguments of its calls as JSON."""
    calls = []
    for call in message.get("tool_calls") or ():
        arguments = json.dumps(call["function"].get("arguments", {}), ensure_ascii=False)
        calls.append({**call, "function": {**call["function"], "arguments": arguments}})
    return {**message, "tool_calls": calls} if calls else message

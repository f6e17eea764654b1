"""The assistant's answers in a rendered conversation: which of its characters each is, under any chat template.

Owns: marks in the texts of messages, the span of an answer between what leads to it and what ends it, and which of its
text a template leaves out. Does not own: the template and its rendering (`chat.py`), tokens.

A template is a program that nobody has read. Each text of each message is put between two characters that occur nowhere
else, and what is rendered tells where every text went; what is no text of a message is the template's own. An answer
begins where the rendering parts from the generation prompt, and ends with the first token that the model stops at.
Only the neighbourhood of an answer has to agree with a shorter rendering, not all that stands before it: templates of
reasoning models write the last answer otherwise than earlier ones.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jinja2

from meshlora.reading.conversations import REASONING
from meshlora.reading.leading import Span

Messages = AbstractSequence[dict[str, Any]]
# (messages, whether the generation prompt follows) -> text
Render = Callable[[Messages, bool], str]

# What a template raises when it refuses messages, or fails on them.
FAILURES = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError)

_PRIVATE_USE = ((0xE000, 0xF900), (0xF0000, 0xFFFFE), (0x100000, 0x10FFFE))
_PRIVATE = re.compile("[" + "".join(f"{chr(first)}-{chr(stop - 1)}" for first, stop in _PRIVATE_USE) + "]")
# Templates take a text apart at such tags, so that each stretch between them is marked by itself.
_TAG = re.compile(r"(</?[A-Za-z_:]{1,24}>|\[/?[A-Z_]{1,24}\]|<\|[^|\n]{1,40}\|>|<｜[^｜\n]{1,40}｜>)")
_OPENS_REASONING = re.compile(r"(?i)(<\w*think\w*>|\[THINK\])\s*$")
_ENDS_REASONING = re.compile(r"(?i)</\w*think|\[/THINK|<\|END_THINKING")


def after_prompt(prompt: str, answer: str) -> tuple[str, bool]:
    """(what is left of `answer` to write after `prompt`, whether reasoning that the prompt opens is never closed).

        after_prompt("<|assistant|><think>\n", "<think>\nIt is 4.</think>4")  # ("It is 4.</think>4", False)

    A tag that the prompt ends in is not written once more.
    """
    opened = _OPENS_REASONING.search(prompt)
    if opened is None:
        return answer, False
    if answer.lstrip().startswith(opened[1]):
        answer = answer.lstrip().removeprefix(opened[1]).lstrip("\n")
    return answer, all(_ENDS_REASONING.match(tag) is None for tag in _TAG.findall(answer))


class UntoldError(Exception):
    """Which text is an answer cannot be told; the message says why."""


class NothingError(UntoldError):
    """Nothing of an answer is in the rendered text."""


class _Mark(NamedTuple):
    """One end of a stretch of a message's text. kind: content, reasoning (in it), field (of reasoning), call or name
    (of a called function). text: all of the stretch.
    """

    message: int
    kind: str
    opens: bool
    text: str


@dataclass(frozen=True)
class Ends:
    """What a model says beside words. stops: texts of the tokens after which it says no more. special: finds the text
    of any special token; None without any.
    """

    stops: tuple[str, ...]
    special: re.Pattern[str] | None

    @classmethod
    def of(cls, stops: Iterable[str], special: Iterable[str]) -> Ends:
        """`Ends.of(["<eos>"], ["<bos>", "<eos>"])`."""
        words = sorted({*special, *stops} - {""}, key=len, reverse=True)  # the longest first: one may begin another
        return cls(tuple(dict.fromkeys(stop for stop in stops if stop)), _any_of(words))

    def common(self, one: str, other: str) -> int:
        """Length of what both begin with, not ending inside a special token of either."""
        pairs = enumerate(zip(one, other, strict=False))
        length = next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))
        for text in (one, other):
            for found in self.special.finditer(text) if self.special else ():
                if found.start() >= length:
                    break
                if found.end() > length:
                    return self.common(one[: found.start()], other[: found.start()])
        return length

    def of_answer(self, after: str, agreed: int) -> int:
        """How much of `after`, which follows an answer's last word, the model writes.

        agreed: how much of it stands there too where the answer is the last message.
        """
        found = [(at, at + len(stop)) for stop in self.stops if 0 <= (at := after.find(stop)) < agreed]
        if found:
            return min(found)[1]
        ends = [each.end() for each in self.special.finditer(after[:agreed])] if self.special else []
        if ends:
            return ends[-1]
        # The next header may begin with a token that the model stops at (GLM): it is what the model has to say.
        start = agreed + len(after[agreed:]) - len(after[agreed:].lstrip())
        return next((start + len(stop) for stop in self.stops if after.startswith(stop, start)), agreed)


def _kinds(marks: Iterable[_Mark]) -> dict[int, set[str]]:
    """Message -> kinds of its marks."""
    found: dict[int, set[str]] = {}
    for each in marks:
        found.setdefault(each.message, set()).add(each.kind)
    return found


def _any_of(words: AbstractSequence[str]) -> re.Pattern[str] | None:
    return re.compile("|".join(map(re.escape, words))) if words else None


class _Marks:
    """Messages with marks in their texts, and the marks that were put there. names: mark those of functions too. fill:
    the message whose content has none, and gets a pair all the same.
    """

    def __init__(self, messages: Messages, avoid: str, *, names: bool, fill: int | None = None) -> None:
        self.of: dict[str, _Mark] = {}
        taken = {*avoid}
        self._free = (
            mark for code in itertools.starmap(range, _PRIVATE_USE) for mark in map(chr, code) if mark not in taken
        )
        self._names, self._fill = names, fill
        self.messages = [self._marked(message, index) for index, message in enumerate(messages)]

    def _marked(self, message: dict[str, Any], index: int) -> dict[str, Any]:
        message = dict(message)
        content = message.get("content")
        if index == self._fill:
            message["content"] = "".join(self._pair(index, "content", ""))
        elif isinstance(content, str):
            message["content"] = self._text(content, index, "content")
        elif isinstance(content, list):
            message["content"] = [
                {**part, "text": self._text(part["text"], index, "content")} if "text" in part else part
                for part in content
            ]
        for key in REASONING:
            if isinstance(message.get(key), str):
                message[key] = self._text(message[key], index, "field")
        if message.get("tool_calls"):
            message["tool_calls"] = [self._call(call, index) for call in message["tool_calls"]]
        return message

    def _call(self, call: dict[str, Any], index: int) -> dict[str, Any]:
        function = {**call["function"], "arguments": self._value(call["function"].get("arguments", {}), index)}
        if self._names:
            function["name"] = self._text(function["name"], index, "name")
        return {**call, "function": function}

    def _value(self, value: Any, index: int) -> Any:
        if isinstance(value, str):
            return self._text(value, index, "call")
        if isinstance(value, list):
            return [self._value(item, index) for item in value]
        if isinstance(value, dict):
            return {key: self._value(item, index) for key, item in value.items()}
        return value

    def _text(self, text: str, index: int, kind: str) -> str:
        """`text` with marks inside the white space of each stretch, so that a template strips it as before."""
        parts = _TAG.split(text)  # stretches and tags by turns
        last = max((number for number, part in enumerate(parts) if _ENDS_REASONING.match(part)), default=-1)
        for number in range(0, len(parts), 2):
            core = parts[number].strip()
            if core:
                start, end = self._pair(index, "reasoning" if kind == "content" and number < last else kind, core)
                before, _, after = parts[number].partition(core)
                parts[number] = f"{before}{start}{core}{end}{after}"
        return "".join(parts)

    def _pair(self, index: int, kind: str, text: str) -> tuple[str, str]:
        start, end = next(self._free, None), next(self._free, None)
        if start is None or end is None:
            raise UntoldError("the conversation has more texts than there are characters to mark them")
        self.of[start], self.of[end] = (_Mark(index, kind, opens, text) for opens in (True, False))
        return start, end


class _Rendering:
    """A rendering of marked messages: its text without the marks, and where in it each stood first."""

    def __init__(self, rendered: str, marks: _Marks) -> None:
        parts, self.at, done = list[str](), dict[str, int](), 0
        self.twice = set[int]()
        length = 0
        for found in _PRIVATE.finditer(rendered):
            mark = marks.of.get(found[0])
            if mark is None:
                continue
            parts.append(rendered[done : found.start()])
            length, done = length + len(parts[-1]), found.end()
            if found[0] in self.at and mark.kind != "name":  # results of tools may name the function once more
                self.twice.add(mark.message)
            self.at.setdefault(found[0], length)
        self.text = "".join((*parts, rendered[done:]))


class _Tail(NamedTuple):
    """What follows the last mark of the first messages' rendering. mark: None if it has none; then all of it."""

    mark: str | None
    text: str


class Turns:
    """The answers of one conversation.

        turns = Turns(messages, render, Ends.of(["<|im_end|>"], ["<|im_start|>", "<|im_end|>"]))
        turns.text[slice(*turns.span(1))]  # "Hello!<|im_end|>"

    Raises:
        UntoldError: the template reads the texts of messages, and so renders others when they are marked. Whatever the
            template raises.

    avoid: a text whose characters mark nothing, beside those of the conversation. fill: as of `_Marks`.
    """

    def __init__(
        self, messages: Messages, render: Render, ends: Ends, *, avoid: str = "", fill: int | None = None
    ) -> None:
        self.text, self._messages, self._render, self._ends = render(messages, False), messages, render, ends
        self._avoid = avoid
        self._tails: dict[tuple[int, bool], _Tail | None] = {}
        avoid += self.text + json.dumps(list(messages), ensure_ascii=False)
        for names in (True, False):  # a template may look a function up by its name
            self._marks = _Marks(messages, avoid, names=names, fill=fill)
            try:
                self._whole = _Rendering(render(self._marks.messages, False), self._marks)
            except FAILURES:
                continue
            if self._whole.text == self.text:
                return
        raise UntoldError("the template reads the texts of messages: it writes others when they are marked")

    def kinds(self, index: int) -> set[str]:
        """The kinds of text that message `index` has."""
        return _kinds(self._marks.of.values()).get(index, set())

    def is_gone(self, index: int) -> bool:
        """Whether message `index` has texts, and none of them is in the rendering."""
        return index in self.lost and all(each.message != index for _, each in self._placed())

    @functools.cached_property
    def lost(self) -> dict[int, set[str]]:
        """Index of a message -> the kinds of its text that are not, or not all, in the rendering."""
        return _kinds(each for mark, each in self._marks.of.items() if mark not in self._whole.at)

    def lost_as_last(self, index: int) -> set[str]:
        """The same kinds of message `index`, in the rendering up to it."""
        if index == len(self._messages) - 1:
            return self.lost.get(index, set())
        try:
            alone = _Rendering(self._render(self._marks.messages[: index + 1], False), self._marks)
        except FAILURES:
            return self.kinds(index)
        return _kinds(each for mark, each in self._marks.of.items() if mark not in alone.at).get(index, set())

    def lost_words(self, index: int, kinds: Collection[str]) -> list[tuple[int, str]]:
        """(place in `text`, words) of each text of `kinds` of message `index` that is not in the rendering, as near as
        can be.
        """
        at, own = self._whole.at, {mark: each for mark, each in self._marks.of.items() if each.message == index}
        placed = [at[mark] for mark in own if mark in at]
        later = [at[mark] for mark, each in self._placed() if each.message > index]
        found = []
        for mark, each in own.items():
            if each.opens and mark not in at and each.kind in kinds:
                comes_last = each.kind in ("call", "name")
                place = (max if comes_last else min)(placed, default=min(later, default=len(self.text)))
                found.append((place, each.text))
        return found

    def places(self, index: int, kinds: Collection[str]) -> list[int]:
        """Where in `text` texts of `kinds` of message `index` begin and end."""
        return [self._whole.at[mark] for mark, each in self._placed() if each.message == index and each.kind in kinds]

    def span(self, index: int) -> Span:
        """The characters of `text` that the assistant writes as message `index`, with the token that ends it.

        Raises:
            UntoldError: they cannot be told.
        """
        own = [self._whole.at[mark] for mark, each in self._placed() if each.message == index]
        if not own and all(each.message != index for each in self._marks.of.values()):
            return self._without_text(index)
        if not own:
            raise NothingError("nothing of it is in the rendered text")
        if index in self._whole.twice:
            raise UntoldError("a text of it is rendered twice")
        first, last = min(own), max(own)
        if any(first < self._whole.at[mark] < last for mark, each in self._placed() if each.message != index):
            raise UntoldError("texts of other messages stand between its own")
        start, end = self._start(index, first), self._end(index, last)
        before = any(
            start < self._whole.at[mark] for mark, each in self._others(index) if self._whole.at[mark] <= first
        )
        behind = any(self._whole.at[mark] < end for mark, each in self._others(index) if self._whole.at[mark] >= last)
        if before or behind:
            raise UntoldError("a text of another message would be part of it")
        return start, end

    def _without_text(self, index: int) -> Span:
        """The span of an answer without any text: where its content would stand, if nothing else would change."""
        try:
            return Turns(self._messages, self._render, self._ends, avoid=self._avoid, fill=index).span(index)
        except (UntoldError, *FAILURES):
            return self._added(index)

    def _added(self, index: int) -> Span:
        """What the rendering up to message `index`, which has no text, adds to the generation prompt."""
        led, bare, alone = self._tail(index, True), self._tail(index, False), self._tail(index + 1, False)
        if led is None or bare is None or alone is None or led.mark != alone.mark:
            raise UntoldError("it has no text, and what stands for it cannot be told")
        base = 0 if led.mark is None else self._whole.at.get(led.mark)
        if base is None:
            raise UntoldError("it has no text, and nothing that leads to it is in the rendered text")
        opened = [self._whole.at[mark] for mark, each in self._placed() if each.opens and self._whole.at[mark] > base]
        after = self.text[base : min(opened, default=None)]
        start, end = self._ends.common(led.text, after), self._ends.common(alone.text, after)
        has_led = led == bare or start > self._ends.common(led.text, bare.text)
        length = self._ends.of_answer(after[start:], end - start) if has_led and end > start else 0
        if not length:
            raise UntoldError("it has no text, and the template leaves it out")
        return base + start, base + start + length

    def of_others(self, first: int, stop: int) -> Span:
        """The characters of the messages from `first` to before `stop`, none of which is an answer, with what the
        template writes around them: from the end of what is before them to what leads to the answer after them.

        Raises:
            UntoldError: they cannot be told.
        """
        start = self._boundary(first) if first else 0
        end = self._boundary(stop) if stop < len(self._messages) else len(self.text)
        own = {each for each in self.owners((start, end)) if first <= each < stop}
        if self.owners((start, end)) - own or own != {
            each.message for _, each in self._placed() if first <= each.message < stop
        }:
            raise UntoldError("texts of other messages stand between its own")
        return start, end

    def owners(self, span: Span) -> set[int]:
        """The messages of which some text begins in a span."""
        return {
            each.message for mark, each in self._placed() if each.opens and span[0] <= self._whole.at[mark] < span[1]
        }

    def _boundary(self, number: int) -> int:
        """Where the turn before message `number` ends, and what leads to that message begins."""
        opened = [self._whole.at[mark] for mark, each in self._placed() if each.opens and each.message >= number]
        if self._messages[number - 1]["role"] == "assistant":
            base = self.span(number - 1)[1]
            after = self.text[base : min((place for place in opened if place >= base), default=None)]
            return base + len(after) - len(after.lstrip())
        bare = self._tail(number, False)
        start = None if bare is None else 0 if bare.mark is None else self._whole.at.get(bare.mark)
        if bare is None or start is None:
            raise UntoldError("the template does not render the messages before it by themselves")
        after = self.text[start : min((place for place in opened if place >= start), default=None)]
        return start + self._ends.common(bare.text, after)

    def until_stop(self, span: Span) -> Span:
        """`span` up to the last token in it that a model stops at; all of it if there is none."""
        start, end = span
        stops = [at + len(stop) for stop in self._ends.stops if (at := self.text.rfind(stop, start, end)) >= 0]
        return start, max(stops, default=end)

    def is_ended(self, span: Span) -> bool:
        """Whether a span ends in a token that the model stops at."""
        return self.text[slice(*span)].endswith(self._ends.stops)

    def _placed(self) -> Iterator[tuple[str, _Mark]]:
        return ((mark, self._marks.of[mark]) for mark in self._whole.at)

    def _others(self, index: int) -> Iterator[tuple[str, _Mark]]:
        return ((mark, each) for mark, each in self._placed() if each.message != index)

    def _tail(self, number: int, leads_on: bool) -> _Tail | None:
        """Of the first `number` messages; None if the template refuses them."""
        key = number, leads_on
        if key not in self._tails:
            self._tails[key] = self._rendered_tail(number, leads_on)
        return self._tails[key]

    def _rendered_tail(self, number: int, leads_on: bool) -> _Tail | None:
        try:
            found = _Rendering(self._render(self._marks.messages[:number], leads_on), self._marks)
        except FAILURES:
            return None
        if not found.at:
            return _Tail(None, found.text)
        # Of two at one place the closing one stands after the opening one.
        last = max(found.at, key=lambda mark: (found.at[mark], not self._marks.of[mark].opens))
        return _Tail(last, found.text[found.at[last] :])

    def _start(self, index: int, first: int) -> int:
        """Where the answer whose first word is at `first` begins: after all that leads the model to it."""
        closed = [self._whole.at[mark] for mark, each in self._others(index) if not each.opens]
        lowest = max((place for place in closed if place <= first), default=0)
        start = self._after_prompt(index, first) if index else None
        if start is None or start < lowest:
            start = self._after_header(lowest, first)
        if start is None:
            raise UntoldError("no generation prompt leads to it")
        return start

    def _after_prompt(self, index: int, first: int) -> int | None:
        """Where the rendering parts from the generation prompt before message `index`; None if it never had it."""
        led, bare = self._tail(index, True), self._tail(index, False)
        if led is None or bare is None:
            return None
        base = 0 if led.mark is None else self._whole.at.get(led.mark)
        if base is None or base > first:
            return None
        agreed = min(self._ends.common(led.text, self.text[base:]), first - base)
        if led == bare:  # a template without a generation prompt (Mistral): what leads to it is the turn before
            has_led = agreed == len(led.text) and self._messages[index - 1]["role"] != "assistant"
        else:
            has_led = agreed > (self._ends.common(led.text, bare.text) if led.mark == bare.mark else 0)
        return base + agreed if has_led else None

    def _after_header(self, lowest: int, first: int) -> int | None:
        """The end of the generation prompt's own text, or of its beginning, between `lowest` and `first`."""
        header = self._header
        cuts = [found.start() for found in self._ends.special.finditer(header)] if self._ends.special else []
        for text in (header, *(header[:cut] for cut in reversed(cuts)), header.strip()):
            if text.strip() and (found := self.text.rfind(text, lowest, first)) >= 0:
                return found + len(text)
        return None

    @functools.cached_property
    def _header(self) -> str:
        """What the generation prompt adds to the first turn of the user that it follows; "" if to none."""
        for number, message in enumerate(self._messages, start=1):
            if message["role"] != "user":
                continue
            led, bare = self._tail(number, True), self._tail(number, False)
            if led is None or bare is None:
                continue
            header = led.text[self._ends.common(led.text, bare.text) if led.mark == bare.mark else 0 :]
            if header.strip():
                return header
        return ""

    def _end(self, index: int, last: int) -> int:
        """Where the answer whose last word ends at `last` ends."""
        opened = [self._whole.at[mark] for mark, each in self._others(index) if each.opens]
        after = self.text[last : min((place for place in opened if place >= last), default=None)]
        alone = self._tail(index + 1, False)
        is_own = alone is not None and alone.mark is not None and self._marks.of[alone.mark].message == index
        agreed = self._ends.common(alone.text, after) if alone is not None and is_own else 0
        return last + self._ends.of_answer(after, agreed)

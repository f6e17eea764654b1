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

import bisect
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
        found = re.compile("|".join(map(re.escape, words))) if words else None
        return cls(tuple(dict.fromkeys(stop for stop in stops if stop)), found)

    def common(self, one: str, other: str) -> int:
        """Length of what both begin with, not ending inside a special token of either."""
        length = _length_of_common(one, other)
        for text in (one, other):
            for found in self.special.finditer(text) if self.special and len(text) > length else ():
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


def _length_of_common(one: str, other: str) -> int:
    """Length of what both begin with. By halves, as comparing slices is much faster than comparing characters."""
    least, most = 0, min(len(one), len(other))
    while least < most:
        middle = (least + most + 1) // 2
        if one[least:middle] == other[least:middle]:
            least = middle
        else:
            most = middle - 1
    return least


class _Marks:
    """Messages with marks in their texts, and the marks that were put there. names: mark those of functions too. fill:
    the message whose content has none, and gets a pair all the same.
    """

    def __init__(self, messages: Messages, avoid: str, *, names: bool, fill: int | None = None) -> None:
        self.of: dict[str, _Mark] = {}
        self._free = (
            mark for code in itertools.starmap(range, _PRIVATE_USE) for mark in map(chr, code) if mark not in avoid
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
        # Stretches and tags by turns.
        parts = _TAG.split(text) if "<" in text or "[" in text else [text]
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
    """A rendering of marked messages: its text without the marks, and where in it each stood first, in order."""

    def __init__(self, rendered: str, marks: _Marks) -> None:
        found = list[tuple[int, str]]()
        for mark in marks.of:  # `find` takes a hundredth of the time of a regular expression for all of them
            at = rendered.find(mark)
            while at >= 0:
                found.append((at, mark))
                at = rendered.find(mark, at + 1)
        found.sort()
        parts, self.at, done = list[str](), dict[str, int](), 0
        self.twice = set[int]()
        for number, (at, mark) in enumerate(found):
            parts.append(rendered[done:at])
            done = at + 1
            if mark in self.at and marks.of[mark].kind != "name":  # results of tools may name the function once more
                self.twice.add(marks.of[mark].message)
            self.at.setdefault(mark, at - number)
        self.text = "".join((*parts, rendered[done:]))


class _Tail(NamedTuple):
    """What follows the last mark of the first messages' rendering. mark: None if it has none; then all of it."""

    mark: str | None
    text: str

    @classmethod
    def of(cls, rendered: str, marks: _Marks) -> _Tail:
        place, last, text = -1, None, rendered
        for mark in reversed(marks.of):  # the last texts mostly stand last: for the others little is left to search
            if mark in text and (at := rendered.find(mark)) > place:
                place, last, text = at, mark, rendered[at + 1 :]
                if text.isascii():
                    break
        for mark in () if text.isascii() else marks.of:  # names may stand once more
            text = text.replace(mark, "")
        return cls(last, text)


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
                rendered = render(self._marks.messages, False)
            except FAILURES:
                continue
            self._whole = _Rendering(rendered, self._marks)
            if self._whole.text == self.text:
                self._tails[len(messages), False] = _Tail.of(rendered, self._marks)
                self._places = [*self._whole.at.values()]
                self._placed = [self._marks.of[mark] for mark in self._whole.at]
                self._own: dict[int, list[int]] = {}
                for place, each in zip(self._places, self._placed, strict=True):
                    self._own.setdefault(each.message, []).append(place)
                return
        raise UntoldError("the template reads the texts of messages: it writes others when they are marked")

    @functools.cached_property
    def kinds(self) -> dict[int, set[str]]:
        """Index of a message -> the kinds of text that it has."""
        return _kinds(self._marks.of.values())

    def is_gone(self, index: int) -> bool:
        """Whether message `index` has texts, and none of them is in the rendering."""
        return index in self.lost and index not in self._own

    @functools.cached_property
    def lost(self) -> dict[int, set[str]]:
        """Index of a message -> the kinds of its text that are not, or not all, in the rendering."""
        return _kinds(each for mark, each in self._marks.of.items() if mark not in self._whole.at)

    def lost_as_last(self, index: int) -> set[str]:
        """The same kinds of message `index`, in the rendering up to it."""
        if index == len(self._messages) - 1:
            return self.lost.get(index, set())
        try:
            alone = self._render(self._marks.messages[: index + 1], False)
        except FAILURES:
            return self.kinds.get(index, set())
        self._tails[index + 1, False] = _Tail.of(alone, self._marks)
        return _kinds(each for mark, each in self._marks.of.items() if mark not in alone).get(index, set())

    def lost_words(self, index: int, kinds: Collection[str]) -> list[tuple[int, str]]:
        """(nearest place in `text`, words) of each text of `kinds` of message `index` that is not in the rendering."""
        at, own = self._whole.at, {mark: each for mark, each in self._marks.of.items() if each.message == index}
        placed = [at[mark] for mark in own if mark in at]
        later = [place for place, each in self._marked() if each.message > index]
        found = []
        for mark, each in own.items():
            if each.opens and mark not in at and each.kind in kinds:
                comes_last = each.kind in ("call", "name")
                place = (max if comes_last else min)(placed, default=min(later, default=len(self.text)))
                found.append((place, each.text))
        return found

    def places(self, index: int, kinds: Collection[str]) -> list[int]:
        """Where in `text` texts of `kinds` of message `index` begin and end."""
        return [place for place, each in self._marked() if each.message == index and each.kind in kinds]

    def span(self, index: int) -> Span:
        """The characters of `text` that the assistant writes as message `index`, with the token that ends it. Raises:
        UntoldError: they cannot be told."""
        own = self._own.get(index)
        if not own and index not in self.kinds:
            return self._without_text(index)
        if not own:
            raise NothingError("nothing of it is in the rendered text")
        if index in self._whole.twice:
            raise UntoldError("a text of it is rendered twice")
        first, last = own[0], own[-1]
        if any(each.message != index for _, each in self._marked(first + 1, last)):
            raise UntoldError("texts of other messages stand between its own")
        start, end = self._start(index, first), self._end(index, last)
        around = (*self._marked(start + 1, first + 1), *self._marked(last, end))
        if any(each.message != index for _, each in around):
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
        after = self.text[base : self._opened(base + 1)]
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
        if self.owners((start, end)) - own or own != {each for each in self._own if first <= each < stop}:
            raise UntoldError("texts of other messages stand between its own")
        return start, end

    def outside(self, index: int, spans: AbstractSequence[Span]) -> set[str]:
        """The kinds of text of message `index` that are rendered, and not, or not all, in one of `spans`."""
        found = set()
        for place, each in self._marked():
            character = place if each.opens else place - 1  # the first or last of a text
            if each.message == index and not any(start <= character < end for start, end in spans):
                found.add(each.kind)
        return found

    def owners(self, span: Span) -> set[int]:
        """The messages of which some text begins in a span."""
        return {each.message for _, each in self._marked(*span) if each.opens}

    def _boundary(self, number: int) -> int:
        """Where the turn before message `number` ends, and what leads to that message begins."""
        if self._messages[number - 1]["role"] == "assistant":
            base = self.span(number - 1)[1]
            after = self.text[base : self._opened(base, number)]
            return base + len(after) - len(after.lstrip())
        bare = self._tail(number, False)
        start = None if bare is None else 0 if bare.mark is None else self._whole.at.get(bare.mark)
        if bare is None or start is None:
            raise UntoldError("the template does not render the messages before it by themselves")
        after = self.text[start : self._opened(start, number)]
        return start + self._ends.common(bare.text, after)

    def until_stop(self, span: Span) -> Span:
        """`span` up to the last token in it that a model stops at; all of it if there is none."""
        start, end = span
        stops = [at + len(stop) for stop in self._ends.stops if (at := self.text.rfind(stop, start, end)) >= 0]
        return start, max(stops, default=end)

    def ends(self, indices: Iterable[int]) -> list[int]:
        """Where messages end: behind the first token after their texts that a model stops at, if there is one."""
        found = []
        for index in indices:
            last = self._own.get(index, [0])[-1]
            after = self.text[last : self._opened(last, but=index)] if index in self._own else ""
            stops = [at + len(stop) for stop in self._ends.stops if (at := after.find(stop)) >= 0]
            if stops:
                found.append(last + min(stops))
        return found

    def is_ended(self, span: Span) -> bool:
        """Whether a span ends in a token that the model stops at."""
        return self.text[slice(*span)].endswith(self._ends.stops)

    def _marked(self, start: int = 0, stop: int | None = None) -> Iterator[tuple[int, _Mark]]:
        """(place, mark) of the marks from `start` to before `stop`, in order."""
        first = bisect.bisect_left(self._places, start)
        end = None if stop is None else bisect.bisect_left(self._places, stop)
        return zip(self._places[first:end], self._placed[first:end], strict=True)

    def _opened(self, start: int, number: int = 0, *, but: int | None = None) -> int | None:
        """Where the first text from `start` on begins, of messages from `number` on and not of `but`."""
        opened = ((place, each.message) for place, each in self._marked(start) if each.opens)
        return next((place for place, message in opened if message >= number and message != but), None)

    def _tail(self, number: int, leads_on: bool) -> _Tail | None:
        """Of the first `number` messages; None if the template refuses them."""
        key = number, leads_on
        if key not in self._tails:
            try:
                rendered = self._render(self._marks.messages[:number], leads_on)
                self._tails[key] = _Tail.of(rendered, self._marks)
            except FAILURES:
                self._tails[key] = None
        return self._tails[key]

    def _start(self, index: int, first: int) -> int:
        """Where the answer whose first word is at `first` begins: after all that leads the model to it."""
        before = self._marked(0, first + 1)
        lowest = max((place for place, each in before if not each.opens and each.message != index), default=0)
        start = self._after_prompt(index, first) if index else None
        if start is None or start < lowest:
            start = self._after_header(lowest, first)
        if start is None:
            raise UntoldError("no generation prompt leads to it")
        return start

    def _after_prompt(self, index: int, first: int) -> int | None:
        """Where the rendering parts from the generation prompt before message `index`; None if it never had it."""
        led = self._tail(index, True)
        base = 0 if led is None or led.mark is None else self._whole.at.get(led.mark)
        if led is None or base is None or base > first:
            return None
        agreed = min(self._ends.common(led.text, self.text[base:]), first - base)
        follows_answer = self._messages[index - 1]["role"] == "assistant"
        if agreed == len(led.text) and not follows_answer:  # all that leads to it stands there
            return base + agreed
        bare = self._tail(index, False)
        if bare is None:
            return None
        if led == bare:  # a template without a generation prompt (Mistral): what leads to it is the turn before
            has_led = agreed == len(led.text) and not follows_answer
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
        after = self.text[last : self._opened(last, but=index)]
        alone = self._tail(index + 1, False)
        is_own = alone is not None and alone.mark is not None and self._marks.of[alone.mark].message == index
        agreed = self._ends.common(alone.text, after) if alone is not None and is_own else 0
        return last + self._ends.of_answer(after, agreed)

"""What a chat template leaves out of trained answers: `data.lost_text`.

Owns: the kinds, their form in a dataset's arrays, which are refused, and the words. Does not own: finding out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from meshlora.reading.records import Record
from meshlora_ground.errors import UserError

LostText = Literal["refuse", "note"]

REASONING, FIELD, WORDS, CALL = "reasoning", "field", "words", "call"
# Of a mark's kind (`turns.py`).
AS_KIND = {"content": WORDS, "reasoning": REASONING, "field": FIELD, "call": CALL, "name": CALL}
# Beside others: one of them is of the last trained answer; one is rendered, but outside of `{% generation %}`.
LAST, OUTSIDE = "last", "outside"
NO_END, EMPTY, LEFT_OUT, CUT = "end", "empty", "left out", "cut"
NOTHING, UNREAD, UNCLOSED = "nothing", "unread", "unclosed"
ANSWER, REASONED = "answer", "reasoned"  # a trained answer; one with reasoning of which nothing is lost


def earlier(kind: str) -> str:
    """The kind of what the template would write, were the answer the last message."""
    return f"earlier {kind}"


_LOST = {
    REASONING: "the reasoning",
    FIELD: "the reasoning in a field of its own",
    WORDS: "words",
    CALL: "calls of tools",
}
# What models do not read of earlier answers at inference either.
_NOTED = (earlier(REASONING), earlier(FIELD))
_REFUSED = {  # in this order: the cache holds the places of KINDS
    REASONING: _LOST[REASONING],
    FIELD: _LOST[FIELD],
    WORDS: _LOST[WORDS],
    earlier(WORDS): _LOST[WORDS],
    CALL: _LOST[CALL],
    earlier(CALL): _LOST[CALL],
}
KINDS = (*_REFUSED, *_NOTED, LAST, NO_END, EMPTY, LEFT_OUT, CUT, NOTHING, UNREAD, UNCLOSED, ANSWER, REASONED, OUTSIDE)

_SAID = {
    NO_END: "the rendered text does not end trained answers with a token that the model stops at",
    EMPTY: "trained answers are empty: the model learns to say nothing (data.empty_answers: skip leaves them out)",
    CUT: "a trained turn is cut by max_length, and trained there without its end",
    LEFT_OUT: "empty answers are not in the text that the chat template renders, and so not trained",
    NOTHING: "left out, as the chat template writes nothing of their trained answers",
    UNCLOSED: "the generation prompt opens reasoning that trained answers do not close (data.answers: as_generated)",
    UNREAD: "texts of other messages are not in the text that the chat template renders: the model does not read them",
}


def as_array(rows: Iterable[tuple[int, Sequence[str]]]) -> np.ndarray:
    """int64 `[N]`: (index of a record, what is so of an answer in it), each pair as one number."""
    codes = list[int]()
    for index, kinds in rows:
        codes += [index * len(KINDS) + KINDS.index(kind) for kind in kinds]
    return np.array(codes, dtype=np.int64)


@dataclass(frozen=True)
class Lost:
    """What is lost of `num_records` records, and what may be offered against it.

    codes: of `as_array`. can_be_apart: the answers could be sequences of their own, and are not. can_be_generated: they
    could be taken as they are given, and are not. trains_all: every answer is trained.
    """

    codes: np.ndarray
    record_at: Callable[[int], Record]
    num_records: int
    can_be_apart: bool = False
    can_be_generated: bool = False
    trains_all: bool = False

    def words(self, lost_text: LostText) -> list[str]:
        """A line for each kind, with how many records it is of, and the first of them. Raises: UserError: text of
        trained answers is lost that models do write at inference, and lost_text is "refuse"."""
        counts = np.bincount(self.codes % len(KINDS), minlength=len(KINDS)).tolist()
        of_kind = Counter(dict(zip(KINDS, counts, strict=True)))
        lines = [f"{self._records(kind)}: {words}" for kind, words in _SAID.items() if of_kind[kind]]
        if number := sum(of_kind[kind] for kind in _NOTED):
            what = "as at inference the chat template leaves out the reasoning of"
            offer = "; data.turns: apart trains it, a sequence for each answer" * self.can_be_apart
            lines.append(f"{self._records(*_NOTED)}: {what} {number:,} earlier answers, which is not trained{offer}")
        lines += self._of_reasoning(of_kind)
        if any(of_kind[kind] for kind in _REFUSED):
            lines.append(self._refused(of_kind, lost_text))
        return lines

    def _refused(self, of_kind: Mapping[str, int], lost_text: LostText) -> str:
        """What is said of text that is lost. Raises: UserError: if it may not be."""
        numbers, found = Counter[str](), list[str]()
        for kind, words in _REFUSED.items():
            if of_kind[kind]:
                numbers[words] += of_kind[kind]
                found.append(kind)
        each = [f"{words} of {number:,}" for words, number in numbers.items()]
        how = "leaves out, or writes outside of {% generation %}," if of_kind[OUTSIDE] else "leaves out"
        rule = f"the chat template {how} {', '.join(each)} trained answer{'s' * (max(numbers.values()) > 1)}"
        given = self._records(*found)
        if lost_text == "note":
            return f"{given}: {rule}, which is not trained (data.lost_text: note)"
        ways = ["data.chat_template: FILE, one that writes it"]
        # As it is generated an answer is its content alone, without calls and reasoning of another field.
        can_be_generated = self.can_be_generated and not numbers[_LOST[CALL]] and not numbers[_LOST[FIELD]]
        if self.can_be_apart and all(kind.startswith(earlier("")) for kind in found):
            ways.append("data.turns: apart, a sequence for each answer, where it is written")
        elif can_be_generated:
            beside = " with data.turns: apart" * self.can_be_apart
            ways.append(f"data.answers: as_generated{beside}, which takes answers as they are given")
        if self.trains_all and not of_kind[LAST]:
            ways.append("data.train_on: last")
        ways.append("data.lost_text: note, to train what is written")
        raise UserError(given, rule, f"give {', or '.join(ways)}")

    def _of_reasoning(self, of_kind: Mapping[str, int]) -> list[str]:
        lost = of_kind[REASONING] + of_kind[FIELD] + of_kind[earlier(REASONING)] + of_kind[earlier(FIELD)]
        trained = of_kind[REASONED]
        if not lost + trained:
            return []
        given = f"{lost + trained:,} of {of_kind[ANSWER]:,} answers have reasoning"
        return [f"{given}: {trained:,} trained with it, {lost:,} without"]

    def _records(self, *kinds: str) -> str:
        """As `3 of 40 records, chat.jsonl:7 first`."""
        codes = [*map(KINDS.index, kinds)]
        own = np.unique(self.codes[np.isin(self.codes % len(KINDS), codes)] // len(KINDS))
        return f"{len(own):,} of {self.num_records:,} records, {self.record_at(int(own[0])).origin} first"

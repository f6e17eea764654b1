"""One sequence for each answer: `data.turns: apart`.

Owns: the options of conversations, their beginnings that end with an answer, and which sequences are one example. Does
not own: tokens (`tokenization.py`), templates (`chat.py`).

At inference a conversation is rendered anew for each answer, and many templates write an answer otherwise while it is
the last. What is trained here is each answer where it is the last, once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args, get_type_hints

import numpy as np

from meshlora.reading.lost import LostText
from meshlora.reading.records import Record
from meshlora.reading.train_on import TrainOn, chosen, left_out
from meshlora_ground.errors import UserError, did_you_mean


@dataclass(frozen=True)
class Chats:
    """How the answers of conversations are trained, beside `data.train_on`.

    Attributes:
        turns: whole: a conversation is one sequence; apart: one for each answer. answers: as_rendered by the chat
            template; as_generated: the content as it is given, after the generation prompt. lost_text: what becomes of
            text of answers that the chat template leaves out: refuse, or note. system: what the system says in
            conversations in which it says nothing (`system_turn.py`).

    Raises:
        UserError: a value is none of the choices.
    """

    turns: Literal["whole", "apart"] = "whole"
    answers: Literal["as_rendered", "as_generated"] = "as_rendered"
    lost_text: LostText = "refuse"
    system: str | None = None

    def __post_init__(self) -> None:
        kinds = get_type_hints(type(self))
        for name in ("turns", "answers", "lost_text"):  # dataclasses check no types
            known = kinds[name]
            if (given := getattr(self, name)) not in get_args(known):
                near = did_you_mean(str(given)[:60], get_args(known))
                raise UserError(f"data.{name}={given!r}", "it is no such choice", near)
        if self.are_generated and not self.is_apart:
            rule = "it is for answers that are sequences of their own"
            raise UserError("data.answers=as_generated", rule, "give data.turns: apart")

    @property
    def is_apart(self) -> bool:
        """Whether each answer is a sequence of its own."""
        return self.turns == "apart"

    @property
    def are_generated(self) -> bool:
        """Whether answers follow the generation prompt as they are given."""
        return self.answers == "as_generated"

    def check(self, train_on: TrainOn, *, rows_per_example: int = 1) -> None:
        """Raises: UserError: answers cannot be sequences of their own."""
        if not self.is_apart:
            return
        if rows_per_example > 1:
            raise UserError("data.turns=apart", "answers are compared as wholes here", "leave it out")
        if not can_be_apart(train_on):
            named = train_on if isinstance(train_on, str) else [*train_on]
            given = f"data.turns=apart with data.train_on={named}"
            raise UserError(given, "it is a sequence for each trained answer", "give train_on: all, or leave out one")
        if self.are_generated and not isinstance(train_on, str) and [*train_on] != ["assistant"]:
            given = f"data.answers=as_generated with data.train_on={[*train_on]}"
            raise UserError(given, "only answers are generated", "give train_on: all, or leave out one")


def can_be_apart(train_on: TrainOn) -> bool:
    """Whether each trained turn belongs to one answer."""
    if isinstance(train_on, str):
        return train_on in ("all", "last")
    return "assistant" in train_on


def beginnings(record: Record, train_on: TrainOn) -> Iterator[Record]:
    """The conversation up to each trained answer, in which that one is trained, and what else is after the one before.

        list(beginnings(Record(messages=(user, answer, user, answer), origin="a:1"), "all"))  # of 2 and 4 messages

    Any other record, and a conversation without a trained answer, is itself.
    """
    messages = record.messages or ()
    wanted = {*chosen(messages, train_on)} - {*left_out(messages)}  # a turn of weight 0 needs no sequence
    ends = [index for index in sorted(wanted) if messages[index]["role"] == "assistant"]
    if ends and max(wanted) > ends[-1]:  # turns of others after the last answer
        ends.append(len(messages) - 1)
    if not ends:
        yield record
        return
    start = 0
    for end in ends:
        before = tuple({**each, "weight": 0} for each in messages[:start])  # trained in sequences before this one
        yield dataclasses.replace(record, messages=before + messages[start : end + 1])
        start = end + 1


def examples_of(counts: Sequence[int], sources: np.ndarray) -> np.ndarray:
    """The first sequence of each example, int64 `[num_examples + 1]`. counts: beginnings of each record. sources: of
    each sequence the beginning that it is of; records of which nothing is left are no examples.
    """
    of_record = np.repeat(np.arange(len(counts)), counts)[sources]
    # -1 is no record: the first of all and the end differ from it.
    return np.flatnonzero(np.diff(of_record, prepend=-1, append=-1)).astype(np.int64)


def words_of(examples: np.ndarray, lengths: np.ndarray) -> str:
    """What it costs, in one line. lengths: of the sequences, in tokens."""
    longest = np.maximum.reduceat(lengths, examples[:-1])
    factor = lengths.sum() / longest.sum()
    number = f"{len(lengths):,} sequences of {len(examples) - 1:,} records"
    return f"data.turns: apart: {number}, {factor:.2f} times the tokens of the longest of each"

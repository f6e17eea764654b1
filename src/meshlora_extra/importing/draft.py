"""A run file in the making: what a recipe says, what each of its keys became, and what has no place.

Owns: the book-keeping. Does not own: what keys mean (`run.config.foreign`, and the rules of each trainer beside this
file), the text of the file (`meshlora_extra.importing.write`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshlora.run.config.foreign.fact import Fact, Trainer
from meshlora.run.config.foreign.trainers import NUMBERS, facts_of
from meshlora_ground.errors import UserError, one_line

_MOST = 10**15


@dataclass(frozen=True)
class Recipe:
    """A recipe as it was read.

    Attributes:
        file: where it stands. trainer: whose it is. given: its keys and values; keys of groups with dots between.
        method: what its command or class says that it does: sft, dpo, ...; empty: nothing.
        beside: paths of other files that may belong to it. notes: what was noticed as it was read.
        lost: (key, value, why) of what could not be read.
    """

    file: Path
    trainer: Trainer
    given: Mapping[str, Any]
    method: str = ""
    beside: tuple[Path, ...] = ()
    notes: tuple[str, ...] = ()
    lost: tuple[tuple[str, Any, str], ...] = ()


@dataclass(frozen=True)
class Gap:
    """A key without an answer here."""

    key: str
    value: Any
    why: str


@dataclass
class Draft:
    """The run file of a recipe.

    Attributes:
        num_processes: that sizes are multiplied by. values: our key, with dots -> its value. why: -> what it comes
            from. notes: what is silently different. gaps: what has no answer. idle: keys that change no number.
    """

    recipe: Recipe
    num_processes: int
    values: dict[str, Any] = field(default_factory=dict)
    why: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    gaps: list[Gap] = field(default_factory=list)
    idle: list[str] = field(default_factory=list)
    read: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.facts = facts_of(self.recipe.trainer)
        given = {name: self._checked(name, value) for name, value in self.recipe.given.items()}
        self.recipe = dataclasses.replace(self.recipe, given=given)
        self.notes += self.recipe.notes
        self.gaps += [Gap(*each) for each in self.recipe.lost]

    def _checked(self, name: str, value: Any) -> Any:
        """`value`, as a number where it must be one. Raises: UserError: it is none."""
        if name.rpartition(".")[2] not in NUMBERS or value is None:
            return value
        try:
            if isinstance(value, str):
                value = float(value)
            number = value if isinstance(value, int) else float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if isinstance(value, bool) or not math.isfinite(number) or abs(number) > _MOST:
            raise self.refuse(f"{name}: {one_line(str(value), 80)}", "it is a number there", "correct it in the recipe")
        return int(number) if isinstance(value, float) and number == int(number) >= 1 else number

    @property
    def title(self) -> str:
        """The trainer's name."""
        return self.recipe.trainer.title

    def take(self, *names: str, default: Any = None) -> Any:
        """The value of the first of `names` that is given, and not null. All of them count as read."""
        self.read.update(names)
        found = [self.recipe.given[name] for name in names if self.recipe.given.get(name) is not None]
        return found[0] if found else default

    def names(self, given: Any, whose: str) -> list[str]:
        """A list of names, or one. Raises: UserError: it is something else. whose: the key that it is of."""
        found = given if isinstance(given, list | tuple) else [given]
        if not all(isinstance(each, str) and each for each in found):
            raise self.refuse(f"{whose}: {one_line(str(given), 80)}", "it is a name there, or a list of names")
        return list(found)

    def has(self, *names: str) -> bool:
        """Whether one of `names` is given, and says something."""
        return any(self.recipe.given.get(name) not in (None, False, "", [], {}) for name in names)

    def under(self, group: str) -> dict[str, Any]:
        """The keys of a group that nothing has read yet, without its name. They count as read."""
        found = {}
        for name, value in self.recipe.given.items():
            if name.startswith(f"{group}.") and name not in self.read:
                found[name.removeprefix(f"{group}.")] = value
                self.read.add(name)
        return found

    def put(self, key: str, value: Any, why: str) -> None:
        """Write a key of ours. why: which of theirs it comes from, and what differs."""
        self.values[key], self.why[key] = value, why

    def copy(self, key: str, *names: str) -> bool:
        """Write a key of ours with the value of the first of `names` that is given. Returns whether one is."""
        value = self.take(*names)
        if value is not None:
            self.put(key, value, names[0])
        return value is not None

    def say(self, text: str) -> None:
        """Note what is different, once."""
        if text not in self.notes:
            self.notes.append(text)

    def lose(self, key: str, value: Any, why: str) -> None:
        """Note a key without an answer."""
        self.read.add(key)
        self.gaps.append(Gap(key, value, why))

    def refuse(self, given: str, rule: str, way_out: str = "") -> UserError:
        """The error for a recipe that is none of an adapter's training."""
        return UserError(f"{self.recipe.file} ({self.title}): {given}", rule, way_out)

    @property
    def left(self) -> Iterator[tuple[str, Any]]:
        """The keys that no rule has read, with their values; null says nothing."""
        for name, value in self.recipe.given.items():
            if name not in self.read and value is not None:
                yield name, value

    def fact(self, name: str) -> Fact | None:
        """The row of a key, or of its group."""
        if (found := self.facts.get(name)) is not None:
            return found
        parts = name.split(".")
        groups = [".".join(parts[:count]) for count in range(len(parts) - 1, 0, -1)]
        for group in groups:
            for row in (f"{group}.*", group):
                if row in self.facts:
                    return self.facts[row]
        return None


def take_the_rest(draft: Draft) -> None:
    """Read the keys that no rule has read, as the table has them."""
    for name, value in list(draft.left):
        if name in draft.read:  # with others of its group
            continue
        fact = draft.fact(name)
        if fact is None:
            _lose_unknown(draft, name, value)
        elif fact.how == "no effect":
            draft.idle.append(name)
        elif fact.how == "no answer":
            if fact.is_off(value):
                draft.idle.append(name)
            elif name not in draft.facts:  # the row is of its group
                group = name.partition(".")[0]
                draft.lose(group, {name.partition(".")[2]: value, **draft.under(group)}, fact.note)
            else:
                draft.lose(name, value, fact.note)
        else:
            _take(draft, name, value, fact)


def _lose_unknown(draft: Draft, name: str, value: Any) -> None:
    """A key that the table has not, with its whole group, if it has nothing of that."""
    group = name.partition(".")[0]
    if "." in name and not any(each.partition(".")[0] == group for each in draft.facts):
        name, value = group, draft.under(group)
    if value not in (False, "", [], {}):
        draft.lose(name, value, "this key is not in the table of meshlora import")


def _take(draft: Draft, name: str, value: Any, fact: Fact) -> None:
    """Write a key that is one of ours by another name."""
    if fact.how == "approximated":
        draft.say(f"{name}: {fact.note}")
    if not fact.here or fact.how == "computed":  # what it says is in other keys, or said by nothing
        draft.idle.append(name)
        return
    if fact.values is not None:
        low = str(value).lower()
        if low not in fact.values and fact.how == "same":
            draft.lose(name, value, f"{fact.here} has {', '.join(map(str, fact.values.values()))}")
            return
        value = fact.values.get(low, next(iter(fact.values.values())))
        if value is None:
            draft.idle.append(name)
            return
    if fact.is_off(value) and fact.key.startswith("lora."):
        draft.idle.append(name)
        return
    draft.put(fact.key, value, f"{name}; {fact.note}" if fact.note and fact.how == "same" else name)


def fill_defaults(draft: Draft) -> None:
    """Write the trainer's defaults wherever the recipe says nothing: never ours."""
    for key, value in draft.recipe.trainer.defaults.items():
        if key not in draft.values and _has_effect(draft, key):
            draft.put(key, value, f"the default of {draft.title}")


def _has_effect(draft: Draft, key: str) -> bool:
    values = draft.values
    if key == "train.keep_last":
        return "train.save_every" in values
    if key.startswith("lora."):
        return "adapter" not in values
    return True

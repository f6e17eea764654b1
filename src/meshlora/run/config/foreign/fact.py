"""The rows of the table of other trainers' keys.

Owns: what a row says. Does not own: the rows, trainer by trainer, in the YAML beside it, and how they are written
there (`run.config.foreign.trainers`); what is computed from several keys (`meshlora_extra.importing`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

How = Literal["same", "computed", "approximated", "no effect", "no answer"]


@dataclass(frozen=True)
class Fact:
    """What keys of another trainer are here.

    Attributes:
        names: their keys, with spaces between; one of a group is written with dots.
        here: our key, perhaps with words behind a comma, as a message says it; empty: there is none.
        how: same: the value is taken; computed: from several keys, or with sizes; approximated: taken, and what
            differs is said; no effect: on no number; no answer: the run would be another one.
        note: what is silently different, or why there is none.
        values: their values -> ours, in small letters, where these have names of their own; others have no answer.
        off: values with which nothing is lost, beside none, false and empty ones.
    """

    names: str
    here: str
    how: How
    note: str = ""
    values: Mapping[str, Any] | None = None
    off: tuple[Any, ...] = ()

    @property
    def key(self) -> str:
        """Our key, without the words behind it."""
        return self.here.partition(",")[0]

    def is_off(self, value: Any) -> bool:
        """Whether nothing is lost without this value."""
        return value in (None, False, "", [], {}) or value in self.off


@dataclass(frozen=True)
class Trainer:
    """A trainer whose recipes can be imported.

    Attributes:
        name: of `--from`. title: as its makers write it. recipe: what is imported.
        signs: keys that no other trainer has, by which a recipe is recognised.
        facts: its own rows, before those that it inherits. inherits: whether its arguments are also transformers'.
        defaults: our key -> the value that its default means; written wherever a recipe does not say it.
        differs: what is silently different in every run.
    """

    name: str
    title: str
    recipe: str
    signs: tuple[str, ...]
    facts: tuple[Fact, ...]
    inherits: bool = True
    defaults: Mapping[str, Any] = field(default_factory=dict)
    differs: tuple[str, ...] = ()


def by_name(facts: tuple[Fact, ...]) -> dict[str, Fact]:
    """Their key -> its row; of several rows the first."""
    found: dict[str, Fact] = {}
    for fact in facts:
        for name in fact.names.split():
            found.setdefault(name, fact)
    return found

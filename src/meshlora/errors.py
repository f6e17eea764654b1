"""The exceptions that meshlora raises on purpose.

Owns: what a user's mistake looks like. Does not own: when it is raised, or how the command line prints it.
"""

from __future__ import annotations

import difflib
import textwrap
from collections.abc import Iterable

_LONGEST_QUOTE = 400


class MeshloraError(Exception):
    """Base of every exception raised on purpose. `exit_code` is what the command line returns for it."""

    exit_code = 1


class UserError(MeshloraError):
    """A user's mistake, as one message: what was given, the rule, the way out.

    Args:
        given: what was found, with its value (`tp=3`).
        rule: what it should have been (`must divide num_key_value_heads=8`).
        way_out: what to do instead (`use tp in {1, 2, 4, 8}`); empty where the rule says it already.
    """

    exit_code = 2

    def __init__(self, given: str, rule: str, way_out: str = "") -> None:
        self.given, self.rule, self.way_out = given, rule, way_out
        super().__init__(f"{given}: {rule}" + (f"; {way_out}" if way_out else ""))

    def __reduce__(self) -> tuple[type[UserError], tuple[str, str, str]]:
        # Exceptions with several arguments need this to travel between processes.
        return type(self), (self.given, self.rule, self.way_out)


class UnsupportedError(UserError):
    """Right in principle, but not proved to be exact here; refused rather than tried."""


class SaveError(MeshloraError):
    """A folder could not be written: what was there before is whole. Raised on all ranks, with the same words."""


class CollectiveTimeoutError(MeshloraError):
    """Other ranks did not come to a collective in time."""


class RankFailedError(MeshloraError):
    """Another rank failed first; its cause is the message."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`did you mean 'x'?`, or the list of what is known where nothing is near."""
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if near:
        return f"did you mean {near[0]!r}?"
    return "known: " + textwrap.shorten(", ".join(known), _LONGEST_QUOTE, placeholder=" …")


def reason(error: BaseException) -> str:
    """What a library says of its own failure, on one line of bounded length."""
    # "KeyError: 'rope'" says more than "'rope'"; the messages of these two are whole sentences.
    name = "" if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: "
    return textwrap.shorten(f"{name}{error}", _LONGEST_QUOTE, placeholder=" …")

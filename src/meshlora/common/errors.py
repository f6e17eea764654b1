"""The exceptions that meshlora raises on purpose.

Owns: what a user's mistake looks like; that a message is safe to print, however long and wild the values in it are.
Does not own: when it is raised, or how the command line prints it.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

from meshlora.common.words import fitted, one_line, printable, shortened

# With `error: rank 12: ` before it, and a newline after it, below 2,000 characters.
_LONGEST_MESSAGE = 1_960
_LONGEST_REPORT = 20_000
_HEAD_OF_REPORT = 2_000
_LONGEST_QUOTE = 400
_LONGEST_NAME = 200  # of those that are compared: what is longer is no slip of the keyboard
# We continue a message on indented lines. Any other newline is that of a value, which could begin with `error: `.
_NEWLINE_OF_VALUE = re.compile(r"\n(?!  )")


class MeshloraError(Exception):
    """Base of every exception raised on purpose. `exit_code` is what the command line returns for it.

    Its message is escaped and of bounded length as soon as it exists, hence at every edge that prints it.
    is_report: the message holds tracebacks: it keeps its lines, and may be longer.
    """

    exit_code = 1
    is_report = False

    def __init__(self, message: str = "") -> None:
        super().__init__(report(message) if self.is_report else shortened(_escaped(message), _LONGEST_MESSAGE))


class UserError(MeshloraError):
    """A user's mistake, as one message: what was given, the rule, the way out.

    Args:
        given: what was found, with its value (`tp=3`).
        rule: what it should have been (`must divide num_key_value_heads=8`).
        way_out: what to do instead (`use tp in {1, 2, 4, 8}`); empty where the rule says it already.

    Of a message that is too long, the longest of the three is shortened.
    """

    exit_code = 2

    def __init__(self, given: str, rule: str, way_out: str = "") -> None:
        parts = [_escaped(part) for part in (given, rule, way_out)]
        self.given, self.rule, self.way_out = fitted(parts, _LONGEST_MESSAGE - len(": ; "))
        super().__init__(f"{self.given}: {self.rule}" + (f"; {self.way_out}" if self.way_out else ""))

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
    """Another rank failed first; its cause is the message: that of its error, or its traceback."""

    is_report = True


def report(text: str) -> str:
    """A traceback, or several, fit to print: escaped, and without its middle where it is long. The cause is its end."""
    return shortened(printable(text), _LONGEST_REPORT, head=_HEAD_OF_REPORT)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`did you mean 'x'?`, or the list of what is known where nothing is near."""
    known = sorted(known)
    short = [each for each in known if len(each) <= _LONGEST_NAME] if len(name) <= _LONGEST_NAME else []
    near = difflib.get_close_matches(name, short, n=1, cutoff=0.5)
    if near:
        return f"did you mean {near[0]!r}?"
    return "known: " + one_line(", ".join(each[:_LONGEST_QUOTE] for each in known[:_LONGEST_QUOTE]), _LONGEST_QUOTE)


def reason(error: BaseException) -> str:
    """What a library says of its own failure, on one line of bounded length."""
    # "KeyError: 'rope'" says more than "'rope'"; the messages of these two are whole sentences.
    name = "" if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: "
    return one_line(f"{name}{error}", _LONGEST_QUOTE)


def _escaped(text: object) -> str:
    # A message of a mistake must not fail itself, as where a name that was read from YAML is a number.
    return _NEWLINE_OF_VALUE.sub(r"\\n", printable(f"{text}"))

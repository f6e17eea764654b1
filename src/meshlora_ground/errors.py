"""The exceptions that meshlora raises on purpose, and the escaping and shortening of untrusted text.

Any message is safe to print, however long or hostile the values in it. Does not own: how the command line prints them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

# With `error: rank 12: ` before it, and a newline after it, below 2,000 characters.
_LONGEST_MESSAGE = 1_960
_LONGEST_REPORT = 20_000
_HEAD_OF_REPORT = 2_000
_LONGEST_QUOTE = 400
_MOST_NUMBERS = 16
_MOST_MISTAKES, _LONGEST_LINE = 40, 180
_LONGEST_NAME = 200  # of names compared for similarity: anything longer is not a typo
# Our own messages continue on indented lines. Any other newline is from a value, which could begin with `error: `.
_NEWLINE_OF_VALUE = re.compile(r"\n(?!  )")
# Characters that control a terminal, except newline and tab: C0, DEL, C1; Unicode line separators and bidirectional
# overrides; lone surrogates, which cannot be encoded at all.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_CUT = " … "


class MeshloraError(Exception):
    """Base of every exception raised on purpose. `exit_code`: the exit status of the command line.

    The message is escaped and bounded on construction, so every place that prints it is safe.
    is_report: the message holds tracebacks, so it keeps its lines and may be longer.
    """

    exit_code = 1
    is_report = False
    longest = _LONGEST_MESSAGE

    def __init__(self, message: str = "") -> None:
        if self.is_report:
            super().__init__(report(message))
        else:
            super().__init__(shortened(_escaped(message), self.longest))


class UserError(MeshloraError):
    """A user's mistake as one message: the given value, the rule, the way out.

        raise UserError("tp=3", "must divide num_key_value_heads=8", "use tp in {1, 2, 4, 8}")

    way_out: empty if the rule already says what to do. In a message that is too long, the longest part is shortened.
    """

    exit_code = 2

    def __init__(self, given: str, rule: str, way_out: str = "") -> None:
        parts = list(map(_escaped, (given, rule, way_out)))
        self.given, self.rule, self.way_out = fitted(parts, _LONGEST_MESSAGE - len(": ; "))
        message = f"{self.given}: {self.rule}"
        if self.way_out:
            message += f"; {self.way_out}"
        super().__init__(message)

    def __reduce__(self) -> tuple[Any, ...]:
        # Exceptions with several arguments need this to travel between processes.
        return type(self), (self.given, self.rule, self.way_out)


class UnsupportedError(UserError):
    """Valid in principle but not proved exact here, hence refused."""


class Mistakes(UserError):
    """Several mistakes of a user, one a line, in the order in which to mend them: `raise at_once(found)`."""

    longest = 8_000

    def __init__(self, *found: UserError) -> None:
        self.found = found
        shown = found[:_MOST_MISTAKES]
        lines = []
        for error in shown:
            line = shortened(f"{error}", self.longest // len(shown) - len("\n  "))
            if error.way_out.startswith("known: "):
                line = one_line(line, _LONGEST_LINE)
            lines.append(line.replace("\n  ", "\n    "))  # a message may have lines of its own
        if len(found) > len(shown):
            lines.append(f"and {len(found) - len(shown)} more")
        self.given, self.rule, self.way_out = f"{len(found)} mistakes", "\n  ".join(lines), ""
        MeshloraError.__init__(self, f"{self.given}:\n  {self.rule}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self.found


class SaveError(MeshloraError):
    """A folder could not be written; its previous content is intact. Raised on all ranks with the same message."""


class CollectiveTimeoutError(MeshloraError):
    """Other ranks did not reach a collective in time."""


class RankFailedError(MeshloraError):
    """Another rank failed first; the message is that rank's error or traceback."""

    is_report = True


def report(text: str) -> str:
    """Tracebacks escaped for printing, without the middle if they are long: the cause is at the end."""
    return shortened(printable(text), _LONGEST_REPORT, head=_HEAD_OF_REPORT)


def each_of(error: UserError) -> Sequence[UserError]:
    """The mistakes in `error`, which is one of them unless it is of several."""
    return error.found if isinstance(error, Mistakes) else [error]


def at_once(found: Iterable[UserError]) -> UserError:
    """The error for all of `found`, at least one, each said once.

    >>> print(at_once([UserError("tp=3", "too many"), UserError("dp=0", "too few"), UserError("tp=3", "too many")]))
    2 mistakes:
      tp=3: too many
      dp=0: too few
    """
    each: dict[str, UserError] = {}
    for error in found:
        for one in each_of(error):
            each.setdefault(f"{one}", one)
    only, *others = each.values()
    return Mistakes(only, *others) if others else only


def prefixed(error: UserError, prefix: str) -> UserError:
    """`error` with `prefix` before what was given, in each of its mistakes."""
    named = [type(each)(f"{prefix}{each.given}", each.rule, each.way_out) for each in each_of(error)]
    return at_once(named)


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The one of `known` that `name` is a slip of the keys for; None if each is another word.

    Letters that are left out, added, changed or swapped count, as few as the name is short; neither case nor `-` and
    `_` do. What both end in after a dot does not make them alike: `nope.jsonl` is no slip for `eval.jsonl`.

    >>> nearest("topolgy", ["topology", "train"]), nearest("rank", ["r", "rank_pattern"])
    ('topology', None)
    """
    known = sorted(known)
    whole = [each for each in known if each.endswith(f".{name}") or name.endswith(f".{each}")]
    if len(whole) == 1:  # without the beginning, or with one too many
        return whole[0]
    best: tuple[int, int, str] | None = None  # of two as near the one that begins alike: `tpp` is `tp`, not `pp`
    for each in known:
        if max(len(name), len(each)) > _LONGEST_NAME:
            continue
        given, other = _apart(name, each)
        # Of 3 to 5 letters one may be wrong; "dp" and "tp" are two words.
        most = 0
        if len(given) > 2:
            most = 1 if len(given) < 6 else max(2, len(given) // 10)
        number = _distance(given, other, most)
        if number > most:
            continue
        found = (number, -_num_alike(given, other), each)
        if best is None or found < best:
            best = found
    return None if best is None else best[-1]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`did you mean 'x'?`, or the list of known names if none is close."""
    known = sorted(known)
    if near := nearest(name, known):
        return f"did you mean {near!r}?"
    return "known: " + one_line(", ".join(each[:_LONGEST_QUOTE] for each in known[:_LONGEST_QUOTE]), _LONGEST_QUOTE)


def _apart(name: str, other: str) -> tuple[str, str]:
    """Two names without case and separators, and without the ends that they share after a dot."""
    first, second = (re.sub("[-_ ]", "", each.lower()).split(".") for each in (name, other))
    while len(first) > 1 and len(second) > 1 and first[-1] == second[-1]:
        del first[-1], second[-1]
    return ".".join(first), ".".join(second)


def _num_alike(a: str, b: str) -> int:
    """How many letters two names begin alike."""
    same = 0
    while same < min(len(a), len(b)) and a[same] == b[same]:
        same += 1
    return same


def _distance(a: str, b: str, most: int) -> int:
    """Letters left out, added, changed or swapped between two names (optimal string alignment), if `most` or fewer."""
    if abs(len(a) - len(b)) > most:
        return most + 1
    # Names of tensors are long, many, and begin alike.
    same = _num_alike(a, b)
    a, b = a[same:], b[same:]
    before, row = list[int](), [*range(len(b) + 1)]
    for i, letter in enumerate(a, 1):
        earlier, before, row = before, row, [i]
        for j, other in enumerate(b, 1):
            cost = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (letter != other))
            if i > 1 and j > 1 and letter == b[j - 2] and a[i - 2] == other:
                cost = min(cost, earlier[j - 2] + 1)
            row.append(cost)
        if min(row) > most:  # it can only grow
            return most + 1
    return row[-1]


def numbered(what: str, numbers: Sequence[int]) -> str:
    """`ranks 0, 1 and 6 more`: the first of `numbers`."""
    shown = ", ".join(map(str, numbers[:_MOST_NUMBERS]))
    if len(numbers) == 1:
        return f"{what} {shown}"
    if len(numbers) > _MOST_NUMBERS:
        shown += f" and {len(numbers) - _MOST_NUMBERS} more"
    return f"{what}s {shown}"


def reason(error: BaseException) -> str:
    """A library's exception as one line of bounded length."""
    # "KeyError: 'rope'" says more than "'rope'"; messages of ValueError and OSError are whole sentences.
    text = f"{error}"
    if not isinstance(error, ValueError | OSError):
        text = f"{type(error).__name__}: {text}"
    return one_line(text, _LONGEST_QUOTE)


def _escaped(text: object) -> str:
    # Building an error message must not fail itself, as it would if a name read from YAML is a number.
    return _NEWLINE_OF_VALUE.sub(r"\\n", printable(f"{text}"))


def printable(text: str) -> str:
    r"""`text` with control characters as Python escapes: `\x1b`. Newlines and tabs stay."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def one_line(text: str, limit: int) -> str:
    """The beginning of `text` on one line of at most `limit` characters."""
    line = printable(" ".join(text[: 8 * limit].split()))
    if len(line) <= limit and len(text) <= 8 * limit:
        return line
    head = line[: limit - 2]
    words = head.rpartition(" ")[0]  # cut between words, unless that loses more than half
    return f"{words if 2 * len(words) > limit else head} …"


def shortened(text: str, limit: int, *, head: int | None = None) -> str:
    """`text` cut in the middle to `limit` characters, with the first `head` (default: two thirds) kept."""
    if len(text) <= limit:
        return text
    kept = limit - len(_CUT)
    begin = 2 * kept // 3 if head is None else head
    return f"{text[:begin]}{_CUT}{text[len(text) - (kept - begin) :]}"


def fitted(parts: Sequence[str], room: int) -> list[str]:
    """`parts` with the longest shortened to a common length, so that the total is at most `room` characters."""
    left, limit = room, room
    for number, length in enumerate(sorted(map(len, parts))):
        limit = left // (len(parts) - number)
        if length > limit:
            break
        left -= length
        limit = room
    return [shortened(part, limit) for part in parts]

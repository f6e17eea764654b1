"""One test of many values: what `pytest.mark.parametrize` would make a case each, in a loop that collects failures.

A case of pytest costs some milliseconds however little it looks at. What takes less than that, or needs the same ranks,
is a loop; each value that fails is reported by its name, with a traceback of its own, and the others are still tried.
"""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

Test = Callable[..., None]
_LONGEST_NAME = 60


def for_each(
    names: str | tuple[str, ...], values: Iterable[Any], ids: Iterable[str] | Callable[[Any], str] | None = None
) -> Callable[[Test], Test]:
    """As `pytest.mark.parametrize(names, values, ids)`, in one test. Two of them try each pair.

    A case has a `tmp_path` of its own, its own patches of `monkeypatch`, and of `capsys` and `capfd` its own text. All
    other fixtures it shares with the cases before it.
    """

    def loop_over(test: Test) -> Test:
        body, inner = getattr(test, "cases", (test, [("", {})]))
        outer = _cases((names,) if isinstance(names, str) else names, list(values), ids)
        cases = [("-".join(filter(None, (n, m))), {**a, **b}) for n, a in outer for m, b in inner]
        assert cases, "no value to test"

        @functools.wraps(test)
        def run(subtests: pytest.Subtests, **fixtures: Any) -> None:
            for number, (name, values_of_case) in enumerate(cases):
                try:
                    with _own(fixtures, number) as fixtures_of_case:
                        body(**fixtures_of_case, **values_of_case)
                except BaseException:  # pytest.fail and pytest.skip too
                    with subtests.test(name):
                        raise

        shared = [p for p in inspect.signature(body).parameters.values() if p.name not in cases[0][1]]
        asked = [*shared, inspect.Parameter("subtests", inspect.Parameter.KEYWORD_ONLY)]
        run.__signature__ = inspect.Signature(asked)  # type: ignore[attr-defined]
        run.cases = body, cases  # type: ignore[attr-defined]
        return run

    return loop_over


def _cases(
    names: tuple[str, ...], values: list[Any], ids: Iterable[str] | Callable[[Any], str] | None
) -> list[tuple[str, dict[str, Any]]]:
    """Name and arguments of each case. Names that would come twice have the number of their case behind them."""
    words = [""] * len(values) if ids is None or callable(ids) else list(ids)
    found = []
    for number, (value, word) in enumerate(zip(values, words, strict=True)):
        given = (value,) if len(names) == 1 else value
        if isinstance(value, type(pytest.param())):
            assert not value.marks, "a case of a loop has no marks"
            given, word = value.values, str(value.id or word)
        case = dict(zip(names, given, strict=True))
        if not word:
            of_each = [(ids(one) if callable(ids) else "") or _word(one, f"{key}{number}") for key, one in case.items()]
            word = "-".join(of_each)
        found.append((word, case))
    times = Counter(word for word, _ in found)
    return [(word if times[word] == 1 else f"{word}-{number}", case) for number, (word, case) in enumerate(found)]


def _word(value: Any, otherwise: str) -> str:
    """What a value is called: itself, if it is short."""
    word = str(value) if isinstance(value, str | int | float | None) else getattr(value, "__name__", "")
    return word if word.isprintable() and 0 < len(word) <= _LONGEST_NAME and word != "<lambda>" else otherwise


@contextmanager
def _own(fixtures: dict[str, Any], number: int) -> Iterator[dict[str, Any]]:
    """`fixtures`, as they are for the case of this number."""
    fixtures = dict(fixtures)
    if "tmp_path" in fixtures:
        fixtures["tmp_path"] /= str(number)
        fixtures["tmp_path"].mkdir()
    for name in {"capsys", "capfd"} & fixtures.keys():
        fixtures[name].readouterr()
    with pytest.MonkeyPatch.context() as patch:
        if "monkeypatch" in fixtures:
            fixtures["monkeypatch"] = patch
        yield fixtures

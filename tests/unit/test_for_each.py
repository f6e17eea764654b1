"""A loop of cases tries all of them, and says of each that fails which it is."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.for_each import for_each


class Told:
    """What a loop reports, in the place of pytest's `subtests`."""

    def __init__(self) -> None:
        self.failed: list[str] = []

    @contextmanager
    def test(self, name: str) -> Iterator[None]:
        try:
            yield
        except (Exception, pytest.fail.Exception) as error:  # noqa: BLE001
            self.failed.append(f"{name}: {error!r}")


def _told(test: Any, **fixtures: Any) -> list[str]:
    told = Told()
    test(subtests=told, **fixtures)
    return told.failed


def test_each_case_is_tried_and_those_that_fail_are_named() -> None:
    tried = []

    @for_each(("number", "word"), [(1, "one"), pytest.param(2, "two", id="pair"), ([], "list")])
    @for_each("flag", [False, True])
    def body(flag: bool, number: Any, word: str) -> None:
        tried.append((number, word, flag))
        if number != 1 and flag:
            raise ValueError(word)
        if number == 2:
            pytest.fail("two")

    assert _told(body) == ["pair-False: two", "pair-True: ValueError('two')", "number2-list-True: ValueError('list')"]
    pairs: list[tuple[Any, str]] = [(1, "one"), (2, "two"), ([], "list")]
    assert tried == [(*pair, flag) for pair in pairs for flag in (False, True)]


def test_names_are_of_a_line() -> None:
    @for_each("text", ["short", "x" * 1000, "\x1b", sys, None, "short", lambda: 0])
    def body(text: Any) -> None:
        raise ValueError

    @for_each(("text", "number"), [("a", 1), ("b", None)], ids=lambda value: ascii(value) if value else "")
    def with_ids(text: str, number: int | None) -> None:
        raise ValueError

    names = [said.partition(":")[0] for said in _told(body)]
    assert names == ["short-0", "text1", "text2", "sys", "None", "short-5", "text6"]
    assert [said.partition(":")[0] for said in _told(with_ids)] == ["'a'-1", "'b'-None"]


def test_a_case_sees_nothing_of_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @for_each("number", [1, 2, 3])
    def body(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        assert not list(tmp_path.iterdir())
        (tmp_path / "file").touch()
        assert not hasattr(sys, "case_before")
        monkeypatch.setattr(sys, "case_before", number, raising=False)
        print(number)
        assert number != 2
        assert capsys.readouterr().out == f"{number}\n"

    told = _told(body, tmp_path=tmp_path, monkeypatch=monkeypatch, capsys=capsys)
    assert [said.partition(":")[0] for said in told] == ["2"]


def test_a_loop_of_nothing_is_no_test() -> None:
    with pytest.raises(AssertionError, match="no value"):
        for_each("name", [])(lambda name: None)
    with pytest.raises(AssertionError, match="no marks"):
        for_each("name", [pytest.param(1, marks=pytest.mark.proof)])(lambda name: None)


@for_each("number", [1, 2])
@pytest.mark.parametrize("letter", ["a"])
def test_both_kinds_of_cases_go_together(number: int, letter: str, tmp_path: Path) -> None:
    assert (tmp_path.name, letter) == (str(number - 1), "a")

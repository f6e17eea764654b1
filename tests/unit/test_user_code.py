"""Functions of a user's own: found in files and packages, and known by the bytes of their file."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshlora_ground.errors import UserError
from meshlora_ground.user_code import file_of, is_function, load_function


def test_two_files_of_one_name_are_two_modules(tmp_path: Path) -> None:
    found = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.py").write_text(f"def f():\n    return g()\n\ndef g():\n    return {name!r}\n")
        found.append(load_function("data.map", f"{tmp_path / name / 'mine.py'}:f"))
    assert [each() for each in found] == ["one", "two"]


def test_a_function_is_known_by_the_bytes_of_its_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def f(): pass\n")
    assert (file_of(f"{file}:f"), file_of("math:sqrt")) == (file, None)
    assert load_function("x", "math:sqrt")(4) == 2


def test_what_names_no_function() -> None:
    names = ["mine.py:f", "a b/mine.py:f", "math:sqrt", "exact_match", "mine.py", "mine.py:f()", "a b:c"]
    assert [is_function(name) for name in names] == [True, True, True, False, False, False, False]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("no.py:f", "data.map=no.py:f: there is no file no.py; paths are relative to /"),
        ("no_such_module:f", "No module named 'no_such_module'; install it, or name its file"),
        ("math:no", "math has no function no"),
        ("math:pi", "math has no function pi"),
    ],
)
def test_what_is_not_there_is_said(given: str, said: str) -> None:
    with pytest.raises(UserError) as raised:
        load_function("data.map", given)
    assert said in str(raised.value)

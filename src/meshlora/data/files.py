"""Safe reading of data files: only regular files and folders, lines of bounded length, strict JSON.

Owns: that no untrusted file blocks or fills the memory. Does not own: formats (`sources.py`), records (`records.py`).
"""

from __future__ import annotations

import difflib
import errno
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, AnyStr

from meshlora.common.errors import UserError
from meshlora.common.reading import once
from meshlora.data.records import MalformedError, Problems, json_type, quoted

# No example of a million tokens is longer. JSON of small objects takes up to twenty times its length in memory.
MAX_LINE_BYTES = 16 * 2**20
_KINDS = {
    stat.S_ISFIFO: "a named pipe",
    stat.S_ISSOCK: "a socket",
    stat.S_ISCHR: "a device",
    stat.S_ISBLK: "a device",
}


def is_folder(path: Path) -> bool:
    """Whether `path` is a folder rather than a regular file. Nothing is opened, as opening a pipe would block.

    Raises:
        UserError: it is missing, or it or an entry in it is neither.
    """
    mode = _mode(path)
    if not stat.S_ISDIR(mode):
        _check_regular(path, mode)
        return False
    for entry in sorted(os.scandir(path), key=lambda entry: entry.name):
        if not stat.S_ISDIR(found := _mode(Path(entry.path))):
            _check_regular(Path(entry.path), found)
    return True


def _mode(path: Path) -> int:
    try:
        return path.stat().st_mode
    except (OSError, ValueError) as error:  # ValueError: a NUL character
        if isinstance(error, OSError) and error.errno in (errno.ENOENT, errno.ENOTDIR):
            raise UserError(f"{path}", "there is no such file", nearest_file(path)) from None
        words = error.strerror if isinstance(error, OSError) else error
        raise UserError(quoted(str(path), 200), f"cannot be read ({words})", "is this the path?") from None


def _check_regular(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind = next((words for is_kind, words in _KINDS.items() if is_kind(mode)), "something else")
        raise UserError(f"{path}", f"is {kind}; only regular files are read", "write its content to a file first")


def nearest_file(path: Path) -> str:
    """A suggestion for a path that does not exist."""
    folder = path.parent
    try:
        names = sorted(entry.name for entry in folder.iterdir())
    except OSError:
        return f"the folder {folder} does not exist either"
    near = difflib.get_close_matches(path.name, names, n=1)
    if near:
        return f"did you mean {str(folder / near[0])!r}?"
    shown = ", ".join(names[:5]) + (", …" if len(names) > 5 else "")
    return f"{folder} holds " + (shown or "nothing")


def bounded_lines(file: IO[AnyStr], path: Path) -> Iterator[AnyStr]:
    """The lines of an open file, with their line ends.

    Raises:
        UserError: one is too long, or holds a NUL, so that it is not text.
    """
    number = 0
    while line := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(line) > MAX_LINE_BYTES:
            raise UserError(
                f"{path}:{number}", f"the line is longer than {MAX_LINE_BYTES >> 20} MB", "is it one record a line?"
            )
        if (b"\0" if isinstance(line, bytes) else "\0") in line:
            raise UserError(f"{path}:{number}", "the line holds a NUL byte", "is the file text in UTF-8?")
        yield line


def text_lines(path: Path, problems: Problems) -> Iterator[tuple[str, str]]:
    """(origin, line) of each non-blank line. Split as bytes: U+2028 inside a string does not end a line."""
    with path.open("rb") as file:
        for number, raw in enumerate(bounded_lines(file, path), start=1):
            origin = f"{path}:{number}"
            try:
                # A byte order mark is allowed only at the start of the file.
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                problems.add(origin, f"not UTF-8 (byte {error.start + 1} of the line)")
                continue
            if line.strip():
                yield origin, line


def json_objects(path: Path, problems: Problems) -> Iterator[tuple[str, dict[str, Any]]]:
    """(origin, JSON object) of each line."""
    for origin, line in text_lines(path, problems):
        try:
            yield origin, parse_object(line)
        except MalformedError as error:
            problems.add(origin, error)


def parse_object(line: str) -> dict[str, Any]:
    """The JSON object in a line, without duplicate keys at any depth.

    Raises:
        MalformedError: the line is not such an object.
    """
    try:
        row = json.loads(line, object_pairs_hook=once, parse_constant=_refuse_constant)
    except RecursionError:
        raise MalformedError("bad JSON (nested too deeply)") from None
    except ValueError as error:  # also raised by a number of thousands of digits
        hint = "; one object a line is read, not one list" if line.lstrip().startswith("[") else ""
        raise MalformedError(f"bad JSON ({error}){hint}") from None
    if not isinstance(row, dict):
        raise MalformedError(f"{json_type(row)}, not an object")
    return row


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a finite number")

"""Safe reading of data files: only regular files and folders, lines of bounded length, strict JSON.

Owns: that no untrusted file blocks or fills the memory. Does not own: formats (`sources.py`), records (`records.py`).
"""

from __future__ import annotations

import codecs
import contextlib
import errno
import io
import json
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, AnyStr

from meshlora.reading.records import MalformedError, Problems, json_type, quoted
from meshlora_ground.errors import UserError, nearest, reason
from meshlora_ground.reading import found_above, once

# No example of a million tokens is longer. JSON of small objects takes up to twenty times its length in memory.
MAX_LINE_BYTES = 16 * 2**20
COMPRESSED = {".gz": "gzip", ".zst": "zstd"}
_MOST_BLANK = 1_000_000  # lines, one after the other
_LOOK_BYTES = 2**16
_WEBNLG = re.compile(rb'\{\s*"entries"\s*:\s*\[')  # the one list that people keep in an object
_NO_SPACE = re.compile(r"[^ \t\n\r]")
_KINDS = {stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}


def is_folder(path: Path) -> bool:
    """Whether `path` is a folder rather than a regular file. Nothing is opened, as opening a pipe would block. Raises:
    UserError: it is missing, or it or an entry in it is neither."""
    mode = _mode(path)  # of what a link leads to
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
            if path.is_symlink():
                rule = f"is a link to {quoted(os.readlink(path), 200)}, which is not there"
                raise UserError(f"{path}", rule) from None
            raise UserError(f"{path}", "there is no such file", nearest_file(path)) from None
        words = error.strerror if isinstance(error, OSError) else error
        raise UserError(quoted(str(path), 200), f"cannot be read ({words})", "is this the path?") from None


def _check_regular(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "something else")
        raise UserError(f"{path}", f"is {kind}; only regular files are read", "write its content to a file first")


def nearest_file(path: Path) -> str:
    """A suggestion for a path that does not exist."""
    if elsewhere := found_above(path):
        return f"from {Path.cwd()} it is {elsewhere}"
    folder = path.parent
    try:
        names = sorted(entry.name for entry in folder.iterdir())
    except OSError:
        here = "" if folder.is_absolute() else f" in {Path.cwd()}"
        return f"the folder {folder} does not exist either{here}"
    if near := nearest(path.name, names):
        return f"did you mean {str(folder / near)!r}?"
    shown = names[:5] + ["…"] * (len(names) > 5)
    return f"{folder} holds {', '.join(shown) or 'nothing'}"


def kind_of(path: Path) -> str:
    """The suffix that says how a file is read, without that of its compression."""
    if path.suffix.lower() in COMPRESSED:
        path = Path(path.stem)
    return path.suffix.lower()


@contextlib.contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """The bytes of a file, decompressed by its suffix. Raises: UserError: it is not compressed as its suffix says."""
    how = COMPRESSED.get(path.suffix.lower())
    if how is None:
        with path.open("rb") as file:
            yield file
        return
    import pyarrow

    try:
        with pyarrow.input_stream(str(path), compression=how) as stream, io.BufferedReader(stream) as file:
            yield file
    except OSError as error:
        raise UserError(f"{path}", f"it cannot be decompressed as {how} ({reason(error)})", "is it whole?") from None


def bounded_lines(file: IO[AnyStr], path: Path) -> Iterator[AnyStr]:
    """The lines of an open file, with their line ends. Raises: UserError: one is too long, or holds a NUL, so that it
    is not text; there is no end of blank ones."""
    number = num_blank = 0
    while line := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(line) > MAX_LINE_BYTES:
            rule = f"the line is longer than {MAX_LINE_BYTES >> 20} MB"
            raise UserError(f"{path}:{number}", rule, "is it one record a line?")
        if (b"\0" if isinstance(line, bytes) else "\0") in line:
            raise UserError(f"{path}:{number}", "the line holds a NUL byte", "is the file text in UTF-8?")
        if line.isspace():
            num_blank += 1
        else:
            num_blank = 0
        if num_blank > _MOST_BLANK:  # a compressed file of some KB may have some hundred million
            raise UserError(f"{path}:{number}", f"more than {_MOST_BLANK:,} blank lines", "is the file whole?")
        yield line


def text_lines(path: Path, problems: Problems) -> Iterator[tuple[str, str]]:
    """(origin, line) of each non-blank line. Split as bytes: U+2028 inside a string does not end a line."""
    with opened(path) as file:
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
    """(origin, JSON object) of each line, or of each entry of the one list that the file holds."""
    with opened(path) as file:
        start = file.read(_LOOK_BYTES).removeprefix(codecs.BOM_UTF8).lstrip()
    if start[:1] == b"[" or _WEBNLG.match(start):
        yield from _entries(path, problems, inside=start[:1] == b"{")
        return
    for origin, line in text_lines(path, problems):
        if line.strip() == "{":
            rule = "is an object over several lines; a list of records is read, or one record a line"
            raise UserError(origin, rule, "jq -c . writes one record a line")
        try:
            yield origin, parse_object(line)
        except MalformedError as error:
            problems.add(origin, error)


def _entries(path: Path, problems: Problems, *, inside: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """(origin, JSON object) of each entry of the list in a file, of which little more than one is held at once.

    inside: the file is an object, whose one value is the list.

    Raises:
        UserError: it is no JSON, with the line; what follows cannot be told apart any more.
    """
    with opened(path) as binary, io.TextIOWrapper(binary, encoding="utf-8-sig") as file:
        text = _Text(file, path)
        if inside:
            text.expect("{")
            text.value("the first key")
            text.expect(":")
        text.expect("[")
        index = 0
        is_open = text.next_character() != "]" or text.expect("]") == ""
        while is_open:
            origin, value = text.value(f"[{index}]")
            if isinstance(value, dict):
                yield origin, value
            else:
                problems.add(origin, f"{json_type(value)}, not an object")
            index += 1
            is_open = text.expect(",]") == ","
        if inside:
            text.expect("}")
        text.expect("")


class _Text:
    """JSON of which only a part is in memory. line: the number of the line of the next character."""

    def __init__(self, file: IO[str], path: Path) -> None:
        self.file, self.path, self.line = file, path, 1
        self.buffer, self.at, self.is_over = "", 0, False
        self.decoder = json.JSONDecoder(object_pairs_hook=once, parse_constant=_refuse_constant)

    def next_character(self) -> str:
        """The next one that is no space; empty at the end."""
        while True:
            match = _NO_SPACE.search(self.buffer, self.at)
            end = match.start() if match else len(self.buffer)
            self._go(end)
            if match or self.is_over:
                return self.buffer[end : end + 1]
            self._read(_LOOK_BYTES)

    def expect(self, characters: str) -> str:
        """The next character, one of `characters`; none: the end."""
        found = self.next_character()
        if found not in characters or bool(found) != bool(characters):
            wanted = " or ".join(map(repr, characters)) or "the end"
            raise self._wrong(self.line, f"{wanted} is expected, not {found!r}" if found else "it ends too early")
        self._go(self.at + len(found))
        return found

    def value(self, name: str) -> tuple[str, Any]:
        """(origin, the next value)."""
        self.next_character()
        origin = f"{self.path}:{self.line} {name}"
        while True:
            try:
                value, end = self.decoder.raw_decode(self.buffer, self.at)
                if end < len(self.buffer) or self.is_over:
                    self._go(end)
                    return origin, value
            except json.JSONDecodeError as error:
                if self.is_over or len(self.buffer) - self.at > MAX_LINE_BYTES:
                    line = self.line + self.buffer.count("\n", self.at, error.pos)
                    raise self._wrong(line, error.msg) from None
            except RecursionError:
                raise self._wrong(self.line, "nested too deeply") from None
            except ValueError as error:
                raise self._wrong(self.line, str(error)) from None
            if len(self.buffer) - self.at > MAX_LINE_BYTES:
                raise UserError(origin, f"an entry is longer than {MAX_LINE_BYTES >> 20} MB", "is it one record?")
            self._read(max(_LOOK_BYTES, len(self.buffer) - self.at))

    def _go(self, at: int) -> None:
        self.line += self.buffer.count("\n", self.at, at)
        self.at = at

    def _read(self, number: int) -> None:
        try:
            more = self.file.read(number)
        except UnicodeDecodeError:
            line = self.line + self.buffer.count("\n", self.at)
            raise UserError(f"{self.path}:{line}", "from here on it is not UTF-8") from None
        self.buffer, self.at, self.is_over = self.buffer[self.at :] + more, 0, not more

    def _wrong(self, line: int, why: str) -> UserError:
        return UserError(f"{self.path}:{line}", f"bad JSON ({why}) in the list that it holds", "correct it")


def parse_object(line: str) -> dict[str, Any]:
    """The JSON object in a line, without duplicate keys at any depth. Raises: MalformedError: it is none."""
    try:
        row = json.loads(line, object_pairs_hook=once, parse_constant=_refuse_constant)
    except RecursionError:
        raise MalformedError("bad JSON (nested too deeply)") from None
    except ValueError as error:  # also raised by a number of thousands of digits
        raise MalformedError(f"bad JSON ({error})") from None
    if not isinstance(row, dict):
        raise MalformedError(f"{json_type(row)}, not an object")
    return row


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a finite number")

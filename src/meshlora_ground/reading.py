"""Untrusted paths, text files and JSON, read as plain values.

There are limits (regular files, bytes, depth, digits), so that nothing hangs, fills the memory or fails inside a
library.
"""

from __future__ import annotations

import json
import os
import stat
from collections import Counter
from pathlib import Path
from typing import Any

from meshlora_ground.errors import UserError

# Far above any run file, configuration or checkpoint index.
MOST_BYTES = 2**20
MOST_DEPTH = 50
MOST_DIGITS = 1_000
TOO_DEEP = f"it is nested more than {MOST_DEPTH} deep"
# File systems allow names of 255 bytes, and a file is first written under a longer temporary name.
_NAME_BYTES, _PATH_BYTES = 240, 4000
_LONGEST_QUOTE = 60
_ABOVE = 4  # folders above the current one where a relative path may have been meant


def path_argument(text: str) -> str:
    """The `type=` of a path in argparse: `text` unchanged. Raises: UserError: no file can have this name."""
    if text:  # who reads an option knows best what is to be said of nothing
        check_path("path", text)
    return text


def check_path(option: str, text: str | None, *, knows_home: bool = False) -> None:
    """Refuse an impossible path. knows_home: its reader expands a leading `~`; None: it is not given.

    Raises:
        UserError: names `option`.
    """
    if text is None:
        return
    if not text.strip():
        raise UserError(f"{option}={text[:_LONGEST_QUOTE]!r}", "it must be the name of a folder or a file")
    given = f"{option}={text[:_LONGEST_QUOTE]!a}{'…' * (len(text) > _LONGEST_QUOTE)}"
    if "\0" in text:
        raise UserError(given, "a path has no NUL character")
    try:
        path = os.fsencode(text)
    except UnicodeEncodeError:
        raise UserError(given, "it holds characters that no path has") from None
    if len(path) > _PATH_BYTES or any(len(name) > _NAME_BYTES for name in path.split(b"/")):
        rule = f"a path has at most {_PATH_BYTES} bytes, and a name in it at most {_NAME_BYTES}"
        raise UserError(given, rule, "choose a shorter one")
    if not text.startswith("~"):
        return
    if not knows_home:
        raise UserError(given, "~ is not replaced here", "write the path in full, or begin it with ./")
    try:
        Path(text).expanduser()
    except RuntimeError:
        raise UserError(given, "there is no such user, or no home folder", "write the path in full") from None


def found_above(given: str | Path) -> Path | None:
    """Where a relative path is that was meant for a folder above this one; None if it is in none of the next few."""
    if os.path.isabs(given):
        return None
    for depth in range(1, _ABOVE + 1):
        place = Path(*[os.pardir] * depth, given)
        if place.exists():
            return place
    return None


def read_text(file: Path, *, most_bytes: int = MOST_BYTES) -> str:
    """The text of a regular file. Raises: OSError: it cannot be opened. ValueError: it is no text file, or large."""
    # Never block on a pipe.
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as opened:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("it is a folder, a pipe or a device, no file")
        content = opened.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise ValueError(f"it has more than the {most_bytes:,} bytes that are read of such a file")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"it is no text in UTF-8 ({error.reason} at byte {error.start:,})") from None


def parse_json(text: str) -> Any:
    """Parse JSON of bounded depth and numbers, without duplicate keys. Raises: ValueError: it is not such JSON."""
    try:
        value = json.loads(text, object_pairs_hook=once, parse_int=_integer)
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    level = [value]
    for _ in range(MOST_DEPTH):
        level = [part for value in level for part in _parts(value) if isinstance(part, dict | list)]
    if level:
        raise ValueError(TOO_DEEP)
    return value


def _parts(value: Any) -> Any:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The `object_pairs_hook=` that refuses duplicate keys in JSON. Raises: ValueError."""
    values = dict(pairs)
    if len(values) < len(pairs):
        times = Counter(key for key, _ in pairs)
        raise ValueError(f"the key {max(times, key=times.__getitem__)[:_LONGEST_QUOTE]!r} is given twice")
    return values


def _integer(text: str) -> int:
    if len(text) > MOST_DIGITS:
        raise ValueError(f"a number of {len(text):,} digits")
    return int(text)


def no_such_folder(given: str | Path) -> UserError:
    """The error for a model that is neither a folder there nor a name of the hub."""
    rule, way_out = "there is no such folder", "give a folder, or a name of the hub: OWNER/NAME"
    if Path(given).exists():
        rule, way_out = "it is a file", "give the folder of a checkpoint: config.json, safetensors, a tokenizer"
    elif not Path(given).is_absolute():
        rule += f" in {Path.cwd()}"
        if elsewhere := found_above(f"{given}"):
            way_out = f"from here it is {elsewhere}"
    return UserError(f"model {str(given)!r}", rule, way_out)

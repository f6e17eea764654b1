"""The cache of proofs: its folder, and the records of proved combinations.

Does not own: the key of a run (`verify.preflight`) or of a family (`wings.proved`), references (`verify.proof`), which
files are trusted at all (`meshlora_ground.private`).
"""

from __future__ import annotations

import contextlib
import json
import logging
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from meshlora_ground import private
from meshlora_ground.errors import UserError
from meshlora_ground.private import NotOwnError, PrivateFolder, open_own

CACHE = private.CACHE / "proofs"
# Roughly what the proof of a twin writes, so that a full disk is noticed before it.
_ENOUGH_BYTES = 8_000_000
_MOST_BYTES = 2**20  # read of a record; a real one has some ten thousand
_DATE = "%Y-%m-%d %H:%M"

logger = logging.getLogger(__name__)


def proofs_folder(cache_dir: Path) -> PrivateFolder:
    """The root of the cache, which also holds the references. Raises: RuntimeError: there is no home folder."""
    path = cache_dir.expanduser()
    return PrivateFolder(path, f"the cache of proofs, {path}", "let HOME be on another file system")


@contextlib.contextmanager
def usable_cache(cache_dir: Path) -> Iterator[tuple[Path, str]]:
    """(`cache_dir`, ""), or if it cannot be written or trusted, (a temporary folder for this proof, the reason)."""
    try:
        folder = proofs_folder(cache_dir)
        folder.make()
        with folder.usable(), tempfile.TemporaryFile(dir=folder.path) as probe:
            probe.write(bytes(_ENOUGH_BYTES))
    except (UserError, RuntimeError) as error:
        why_not = str(error)
    else:
        yield cache_dir, ""
        return
    with tempfile.TemporaryDirectory(prefix="meshlora-") as own:
        yield Path(own), why_not


def record_of(cache_dir: Path, key: str) -> Path:
    """The file that records the proof of combination `key`."""
    return proofs_folder(cache_dir).path / "passed" / f"{key}.json"


def remember(cache_dir: Path, asked: Mapping[str, Any], details: Mapping[str, Any]) -> str:
    """Record that `asked` was proved, with `details` for human readers; returns the reason if that fails, else ""."""
    record = record_of(cache_dir, asked["key"])
    content = {**details, **asked, "passed": True, "date": time.strftime(_DATE)}
    folder = PrivateFolder(record.parent, f"the cache of proofs, {record.parent}", "remove it")
    try:
        folder.write(record.name, (json.dumps(content, indent=2, sort_keys=True) + "\n").encode())
    except UserError as error:
        return str(error)
    return ""


def proved_on(cache_dir: Path, asked: Mapping[str, Any]) -> str:
    """The date of the proof of `asked`; empty if there is none, or if its record cannot be trusted.

    asked: values that the record must match exactly; its name is under `key`.
    """
    try:
        record = record_of(cache_dir, asked["key"])
        with open_own(record) as file:
            text = file.read(_MOST_BYTES)
    except NotOwnError as error:
        logger.warning("%s, so it is no proof", error)
        return ""
    except (OSError, RuntimeError):  # RuntimeError: there is no home folder
        return ""
    date = _date(text, asked)
    if not date:
        logger.warning("%s does not say that this combination was proved; it is not believed", record)
    return date


def _date(text: bytes, asked: Mapping[str, Any]) -> str:
    """The date in a record of `asked`, parsed and printed anew: the file's own text is untrusted."""
    try:
        record = json.loads(text)  # a longer one was cut, which is not JSON
        if not isinstance(record, dict) or record.get("passed") is not True:
            return ""
        # Compared as text, where 1, 1.0 and true differ.
        if any(_canonical(record.get(name)) != _canonical(value) for name, value in asked.items()):
            return ""
        return time.strftime(_DATE, time.strptime(record["date"], _DATE))
    except (ValueError, TypeError, KeyError, RecursionError):
        return ""


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True)

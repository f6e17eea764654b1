"""The cache of proofs: its folder, and the records of what was proved.

Owns: whether the folder can be used, what a record says, and when it is believed. Does not own: what stands for a run
(`verify.preflight`, `verify.many`) or a family (`plan.families.proved`), references (`verify.proof`), whose files are
believed (`common.private`).
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

from meshlora.common.errors import UserError
from meshlora.common.private import NotOwnError, PrivateFolder, open_own, write_own

CACHE = Path("~/.cache/meshlora/proofs")
# What a proof of a twin writes, roughly: a full disk is found before.
_ENOUGH_BYTES = 8_000_000
_MOST_BYTES = 2**20  # of a record that is read; they have some ten thousand
_DATE = "%Y-%m-%d %H:%M"

logger = logging.getLogger(__name__)


def proofs_folder(cache_dir: Path) -> PrivateFolder:
    """The folder of references.

    Raises:
        RuntimeError: there is no home folder.
    """
    path = cache_dir.expanduser()
    return PrivateFolder(path, f"the cache of proofs, {path}", "let HOME be on another file system")


@contextlib.contextmanager
def usable_cache(cache_dir: Path) -> Iterator[tuple[Path, str]]:
    """(`cache_dir`, nothing), or where it cannot be written or believed (a folder for this proof alone, why not)."""
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
    """The file that says that the combination `key` was proved."""
    return proofs_folder(cache_dir).path / "passed" / f"{key}.json"


def remember(cache_dir: Path, asked: Mapping[str, Any], details: Mapping[str, Any]) -> str:
    """Note that `asked` was proved, with `details` for those who read the file; returns why that is not possible."""
    record = record_of(cache_dir, asked["key"])
    content = {**details, **asked, "passed": True, "date": time.strftime(_DATE)}
    folder = PrivateFolder(record.parent, f"the cache of proofs, {record.parent}", "remove it")
    try:
        folder.make()
        with folder.usable():
            write_own(record, (json.dumps(content, indent=2, sort_keys=True) + "\n").encode())
    except UserError as error:
        return str(error)
    return ""


def proved_on(cache_dir: Path, asked: Mapping[str, Any]) -> str:
    """When `asked` was proved; empty where it was not, or its record is not to be believed.

    asked: what the record must say, value for value; under `key` its name.
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
    """When a record says that `asked` was proved; in our words, as those of the file may be anybody's."""
    try:
        record = json.loads(text)  # one that is longer is cut, which is no JSON
        if not isinstance(record, dict) or record.get("passed") is not True:
            return ""
        # As text, in which 1, 1.0 and true differ.
        if any(_canonical(record.get(name)) != _canonical(value) for name, value in asked.items()):
            return ""
        return time.strftime(_DATE, time.strptime(record["date"], _DATE))
    except (ValueError, TypeError, KeyError, RecursionError):
        return ""


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True)

"""Rows of named values, for records that are more than text: what `sources` reads as records, as plain dicts.

Owns: JSON lines, Parquet and saved `datasets` folders as rows with their origin. Does not own: what a row must hold
(`data.rollouts`, `data.preferences`).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from meshlora.data.records import MAX_SHOWN, MalformedError, json_type
from meshlora.data.sources import nearest_file, numbered_lines
from meshlora.errors import UserError, did_you_mean

Row = tuple[str, dict[str, Any]]  # where it was read, for messages to the user; its values


def read_rows(
    source: str | list[str], *, known: Collection[str], columns: Mapping[str, str] | None = None
) -> list[Row]:
    """All rows of `.jsonl`, `.parquet` or a `Dataset.save_to_disk` folder, in order. Values that are null are left out.

    known: the fields that a row may have. columns: our field -> theirs; fields that are not known are then ignored.

    Raises:
        UserError: a source that is missing, empty or of another kind; a line that is no JSON object; a column for a
            field that is not known.
    """
    for name in columns or {}:
        if name not in known:
            raise UserError(f"columns: {name!r}", "is not a field of a record", did_you_mean(name, known))
    rows: list[Row] = []
    for path in map(Path, [source] if isinstance(source, str) else source):
        found = [(origin, {k: v for k, v in row.items() if v is not None}) for origin, row in _rows_of(path)]
        if not found:
            raise UserError(f"{path}", "holds no record", "give a file with at least one")
        rows += found
    if not columns:
        return rows
    theirs = {name: name for name in known} | dict(columns)
    return [(origin, {ours: row[name] for ours, name in theirs.items() if name in row}) for origin, row in rows]


def _rows_of(path: Path) -> Iterator[Row]:
    if not path.exists():
        raise UserError(f"{path}", "there is no such file", nearest_file(path))
    if path.is_dir() or path.suffix.lower() == ".parquet":
        import datasets

        try:
            table = datasets.Dataset.load_from_disk(str(path)) if path.is_dir() else _parquet(path)
        except (OSError, ValueError, KeyError) as error:
            raise UserError(f"{path}", f"cannot be read as a dataset ({error})") from error
        yield from ((f"{path} row {number}", dict(row)) for number, row in enumerate(table.to_list()))
        return
    if path.suffix.lower() not in (".jsonl", ".json"):
        raise UserError(f"{path}", "these records are read from .jsonl, .parquet or a saved dataset", "convert it")
    for origin, line in numbered_lines(path):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise UserError(f"{origin}", f"bad JSON ({error})") from None
        if not isinstance(row, dict):
            raise UserError(f"{origin}", f"{json_type(row)}, not an object")
        yield origin, row


def _parquet(path: Path) -> Any:
    import datasets
    import pyarrow.parquet

    return datasets.Dataset(pyarrow.parquet.read_table(path))


class Mistakes:
    """Rows that cannot be used, so that a user sees several at once."""

    def __init__(self, what: str) -> None:
        self.what, self._lines, self._number = what, [], 0  # type: ignore[var-annotated]

    def add(self, origin: str, reason: object) -> None:
        """One more."""
        self._number += 1
        if self._number <= MAX_SHOWN:
            self._lines.append(f"\n  {origin}: {reason}")

    def raise_if_any(self) -> None:
        """Raises: UserError naming the first places and how many there are."""
        if self._number:
            more = f"\n  and {self._number - MAX_SHOWN} more" if self._number > MAX_SHOWN else ""
            plural = "s" if self._number > 1 else ""
            raise UserError(
                f"{self._number} malformed record{plural}",
                f"each must be {self.what}",
                "correct them, or name the columns to use in data.columns:" + "".join(self._lines) + more,
            )


def check_fields(row: Mapping[str, Any], known: tuple[str, ...]) -> None:
    """Raises: MalformedError where a row has a field that would have no effect."""
    for name in row:
        if name not in known:
            raise MalformedError(f"unknown field {name!r}; {did_you_mean(name, known)}")

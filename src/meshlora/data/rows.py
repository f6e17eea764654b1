"""Rows of named values, for records that are more than text: what `sources` reads as records, as plain dicts.

Owns: JSON lines, Parquet and saved `datasets` folders as rows with their origin. Does not own: what a row must hold
(`data.rollouts`, `data.preferences`), what a file may be (`data.files`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from meshlora.common.errors import UserError, did_you_mean, reason
from meshlora.data.files import is_folder, json_objects
from meshlora.data.records import MalformedError, Problems, Unread, quoted
from meshlora.data.sources import load_folder, table_rows

Row = tuple[str, dict[str, Any]]  # where it was read, for messages to the user; its values


def read_rows(
    source: str | list[str],
    problems: Problems,
    *,
    known: Collection[str],
    columns: Mapping[str, str] | None = None,
    say: Callable[[str], None] | None = None,
) -> list[Row]:
    """All rows of `.jsonl`, `.parquet` or a `Dataset.save_to_disk` folder, in order. Values that are null are left out.

    problems: gets the lines that are no objects. known: the fields that a row may have. columns: our field -> theirs;
    fields that are not known are then ignored, and `say` is told which, once for each path.

    Raises:
        UserError: a source that is missing, empty or of another kind; a column for a field that is not known.
    """
    for name in columns or {}:
        if name not in known:
            raise UserError(f"columns: {quoted(name)}", "is not a field of a record", did_you_mean(name[:60], known))
    theirs = {name: name for name in known} | dict(columns or {})
    read = set(theirs.values())
    rows: list[Row] = []
    for path in map(Path, [source] if isinstance(source, str) else source):
        num_before, unread = problems.num + len(rows), Unread()
        for origin, whole in _rows_of(path, problems):
            row = {name: value for name, value in whole.items() if value is not None}
            if columns:
                unread.note(row, read)
                row = {ours: row[name] for ours, name in theirs.items() if name in row}
            rows.append((origin, row))
        if problems.num + len(rows) == num_before:
            raise UserError(f"{path}", "holds no record", "give a file with at least one")
        unread.tell(f"{path}", say)
    return rows


def _rows_of(path: Path, problems: Problems) -> Iterator[Row]:
    if is_folder(path) or path.suffix.lower() == ".parquet":
        table = load_folder(path) if path.is_dir() else _parquet(path)
        yield from ((f"{path} row {number}", row) for number, row in enumerate(table_rows(table, f"{path}")))
    elif path.suffix.lower() in (".jsonl", ".json"):
        try:
            yield from json_objects(path, problems)
        except OSError as error:
            raise UserError(f"{path}", f"cannot be read ({error.strerror or error})") from error
    else:
        raise UserError(f"{path}", "these records are read from .jsonl, .parquet or a saved dataset", "convert it")


def _parquet(path: Path) -> Any:
    import datasets
    import pyarrow.parquet

    try:
        return datasets.Dataset(pyarrow.parquet.read_table(path))
    except Exception as error:  # a stranger's bytes, read by a library: anything may come
        raise UserError(f"{path}", f"is not a Parquet file that can be read ({reason(error)})") from error


def check_fields(row: Mapping[str, Any], known: tuple[str, ...]) -> None:
    """Raises: MalformedError where a row has a field that would have no effect."""
    for name in row:
        if name not in known:
            raise MalformedError(f"unknown field {quoted(name)}; {did_you_mean(name[:60], known)}")

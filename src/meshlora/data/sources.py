"""Reading local files, folders and datasets, in order, as `Record`s or as rows for other kinds of record.

Owns: the formats, the origin of each row, which columns are read, and the report of the others. Does not own: the
content of records (`records.py`, `preferences.py`, `rollouts.py`), safe reading (`files.py`), tokens, or the order of
training. Nothing is downloaded: a source is a local path or a dataset already in memory.
"""

from __future__ import annotations

import csv
import functools
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from meshlora.common.errors import UserError, did_you_mean, reason
from meshlora.data.files import bounded_lines, is_folder, json_objects, parse_object, text_lines
from meshlora.data.formats import build_record, chosen_fields, select_fields
from meshlora.data.images import locate_images
from meshlora.data.records import MalformedError, Problems, Record, listed, quoted

if TYPE_CHECKING:
    import datasets

PathLike = str | os.PathLike[str]
Row = tuple[str, dict[str, Any]]  # origin, for error messages; values
Header = Callable[[AbstractSequence[str], str], list[str] | None]
Made = TypeVar("Made")

SEPARATOR = "||"


def read_records(
    source: PathLike | AbstractSequence[PathLike] | datasets.Dataset,
    *,
    columns: Mapping[str, str] | None = None,
    say: Callable[[str], None] | None = None,
) -> list[Record]:
    """All records of `source`, in order.

    By suffix: `.jsonl` and `.json` hold one object per line, `.csv` a header and rows, `.parquet` a table; a folder is
    the output of `Dataset.save_to_disk`; other files have one `context||completion` per line. Blank lines are skipped.

    An object or row has the fields `text`, or `prompt` (also called `context`) and `completion`, or `messages`, and no
    others; values are taken literally, spaces included. In the `||` format, which cannot express deliberate spaces,
    both sides are stripped and the completion starts with exactly one space, as a word after the prompt would.

    Args:
        source: a path, several paths (read one after the other), or a `datasets.Dataset`.
        columns: our field -> theirs, e.g. `{"prompt": "question", "completion": "answer"}`; other columns are then
            ignored.
        say: called with the names of ignored columns, once per path.

    Raises:
        UserError: a source that is missing, empty, unreadable or of an unknown kind; a missing column;
            malformed rows, the first five with file and line.
    """
    chosen = chosen_fields(columns)
    # Cached, as most rows have the same names.
    keys_of = functools.lru_cache(64)(lambda names: select_fields(names, chosen))

    def header(names: AbstractSequence[str], origin: str) -> list[str]:
        """Check a table's header once, so that a wrong one is one mistake and not one per row."""
        try:
            return sorted(set(keys_of(tuple(names)).values()))
        except MalformedError as wrong:
            raise UserError(
                f"{origin}: columns {listed(names) or '(none)'}",
                str(wrong),
                "name the columns to use in data.columns, e.g. {prompt: question, completion: answer}",
            ) from None

    def lines(path: Path, problems: Problems, _: Header) -> Iterator[Row]:
        if chosen is None:
            return _text_rows(path, problems)
        given = f"columns={dict(chosen)}"
        raise UserError(given, f"has no effect on {path}, which has no named columns", "remove data.columns")

    def make(row: Mapping[str, Any], origin: str) -> tuple[Record, Iterable[str]]:
        keys = keys_of(tuple(row))
        ours = {field: row[name] for field, name in keys.items()}
        return build_record(ours, origin=origin), [name for name in row if name not in keys.values()]

    return _read(source, _RowReader(Problems(), header, {".csv": _csv_rows, "": lines}, make), say)


def read_rows(
    source: str | list[str],
    make: Callable[[dict[str, Any], str], Made],
    *,
    what: str,
    known: Collection[str],
    columns: Mapping[str, str] | None = None,
    say: Callable[[str], None] | None = None,
) -> list[Made]:
    """`make(row, origin)` of all rows of `.jsonl`, `.parquet` or a `Dataset.save_to_disk` folder, in order.

    A row is a dict without null values; origin is its source, for error messages.

    Args:
        make: raises MalformedError for an invalid row. what: the required form of a row, in words.
        known: the allowed fields. columns: our field -> theirs; unknown fields are then ignored, and `say` is called
            with their names, once per path.

    Raises:
        UserError: a source that is missing, empty or of another kind; a column for an unknown field;
            malformed rows, the first five with file and line.
    """
    for name in columns or {}:
        if name not in known:
            raise UserError(f"columns: {quoted(name)}", "is not a field of a record", did_you_mean(name[:60], known))
    theirs = {name: name for name in known} | dict(columns or {})
    read = set(theirs.values())

    def refused(path: Path, _: Problems, __: Header) -> Iterator[Row]:
        raise UserError(f"{path}", "these records are read from .jsonl, .parquet or a saved dataset", "convert it")

    def made(whole: Mapping[str, Any], origin: str) -> tuple[Made, Iterable[str]]:
        row = {name: value for name, value in whole.items() if value is not None}
        unread = [name for name in row if name not in read]
        if columns:
            row = {ours: row[name] for ours, name in theirs.items() if name in row}
        elif unread:
            raise MalformedError(f"unknown field {quoted(unread[0])}; {did_you_mean(unread[0][:60], known)}")
        return make(row, origin), unread

    return _read(source, _RowReader(Problems(what), lambda *_: None, {"": refused}, made), say)


@dataclass(frozen=True)
class _RowReader(Generic[Made]):
    """How to read one kind of rows.

    Attributes:
        header: (columns of a table, origin) -> the columns to read; None: all.
        lines: suffix of a file that is neither JSON nor Parquet -> reader of its rows; "": any other suffix.
        make: (row, origin) -> the result, and the names in the row that are not read.
    """

    problems: Problems
    header: Header
    lines: Mapping[str, Callable[[Path, Problems, Header], Iterator[Row]]]
    make: Callable[[Mapping[str, Any], str], tuple[Made, Iterable[str]]]


def _read(source: object, reader: _RowReader[Made], say: Callable[[str], None] | None) -> list[Made]:
    found: list[Made] = []
    for place in _places(source):
        name = f"{place}" if isinstance(place, Path) else "dataset"
        num_before = reader.problems.num + len(found)
        unread: dict[str, None] = {}
        try:
            for origin, row in _rows_of(place, name, reader, unread):
                try:
                    if isinstance(place, Path):
                        row = locate_images(row, place if place.is_dir() else place.parent)
                    made, rest = reader.make(row, origin)
                except MalformedError as wrong:
                    reader.problems.add(origin, wrong)
                    continue
                found.append(made)
                unread.update(dict.fromkeys(rest))
        except OSError as error:
            raise UserError(name, f"cannot be read ({error.strerror or error})") from error
        if reader.problems.num + len(found) == num_before:
            raise UserError(name, "holds no record", "give one with at least one")
        if unread and say is not None:
            # Reported, because the user chose the columns, and one of these may matter.
            words = f"{name}: not read: {listed(unread)} (data.columns says what is)"
            is_alpaca = "; in Alpaca's records `input` is part of what is asked: join it to the prompt"
            say(words + is_alpaca * ("input" in unread))
    reader.problems.raise_if_any()
    return found


def _places(source: Any) -> list[Any]:
    """Paths, or a dataset in memory."""
    if isinstance(source, (str, os.PathLike)):
        return [Path(source)]
    if isinstance(source, (list, tuple)):
        if not source:
            raise UserError("source=[]", "names no file")
        return [Path(path) for path in source]
    import datasets

    if isinstance(source, datasets.Dataset):
        return [source]
    if isinstance(source, (datasets.DatasetDict, datasets.IterableDatasetDict)):
        raise UserError(
            "source", "holds several splits", "give one: " + ", ".join(f"source[{key!r}]" for key in source)
        )
    raise UserError(f"source of type {type(source).__name__}", "must be a path, a list of paths or a datasets.Dataset")


def _rows_of(place: Any, name: str, reader: _RowReader[Any], unread: dict[str, None]) -> Iterator[Row]:
    """The rows of a path or a dataset. unread: filled with the columns of a table that are not read."""

    def header(names: AbstractSequence[str], origin: str) -> list[str] | None:
        twice = sorted(name for name, number in Counter(names).items() if number > 1)
        if twice:
            raise UserError(origin, f"has more than one column {quoted(twice[0])}", "rename one")
        columns = reader.header(names, origin)
        if columns is not None:
            unread.update(dict.fromkeys(name for name in names if name not in columns))
        return columns

    if isinstance(place, Path) and not is_folder(place):
        suffix = place.suffix.lower()
        if suffix in (".jsonl", ".json"):
            yield from json_objects(place, reader.problems)
            return
        if suffix != ".parquet":
            yield from reader.lines.get(suffix, reader.lines[""])(place, reader.problems, header)
            return
        rows = _parquet_rows(place, header)
    else:
        rows = _dataset_rows(_load_folder(place) if isinstance(place, Path) else place, name, header)
    # Counted from 0, like `dataset[index]`.
    yield from ((f"{name} row {index}", row) for index, row in enumerate(rows))


def _text_rows(path: Path, problems: Problems) -> Iterator[Row]:
    for origin, line in text_lines(path, problems):
        prompt, *completions = line.split(SEPARATOR)
        if len(completions) == 1:
            yield origin, {"prompt": prompt.strip(), "completion": " " + completions[0].strip()}
        else:
            problems.add(origin, f"{len(completions)} separators {SEPARATOR!r} in the line, not one")


def _csv_rows(path: Path, problems: Problems, header: Header) -> Iterator[Row]:
    """With the standard library: every value stays a string, and its line number is known."""
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.reader(bounded_lines(file, path), strict=True)
        try:
            names = next(reader, None)
            if names is None:
                return
            header(names, f"{path}:1")
            start = reader.line_num + 1  # a quoted value may hold newlines: name the line where the row begins
            for values in reader:
                origin, start = f"{path}:{start}", reader.line_num + 1
                if values and len(values) != len(names):
                    problems.add(origin, f"{len(values)} values under {len(names)} columns")
                elif values:
                    yield origin, dict(zip(names, values, strict=True))
        except csv.Error as error:
            problems.add(f"{path}:{reader.line_num}", f"bad CSV ({error})")
        except UnicodeDecodeError:
            # The reader decodes ahead of its current line; reading the bytes again finds the right one.
            for _ in text_lines(path, problems):
                pass


def _parquet_rows(path: Path, header: Header) -> list[dict[str, Any]]:
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            rows: list[dict[str, Any]] = file.read(columns=header(file.schema_arrow.names, f"{path}")).to_pylist()
    except UserError:
        raise
    except Exception as error:  # untrusted bytes read by a library may raise anything
        raise UserError(f"{path}", f"is not a Parquet file that can be read ({reason(error)})") from error
    return rows


def _load_folder(path: Path) -> datasets.Dataset:
    """Load the output of `Dataset.save_to_disk`.

    Raises:
        UserError: the folder is something else, or names files outside itself.
    """
    import datasets

    if (path / "dataset_dict.json").exists():
        splits = sorted(entry.name for entry in path.iterdir() if entry.is_dir())
        raise UserError(
            f"{path}", "holds several splits", "name one: " + ", ".join(str(path / name) for name in splits[:20])
        )
    if not (path / "state.json").exists():
        raise UserError(
            f"{path}", "is a folder that Dataset.save_to_disk did not write", "name the files in it instead"
        )
    try:
        state = parse_object((path / "state.json").read_text(encoding="utf-8"))
        for entry in state["_data_files"]:
            if Path(entry["filename"]).name != entry["filename"]:
                raise UserError(f"{path / 'state.json'}", f"names {quoted(entry['filename'])}, outside of its folder")
        return datasets.Dataset.load_from_disk(str(path))
    except UserError:
        raise
    except Exception as error:  # untrusted files read by a library may raise anything
        raise UserError(f"{path}", f"cannot be read as a saved dataset ({reason(error)})") from error


def _dataset_rows(dataset: datasets.Dataset, name: str, header: Header) -> list[dict[str, Any]]:
    """Plain rows of a dataset, whatever its output format; a selection of rows is respected."""
    columns = header(dataset.column_names, name)
    try:
        rows: list[dict[str, Any]] = (dataset if columns is None else dataset.select_columns(columns)).to_list()
    except Exception as error:  # untrusted tables read by a library may raise anything
        raise UserError(name, f"cannot be read as a dataset ({reason(error)})") from error
    return rows

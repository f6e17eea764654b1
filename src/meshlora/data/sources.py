"""Reading records: files, folders and datasets on this machine become `Record`s, in their order.

Owns: the formats, and where each record came from. Does not own: what a valid record is (`records.py`), tokens, or
order in training. Nothing is fetched: a source is a path here or a dataset already in memory.
"""

from __future__ import annotations

import csv
import difflib
import json
import os
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as AbstractSequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshlora.data.records import (
    MalformedError,
    Problems,
    Record,
    build_record,
    chosen_fields,
    json_type,
    select_fields,
)
from meshlora.errors import UserError

if TYPE_CHECKING:
    import datasets

PathLike = str | os.PathLike[str]

SEPARATOR = "||"


def read_records(
    source: PathLike | AbstractSequence[PathLike] | datasets.Dataset, *, columns: Mapping[str, str] | None = None
) -> list[Record]:
    """All records of `source`, in the order they stand there.

    By name: `.jsonl` and `.json` hold one object a line, `.csv` a header and rows, `.parquet` a table; a folder is what
    `Dataset.save_to_disk` wrote; any other file is text with one `context||completion` a line. Blank lines are skipped.

    An object or row has the fields `text`, or `prompt` (also called `context`) and `completion`, or `messages`, and no
    others; it is taken literally, spaces included. In the `||` format, which has no way to write a space on purpose,
    both sides are stripped and the completion starts with exactly one space, as a word after the prompt would.

    Args:
        source: a path, several paths (read one after the other), or a `datasets.Dataset`.
        columns: our field -> theirs, e.g. `{"prompt": "question", "completion": "answer"}`; all else in a row is then
            ignored.

    Raises:
        UserError: a source that is missing, empty, unreadable or of an unknown kind; a column that is not there;
            malformed rows, the first five with file and line.
    """
    chosen = chosen_fields(columns)
    problems = Problems()
    if isinstance(source, (str, os.PathLike)):
        records = _read_path(Path(source), chosen, problems)
    elif isinstance(source, (list, tuple)):
        if not source:
            raise UserError("source=[]", "names no file")
        records = [record for path in source for record in _read_path(Path(path), chosen, problems)]
    else:
        records = _read_dataset(_checked_dataset(source), "dataset", chosen, problems)
    problems.raise_if_any()
    return records


def _read_path(path: Path, chosen: Mapping[str, str] | None, problems: Problems) -> list[Record]:
    num_problems = problems.num
    if path.is_dir():
        records = _read_folder(path, chosen, problems)
    elif not path.exists():
        raise UserError(f"{path}", "there is no such file", nearest_file(path))
    else:
        reader = {".jsonl": _read_json, ".json": _read_json, ".csv": _read_csv, ".parquet": _read_parquet}
        try:
            records = reader.get(path.suffix.lower(), _read_text)(path, chosen, problems)
        except OSError as error:
            raise UserError(f"{path}", f"cannot be read ({error.strerror or error})") from error
    if not records and problems.num == num_problems:
        raise UserError(f"{path}", "holds no record", "give a file with at least one")
    return records


def nearest_file(path: Path) -> str:
    """What to try instead of a path that does not exist."""
    folder = path.parent
    if not folder.is_dir():
        return f"the folder {folder} does not exist either (only files on this machine are read, no hub names)"
    names = sorted(entry.name for entry in folder.iterdir())
    near = difflib.get_close_matches(path.name, names, n=1)
    if near:
        return f"did you mean {str(folder / near[0])!r}?"
    shown = ", ".join(names[:5]) + (", …" if len(names) > 5 else "")
    return f"{folder} holds " + (shown or "nothing")


def _lines(path: Path, problems: Problems) -> Iterator[tuple[str, str]]:
    """(origin, line) of each line that is not blank. Split on bytes: U+2028 inside a string does not end a line."""
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            origin = f"{path}:{number}"
            try:
                # A byte order mark may stand at the start of the file only.
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                problems.add(origin, f"not UTF-8 (byte {error.start + 1} of the line)")
                continue
            if line.strip():
                yield origin, line


def numbered_lines(path: Path) -> Iterator[tuple[str, str]]:
    """(origin, line) of each line that is not blank.

    Raises:
        UserError: it cannot be read.
    """
    problems = Problems()
    try:
        yield from _lines(path, problems)
    except OSError as error:
        raise UserError(f"{path}", f"cannot be read ({error.strerror or error})") from error
    problems.raise_if_any()


def _read_json(path: Path, chosen: Mapping[str, str] | None, problems: Problems) -> list[Record]:
    records = []
    for origin, line in _lines(path, problems):
        try:
            row = json.loads(line)
        except ValueError as error:
            hint = "; one object a line is read, not one list" if line.lstrip().startswith("[") else ""
            problems.add(origin, f"bad JSON ({error}){hint}")
            continue
        if not isinstance(row, dict):
            problems.add(origin, f"{json_type(row)}, not an object")
            continue
        try:
            records.append(build_record(row, select_fields(row, chosen), origin=origin))
        except MalformedError as reason:
            problems.add(origin, reason)
    return records


def _read_text(path: Path, chosen: Mapping[str, str] | None, problems: Problems) -> list[Record]:
    if chosen is not None:
        raise UserError(
            f"columns={dict(chosen)}", f"has no effect on {path}, which has no named columns", "remove data.columns"
        )
    records = []
    for origin, line in _lines(path, problems):
        prompt, *completions = line.split(SEPARATOR)
        if len(completions) != 1:
            problems.add(origin, f"{len(completions)} separators {SEPARATOR!r} in the line, not one")
            continue
        completion = completions[0].strip()
        if not completion:
            problems.add(origin, "empty completion")
            continue
        records.append(Record(prompt=prompt.strip(), completion=" " + completion, origin=origin))
    return records


def _read_csv(path: Path, chosen: Mapping[str, str] | None, problems: Problems) -> list[Record]:
    """By the standard library: every value stays the string it is in the file, and its line is known."""
    records: list[Record] = []
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.reader(file, strict=True)
        try:
            header = next(reader, None)
            if header is None:
                return []
            keys = _table_keys(header, chosen, origin=f"{path}:1")
            start = reader.line_num + 1  # a quoted value may hold newlines: name the line where the row begins
            for values in reader:
                origin, start = f"{path}:{start}", reader.line_num + 1
                if not values:
                    continue
                if len(values) != len(header):
                    problems.add(origin, f"{len(values)} values under {len(header)} columns")
                    continue
                try:
                    records.append(build_record(dict(zip(header, values, strict=True)), keys, origin=origin))
                except MalformedError as reason:
                    problems.add(origin, reason)
        except csv.Error as error:
            problems.add(f"{path}:{reader.line_num}", f"bad CSV ({error})")
        except UnicodeDecodeError:
            # The reader decodes ahead of the line it is at; the bytes are read again to name the right one.
            for _ in _lines(path, problems):
                pass
    return records


def _read_parquet(path: Path, chosen: Mapping[str, str] | None, problems: Problems) -> list[Record]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            keys = _table_keys(file.schema_arrow.names, chosen, origin=f"{path}")
            rows = file.read(columns=sorted(set(keys.values()))).to_pylist()
    except pyarrow.ArrowException as error:
        raise UserError(f"{path}", f"is not a Parquet file that can be read ({error})") from error
    return _build_rows(rows, keys, f"{path}", problems)


def _read_folder(path: Path, chosen: Mapping[str, str] | None, problems: Problems) -> list[Record]:
    import datasets

    if (path / "dataset_dict.json").exists():
        splits = sorted(entry.name for entry in path.iterdir() if entry.is_dir())
        raise UserError(
            f"{path}", "holds several splits", "name one: " + ", ".join(str(path / name) for name in splits)
        )
    if not (path / "state.json").exists():
        raise UserError(
            f"{path}", "is a folder that Dataset.save_to_disk did not write", "name the files in it instead"
        )
    try:
        dataset = datasets.Dataset.load_from_disk(str(path))
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{path}", f"cannot be read as a saved dataset ({error})") from error
    return _read_dataset(dataset, f"{path}", chosen, problems)


def _checked_dataset(source: object) -> datasets.Dataset:
    import datasets

    if isinstance(source, datasets.Dataset):
        return source
    if isinstance(source, (datasets.DatasetDict, datasets.IterableDatasetDict)):
        raise UserError(
            "source", "holds several splits", "give one: " + ", ".join(f"source[{key!r}]" for key in source)
        )
    raise UserError(f"source of type {type(source).__name__}", "must be a path, a list of paths or a datasets.Dataset")


def _read_dataset(
    dataset: datasets.Dataset, name: str, chosen: Mapping[str, str] | None, problems: Problems
) -> list[Record]:
    keys = _table_keys(dataset.column_names, chosen, origin=name)
    # `to_list` reads past a format that would give tensors, and follows a selection of rows.
    rows = dataset.select_columns(sorted(set(keys.values()))).to_list()
    if not rows:
        raise UserError(name, "holds no record", "give one with at least one row")
    return _build_rows(rows, keys, name, problems)


def _table_keys(names: AbstractSequence[str], chosen: Mapping[str, str] | None, *, origin: str) -> dict[str, str]:
    """`select_fields` for a whole table: one header is one mistake, not one a row."""
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UserError(origin, f"has more than one column {twice[0]!r}", "rename one")
    try:
        return select_fields(names, chosen)
    except MalformedError as reason:
        raise UserError(
            f"{origin}: columns {', '.join(names) or '(none)'}",
            str(reason),
            "name the columns to use in data.columns, e.g. {prompt: question, completion: answer}",
        ) from None


def _build_rows(
    rows: AbstractSequence[Mapping[str, Any]], keys: Mapping[str, str], name: str, problems: Problems
) -> list[Record]:
    records = []
    for index, row in enumerate(rows):
        origin = f"{name} row {index}"  # counted from 0, as `dataset[index]` is
        try:
            records.append(build_record(row, keys, origin=origin))
        except MalformedError as reason:
            problems.add(origin, reason)
    return records

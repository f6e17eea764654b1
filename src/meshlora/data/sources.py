"""Reading records: files, folders and datasets on this machine become `Record`s, in their order.

Owns: the formats, and where each record came from. Does not own: what a valid record is (`records.py`), what a file
may be (`files.py`), tokens, or order in training. Nothing is fetched: a source is a path here or a dataset already in
memory.
"""

from __future__ import annotations

import csv
import os
from collections import Counter
from collections.abc import Callable, Mapping
from collections.abc import Sequence as AbstractSequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshlora.common.errors import UserError, reason
from meshlora.data.files import bounded_lines, is_folder, json_objects, parse_object, text_lines
from meshlora.data.records import (
    MalformedError,
    Problems,
    Record,
    Unread,
    build_record,
    chosen_fields,
    listed,
    quoted,
    select_fields,
)

if TYPE_CHECKING:
    import datasets

PathLike = str | os.PathLike[str]

SEPARATOR = "||"


def read_records(
    source: PathLike | AbstractSequence[PathLike] | datasets.Dataset,
    *,
    columns: Mapping[str, str] | None = None,
    say: Callable[[str], None] | None = None,
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
        say: is told what is ignored, once for each path.

    Raises:
        UserError: a source that is missing, empty, unreadable or of an unknown kind; a column that is not there;
            malformed rows, the first five with file and line.
    """
    chosen = chosen_fields(columns)
    problems = Problems()
    if isinstance(source, (str, os.PathLike)):
        records = _read_path(Path(source), chosen, problems, say)
    elif isinstance(source, (list, tuple)):
        if not source:
            raise UserError("source=[]", "names no file")
        records = [record for path in source for record in _read_path(Path(path), chosen, problems, say)]
    else:
        unread = Unread()
        records = _read_dataset(_checked_dataset(source), "dataset", chosen, problems, unread)
        unread.tell("dataset", say)
    problems.raise_if_any()
    return records


def _read_path(
    path: Path, chosen: Mapping[str, str] | None, problems: Problems, say: Callable[[str], None] | None
) -> list[Record]:
    num_problems, unread = problems.num, Unread()
    if is_folder(path):
        records = _read_folder(path, chosen, problems, unread)
    else:
        reader = {".jsonl": _read_json, ".json": _read_json, ".csv": _read_csv, ".parquet": _read_parquet}
        try:
            records = reader.get(path.suffix.lower(), _read_text)(path, chosen, problems, unread)
        except OSError as error:
            raise UserError(f"{path}", f"cannot be read ({error.strerror or error})") from error
    if not records and problems.num == num_problems:
        raise UserError(f"{path}", "holds no record", "give a file with at least one")
    unread.tell(f"{path}", say)
    return records


def _read_json(path: Path, chosen: Mapping[str, str] | None, problems: Problems, unread: Unread) -> list[Record]:
    records = []
    for origin, row in json_objects(path, problems):
        try:
            keys = select_fields(row, chosen)
            records.append(build_record(row, keys, origin=origin))
        except MalformedError as wrong:
            problems.add(origin, wrong)
            continue
        unread.note(row, keys.values())
    return records


def _read_text(path: Path, chosen: Mapping[str, str] | None, problems: Problems, unread: Unread) -> list[Record]:
    if chosen is not None:
        raise UserError(
            f"columns={dict(chosen)}", f"has no effect on {path}, which has no named columns", "remove data.columns"
        )
    records = []
    for origin, line in text_lines(path, problems):
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


def _read_csv(path: Path, chosen: Mapping[str, str] | None, problems: Problems, unread: Unread) -> list[Record]:
    """By the standard library: every value stays the string it is in the file, and its line is known."""
    records: list[Record] = []
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.reader(bounded_lines(file, path), strict=True)
        try:
            header = next(reader, None)
            if header is None:
                return []
            keys = _table_keys(header, chosen, unread, origin=f"{path}:1")
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
                except MalformedError as wrong:
                    problems.add(origin, wrong)
        except csv.Error as error:
            problems.add(f"{path}:{reader.line_num}", f"bad CSV ({error})")
        except UnicodeDecodeError:
            # The reader decodes ahead of the line it is at; the bytes are read again to name the right one.
            for _ in text_lines(path, problems):
                pass
    return records


def _read_parquet(path: Path, chosen: Mapping[str, str] | None, problems: Problems, unread: Unread) -> list[Record]:
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            keys = _table_keys(file.schema_arrow.names, chosen, unread, origin=f"{path}")
            rows = file.read(columns=sorted(set(keys.values()))).to_pylist()
    except UserError:
        raise
    except Exception as error:  # a stranger's bytes, read by a library: anything may come
        raise UserError(f"{path}", f"is not a Parquet file that can be read ({reason(error)})") from error
    return _build_rows(rows, keys, f"{path}", problems)


def _read_folder(path: Path, chosen: Mapping[str, str] | None, problems: Problems, unread: Unread) -> list[Record]:
    return _read_dataset(load_folder(path), f"{path}", chosen, problems, unread)


def load_folder(path: Path) -> datasets.Dataset:
    """What `Dataset.save_to_disk` wrote.

    Raises:
        UserError: something else did, or it names files outside of its folder.
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
    except Exception as error:  # a stranger's files, read by a library: anything may come
        raise UserError(f"{path}", f"cannot be read as a saved dataset ({reason(error)})") from error


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
    dataset: datasets.Dataset, name: str, chosen: Mapping[str, str] | None, problems: Problems, unread: Unread
) -> list[Record]:
    keys = _table_keys(dataset.column_names, chosen, unread, origin=name)
    rows = table_rows(dataset.select_columns(sorted(set(keys.values()))), name)
    if not rows:
        raise UserError(name, "holds no record", "give one with at least one row")
    return _build_rows(rows, keys, name, problems)


def table_rows(dataset: datasets.Dataset, name: str) -> list[dict[str, Any]]:
    """All rows, past a format that would give tensors, along a selection of rows.

    Raises:
        UserError: they hold what cannot be read.
    """
    try:
        rows: list[dict[str, Any]] = dataset.to_list()
    except Exception as error:  # a stranger's tables, read by a library: anything may come
        raise UserError(name, f"cannot be read as a dataset ({reason(error)})") from error
    return rows


def _table_keys(
    names: AbstractSequence[str], chosen: Mapping[str, str] | None, unread: Unread, *, origin: str
) -> dict[str, str]:
    """`select_fields` for a whole table: one header is one mistake, not one a row."""
    twice = sorted(name for name, number in Counter(names).items() if number > 1)
    if twice:
        raise UserError(origin, f"has more than one column {quoted(twice[0])}", "rename one")
    try:
        keys = select_fields(names, chosen)
    except MalformedError as wrong:
        raise UserError(
            f"{origin}: columns {listed(names) or '(none)'}",
            str(wrong),
            "name the columns to use in data.columns, e.g. {prompt: question, completion: answer}",
        ) from None
    unread.note(names, keys.values())
    return keys


def _build_rows(
    rows: AbstractSequence[Mapping[str, Any]], keys: Mapping[str, str], name: str, problems: Problems
) -> list[Record]:
    records = []
    for index, row in enumerate(rows):
        origin = f"{name} row {index}"  # counted from 0, as `dataset[index]` is
        try:
            records.append(build_record(row, keys, origin=origin))
        except MalformedError as wrong:
            problems.add(origin, wrong)
    return records

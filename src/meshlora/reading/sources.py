"""Reading local files, folders and datasets, in order: which rows they have, and where each comes from.

Owns: containers (JSON, CSV, `||` text, Parquet, saved datasets), the origin of each row, what is said of the columns
that are read and not read. Does not own: which files a path means (`places.py`), safe reading (`files.py`,
`tables.py`), what a row is (`formats.py`), tokens, or the order of training. Nothing is downloaded.
"""

from __future__ import annotations

import csv
import io
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from meshlora.reading.bad_rows import ERROR, SKIP, words_of_bad
from meshlora.reading.data_files import bounded_lines, is_folder, json_objects, kind_of, opened, text_lines
from meshlora.reading.formats import RECORDS, Choice, Format, Formats
from meshlora.reading.images import locate_images
from meshlora.reading.nlg import expanded
from meshlora.reading.places import check_saved, places
from meshlora.reading.prompt_styles import record_formats
from meshlora.reading.proposals import proposed
from meshlora.reading.records import LeftOutError, MalformedError, Problems, Record, listed, quoted
from meshlora.reading.row_slices import Chosen, Mapped, Row, Slice, Taking
from meshlora.reading.tables import parquet_batches, rows_at_once, table_rows
from meshlora_ground.errors import UserError, reason

if TYPE_CHECKING:
    import datasets

PathLike = str | os.PathLike[str]
Header = Callable[[Sequence[str], str], list[str]]
Made = TypeVar("Made")

SEPARATOR = "||"
JOINED = "joined as plain text, without the chat template"  # how a note begins
_MOST_KINDS = 6  # of rows, that a message lists
_MOST_NAMES = 100  # of columns, among which what may be meant is looked for


@dataclass(frozen=True)
class Reading:
    """How rows are read.

    Attributes:
        columns: our field -> theirs, e.g. `{"prompt": "question", "completion": "answer"}`.
        format: the name of one of the formats that are read; "auto": by the fields of each row.
        say: told once what is read and what is not.
        on_bad_row: whether malformed rows are an error or are passed over (`bad_rows`).
        has_separator: files of other suffixes are `context||completion`.
        has_template: the tokenizer has a chat template: what is joined as plain text in spite of it is said.
    """

    columns: Mapping[str, str] | None = None
    format: str = "auto"
    say: Callable[[str], None] | None = None
    on_bad_row: str = ERROR
    has_separator: bool = False
    has_template: bool = False

    @staticmethod
    def taken_from(options: dict[str, Any], tokenizer: Any = None) -> Reading:
        """What the options of a reader say of rows: its own are taken out, the others are those of `tokenize`, too.

        tokenizer: whose chat template counts.
        """
        columns, format = options.pop("columns", None), options.pop("format", "auto")
        say, bad = options.get("say"), options.get("on_bad_row", ERROR)
        has_template = tokenizer is not None and bool(tokenizer.chat_template)
        return Reading(columns, format, say, bad, has_template=has_template)


def read_records(
    source: PathLike | Sequence[PathLike] | datasets.Dataset,
    *,
    columns: Mapping[str, str] | None = None,
    format: str = "auto",
    say: Callable[[str], None] | None = None,
    on_bad_row: str = ERROR,
    prompt: str | None = None,
    has_template: bool = False,
) -> list[Record]:
    """All records of `source`, in order.

        read_records("alpaca.json", say=print)

    Rows are of the formats of `formats.RECORDS`, in the containers of `read_rows`. Values are taken literally, spaces
    included. Other files than those have one `context||completion` per line: that format cannot express deliberate
    spaces, so both sides are stripped, and the completion starts with exactly one space, as a word would.

    prompt: in which style instructions are written as plain text (`prompt_styles`). Other Args and Raises: as of
    `Reading` and `read_rows`.
    """
    reading = Reading(columns, format, say, on_bad_row, has_separator=True, has_template=has_template)
    return read_rows(source, record_formats(prompt), reading)


def read_rows(
    source: PathLike | Sequence[PathLike] | datasets.Dataset, formats: Sequence[Format[Made]], reading: Reading
) -> list[Made]:
    """What `formats` make of all rows, in order.

    By suffix, `.gz` or `.zst` after it or not: `.jsonl` and `.json` hold a list of objects or one object per line,
    `.csv` a header and rows, `.parquet` a table; a folder is the output of `Dataset.save_to_disk`, or has such files.

    Args:
        source: a path or pattern, several of them (read one after the other), a `datasets.Dataset`, or some rows of
            these (`Chosen`).

    Raises:
        UserError: a source that is missing, empty, unreadable or of an unknown kind; a missing column;
            malformed rows, the first five with file and line.
    """
    return list(each_row(source, formats, reading))


def each_row(
    source: PathLike | Sequence[PathLike] | datasets.Dataset, formats: Sequence[Format[Made]], reading: Reading
) -> Iterator[Made]:
    """As `read_rows`, one at a time. Malformed rows are left out, and raise at the end: use none of it before."""
    # As `{text} or {prompt, completion}`; several formats may need the same.
    kinds = [*dict.fromkeys(f"{{{', '.join(each.needs)}}}" for each in formats if each.needs)]
    what = " or ".join(kinds) or "a record"
    if len(kinds) > _MOST_KINDS:  # of all that are known none says what is meant
        what = Problems.what
    problems = Problems(what, skips=reading.on_bad_row == SKIP)
    number, said, rows = 0, list[str](), Slice()
    if isinstance(source, Chosen):
        source, rows = source.paths, source.rows
    reader = _Reader(Formats(formats, reading.format, reading.columns), reading, problems)
    every: list[Any] = [source] if isinstance(source, Mapped) else places(source)
    reader.taking = Taking(*rows.bounds(lambda: _num_rows(every, formats, reading)))
    for place in every:
        if reader.taking.is_over:
            break
        for made in reader.rows_of(place):
            number += 1
            yield made
    if not number and not problems.num:
        given = f"{_name_of(every[0])}: rows {rows.text}, of {reader.taking.number:,}"
        raise UserError(given, "there are none", "give others, or leave them out")
    if not problems.skips:
        problems.raise_if_any()
    elif problems.num:
        said.append(words_of_bad(problems.num, number + problems.num, problems.lines(), are_all=True))
    if reading.say is not None:
        for words in (*said, *reader.said()):
            reading.say(words)


def each_raw_row(chosen: Chosen, reading: Reading, problems: Problems) -> Iterator[tuple[Any, str, dict[str, Any]]]:
    """(place, origin, row) of the rows of a source, with all of their columns. problems: is told of malformed ones."""
    every = places(chosen.paths)
    reader = _Reader(Formats(RECORDS, "auto", None), reading, problems, takes_all=True)
    taking = Taking(*chosen.rows.bounds(lambda: _num_rows(every, RECORDS, reading)))
    for place in every:
        for origin, row in reader.raw_rows(place, _name_of(place)):
            if taking.takes():
                yield place, origin, row
            if taking.is_over:
                return


def _name_of(place: Any) -> str:
    """For messages."""
    if isinstance(place, Mapped):
        return place.name
    return f"{place}" if isinstance(place, Path) else "dataset"


def _num_rows(every: Sequence[Any], formats: Sequence[Format[Any]], reading: Reading) -> int:
    """How many rows there are in all places. What is wrong with them is said where they are read."""
    known = Formats(formats, reading.format, reading.columns)
    counting = _Reader(known, reading, Problems(skips=True), takes_all=True)
    number = 0
    for place in every:
        number += sum(1 for _ in counting.raw_rows(place, _name_of(place)))
    return number


@dataclass
class _Seen:
    """What was read of a place. formats: name -> its columns. unread: columns. ways: how to say otherwise.

    joined: what of a row is prompt and completion that were joined as plain text. left_out: why -> the first place, and
    how many rows.
    """

    formats: dict[str, dict[str, None]] = field(default_factory=dict)
    unread: dict[str, None] = field(default_factory=dict)
    ways: str = "; to read it otherwise: data.format, data.columns"
    joined: Mapping[str, str] | None = None
    left_out: dict[str, tuple[str, int]] = field(default_factory=dict)

    def add(self, choice: Choice[Any]) -> None:
        """Add the columns of a row, or of a table."""
        self.formats.setdefault(choice.format.name, {}).update(dict.fromkeys(choice.keys.values()))
        self.unread.update(dict.fromkeys(choice.unread))

    def leave_out(self, why: str, origin: str) -> None:
        first, number = self.left_out.get(why, (origin, 0))
        self.left_out[why] = first, number + 1

    def words(self) -> str:
        read = " and ".join(f"{name} ({listed(columns)})" for name, columns in self.formats.items())
        every = set[str]().union(*self.formats.values())
        unread, rest = [name for name in self.unread if name not in every], ""  # a row may not read what another does
        if unread:
            rest = f"; not read: {listed(unread)}"
        if "input" in unread and "instruction" in every:
            rest += " (in Alpaca's records `input` is part of what is asked: data.format: alpaca reads it)"
        return f"read as {read}{rest}{self.ways}"

    def words_of_joined(self) -> str:
        """What is said of text that no chat template writes, though there is one; "" where there is nothing to say."""
        if self.joined is None or not self.ways:
            return ""
        keys = {ours: listed([theirs]) for ours, theirs in self.joined.items()}
        asked = keys["prompt"]
        if "chosen" in keys:
            columns = f"{{question: {asked}, chosen: {keys['chosen']}, rejected: {keys['rejected']}}}"
        else:
            columns = f"{{user: {asked}, assistant: {keys['completion']}}}"
        return f"{JOINED}; data.columns: {columns} makes conversations"


@dataclass
class _Reader(Generic[Made]):
    """Reads places one after the other. seen: what was read of each; here: of the one that is being read. taking: which
    of the rows are wanted. takes_all: of tables all columns are read, whatever the formats need."""

    formats: Formats[Made]
    reading: Reading
    problems: Problems
    seen: dict[str, _Seen] = field(default_factory=dict)
    here: _Seen = field(default_factory=_Seen)
    taking: Taking = field(default_factory=Taking)
    takes_all: bool = False

    def said(self) -> Iterator[str]:
        """One line for each way in which places were read."""
        alike: dict[str, list[str]] = {}
        for name, seen in self.seen.items():
            if seen.formats:
                alike.setdefault(seen.words(), []).append(name)
        for words, (first, *others) in alike.items():
            if others:
                first += f" and {len(others)} more file{'s' * (len(others) > 1)}"
            yield f"{first}: {words}"
        for seen in self.seen.values():
            for why, (place, number) in seen.left_out.items():
                yield f"{number:,} row{'s' * (number > 1)} left out, {place} first: {why}"
        joined = dict.fromkeys(words for seen in self.seen.values() if (words := seen.words_of_joined()))
        if self.reading.has_template:
            yield from joined

    def rows_of(self, place: Any) -> Iterator[Made]:
        """What the rows of a file or a dataset become."""
        name, folder = _name_of(place), None
        if isinstance(place, Path):  # paths of images are relative to it
            folder = place if place.is_dir() else place.parent
        self.here = self.seen.setdefault(name, _Seen())
        last: Choice[Made] | None = None
        num_rows, num_before = 0, self.problems.num
        try:
            for origin, row in self.raw_rows(place, name):
                num_rows += 1
                if not self.taking.takes():
                    continue
                choice = None
                try:
                    if folder is not None:
                        row = locate_images(row, folder)
                    choice = self.formats.choice(tuple(row))
                    made = choice.make(row, origin)
                except LeftOutError as why:
                    self.here.leave_out(str(why), origin)
                    continue
                except MalformedError as wrong:
                    self._add_problem(origin, row, choice, wrong)
                    continue
                if choice is not last:  # most rows have the names of the row before
                    self.here.add(choice)
                    last = choice
                if self.here.joined is None and _is_joined(made, choice):
                    self.here.joined = choice.keys
                yield made
                if self.taking.is_over:
                    return
        except OSError as error:
            raise UserError(name, f"cannot be read ({error.strerror or error})") from error
        if not num_rows and self.problems.num == num_before:
            raise UserError(name, "holds no record", "give one with at least one")

    def _add_problem(
        self, origin: str, row: dict[str, Any], choice: Choice[Made] | None, wrong: MalformedError
    ) -> None:
        """choice: how to read the row; None: its names are what is wrong."""
        if choice is not None or not row:
            self.problems.add(origin, wrong)
            return
        words = f"{wrong}; its fields: {listed(row)}"
        self.problems.add(origin, words, proposed(row, self.formats.fields))

    def raw_rows(self, place: Any, name: str) -> Iterator[Row]:
        """The rows of a file or a dataset, as they are."""
        if isinstance(place, Mapped):
            yield from place.rows
            return
        if isinstance(place, Path) and not is_folder(place):
            kind = kind_of(place)
            if kind in (".jsonl", ".json"):
                yield from expanded(json_objects(place, self.problems), self.problems)
            elif kind == ".csv":
                yield from _csv_rows(place, self.problems, self._header)
            elif kind == ".parquet":
                yield from _numbered(_parquet_rows(place, self._header), name)
            elif not self.reading.has_separator:
                rule = "these records are read from .jsonl, .json, .csv, .parquet or a saved dataset"
                raise UserError(f"{place}", rule, "convert it")
            elif self.formats.is_chosen:
                rule = f"they have no effect on {place}, which has no named columns"
                raise UserError(f"data.columns or data.format with {place}", rule, "leave them out")
            else:
                self.here.ways = ""  # no option does
                yield from _text_rows(place, self.problems)
        else:
            dataset = _load_folder(place) if isinstance(place, Path) else place  # a dataset in memory
            yield from _numbered(_dataset_rows(dataset, name, self._header), name)

    def _header(self, names: Sequence[str], origin: str) -> list[str]:
        """The columns of a table to read, checked once: a wrong one is one mistake, and not one per row."""
        twice = sorted(name for name, number in Counter(names).items() if number > 1)  # there may be a million names
        if twice:
            raise UserError(origin, f"has more than one column {quoted(twice[0])}", "rename one")
        if self.takes_all:
            return list(names)
        try:
            choice = self.formats.choice(tuple(names))
        except MalformedError as wrong:
            guess = proposed(dict.fromkeys(names[:_MOST_NAMES]), self.formats.fields)
            way_out = "name the columns to use in data.columns"
            way_out += f", perhaps {guess}" if guess else ", e.g. {user: question, assistant: answer}"
            raise UserError(f"{origin}: columns {listed(names) or '(none)'}", str(wrong), way_out) from None
        self.here.add(choice)
        return sorted({*choice.keys.values(), *choice.refused})


def _is_joined(made: object, choice: Choice[Any]) -> bool:
    """Whether a row was made plain text of a prompt and an answer, that could have been a conversation."""
    first = made[0] if isinstance(made, tuple) and made else made
    of_both = {"prompt", "completion"} <= choice.keys.keys() or {"prompt", "chosen"} <= choice.keys.keys()
    return of_both and isinstance(first, Record) and first.kind == "completion"


def _numbered(rows: Iterable[dict[str, Any]], name: str) -> Iterator[Row]:
    """Rows of a table, counted from 0, like `dataset[index]`."""
    for index, row in enumerate(rows):
        yield f"{name} row {index}", {field: _cleaned(value) for field, value in row.items()}


def _text_rows(path: Path, problems: Problems) -> Iterator[Row]:
    for origin, line in text_lines(path, problems):
        prompt, *completions = line.split(SEPARATOR)
        if len(completions) == 1:
            yield origin, {"prompt": prompt.strip(), "completion": " " + completions[0].strip()}
        else:
            problems.add(origin, f"{len(completions)} separators {SEPARATOR!r} in the line, not one")


def _csv_rows(path: Path, problems: Problems, header: Header) -> Iterator[Row]:
    """With the standard library: every value stays a string, and its line number is known."""
    with opened(path) as binary, io.TextIOWrapper(binary, newline="", encoding="utf-8-sig") as file:
        reader = csv.reader(bounded_lines(file, path), strict=True)
        try:
            names = next(reader, None)
            if names is None:
                return
            header(names, f"{path}:1")
            start = reader.line_num + 1  # a quoted value may hold newlines: name the line where the row begins
            for values in reader:  # an empty list for a blank line
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


def _parquet_rows(path: Path, header: Header) -> Iterator[dict[str, Any]]:
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file, path.open("rb") as raw:
            columns, start = header(file.schema_arrow.names, f"{path}"), 0
            for batch in parquet_batches(file, raw, columns, f"{path}"):
                yield from table_rows(batch, f"{path}", start)
                start += len(batch)
    except UserError:  # a row that is too long, or a column that is not there
        raise
    except Exception as error:  # untrusted bytes read by a library may raise anything
        raise UserError(f"{path}", f"is not a Parquet file that can be read ({reason(error)})") from error


def _load_folder(path: Path) -> datasets.Dataset:
    """Load the output of `Dataset.save_to_disk`."""
    import datasets

    check_saved(path)
    try:
        return datasets.Dataset.load_from_disk(str(path))
    except Exception as error:  # untrusted files read by a library may raise anything
        raise UserError(f"{path}", f"cannot be read as a saved dataset ({reason(error)})") from error


def _dataset_rows(dataset: datasets.Dataset, name: str, header: Header) -> Iterator[dict[str, Any]]:
    """Plain rows of a dataset, whatever its output format; a selection of rows is respected."""
    columns = header(dataset.column_names, name)
    try:
        chosen = dataset.select_columns(columns).with_format("arrow")
        size = rows_at_once(len(chosen), chosen.data.nbytes)
        for start in range(0, len(chosen), size):
            yield from table_rows(chosen[start : start + size], name, start)
    except UserError:
        raise
    except Exception as error:  # untrusted tables read by a library may raise anything
        raise UserError(name, f"cannot be read as a dataset ({reason(error)})") from error


def _cleaned(value: Any) -> Any:
    """Without None inside of it: Arrow gives all structs of a column the same keys."""
    if isinstance(value, dict):
        # A content of None says that a turn has none, which templates ask for.
        return {key: _cleaned(item) for key, item in value.items() if item is not None or key == "content"}
    if isinstance(value, list):
        return [*map(_cleaned, value)]
    return value

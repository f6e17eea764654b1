"""The sources of a run's data, each read with its own columns, format and split.

Owns: what `data.train` and `data.eval` mean together with the options of each source. Does not own: reading
(`meshlora.reading`), with what options (`run.texts`).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from meshlora.reading.held_rows import held_rows, split_off
from meshlora.reading.mixture import joined_sources, num_draws
from meshlora.reading.places import files_of
from meshlora.reading.records import Record
from meshlora.reading.row_map import mapped_rows
from meshlora.reading.row_slices import Chosen, Mapped, Slice
from meshlora.reading.sources import read_records
from meshlora.reading.system_turn import with_system
from meshlora.run.agreement import text_of_rank_0
from meshlora.run.config.run_file import DataConfig, Given, Source, are_read_at_once, sources_of
from meshlora_ground.dataset import TokenizedDataset
from meshlora_ground.errors import UserError
from meshlora_ground.versions import digest


@dataclass(frozen=True)
class Split:
    """The data of a run that evaluates a part of its training data. held: the rows of that part, as origins."""

    train: TokenizedDataset
    eval: TokenizedDataset
    held: frozenset[str]


def read_sources(
    data: DataConfig, given: Given, read: Callable[..., TokenizedDataset], say: Callable[[str], None] | None
) -> TokenizedDataset:
    """The tokens of all sources of `given`, in order. read: called with paths, `columns` and `format`. Raises:
    UserError: as `read`; some of the sources have weights and others not."""
    return _joined(_read_each(data, given, read), data, given, say)


def read_split(
    data: DataConfig, read: Callable[..., TokenizedDataset], say: Callable[[str], None] | None, *, seed: int
) -> Split:
    """The tokens of all sources of `data.train`, cut in two as `data.eval` says, a share or a number of rows. Raises:
    UserError: as `read_sources`; nothing would be left to train."""
    share = data.eval_share
    assert share is not None
    found = _read_each(data, data.train, read)
    held = held_rows(found, share, seed=seed)
    trained, evaluated = split_off(found, held)
    train = _joined(trained, data, data.train, say)
    # Every example once: without weights.
    own = evaluated[0] if len(evaluated) == 1 else joined_sources(evaluated, [""] * len(evaluated), [])
    if say is not None:
        say(f"data.eval: {len(held):,} rows are held out (train.seed {seed}): {own.num_examples:,} examples")
    return Split(train, own, held)


def _read_each(data: DataConfig, given: Given, read: Callable[..., TokenizedDataset]) -> list[TokenizedDataset]:
    """The tokens of what is read at once, or of each source."""
    weights = [each.weight for each in sources_of(given)]
    has_weights = any(weight is not None for weight in weights)
    if has_weights and None in weights:
        raise UserError(f"weights {weights}", "some sources have one and others not", "give each a weight, or none")
    found = []
    for rows, columns, format in _groups(data, given):
        found.append(read(_mapped(data, rows), columns=columns, format=format))
    return found


def _mapped(data: DataConfig, rows: Chosen) -> Chosen | Mapped:
    """`rows`, or what `data.map` makes of them. Its function runs on rank 0 alone, whose rows all others have."""
    if data.map is None:
        return rows
    name = data.map

    def made() -> str:
        return json.dumps(mapped_rows(rows, name, on_bad_row=data.on_bad_row))

    key = digest([name, json.dumps([*map(str, rows.paths), rows.rows.text, rows.rows.most])])
    found = [(origin, row) for origin, row in json.loads(text_of_rank_0(key, made))]
    return Mapped(found, f"{rows.paths[0]} by data.map={name}")


def _joined(
    found: list[TokenizedDataset], data: DataConfig, given: Given, say: Callable[[str], None] | None
) -> TokenizedDataset:
    """One dataset of all sources. say: told how often each is drawn."""
    if len(found) == 1:
        return found[0]
    names = [rows.paths[0] for rows, *_ in _groups(data, given)]
    weights = [each.weight for each in sources_of(given) if each.weight is not None]
    joined = joined_sources(found, names, weights)
    if joined.parts and say is not None:
        draws = zip(num_draws(joined.parts), joined.parts, names, strict=True)
        each = ", ".join(f"{number} of {name} (it has {examples})" for number, (examples, _), name in draws)
        say(f"an epoch is {joined.num_examples} draws: {each}")
    return joined


def held_out_records(data: DataConfig, held: frozenset[str]) -> list[Record]:
    """The records of `data.eval`, in order: of its files, or those of `data.train` whose rows are `held` out."""
    if data.eval_share is None:
        return records_of(data, data.eval_files)
    return [record for record in records_of(data, data.train) if record.origin in held]


def records_of(data: DataConfig, given: Given) -> list[Record]:
    """The records of all sources of `given`, in order."""
    written: dict[str, Any] = {"on_bad_row": data.on_bad_row, "prompt": data.prompt}
    found = list[Record]()
    for rows, columns, format in _groups(data, given):
        found += read_records(_mapped(data, rows), columns=columns, format=format, **written)
    return [*with_system(found, data.system)]


def _groups(data: DataConfig, given: Given) -> list[tuple[Chosen, dict[str, str] | None, Any]]:
    """(rows, columns, format) of what is read at once: all sources without options of their own, or each by itself."""
    sources, most = sources_of(given), data.max_samples
    if are_read_at_once(given, is_limited=most is not None):  # one cache entry, one order of the data
        every = [path for each in sources for path in each.paths]
        return [(Chosen(every, Slice(most=most)), data.columns, data.format)]
    found = []
    for each in sources:
        rows = Chosen(_files(each), Slice(each.rows, most))
        found.append((rows, each.columns or data.columns, each.format or data.format))
    return found


def _files(source: Source) -> list[str]:
    if source.split is None:
        return source.paths
    return [str(file) for path in source.paths for file in files_of(path, source.split)]

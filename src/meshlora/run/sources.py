"""The sources of a run's data, each read with its own columns, format and split.

Owns: what `data.train` and `data.eval` mean together with the options of each source. Does not own: reading
(`meshlora.reading`), with what options (`run.texts`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from meshlora.reading.mixture import joined_sources, num_draws
from meshlora.reading.places import files_of
from meshlora.reading.records import Record
from meshlora.reading.sources import read_records
from meshlora.run.config.run_file import DataConfig, Given, Source, num_read_apart, sources_of
from meshlora_ground.dataset import TokenizedDataset
from meshlora_ground.errors import UserError


def read_sources(
    data: DataConfig, given: Given, read: Callable[..., TokenizedDataset], say: Callable[[str], None] | None
) -> TokenizedDataset:
    """The tokens of all sources of `given`, in order. read: called with paths, `columns` and `format`. Raises:
    UserError: as `read`; some of the sources have weights and others not."""
    groups = _groups(data, given)
    weights = [each.weight for each in sources_of(given)]
    has_weights = any(weight is not None for weight in weights)
    if has_weights and None in weights:
        raise UserError(f"weights {weights}", "some sources have one and others not", "give each a weight, or none")
    found = [read(paths, columns=columns, format=format) for paths, columns, format in groups]
    if len(found) == 1:
        return found[0]
    names = [paths[0] for paths, *_ in groups]
    joined = joined_sources(found, names, [weight for weight in weights if weight is not None])
    if joined.parts and say is not None:
        draws = zip(num_draws(joined.parts), joined.parts, names, strict=True)
        each = ", ".join(f"{number} of {name} (it has {examples})" for number, (examples, _), name in draws)
        say(f"an epoch is {joined.num_examples} draws: {each}")
    return joined


def records_of(data: DataConfig, given: Given) -> list[Record]:
    """The records of all sources of `given`, in order."""
    groups = _groups(data, given)
    return [
        one
        for paths, columns, format in groups
        for one in read_records(paths, columns=columns, format=format, on_bad_row=data.on_bad_row)
    ]


def _groups(data: DataConfig, given: Given) -> list[tuple[list[str], dict[str, str] | None, Any]]:
    """(paths, columns, format) of what is read at once: all sources without options of their own, or each by itself."""
    sources = sources_of(given)
    if num_read_apart(given) == 1:  # at once: one cache entry, one order of the data
        return [([path for each in sources for path in each.paths], data.columns, data.format)]
    return [(_files(each), each.columns or data.columns, each.format or data.format) for each in sources]


def _files(source: Source) -> list[str]:
    if source.split is None:
        return source.paths
    return [str(file) for path in source.paths for file in files_of(path, source.split)]

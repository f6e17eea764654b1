"""Rows from a function of the user's own: `data.map: file.py:function`.

Owns: calling the function with each row, and what it may return. Does not own: reading (`sources.py`), on
which rank it runs (`run.sources`).

This runs the user's code, which the run file names on purpose, with all that the user may do. Nothing else does.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from meshlora.reading.images import locate_images
from meshlora.reading.records import MalformedError, Problems, json_type
from meshlora.reading.row_slices import Chosen, Row
from meshlora.reading.sources import Reading, each_raw_row
from meshlora_ground.errors import UserError, reason
from meshlora_ground.user_code import load_function


def mapped_rows(chosen: Chosen, name: str, *, on_bad_row: str) -> list[Row]:
    """What the function `name` makes of the rows of a source, in order; each has the origin of the row it is made of.

        mapped_rows(Chosen(["rows.jsonl"], Slice()), "my_rows.py:one", on_bad_row="error")

    The function gets a row as a dict of its own. It returns one, a list of them, or None to leave it out: all of JSON.

    Raises:
        UserError: no such file or function; its code fails, or returns something else, with the row; it leaves all out;
            the rows cannot be read.
    """
    function, found, number = load_function("data.map", name), list[Row](), 0
    problems = Problems("a row of JSON, CSV or Parquet", skips=on_bad_row == "skip")
    for place, origin, row in each_raw_row(chosen, Reading(on_bad_row=on_bad_row), problems):
        number += 1
        folder = place.parent if isinstance(place, Path) and place.is_file() else place
        for made in _made(function, name, origin, row):
            try:
                located = locate_images(made, folder) if isinstance(folder, Path) else made
            except MalformedError as wrong:
                raise UserError(f"{origin}: data.map={name}", str(wrong)) from None
            found.append((origin, located))
    problems.raise_if_any()
    if not found:
        raise UserError(f"data.map={name}", f"it leaves out all {number:,} rows", "return a dict, or a list of dicts")
    return found


def _made(function: Callable[[Any], Any], name: str, origin: str, row: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What the function makes of one row."""
    given = f"{origin}: data.map={name}"
    try:
        returned = function(row)
    except (Exception, SystemExit) as error:  # a user's code may raise anything
        raise UserError(given, f"it raised {type(error).__name__} ({reason(error)})") from error
    if returned is None:
        return
    for each in returned if isinstance(returned, list) else [returned]:
        if not isinstance(each, Mapping):
            rule = f"it returned {json_type(each)}"
            raise UserError(given, rule, "return a dict, a list of dicts, or None to leave the row out")
        try:
            yield json.loads(json.dumps(each, allow_nan=False))  # the same on the rank that makes it and on all others
        except (TypeError, ValueError) as error:
            raise UserError(given, f"what it returned is not JSON ({error})", "return plain values") from None

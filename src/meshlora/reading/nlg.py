"""Rows of data-to-text sets, as microsoft/LoRA's scripts make them: `context`, `completion`, `cate`.

Owns: what an entry of WebNLG and of DART becomes, and what a row of `*_formatted.jsonl` and of the encoded `*.jsonl`
is. Does not own: reading files (`files.py`), the separator between the two (`tokenization.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from meshlora.reading.records import MalformedError, Problems, Record, checked_text, filled_text, json_type
from meshlora_ground.errors import UserError

# Categories of WebNLG 2017 that its training data have.
SEEN = {
    *("Airport", "Astronaut", "Building", "City", "ComicsCharacter", "Food", "Monument", "SportsTeam"),
    *("University", "WrittenWork"),
}
_Row = tuple[str, dict[str, Any]]


def expanded(rows: Iterable[_Row], problems: Problems) -> Iterator[_Row]:
    """The rows, where each entry of WebNLG or DART has become one row of `context` and `completion` for each text.

    An entry of WebNLG is `{"1": {"category", "modifiedtripleset", "lexicalisations"}}`, one of DART
    `{"tripleset", "annotations"}`. The context is `subject : property : object`, with ` | ` between triples; DART's
    properties are in lower case. Of WebNLG only texts with the comment `good` are read.
    """
    for origin, row in rows:
        (only, *others) = row.values() or (None,)
        try:
            # WebNLG's entries are objects of one number each.
            if not others and isinstance(only, Mapping) and "modifiedtripleset" in only:
                made = _of_webnlg(only)
            elif "tripleset" in row and "annotations" in row:
                made = _of_dart(row)
            else:
                made = [row]
        except (MalformedError, KeyError, TypeError, ValueError) as wrong:
            missing = " is missing" * isinstance(wrong, KeyError)  # whose text is the key alone
            problems.add(origin, f"an entry of triples and texts: {wrong}{missing}")
            continue
        for each in made:
            yield origin, each


def _of_webnlg(entry: Mapping[str, Any]) -> list[dict[str, Any]]:
    triples = [(each["subject"], each["property"], each["object"]) for each in entry["modifiedtripleset"]]
    row = {"context": _context(triples), "cate": entry["category"] in SEEN}
    return [{**row, "completion": text["lex"]} for text in entry["lexicalisations"] if text["comment"] == "good"]


def _of_dart(entry: Mapping[str, Any]) -> list[dict[str, Any]]:
    context = _context([(subject, relation.lower(), value) for subject, relation, value in entry["tripleset"]])
    return [{"context": context, "completion": text["text"]} for text in entry["annotations"]]


def _context(triples: Iterable[tuple[Any, Any, Any]]) -> str:
    return " | ".join(map(_words, triples))


def _words(triple: tuple[Any, Any, Any]) -> str:
    return " : ".join(checked_text(each, "a triple") for each in triple)


def context_record(row: Mapping[str, Any], origin: str) -> Record:
    """The record of a row with `context` and `completion`: texts, or lists of token ids that are complete.

    A space is put before a completion of text, as gpt2_encode.py does.

    Raises:
        MalformedError: a value is of another type, or empty.
    """
    context, completion, cate = row["context"], row["completion"], row.get("cate")
    if cate is not None and not isinstance(cate, bool):  # other sets have no category
        raise MalformedError(f"cate is {json_type(cate)}, not true (seen) or false")
    if isinstance(context, (list, tuple)) or isinstance(completion, (list, tuple)):
        for name in ("context", "completion"):
            ids = row[name]
            if not isinstance(ids, (list, tuple)) or {*map(type, ids)} != {int}:  # an empty one has no type
                raise MalformedError(f"{name} is not a list of token ids, as the other of the two")
        is_trained = (False,) * len(context) + (True,) * len(completion)
        return Record(tokens=((*context, *completion), is_trained), is_seen=cate, origin=origin)
    text = filled_text(completion, "completion")
    return Record(prompt=checked_text(context, "context"), completion=f" {text}", is_seen=cate, origin=origin)


def of_categories(records: list[Record], categories: str) -> list[Record]:
    """The records whose category WebNLG's training data have (seen), or have not (unseen), or all. Raises: UserError: a
    record does not say so, or there is none."""
    if categories == "all":
        return records
    given = f"data.eval_categories={categories}"
    for record in records:
        if record.is_seen is None:
            rule = f"{record.origin} does not say its category"
            raise UserError(given, rule, "it goes with WebNLG's JSON, or rows of context, completion, cate")
    found = [record for record in records if record.is_seen == (categories == "seen")]
    if not found:
        raise UserError(given, "no record is of these categories", "leave it out")
    return found


def parted(records: Sequence[Record], separator: str) -> Sequence[Record]:
    """The records with `separator` between prompt and completion; rows of tokens are complete. Raises: UserError: no
    record has both."""
    if not separator:
        return records
    if {"completion", "tokens"}.isdisjoint(record.kind for record in records):
        rule = "no record has a prompt and a completion of text for it to part"
        raise UserError(f"data.separator={separator!r}", rule, "leave it out")
    found = []
    for record in records:
        if record.kind == "completion":
            record = dataclasses.replace(record, separator=separator)
        found.append(record)
    return found

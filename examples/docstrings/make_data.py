"""Make the demo data: function signatures and the docstrings of a made-up house style.

Owns the words, the style and the two files `train.jsonl` and `eval.jsonl`; needs nothing but Python. Every record is
`{"prompt": ..., "completion": ...}`; together they read

    def count_old_lines(text, errors="ignore"):
        \"""Count the old lines.

        Args:
            text: the text to work on.
            errors: what to do with bad bytes (default "ignore").
        \"""

A name is verb, quality, noun; the summary says it in words, and every argument has one fixed explanation and copies its
default. Held-out functions have names that no training function has. To make the same files again:

    python examples/docstrings/make_data.py
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
SEED = 0
NUM_TRAIN = 1800
NUM_EVAL = 200
MAX_ARGS = 3


@dataclass(frozen=True)
class Field:
    """Words that go together: any verb may meet any noun and take any of the arguments."""

    verbs: tuple[str, ...]
    nouns: tuple[str, ...]
    args: tuple[str, ...]


FIELDS = (
    Field(
        verbs=("split", "join", "strip", "count", "replace", "encode", "decode", "parse"),
        nouns=("lines", "words", "names", "headers", "comments", "strings", "tokens", "messages"),
        args=("text", "encoding", "errors", "width", "sep", "limit"),
    ),
    Field(
        verbs=("open", "read", "write", "copy", "move", "remove", "list", "load"),
        nouns=("files", "paths", "links", "modules", "images", "archives", "folders", "logs"),
        args=("path", "mode", "recursive", "pattern", "encoding", "target"),
    ),
    Field(
        verbs=("send", "receive", "fetch", "close", "accept", "check", "log", "forward"),
        nouns=("requests", "responses", "packets", "sockets", "errors", "bytes", "events", "cookies"),
        args=("host", "port", "timeout", "retries", "data", "limit"),
    ),
    Field(
        verbs=("sort", "merge", "filter", "group", "reverse", "find", "update", "print"),
        nouns=("items", "keys", "values", "pairs", "records", "rows", "columns", "objects"),
        args=("items", "key", "reverse", "start", "stop", "default"),
    ),
    Field(
        verbs=("start", "stop", "cancel", "create", "delete", "test", "run", "wait_for"),
        nouns=("tasks", "timers", "threads", "processes", "calls", "loops", "handlers", "signals"),
        args=("name", "delay", "timeout", "daemon", "callback", "count"),
    ),
)
QUALITIES = ("", "all", "old", "new", "first", "last", "empty", "local", "hidden")

# argument -> (its explanation, the defaults it may have; none: it is always required)
ARGS: dict[str, tuple[str, tuple[str, ...]]] = {
    "callback": ("function to call at the end", ()),
    "count": ("how many to use", ("1", "2", "10")),
    "daemon": ("whether to run in the background", ("True", "False")),
    "data": ("the bytes to use", ()),
    "default": ("value to use if there is none", ("None", "0", '""')),
    "delay": ("seconds before the start", ("0", "1", "10")),
    "encoding": ("name of the text encoding", ('"utf-8"', '"ascii"', "None")),
    "errors": ("what to do with bad bytes", ('"strict"', '"ignore"')),
    "host": ("address of the other side", ()),
    "items": ("the list to work on", ()),
    "key": ("function that gives the order", ("None", "str", "len")),
    "limit": ("largest number to return", ("None", "1", "100")),
    "mode": ("how to open the file", ('"r"', '"w"', '"rb"')),
    "name": ("what to call it", ()),
    "path": ("where to look", ()),
    "pattern": ("names that match", ('"*"', '"*.py"', "None")),
    "port": ("number of the port", ("80", "443", "0")),
    "recursive": ("whether to enter folders", ("True", "False")),
    "retries": ("how often to try again", ("0", "2", "10")),
    "reverse": ("whether to turn the order around", ("True", "False")),
    "sep": ("text between the parts", ('","', '" "', "None")),
    "start": ("first index", ("0", "1")),
    "stop": ("index after the last", ("None", "10", "100")),
    "target": ("where to put the result", ()),
    "text": ("the text to work on", ()),
    "timeout": ("seconds to wait", ("None", "1", "10")),
    "width": ("characters in a line", ("72", "80", "100")),
}


def function_names() -> list[tuple[Field, str]]:
    """Every (field, function name) the words can make, in a fixed order."""
    return [
        (field, "_".join(filter(None, (verb, quality, noun))))
        for field in FIELDS
        for verb, quality, noun in itertools.product(field.verbs, QUALITIES, field.nouns)
    ]


def summary(name: str, *, verbs: tuple[str, ...]) -> str:
    """`count_old_lines` -> `Count the old lines.`"""
    verb = next(verb for verb in verbs if name.startswith(verb + "_"))
    rest = name.removeprefix(verb + "_").replace("_", " ")
    phrase = rest.replace("all ", "all the ") if rest.startswith("all ") else f"the {rest}"
    return f"{verb.replace('_', ' ').capitalize()} {phrase}."


def draw_arguments(field: Field, *, rng: random.Random) -> dict[str, str | None]:
    """Zero to three arguments and their defaults (None: required), the required ones first as Python wants it."""
    chosen = rng.sample(field.args, rng.randint(0, MAX_ARGS))
    defaults = {arg: rng.choice(ARGS[arg][1]) if ARGS[arg][1] else None for arg in chosen}
    return dict(sorted(defaults.items(), key=lambda item: item[1] is not None))


def make_record(field: Field, name: str, *, rng: random.Random) -> dict[str, str]:
    arguments = draw_arguments(field, rng=rng)
    signature = ", ".join(arg if default is None else f"{arg}={default}" for arg, default in arguments.items())
    lines = [summary(name, verbs=field.verbs)]
    if arguments:
        lines += ["", "    Args:"]
        for arg, default in arguments.items():
            ending = "." if default is None else f" (default {default})."
            lines.append(f"        {arg}: {ARGS[arg][0]}{ending}")
        lines.append('    """')
    else:
        lines[0] += '"""'
    return {"prompt": f'def {name}({signature}):\n    """', "completion": "\n".join(lines)}


def write_jsonl(path: Path, records: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    print(f"{path.name}: {len(records)} records, {path.stat().st_size} bytes")


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the docstring demo data.")
    parser.add_argument("--out", type=Path, default=HERE, help="folder that receives the two files")
    options = parser.parse_args()

    rng = random.Random(SEED)
    chosen = rng.sample(function_names(), NUM_TRAIN + NUM_EVAL)  # without replacement: no name comes twice
    records = [make_record(field, name, rng=rng) for field, name in chosen]
    options.out.mkdir(parents=True, exist_ok=True)
    write_jsonl(options.out / "train.jsonl", records[:NUM_TRAIN])
    write_jsonl(options.out / "eval.jsonl", records[NUM_TRAIN:])


if __name__ == "__main__":
    main()

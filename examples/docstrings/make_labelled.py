"""Make `labelled.jsonl`, `labelled_words.jsonl` and `similar.jsonl` of `train.jsonl`.

    python examples/docstrings/make_labelled.py

The label of a function is whether it takes no argument, one, or more; the label of a word of its name is whether it is
the verb, the noun or between them; a function and the first sentence of its docstring are similar.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

FOLDER = Path(__file__).parent
NUMBER = 240


def main() -> None:
    """Write the files."""
    rows = [json.loads(line) for line in (FOLDER / "train.jsonl").read_text().splitlines()]
    texts, words, similar = [], [], []
    for row in rows[:NUMBER]:
        head = row["prompt"].splitlines()[0]
        name, given = re.fullmatch(r"def (\w+)\((.*)\):", head).groups()
        number = len(given.split(",")) if given else 0
        texts.append({"text": head, "label": ("none", "one", "more")[min(number, 2)]})
        parts = name.split("_")
        labels = ["verb", *["other"] * (len(parts) - 2), "noun"]
        words.append({"tokens": parts, "labels": labels})
        similar.append({"anchor": head, "positive": row["completion"].splitlines()[0].rstrip('"')})
    for file, lines in (("labelled", texts), ("labelled_words", words), ("similar", similar)):
        (FOLDER / f"{file}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()

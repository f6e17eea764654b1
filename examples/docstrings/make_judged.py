"""Make `pairs.jsonl` and `rollouts.jsonl` of `train.jsonl`: docstrings of the right function and of another one.

    python examples/docstrings/make_judged.py

A pair has the function's own docstring as the better answer and another one's as the worse; of rollouts the own
has advantage 1 and the other's -1.
"""

from __future__ import annotations

import json
from pathlib import Path

FOLDER = Path(__file__).parent
NUMBER, APART = 96, 7


def main() -> None:
    """Write both files."""
    rows = [json.loads(line) for line in (FOLDER / "train.jsonl").read_text().splitlines()]
    pairs, rollouts = [], []
    for index, row in enumerate(rows[:NUMBER]):
        other = rows[index + APART]["completion"]
        pairs.append({"prompt": row["prompt"], "chosen": row["completion"], "rejected": other})
        rollouts.append({"prompt": row["prompt"], "completion": row["completion"], "advantage": 1.0})
        rollouts.append({"prompt": row["prompt"], "completion": other, "advantage": -1.0})
    for name, lines in (("pairs", pairs), ("rollouts", rollouts)):
        (FOLDER / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()

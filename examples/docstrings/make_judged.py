"""Make `pairs.jsonl`, `rollouts.jsonl` and `feedback.jsonl` of `train.jsonl`: docstrings of the right function and of
another one.

    python examples/docstrings/make_judged.py

A pair has the function's own docstring as the better answer and another one's as the worse; of rollouts the own
has advantage 1 and the other's -1; feedback has the own docstring of two functions in three, which is liked, and
another one's of the third.
"""

from __future__ import annotations

import json
from pathlib import Path

FOLDER = Path(__file__).parent
NUMBER, APART = 96, 7


def main() -> None:
    """Write the files."""
    rows = [json.loads(line) for line in (FOLDER / "train.jsonl").read_text().splitlines()]
    pairs, rollouts, feedback = [], [], []
    for index, row in enumerate(rows[:NUMBER]):
        other = rows[index + APART]["completion"]
        pairs.append({"prompt": row["prompt"], "chosen": row["completion"], "rejected": other})
        rollouts.append({"prompt": row["prompt"], "completion": row["completion"], "advantage": 1.0})
        rollouts.append({"prompt": row["prompt"], "completion": other, "advantage": -1.0})
        is_liked = index % 3 != 1
        answer = row["completion"] if is_liked else other
        feedback.append({"prompt": row["prompt"], "completion": answer, "label": is_liked})
    for name, lines in (("pairs", pairs), ("rollouts", rollouts), ("feedback", feedback)):
        (FOLDER / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()

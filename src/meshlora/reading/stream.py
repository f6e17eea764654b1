"""A stream of rollouts: a folder that grows by one whole file a step, and at last gets a mark that it has ended.

Owns: names of the files, writing them whole, and what a reader finds. Does not own: the fields of a record
(`reading.rollouts`), waiting for a file (`run.followed`), who makes the rollouts (`meshlora_extra.rl`).

    stream = RolloutStream("rollouts")
    stream.write(1, [{"input_ids": [5, 6, 7], "is_trained": [0, 1, 1], "reward": 1.0, "group": 0}])
    stream.end(1)          # no step after the first

Steps count from 1, as in `metrics.jsonl`: `step_000012.jsonl` is what the twelfth optimizer step trains on.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from meshlora_ground.errors import UserError
from meshlora_ground.files import read_json, write_json_atomically, write_text_atomically

END = "end.json"
FAILED = "failed"  # of a record: the rewards that could not judge it


def num_failed(file: Path | str) -> int:
    """How many records of a step have a reward that could not judge them. file: of `RolloutStream`, and whole."""
    with open(file, "rb") as lines:
        return sum(bool(json.loads(line).get(FAILED)) for line in lines)


@dataclass(frozen=True)
class RolloutStream:
    """The stream in `folder`, which the first file makes."""

    folder: Path | str

    def file(self, step: int) -> Path:
        """The file of a step, there or not."""
        assert step >= 1, step
        return Path(self.folder) / f"step_{step:06d}.jsonl"

    def write(self, step: int, records: Iterable[Mapping[str, Any]]) -> Path:
        """Write the records of a step; a reader sees the whole file or none. Raises: UserError: a record is no JSON, as
        with NaN; there are none; the file cannot be written."""
        try:
            # NaN would be written as a word that JSON does not have.
            lines = [json.dumps(record, allow_nan=False) + "\n" for record in records]
        except (TypeError, ValueError) as error:
            raise UserError(f"the rollouts of step {step}", f"a record is not JSON ({error})") from None
        if not lines:
            raise UserError(f"the rollouts of step {step}", "a step has at least one record")
        file = self.file(step)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_text_atomically(file, "".join(lines))
        except OSError as error:
            raise UserError(f"{file}", f"it cannot be written ({error.strerror or error})") from None
        return file

    def forget_after(self, step: int) -> None:
        """Remove the files of later steps, if there are any."""
        for file in Path(self.folder).glob("step_*.jsonl"):
            number = file.stem.removeprefix("step_")
            if number.isdecimal() and int(number) > step:
                file.unlink()

    def end(self, steps: int) -> None:
        """Mark that the stream has `steps` steps, and no more."""
        Path(self.folder).mkdir(parents=True, exist_ok=True)
        write_json_atomically(Path(self.folder) / END, {"steps": steps})

    @property
    def num_steps(self) -> int | None:
        """The number of its steps, once it has ended; None before. Raises: UserError: the mark is not one."""
        mark = Path(self.folder) / END
        if not mark.exists():
            return None
        found = read_json(mark)
        steps = found.get("steps") if isinstance(found, dict) else None
        if type(steps) is not int or steps < 0:  # True is an int
            raise UserError(f"{mark}", "it does not say how many steps the stream has", 'it holds {"steps": 12}')
        return steps

    def state(self, step: int) -> Literal["there", "ended", "missing"]:
        """Whether a step can be read, is not to come any more, or may still come. Raises: UserError: the stream has
        ended after this step, and the step's file is missing."""
        if self.file(step).is_file():
            return "there"
        # In this order: a mark that is seen after a missing file was written after that file, had there been one.
        num_steps = self.num_steps
        if num_steps is None or self.file(step).is_file():
            return "missing" if num_steps is None else "there"
        if step <= num_steps:
            rule = f"the file is missing, and {END} beside it says {num_steps} steps"
            raise UserError(f"{self.file(step)}", rule, "is it whole?")
        return "ended"

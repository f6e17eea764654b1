"""The steps of a run that follows a stream of rollouts: each waited for, and read, when its turn comes.

Owns: waiting, with a limit, in agreement of all ranks; reading a step's file. Does not own: the stream
(`reading.stream`), the records (`reading.rollouts`), making the rollouts (`meshlora_extra.rl`), which only comes in by
`make`.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import torch

from meshlora.comm.collectives import all_gather
from meshlora.comm.groups import Mesh
from meshlora.reading.stream import RolloutStream
from meshlora.run.config.run_file import RunConfig, paths_of
from meshlora_ground.dataset import TokenizedDataset
from meshlora_ground.errors import UserError

FOLDER = "rollouts"  # in the output
# How long a step waits for recorded rollouts, if data.follow_s does not say it.
WAIT_S = 600.0
# How often a missing file is looked for: soon after the last look, later more rarely.
_FIRST_LOOK_S, _LONGEST_LOOK_S = 0.02, 1.0
# What a rank sees. The last of these that any rank sees decides: a step is there once all see it.
State = Literal["there", "missing", "late", "ended", "asked"]
_STATES = get_args(State)


def stream_of(config: RunConfig) -> RolloutStream | None:
    """The stream that a run follows; None if its data are files. Rollouts that a run makes lie in its output."""
    if config.rl is not None:
        return RolloutStream(config.rl.source if config.rl.is_folder else Path(config.train.output) / FOLDER)
    return RolloutStream(paths_of(config.data.train)[0]) if config.data.follow_s is not None else None


def no_tokens() -> TokenizedDataset:
    """The data of a run before its first step is read: none."""
    return TokenizedDataset(np.empty(0, np.int32), np.empty(0, bool), np.zeros(1, np.int64))


@dataclass
class Followed:
    """Steps of `stream`. Every rank calls `fetch`, and then has the step's data.

    read: the tokens of a file. wait_s: how long a step may take to come. most: records that a step may have.
    make: called on all ranks with a step that is missing, if this run makes its own rollouts. check: called after a
        step with its statistics. say: told on rank 0 of rollouts that are made again.
    """

    stream: RolloutStream
    mesh: Mesh
    read: Callable[[str], TokenizedDataset]
    wait_s: float
    most: int
    make: Callable[[int], None] | None = None
    check: Callable[[int, Mapping[str, float]], None] | None = None
    say: Callable[[str], None] = lambda _: None
    current: tuple[TokenizedDataset, np.ndarray] = field(default_factory=lambda: (no_tokens(), np.empty(0, np.int64)))

    def fetch(self, step: int, asked: threading.Event) -> State:
        """Wait for the data of `step`, counted from 1. asked: set once this rank is asked to stop. Collective. Raises:
        UserError: it did not come in time, or it is not what a step's file is."""
        is_missing = self.make is not None and self._seen(step, asked) == "missing"
        if self.make is not None and is_missing:
            self.make(step)
        until, pause_s = time.monotonic() + self.wait_s, _FIRST_LOOK_S
        while (seen := self._seen(step, asked, until)) == "missing":
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_LOOK_S)
        if seen == "late":  # by the first clock: a rank that ended alone would leave the others waiting for it
            given = f"{self.stream.file(step)}"
            rule = f"it has not come within data.follow_s={self.wait_s:g}"
            raise UserError(given, rule, "is what writes the rollouts still at work? Go on later with --resume auto")
        if seen == "there":
            found = self._step(step) if self.make is None or is_missing else self._made_before(step)
            if found is None:
                return self.fetch(step, asked)
            self.current = found
        return seen

    def _made_before(self, step: int) -> tuple[TokenizedDataset, np.ndarray] | None:
        """The data of a step that an earlier process of this run has made. None if they cannot be read, which would end
        every run that goes on: they are then removed. Collective."""
        found, why = None, ""
        try:
            found = self._step(step)
        except UserError as error:
            why = f"{error}"
        wrong = all_gather(torch.tensor([found is None], device=self.mesh.device), self.mesh.world)
        if not wrong.any():
            return found
        if self.mesh.rank == 0:
            file = self.stream.file(step)
            self.say(f"{why or file}: these rollouts cannot be read, and are made again")
            file.unlink(missing_ok=True)
        return None

    def _seen(self, step: int, asked: threading.Event, until: float = math.inf) -> State:
        """What all ranks see, the same on all: a shared file system may show a file to some later. Collective.

        until: by this rank's monotonic clock; what is missing then is late.
        """
        own: State = "asked" if asked.is_set() else self.stream.state(step)
        if own == "missing" and time.monotonic() > until:
            own = "late"
        every = all_gather(torch.tensor([_STATES.index(own)], device=self.mesh.device), self.mesh.world)
        found: State = _STATES[int(every.max())]
        return found

    def _step(self, step: int) -> tuple[TokenizedDataset, np.ndarray]:
        file = self.stream.file(step)
        data = self.read(str(file))
        if data.num_examples > self.most:
            rule = f"a step has at most train.batch_size={self.most}"
            raise UserError(f"{file} with {data.num_examples} records", rule, "raise it, or write fewer a step")
        return data, np.arange(data.num_examples, dtype=np.int64)

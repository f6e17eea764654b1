"""The length of a run in optimizer steps, and what is given as a part of it: warm-up, evaluations, checkpoints.

Owns: that they are whole steps before a run begins, by its data and batch alone: the same on every mesh and after
resuming. Does not own: the rates (`run.learning_rate`).
"""

from __future__ import annotations

import dataclasses
import math

from meshlora.run.config.run_file import TrainConfig
from meshlora_ground.errors import UserError


def num_steps(train: TrainConfig, num_sequences: int) -> int:
    """Optimizer steps of a run."""
    if train.steps is not None:
        return train.steps
    assert train.epochs is not None
    # Steps of an epoch are whole: its last one has what is left.
    return max(1, math.ceil(train.epochs * steps_of_epoch(train, num_sequences)))


def steps_of_epoch(train: TrainConfig, num_sequences: int) -> int:
    """Optimizer steps of a pass over the data, at least 1."""
    return max(1, math.ceil(num_sequences / train.batch_size))


def in_steps(train: TrainConfig, *, steps: int, num_sequences: int) -> TrainConfig:
    """`train`, of `steps` steps, with whole steps for shares of them and for parts of an epoch.

    >>> train = TrainConfig(output="out", epochs=2, batch_size=4, warmup_ratio=0.1, save_every="epoch/2")
    >>> found = in_steps(train, steps=20, num_sequences=40)
    >>> found.warmup_steps, found.save_every
    (2, 5)

    Raises:
        UserError: warm-up and decay do not fit into the run.
    """
    warmup, given = train.warmup_steps, f"train.warmup_steps={train.warmup_steps}"
    if train.warmup_ratio:
        warmup = math.ceil(steps * train.warmup_ratio)  # as transformers rounds
        given = f"train.warmup_ratio={train.warmup_ratio:g}, or {warmup} steps"
    if warmup >= steps:
        raise UserError(given, f"it must be below the {steps} steps of the run")
    if warmup + train.decay_steps > steps:
        rule = f"together they are more than the {steps} steps of the run"
        raise UserError(f"{given} and train.decay_steps={train.decay_steps}", rule)
    epoch = steps_of_epoch(train, num_sequences)
    return dataclasses.replace(
        train,
        warmup_steps=warmup,
        warmup_ratio=0.0,
        eval_every=_every(train.eval_every, epoch),
        save_every=_every(train.save_every, epoch),
    )


def notes_in_steps(given: TrainConfig, found: TrainConfig, *, steps: int) -> list[str]:
    """What `in_steps` has made of `given`, in words."""
    notes = list[str]()
    if given.warmup_ratio:
        notes.append(f"train.warmup_ratio={given.warmup_ratio:g}: {found.warmup_steps:,} of {steps:,} steps")
    for name in ("eval_every", "save_every"):
        every = getattr(given, name)
        if isinstance(every, str):
            notes.append(f"train.{name}={every}: every {getattr(found, name):,} steps")
    return notes


def _every(given: int | str, epoch: int) -> int:
    """The steps between two evaluations or saves, of `epoch` steps an epoch."""
    if isinstance(given, int):
        return given
    times = given.partition("/")[2]
    return math.ceil(epoch / int(times or 1))

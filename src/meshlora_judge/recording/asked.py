"""Recording where it is asked for: MESHLORA_RECORD=folder in the environment, or a Trainer's callback.

    with meshlora_judge.record_if_asked(model): ...             # a loop; nothing happens without the variable
    Trainer(..., callbacks=[meshlora_judge.RecordCallback()])   # MESHLORA_RECORD=seen accelerate launch train.py

Owns: that variable. Does not own: recording.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback

from meshlora_ground.compat import replaced
from meshlora_judge.recording.recorder import Recorder, check_seen, record, started

VARIABLE = "MESHLORA_RECORD"


@contextmanager
def record_if_asked(subject: Any, **options: Any) -> Iterator[Recorder | None]:
    """`record` into the folder that MESHLORA_RECORD names; without it nothing, and None."""
    folder = os.environ.get(VARIABLE)
    if not folder:
        yield None
        return
    with record(subject, folder, **options) as recorder:
        yield recorder


class RecordCallback(TrainerCallback):
    """Record the first `steps` steps of a Trainer into `folder`, by default the one that MESHLORA_RECORD names."""

    def __init__(self, folder: str | Path | None = None, *, steps: int = 1) -> None:
        self._folder, self._steps = folder or os.environ.get(VARIABLE), steps
        self._recorder: Recorder | None = None
        self._stack = ExitStack()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self._folder:
            return
        original, waits = Trainer.training_step, ExitStack()

        def training_step(trainer: Any, *given: Any, **more: Any) -> Any:
            """A callback is not given its Trainer; its first step shows it."""
            if self in trainer.callback_handler.callbacks:
                waits.close()
                if self._recorder is None:
                    begins = started(trainer, self._folder or "", steps=self._steps)
                    self._recorder = self._stack.enter_context(begins)
            return original(trainer, *given, **more)

        waits.enter_context(replaced(Trainer, "training_step", training_step))
        self._stack.callback(waits.close)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._stack.close()
        if self._recorder is not None:
            check_seen(self._recorder)

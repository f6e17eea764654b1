"""Which training of a command is recorded: the first one of a Trainer, or of a loop that calls a model of transformers.

After the recorded steps the process ends, as it would at its own end. Does not own: recording
(`meshlora_judge.recording`). torch is imported inside, as it is about to be imported when this is.
"""

from __future__ import annotations

import functools
import sys
import time
from pathlib import Path
from typing import Any

from meshlora_judge.running.child import Run

# Ranks that have recorded wait for the others: a process that ends takes its connections along.
_WAIT_S = 60.0


def listen_to_trainers(module: Any, run: Run) -> None:
    """`Trainer.train` is recorded. module: transformers.trainer."""
    original = module.Trainer.train

    @functools.wraps(original)
    def train(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        if run.recorder is not None:
            return original(trainer, *args, **kwargs)
        if args or kwargs.pop("resume_from_checkpoint", None):
            run.say("training begins at its start: a checkpoint to resume from does not fit a twin")
        from meshlora_judge import record

        with run.refusing(), record(trainer, run.folder / "recording", steps=run.steps) as recorder:
            _begin(recorder, run)
            return original(trainer, **kwargs)

    module.Trainer.train = train


def listen_to_calls(module: Any, run: Run) -> None:
    """The first call of a model in training is where a loop's recording begins. module: torch.nn.modules.module."""
    original = module.Module.__call__

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if run.recorder is not None:
            module.Module.__call__ = original
        elif self.training and (model := _trained_model(self)) is not None:
            from meshlora_judge import record

            with run.refusing():
                recorder = run.until_end.enter_context(record(model, run.folder / "recording", steps=run.steps))
                _begin(recorder, run)
        return original(self, *args, **kwargs)

    module.Module.__call__ = call


def _trained_model(called: Any) -> Any:
    """The model to record if `called` is or has a model of transformers that is trained; with DDP's or FSDP's wrapper,
    but without a module of the user around it.
    """
    transformers = sys.modules.get("transformers")
    modeling = sys.modules.get("transformers.modeling_utils")
    if transformers is None or not hasattr(modeling, "PreTrainedModel"):
        return None
    import torch

    from meshlora_judge.recording.tensors import unwrapped

    if not torch.is_grad_enabled() or not any(parameter.requires_grad for parameter in called.parameters()):
        return None
    kinds = [modeling.PreTrainedModel]  # type: ignore[union-attr]
    if hasattr(sys.modules.get("peft"), "PeftModel"):
        kinds.append(sys.modules["peft"].PeftModel)
    if isinstance(unwrapped(called), tuple(kinds)):
        return called
    return next((inside for inside in called.modules() if isinstance(inside, tuple(kinds))), None)


def _begin(recorder: Any, run: Run) -> None:
    run.recorder = recorder
    recorder.then = functools.partial(_end, recorder.recording.rank, recorder.recording.world_size, run.folder)


def _end(rank: int, size: int, folder: Path) -> None:
    """End this process without an error, once every rank has recorded: later steps, saving and uploads are not run."""
    from torch import distributed

    done = folder / "done"
    (done / f"{rank}").touch()
    until = time.monotonic() + _WAIT_S
    while len([*done.iterdir()]) < size and time.monotonic() < until:
        time.sleep(0.05)
    if distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()
    raise SystemExit(0)

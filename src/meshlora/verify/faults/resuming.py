"""Going on from a checkpoint: what is forgotten, exchanged or done twice."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from meshlora.adapter.formats import peft_format
from meshlora.train import trained
from meshlora.train.checkpoint import state as checkpoint
from meshlora.train.checkpoint.resuming import FOLDER
from meshlora.train.trained import TrainedAdapter
from meshlora.verify.faults.fault import by_name, instead, mutation, then


def _first_adapter(original: Any) -> Any:
    def read(model: Any, name: str, planned: Any) -> Any:
        if planned.folder.parent.name == FOLDER:
            planned = dataclasses.replace(planned, folder=planned.folder.parents[1] / "initial")
        return original(model, name, planned)

    return read


def _counted_anew(_: None, model: Any, optimizer: torch.optim.Optimizer, *__: Any) -> None:
    for state in optimizer.state.values():
        state["step"].zero_()


def _exchanged(_: None, model: Any, optimizer: torch.optim.Optimizer, *__: Any) -> None:
    for state in optimizer.state.values():
        state["exp_avg"], state["exp_avg_sq"] = state["exp_avg_sq"], state["exp_avg"].abs()


def _of_next_rank(original: Any) -> Any:
    def local_part(tensor: Tensor, rule: Any, mesh: Any) -> Tensor:
        own: Tensor = original(tensor, rule, mesh)
        if rule.split_dim is None:
            return own
        return original(tensor.roll(own.shape[rule.split_dim], rule.split_dim), rule, mesh)

    return local_part


def _one_step_late(self: TrainedAdapter) -> int:
    return self.run.resume.step + 1 if self.run.resume is not None else 0


def _batches_anew(_: None, self: TrainedAdapter) -> None:
    batches, start = self.batches, self.start

    class Anew:
        def batch(self, step: int) -> Any:
            return batches.batch(step - start)

    self.batches = Anew()  # type: ignore[assignment]


OF_RESUMING = by_name(
    mutation(
        "resumed_from_the_first_adapter",
        "a run goes on with the adapter of its checkpoint",
        "resume",
        (peft_format, "read_adapter", _first_adapter),
    ),
    mutation(
        "moments_not_restored",
        "AdamW goes on with the moments of the checkpoint",
        "resume",
        (trained, "restore_optimizer", instead(lambda *_: None)),
    ),
    mutation(
        "moments_exchanged",
        "each moment is restored as what it was",
        "resume",
        (trained, "restore_optimizer", then(_exchanged)),
    ),
    mutation(
        "moments_of_another_rank",
        "each rank takes its own part of the moments",
        "resume tp",
        (checkpoint, "local_part", _of_next_rank),
    ),
    mutation(
        "bias_correction_begins_again",
        "AdamW counts its steps on",
        "resume",
        (trained, "restore_optimizer", then(_counted_anew)),
    ),
    mutation(
        "resumed_one_step_late",
        "the first step after a checkpoint is the next one",
        "resume",
        (TrainedAdapter, "start", lambda _: property(_one_step_late)),
    ),
    mutation(
        "schedule_begins_again",
        "the learning rate goes on where it was",
        "resume",
        (TrainedAdapter, "update", lambda f: lambda self, step, **rest: f(self, step - self.start, **rest)),
    ),
    mutation(
        "order_begins_again",
        "the next step takes the next sequences",
        "resume",
        (TrainedAdapter, "__post_init__", then(_batches_anew)),
    ),
    mutation(
        "masks_begin_again",
        "dropout is that of the step, however often a run was stopped",
        "resume dropout",
        (
            TrainedAdapter,
            "share",
            then(lambda share, self, *_: dataclasses.replace(share, step=share.step - self.start)),
        ),
    ),
)

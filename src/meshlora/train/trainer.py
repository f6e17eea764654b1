"""The loop: batch -> loss -> backward -> finish gradients -> clip -> step.

Owns: one optimizer step, evaluation, and when things are logged and saved. Does not own: gradient sync, the order of
the data, files, which checkpoints stay (`train.keeping`), where a NaN comes from (`train.nonfinite`). Nothing here
depends on the topology beyond which share of a batch is ours.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from meshlora.adapter.manage import runtime
from meshlora.adapter.peft_format import save_adapter
from meshlora.data import Batch, TokenizedDataset
from meshlora.errors import MeshloraError, SaveError
from meshlora.lift import lift
from meshlora.parallel.allocator import keep_freed_memory
from meshlora.parallel.collectives import broadcast_in_place
from meshlora.train.balance import LoadBalancing
from meshlora.train.batches import Batching
from meshlora.train.checkpoint import restore_optimizer, state_writer
from meshlora.train.evaluate import mean_loss, perplexity
from meshlora.train.gradsync import clip_gradients_on_device, finish_gradients_on_device
from meshlora.train.keeping import Keeping, folder_name
from meshlora.train.loss_scale import LossScale
from meshlora.train.manifest import Kind, Manifest, write_manifest
from meshlora.train.metrics import Reporter, StepMetrics
from meshlora.train.nonfinite import find_not_finite
from meshlora.train.objectives import (
    Sums,
    base_log_probabilities,
    batch_log_probabilities,
    count,
    loss_sum,
    reference_point,
)
from meshlora.train.optimizer import parameter_groups
from meshlora.train.prepare import Prepared
from meshlora.train.recompute import recompute_layers
from meshlora.train.replicas import check_replicas
from meshlora.train.resuming import FINISHED, FOLDER
from meshlora.train.routing import RunRouting
from meshlora.train.samples import FILE as SAMPLES
from meshlora.train.schedule import learning_rate
from meshlora.train.step_sums import StepSums
from meshlora.train.stopping import StopRequest
from meshlora.versions import versions

# Steps in a row that are left out before a run that leaves them out ends: it learns nothing any more.
_MOST_SKIPPED = 10


@dataclass
class Trainer:
    """Trains the active adapter of `model` as `run` says.

    stop: whether this rank was asked to stop. check: called with the folder of the adapter that training starts from.
    """

    run: Prepared
    model: Any
    reporter: Reporter
    stop: StopRequest = field(default_factory=StopRequest)
    check: Callable[[Path], None] | None = None

    def __post_init__(self) -> None:
        options = self.run.config.train
        self.mesh = runtime(self.model).mesh
        self.batches = self.run.batches
        self.output = Path(options.output)
        self.last_saved: Path | None = None
        self.updates, self.skipped_in_row = 0, 0
        self.is_to_stop = False  # as all ranks agreed in the last step
        self.keeping = Keeping(
            self.output, keep_last=options.keep_last, keep_best=options.keep_best, resume=self.run.resume
        )
        row_length = self.run.config.data.max_length if self.run.config.data.packing else None
        self.objective = options.objective
        self.point: Tensor | None = None  # of the step that is taken
        self.batching = Batching(
            self.mesh, options.micro_batch_size, self.run.pad_token_id, row_length, self.objective.trained_row
        )
        recompute_layers(self.model, options.recompute)
        if self.mesh.device.type == "cpu":
            keep_freed_memory()
        coef = options.router_aux_loss_coef
        self.balance = LoadBalancing(self.model, coef=coef) if coef else None
        folder = options.routing_replay or options.routing_record
        self.routing: RunRouting | None = None
        if folder is not None:
            self.routing = RunRouting(
                self.model,
                self.run.train_data,
                Path(folder),
                replays=options.routing_replay is not None,
                rows=functools.partial(self.batching.rows, self.run.train_data),
            )
        # float16 has few exponents: what it rounds to zero would be lost.
        self.loss_scale = LossScale() if self.model.dtype == torch.float16 else None
        self.optimizer = torch.optim.AdamW(
            parameter_groups(self.model, options),
            lr=options.lr,
            betas=(options.beta1, options.beta2),
            eps=options.eps,
            weight_decay=options.weight_decay,
            fused=True,  # one pass over each parameter and its moments: experts have many
        )
        if self.run.resume is not None:
            if self.loss_scale is not None:
                self.loss_scale.restore(self.run.resume.loss_scale)
            restore_optimizer(self.model, self.optimizer, self.run.resume)
            self.last_saved, self.updates = self.run.resume.folder, self.run.resume.updates
            self.skipped_in_row = self.run.resume.skipped_in_row

    @property
    def start(self) -> int:
        """Steps that were done before this run."""
        return self.run.resume.step if self.run.resume is not None else 0

    def train(self) -> bool:
        """All steps that are left, with evaluations and saves between them, and the finished adapter at the end.

        Returns whether all are done: not where a rank was asked to stop, which leaves a checkpoint to go on from.
        """
        self.model.train()
        self.begin()
        for step in range(self.start, self.run.steps):
            self.reporter.step(self.train_step(step))
            self.between(step + 1)
            if self.is_to_stop and step + 1 < self.run.steps:
                return False
        self.end()
        return True

    def begin(self) -> None:
        """What comes before the first step."""
        if not self.start:
            self._save("initial", self._manifest("initial", done=0))
        if self.check is not None:
            assert self.last_saved is not None
            self.check(self.last_saved)

    def between(self, done: int) -> None:
        """What is due after `done` steps: samples, an evaluation, a checkpoint."""
        options = self.run.config.train
        if options.replica_check_every and done % options.replica_check_every == 0:
            check_replicas(self.model, step=done, last_saved=self.last_saved)
        if self.run.samples is not None and (done % options.sample_every == 0 or done == self.run.steps):
            with self.reporter.doing("samples"):
                self.run.samples.write(self.model, self.output / SAMPLES, step=done, say=self.reporter.say)
        if done == self.run.steps:
            return
        is_due = options.eval_every and done % options.eval_every == 0
        loss = self._report_evaluation(done) if is_due else None
        is_best = self._is_best(loss)
        if is_best or self.is_to_stop or (options.save_every and done % options.save_every == 0):
            self._save_checkpoint(done, is_best=is_best, loss=loss)

    def end(self) -> None:
        """What comes after the last step."""
        if self.start < self.run.steps:
            loss = self._report_evaluation(self.run.steps)
            if self._is_best(loss):
                self._save_checkpoint(self.run.steps, is_best=True, loss=loss)
        self._save(FINISHED, self._manifest("adapter", done=self.run.steps))

    def train_step(self, step: int) -> StepMetrics:
        """One optimizer step over the global batch."""
        options = self.run.config.train
        started = time.perf_counter()
        self.optimizer.zero_grad(set_to_none=True)
        sums = StepSums(self.mesh)
        indices = self.batches.batch(step)
        batches = list(self._micro_batches(self.run.train_data, indices))
        self.point = self._reference_point(self.run.train_data, indices)
        with self.routing.step(step, indices) if self.routing is not None else contextlib.nullcontext():
            if self.balance is not None and len(batches) > 1:
                self.balance.count(batches, functools.partial(self._log_probabilities, step))
            for number, batch in enumerate(batches):
                with self.masks(step, batch):  # the backward too: it may run forwards once more
                    sums.add(batch, *self._backward(number, batch, is_only=len(batches) == 1))
        aux_loss = self.balance.finish() if self.balance is not None else None
        number = sum(count(self.objective, batch) for batch in batches)
        total = finish_gradients_on_device(self.model, num_tokens=number)
        if self.loss_scale is not None:
            self.loss_scale.unscale(self.model)
        norm = clip_gradients_on_device(self.model, options.max_grad_norm)
        read = sums.read(total, norm, is_asked=self.stop.is_asked)
        self.is_to_stop = read.is_to_stop
        loss, grad_norm, is_finite = read.loss, read.grad_norm, read.is_finite
        rate = self.update(step, is_finite=is_finite)
        is_overflow = self.loss_scale is not None and math.isfinite(loss) and not is_finite
        if not is_finite and not is_overflow:
            self._skip_or_stop(step, batches, loss, grad_norm)
        elif self.loss_scale is not None:
            self.loss_scale.takes_step(grad_norm, step=step)
        time_s = time.perf_counter() - started
        scale = self.loss_scale.scale if self.loss_scale is not None else None
        return StepMetrics(
            step + 1, loss, rate, grad_norm, read.tokens, time_s, aux_loss, read.means, scale, not is_finite
        )

    def update(self, step: int, *, is_finite: bool) -> float:
        """The optimizer's part of a step, where its gradient is finite; returns the learning rate."""
        rate = learning_rate(step, options=self.run.config.train, steps=self.run.steps)
        if is_finite:
            for group in self.optimizer.param_groups:
                group["lr"] = rate * group["times_lr"]
            self.optimizer.step()
            self.updates, self.skipped_in_row = self.updates + 1, 0
        return rate

    def _scaled(self, loss: Tensor) -> Tensor:
        return loss if self.loss_scale is None else self.loss_scale.scaled(loss)

    def _skip_or_stop(self, step: int, batches: list[Batch], loss: float, grad_norm: float) -> None:
        """Say where a step that is not finite comes from; end the run where it asks for that. Collective."""
        data, indices = self.run.train_data, self.batches.batch(step)

        def examples(dp_rank: int, number: int) -> list[int]:
            rows = self.batching.rows(data, indices, dp_rank=dp_rank)[number]
            return [int(indices[place // data.rows_per_example]) for row in rows for place in row]

        cause = find_not_finite(self.model, batches, functools.partial(self._loss_again, step), examples=examples)
        what = f"the gradient norm is {grad_norm}" if math.isfinite(loss) else f"the loss is {loss}"
        self.leave_out(f"step {step + 1}: {what}: {cause}")

    def leave_out(self, text: str) -> None:
        """End the run for a step that is not finite, as `text` says, or go on without it."""
        self.skipped_in_row += 1
        if self.run.config.train.on_nonfinite == "stop":
            raise MeshloraError(
                f"{text}; lower train.lr, look at the data, or leave out such steps: on_nonfinite: skip"
            )
        if self.skipped_in_row >= _MOST_SKIPPED:
            raise MeshloraError(f"{text}; {_MOST_SKIPPED} steps in a row were left out: lower train.lr")
        self.reporter.say(f"{text}; left out")

    def _loss_again(self, step: int, batch: Batch) -> Tensor:
        """The summed loss of a batch of step `step`, by itself."""
        with self.masks(step, batch):
            return self._loss_sum(batch, self._of_base(batch))[0]

    def masks(self, step: int, batch: Batch) -> contextlib.AbstractContextManager[None]:
        """Inside, what is run in training mode has the dropout of `batch` in optimizer step `step`."""
        return runtime(self.model).dropout.at(self.run.config.train.seed, step, batch.tokens)

    def _forward(self, number: int, batch: Batch, base: Tensor | None = None) -> tuple[Tensor, Sums]:
        """The summed loss of micro-batch `number` of this step, and what is reported besides."""
        if self.routing is not None:
            self.routing.before(number, batch)
        return self._loss_sum(batch, base)

    def _log_probabilities(self, step: int, number: int, batch: Batch) -> Tensor:
        """A forward of micro-batch `number` of `step`, whatever the objective makes of it."""
        if self.routing is not None:
            self.routing.before(number, batch)
        with self.masks(step, batch), lift(self.model.dtype == torch.float64):
            return batch_log_probabilities(self.model, batch)

    def _backward(self, number: int, batch: Batch, *, is_only: bool) -> tuple[Tensor, Sums]:
        """Forward and backward of one micro-batch; what `_forward` returns, without the loss of load balancing."""
        base = self._of_base(batch)
        if self.balance is None:
            loss, sums = self._forward(number, batch, base)
            self._scaled(loss).backward()
            return loss.detach(), sums
        with self.balance.watching():
            loss, sums = self._forward(number, batch, base)
        if is_only:
            self.balance.count_here(batch)
        with lift(self.model.dtype == torch.float64):
            term = self.balance.term(batch)
        self._scaled(loss + term).backward()
        return loss.detach(), sums

    def evaluate(self, data: TokenizedDataset) -> tuple[float, int]:
        """(mean loss over what the objective counts of `data`, and how many these are), over all ranks."""
        size = self.run.config.train.micro_batch_size * self.mesh.dp.size
        with self.reporter.doing("evaluation", math.ceil(data.num_examples / size)) as advance:
            indices = np.arange(data.num_examples)
            batches = _each_then(advance, self._micro_batches(data, indices))
            return mean_loss(self.model, batches, self.objective, self._reference_point(data, indices))

    def _manifest(self, kind: Kind, *, done: int) -> Manifest:
        """What is said of a folder that is saved after `done` steps."""
        own = self.run.identity
        return Manifest(
            kind=kind, step=done, steps=self.run.steps, updates=self.updates, identity=own, versions=versions()
        )

    def _save(self, name: str, manifest: Manifest, *, state: Callable[[Path], None] | None = None) -> None:
        """Write the adapter to folder `name` of the output, with what `state` adds; a drift saves nothing."""
        if self.run.config.train.replica_check_every:
            check_replicas(self.model, step=manifest.step, last_saved=self.last_saved)

        def add(folder: Path) -> None:
            if state is not None:
                state(folder)
            write_manifest(folder, manifest)

        with self.reporter.doing("save"):
            save_adapter(self.model, self.output / name, also=add)
        self.last_saved = self.output / name

    def _save_checkpoint(self, done: int, *, is_best: bool, loss: float | None) -> None:
        """Write what a run needs to go on after `done` steps, and forget older checkpoints."""
        state = state_writer(self.model, self.optimizer)
        manifest = dataclasses.replace(
            self._manifest("checkpoint", done=done),
            topology=str(self.mesh.topology),
            eval_loss=loss if loss is not None and math.isfinite(loss) else None,
            loss_scale=self.loss_scale.state() if self.loss_scale is not None else {},
            skipped_in_row=self.skipped_in_row,
        )
        try:
            self._save(f"{FOLDER}/{folder_name(done)}", manifest, state=state)
        except SaveError as error:
            if self.run.config.train.on_save_error == "stop" or self.is_to_stop:
                raise
            self.reporter.say(f"step {done}: {error}; the run goes on without")
            return
        self.reporter.saved(done)
        if self.mesh.rank == 0:
            try:
                self.keeping.saved(done, is_best=is_best, loss=loss)
            except OSError as error:  # the names still point at whole checkpoints
                self.reporter.say(f"step {done}: {self.output / FOLDER} could not be kept in order ({error.strerror})")

    def _is_best(self, loss: float | None) -> bool:
        """Whether an evaluation is the best so far, as rank 0 sees it. Collective where it matters."""
        if loss is None or not self.run.config.train.keep_best:
            return False
        flag = torch.tensor([int(self.keeping.is_best(loss))], device=self.mesh.device)
        return bool(broadcast_in_place(flag, self.mesh.world).item())

    def _report_evaluation(self, step: int) -> float | None:
        if self.run.eval_data is None:
            return None
        loss, number = self.evaluate(self.run.eval_data)
        of_text = self.objective.is_of_text
        self.reporter.evaluation(step, loss, number, perplexity=perplexity(loss) if of_text else None)
        return loss

    def _of_base(self, batch: Batch) -> Tensor | None:
        """What the frozen base says of a batch, where the objective needs it."""
        if not self.objective.needs_base:
            return None
        with lift(self.model.dtype == torch.float64):
            return base_log_probabilities(self.model, batch)

    def _reference_point(self, data: TokenizedDataset, indices: np.ndarray) -> Tensor | None:
        with lift(self.model.dtype == torch.float64):
            return reference_point(self.objective, self.model, self.batching, data, indices)

    def _loss_sum(self, batch: Batch, base: Tensor | None) -> tuple[Tensor, Sums]:
        with lift(self.model.dtype == torch.float64):
            return loss_sum(self.objective, self.model, batch, base, self.point)

    def _micro_batches(self, data: TokenizedDataset, indices: np.ndarray) -> Iterator[Batch]:
        return self.batching.batches(data, indices)


def _each_then(advance: Callable[[], None], batches: Iterable[Batch]) -> Iterator[Batch]:
    for batch in batches:
        yield batch
        advance()

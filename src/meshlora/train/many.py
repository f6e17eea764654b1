"""Several adapters in one run: each trains as it would by itself, all on the same frozen base, in the same batches.

Owns: whose rows a micro-batch has, one step of all adapters that have steps left, and one rank of such a run. Does not
own: all that is done one by one and as in a run of one adapter: optimizer, schedule, evaluation, files
(`train.trainer`, of which each adapter has one); gradients (`train.many_gradients`); what is refused
(`train.many_prepare`).

An adapter's step takes the sequences, the count, the norm and the rate that its single run has in that step. No adapter
sees another's tokens or numbers, so that each may begin and end at a step of its own.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from meshlora.adapter.manage import runtime
from meshlora.adapter.many import one_of_many, train_many
from meshlora.adapter.peft_format import begin_adapter
from meshlora.api import load_blueprint
from meshlora.config.objective import Sft
from meshlora.console import Console
from meshlora.data import Batch, collate, share
from meshlora.lift import lift
from meshlora.parallel.collectives import all_reduce_sum
from meshlora.parallel.groups import join, leave
from meshlora.parallel.many import Share
from meshlora.train.edge import another_rank_failed, end_at_once, say_in_training
from meshlora.train.losses import language_model_losses
from meshlora.train.many_gradients import ManyGradients
from meshlora.train.metrics import Reporter, StepMetrics
from meshlora.train.prepare import Prepared
from meshlora.train.run import hashing_contents, introduce, prepare_output, with_contents
from meshlora.train.step_sums import read_step
from meshlora.train.stopping import StopRequest, noticing_signals
from meshlora.train.trainer import Trainer
from meshlora.transfer import to_device


@dataclass
class ManyTrainer:
    """Trains the adapters of `model` that `runs` names, together. reporters: of each; stop: of this rank."""

    runs: Mapping[str, Prepared]
    model: Any
    reporters: Mapping[str, Reporter]
    stop: StopRequest = field(default_factory=StopRequest)

    def __post_init__(self) -> None:
        train_many(self.model, self.runs)
        self.mesh = runtime(self.model).mesh
        options = next(iter(self.runs.values())).config.train
        assert isinstance(options.objective, Sft), options.objective
        self.micro_batch_size, self.label_smoothing = options.micro_batch_size, options.objective.label_smoothing
        self.courses: dict[str, Trainer] = {}
        self.done: dict[str, int] = {}  # optimizer steps of each
        for name, run in self.runs.items():
            with one_of_many(self.model, name):
                self.courses[name] = Trainer(run, self.model, self.reporters[name], self.stop)
            self.done[name] = self.courses[name].start
        self._gradients: ManyGradients | None = None

    def train(self) -> bool:
        """All steps that are left of all adapters; returns whether all are done, as `Trainer.train`."""
        self.model.train()
        for name, course in self.courses.items():
            with one_of_many(self.model, name):
                course.begin()
                if self.done[name] == course.run.steps:  # killed between its last checkpoint and its end
                    course.end()
        while left := [name for name, course in self.courses.items() if self.done[name] < course.run.steps]:
            steps = self.train_step(left)
            for name in left:
                self.done[name] += 1
                course, done = self.courses[name], self.done[name]
                course.reporter.step(steps[name])
                with one_of_many(self.model, name):
                    course.between(done)
                    if done == course.run.steps:
                        course.end()
            if any(self.courses[name].is_to_stop and self.done[name] < self.courses[name].run.steps for name in left):
                return False
        return True

    def train_step(self, names: list[str]) -> dict[str, StepMetrics]:
        """The next optimizer step of each of the adapters `names`, of which there is one or more."""
        started = time.perf_counter()
        if self._gradients is None or self._gradients.names != names:
            train_many(self.model, names)  # those that are done get no gradient any more
            self._gradients = ManyGradients(self.model, names)
        self._gradients.zero()
        sums = torch.zeros(2, len(names), dtype=torch.float64, device=self.mesh.device)  # losses, trained tokens
        for rows in self._rows(names):
            batch, shares, numbers = self._batch(names, rows)
            with runtime(self.model).many.at(shares):  # the backward too: it may run forwards once more
                losses = self._losses(batch, [len(share.tokens) // batch.labels.shape[1] for share in shares])
                losses.sum().backward()
            at = to_device(torch.tensor(numbers), self.mesh.device)
            counts = torch.stack([n.sum() for n in self._trained_of(batch, shares)])
            sums[0].index_add_(0, at, losses.detach().double())
            sums[1].index_add_(0, at, counts.double())
        sums = all_reduce_sum(sums, self.mesh.dp)
        self._gradients.finish(sums[1])
        limits = [self.courses[name].run.config.train.max_grad_norm for name in names]
        norms = self._gradients.clip(limits)
        read = read_step(sums[0] / sums[1], norms, sums[1], mesh=self.mesh, is_asked=self.stop.is_asked)
        self._gradients.check_counts(read.numbers)
        found: dict[str, StepMetrics] = {}
        for name, loss, norm, count, is_finite in zip(
            names, read.losses, read.norms, read.numbers, read.are_finite, strict=True
        ):
            course, step = self.courses[name], self.done[name]
            course.is_to_stop = read.is_to_stop
            rate = course.update(step, is_finite=is_finite)
            if not is_finite:
                what = f"the gradient norm is {norm}" if math.isfinite(loss) else f"the loss is {loss}"
                course.leave_out(f"adapter {name}, step {step + 1}: {what}")
            time_s = time.perf_counter() - started
            found[name] = StepMetrics(step + 1, loss, rate, norm, int(count), time_s, skipped=not is_finite)
        return found

    def _rows(self, names: list[str]) -> list[list[tuple[int, int, int]]]:
        """This dp rank's micro-batches: (number in `names`, place in that adapter's own step, sequence) of each row.

        All rows of the step are dealt to the ranks in turn: they differ by one at most, whatever the batch sizes are.
        """
        rows = [
            (number, place, int(index))
            for number, name in enumerate(names)
            for place, index in enumerate(self.courses[name].batches.batch(self.done[name]))
        ]
        dp = self.mesh.dp
        parts = share(np.arange(len(rows)), dp_rank=dp.rank, dp_size=dp.size, micro_batch_size=self.micro_batch_size)
        return [[rows[index] for index in part] for part in parts]

    def _batch(self, names: list[str], rows: list[tuple[int, int, int]]) -> tuple[Batch, list[Share], list[int]]:
        """(the padded micro-batch, the share of each adapter in it, whose these are: numbers in `names`)."""
        batch = collate(
            [self.runs[names[number]].train_data[index] for number, _, index in rows],
            pad_token_id=self.runs[names[0]].pad_token_id,
            token_multiple=self.mesh.tp.size if self.mesh.topology.sp else 1,
            places=[place for _, place, _ in rows],
        ).to(self.mesh.device)
        # A rank without a row runs the others' collectives; the row of padding that it runs on is of some adapter.
        owners = [number for number, _, _ in rows] or [0]
        shares, numbers, start = [], [], 0
        for number, group in itertools.groupby(owners):
            stop = start + len(list(group))
            tokens = batch.tokens[start:stop].flatten()
            seed = self.runs[names[number]].config.train.seed
            shares.append(Share(names[number], tokens, seed, self.done[names[number]]))
            numbers.append(number)
            start = stop
        return batch, shares, numbers

    def _losses(self, batch: Batch, rows: list[int]) -> Tensor:
        """`[K]`: the summed loss of each share of a micro-batch, `rows` of each."""
        with lift(self.model.dtype == torch.float64):
            return language_model_losses(
                self.model,
                batch.input_ids,
                batch.attention_mask,
                batch.labels,
                rows,
                label_smoothing=self.label_smoothing,
                trained=batch.trained,
            )

    @staticmethod
    def _trained_of(batch: Batch, shares: list[Share]) -> list[Tensor]:
        """For each share which of its tokens are trained."""
        return list((batch.labels >= 0).flatten().split([len(share.tokens) for share in shares]))


def train_together(
    runs: Mapping[str, Prepared], *, console: Console | None = None, go_on: str = "--resume auto"
) -> None:
    """Train the adapters that `runs` names on one base. Every rank of the job calls this; arguments as of `run.train`.

    Those that are finished already are left as they are.
    """
    runs = {name: run for name, run in runs.items() if not run.is_finished}
    console = console or Console()
    first = next(iter(runs.values()))
    shared = first.config
    join(shared.device)
    with hashing_contents(runs.values()) as hashes:
        model = load_blueprint(dataclasses.replace(first.blueprint, adapter=None), device=shared.device)
        mesh = runtime(model).mesh
        runs = {name: with_contents(run, hashes, mesh, console=console) for name, run in runs.items()}
    for name, run in runs.items():
        begin_adapter(model, name, run.start.trained, seed=run.config.train.seed)
    with ExitStack() as opened:
        reporters = {}
        for name, run in runs.items():
            notes = [*run.notes, *(prepare_output(run) if mesh.rank == 0 else ())]
            reporters[name] = opened.enter_context(
                Reporter(
                    Path(run.config.train.output) / "metrics.jsonl",
                    steps=run.steps,
                    log_every=run.config.train.log_every,
                    is_main=mesh.rank == 0,
                    console=console,
                    done=run.resume.step if run.resume is not None else 0,
                    goes_on_without=run.config.train.on_save_error == "continue",
                    name=name,
                )
            )
            introduce(run, notes, reporters[name])
        stop = opened.enter_context(noticing_signals(end_at_once, is_lost=another_rank_failed))
        opened.enter_context(mesh.patient_for(shared.train.timeout_s))
        trainer = ManyTrainer(runs, model, reporters, stop)
        say_in_training()
        is_done = trainer.train()
        for name, run in runs.items():
            if trainer.done[name] == run.steps:
                reporters[name].say(f"adapter: {Path(run.config.train.output) / 'adapter'}")
            else:
                reporters[name].say(f"stopped as asked; saved in {trainer.courses[name].last_saved}")
        if not is_done and mesh.rank == 0:
            console.say(f"Go on with:\n{go_on}")
    leave()

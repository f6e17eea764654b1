"""One adapter of a training run: its optimizer, schedule, objective, evaluations, reports and saves.

Owns: the per-adapter state of a run. It works on the adapter in use (`adapter.attach.in_use`). Does not own: the step,
which may train other adapters too (`run.trainer`), the order of the data, files, which checkpoints are kept
(`run.checkpoint.retention`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshlora.adapter.attach import Factor, active_factors, in_use, runtime
from meshlora.adapter.formats.peft_format import save_adapter
from meshlora.adapter.replicas import check_replicas
from meshlora.comm.collectives import broadcast_in_place
from meshlora.layers.tokens import Share
from meshlora.reading.stream import num_failed
from meshlora.reading.tokenizer import add_tokenizer
from meshlora.run.advantages import with_advantages
from meshlora.run.checkpoint.manifest import CARD, Kind, Manifest, write_manifest
from meshlora.run.checkpoint.resuming import FINISHED, FOLDER
from meshlora.run.checkpoint.retention import Keeping, folder_name
from meshlora.run.checkpoint.state import restore_optimizer, state_writer
from meshlora.run.config.endings import LOSS
from meshlora.run.config.metrics import name_of
from meshlora.run.early_stopping import Patience, values_until
from meshlora.run.evaluate import mean_loss, perplexity
from meshlora.run.followed import WAIT_S, Followed, stream_of
from meshlora.run.grown import complete
from meshlora.run.learning_rate import learning_rate
from meshlora.run.loss_scale import LossScale
from meshlora.run.model_card import Measured, model_card
from meshlora.run.objectives import Point, first_pass
from meshlora.run.optimizer import make_optimizer, parameter_groups
from meshlora.run.optimizers import is_frozen
from meshlora.run.prepared import Prepared
from meshlora.run.spikes import SpikeWatch, losses_of_steps
from meshlora.run.texts import Texts
from meshlora.run.watch.metrics import Reporter, records_until
from meshlora.run.watch.samples import FILE as SAMPLES
from meshlora.train.batch import Batch
from meshlora.train.batches import Batching, Step
from meshlora_ground.dataset import TokenizedDataset
from meshlora_ground.errors import MeshloraError, SaveError, reason
from meshlora_ground.float64 import lift
from meshlora_ground.versions import versions

# A run that skips non-finite steps ends after so many in a row: it no longer learns.
_MOST_SKIPPED = 10


@dataclass
class TrainedAdapter:
    """The adapter `adapter` of `model`, trained by `run`. It must be in use during construction.

    name: for messages, "" if it is the only one. check: called with the folder of the initial adapter.
    """

    name: str
    adapter: str
    run: Prepared
    model: Any
    reporter: Reporter
    batching: Batching
    check: Callable[[Path], None] | None = None

    def __post_init__(self) -> None:
        options = self.run.config.train
        self.objective = options.objective
        self.data = with_advantages(self.objective, self.run.train_data)
        self.mesh = runtime(self.model).mesh
        self.step_facts: dict[str, float] = {}  # of the data of the current step, to be reported
        self.followed = self._followed()
        self.batches = None if self.followed is not None else self.run.batches
        self.output = Path(options.output)
        self.last_saved: Path | None = None
        self.updates, self.skipped_in_row = 0, 0
        self.is_to_stop = False  # as all ranks agreed in the last step
        self.point: Point = None  # of the current step
        self.means: dict[str, float] = {}  # of the last evaluation
        self.scores: dict[str, float] = {}  # of its answers
        self.first_scores: dict[str, float] = {}  # before the first step
        self.eval_loss: float | None = None
        self.evaluated, self.ends_with_stream = 0, False  # evaluated: after so many steps, last
        self.asking = self.run.asking  # or what makes its rollouts says it
        self.frozen, self.factors = list[Factor](), list[Factor]()
        for factor in active_factors(self.model):
            kind = self.frozen if is_frozen(factor.name, options.optimizer) else self.factors
            kind.append(factor)
        # float16 has a narrow exponent range: small gradients would underflow.
        self.loss_scale = LossScale() if self.model.dtype == torch.float16 else None
        self.optimizer = make_optimizer(self.model, parameter_groups(self.model, options), options)
        if self.run.resume is not None:
            if self.loss_scale is not None:
                self.loss_scale.restore(self.run.resume.loss_scale)
            restore_optimizer(self.model, self.optimizer, self.run.resume)
            self.last_saved, self.updates = self.run.resume.folder, self.run.resume.updates
            self.skipped_in_row = self.run.resume.skipped_in_row
            self.eval_loss = self.run.resume.eval_loss
        self.done = self.start
        past, watched = dict[int, float](), options.early_stopping
        if self.mesh.rank == 0:
            past = values_until(self.output / "metrics.jsonl", self.start, self.run.eval_every, watched.metric)
            self.first_scores, self.scores = self._scores_before()
        self.keeping = Keeping(
            self.output,
            keep_last=options.keep_last,
            keep_best=options.keep_best,
            resume=self.run.resume,
            watched=watched,
            values=past,
        )
        self.patience = Patience(watched, past.values())
        self.stops_early = bool(options.early_stopping.patience) and self._says_rank_0(self.patience.is_out)
        losses = list[float]()
        if self.mesh.rank == 0 and options.on_spike.is_on:
            losses = losses_of_steps(self.output / "metrics.jsonl", self.start)
        self.spikes = SpikeWatch(options.on_spike, losses)
        self.spike = ""  # the one that ends the run, in words

    @property
    def start(self) -> int:
        """Steps done before this run."""
        return self.run.start_step

    @property
    def is_done(self) -> bool:
        """Whether no step is left, or the run has stopped early."""
        return self.done >= self.run.steps or self.stops_early

    @property
    def step_data(self) -> Step:
        """(data, indices as of `TokenizedDataset.rows_of`) of its next step. Of a stream: after `fetch`."""
        if self.followed is not None:
            return self.followed.current
        assert self.batches is not None
        data = self.data
        return data, data.rows_of(self.batches.batch(self.done))

    def fetch(self, asked: threading.Event) -> bool:
        """Make sure of the data of its next step. Returns False if there is none: the stream has ended, or a rank was
        asked to stop while it waited; a checkpoint is then there to resume from. Collective."""
        if self.followed is None:
            return True
        state = self.followed.fetch(self.done + 1, asked)
        if state == "ended":
            self.stops_early = self.ends_with_stream = True
            self.reporter.say(f"the stream has ended after {self.done:,} of {self.run.steps:,} steps")
        if state == "asked":
            self.is_to_stop = True
            self.save_now()
        return state == "there"

    def _followed(self) -> Followed | None:
        """The steps of the stream that the run follows, if it does."""
        config, stream = self.run.config, stream_of(self.run.config)
        if stream is None:
            return None
        reader = "" if self.objective.is_of_rollouts else "spoken"  # by the student of a teacher
        texts = Texts(config.model, config.data, config.train.objective, reader)
        tokenizer, model = texts.tokenizer(), self.run.blueprint.config

        def read(file: str) -> TokenizedDataset:
            data = texts.read(file, tokenizer, model)
            self.step_facts = {} if data.targets is None else {"reward": float(data.targets[:, 0].mean())}
            if config.rl is not None and config.rl.may_fail:
                self.step_facts["failed_rewards"] = float(num_failed(file))
            return with_advantages(self.objective, data)

        wait_s, most = config.data.follow_s or WAIT_S, config.train.batch_size
        return Followed(stream, self.mesh, read, wait_s, most, say=self.reporter.say)

    def in_use(self) -> contextlib.AbstractContextManager[None]:
        """Make it the adapter that is saved and evaluated inside the block."""
        is_active = runtime(self.model).active == self.adapter
        return contextlib.nullcontext() if is_active else in_use(self.model, self.adapter)

    def share(self, batch: Batch) -> Share:
        """Its share of a forward of its next step: its rows, a batch of their own."""
        return Share(self.adapter, batch.tokens, self.run.config.train.seed, self.done, batch.attention_mask)

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss times the loss scale, if there is one."""
        return loss if self.loss_scale is None else loss * self.loss_scale.scale

    def _scores_before(self) -> tuple[dict[str, float], dict[str, float]]:
        """(metrics before the first step, of the last evaluation) of a run that goes on, as its `metrics.jsonl` has
        them."""
        found: list[dict[str, float]] = [{}, {}]
        for values in records_until(self.output / "metrics.jsonl", self.start):
            if "eval_answers" in values:
                names = list(map(name_of, self.run.config.generate.metrics))
                scores = {name: values[f"eval_{name}"] for name in names if f"eval_{name}" in values}
                found[values["step"] > 0] = scores
        return found[0], found[1]

    def begin(self) -> None:
        """Save the initial adapter, before the first step, and measure its answers: what training adds is seen."""
        if not self.start:
            self._save("initial", self._manifest("initial", done=0))
            if self.run.answers is not None:
                self._report_evaluation(0)
                self.first_scores = self.scores
        if self.check is not None:
            assert self.last_saved is not None
            self.check(self.last_saved)

    def _is_proved_on_devices(self) -> bool:
        """Whether the first step of the real model belongs to the preflight: its replicas are compared after it."""
        wanted, is_on_gpus = self.run.config.preflight, runtime(self.model).mesh.device.type == "cuda"
        return wanted == "device" or (wanted == "auto" and is_on_gpus)

    def between(self, done: int) -> None:
        """Take the samples, evaluation and checkpoint due after `done` steps."""
        options = self.run.config.train
        every = options.replica_check_every
        if every and (done % every == 0 or (done == self.start + 1 and self._is_proved_on_devices())):
            check_replicas(self.model, step=done, last_saved=self.last_saved)
        if self.run.samples is not None and (done % options.sample_every == 0 or done == self.run.steps):
            with self.reporter.doing("samples"):
                self.run.samples.write(self.model, self.output / SAMPLES, step=done, say=self.reporter.say)
        if done == self.run.steps:
            return
        loss = None
        if self.run.eval_every and done % self.run.eval_every == 0:
            loss = self._report_evaluation(done)
        if loss is not None and options.early_stopping.patience:
            self.stops_early = self._says_rank_0(self.patience.sees(self._watched(loss)))
            if self.stops_early:
                without, best = self.patience.num_without, self.patience.best
                self.reporter.say(f"step {done}: stops early: {without} evaluations have not improved {best:.4f}")
        is_best = self._is_best(loss)
        if is_best or self.is_to_stop or (self.run.save_every and done % self.run.save_every == 0):
            self._save_checkpoint(done, is_best=is_best, loss=loss)

    def end(self) -> None:
        """Evaluate and save the finished adapter, after the last step."""
        is_whole = self.start < self.run.steps and not self.stops_early
        if is_whole or (self.ends_with_stream and self.start < self.done != self.evaluated):
            loss = self._report_evaluation(self.done)
            if self._is_best(loss):
                self._save_checkpoint(self.done, is_best=True, loss=loss)
        self._save(FINISHED, self._manifest("adapter", done=self.done), state=self._add_home)

    def update(self, step: int, *, is_finite: bool) -> float:
        """Step the optimizer if the gradient is finite; returns the learning rate."""
        rate = learning_rate(step, options=self.run.config.train, steps=self.run.steps)
        if is_finite:
            for group in self.optimizer.param_groups:
                group["lr"] = rate * group["times_lr"]
            self.optimizer.step()
            self.updates, self.skipped_in_row = self.updates + 1, 0
        return rate

    @property
    def most_loss(self) -> float:
        """The loss above which the next step ends the patience with spikes, as rank 0 says; infinity on others."""
        return self.spikes.limit if self.mesh.rank == 0 else math.inf

    def watch(self, step: int, loss: float, *, is_spike: bool) -> None:
        """Count the loss of `step`, from 1. is_spike: as all ranks agreed, it ends the patience with spikes."""
        options = self.run.config.train.on_spike
        if self.mesh.rank == 0 and options.is_on:
            self.spikes.sees(loss)
        if not is_spike:
            return
        of = f"adapter {self.name}, " if self.name else ""
        in_row = f"{options.patience} in a row are" if options.patience > 1 else "it is"
        text = f"{of}step {step}: loss spike: the loss is {loss:.4g}: {in_row} above {options.words}"
        if options.then == "stop" and step < self.run.steps:
            self.spike = text
        else:
            self.reporter.say(f"note: {text.removeprefix(of)}")

    def save_now(self, *, keeps_older: bool = False) -> None:
        """Save the checkpoint of the last step, unless it is there. keeps_older: whatever `keep_last` says."""
        if self.done and self.last_saved != self.output / FOLDER / folder_name(self.done):
            self._save_checkpoint(self.done, is_best=False, loss=None, keeps_older=keeps_older)

    def leave_out(self, text: str) -> None:
        """Skip a step that is not finite, as `text` says, or end the run."""
        self.skipped_in_row += 1
        if self.run.config.train.on_nonfinite == "stop":
            way_out = "lower train.lr, look at the data, or leave out such steps: on_nonfinite: skip"
            raise MeshloraError(f"{text}; {way_out}")
        if self.skipped_in_row >= _MOST_SKIPPED:
            raise MeshloraError(f"{text}; {_MOST_SKIPPED} steps in a row were left out: lower train.lr")
        self.reporter.say(f"{text}; left out")

    def evaluate(self, data: TokenizedDataset) -> tuple[float, int]:
        """(mean loss over `data`, number of items averaged: tokens, pairs or records), over all ranks."""
        size = self.run.config.train.micro_batch_size * self.mesh.dp.size
        with self.reporter.doing("evaluation", math.ceil(len(data) / data.rows_per_example / size)) as advance:
            size = self.run.config.train.batch_size
            loss, number, self.means = mean_loss(
                self.model, data, self.objective, self.batching, batch_size=size, advance=advance
            )
            return loss, number

    def first_pass(self, step: Step) -> Point:
        """`objectives.first_pass` over the examples of its next step. Collective."""

        def masks(batch: Batch) -> contextlib.AbstractContextManager[None]:
            return runtime(self.model).dropout.of([self.share(batch)], [self.adapter])

        with lift(self.model.dtype == torch.float64):
            return first_pass(self.objective, self.model, self.batching, step, masks)

    def _manifest(self, kind: Kind, *, done: int) -> Manifest:
        """The manifest of a folder saved after `done` steps."""
        own: dict[str, Any] = {"identity": self.run.identity, "versions": versions(), "asking": self.asking}
        return Manifest(kind=kind, step=done, steps=self.run.steps, updates=self.updates, **own)

    def _save(self, name: str, manifest: Manifest, *, state: Callable[[Path], None] | None = None) -> None:
        """Write the adapter, and the files of `state`, to folder `name` of the output. Refuses drifted replicas."""
        if self.run.config.train.replica_check_every:
            check_replicas(self.model, step=manifest.step, last_saved=self.last_saved)

        def add(folder: Path) -> None:
            if state is not None:
                state(folder)
            complete(folder, self.run.config.model.path, self.run.blueprint)
            write_manifest(folder, manifest)

        with self.reporter.doing("save"):
            save_adapter(self.model, self.output / name, also=add, compares=False)
        self.last_saved = self.output / name

    def _add_home(self, folder: Path) -> None:
        """Add what the finished adapter needs to be used elsewhere: tokenizer, chat template, model card.

        What can no longer be read or written is left out, and said: the adapter is worth more.
        """
        if not self.run.files.get("tokenizer"):  # a twin, whose data are tokens
            return

        def add_card() -> None:
            task = runtime(self.model).plan.task
            measured = Measured(self.scores, self.first_scores)
            card = model_card(self.run, done=self.done, task=task, eval_loss=self.eval_loss, measured=measured)
            (folder / CARD).write_bytes(card.encode())

        def add_own_tokenizer() -> None:
            path, trust = self.run.config.model.path, self.run.config.model.trust_remote_code
            template, stops = self.run.chat_template, self.run.stop_tokens
            add_tokenizer(folder, path, trust_remote_code=trust, chat_template=template, stop_tokens=stops)

        for what, add in {"a tokenizer": add_own_tokenizer, "a model card": add_card}.items():
            try:
                add()
            except (MeshloraError, OSError, ValueError) as error:
                self.reporter.say(f"note: the adapter is saved without {what} ({reason(error)})")

    def _save_checkpoint(self, done: int, *, is_best: bool, loss: float | None, keeps_older: bool = False) -> None:
        """Write the checkpoint of step `done`, and remove older ones unless `keeps_older`."""
        state, topology = state_writer(self.model, self.optimizer), str(self.mesh.topology)
        manifest = dataclasses.replace(
            self._manifest("checkpoint", done=done), topology=topology, skipped_in_row=self.skipped_in_row
        )
        if loss is not None and math.isfinite(loss):  # JSON has no other numbers
            manifest = dataclasses.replace(manifest, eval_loss=loss)
        if self.loss_scale is not None:
            manifest = dataclasses.replace(manifest, loss_scale=self.loss_scale.state())
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
                value = None if loss is None else self._watched(loss)
                self.keeping.saved(done, is_best=is_best, value=value, keeps_older=keeps_older)
            except OSError as error:  # the names still point at whole checkpoints
                self.reporter.say(f"step {done}: {self.output / FOLDER} could not be kept in order ({error.strerror})")

    def _is_best(self, loss: float | None) -> bool:
        """Whether an evaluation is the best so far, as decided by rank 0. Collective with `keep_best`."""
        if loss is None or not self.run.config.train.keep_best:
            return False
        return self._says_rank_0(self.keeping.is_best(self._watched(loss)))

    def _watched(self, loss: float) -> float:
        """What `train.early_stopping.metric` is in the evaluation that gave `loss`."""
        metric = self.run.config.train.early_stopping.metric
        return loss if metric == LOSS else self.scores[metric]

    def _says_rank_0(self, is_true: bool) -> bool:
        """What rank 0 says, on all. Collective."""
        flag = torch.tensor([int(is_true)], device=self.mesh.device)
        return bool(broadcast_in_place(flag, self.mesh.world).item())

    def _report_evaluation(self, step: int) -> float | None:
        if self.run.eval_data is None:
            return None
        loss, number = self.evaluate(self.run.eval_data)
        of_text, of_loss = self.objective.is_of_text, None
        if of_text:
            of_loss = perplexity(loss)
        answers, num_answers = self.run.answers, None
        if answers is not None:
            num_answers = len(answers.prompts.prompts)
            with self.reporter.doing("answers"):
                self.scores = answers.measured(self.model)
        means = {**self.means, **self.scores}
        self.reporter.evaluation(step, loss, number, perplexity=of_loss, means=means, answers=num_answers)
        self.eval_loss, self.evaluated = loss, step
        return loss

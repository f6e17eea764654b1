"""The loop: batch -> loss -> backward -> finish gradients -> clip -> step.

Owns: one optimizer step, evaluation, and when things are logged and saved. Does not own: gradient sync, the order of
the data, files. Nothing here depends on the topology beyond which share of a batch is ours.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from meshlora.adapter.manage import runtime
from meshlora.adapter.peft_format import save_adapter
from meshlora.data import Batch, TokenizedDataset, collate, share
from meshlora.errors import MeshloraError
from meshlora.lift import lift
from meshlora.parallel.collectives import all_reduce_sum
from meshlora.train.balance import LoadBalancing
from meshlora.train.checkpoint import FOLDER, restore_optimizer, state_writer
from meshlora.train.gradsync import clip_gradients, finish_gradients
from meshlora.train.losses import language_model_loss
from meshlora.train.metrics import Reporter, StepMetrics
from meshlora.train.optimizer import parameter_groups
from meshlora.train.prepare import Prepared
from meshlora.train.replicas import check_replicas
from meshlora.train.routing import RunRouting
from meshlora.train.schedule import learning_rate


@dataclass
class Trainer:
    """Trains the active adapter of `model` as `run` says."""

    run: Prepared
    model: Any
    reporter: Reporter

    def __post_init__(self) -> None:
        options = self.run.config.train
        self.mesh = runtime(self.model).mesh
        self.batches = self.run.batches
        self.output = Path(options.output)
        self.last_saved: Path | None = None
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
                micro_batch_size=options.micro_batch_size,
            )
        self.optimizer = torch.optim.AdamW(
            parameter_groups(self.model, options),
            lr=options.lr,
            betas=(options.beta1, options.beta2),
            eps=options.eps,
            weight_decay=options.weight_decay,
            fused=True,  # one pass over each parameter and its moments: experts have many
        )
        if self.run.resume is not None:
            restore_optimizer(self.model, self.optimizer, self.run.resume)
            self.last_saved = self.run.resume.folder

    def train(self) -> None:
        """All steps that are left, with evaluations and saves between them, and the finished adapter at the end."""
        options = self.run.config.train
        self.model.train()
        start = self.run.resume.step if self.run.resume is not None else 0
        if not start:
            self._save("initial", done=0)
        for step in range(start, self.run.steps):
            self.reporter.step(self.train_step(step))
            done = step + 1
            if options.replica_check_every and done % options.replica_check_every == 0:
                check_replicas(self.model, step=done, last_saved=self.last_saved)
            if options.eval_every and done % options.eval_every == 0 and done < self.run.steps:
                self._report_evaluation(done)
            if options.save_every and done % options.save_every == 0 and done < self.run.steps:
                self._save(f"{FOLDER}/step-{done:06d}", done=done, goes_on=True)
        self._report_evaluation(self.run.steps)
        self._save("adapter", done=self.run.steps)

    def train_step(self, step: int) -> StepMetrics:
        """One optimizer step over the global batch."""
        options = self.run.config.train
        started = time.perf_counter()
        self.optimizer.zero_grad(set_to_none=True)
        loss, num_tokens = torch.zeros((), dtype=torch.float64, device=self.mesh.device), 0
        indices = self.batches.batch(step)
        batches = list(self._micro_batches(self.run.train_data, indices))
        with self.routing.step(step, indices) if self.routing is not None else contextlib.nullcontext():
            if self.balance is not None and len(batches) > 1:
                self.balance.count(batches, self._forward)
            for number, batch in enumerate(batches):
                loss += self._backward(number, batch, is_only=len(batches) == 1)
                num_tokens += batch.num_trained_tokens
        aux_loss = self.balance.finish() if self.balance is not None else None
        tokens = finish_gradients(self.model, num_tokens=num_tokens)
        mean_loss = float(all_reduce_sum(loss.reshape(1), self.mesh.dp)) / tokens
        if not math.isfinite(mean_loss):
            raise MeshloraError(f"step {step + 1}: the loss is {mean_loss}; lower train.lr, or look at the data")
        grad_norm = clip_gradients(self.model, options.max_grad_norm)
        if not math.isfinite(grad_norm):
            raise MeshloraError(
                f"step {step + 1}: the gradient norm is {grad_norm}; lower train.lr, or look at the data"
            )
        rate = learning_rate(step, options=options, steps=self.run.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group["times_lr"]
        self.optimizer.step()
        return StepMetrics(step + 1, mean_loss, rate, grad_norm, tokens, time.perf_counter() - started, aux_loss)

    def _forward(self, number: int, batch: Batch) -> Tensor:
        """The summed loss of micro-batch `number` of this step."""
        if self.routing is not None:
            self.routing.before(number, batch)
        return self._loss_sum(batch)

    def _backward(self, number: int, batch: Batch, *, is_only: bool) -> Tensor:
        """Forward and backward of one micro-batch; its summed loss, without that of load balancing."""
        if self.balance is None:
            loss = self._forward(number, batch)
            loss.backward()
            return loss.detach()
        with self.balance.watching():
            loss = self._forward(number, batch)
        if is_only:
            self.balance.count_here(batch)
        with lift(self.model.dtype == torch.float64):
            term = self.balance.term(batch)
        (loss + term).backward()
        return loss.detach()

    @torch.no_grad()
    def evaluate(self, data: TokenizedDataset) -> tuple[float, int]:
        """(mean loss over the trained tokens of `data`, number of these tokens), over all ranks."""
        self.model.eval()
        sums = torch.zeros(2, dtype=torch.float64, device=self.mesh.device)
        for batch in self._micro_batches(data, np.arange(len(data))):
            sums += sums.new_tensor([float(self._loss_sum(batch)), batch.num_trained_tokens])
        self.model.train()
        loss, tokens = all_reduce_sum(sums, self.mesh.dp).tolist()
        return loss / tokens, int(tokens)

    def _save(self, name: str, *, done: int, goes_on: bool = False) -> None:
        """Write the adapter to folder `name` of the output, with what a run needs to go on; a drift saves nothing."""
        if self.run.config.train.replica_check_every:
            check_replicas(self.model, step=done, last_saved=self.last_saved)
        state = state_writer(self.model, self.optimizer, step=done, identity=self.run.identity) if goes_on else None
        save_adapter(self.model, self.output / name, also=state)
        self.last_saved = self.output / name

    def _report_evaluation(self, step: int) -> None:
        if self.run.eval_data is not None:
            self.reporter.evaluation(step, *self.evaluate(self.run.eval_data))

    def _loss_sum(self, batch: Batch) -> Tensor:
        device = self.mesh.device
        with lift(self.model.dtype == torch.float64):
            return language_model_loss(
                self.model,
                batch.input_ids.to(device),
                batch.attention_mask.to(device),
                batch.labels.to(device),
                label_smoothing=self.run.config.train.label_smoothing if self.model.training else 0.0,
            )

    def _micro_batches(self, data: TokenizedDataset, indices: np.ndarray) -> Iterator[Batch]:
        """This dp rank's share of `indices`, padded; every rank gets the same number of micro-batches."""
        shares = share(
            indices,
            dp_rank=self.mesh.dp.rank,
            dp_size=self.mesh.dp.size,
            micro_batch_size=self.run.config.train.micro_batch_size,
        )
        for part in shares:
            yield collate(
                [data[int(i)] for i in part],
                pad_token_id=self.run.pad_token_id,
                token_multiple=self.mesh.tp.size if self.run.topology.sp else 1,
            )

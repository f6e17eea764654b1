"""The loop: batch -> loss -> backward -> finish gradients -> clip -> step.

Owns: one optimizer step, evaluation, and when things are logged and saved. Does not own: gradient sync, the order of
the data, files. Nothing here depends on the topology beyond which share of a batch is ours.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
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
from meshlora.data import Batch, TokenizedDataset, collate, joined, packed_share, share, with_positions
from meshlora.errors import MeshloraError
from meshlora.lift import lift
from meshlora.parallel.collectives import all_reduce_sum
from meshlora.parallel.groups import Mesh
from meshlora.train.balance import LoadBalancing
from meshlora.train.checkpoint import FOLDER, restore_optimizer, state_writer
from meshlora.train.gradsync import clip_gradients, finish_gradients
from meshlora.train.loss_scale import LossScale
from meshlora.train.metrics import Reporter, StepMetrics
from meshlora.train.objectives import Sums, base_log_probabilities, batch_log_probabilities, objective_of
from meshlora.train.optimizer import parameter_groups
from meshlora.train.prepare import Prepared
from meshlora.train.recompute import recompute_layers
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
        self.objective = objective_of(options)
        recompute_layers(self.model, options.recompute)
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
                rows=lambda indices: self._rows(self.run.train_data, indices),
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
        sums = _Sums(self.mesh)
        indices = self.batches.batch(step)
        batches = list(self._micro_batches(self.run.train_data, indices))
        with self.routing.step(step, indices) if self.routing is not None else contextlib.nullcontext():
            if self.balance is not None and len(batches) > 1:
                self.balance.count(batches, self._log_probabilities)
            for number, batch in enumerate(batches):
                sums.add(batch, *self._backward(number, batch, is_only=len(batches) == 1))
        aux_loss = self.balance.finish() if self.balance is not None else None
        count = finish_gradients(self.model, num_tokens=sum(self.objective.count(batch) for batch in batches))
        tokens, means = sums.over_all_ranks(count)
        if not math.isfinite(means["loss"]):
            raise MeshloraError(f"step {step + 1}: the loss is {means['loss']}; lower train.lr, or look at the data")
        if self.loss_scale is not None:
            self.loss_scale.unscale(self.model)
        grad_norm = clip_gradients(self.model, options.max_grad_norm)
        is_taken = self.loss_scale is None or self.loss_scale.takes_step(grad_norm, step=step)
        if is_taken and not math.isfinite(grad_norm):
            raise MeshloraError(
                f"step {step + 1}: the gradient norm is {grad_norm}; lower train.lr, or look at the data"
            )
        rate = learning_rate(step, options=options, steps=self.run.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group["times_lr"]
        if is_taken:
            self.optimizer.step()
        loss = means.pop("loss")
        found = StepMetrics(step + 1, loss, rate, grad_norm, tokens, time.perf_counter() - started, aux_loss, means)
        if self.loss_scale is None:
            return found
        return dataclasses.replace(found, loss_scale=self.loss_scale.scale, skipped=self.loss_scale.skipped)

    def _scaled(self, loss: Tensor) -> Tensor:
        return loss if self.loss_scale is None else self.loss_scale.scaled(loss)

    def _forward(self, number: int, batch: Batch, base: Tensor | None = None) -> tuple[Tensor, Sums]:
        """The summed loss of micro-batch `number` of this step, and what is reported besides."""
        if self.routing is not None:
            self.routing.before(number, batch)
        return self._loss_sum(batch, base)

    def _log_probabilities(self, number: int, batch: Batch) -> Tensor:
        """A forward of micro-batch `number`, whatever the objective makes of it."""
        if self.routing is not None:
            self.routing.before(number, batch)
        with lift(self.model.dtype == torch.float64):
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

    @torch.no_grad()
    def evaluate(self, data: TokenizedDataset) -> tuple[float, int]:
        """(mean loss over the trained tokens of `data`, or over its pairs; how many these are), over all ranks."""
        self.model.eval()
        sums = torch.zeros(2, dtype=torch.float64, device=self.mesh.device)
        for batch in self._micro_batches(data, np.arange(data.num_examples)):
            loss, _ = self._loss_sum(batch, self._of_base(batch))
            sums += sums.new_tensor([float(loss), self.objective.count(batch)])
        self.model.train()
        loss, count = all_reduce_sum(sums, self.mesh.dp).tolist()
        return loss / count, int(count)

    def _save(self, name: str, *, done: int, goes_on: bool = False) -> None:
        """Write the adapter to folder `name` of the output, with what a run needs to go on; a drift saves nothing."""
        if self.run.config.train.replica_check_every:
            check_replicas(self.model, step=done, last_saved=self.last_saved)
        scale = self.loss_scale.state() if self.loss_scale is not None else {}
        state = None
        if goes_on:
            state = state_writer(self.model, self.optimizer, step=done, identity=self.run.identity, loss_scale=scale)
        save_adapter(self.model, self.output / name, also=state)
        self.last_saved = self.output / name

    def _report_evaluation(self, step: int) -> None:
        if self.run.eval_data is not None:
            self.reporter.evaluation(step, *self.evaluate(self.run.eval_data))

    def _of_base(self, batch: Batch) -> Tensor | None:
        """What the frozen base says of a batch, where the objective needs it."""
        if not self.objective.needs_base:
            return None
        with lift(self.model.dtype == torch.float64):
            return base_log_probabilities(self.model, batch)

    def _loss_sum(self, batch: Batch, base: Tensor | None) -> tuple[Tensor, Sums]:
        with lift(self.model.dtype == torch.float64):
            return self.objective.loss(self.model, batch, base)

    def _rows(self, data: TokenizedDataset, indices: np.ndarray) -> list[list[list[int]]]:
        """This dp rank's micro-batches: for each row the places of its examples among the global batch `indices`."""
        config, dp = self.run.config, self.mesh.dp
        if config.data.packing:
            return packed_share(
                np.diff(data.offsets)[indices].tolist(),
                dp_rank=dp.rank,
                dp_size=dp.size,
                micro_batch_size=config.train.micro_batch_size,
                row_length=config.data.max_length,
            )
        places = np.arange(len(indices))
        shares = share(places, dp_rank=dp.rank, dp_size=dp.size, micro_batch_size=config.train.micro_batch_size)
        return [[[int(place)] for place in part] for part in shares]

    def _micro_batches(self, data: TokenizedDataset, indices: np.ndarray) -> Iterator[Batch]:
        """This dp rank's share of the examples `indices`, padded; every rank gets the same number of micro-batches."""
        is_packed = self.run.config.data.packing
        for rows in self._rows(data, indices):
            examples = [[s for place in row for s in data.example(int(indices[place]))] for row in rows]
            sequences = map(joined, examples) if is_packed else itertools.chain(*examples)
            batch = collate(
                list(sequences),
                pad_token_id=self.run.pad_token_id,
                token_multiple=self.mesh.tp.size if self.run.topology.sp else 1,
                columns=tuple(data.columns),
            )
            if is_packed:
                batch = with_positions(batch, [[len(s.input_ids) for s in row] for row in examples])
            yield batch.to(self.mesh.device)


class _Sums:
    """What a step reports, summed over micro-batches and ranks."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh, self._tokens = mesh, 0
        self._sums: dict[str, Tensor] = {}

    def add(self, batch: Batch, loss: Tensor, sums: Sums) -> None:
        """What one micro-batch adds."""
        self._tokens += batch.num_trained_tokens
        for name, value in {"loss": loss, **sums}.items():
            self._sums[name] = self._sums.get(name, 0.0) + value.double()

    def over_all_ranks(self, count: int) -> tuple[int, dict[str, float]]:
        """(trained tokens, name -> mean over `count`). Collective."""
        tokens = torch.tensor(float(self._tokens), dtype=torch.float64, device=self._mesh.device)
        tokens, *sums = all_reduce_sum(torch.stack([tokens, *self._sums.values()]), self._mesh.dp).tolist()
        return int(tokens), {name: value / count for name, value in zip(self._sums, sums, strict=True)}

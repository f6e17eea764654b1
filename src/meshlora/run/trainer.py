"""The loop: batch -> loss -> backward -> finish gradients -> clip -> step.

Owns: one optimizer step of the trained adapters, and the order of steps, evaluations and saves. Usually there is one
adapter; several share a base and its batches, each trained as if alone. Does not own: per-adapter state
(`run.trained`), gradient sync, the assignment of rows to adapters (`train.batches`), the source of a NaN
(`run.watch.nonfinite`). Nothing here depends on the topology, except this rank's share of a batch.

An adapter's step has the sequences, token count, norm and rate of the same step in a run of its own. Adapters share no
tokens or statistics, so each may begin and end at a different step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from meshlora.adapter.attach import Factor, in_use, runtime, set_adapters
from meshlora.layers.noise import add_noise
from meshlora.run.allocator import keep_freed_memory, peak_memory_bytes
from meshlora.run.config.run_file import TrainConfig
from meshlora.run.formulas.seen import Sums
from meshlora.run.graphs.graphs import Graphs
from meshlora.run.graphs.recorder import recorder
from meshlora.run.heads import set_padding
from meshlora.run.objectives import Reference, count, loss_sums, of_reference
from meshlora.run.prepared import Prepared
from meshlora.run.recompute import recompute_layers
from meshlora.run.slow_paths import check_fast, new_ones
from meshlora.run.step_sums import StepResult, StepSums
from meshlora.run.trained import TrainedAdapter
from meshlora.run.watch.metrics import Reporter, StepMetrics
from meshlora.run.watch.nonfinite import find_not_finite
from meshlora.train.batch import Batch
from meshlora.train.batches import Batching, MicroBatch, Own, Step
from meshlora.train.gradsync import clip_gradients_on_device, fill_missing, finish_gradients_on_device
from meshlora.train.losses import batch_log_probabilities
from meshlora.train.step_part import StepPart
from meshlora.wings.experts.balance import LoadBalancing
from meshlora.wings.experts.routing import RunRouting
from meshlora.wings.packed_rows.by_sequence import keep_apart
from meshlora.wings.stages.pipeline_schedule import one_forward_one_backward
from meshlora_ground.dataset import TokenizedDataset
from meshlora_ground.errors import MeshloraError
from meshlora_ground.float64 import lift
from meshlora_ground.objective import Sft
from meshlora_ground.slow_paths import SlowPath, watching


@dataclass
class Trainer:
    """Trains adapters of `model`. runs, reporters: by adapter name.

    stop: set once this rank is asked to stop. check: called with the folder of each initial adapter.
    """

    runs: Mapping[str, Prepared]
    model: Any
    reporters: Mapping[str, Reporter]
    stop: threading.Event = field(default_factory=threading.Event)
    check: Callable[[Path], None] | None = None

    def __post_init__(self) -> None:
        first = next(iter(self.runs.values()))
        options = first.config.train  # run-wide ones are the same for all adapters
        self.mesh = runtime(self.model).mesh
        set_padding(self.model, first.pad_token_id)
        self.batching = self._batching(first)
        if self.batching.packs and self.mesh.cp.size == 1:  # under cp attention runs in parts anyway
            keep_apart(self.model)
        recompute_layers(self.model, options.recompute)
        if options.neftune_alpha:
            add_noise(self.model.get_input_embeddings(), runtime(self.model).dropout, alpha=options.neftune_alpha)
        if self.mesh.device.type == "cpu":
            keep_freed_memory()
        self.parts = self._parts(options)
        self.is_to_stop = False  # as all ranks agreed in the last step
        self.taken = set[SlowPath]()  # by this rank
        self.slow_paths = list[SlowPath]()  # known to all ranks
        self.adapters: list[TrainedAdapter] = []
        for adapter, run in self.runs.items():
            name = adapter if len(self.runs) > 1 else ""
            with in_use(self.model, adapter):
                one = TrainedAdapter(name, adapter, run, self.model, self.reporters[adapter], self.batching, self.check)
            self.adapters.append(one)
            self.slow_paths += run.slow_paths
        self._training: list[TrainedAdapter] = []
        self.graphs = None
        if options.cuda_graphs != "off":
            self.graphs = self._recorded(is_auto=options.cuda_graphs == "auto")

    def _recorded(self, *, is_auto: bool) -> Graphs:
        """The records of the micro-batches of the only adapter."""
        (one,), how = self.adapters, recorder()
        assert how is not None
        assert isinstance(one.objective, Sft), one.objective

        def alone(batch: Batch) -> MicroBatch:
            return MicroBatch(batch, (Own(0, batch),))

        return Graphs(
            self.model,
            one.factors,
            how,
            label_smoothing=one.objective.label_smoothing,
            masks=lambda batch: self.masks([one], alone(batch)),
            share=one.share,
            eager=lambda batch: self._losses(alone(batch), None)[0][0],
            say=one.reporter.say if is_auto else None,
        )

    def _batching(self, run: Prepared) -> Batching:
        packing, topology = run.config.data.packing, self.mesh.topology
        return Batching(
            self.mesh,
            run.config.train.micro_batch_size,
            run.pad_token_id,
            run.config.data.longest if packing is True else None,
            only=run.config.train.objective.trained_row,
            multiple=self.mesh.pp.size if topology.interleave > 1 else 1,
            balances=runtime(self.model).context.balances,
            joins=packing == "auto",
        )

    def _parts(self, options: TrainConfig) -> tuple[StepPart, ...]:
        """What experts add to each step."""
        found = list[StepPart]()
        given = options.routing_replay or options.routing_record
        may_say_experts = runtime(self.model).plan.experts and options.objective.is_of_rollouts
        if given is not None or may_say_experts:
            folder = None if given is None else Path(given)
            found.append(RunRouting(self.model, folder, self.batching, replays=options.routing_record is None))
        if options.router_aux_loss_coef:
            coef, objective = options.router_aux_loss_coef, options.objective
            found.append(LoadBalancing(self.model, coef=coef, count=lambda batch: count(objective, batch)))
        return tuple(found)

    def train(self) -> bool:
        """Run the remaining steps, with evaluations and saves between them, and save the finished adapters.

        Returns whether all steps are done. If a rank was asked to stop, checkpoints to resume from are left instead.
        """
        self.model.train()  # dropout draws; evaluations and samples turn it off and on again
        for one in self.adapters:
            with one.in_use():
                one.begin()
                if one.is_done:  # killed between its last checkpoint and its end
                    one.end()
        while left := [one for one in self.adapters if not one.is_done]:
            if not all(one.fetch(self.stop) for one in left):
                for one in left:
                    if one.is_done:
                        with one.in_use():
                            one.end()
                if any(one.is_to_stop for one in left):
                    return False
                continue
            for one, metrics in zip(left, self.train_step(left), strict=True):
                one.done += 1
                one.reporter.step(metrics)
                if one.followed is not None and one.followed.check is not None:
                    one.followed.check(one.done, metrics.means)
                with one.in_use():
                    one.between(one.done)
                    if one.is_done:
                        one.end()
            self._end_by_spike(left)
            if self.is_to_stop and not all(one.is_done for one in left):
                return False
        return True

    def _end_by_spike(self, left: list[TrainedAdapter]) -> None:
        """End the run if the loss of one of its adapters has jumped up and its run file says so. Collective then.

        Raises:
            MeshloraError: it has. A checkpoint of each adapter is there to look at; earlier ones stay.
        """
        spiked = [one.spike for one in left if one.spike and not one.is_done]
        if not spiked:
            return
        for one in left:
            if not one.is_done:
                with one.in_use():
                    one.save_now(keeps_older=True)
        saved = ", ".join(str(one.last_saved) for one in left)
        way_out = (
            "look at the data of these steps, or lower train.lr; --resume auto goes on all the same, and "
            "--resume CHECKPOINT --resume-despite train.lr from an earlier one with another rate"
        )
        raise MeshloraError(f"{'; '.join(spiked)}; saved in {saved}; {way_out}")

    def train_step(self, adapters: list[TrainedAdapter]) -> list[StepMetrics]:
        """The next optimizer step of each of `adapters` (at least one), over its global batch."""
        started = time.perf_counter()
        if self._training != adapters:  # finished adapters get no gradient any more
            set_adapters(self.model, [one.adapter for one in adapters])
            self._training = adapters
            for one in adapters:
                for factor in one.frozen:
                    factor.parameter.requires_grad_(False)
        for one in adapters:
            one.optimizer.zero_grad(set_to_none=True)  # none, not zeros: unreached factors then show as such
        may_be_empty = any(getattr(one.objective, "mask_truncated", False) for one in adapters)
        sums = StepSums(self.mesh, [one.name for one in adapters], may_be_empty=may_be_empty)
        steps = [one.step_data for one in adapters]
        batches = self._micro_batches(steps)
        for one, step in zip(adapters, steps, strict=True):
            if one.objective.has_first_pass:
                with one.in_use():
                    one.point = one.first_pass(step)
        with contextlib.ExitStack() as around:
            for part in self.parts:
                around.enter_context(part.step(adapters[0].done, *steps[0]))
            if len(batches) > 1:
                for part in self.parts:
                    part.count(batches, self._log_probabilities)
            with watching(self.taken):
                self._run(batches, sums)
        aux_loss = None
        for part in self.parts:
            if (found := part.finish()) is not None:
                aux_loss = found
        factors = [self._trained(one, *step) for one, step in zip(adapters, steps, strict=True)]
        totals = finish_gradients_on_device(self.mesh, factors, sums.counts)
        for one, trained in zip(adapters, factors, strict=True):
            if one.loss_scale is not None:
                one.loss_scale.unscale(trained)
        norms = clip_gradients_on_device(self.mesh, factors, [one.run.config.train.max_grad_norm for one in adapters])
        limits = None
        if any(one.run.config.train.on_spike.is_on for one in adapters):
            limits = [one.most_loss for one in adapters]
        results = sums.read(totals, norms, is_asked=self.stop.is_set(), taken=self.taken, limits=limits)
        slow = new_ones(results[0].slow_paths, self.slow_paths)
        self.slow_paths += slow
        if adapters[0].run.config.train.require_fast:
            check_fast(slow)
        metrics = []
        for one, result in zip(adapters, results, strict=True):
            own = self._updated(one, result, batches, aux_loss, started)
            metrics.append(dataclasses.replace(own, slow_paths=tuple(slow)))
        return metrics

    def _run(self, batches: Sequence[MicroBatch], sums: StepSums) -> None:
        """Forward and backward of all micro-batches of a step, in the order of this stage."""
        pp, pipeline, waiting = self.mesh.pp, runtime(self.model).pipeline, dict[tuple[int, int], Any]()
        order = one_forward_one_backward(
            len(batches), rank=pp.rank, size=pp.size, interleave=self.mesh.topology.interleave
        )
        replayed = set[int]()
        if self.graphs is not None:
            self.graphs.begin()
            replayed |= {number for number, micro in enumerate(batches) if self.graphs.takes(micro.batch)}
        for number, stage, is_forward in order:
            micro = batches[number]
            if self.graphs is not None and number in replayed:
                if is_forward:  # and backward at once
                    batch, loss = micro.batch, self.graphs.run(micro.batch)
                    sums.add(0, batch, count(self._training[0].objective, batch), loss, {})
                continue
            # In the backward too: recomputation runs forwards in it.
            with self.masks(self._training, micro), pipeline.at(stage):
                if not is_forward:
                    losses, know_again = waiting.pop((number, stage))
                    know_again()  # the stage has had other micro-batches in between
                    self._backward(number, losses)
                    losses.clear()  # and its graph: no record may meet nodes of factors that are of another stream
                    continue
                losses, found = self._forward(number, micro, is_only=len(batches) == 1)
                waiting[number, stage] = losses, pipeline.noted()
            if stage != pipeline.stage:  # the others have neither loss nor tokens of their own
                continue
            for own, (loss, reported) in zip(micro.owners, found, strict=True):
                number_of = count(self._training[own.number].objective, own.batch)
                sums.add(own.number, own.batch, number_of, loss, reported)
        if self.graphs is not None:
            self.graphs.end()

    def _trained(self, one: TrainedAdapter, data: TokenizedDataset, indices: np.ndarray) -> list[Factor]:
        """The factors that an adapter's step trains; those that no token or image of this rank reached have zeros.

        A step without any image leaves a vision part as it is, like an optimizer on one process: no decay either.
        """
        if data.images is not None and not data.has_images(indices.tolist()):
            return [factor for factor in one.factors if factor.parameter.grad is not None]
        if len(self._training) > 1 or data.images is not None:
            fill_missing(one.factors)
        return one.factors

    def _updated(
        self, one: TrainedAdapter, result: StepResult, batches: list[MicroBatch], aux_loss: float | None, started: float
    ) -> StepMetrics:
        """Finish the step of one adapter: optimizer, loss scale, metrics. Collective if its gradient is not finite."""
        step, loss, grad_norm, is_finite = one.done, result.loss, result.grad_norm, result.is_finite
        self.is_to_stop = one.is_to_stop = result.is_to_stop
        one.watch(step + 1, loss, is_spike=result.is_spike)
        rate = one.update(step, is_finite=is_finite)
        scale = None
        if not is_finite and (one.loss_scale is None or not math.isfinite(loss)):  # the scale is not to blame
            self._skip_or_stop(one, batches, loss, grad_norm)
        elif one.loss_scale is not None:
            one.loss_scale.takes_step(grad_norm, step=step)
        if one.loss_scale is not None:
            scale = one.loss_scale.scale
        time_s, memory = time.perf_counter() - started, peak_memory_bytes(self.mesh.device)
        means = {**one.step_facts, **result.means}
        return StepMetrics(
            step + 1, loss, rate, grad_norm, result.tokens, time_s, aux_loss, means, scale, not is_finite, memory
        )

    def _skip_or_stop(self, one: TrainedAdapter, batches: list[MicroBatch], loss: float, grad_norm: float) -> None:
        """Find and report the source of a non-finite step; end the run if configured so. Collective."""
        what = f"the loss is {loss}"
        if math.isfinite(loss):
            what = f"the gradient norm is {grad_norm}"
        if one.name:
            one.leave_out(f"adapter {one.name}, step {one.done + 1}: {what}")
            return
        data, indices = one.step_data

        def examples(dp_rank: int, number: int) -> list[int]:
            found = list[int]()
            for _, places in self.batching.rows([(data, indices)], dp_rank=dp_rank)[number]:
                found += [int(indices[place // data.rows_per_example]) for place in places]
            return found

        cause = find_not_finite(self.model, batches, self._loss_again, examples=examples)
        one.leave_out(f"step {one.done + 1}: {what}: {cause}")

    def _loss_again(self, micro: MicroBatch) -> Tensor:
        """The summed loss of one micro-batch of the only adapter, recomputed."""
        with self.masks(self._training, micro):
            ((loss, _),) = self._losses(micro, self._reference_log_probabilities(micro.batch))
            return loss

    def masks(self, adapters: Sequence[TrainedAdapter], micro: MicroBatch) -> contextlib.AbstractContextManager[None]:
        """Inside the block each adapter runs on its own rows, with the dropout of its own step in training mode."""
        return runtime(self.model).dropout.of(
            [adapters[own.number].share(own.batch) for own in micro.owners], [one.adapter for one in adapters]
        )

    def _log_probabilities(self, number: int, micro: MicroBatch) -> Tensor:
        """A plain forward of a micro-batch, independent of the objective."""
        for part in self.parts:
            part.before(number, micro.batch)
        with self.masks(self._training, micro), lift(self.model.dtype == torch.float64):
            return batch_log_probabilities(self.model, micro.batch)

    def _forward(
        self, number: int, micro: MicroBatch, *, is_only: bool
    ) -> tuple[list[Tensor], list[tuple[Tensor, Sums]]]:
        """(arguments of `_backward`; result of `_losses`, without the load-balancing loss) of one micro-batch."""
        reference = self._reference_log_probabilities(micro.batch)
        with contextlib.ExitStack() as watched:
            for part in self.parts:
                part.before(number, micro.batch)
                watched.enter_context(part.watching())
            found = self._losses(micro, reference)
        losses = [loss for loss, _ in found]
        for part in self.parts:
            if is_only:
                part.count_here(micro.batch)
            with lift(self.model.dtype == torch.float64):
                term = part.term(micro.batch)
                if term is not None:
                    losses[0] = losses[0] + term  # with load balancing there is one adapter
        scaled = [self._training[own.number].scaled(loss) for own, loss in zip(micro.owners, losses, strict=True)]
        return scaled, [(loss.detach(), reported) for loss, reported in found]

    def _backward(self, number: int, losses: list[Tensor]) -> None:
        """Backward of micro-batch `number`."""
        torch.autograd.backward(losses)

    def _losses(self, micro: MicroBatch, reference: Reference) -> list[tuple[Tensor, Sums]]:
        """(summed loss, other sums to report) of each owner of rows. reference: of `_reference_log_probabilities`."""
        owners = [self._training[own.number] for own in micro.owners]
        rows = [(one.adapter, own.batch) for one, own in zip(owners, micro.owners, strict=True)]
        points = [one.point for one in owners]
        with lift(self.model.dtype == torch.float64):
            return loss_sums(owners[0].objective, self.model, micro.batch, rows, reference, points)

    def _reference_log_probabilities(self, batch: Batch) -> Reference:
        """What frozen policies, or a teacher, say of a batch, if the objective needs it."""
        with lift(self.model.dtype == torch.float64), contextlib.ExitStack() as off:
            for part in self.parts:
                off.enter_context(part.off())
            return of_reference(self._training[0].objective, self.model, batch)

    def _micro_batches(self, steps: Sequence[Step]) -> list[MicroBatch]:
        return list(self.batching.micro_batches(steps))

"""Our side of a proof on one rank: the product's own loader, trainer and file writer, observed from outside.

It runs the code of `meshlora train`, including its loop; nothing here computes a number.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from peft import LoraConfig
from torch import Tensor

from meshlora.adapter import attach
from meshlora.adapter.attach import active_factors, adapter_factors, runtime
from meshlora.adapter.formats import peft_format
from meshlora.adapter.targets.pieces import PieceLoraConfig
from meshlora.comm.groups import Mesh
from meshlora.layers import head_loss as vocabulary
from meshlora.loading.blueprint import Blueprint, make_blueprint
from meshlora.loading.load import load_blueprint
from meshlora.model.dp_shard import whole_weights
from meshlora.model.inject import parallel_leaves
from meshlora.run import trainer as trainer_module
from meshlora.run.calibration import begun
from meshlora.run.checkpoint.manifest import Saved
from meshlora.run.checkpoint.resuming import find_checkpoint
from meshlora.run.config.run_file import DataConfig, ModelConfig, RunConfig, TrainConfig
from meshlora.run.distillation.divergence import num_gathers
from meshlora.run.distillation.teachers import load_teacher, teacher_blueprint
from meshlora.run.heads import outputs_of
from meshlora.run.prepared import Prepared
from meshlora.run.recompute import KEEP_ATTENTION, recompute_of
from meshlora.run.trained import TrainedAdapter
from meshlora.run.trainer import Trainer
from meshlora.run.watch.metrics import Reporter, StepMetrics
from meshlora.train.batch import Batch
from meshlora.train.batches import MicroBatch
from meshlora.train.gradsync import Adapters
from meshlora.train.losses import further_inputs, model_inputs
from meshlora.verify.budget import first_forwards_budget, micro_batch_budget, step_budget
from meshlora.verify.faults.generated import reached_lines
from meshlora.verify.faults.registry import applied
from meshlora.verify.options import same_fields
from meshlora.wings.experts.balance import LoadBalancing
from meshlora.wings.experts.same_tokens import COMPARED_FORWARDS
from meshlora.wings.quantized import quantized
from meshlora.wings.quantized.quantized import plain_weights
from meshlora.wings.stages.cut import featured_layers
from meshlora_ground.float64 import lift
from meshlora_ground.objective import Objective
from meshlora_ground.objectives.distillation import Distill
from meshlora_ground.tasks import CAUSAL
from meshlora_ground.topology import TOKENS, Topology
from meshlora_judge.capture import Capture, CollectiveCounter, copy
from meshlora_judge.case import REFERENCE, TEACHER, Case
from meshlora_judge.ownership import fingerprints
from meshlora_judge.replay import after_step, at_step, routed
from meshlora_judge.saved import FRESH, LAST
from meshlora_judge.trace import Trace

logger = logging.getLogger(__name__)


def run_case(case: Case, topology: str, folder: str, mutation: str | None = None) -> None:
    """Run `case` on the calling ranks; writes `rank-N.safetensors`, and the files for the judge, to `folder`."""
    with applied(mutation):
        _run_case(case, Topology.parse(topology), Path(folder))


def lines_of(case: Case, topology: str, folder: str) -> set[tuple[str, int]]:
    """The (file, line) of the product that this rank executes in a run of `case`."""
    return reached_lines(lambda: _run_case(case, Topology.parse(topology), Path(folder)))


def _run_case(case: Case, topology: Topology, folder: Path) -> None:
    config = run_config(case, str(topology), folder)
    blueprint = make_blueprint(case.model, topology, config.model, case.objective).with_folder(Path(case.adapter))
    if case.reference is not None:
        blueprint = blueprint.with_reference(str(Path(case.adapter).parent / REFERENCE))
    model = load_blueprint(blueprint, device=case.device)
    _teach(model, case, blueprint)
    state = runtime(model)
    trace = Trace(initial=_locals(model, "default"), facts=_facts(model), terms=_terms(model))
    trace.scalings = _scalings(model, "default")
    with attach.disable_adapter(model), whole_weights(model), plain_weights(model):
        trace.rows, trace.columns = fingerprints(model)  # of the base alone, unpacked
    trace.fresh = _fresh(model, case, "fresh")
    trace.fresh_both = _fresh(model, case, "fresh_both")
    trace.fresh_scalings = _scalings(model, "fresh")
    # What drifts is for the judge to find.
    peft_format.save_adapter(model, folder / FRESH, adapter="fresh_both", compares=False)
    prepared = functools.partial(Prepared, config, blueprint, case.pad_token_id, case.data, case.data, case.steps)
    if case.eva is not None:
        trace.eva, trace.eva_scalings = _eva(case, topology, prepared())
    stopped = _train(prepared(), model, trace, case)
    if stopped is not None:
        run = prepared(resume=stopped)
        model = load_blueprint(run.start, device=case.device)
        _teach(model, case, blueprint)
        _train(run, model, trace, case)
    trace.final = _locals(model, "default")
    trace.save(folder / f"rank-{state.mesh.rank}.safetensors")


def _teach(model: Any, case: Case, student: Blueprint) -> None:
    """Load the second model of `case`, if its teacher is one."""
    if isinstance(case.objective, Distill) and case.objective.folder is not None:
        folder = str(Path(case.adapter).parent / TEACHER)
        found = teacher_blueprint(folder, student.topology, student.options, student)
        load_teacher(model, found, device=case.device)


def _train(run: Prepared, model: Any, trace: Trace, case: Case) -> Saved | None:
    """Take the steps of `run`, recorded in `trace`; returns its checkpoint if `case` stops it before the end."""
    trainer = Trainer({"default": run}, model, {"default": Recorder(trace, run.config.train)})
    train_step = trainer.train_step

    def watched(adapters: list[TrainedAdapter]) -> list[StepMetrics]:
        step = adapters[0].done
        at_step(routing, step)
        if case.resumes and run.resume is None and step == case.steps - 2:
            trainer.stop.set()  # as a signal does
        with in_parts(is_first=step == 0):
            if step > 0:
                metrics = train_step(adapters)
            else:
                metrics = _first_step(trainer, train_step, trace)
        after_step(routing, step, case)
        return metrics

    clip = trainer_module.clip_gradients_on_device

    def recording_clip(mesh: Mesh, adapters: Adapters, limits: Sequence[float | None]) -> Tensor:
        if not trace.clipped:
            trace.gradients = _gradients(model)
        raised = case.max_grad_norm_at(len(trace.clipped)) / case.max_grad_norm
        norms = clip(mesh, adapters, [limit and limit * raised for limit in limits])
        trace.clipped.append(_gradients(model))
        return norms

    state = runtime(model)
    replay = routed(model, case, cut=lambda tokens: state.mesh.own_tokens(state.context.of_tokens(tokens)))
    recorded = mock.patch.object(trainer_module, "clip_gradients_on_device", recording_clip)
    with replay as routing, recorded, mock.patch.object(trainer, "train_step", watched):
        is_finished = trainer.train()
    if is_finished:
        return None
    return find_checkpoint(trainer.adapters[0].output, "auto", logger.warning)


@contextlib.contextmanager
def in_parts(*, is_first: bool) -> Iterator[None]:
    """Force several parts of packed matrices, blocks of masks and of queries; after the first step, whose collectives
    are counted, head chunks and message rounds too. A twin is small enough for one of each.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(quantized, "elements_at_once", return_value=512))
        stack.enter_context(mock.patch("meshlora_ground.masks._BLOCK", 512))
        stack.enter_context(mock.patch("meshlora.wings.context.attention_parts._SCORE_BYTES", 4096))
        if not is_first:
            stack.enter_context(mock.patch.object(vocabulary, "chunk_tokens", return_value=7))
            stack.enter_context(mock.patch("meshlora.comm.direct.ONE_ROUND_BYTES", 4096))
        yield


def _first_step(trainer: Trainer, train_step: Callable[..., list[StepMetrics]], trace: Trace) -> list[StepMetrics]:
    """Take the first step, recording everything."""
    logits = _logits(trainer)
    recompute = trainer.runs["default"].config.train.recompute
    with _watch(trainer.model, trace, trainer.adapters[0].objective, recompute):
        metrics = train_step(trainer.adapters)
    for micro, whole in zip(trace.micro_batches, logits, strict=True):
        if runtime(trainer.model).pipeline.is_last:
            micro.forward[""] = whole
    return metrics


class Recorder(Reporter):
    """Records the run's metrics in the trace instead of a file."""

    def __init__(self, trace: Trace, options: TrainConfig) -> None:
        super().__init__(Path("unused"), steps=options.steps or 0, log_every=1, is_main=False)
        self.trace = trace

    def step(self, metrics: StepMetrics) -> None:
        self.trace.losses.append(metrics.loss)
        if metrics.aux_loss is not None:
            self.trace.aux_losses.append(metrics.aux_loss)
        self.trace.grad_norms.append(metrics.grad_norm)
        self.trace.num_tokens.append(metrics.tokens)
        self.trace.rates.append(metrics.lr)

    def evaluation(self, step: int, loss: float, tokens: int, **_: Any) -> None:
        self.trace.eval_losses.append(loss)


@torch.no_grad()
def _logits(trainer: Trainer) -> list[Tensor]:
    """Logits of the first step's micro-batches, from a plain call of the model: the loss never forms them."""
    model, (one,) = trainer.model, trainer.adapters
    found = []
    with contextlib.ExitStack() as stack:
        for part in trainer.parts:
            stack.enter_context(part.step(0, *one.step_data))
        for number, micro in enumerate(trainer._micro_batches([one.step_data])):
            for part in trainer.parts:
                part.before(number, dataclasses.replace(micro.batch, own=None))  # a plain call is not cut over cp
            with trainer.masks([one], micro), lift(model.dtype == torch.float64):
                found.append(copy(_outputs(model, micro.batch, one.objective)))
    return found


def _outputs(model: Any, batch: Batch, objective: Objective) -> Tensor:
    if objective.task != CAUSAL:
        return outputs_of(model, batch)
    inputs = model_inputs(batch.input_ids, batch.attention_mask, batch.position_ids, model.config)
    for _ in runtime(model).pipeline.earlier():
        model(**inputs, **further_inputs(model, batch.more))
    found: Tensor = model(**inputs, **further_inputs(model, batch.more)).logits
    return found


@contextlib.contextmanager
def _watch(model: Any, trace: Trace, objective: Objective, recompute: str | int) -> Iterator[None]:
    """Record forwards, backwards and collectives of one optimizer step."""
    counter = CollectiveCounter()

    def apart(owner: type, name: str) -> Any:
        """Keep the collectives and forwards of a method out of the step's record."""
        method = getattr(owner, name)

        def run(*args: Any) -> Any:
            phase, counts, number = counter.phase, counter.counts.copy(), len(capture.micro_batches)
            try:
                return method(*args)
            finally:
                counter.phase, counter.counts = phase, counts
                del capture.micro_batches[number:]

        return mock.patch.object(owner, name, run)

    def set_phase(phase: str) -> Any:
        return lambda *_: setattr(counter, "phase", phase)

    with contextlib.ExitStack() as stack:
        begin = model.register_forward_pre_hook(set_phase("forward"), prepend=True)
        end = model.register_forward_hook(set_phase("loss"))
        stack.callback(begin.remove)
        stack.callback(end.remove)
        context, pipeline = runtime(model).context, runtime(model).pipeline

        def held() -> Tensor | None:
            return None if context.held is None else context.held.own

        capture = stack.enter_context(Capture(model, held, lambda name: not pipeline.runs(name)))
        for patch in _in_phases(counter, capture):
            stack.enter_context(patch)
        for name in ("count", "count_here", "finish"):
            stack.enter_context(apart(LoadBalancing, name))
        stack.enter_context(apart(Trainer, "_reference_log_probabilities"))
        stack.enter_context(apart(TrainedAdapter, "first_pass"))
        stack.enter_context(counter)
        yield
    trace.micro_batches = capture.micro_batches
    trace.collectives = {" ".join(key): number for key, number in counter.counts.items()}
    budget = _budget(model, len(capture.micro_batches), objective, recompute)
    trace.budget = {" ".join(key): number for key, number in budget.items()}


def _in_phases(counter: CollectiveCounter, capture: Capture) -> list[Any]:
    """Patches of the trainer that tell `counter` the phase of a step, and `capture` the micro-batch of a forward."""
    finish, losses = trainer_module.finish_gradients_on_device, Trainer._losses
    forward, backward = Trainer._forward, Trainer._backward

    def counted_finish(*given: Any) -> Tensor:
        counter.phase = "step"
        try:
            return finish(*given)
        finally:
            counter.phase = None

    def counted_losses(*args: Any) -> Any:
        found = losses(*args)
        counter.phase = "backward"
        return found

    def counted_backward(self: Trainer, number: int, losses: list[Tensor]) -> None:
        counter.phase = "backward"
        capture.again(number)
        backward(self, number, losses)

    def numbered_forward(self: Trainer, number: int, micro: MicroBatch, **rest: Any) -> Any:
        capture.number, capture.mask = number, micro.batch.attention_mask
        return forward(self, number, micro, **rest)

    return [
        mock.patch.object(trainer_module, "finish_gradients_on_device", counted_finish),
        mock.patch.object(Trainer, "_losses", counted_losses),
        mock.patch.object(Trainer, "_backward", counted_backward),
        mock.patch.object(Trainer, "_forward", numbered_forward),
    ]


def _budget(model: Any, micro_batches: int, objective: Objective, recompute: str | int) -> Counter[tuple[str, str]]:
    """(phase, kind) -> collectives that the plan allows per step."""
    plan = runtime(model).plan
    factors, rows = active_factors(model), 0
    for factor in factors:  # DoRA on a row-parallel linear: each rank has all magnitudes
        rows += factor.name.endswith(".lora_magnitude_vector") and factor.rule.split_dim is None
    again = {"recomputes": recompute != "none", "keeps_attention": recompute == KEEP_ATTENTION}
    per_micro_batch = micro_batch_budget(plan, scaled_rows=rows, **again)
    budget = Counter({key: n * micro_batches for key, n in per_micro_batch.items()})
    budget += first_forwards_budget(plan, min(micro_batches, COMPARED_FORWARDS))
    if plan.topology.tp > 1 and isinstance(objective, Distill):
        budget += Counter({("loss", "allgather"): micro_batches * num_gathers(objective)})
    # Unlike a summed loss, log-probabilities recompute the logits in the backward, and so do entropies.
    if plan.topology.tp > 1 and not objective.is_summed:
        budget += Counter({("backward", "allgather"): micro_batches})
    if plan.topology.tp > 1 and objective.token_score:
        budget += Counter({("loss", "allgather"): micro_batches, ("backward", "allgather"): micro_batches})
    # And each cp rank needs those of all tokens of its rows.
    if plan.topology.size_over(TOKENS) > 1 and not objective.is_summed:
        number, differentiable = 1 + bool(objective.token_score), 1 + (objective.token_score == "entropy")
        budget += Counter({("loss", "allgather"): micro_batches * number})
        budget += Counter({("backward", "reducescatter"): micro_batches * differentiable})
    # Features for the first layers are cut under sp, so that their gradient is gathered.
    if plan.topology.sp and plan.has_first_stage:
        budget += Counter({("backward", "allgather"): micro_batches * featured_layers(model.config)})
    return budget + step_budget(plan, [factor.rule for factor in factors])


def _locals(model: Any, adapter: str) -> dict[str, Tensor]:
    """Name -> local part of each factor."""
    return {factor.name: copy(factor.parameter) for factor in adapter_factors(model, adapter)}


def _gradients(model: Any) -> dict[str, Tensor]:
    return {f.name: copy(f.parameter.grad) for f in active_factors(model) if f.parameter.grad is not None}


def _scalings(model: Any, adapter: str) -> dict[str, float]:
    """Module -> LoRA scale of the adapter."""
    leaves = parallel_leaves(model)
    return {name: leaf.scaling[adapter] for name, leaf in leaves.items() if adapter in leaf.scaling}


def _fresh(model: Any, case: Case, name: str) -> dict[str, Tensor]:
    """The factors of an adapter newly initialized from the user's configuration; "fresh_both" has a random B too."""
    words = case.lora | {"task_type": runtime(model).plan.task}
    config: LoraConfig = LoraConfig(**words)
    if case.pieces or case.share_experts:
        config = PieceLoraConfig(**words, pieces=case.pieces, share_experts=case.share_experts)
    if name == "fresh_both":
        config.init_lora_weights = False  # as in PEFT: B is random too
    attach.add_adapter(model, name, config, seed=case.seed)
    return _locals(model, name)


def _eva(case: Case, topology: Topology, run: Prepared) -> tuple[dict[str, Tensor], dict[str, float]]:
    """(target -> whole A, target -> scale) of the adapter that begins as the data say, in a model of its own."""
    assert case.eva is not None
    blueprint = make_blueprint(case.model, topology, run.config.model, case.objective)
    blueprint = blueprint.with_adapter(LoraConfig(**case.eva))
    model = load_blueprint(blueprint, device=case.device, seed=case.seed)
    begun(dataclasses.replace(run, blueprint=blueprint), model, "default")
    found = {}
    for name, value in attach.gather_adapter(model, "default").items():
        module, _, part = name.rpartition(".lora_")
        assert part != "B" or not value.any(), name  # which begins at 0
        if part == "A":
            found[module] = value
    return found, _scalings(model, "default")


def _facts(model: Any) -> dict[str, str]:
    """Module -> how it is split, in the words of the judge."""
    plan, facts = runtime(model).plan, dict[str, str]()
    for region in plan.regions:
        facts[region.name] = "split region" if region.is_split else "whole region"
        for mixer in (*plan.attentions, *plan.recurrent, *plan.mixing):
            if f"{mixer}.".startswith(f"{region.name}."):
                facts[region.name] += " that mixes tokens of several ranks"
    for name, linear in plan.linears.items():
        facts[name] = str(linear.split)
    for name, experts in plan.projections.items():
        facts[name] = f"expert {experts.split}"
    return facts


def _terms(model: Any) -> list[str]:
    """Modules inside split regions, and those around and after the last layer; under cp those before the layers too."""
    plan = runtime(model).plan
    modules = [name for name, _ in model.named_modules()]
    split = tuple(f"{region.name}." for region in plan.regions if region.is_split)
    split += tuple(f"{mixer}." for mixer in plan.mixing)  # which may see all tokens, and have the gradient of own ones
    terms = [name for name in modules if name.startswith(split)]
    terms += plan.after
    parents = plan.layers.split(".")
    for depth in range(1, len(parents)):
        terms.append(".".join(parents[:depth]))
    terms.append(f"{plan.layers}.{plan.num_layers - 1}")
    if plan.encoder:  # t5's runs before the layers and after them
        terms.append(".".join((*parents[:-1], "dropout")))
    if runtime(model).context.axis.size > 1:
        terms += [name for name in modules if not name.startswith(f"{plan.layers}.")]
    return terms


def run_config(case: Case, topology: str, folder: Path) -> RunConfig:
    """This case as a run file."""
    # Rows hold two or three sequences.
    longest = max(len(sequence.input_ids) for sequence in case.data)
    data = DataConfig("unused", eval="unused", packing=case.packing, max_length=2 * longest)
    fields = same_fields(TrainConfig, case)
    fields |= {"output": str(folder / Path(LAST).parent), "recompute": recompute_of(case.recompute)}
    options: dict[str, Any] = {"allow_unused_weights": True, "kernels": case.kernels}
    # Whatever dropout the case keeps on is supported.
    model = ModelConfig(**vars(case.base), disable_dropout="unsupported", **options)
    train = TrainConfig(**fields, replica_check_every=0)  # drift is for the judge to find
    return RunConfig(model, data, train, adapter=case.adapter, topology=topology)

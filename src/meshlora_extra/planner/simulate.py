"""A simulated step of the real training code in one process, to check the prediction.

Owns: the run and the comparison. Does not own: the prediction. The only file of the planner that imports the trainer:
model, regions, loss, backward, `finish_gradients`, clipping and AdamW are those of a real run, on fake tensors and
torch's fake backend, which has every group of the topology and sends nothing.
"""

from __future__ import annotations

import copy
import dataclasses
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from meshlora.adapter.attach import active_factors, runtime
from meshlora.comm.groups import open_mesh, simulated_job
from meshlora.loading.blueprint import Blueprint
from meshlora.run.allocator import most_resident_bytes
from meshlora.run.config.run_file import TrainConfig
from meshlora.run.eight_bit import AdamW8bit
from meshlora.run.lora_fa import LoraFA
from meshlora.run.offload import Lane, host_bytes
from meshlora.run.optimizer import make_optimizer, parameter_groups
from meshlora.run.recompute import recompute_layers
from meshlora.train.gradsync import clip_gradients_on_device, finish_gradients_on_device
from meshlora.train.losses import shifted_loss
from meshlora.wings.stages.cut import plan_of_rank
from meshlora.wings.stages.pipeline_schedule import one_forward_one_backward
from meshlora_extra.planner.choose import Prediction
from meshlora_extra.planner.communication import ranks_of
from meshlora_extra.planner.fake import Call, FakeRun
from meshlora_extra.planner.memory import local_shape
from meshlora_extra.planner.pipeline import shown_micro_batches
from meshlora_extra.planner.problem import Problem
from meshlora_extra.planner.trace import assemble
from meshlora_ground.compat import replaced
from meshlora_ground.compat.torch_distributed import meta_parameters_allowed

MOST_ERROR = 0.05


@dataclass(frozen=True)
class RankSeen:
    """A step of one rank, observed and predicted.

    Attributes:
        calls, predicted_calls: collectives of its micro-batches and the end of a step.
        bytes: name -> (predicted, seen). shapes: messages about trained parameters of unpredicted shapes.
    """

    calls: Counter[Call]
    predicted_calls: Counter[Call]
    bytes: dict[str, tuple[int, int]]
    shapes: tuple[str, ...]

    def differences(self) -> Iterator[str]:
        """Disagreements. Shapes, collectives and states must be equal, the peak within 5 %."""
        yield from self.shapes
        for call in sorted({*self.calls, *self.predicted_calls}):
            seen, predicted = self.calls[call], self.predicted_calls[call]
            if seen != predicted:
                words = f"{call.phase} {call.kind} over {call.ranks} ranks of {call.num_bytes:,} bytes"
                yield f"{words}: {predicted} predicted, {seen} seen"
        for name, (predicted, seen) in self.bytes.items():
            limit = 0.0
            if name == "peak":
                limit = MOST_ERROR * seen
            if abs(predicted - seen) > limit:
                yield f"{name}: {predicted:,} bytes predicted, {seen:,} seen"


@dataclass(frozen=True)
class Simulation:
    """A step of one rank of each place along pp.

    Attributes:
        world: number of ranks. ranks: by pp rank. time_s, host_bytes: time of the simulation, and peak memory of the
            process.
    """

    world: int
    ranks: tuple[RankSeen, ...]
    time_s: float
    host_bytes: int

    @property
    def fullest(self) -> RankSeen:
        return max(self.ranks, key=lambda rank: rank.bytes["peak"][1])

    def differences(self) -> Iterator[str]:
        """Of all ranks, each with its pp rank where there are several."""
        for number, rank in enumerate(self.ranks):
            for difference in rank.differences():
                if len(self.ranks) > 1:
                    difference = f"pp rank {number}: {difference}"
                yield difference


def simulate(problem: Problem, prediction: Prediction) -> Simulation:
    """Run a step of `prediction` on one rank of each place along pp, and record both sides."""
    started = time.perf_counter()
    blueprint = problem.blueprint.on(prediction.topology).with_adapter(problem.lora)
    ranks = tuple(_simulate(problem, blueprint, prediction, number) for number in range(len(prediction.ranks)))
    return Simulation(prediction.topology.world, ranks, time.perf_counter() - started, most_resident_bytes())


def _simulate(problem: Problem, blueprint: Blueprint, prediction: Prediction, number: int) -> RankSeen:
    """Of pp rank `number`."""
    topology, rows, tokens = prediction.topology, prediction.micro_batch, prediction.tokens
    run = FakeRun(problem.gpu.device)
    with simulated_job(topology.world, number * topology.per_stage):
        plan = plan_of_rank(blueprint.plan, number)
        model, trained = copy.deepcopy(blueprint.model), blueprint.trained.parameters
        expected = Counter(local_shape(parameter, plan) for name, parameter in trained.items() if plan.holds(name))
        # Real groups, which assemble needs with shards.
        mesh = open_mesh(topology, copies=blueprint.plan.copies, has_experts=bool(blueprint.plan.experts))
        out = replaced(Lane, "out", lambda _, tensor: (run.on_host(tensor, host_bytes(1, tensor.nbytes)), None))
        with run, meta_parameters_allowed(), out:
            assemble(model, dataclasses.replace(blueprint, plan=plan), mesh, run, optimizer=problem.optimizer)
            recompute_layers(model, prediction.recompute)
            run.calls.clear()  # DoRA's magnitudes are computed once, from the whole base
            adapter = sum(f.parameter.nbytes for f in active_factors(model))
            states = run.live_bytes
            shown = shown_micro_batches(topology, prediction.micro_batches)
            largest = _step(run, model, rows, tokens, shown, accumulates=prediction.micro_batches > 1)
            grads = sum(f.parameter.grad.nbytes for f in active_factors(model) if f.parameter.grad is not None)
            before = run.live_bytes
            optimizer = _update(model, problem.optimizer, problem.min_8bit_size)
            moments = run.live_bytes - before
            del optimizer  # its moments, measured
    shapes = Counter(tuple(f.parameter.shape) for f in active_factors(model))
    wrong = []
    for shape in shapes.keys() | expected.keys():
        own, seen = expected[shape], shapes[shape]
        if own != seen:
            wrong.append(f"shape {list(shape)}: {own} predicted, {seen} seen")
    predicted, calls = prediction.ranks[number], Counter[Call]()
    for message in predicted.messages:
        call = Call(message.phase, message.kind, ranks_of(message, topology), message.num_bytes)
        if message.phase == "step":
            calls[call] += message.calls
        else:
            calls[call] += message.calls * shown
    held = predicted.states
    return RankSeen(
        run.calls,
        calls,
        {
            "weights and buffers": (held.weights + held.buffers, states - adapter),
            "adapter": (held.adapter, adapter),
            "gradients": (held.gradients, grads),
            "moments": (held.moments, moments),
            "peak": (predicted.memory_bytes, states + moments + largest),
            "host": (predicted.peak.host, run.most_on_host),
        },
        tuple(wrong),
    )


def _step(run: FakeRun, model: Any, rows: int, tokens: int, number: int, *, accumulates: bool) -> int:
    """Run `number` micro-batches in which every token is trained, up to the clipped gradient; returns the peak.

    accumulates: start with the gradients of an earlier micro-batch.
    """
    mesh, pipeline = runtime(model).mesh, runtime(model).pipeline
    trained = [factor for factor in active_factors(model) if factor.parameter.requires_grad]
    waiting: dict[tuple[int, int], Any] = {}
    ids = torch.zeros(rows, tokens, dtype=torch.int64)

    def enter(phase: str) -> Any:
        return lambda *_: setattr(run, "phase", phase)

    hooks = [  # collectives are counted by phase
        model.register_forward_pre_hook(enter("forward"), prepend=True),
        model.register_forward_hook(enter("loss")),
    ]
    run.begin("step")
    if accumulates:
        for factor in trained:
            factor.parameter.grad = torch.empty_like(factor.parameter)  # of no values: nothing has data here
    order = one_forward_one_backward(number, rank=mesh.pp.rank, size=mesh.pp.size, interleave=mesh.topology.interleave)
    for micro_batch, stage, is_forward in order:
        with pipeline.at(stage):
            if is_forward:
                loss = shifted_loss(model, ids, torch.ones_like(ids), ids)
                waiting[micro_batch, stage] = loss, pipeline.noted()
                del loss
                continue
            run.phase = "backward"
            loss, know_again = waiting.pop((micro_batch, stage))  # in the order of the schedule, not of the forwards
            know_again()
            loss.backward()
            del loss, know_again
    run.phase = "step"
    totals = finish_gradients_on_device(mesh, [trained], [rows * tokens if mesh.cp.rank == 0 else 0])
    norms = clip_gradients_on_device(mesh, [trained], [1.0])
    del totals, norms  # they would count as live
    run.end()
    for hook in hooks:
        hook.remove()
    return run.sections["step"].peak_bytes


def _update(model: Any, kind: str, min_8bit_size: int) -> torch.optim.Optimizer:
    """The optimizer after a step. AdamW is not `fused`, which needs a real device, and that in 8 bits has not stepped;
    their state is the same.
    """
    options = TrainConfig(output="-", steps=1, optimizer=kind, min_8bit_size=min_8bit_size)  # type: ignore[arg-type]
    groups = [{"params": g["params"]} for g in parameter_groups(model, options)]
    optimizer: torch.optim.Optimizer
    if kind == "lora_fa":
        corrections = {b: b.new_empty(b.shape[-1], b.shape[-1]) for group in groups for b in group["params"]}
        optimizer = LoraFA(groups, corrections, lr=1e-4, betas=(0.9, 0.999), eps=1e-8)
    elif kind == "adamw_8bit":
        optimizer = make_optimizer(model, groups, options)
        assert isinstance(optimizer, AdamW8bit)
        for factor in active_factors(model):
            optimizer.state[factor.parameter].update(optimizer.begin(factor))
        return optimizer
    else:
        optimizer = torch.optim.AdamW(groups, lr=1e-4, foreach=True)
    optimizer.step()
    return optimizer

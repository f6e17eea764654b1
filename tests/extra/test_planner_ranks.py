"""What the planner says of messages and states against real ranks that send them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from peft import LoraConfig
from torch.distributed.tensor import DTensor

import meshlora
from meshlora.adapter.attach import active_factors, runtime
from meshlora.comm.groups import simulated_job
from meshlora.loading.blueprint import Blueprint, make_blueprint
from meshlora.loading.load import load_blueprint
from meshlora.model.regions import tensors_in
from meshlora.plan.base_options import BaseOptions
from meshlora.train.gradsync import clip_gradients, finish_gradients
from meshlora.train.losses import shifted_loss
from meshlora.wings.experts import same_tokens
from meshlora_extra.planner.choose import choose
from meshlora_extra.planner.fake import Work, work_of
from meshlora_extra.planner.hardware import hardware_named
from meshlora_extra.planner.problem import Problem
from meshlora_extra.planner.trace import loss_of, trace
from meshlora_ground.compat.torch_operators import TorchDispatchMode
from meshlora_ground.topology import TOKENS as TOKEN_AXES
from meshlora_ground.topology import Topology
from meshlora_judge.capture import CollectiveCounter
from meshlora_judge.twin import twin_config
from tests.for_each import for_each
from tests.pool import Pool

ROWS, TOKENS = 2, 24
Totals = dict[tuple[str, str], tuple[int, int]]


def _step(family: str, topology: str, quantization: str | None) -> tuple[Totals, dict[str, int]]:
    """((phase, kind) -> calls and bytes, states) of a step of real ranks with messages of real bytes."""
    lora = LoraConfig(r=4, target_modules="all-linear")
    with mock.patch.object(same_tokens, "COMPARED_FORWARDS", 0):  # what is planned is a step of thousands
        model = meshlora.load(_config(family), lora=lora, topology=topology, quantization=quantization)
    ids = torch.arange(ROWS * TOKENS).view(ROWS, TOKENS)
    counter = CollectiveCounter()
    hooks = [
        model.register_forward_pre_hook(lambda *_: setattr(counter, "phase", "forward"), prepend=True),
        model.register_forward_hook(lambda *_: setattr(counter, "phase", "loss")),
    ]
    with counter:
        loss = shifted_loss(model, ids, torch.ones_like(ids), ids.roll(-1, 1))
        counter.phase = "backward"
        loss.backward()
        counter.phase = "step"
        finish_gradients(model, num_tokens=ROWS * TOKENS)
        clip_gradients(model, 1.0)
    for hook in hooks:
        hook.remove()
    assert runtime(model).mesh.topology == Topology.parse(topology)
    factors = [factor.parameter for factor in active_factors(model)]
    optimizer = torch.optim.AdamW(factors, fused=True)
    optimizer.step()
    adapter = {id(parameter) for parameter in factors}
    states = {
        "weights": sum(_bytes(p) for p in model.parameters() if id(p) not in adapter),
        "adapter": sum(map(_bytes, factors)),
        "moments": sum(_bytes(t) for state in optimizer.state.values() for t in state.values()),
    }
    totals = {key: (number, counter.sent[key]) for key, number in counter.counts.items()}
    return totals, states


def _config(family: str) -> Any:
    # No 3 ranks share its rows evenly; 128 input features are whole blocks of 64 over tp=2.
    return twin_config(family, **({"hidden_size": 128, "head_dim": 16} if family == "llama" else {}))


def _bytes(tensor: torch.Tensor) -> int:
    if isinstance(tensor, DTensor):
        return tensor.to_local().untyped_storage().nbytes()
    return tensor.numel() * tensor.element_size()


def _planned(family: str, topology: str, quantization: str | None) -> tuple[Totals, dict[str, int]]:
    shape = Topology.parse(topology)
    lora = LoraConfig(r=4, target_modules="all-linear")
    base = BaseOptions(dtype="float32", disable_dropout=True, quantization=quantization)  # type: ignore[arg-type]
    problem = Problem(
        make_blueprint(_config(family), Topology(), base),
        lora,
        gpus=shape.world,
        gpu=hardware_named("h100"),
        seq=TOKENS,
        global_batch=ROWS * shape.dp,
        micro_batch=ROWS,
        recompute="none",
    )
    (prediction,) = choose(problem, [shape]).ranked
    calls: Counter[tuple[str, str]] = Counter()
    sent: Counter[tuple[str, str]] = Counter()
    for message in prediction.messages:
        calls[message.phase, message.kind] += message.calls
        sent[message.phase, message.kind] += message.calls * message.num_bytes
    states = prediction.states
    found: dict[str, Any] = {name: getattr(states, name) for name in ("weights", "adapter", "moments")}
    return {key: (number, sent[key]) for key, number in calls.items()}, found


@pytest.mark.long
@for_each(
    ("family", "topology", "quantization"),
    [
        ("llama", "tp=2", None),
        ("llama", "tp=2,sp", None),
        ("llama", "dp=2", None),
        ("gpt2", "tp=2,sp", None),
        ("olmo2", "tp=2", None),
        ("llama", "dp=2,dp_shard", None),
        ("gpt2", "dp=2,dp_shard", None),
        ("mixtral", "dp=2,dp_shard", None),
        ("llama", "tp=2,sp", "int8"),
        ("llama", "dp=2,dp_shard", "nf4"),
        ("llama", "dp=3,dp_shard", None),
        ("llama", "dp=2,tp=2,dp_shard", "int8"),
        ("llama", "cp=3", None),
        ("llama", "cp=3,ring", None),
        ("llama", "cp=2,tp=2,sp", None),
        ("gpt_oss", "dp=2,cp=2,dp_shard", None),
    ],
)
def test_real_ranks_send_what_is_planned(
    family: str, topology: str, quantization: str | None, pools: Callable[[int], Pool]
) -> None:
    """Numbers of calls, bytes and states, each as predicted, on every rank."""
    planned = _planned(family, topology, quantization)
    world = Topology.parse(topology).world
    for rank, found in enumerate(pools(world).run(_step, family, topology, quantization)):
        assert found == planned, rank


class _Counting(TorchDispatchMode):
    """Counts the operators of the code inside by their cost."""

    def __init__(self) -> None:
        super().__init__()
        self.work: Counter[Work] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = [result] if isinstance(result, torch.Tensor) else list(tensors_in(result))
        work = None if func.namespace.endswith("c10d") else work_of(func, args, kwargs or {}, made)
        self.work[work or Work(0, 0)] += 1
        return result


def _blueprint(topology: str, dtype: Any) -> Blueprint:
    base = make_blueprint(_config("llama"), Topology.parse(topology), BaseOptions(dtype=dtype, disable_dropout=True))
    return base.with_adapter(LoraConfig(r=4, target_modules="all-linear"))


def _run_operators(topology: str, dtype: str) -> Counter[Work]:
    """Of a micro-batch on this rank."""
    blueprint = _blueprint(topology, dtype)
    model = load_blueprint(blueprint, device="cpu").train()
    ids = torch.zeros(ROWS, TOKENS, dtype=torch.int64)
    own = ROWS * TOKENS // blueprint.plan.topology.size_over(TOKEN_AXES)
    with _Counting() as counting:
        loss_of(model, blueprint.plan, runtime(model).mesh, ids, own, at_chunk=lambda: None).backward()
    return counting.work


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("topology", ["dp=1", "cp=2"])
def test_operators_of_a_cpu_are_those_that_its_ranks_run(
    topology: str, dtype: str, pools: Callable[[int], Pool]
) -> None:
    """Norms and attention run others there than on a GPU; each with its flops and bytes, but for token numbers."""
    with simulated_job(2):
        traced = trace(_blueprint(topology, dtype), rows=ROWS, tokens=TOKENS, device="cpu").work
    planned = sum(traced.values(), Counter[Work]())
    run = pools(Topology.parse(topology).world).run(_run_operators, topology, dtype)[0]
    of_tokens = 3 * 8 * ROWS * TOKENS
    assert {work: number for work, number in run.items() if work.num_bytes > of_tokens} == {
        work: number for work, number in planned.items() if work.num_bytes > of_tokens
    }

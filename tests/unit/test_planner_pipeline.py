"""What the planner says of stages, against simulated steps, the order of turns, and by hand."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from peft import LoraConfig
from transformers import AutoConfig

from meshlora.common.errors import UnsupportedError, UserError
from meshlora.loading.blueprint import BaseOptions, make_blueprint
from meshlora.plan.topology import Topology
from meshlora.planner.choose import Prediction, choose
from meshlora.planner.hardware import GPUS
from meshlora.planner.pipeline import time_of_all
from meshlora.planner.problem import Problem
from meshlora.planner.show import why_best
from tests.unit.test_planner import SHAPE, problem_of, simulated


def _of(number: int, **more: Any) -> dict[str, Any]:
    return {"batch": 8, "micro_batch": 1, "config": {"num_hidden_layers": number}, **more}


@pytest.mark.parametrize(
    ("family", "topology", "options"),
    [
        # A first, a middle and a last stage, of unequal length, each with another number of micro-batches in memory.
        pytest.param("llama", "pp=3", _of(5), id="pp"),
        pytest.param("llama", "pp=2,interleave=2", _of(5), id="interleaved"),
        pytest.param("llama", "pp=2,tp=2,sp", _of(3, recompute="full"), id="sp_recomputed"),
        pytest.param("llama", "pp=2,cp=2", _of(2, batch=1), id="cp_one_micro_batch"),
        pytest.param("llama", "pp=2,dp=2,dp_shard", _of(3, micro_batch=2), id="sharded"),
        pytest.param("qwen3_moe", "pp=2,tp=2,sp,ep=2", _of(2), id="experts"),
        pytest.param("gpt2", "pp=2,tp=2", _of(3), id="tied", marks=pytest.mark.proof),
        pytest.param("gemma2", "pp=3,interleave=2", _of(7, recompute=2), id="windows", marks=pytest.mark.proof),
        pytest.param("llama", "pp=4,dp=512,tp=8,sp", _of(6, batch=2048), id="16384", marks=pytest.mark.proof),
    ],
)
def test_simulated_step_is_as_predicted(family: str, topology: str, options: dict[str, Any]) -> None:
    """On each pp rank: shapes, states, numbers and bytes of messages exactly, the peak within 5 %."""
    shape = Topology.parse(topology)
    simulation = simulated(problem_of(family, shape.world, **options), topology)
    assert not list(simulation.differences())
    assert len(simulation.ranks) == shape.pp
    sent = [sum(n for call, n in rank.calls.items() if call.kind == "send") for rank in simulation.ranks]
    micro_batches = min(2 * shape.pp, options["batch"] // shape.dp // options["micro_batch"])
    hops = shape.num_stages - 1  # each is one message forward and one backward
    assert sum(sent) == 2 * hops * micro_batches


def _predicted(problem: Problem, topology: str) -> Prediction:
    (prediction,) = choose(problem, [Topology.parse(topology)]).ranked
    return prediction


@pytest.mark.parametrize("micro_batches", [1, 3, 4, 8, 40])
def test_ranks_wait_as_long_as_the_order_of_turns_makes_them(micro_batches: int) -> None:
    """1F1B: of p equal stages p - 1 forwards and backwards more than one has (Narayanan et al., 2021, section 2.2)."""
    four = Topology(pp=4)
    assert time_of_all(four, [[(1.0, 2.0)]] * 4, 0.0, micro_batches) == pytest.approx(3 * (micro_batches + 3))
    # The slowest stage is never idle once it has begun; the last one's turn fits in while it has a second to do.
    slow = [[(1.0, 2.0)], [(1.0, 2.0)], [(5.0, 7.0)], [(1.0, 2.0)]]
    assert time_of_all(four, slow, 0.0, micro_batches) == pytest.approx(
        12 * micro_batches + 2 + 4 + 3 * (micro_batches == 1)
    )
    # Of one micro-batch every hop, there and back, is waited for.
    assert time_of_all(four, [[(1.0, 2.0)]] * 4, 0.25, 1) == pytest.approx(12 + 6 * 0.25)
    if micro_batches % 4 == 0:
        two = Topology(pp=4, interleave=2)
        assert time_of_all(two, [[(0.5, 1.0)] * 2] * 4, 0.0, micro_batches) == pytest.approx(
            3 * micro_batches + 3 * 3 / 2
        )


def test_early_ranks_hold_more_micro_batches() -> None:
    """Of equal stages the first has as many in memory as there are stages, the last one."""
    problem = problem_of("llama", 3, **_of(6, batch=12, recompute="none"))
    once, often = (_predicted(dataclasses.replace(problem, global_batch=n), "pp=3") for n in (1, 12))
    for number, held in enumerate((3, 2, 1)):
        alone = once.ranks[number].peak.activations
        assert held * 0.9 * alone < often.ranks[number].peak.activations < held * 1.1 * alone


def _seventy_billion(gpus: int, *, nic_gb_s: float = 50, **more: Any) -> Problem:
    config = AutoConfig.for_model(**json.loads(SHAPE.read_text()))
    base = make_blueprint(config, Topology(), BaseOptions(dtype="bfloat16"))
    gpu = dataclasses.replace(GPUS["h100"], network_gb_s=nic_gb_s)
    return Problem(base, LoraConfig(target_modules="all-linear"), gpus=gpus, gpu=gpu, **more)


def test_stages_win_over_slow_links_between_nodes_and_the_reason_is_said() -> None:
    """Two nodes: a stage in each hands on a residual stream; anything else sends weights or sums across."""
    problem = _seventy_billion(16, nic_gb_s=1, seq=4096, global_batch=64)
    topologies = [Topology.parse(text) for text in ("tp=16,sp", "dp=2,tp=8,sp,dp_shard", "pp=2,tp=8,sp")]
    choice = choose(problem, topologies)
    assert str(choice.ranked[0].topology) == "pp=2,tp=8,sp"
    (why,) = why_best(choice)
    assert why.startswith("why pp=2: the best without it, dp=2,tp=8,sp,dp_shard, takes ")
    assert "more gathers of weights" in why


def test_what_is_not_proved_with_stages_is_not_planned() -> None:
    with pytest.raises(UserError, match="each stage needs a layer, and the model has 2"):
        _predicted(problem_of("llama", 4), "pp=4")
    with pytest.raises(UnsupportedError, match="trains nothing in layers 0 to 0"):
        _predicted(problem_of("llama", 2, lora={"target_modules": ["q_proj"], "layers_to_transform": [1]}), "pp=2")
    with pytest.raises(UnsupportedError, match="a sharded base on pp=2,dp=2,interleave=2,dp_shard"):
        _predicted(problem_of("llama", 4, config={"num_hidden_layers": 4}), "pp=2,interleave=2,dp=2,dp_shard")
    with pytest.raises(UnsupportedError, match="its split over pp=2 is not proved"):
        _predicted(problem_of("qwen2_5_vl", 2), "pp=2")

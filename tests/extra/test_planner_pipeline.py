"""What the planner says of stages, against simulated steps, the order of turns, and by hand."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from peft import LoraConfig
from transformers import AutoConfig

from meshlora.comm.groups import simulated_job
from meshlora.loading.blueprint import make_blueprint
from meshlora.plan.base_options import BaseOptions
from meshlora_extra.planner import choose as planner
from meshlora_extra.planner import pipeline
from meshlora_extra.planner.choose import Prediction, _in_stages, choose
from meshlora_extra.planner.communication import grouped, traffic_of
from meshlora_extra.planner.hardware import GPUS
from meshlora_extra.planner.pipeline import time_of_all
from meshlora_extra.planner.problem import Problem
from meshlora_extra.planner.show import why_best
from meshlora_extra.planner.trace import trace
from meshlora_ground.errors import UnsupportedError, UserError
from meshlora_ground.topology import Topology
from tests.extra.test_planner import SHAPE, problem_of, simulated


def _of(number: int, **more: Any) -> dict[str, Any]:
    return {"batch": 8, "micro_batch": 1, "config": {"num_hidden_layers": number}, **more}


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "topology", "options"),
    [
        # A first, a middle and a last stage, of unequal length, each with another number of micro-batches in memory.
        pytest.param("llama", "pp=3", _of(5), id="pp"),
        pytest.param("llama", "pp=2,interleave=2", _of(5), id="interleaved"),
        # Rows and stages enough that rank 0 has many first inputs in memory: its own share of each.
        pytest.param(
            "llama",
            "pp=3,interleave=2,tp=2,sp",
            _of(6, batch=24, micro_batch=2, recompute="full"),
            id="sp_recomputed",
            marks=pytest.mark.proof,
        ),
        pytest.param("llama", "pp=2,cp=2", _of(2, batch=1), id="cp_one_micro_batch"),
        pytest.param("llama", "pp=2,dp=2,dp_shard", _of(3, micro_batch=2), id="sharded"),
        pytest.param("qwen3_moe", "pp=2,tp=2,sp,ep=2", _of(2), id="experts"),
        pytest.param("llama", "pp=2,tp=2", _of(6, recompute=2), id="every_second_of_all_layers"),
        pytest.param("llama", "pp=2", _of(6, batch=6, micro_batch=1, recompute="offload"), id="offloaded"),
        pytest.param("deepseek_v4", "pp=2,tp=2,sp", _of(4, batch=4, recompute="offload"), id="streams"),
        # On both ranks; its head costs as much as layers do.
        pytest.param("gpt2", "pp=2,tp=2", _of(4, config={"n_layer": 4, "vocab_size": 4096}), id="tied"),
        pytest.param("llama", "pp=4,cp=4", _of(5, recompute="full"), id="cp_recomputed", marks=pytest.mark.proof),
        pytest.param(
            *("llama", "pp=2", _of(4, lora={"target_modules": ["embed_tokens", "q_proj", "v_proj"]})),
            id="embedding_trained",
            marks=pytest.mark.proof,
        ),
        pytest.param("gemma2", "pp=3", _of(7, recompute=2), id="windows", marks=pytest.mark.proof),
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


def test_many_micro_batches_of_unequal_stages_are_added_up() -> None:
    two, turns = Topology(pp=3, interleave=2), [[(1.0, 2.0), (1.3, 2.6)], [(1.1, 2.2)] * 2, [(0.9, 1.8), (1.2, 2.4)]]
    assert time_of_all(two, turns, 0.1, 192) == pytest.approx(pipeline._run(two, turns, 0.1, 192), rel=0.01)


@pytest.mark.parametrize("vocab_size", [128, 1_000_000])
def test_parts_of_a_step_are_those_of_the_busiest_rank_and_what_it_waits(vocab_size: int) -> None:
    """Two nodes; of three layers the first rank has two, as the second one has the head, which may cost more."""
    config = {"num_hidden_layers": 3, "vocab_size": vocab_size}
    problem = dataclasses.replace(
        problem_of("llama", 2, batch=6, micro_batch=1, recompute="full", config=config),
        # So small a model has launches that take longer than its kernels.
        gpu=dataclasses.replace(GPUS["h100"], gpus_per_node=1, kernel_s=0.0, wait_s=0.5),
    )
    found = _predicted(problem, "pp=2")
    small = problem.small.on(Topology(pp=2), has_stages=False).with_adapter(problem.lora)
    with simulated_job(2):
        one, two = (trace(small, rows=n, tokens=64) for n in (1, 2))
    gpu = problem.gpu

    def seconds(part: str) -> float:
        return gpu.work_s(one.work[part], is_half=False)

    # Kinds: the first layer, and the others. All are computed again.
    again = seconds("layer 0") + seconds("layer 1")
    first = seconds("before") + again, seconds("layer 1 back") + seconds("layer 0 back") + again
    chunk_s = gpu.work_s(two.work["chunk"], is_half=False) / two.memory.chunk_tokens * 64
    last = (
        seconds("before") + seconds("layer 1") + seconds("after") + chunk_s,
        seconds("back") + seconds("layer 1 back") + seconds("layer 1"),
    )
    stream = 64 * problem.model.config.hidden_size * 4
    hop = gpu.message_s(stream, ranks=2, is_network=True)
    assert hop > gpu.message_s(stream, ranks=2, is_network=False)
    assert (sum(first) > sum(last)) == (vocab_size == 128)
    parts = dict(found.parts_s)
    assert parts.pop("waiting for the host") == 0.5
    ends = parts.pop("update") + parts.pop("messages inside nodes") + parts.pop("messages between nodes")
    assert ends == pytest.approx(found.parts_s["update"] + found.traffic["network"].time_s)
    assert parts["recomputation"] == pytest.approx(6 * (again if vocab_size == 128 else seconds("layer 1")))
    assert sum(parts.values()) == pytest.approx(time_of_all(Topology(pp=2), [[first], [last]], hop, 6))
    assert found.traffic["network"].wire_bytes == pytest.approx(6 * stream, rel=1e-3)  # and a norm


def test_messages_are_in_turns_of_their_direction_and_once_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over slower links turns take longer by the messages of their direction, a rank's two stages together."""
    topology, seen = Topology.parse("pp=2,interleave=2,tp=2"), []

    def watched(given: Topology, turns: Any, hop_s: float, number: int) -> float:
        seen.append(turns)
        return time_of_all(given, turns, hop_s, number)

    monkeypatch.setattr(planner, "time_of_all", watched)
    links = [dataclasses.replace(GPUS["h100"], node_gb_s=gb_s) for gb_s in (1, 100)]
    ranks = [
        _predicted(
            dataclasses.replace(problem_of("llama", 4, **_of(5, recompute="none")), gpu=gpu), str(topology)
        ).ranks
        for gpu in links
    ]
    slow, fast = seen
    for number, rank in enumerate(ranks[0]):
        ways = []
        for way, phases in enumerate((("forward", "loss"), ("backward",))):
            sent = [message for message in rank.messages if message.phase in phases]
            more = [traffic_of(sent, topology, gpu, micro_batches=1)["node"].time_s for gpu in links]
            turns = [sum(stage[way] for stage in each[number]) for each in (slow, fast)]
            assert turns[0] - turns[1] == pytest.approx(more[0] - more[1])
            ways.append(more[0] - more[1])
        assert ways[0] != pytest.approx(ways[1])


def test_layers_that_share_a_weight_are_not_in_two_stages() -> None:
    problem = problem_of("llama", 2, **_of(4))
    layers = problem.model.get_submodule("model.layers")
    layers[3].mlp.up_proj.weight = layers[0].mlp.up_proj.weight
    with pytest.raises(UnsupportedError, match=r"layers\.3\.mlp\.up_proj\.weight: it is one weight with"):
        _predicted(problem, "pp=2")


def test_steps_of_interleaved_stages_are_filled_up() -> None:
    problem = problem_of("llama", 2, **_of(4, batch=3))
    assert _predicted(problem, "pp=2").micro_batches == 3
    assert _predicted(problem, "pp=2,interleave=2").micro_batches == 4


def test_stages_are_looked_at_in_place_of_a_part_of_an_axis() -> None:
    problem = problem_of("llama", 8, **_of(4))
    names = [str(found.topology) for found in choose(problem).ranked if found.topology.pp > 1]
    assert {"pp=4,tp=2,sp", "pp=2,dp=2,tp=2", "pp=2,dp=4,dp_shard", "pp=2,dp=4,interleave=2"} <= {*names}
    assert len(names) == len({*names})
    experts = [*_in_stages(Topology.parse("dp=2,tp=4,sp,ep=8"), problem_of("qwen3_moe", 8, **_of(4)))]
    assert Topology.parse("pp=2,tp=4,sp,ep=4") in experts
    assert Topology.parse("pp=4,dp=2,ep=2") in experts
    whole = {*_in_stages(Topology.parse("dp=8,dp_shard"), problem)}
    assert {Topology.parse(text) for text in ("pp=2,dp=4", "pp=2,dp=4,interleave=2")} <= whole


def test_what_stages_hand_on_is_counted_by_itself() -> None:
    found = _predicted(problem_of("llama", 2, **_of(4)), "pp=2")
    # A message and a gradient of each of eight micro-batches; the token count is of one rank, the norm of two.
    assert grouped(found.messages, micro_batches=8) == {
        "layers": 0,
        "ends": 0,
        "buckets": 0,
        "scalars": 1,
        "stages": 16,
    }


def test_early_ranks_hold_more_micro_batches() -> None:
    """Of equal stages the first has as many in memory as there are stages, the last one."""
    problem = problem_of("llama", 3, **_of(6, batch=12, recompute="none"))
    once, often = (_predicted(dataclasses.replace(problem, global_batch=n), "pp=3") for n in (1, 12))
    assert often.fullest is often.ranks[0]
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
    with pytest.raises(UnsupportedError, match="trains nothing in layers 2, 3"):
        _predicted(problem_of("llama", 2, **_of(4, lora={"target_modules": ["embed_tokens"]})), "pp=2")
    trained = {"target_modules": "all-linear", "modules_to_save": ["embed_tokens"]}
    with pytest.raises(UnsupportedError, match=r"training model\.embed_tokens\.weight, tied, on pp=2"):
        _predicted(problem_of("llama", 2, lora=trained, config={"tie_word_embeddings": True}), "pp=2")
    with pytest.raises(UnsupportedError, match="layers_to_transform: a layer of each kind stands for all of them"):
        problem_of("llama", 2, lora={"target_modules": ["q_proj"], "layers_to_transform": [1]})
    with pytest.raises(UnsupportedError, match="a sharded base on pp=2,dp=2,interleave=2,dp_shard"):
        _predicted(problem_of("llama", 4, config={"num_hidden_layers": 4}), "pp=2,interleave=2,dp=2,dp_shard")
    with pytest.raises(UnsupportedError, match="its last norm runs before the layers too"):
        _predicted(problem_of("nanochat", 2), "pp=2")

"""What the planner says of context parallelism, against simulated steps and by hand."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import AutoConfig

from meshlora.comm.groups import simulated_job
from meshlora.loading.blueprint import make_blueprint
from meshlora.plan.base_options import BaseOptions
from meshlora_extra.planner.choose import Prediction, all_topologies, choose
from meshlora_extra.planner.hardware import GPUS
from meshlora_extra.planner.problem import Problem
from meshlora_extra.planner.show import why_best
from meshlora_extra.planner.simulate import simulate
from meshlora_extra.planner.trace import trace
from meshlora_ground.topology import TOKENS, Topology
from tests.extra.test_planner import SHAPE, problem_of, simulated


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "topology", "options"),
    [
        # Of the first layer's input nobody wants a gradient, but of its keys.
        pytest.param("llama", "cp=3", {"seq": 66, "batch": 2, "micro_batch": 2}, id="cp"),
        pytest.param("llama", "cp=3,tp=2,sp", {"seq": 66, "batch": 1}, id="sp"),
        pytest.param("llama", "cp=2", {"lora": {"target_modules": ["q_proj"]}}, id="no_gradient_of_the_first_keys"),
        pytest.param("llama", "cp=2,tp=8", {"dtype": torch.bfloat16}, id="heads_on_two_ranks"),
        pytest.param("llama", "dp=2,cp=2,dp_shard", {"recompute": "full"}, id="sharded_recomputed"),
        pytest.param("gpt_oss", "cp=2,ep=2", {}, id="windows_experts"),
        pytest.param("llama", "cp=3,ring", {"seq": 66, "batch": 2, "micro_batch": 2}, id="ring"),
        pytest.param(
            "llama", "cp=2,ring", {"lora": {"target_modules": ["q_proj"]}}, id="ring_of_keys_without_gradient"
        ),
        # Three tokens of a rank in one place take a mask.
        pytest.param("llama", "cp=8", {"seq": 48, "batch": 1, "dtype": torch.bfloat16}, id="few_tokens"),
        pytest.param("deepseek_v3", "cp=2,tp=2,sp", {}, id="values_narrower_than_keys", marks=pytest.mark.proof),
        pytest.param("qwen3_moe", "tp=2,cp=2,ep=2,etp=2,two-stage", {}, id="two_stage", marks=pytest.mark.proof),
        pytest.param("llama", "dp=512,cp=4,tp=8,sp", {}, id="16384", marks=pytest.mark.proof),
    ],
)
def test_simulated_step_is_as_predicted(family: str, topology: str, options: dict[str, Any]) -> None:
    """Shapes, states, numbers and bytes of collectives exactly, the peak within 5 %."""
    shape = Topology.parse(topology)
    simulation = simulated(problem_of(family, shape.world, **options), topology)
    assert not list(simulation.differences())
    kind = "alltoall" if shape.ring else "allgather"
    assert any(call.kind == kind and call.ranks == shape.size_over(TOKENS) for call in simulation.fullest.calls)


def _predicted(problem: Problem, topology: str) -> Prediction:
    (prediction,) = choose(problem, [Topology.parse(topology)]).ranked
    return prediction


@pytest.mark.parametrize("targets", [["q_proj"], ["v_proj"]])
def test_keys_and_values_are_gathered_once_a_layer_and_their_gradients_scattered(targets: list[str]) -> None:
    """Of two layers' keys and values, 2 heads of 16 features each; the first layer's have a gradient if trained."""
    problem = problem_of("llama", 2, seq=64, batch=2, micro_batch=2, lora={"target_modules": targets}, recompute="none")
    config = problem.model.config
    token_bytes = 2 * config.num_key_value_heads * config.head_dim * 4
    assert config.num_hidden_layers == 2
    found = Counter[tuple[str, str, int]]()
    for message in _predicted(problem, "cp=2").messages:
        if message.axes == TOKENS:
            found[message.phase, message.kind, message.num_bytes] += message.calls
    assert found == {
        ("forward", "allgather", 64 * token_bytes): 2,
        ("backward", "reducescatter", 2 * 64 * token_bytes): 2 if targets == ["v_proj"] else 1,
    }


def test_a_rank_has_its_share_of_the_activations_and_of_causal_attention() -> None:
    """Twice as long sequences on two ranks: as many activations but for what is of whole rows, and twice the work of
    attention.
    """
    one, two = (problem_of("llama", n, seq=64 * n, batch=1, recompute="none") for n in (1, 2))
    whole, cut = _predicted(one, "dp=1"), _predicted(two, "cp=2")
    config = one.model.config
    keys, residual = 2 * config.num_key_value_heads * config.head_dim, config.hidden_size
    assert (whole.states.kept, whole.states.gradients) == (cut.states.kept, cut.states.gradients)
    assert whole.chunk_bytes == cut.chunk_bytes
    # The 64 tokens of the other rank in the embedding, and their keys and values in two layers, in float32.
    assert cut.peak.activations > whole.peak.activations + 64 * 4 * (residual + 2 * keys)
    flops = []
    for problem, topology in ((one, "dp=1"), (two, "cp=2")):
        small = problem.small.on(Topology.parse(topology)).with_adapter(problem.lora)
        with simulated_job(2):
            work = trace(small, rows=1, tokens=problem.seq).work["layer 1"]
        flops.append(sum(each.flops * number for each, number in work.items()))
    causal = 2 * config.num_attention_heads * config.head_dim * 64**2
    # Blocks of 8 queries take the keys that the last of them sees: at most 8 of 64 in the mean are too many.
    assert 2 * causal <= flops[1] - (flops[0] - causal) <= 2 * causal * 72 / 64


def test_sequences_are_padded_to_what_both_axes_cut() -> None:
    problem = problem_of("llama", 6, seq=61, batch=1)
    assert _predicted(problem, "cp=3,tp=2,sp").tokens == 66
    assert _predicted(problem, "cp=3,tp=2").tokens == 63


@pytest.mark.long
def test_long_sequences_are_cut_and_the_reason_is_said() -> None:
    """Of a 70B model keys and values are a quarter of the residual stream, which tp sends four times as often."""
    config = AutoConfig.for_model(**json.loads(SHAPE.read_text()))
    base, lora = (
        make_blueprint(config, Topology(), BaseOptions(dtype="bfloat16")),
        LoraConfig(target_modules="all-linear"),
    )
    problem = Problem(base, lora, gpus=8, gpu=GPUS["h200"], seq=131_072, global_batch=1)
    topologies = [Topology.parse(text) for text in ("cp=8,dp_shard", "tp=8,sp")]
    choice = choose(problem, topologies)
    assert [str(found.topology) for found in choice.ranked] == ["cp=8,dp_shard", "tp=8,sp"]
    (why,) = why_best(choice)
    assert why.startswith("why cp=8: the best without it, tp=8,sp, takes ")
    assert "more messages inside nodes" in why
    (why,) = why_best(choose(problem, [topologies[0], Topology.parse("tp=8")]))
    assert why.startswith("why cp=8: without it nothing fits; tp=8: does not fit by ")
    assert not why_best(choose(problem, topologies[:1]))


def test_every_way_to_cut_tokens_is_planned_with_the_base_whole_and_sharded() -> None:
    found = [str(topology) for topology in all_topologies(problem_of("llama", 4))]
    assert len(found) == len(set(found))
    assert {"cp=4", "cp=4,dp_shard", "dp=2,cp=2", "cp=2,tp=2", "cp=2,tp=2,sp,dp_shard"} <= set(found)
    assert sum(Topology.parse(text).size_over(TOKENS) > 1 for text in found) == 8


def test_recurrent_mixers_are_left_out_with_the_reason() -> None:
    problem = problem_of("bamba", 2, batch=2)
    choice = choose(problem, [Topology.parse(text) for text in ("dp=2", "cp=2")])
    assert [str(found.topology) for found in choice.ranked] == ["dp=2"]
    assert [(name, "one cp rank after the other" in why) for name, why in choice.left_out] == [("cp=2", True)]


@pytest.mark.long
def test_a_ring_is_looked_at_where_gathered_keys_and_values_do_not_fit() -> None:
    problem = problem_of("llama", 2, seq=128, batch=1)
    assert not [found for found in choose(problem).ranked if found.topology.ring]
    (whole,) = choose(problem, [Topology.parse("cp=2,ring")]).ranked
    room = 0.5 * (whole.states.kept + whole.memory_bytes) / problem.gpu.usable_memory
    small = dataclasses.replace(problem.gpu, memory_gb=room / 1e9)
    found = {str(found.topology): found for found in choose(dataclasses.replace(problem, gpu=small)).ranked}
    assert {"cp=2,ring", "cp=2,dp_shard,ring"} < found.keys()
    assert found["cp=2,ring"].memory_bytes < found["cp=2"].memory_bytes
    less = dataclasses.replace(problem.gpu, memory_gb=1e-6)  # no room for the base
    assert not [p for p in choose(dataclasses.replace(problem, gpu=less)).ranked if p.topology.ring]


@pytest.mark.long
def test_with_experts_cp_is_looked_at_on_the_fastest_of_their_meshes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their product with all shapes of the dense mesh would be thousands on 64 GPUs."""
    monkeypatch.setattr("meshlora_extra.planner.choose._MESHES", 1)
    ranked = [found.topology for found in choose(problem_of("qwen3_moe", 2, micro_batch=1, recompute="none")).ranked]
    meshes: dict[bool, dict[tuple[int, int], None]] = {False: {}, True: {}}
    for topology in ranked:
        meshes[topology.size_over(TOKENS) > 1][topology.ep, topology.etp] = None
    assert len(meshes[False]) == 3
    assert list(meshes[True]) == list(meshes[False])[:1]


@pytest.mark.long
def test_axis_is_longer_as_long_as_that_gains_and_no_micro_batch_is_traced_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of what fits on one GPU, halves of sequences are looked at, and not their sixteenths."""
    traced: list[str] = []

    def counted(small: Any, **options: Any) -> Any:
        traced.append(str(small.plan.topology))
        return trace(small, **options)

    monkeypatch.setattr("meshlora_extra.planner.choose.trace", counted)
    problem = problem_of("llama", 16, batch=16, seq=64, micro_batch=1, recompute="none")
    found = [one.topology for one in choose(problem).ranked]
    assert {topology.cp for topology in found} == {1, 2}
    assert len(traced) == 2 * len({(t.is_whole, t.cp, t.tp, t.sp) for t in found})


@pytest.mark.proof
@pytest.mark.parametrize(("seq", "most"), [(8192, 60), (131_072, 70)])  # of long sequences more cuts are worth a look
def test_plan_of_a_70b_model_on_16384_gpus_is_simulated(seq: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `plan --simulate` does, with cp among the candidates. Its time is that of traces, three a second."""
    config = AutoConfig.for_model(**json.loads(SHAPE.read_text()))
    base = make_blueprint(config, Topology(), BaseOptions(dtype="bfloat16"))
    lora = LoraConfig(r=16, target_modules="all-linear")
    problem = Problem(base, lora, gpus=16384, gpu=GPUS["h200"], seq=seq, global_batch=16384)
    traced: list[int] = []

    def counted(small: Any, **options: Any) -> Any:
        traced.append(options["rows"])
        return trace(small, **options)

    monkeypatch.setattr("meshlora_extra.planner.choose.trace", counted)
    choice = choose(problem)
    assert len(traced) <= most
    assert any(one.topology.cp > 1 for one in choice.ranked)
    assert not list(simulate(problem, choice.ranked[0]).differences())

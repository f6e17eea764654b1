"""Stages of a pipeline: how layers are cut, who has what, and the order of micro-batches."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig

import meshlora
from meshlora.adapter.plan import plan_adapter
from meshlora.plan.rules import ModelPlan
from meshlora.plan.table import general_rules
from meshlora.wings.stages.cut import cut_layers, plan_of_rank
from meshlora.wings.stages.hold import HeldStages, _returned, hold_stages
from meshlora.wings.stages.pipeline_schedule import one_forward_one_backward
from meshlora_extra.planner.pipeline import time_of_all
from meshlora_ground.errors import UnsupportedError, UserError
from meshlora_ground.topology import LAYERS, Topology
from meshlora_judge.twin import twin_config
from tests.blueprints import build_meta
from tests.for_each import for_each


def _plan(topology: str, **sizes: int) -> ModelPlan:
    _, plan = build_meta(twin_config("llama", tp=2, **sizes), Topology.parse(topology), dtype=torch.float32)
    return plan


class _Named:
    def forward(self, x: Any) -> Any:
        layer_output = x[1:]
        layer_output += 1
        return layer_output


class _InOutputs:
    def forward(self, x: Any, keep: bool = False) -> Any:
        outputs = x[1:]
        if keep:
            outputs = (x,) + outputs  # noqa: RUF005
        return outputs


class _Added:
    def forward(self, x: Any) -> Any:
        outputs = x[1:]
        return (x, x) + outputs  # noqa: RUF005


@pytest.mark.parametrize(("kind", "length"), [(_Named, 0), (_InOutputs, 1), (_Added, 2)])
def test_a_stage_passes_on_what_layers_of_its_family_return(kind: type, length: int) -> None:
    assert _returned(kind) == length


@for_each("number", [1, 2, 3, 4])
@for_each(
    ("costs", "after"), [([1.0] * 7, 0.0), ([1.0] * 7, 2.5), ([4.0, 1, 1, 1, 1, 4], 1.0), ([1.0, 9, 1, 1, 1], 0.0)]
)
def test_the_most_expensive_stage_is_as_cheap_as_it_can_be(costs: list[float], after: float, number: int) -> None:
    def largest(cuts: Sequence[tuple[int, int]]) -> float:
        sums = [sum(costs[start:stop]) for start, stop in cuts]
        return max([*sums[:-1], sums[-1] + after])

    found = cut_layers(tuple(costs), number, after=after)
    edges = [0, *(stop for _, stop in found)]
    assert list(itertools.pairwise(edges)) == list(found)
    assert edges[-1] == len(costs)
    inside = itertools.combinations(range(1, len(costs)), number - 1)
    every = [list(itertools.pairwise([0, *cut, len(costs)])) for cut in inside]
    assert largest(found) == min(map(largest, every))


def test_layers_that_share_keys_are_of_the_last_stage() -> None:
    assert cut_layers((1.0,) * 6, 2, last=1) == ((0, 1), (1, 6))
    assert cut_layers((1.0,) * 6, 3, last=4) == cut_layers((1.0,) * 6, 3)
    _, plan = build_meta(twin_config("gemma4_text", num_hidden_layers=5), Topology.parse("pp=2"), dtype=torch.float32)
    assert plan.stages == ((0, 1), (1, 5))  # layers 1 and 2 have the keys of 3 and 4
    with pytest.raises(UserError, match="layers 0 to 3 have keys and values in common, and so are of the last stage"):
        build_meta(twin_config("gemma4_text"), Topology.parse("pp=2"), dtype=torch.float32)


@for_each(
    ("number", "size", "interleave"),
    [
        *((number, size, 1) for number in (1, 2, 3, 4, 7) for size in (1, 2, 3, 4)),
        *((rounds * size, size, interleave) for rounds in (1, 2, 3) for size in (2, 3, 4) for interleave in (2, 3)),
    ],
)
def test_stages_wait_no_longer_than_the_schedule_says(number: int, size: int, interleave: int) -> None:
    orders = [
        list(one_forward_one_backward(number, rank=rank, size=size, interleave=interleave)) for rank in range(size)
    ]
    topology = Topology(pp=size, interleave=interleave if size > 1 else 1)
    units = time_of_all(topology, [[(1.0, 1.0)] * interleave] * size, 0.0, number)
    assert units == 2 * (number * interleave + size - 1)  # in units of a stage: the bubble is 1/interleave as long
    for rank, order in enumerate(orders):
        turns = [(micro, stage, way) for way in (True, False) for micro in range(number) for stage in range(interleave)]
        assert sorted(order) == sorted((micro, place * size + rank, way) for micro, place, way in turns)
        held = itertools.accumulate(1 if is_forward else -1 for *_, is_forward in order)
        assert interleave > 1 or max(held) == min(number, size - rank)


def test_each_module_is_of_one_stage_and_no_sum_goes_over_stages() -> None:
    plan = _plan("pp=2,tp=2,sp")
    first, last = (plan_of_rank(plan, rank) for rank in range(2))
    assert {*first.linears} | {*last.linears} == {*plan.linears}
    assert not {*first.linears} & {*last.linears}
    assert (first.embedding, first.head) == (plan.embedding, "")
    assert (last.embedding, last.head) == ("", plan.head)
    assert first.regions + last.regions == plan.regions
    assert [plan.stage_of(name) for name in ("", "model", "model.embed_tokens", "model.norm", "lm_head.weight")] == [
        1, 1, 0, 1, 1
    ]  # fmt: skip
    for _, _, rule in general_rules(sp=True):
        assert not LAYERS & (rule.grad_axes | rule.mean_axes | rule.replicas)


def test_stages_are_blocks_of_neighbouring_ranks() -> None:
    topology = Topology.parse("pp=2,dp=2,tp=2,ep=2")
    assert str(topology) == "pp=2,dp=2,tp=2,ep=2"
    assert [topology.stage_of(rank) for rank in range(8)] == [0] * 4 + [1] * 4
    assert topology.groups_over(frozenset({"ep"})) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert topology.edp == 2
    assert not Topology(pp=2).is_whole
    assert str(Topology.parse("interleave=2,pp=2,dp=2,sp,tp=2")) == "pp=2,dp=2,tp=2,interleave=2,sp"


@for_each("first", [0, 1, 2, 3])
def test_the_first_stage_has_the_layers_that_a_tower_adds_features_to(first: int) -> None:
    found = cut_layers((1.0,) * 6, 4, first=first)
    assert found == (((0, first), *found[1:]) if first > 2 else cut_layers((1.0,) * 6, 4))
    assert found[0][1] >= first
    config = twin_config("qwen3_vl", tp=2)
    config.vision_config.deepstack_visual_indexes = [0, 1]
    with pytest.raises(
        UserError, match=r"the first 2, whose tower adds features to them, are of one stage; use at most 1"
    ):
        build_meta(config, Topology(pp=2), dtype=torch.float32)


def _held(family: str, rank: int) -> tuple[Any, HeldStages]:
    """(the meta model with what pp rank `rank` of two has, its way through its stage)."""
    model, plan = build_meta(twin_config(family, tp=2), Topology(pp=2), dtype=torch.float32)
    mesh: Any = SimpleNamespace(channels=SimpleNamespace(in_order=()), device=torch.device("cpu"))
    pipeline = hold_stages(model, plan_of_rank(plan, rank), mesh)
    assert pipeline is not None
    return model, pipeline


@for_each("family", ["gemma3", "llava_next", "qwen3_vl"])
def test_the_towers_of_a_composite_are_of_the_first_stage_alone(family: str) -> None:
    whole = {name for name, _ in _held(family, 0)[0].named_parameters()}
    later = {name for name, _ in _held(family, 1)[0].named_parameters()}
    assert any("vi" in name and "language_model" not in name for name in whole)
    assert {name.partition(".layers.")[0] for name in later} <= {
        "model.language_model", "model.language_model.norm.weight", "lm_head.weight"
    }  # fmt: skip


def test_a_later_stage_is_given_grids_and_types_and_no_pixels() -> None:
    ids, grid, mask = torch.zeros(2, 5, dtype=torch.long), torch.ones(1, 3, dtype=torch.long), torch.zeros(2, 1, 5, 5)
    given = {"input_ids": ids, "pixel_values": torch.zeros(4, 9), "image_grid_thw": grid, "attention_mask": mask}
    first, later = _held("qwen3_vl", 0)[1], _held("qwen3_vl", 1)[1]
    assert first.begin(torch.nn.Module(), (), given)[1] is given
    assert later.begin(torch.nn.Module(), (), given)[1].keys() == given.keys() - {"pixel_values"}


@for_each("family", ["falcon_h1", "llama4_text", "mamba2"])
def test_code_of_a_model_reads_weights_that_other_stages_have(family: str) -> None:
    model, _ = _held(family, 1)
    embedding = model.get_input_embeddings()
    assert (embedding.weight.device.type, embedding.weight.numel()) == ("cpu", 0)
    assert not dict(embedding.named_parameters())
    head = _held(family, 0)[0].get_output_embeddings()
    assert head.weight.dtype == torch.float32
    assert not dict(head.named_parameters())


def test_what_is_not_proved_with_stages_is_refused() -> None:
    with pytest.raises(UserError, match=r"interleave with pp=1"):
        Topology(interleave=2)
    with pytest.raises(UserError, match=r"each stage needs a layer.*at most 2 stages"):
        _plan("pp=3")
    with pytest.raises(
        UnsupportedError,
        match=r"meshlora.load on pp=2,interleave=2: .* by the model itself alone; leave out interleave",
    ):
        meshlora.load(twin_config("llama", tp=2), topology=Topology(pp=2, interleave=2))
    with pytest.raises(UnsupportedError, match=r"a sharded base on pp=2,dp=2,interleave=2,dp_shard"):
        _plan("pp=2,dp=2,dp_shard,interleave=2", num_hidden_layers=4)
    model, plan = build_meta(twin_config("llama", tp=2), Topology(pp=2), dtype=torch.float32)
    lora = LoraConfig(target_modules=["q_proj"], layers_to_transform=[0])
    with pytest.raises(UnsupportedError, match=r"trains nothing in layers 1: each stage.*fewer stages"):
        plan_adapter(model, plan, lora)
    model, plan = build_meta(twin_config("gemma2", tp=2), Topology(pp=2), dtype=torch.float32)
    lora = LoraConfig(target_modules=["q_proj"], modules_to_save=["embed_tokens"])
    with pytest.raises(UnsupportedError, match=r"training model.embed_tokens.weight, tied, on pp=2"):
        plan_adapter(model, plan, lora)

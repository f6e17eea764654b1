"""Mixers with heads of their own: which part of them a rank holds, and what is said where their heads do not divide."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import nn
from transformers import AutoModelForCausalLM

from meshlora.adapter.targets.resolve import resolve_targets
from meshlora.plan.derive import plan_model
from meshlora.plan.rules import ModelPlan
from meshlora.plan.table import notes_of_whole
from meshlora.wings.mixers.mixers import MIXERS, mixer_of
from meshlora_extra.planner.memory import held
from meshlora_ground.errors import UserError
from meshlora_ground.topology import Topology
from meshlora_judge.twin import shrink_config, twin_config
from tests.for_each import for_each

SHORT_CONVOLUTIONS = {"lfm2": "conv", "lfm2_moe": "conv", "lfm3": "conv"}
BLOCKS = {family: block for family, (block, _) in MIXERS.items()} | SHORT_CONVOLUTIONS
del BLOCKS["glm5_next_text"]  # which is of a composite alone; its form is that of bailing_hybrid


def _planned(family: str, topology: str, **overrides: Any) -> tuple[Any, ModelPlan]:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(twin_config(family, **overrides))
    return model, plan_model(model, Topology.parse(topology))


def _mixers(family: str, model: Any) -> dict[str, nn.Module]:
    """Name -> mixer; attentions of the same name are none."""
    block = BLOCKS[family]
    found = {name: m for name, m in model.named_modules() if name.rpartition(".")[2] == block and "layers." in name}
    is_short = family in SHORT_CONVOLUTIONS
    return {n: m for n, m in found.items() if (is_short and list(m.children())) or mixer_of(family, block, m)}


@for_each("family", BLOCKS)
def test_a_rank_holds_half_of_a_mixer(family: str) -> None:
    """And all of what its heads share: norms of one head, low-rank gates, B and C of a single group."""
    model, plan = _planned(family, "tp=2,sp")
    regions, mixers = {region.name: region for region in plan.regions}, _mixers(family, model)
    assert mixers
    for name, mixer in mixers.items():
        assert regions[name].is_split
        assert "out_proj.weight" in dict(mixer.named_parameters()) or "o_proj.weight" in dict(mixer.named_parameters())
        whole, shared, local = 0, 0, 0
        for path, parameter in mixer.named_parameters(prefix=name):
            owner = path.rpartition(".")[0]
            rule = plan.parameters.get(path) or plan.linears.get(owner)
            layout = rule.layout if rule is not None else None
            (tensor,) = held(path, parameter.shape, parameter.dtype, plan, ())
            whole, local = whole + parameter.nbytes, local + tensor.nbytes
            if layout is None:
                assert "norm" in owner or owner.endswith(("f_a_proj", "g_a_proj"))
                shared += parameter.nbytes
            else:
                rows = sum(piece.size for piece in layout.pieces if piece.copies(2) > 1)
                shared += parameter.nbytes * rows // layout.size
        assert local == (whole - shared) / 2 + shared
        assert shared < 0.3 * whole
    assert not notes_of_whole(plan)


def test_local_sizes_are_those_of_the_rows_that_a_rank_holds() -> None:
    """Four groups on two ranks, on four, and on eight, of which two share a group and the norm over it."""
    found = {}
    for tp in (2, 4, 8):
        _, plan = _planned("nemotron_h", f"tp={tp}")
        region = next(r for r in plan.regions if r.name == "model.layers.0.mixer")
        found[tp] = (region.local["model.layers.0.mixer"], region.local["model.layers.0.mixer.norm"])
        assert plan.copies == ({2} if tp == 8 else set())
        assert [plan.axes_of_norm(name) for name in plan.wide_norms] == ([{"kv/2"}] if tp == 8 else [])
    assert found[2] == ({"num_heads": 8, "n_groups": 2, "intermediate_size": 64, "conv_dim": 128}, {"group_size": 32})
    assert found[4] == ({"num_heads": 4, "n_groups": 1, "intermediate_size": 32, "conv_dim": 64}, {"group_size": 32})
    assert found[8] == ({"num_heads": 2, "n_groups": 1, "intermediate_size": 16, "conv_dim": 48}, {"group_size": 16})


def test_rows_of_a_fused_projection_are_those_of_a_ranks_own_heads() -> None:
    model, plan = _planned("qwen3_next", "tp=4")
    rule = plan.linears["model.layers.0.linear_attn.in_proj_qkvz"]
    assert rule.layout is not None
    # By key head of 8 rows: q, k, then two heads of v, two of z.
    rows = [rule.layout.rows(rank=rank, size=4).tolist() for rank in range(4)]
    assert rows == [list(range(48 * rank, 48 * (rank + 1))) for rank in range(4)]
    convolution = plan.parameters["model.layers.0.linear_attn.conv1d.weight"].layout
    assert convolution.rows(rank=1, size=4).tolist() == [*range(8, 16), *range(40, 48), *range(80, 96)]
    assert math.prod(model.get_submodule("model.layers.0.linear_attn.conv1d").weight.shape) == 128 * 4


def test_groups_of_a_state_space_mixer_go_with_the_heads_that_they_serve() -> None:
    """Sixteen heads of 8, four groups of 16, on eight ranks: rank 3 has heads 6 and 7, and group 1 of them."""
    _, plan = _planned("nemotron_h", "tp=8")
    mixer = "model.layers.0.mixer"
    x, group = range(48, 64), range(16, 32)
    convolution = plan.parameters[f"{mixer}.conv1d.weight"].layout
    assert convolution.rows(rank=3, size=8).tolist() == [*x, *(128 + n for n in group), *(192 + n for n in group)]
    projection = plan.linears[f"{mixer}.in_proj"].layout
    assert projection is not None
    of_groups = [start + n for start in (256, 320) for n in group]
    assert projection.rows(rank=3, size=8).tolist() == [*x, *(128 + n for n in x), *of_groups, 390, 391]
    assert plan.parameters[f"{mixer}.dt_bias"].layout.rows(rank=3, size=8).tolist() == [6, 7]


@pytest.mark.parametrize(
    ("family", "overrides", "reason"),
    [
        (
            "qwen3_next",
            {"linear_num_key_heads": 3, "linear_num_value_heads": 9},
            "tp=2 must divide num_k_heads=3 or be a multiple of it",
        ),
        ("olmo_hybrid", {"linear_num_key_heads": 1, "linear_num_value_heads": 9}, "tp=2 must divide num_v_heads=9"),
        ("bamba", {"mamba_n_groups": 3, "mamba_n_heads": 12, "mamba_d_head": 16, "hidden_size": 96}, "n_groups=3"),
    ],
)
def test_what_does_not_divide_is_whole_and_says_what_it_costs(
    family: str, overrides: dict[str, Any], reason: str
) -> None:
    model, plan = _planned(family, "tp=2,sp", **overrides)
    name = next(iter(_mixers(family, model)))
    region = next(r for r in plan.regions if r.name == name)
    assert not region.is_split
    assert not any(parameter.startswith(f"{name}.") for parameter in plan.parameters)
    (note,) = notes_of_whole(plan)
    assert reason in note
    weights = [m.weight.numel() for n, m in model.named_modules() if isinstance(m, nn.Linear) and BLOCKS[family] in n]
    assert f"all {sum(weights):,} weights of its linears, 2 times the share" in note


@pytest.mark.parametrize(("groups", "tp", "tiny"), [(8, 2, 4), (8, 8, 8), (2, 2, 2), (2, 4, 2), (1, 2, 1), (8, 1, 4)])
def test_a_twin_shares_groups_as_the_model_does(groups: int, tp: int, tiny: int) -> None:
    config = twin_config("nemotron_h", tp=8)
    config.n_groups, config.mamba_num_heads = groups, 64
    assert shrink_config(config, tp=tp).n_groups == tiny


def test_a_projection_that_peft_refuses_is_left_out_of_all_linear_by_name() -> None:
    model, plan = _planned("falcon_h1", "tp=2,sp")
    with pytest.raises(UserError, match=r"mamba\.out_proj: PEFT refuses it .* exclude_modules: \[out_proj\]"):
        resolve_targets(model, plan, LoraConfig(target_modules="all-linear"))
    targets = resolve_targets(model, plan, LoraConfig(target_modules="all-linear", exclude_modules=["out_proj"]))
    assert not any(name.endswith("out_proj") for name in targets)

"""Experts in the plan: how their matrices are cut, over which axes gradients are summed, what an adapter may target."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from meshlora.adapter.targets.pieces import PieceLoraConfig
from meshlora.adapter.targets.resolve import Target, resolve_targets
from meshlora.comm.groups import open_mesh
from meshlora.loading.blueprint import build_on_meta
from meshlora.model.inject import parallelize
from meshlora.plan.derive import plan_model
from meshlora.plan.grads import Side, expert_rule
from meshlora.plan.layout import Layout, Piece, Split
from meshlora.plan.rules import ExpertsRule
from meshlora.plan.table import notes_of_whole
from meshlora.wings.experts.forms import find_experts
from meshlora.wings.experts.module import replace_experts
from meshlora_ground.errors import UnsupportedError, UserError
from meshlora_ground.model_class import own_class
from meshlora_ground.topology import Topology
from meshlora_judge.twin import twin_config
from tests.for_each import for_each

_MODELS: dict[str, Any] = {}


def _model(family: str, **sizes: Any) -> Any:
    """On the meta device; not to be changed."""
    key = f"{family} {sizes}"
    if key not in _MODELS:
        with torch.device("meta"):
            config = twin_config(family, **sizes)
            _MODELS[key] = AutoModelForCausalLM.from_config(config, experts_implementation="eager")
    return _MODELS[key]


def _rule(family: str, topology: str = "") -> ExpertsRule:
    """Of the last layer of experts."""
    return list(find_experts(_model(family), Topology.parse(topology)).values())[-1]


# --- rules ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "first", "flags"),
    [
        # flags: transposed, bias, PEFT takes the sides the other way round, weights before the experts
        ("qwen3_moe", "gate_up_proj", (False, False, False, False)),
        ("gpt_oss", "gate_up_proj", (True, True, False, False)),
        ("nemotron_h", "up_proj", (False, False, False, False)),
        ("llama4_text", "gate_up_proj", (True, False, True, True)),
    ],
)
def test_what_a_module_of_experts_says_of_itself_is_its_rule(family: str, first: str, flags: tuple[bool, ...]) -> None:
    rule, module = _rule(family), _model(family)
    stack, down = (module.get_parameter(p.name) for p in rule.projections)
    assert rule.first.name == f"{rule.name}.{first}"
    assert rule.second.name == f"{rule.name}.down_proj"
    assert (rule.first.split, rule.second.split) == (Split.COLUMN, Split.ROW)
    for projection, parameter in ((rule.first, stack), (rule.second, down)):
        whole = (projection.out_features, projection.in_features)
        assert tuple(parameter.shape) == (rule.num_experts, *(whole[::-1] if flags[0] else whole))
        assert (projection.is_transposed, projection.has_bias, projection.is_swapped) == flags[:3]
        assert projection.num_experts == rule.num_experts == 8
    assert rule.weights_first == flags[3]
    assert (rule.first.fused is not None) == (first == "gate_up_proj")
    assert rule.first.in_features == rule.second.out_features
    assert rule.first.out_features == rule.second.in_features * (2 if rule.first.fused else 1)
    assert rule.block == rule.name.rpartition(".")[0]
    assert all(len(module.get_submodule(router).weight) == rule.num_experts for router in rule.routers)
    assert len(rule.routers) == 1


def test_gate_and_up_of_gpt_oss_are_cut_in_pairs_and_of_qwen_in_blocks() -> None:
    pairs, blocks = _rule("gpt_oss").first.layout, _rule("qwen3_moe").first.layout
    assert pairs.rows(rank=1, size=2).tolist() == list(range(128, 256))
    assert pairs.piece_rows("up", rank=1, size=2).tolist() == list(range(1, 128, 2))
    assert blocks.rows(rank=1, size=2).tolist() == [*range(16, 32), *range(48, 64)]
    assert blocks.piece_rows("up", rank=1, size=2).tolist() == list(range(16, 32))


def _gate(module: nn.Module, rule: ExpertsRule) -> Callable[[Tensor], Tensor]:
    act: Any = getattr(module, "act_fn", None)
    own: Any = getattr(module, "_apply_gate", None)
    if rule.first.fused is None:
        return act
    if own is not None:
        return own
    return lambda inner: act(inner.chunk(2, -1)[0]) * inner.chunk(2, -1)[1]


@for_each("etp", [2, 4])
@for_each("family", ["qwen3_moe", "gpt_oss", "nemotron_h", "llama4_text", "flex_olmo"])
def test_parts_of_an_expert_add_up_to_it(family: str, etp: int) -> None:
    """By the model's own gate, on the features of one rank after another."""
    rule = _rule(family, f"dp=4,etp={etp}")
    gate = _gate(_model(family).get_submodule(rule.name), rule)
    generator = torch.Generator().manual_seed(0)
    first, second = (
        torch.randn(p.out_features, p.in_features, dtype=torch.float64, generator=generator) for p in rule.projections
    )
    x = torch.randn(3, rule.first.in_features, dtype=torch.float64, generator=generator)
    terms = []
    for rank in range(etp):
        own_first = rule.first.layout.cut(first, 0, rank=rank, size=etp)
        own_second = rule.second.layout.cut(second, 1, rank=rank, size=etp)
        assert own_first.shape == rule.first.local_features(etp)[::-1]
        assert own_second.shape == rule.second.local_features(etp)[::-1]
        terms.append(gate(x @ own_first.T) @ own_second.T)
    torch.testing.assert_close(sum(terms), gate(x @ first.T) @ second.T, rtol=1e-12, atol=1e-12)


def test_projections_are_listed_by_name() -> None:
    plan = plan_model(_model("gpt_oss"), Topology())
    assert len(plan.experts) == 2
    projections = plan.projections
    assert len(projections) == 4
    assert all(rule.name == name for name, rule in projections.items())


@pytest.mark.parametrize(
    ("family", "topology", "message"),
    [
        (
            "qwen3_moe",
            "dp=3,ep=3",
            "ep=3: ep must divide the 8 experts of model.layers.1.mlp.experts; use ep in {1, 2, 4, 8}",
        ),
        (
            "gpt_oss",
            "dp=16,ep=16",
            "ep=16: ep must divide the 8 experts of model.layers.0.mlp.experts; use ep in {1, 2, 4, 8}",
        ),
        (
            "qwen3_moe",
            "dp=3,etp=3",
            "etp=3: etp must divide the width 32 of the experts of model.layers.1.mlp.experts; "
            "use etp in {1, 2, 4, 8, 16, 32}",
        ),
        ("llama", "dp=2,ep=2", "topology dp=2,ep=2: model_type 'llama' has no routed experts; leave out ep, etp"),
        ("llama", "dp=2,etp=2", "topology dp=2,etp=2: model_type 'llama' has no routed experts; leave out ep, etp"),
    ],
)
def test_topology_that_does_not_fit_the_experts_says_what_does(family: str, topology: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        plan_model(_model(family), Topology.parse(topology))
    assert str(caught.value) == message


@pytest.mark.parametrize("family", ["dbrx", "jetmoe"])
def test_experts_of_a_form_that_is_not_known_are_whole_on_every_rank(family: str) -> None:
    """Said, with what that costs; over ep and etp they are refused."""
    model = _model(family)
    assert not find_experts(model, Topology())
    plan = plan_model(model, Topology.parse("tp=2,sp"))
    whole = {region.name: region.reason for region in plan.regions if not region.is_split}
    block = next(name for name in whole if name.endswith(("ffn", "mlp")))
    number = sum(parameter.numel() for parameter in model.get_submodule(block).parameters())
    rule = f"these experts do not have the form that most families share ({number:,} weights a layer)"
    assert whole[block] == rule
    assert any(rule in note for note in notes_of_whole(plan))
    for topology in ("dp=2,ep=2", "dp=2,etp=2"):
        with pytest.raises(UnsupportedError, match=r"that most families share; leave out ep and etp"):
            find_experts(model, Topology.parse(topology))


def test_experts_that_are_whole_compute_in_float64() -> None:
    """Transformers multiplies those of muse_spark grouped by default, which torch does not do with these numbers."""
    model = build_on_meta(twin_config("muse_spark"))
    assert plan_model(model, Topology()).experts
    model.get_submodule("model.language_model.layers.1.mlp.experts").has_post_expert_norm = False  # a form unknown
    plan = plan_model(model, Topology())
    assert not plan.experts
    replace_experts(model, plan, open_mesh(Topology()), dtype=torch.float64)
    assert model.config.get_text_config()._experts_implementation == "eager"


def test_experts_that_compute_nothing_have_factors_and_no_matrix() -> None:
    """Their entries follow those of the others: each ep rank has its share of both."""
    experts = next(iter(find_experts(_model("longcat_flash"), Topology.parse("ep=2,dp=2")).values()))
    first, second = experts.projections
    assert (experts.num_experts, first.num_zero, second.num_zero, experts.num_choices) == (8, 8, 0, 16)
    cut = expert_rule(first, Side.OUTPUT).cuts[0]
    assert cut.layout.rows(rank=1, size=2).tolist() == [4, 5, 6, 7, 12, 13, 14, 15]
    with pytest.raises(UserError, match=r"ep must divide the 3 experts of .* that compute nothing"):
        find_experts(_model("longcat_flash", zero_expert_num=3), Topology.parse("ep=2,dp=2"))


def test_a_stack_that_says_nothing_of_its_form_is_tried_on_a_few_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of step3p7, whose class has no flags; one whose sum is another is not taken for it."""
    config = twin_config("step3p7")
    with torch.device("meta"):
        model = own_class(config)(config)
    (name, rule), *_ = find_experts(model, Topology()).items()
    experts = model.get_submodule(name)
    assert rule.first.fused is not None
    assert (rule.first.out_features, rule.first.in_features) == tuple(experts.gate_up_proj.shape[1:])
    run = type(experts).forward
    for wrong in (
        lambda self, x, chosen, weights: run(self, x, chosen, weights * weights),  # other weights
        lambda self, x, chosen, weights: run(self, x, chosen, weights).clamp(max=100.0),  # shows in large numbers
        lambda self, x, chosen, weights: run(self, x, chosen.flip(-1), weights),  # other experts
        lambda self, x, chosen: run(self, x, chosen, x[:, :2]),
    ):
        monkeypatch.setattr(type(experts), "forward", wrong)
        assert not find_experts(model, Topology())


def _changed(**attributes: Any) -> Any:
    model = copy.deepcopy(_model("qwen3_moe"))
    for name, value in attributes.items():
        setattr(model.model.layers[1].mlp.experts, name, value)
    return model


class MixtureExperts(nn.Module):
    """Of no form that is known: a matrix for each of two experts."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.empty(2, 4, 4, device="meta"))


def _other_experts() -> Any:
    model = copy.deepcopy(_model("qwen3_moe"))
    model.model.layers[0].mlp = MixtureExperts()
    return model


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: _changed(has_post_expert_norm=True), "layers.1.mlp: Qwen3MoeSparseMoeBlock: .*form"),
        (lambda: _changed(is_transposed=None), "layers.1.mlp: Qwen3MoeSparseMoeBlock: .*form"),
        (lambda: _changed(has_gate=None), "layers.1.mlp: Qwen3MoeSparseMoeBlock: .*form"),
        (
            lambda: _changed(scale=nn.Parameter(torch.empty(8, device="meta"))),
            "layers.1.mlp: Qwen3MoeSparseMoeBlock: .*form",
        ),
        (_other_experts, r"layers.0.mlp: MixtureExperts: .*form"),
    ],
)
def test_experts_that_hold_or_do_something_else_are_not_dealt_out(make: Callable[[], Any], words: str) -> None:
    topology = Topology.parse("dp=2,ep=2")
    find_experts(_model("qwen3_moe"), topology)  # what is changed is what is refused
    model = make()
    with pytest.raises(UnsupportedError, match=words):
        find_experts(model, topology)
    whole = [region.name for region in plan_model(model, Topology.parse("tp=2")).regions if region.reason]
    assert whole == [words.replace("layers", "model.layers").partition(":")[0]]


# --- gradient axes ----------------------------------------------------------------------------------------------------

# docs: (projection, side) -> (dim and axis of every cut, axes of the sum)
AXES: dict[tuple[str, Side], tuple[set[tuple[int, str]], set[str]]] = {
    ("first", Side.INPUT): ({(0, "ep")}, {"etp", "edp"}),
    ("first", Side.OUTPUT): ({(0, "ep"), (1, "etp")}, {"edp"}),
    ("second", Side.INPUT): ({(0, "ep"), (2, "etp")}, {"edp"}),
    ("second", Side.OUTPUT): ({(0, "ep")}, {"etp", "edp"}),
}


@for_each("is_shared", [False, True], ids=["each", "shared"])
@for_each(("which", "side"), AXES)
@for_each("family", ["qwen3_moe", "gpt_oss", "nemotron_h", "llama4_text"])
def test_gradient_axes_of_experts_are_those_of_the_table(family: str, which: str, side: Side, is_shared: bool) -> None:
    cuts, summed = AXES[which, side]
    if is_shared:
        cuts, summed = {(dim, axis) for dim, axis in cuts if axis != "ep"}, summed | {"ep"}
    rule = _rule(family)
    found = expert_rule(rule.first if which == "first" else rule.second, side, is_shared=is_shared)
    assert {(cut.dim, cut.axis) for cut in found.cuts} == cuts
    assert found.grad_axes == summed
    assert not found.mean_axes
    assert found.is_expert
    assert found.replicas == {"edp", "ep", "etp"} - {axis for _, axis in cuts}
    assert found.grad_axes == found.replicas, "every rank has tokens of its own: what is not cut is summed"


def test_a_factor_is_cut_as_its_side_of_the_matrix_is() -> None:
    rule = _rule("gpt_oss")
    for which, side in AXES:
        projection = rule.first if which == "first" else rule.second
        for cut in expert_rule(projection, side).cuts:
            assert cut.layout == (Layout.plain(8) if cut.axis == "ep" else projection.layout)
    ep, _ = expert_rule(rule.first, Side.OUTPUT).cuts
    assert ep.layout.rows(rank=1, size=4).tolist() == [2, 3]


# --- targets ----------------------------------------------------------------------------------------------------------


def _targets(family: str = "gpt_oss", **options: Any) -> dict[str, Target]:
    plan = plan_model(_model(family), Topology())
    config = PieceLoraConfig if {"pieces", "share_experts"} & options.keys() else LoraConfig
    return resolve_targets(_model(family), plan, config(**{"r": 4, "lora_alpha": 8, **options}))


def _short(targets: dict[str, Target]) -> list[str]:
    """`1.down_proj`: the layer and the projection."""
    return [f"{name.split('.')[2]}.{name.rpartition('.')[2]}" for name in targets]


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (["experts.down_proj"], ["0.down_proj", "1.down_proj"]),
        (["mlp.experts.gate_up_proj"], ["0.gate_up_proj", "1.gate_up_proj"]),
        (["gate_up_proj", "down_proj"], ["0.gate_up_proj", "0.down_proj", "1.gate_up_proj", "1.down_proj"]),
        (["layers.1.mlp.experts.down_proj"], ["1.down_proj"]),
        (["model.layers.0.mlp.experts.down_proj"], ["0.down_proj"]),
    ],
)
def test_parameters_are_named_by_the_ends_of_their_names(given: list[str], found: list[str]) -> None:
    targets = _targets(target_parameters=given)
    assert _short(targets) == found
    assert all((t.r, t.scaling, t.num_experts, t.is_shared, t.pieces) == (4, 2, 8, False, ()) for t in targets.values())


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"layers_to_transform": [1]}, ["1.gate_up_proj", "1.down_proj"]),
        ({"layers_to_transform": 0}, ["0.gate_up_proj", "0.down_proj"]),
        ({"layers_to_transform": [0], "layers_pattern": "layers"}, ["0.gate_up_proj", "0.down_proj"]),
        ({"exclude_modules": ["gate_up_proj"]}, ["0.down_proj", "1.down_proj"]),
        ({"exclude_modules": ["layers.1.mlp.experts.down_proj"]}, ["0.gate_up_proj", "0.down_proj", "1.gate_up_proj"]),
        ({"exclude_modules": r".*\.0\..*experts.*"}, ["1.gate_up_proj", "1.down_proj"]),
        ({"layers_to_transform": [1], "exclude_modules": ["down_proj"]}, ["1.gate_up_proj"]),
    ],
)
def test_options_that_choose_layers_and_modules_hold_for_parameters(options: dict[str, Any], found: list[str]) -> None:
    assert _short(_targets(target_parameters=["gate_up_proj", "down_proj"], **options)) == found


def test_name_of_one_projection_of_a_fused_one_is_its_piece() -> None:
    for names, pieces in (
        (["gate_proj"], ("gate",)),
        (["up_proj"], ("up",)),
        (["up_proj", "gate_proj"], ("gate", "up")),
    ):
        targets = _targets(target_parameters=[f"mlp.experts.{name}" for name in names])
        assert _short(targets) == ["0.gate_up_proj", "1.gate_up_proj"]
        assert all((t.r, t.scaling, t.pieces) == (4, 2, pieces) for t in targets.values())


def test_each_piece_has_the_rank_and_the_scale_that_it_was_given() -> None:
    both = {"target_parameters": ["experts.gate_proj", "experts.up_proj", "experts.down_proj"]}
    ranks = {"experts.gate_proj": 2, "experts.up_proj": 2}
    alphas = {"experts.gate_proj": 6, "experts.up_proj": 6}
    targets = _targets(**both, rank_pattern=ranks, alpha_pattern=alphas)
    assert {(t.r, t.scaling, t.pieces) for t in targets.values()} == {(2, 3, ("gate", "up")), (4, 2, ())}
    alone = _targets(target_parameters=["experts.up_proj"], rank_pattern={"experts.up_proj": 2})
    (one,) = {(t.r, t.scaling) for t in alone.values()}
    assert one == (2, 4)


def test_rank_of_a_piece_is_still_that_of_linears_of_its_name() -> None:
    options = {"target_modules": ["up_proj"], "target_parameters": ["experts.up_proj"], "rank_pattern": {"up_proj": 2}}
    ranks = {name: target.r for name, target in _targets("qwen3_moe", **options).items()}
    assert ranks == {"model.layers.0.mlp.up_proj": 2, "model.layers.1.mlp.experts.gate_up_proj": 2}


def test_pieces_of_one_projection_under_two_names_are_both_trained_or_refused() -> None:
    try:
        targets = _targets("qwen3_moe", target_parameters=["layers.1.mlp.experts.gate_proj", "experts.up_proj"])
    except UserError:
        return
    assert [target.pieces for target in targets.values()] == [("gate", "up")]


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("rank_pattern", {"experts.up_proj": 2, "experts.gate_proj": 3}),
        ("rank_pattern", {"experts.up_proj": 2}),  # and 4 for the gate
        ("alpha_pattern", {"experts.gate_proj": 2}),
    ],
)
def test_pieces_with_different_ranks_or_scales_are_refused(option: str, value: dict[str, int]) -> None:
    with pytest.raises(UserError, match=option):
        _targets(target_parameters=["experts.gate_proj", "experts.up_proj"], **{option: value})


def test_one_adapter_for_all_experts() -> None:
    targets = _targets(target_parameters=["gate_up_proj", "down_proj"], share_experts=True)
    assert all(t.is_shared and t.num_experts == 8 for t in targets.values())
    shapes = {name: t.shapes for name, t in targets.items()}
    assert shapes["model.layers.0.mlp.experts.gate_up_proj"] == {"A": (1, 4, 64), "B": (1, 256, 4)}
    each = replace(targets["model.layers.0.mlp.experts.down_proj"], is_shared=False)
    assert each.shapes == {"A": (8, 4, 128), "B": (8, 64, 4)}


def test_one_adapter_for_all_experts_on_a_piece() -> None:
    targets = _targets(target_parameters=["experts.up_proj"], share_experts=True)
    assert {(t.is_shared, t.pieces) for t in targets.values()} == {(True, ("up",))}
    (shapes,) = [t.shapes for name, t in targets.items() if ".0." in name]
    assert shapes == {"A.up": (1, 4, 64), "B.up": (1, 128, 4)}


def test_sides_that_peft_swaps_are_marked() -> None:
    assert all(t.is_swapped for t in _targets("llama4_text", target_parameters=["experts.down_proj"]).values())
    assert not any(t.is_swapped for t in _targets("gpt_oss", target_parameters=["experts.down_proj"]).values())


@for_each(
    ("family", "options", "words"),
    [
        ("gpt_oss", {"target_parameters": ["experts.dwn_proj"]}, "matches no parameter.*known: mlp.experts.down_proj"),
        ("gpt_oss", {"target_parameters": ["down_proj", "experts.gate_up"]}, "'experts.gate_up' matches no parameter"),
        ("gpt_oss", {"target_parameters": ["own_proj"]}, "'own_proj' matches no parameter"),
        ("nemotron_h", {"target_parameters": ["experts.gate_proj"]}, "'experts.gate_proj' matches no parameter"),
        ("gpt_oss", {"target_parameters": ["norm.weight"]}, "model.norm.weight: LoRA on this parameter"),
        ("gpt_oss", {"target_parameters": ["down_proj_bias"]}, "down_proj_bias: LoRA on this parameter"),
        ("gpt_oss", {"target_parameters": ["experts.gate_proj", "experts.gate_up_proj"]}, "both named"),
        (
            "gpt_oss",
            {"target_parameters": ["down_proj"], "use_dora": True},
            "use_dora with an adapter on model.layers.0.mlp.experts",
        ),
        (
            "gpt_oss",
            {"target_parameters": ["down_proj"], "init_lora_weights": "pissa"},
            "'pissa' with an adapter on model.layers.0",
        ),
        (
            "gpt_oss",
            {"target_parameters": ["down_proj"], "init_lora_weights": "olora"},
            "'olora' with an adapter on model.layers.0",
        ),
        ("gpt_oss", {"target_parameters": ["down_proj"], "layers_to_transform": [2]}, "the model has 2 layers"),
        ("gpt_oss", {"target_modules": ["q_proj"], "share_experts": True}, "no experts are among the targets"),
        ("gpt_oss", {"target_modules": ["down_proj"]}, "'down_proj' matches no linear layer"),
        ("gpt_oss", {"target_modules": ["experts"]}, "LoRA on GptOssExperts is not supported"),
        ("qwen3_moe", {"target_modules": ["gate_up_proj"]}, "'gate_up_proj' matches no linear layer"),
        (
            "qwen3_moe",
            {"target_parameters": ["mlp.gate.weight"], "use_dora": True},
            "use_dora with an adapter on .*mlp.gate: PEFT has",
        ),
        (
            "qwen3_moe",
            {"target_parameters": ["mlp.gate.weight"], "init_lora_weights": "pissa"},
            "'pissa' with an adapter on .*mlp.gate",
        ),
        (
            "qwen3_moe",
            {"target_modules": ["up_proj"], "use_dora": True},
            "use_dora with an adapter on model.layers.0.mlp.up_proj",
        ),
    ],
)
def test_target_that_cannot_be_followed_is_refused(family: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        _targets(family, **options)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "llama4_text", "flex_olmo"])
def test_all_linear_takes_neither_routers_nor_experts(family: str) -> None:
    plan = plan_model(_model(family), Topology())
    targets = _targets(family, target_modules="all-linear")
    assert targets
    assert not targets.keys() & (plan.routers | plan.projections.keys())
    assert targets.keys() == plan.linears.keys() - plan.routers - {plan.head}


@pytest.mark.parametrize("modules", [["down_proj"], ["gate_proj", "up_proj", "down_proj"], ".*down_proj"])
def test_suffix_among_modules_means_linears_and_never_experts(modules: list[str] | str) -> None:
    targets = _targets("qwen3_moe", target_modules=modules)  # its first layer is dense
    ends = ["down_proj"] if isinstance(modules, str) else modules
    assert targets.keys() == {f"model.layers.0.mlp.{end}" for end in ends}


def test_suffix_means_linears_on_a_parallel_model_too() -> None:
    """Where projections of experts are modules."""
    model = copy.deepcopy(_model("qwen3_moe"))
    plan = plan_model(model, Topology())
    parallelize(model, plan, open_mesh(Topology(), has_experts=True), targets=set(), dtype=torch.float32)
    assert plan.projections.keys() <= dict(model.named_modules()).keys()
    found = resolve_targets(model, plan, LoraConfig(target_modules=["down_proj", "gate_proj"]))
    assert found.keys() == {"model.layers.0.mlp.down_proj", "model.layers.0.mlp.gate_proj"}
    found = resolve_targets(model, plan, LoraConfig(target_parameters=["experts.down_proj"]))
    assert found.keys() == {"model.layers.1.mlp.experts.down_proj"}


def test_router_is_a_target_where_its_weight_is_named() -> None:
    assert _targets("qwen3_moe", target_parameters=["mlp.gate.weight"]).keys() == {"model.layers.1.mlp.gate"}


def test_linears_and_experts_together() -> None:
    targets = _targets("qwen3_moe", target_modules=["down_proj"], target_parameters=["experts.down_proj"])
    numbers = {name: target.num_experts for name, target in targets.items()}
    assert numbers == {"model.layers.0.mlp.down_proj": 0, "model.layers.1.mlp.experts.down_proj": 8}


def test_layout_of_pieces_is_what_the_module_says() -> None:
    assert _rule("gpt_oss").first.layout == Layout((Piece("gate", 128, 1), Piece("up", 128, 1)), groups=128)
    assert _rule("llama4_text").first.layout == Layout((Piece("gate", 128, 1), Piece("up", 128, 1)))
    assert _rule("nemotron_h").first.layout == Layout.plain(32)

"""Plans that are found: those of the tables, from a small model alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, BertConfig

from meshlora.loading.blueprint import build_on_meta, make_blueprint
from meshlora.plan.base_options import BaseOptions
from meshlora.plan.blocks import Heads
from meshlora.plan.derive import plan_model
from meshlora.plan.families import styles
from meshlora.plan.families.family import ROW, FamilyPlan, Leaf, fused
from meshlora.plan.layout import Split
from meshlora.plan.rules import LinearRule, ModelPlan
from meshlora.wings.found import feature, kept
from meshlora.wings.found.feature import notes_of, plan_text, use_twins
from meshlora.wings.found.finder import Found
from meshlora.wings.found.indices import chooses_by
from meshlora.wings.found.kept import from_yaml
from meshlora.wings.found.probe import look, small_model
from meshlora.wings.found.trial import Proposal, passes_in_parts
from meshlora.wings.proved.families import PROVED
from meshlora_ground.errors import UnsupportedError, UserError
from meshlora_ground.topology import Topology
from meshlora_judge.twin import shrink_config, twin_config

# Of each form of a plan one: separate, fused in all orders, arguments with heads, attributes, wide norms, parameters of
# heads, shared keys and values, low rank, experts, an MLP in the layer itself.
FORMS = ("llama", "gpt2", "codegen", "gpt_neox", "bloom", "falcon", "phi3", "gpt_bigcode", "olmo2", "bitnet", "gpt_oss")
FORMS += ("deepseek_v3", "qwen3_moe", "opt", "mpt", "diffllama", "ctrl", "cohere")
# Families whose found plan is another than that of their table -> why.
DIFFERENT = {
    **dict.fromkeys(
        (
            *("bailing_hybrid", "bamba", "falcon_h1", "glm5_next", "granitemoehybrid", "kimi_linear", "mamba2"),
            *("minicpm_ocr", "minicpmv4_6", "minicpmv4_7", "minimax", "nemo_speechlm", "nemotron_h", "olmo_hybrid"),
            *("qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"),
        ),
        "a mixer with heads of its own is whole",
    ),
    **dict.fromkeys(
        ("inkling2", "inkling2_text", "inkling_mm_model", "inkling_text", "lfm2", "lfm2_moe", "lfm3", "lfm3_vl"),
        "a convolution reads its number of channels from no module with a linear",
    ),
    **dict.fromkeys(("gemma4", "gemma4_text"), "layers hand on keys in a dictionary, which parts would write into"),
    "deepseek_v4": "its linears out of attention are grouped",
    "recurrent_gemma": "its unit keeps a state with a gradient, which cannot be copied; its table splits the MLP alone",
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No plan of another process."""
    monkeypatch.setattr(kept.private, "CACHE", tmp_path / "cache")


@pytest.fixture
def hidden(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], ModelPlan]:
    """The plan of a model whose family no table has, on tp=2."""

    def plan(model: Any) -> ModelPlan:
        with monkeypatch.context() as patched:
            patched.setattr(styles, "known_plan", lambda _: None)
            patched.setattr(feature, "shipped", lambda _: None)
            patched.setattr("meshlora.wings.mixers.feature.mixer_of", lambda *_: None)
            model.config.get_text_config().base_model_tp_plan = None
            return plan_model(model, Topology.parse("tp=2"))

    return plan


def _model(family: str, **changes: Any) -> Any:
    return build_on_meta(twin_config(family, tp=2, **changes), dtype=torch.float32)


def _held(rule: LinearRule, rank: int) -> tuple[str, set[int]]:
    rows = set[int]()
    if rule.layout is not None:
        rows = set(rule.layout.rows(rank=rank, size=2).tolist())
    return str(rule.split), rows


def _differences(table: ModelPlan, found: ModelPlan) -> list[str]:
    """The linears that a rank has other rows of, or in another role."""
    wrong = []
    for name, rule in table.linears.items():
        if any(_held(rule, rank) != _held(found.linears[name], rank) for rank in range(2)):
            wrong.append(f"{name}: {rule.split} in the table, found {found.linears[name].split}")
    return wrong


@pytest.mark.parametrize("family", FORMS)
def test_found_plan_is_that_of_the_table(family: str, hidden: Callable[[Any], ModelPlan]) -> None:
    model = _model(family)
    table, found = plan_model(model, Topology.parse("tp=2")), hidden(model)
    assert not _differences(table, found)
    assert found.parameters.keys() == table.parameters.keys()
    assert found.wide_norms == table.wide_norms
    for region in table.regions:
        same = next(other for other in found.regions if other.name == region.name)
        assert dataclasses.replace(same, local={}, sliced={}) == dataclasses.replace(region, local={}, sliced={})


@pytest.mark.parametrize(("family", "is_after"), [("bart", False), ("bigbird_pegasus", True)])
def test_a_norm_beside_the_layers_is_where_it_runs(
    family: str, is_after: bool, hidden: Callable[[Any], ModelPlan]
) -> None:
    plan = hidden(_model(family))
    name = f"{plan.layers.rpartition('.')[0]}.layernorm_embedding"
    assert (name in plan.after) == is_after


@pytest.mark.long
def test_found_plans_of_all_proved_families_are_those_of_their_tables(hidden: Callable[[Any], ModelPlan]) -> None:
    use_twins(lambda config: shrink_config(config, tp=2))  # as a run does: unlimited_ocr's twin is a large model
    different, more = dict[str, list[str]](), dict[str, list[str]]()
    for family in sorted(PROVED - set(FORMS)):
        model = _model(family)
        table = plan_model(model, Topology.parse("tp=2"))
        try:
            found = hidden(_model(family))
        except UnsupportedError as error:
            different[family] = [str(error)]
            continue
        wrong = _differences(table, found)
        if further := [line for line in wrong if line.split()[1] == str(Split.WHOLE)]:
            more[family] = further
        if others := [line for line in wrong if line not in further]:
            different[family] = others
    print("split besides:", *(f"{name}: {lines[0]}" for name, lines in more.items()), sep="\n")
    print("different:", *(f"{name}: {lines[0]}" for name, lines in different.items()), sep="\n")
    assert different.keys() <= DIFFERENT.keys(), {name: different[name] for name in different.keys() - DIFFERENT.keys()}


def test_block_that_adds_up_inside_is_opened(hidden: Callable[[Any], ModelPlan]) -> None:
    model = _model("bert")
    found = hidden(model)
    regions = {region.name for region in found.regions if region.is_split}
    assert regions == {
        f"bert.encoder.layer.{n}.{block}" for n in (0, 1) for block in ("attention.self", "intermediate")
    }
    assert found.linears["bert.encoder.layer.0.output.dense"].split is Split.ROW
    assert "found: 6 linears, attention.self by 8 heads" in notes_of(model)[0]


def test_what_cannot_be_split_is_whole_and_said(hidden: Callable[[Any], ModelPlan]) -> None:
    model = _model("trocr")
    found = hidden(model)
    assert {r.name for r in found.regions if not r.is_split} >= {"model.decoder.layers.0.self_attn"}
    said = "; ".join(notes_of(model))
    assert "kinds of blocks stay whole" in said
    assert "self_attn: the parts of self_attn do not sum up to it" in said


@pytest.mark.parametrize(("pieces", "is_right"), [("q k v", True), ("", False), ("v1 v2", False)])
def test_parts_with_rows_of_other_units_do_not_sum_up(pieces: str, is_right: bool) -> None:
    model = small_model(twin_config("gpt2", tp=2))
    layer = model.transformer.h[0].requires_grad_()
    block, call = layer.attn, look(model, layer, ()).calls["attn"]
    leaves = {"attn.c_attn": Leaf(Split.COLUMN, pieces), "attn.c_proj": ROW}
    proposal = Proposal("attn", leaves, Heads.of(block, model.config), local={"attn": ("split_size",)})
    assert passes_in_parts(proposal, layer, call) == (() if is_right else None)


class _Chooses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        return y + y.gather(-1, y.topk(2, dim=-1).indices).sum()


class _TakesMaximum(_Chooses):
    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        return y - y.max(dim=-1, keepdim=True).values


def test_index_from_split_rows_is_seen_and_one_that_is_not_used_is_none() -> None:
    x = torch.randn(1, 3, 4)
    assert chooses_by(_Chooses(), ["up"], (x,), {})
    assert not chooses_by(_Chooses(), [], (x,), {})
    assert not chooses_by(_TakesMaximum(), ["up"], (x,), {})


def _bert_large(**changes: Any) -> BertConfig:
    return BertConfig(hidden_size=512, intermediate_size=1024, num_hidden_layers=3, is_decoder=True, **changes)


def test_plan_of_a_large_model_is_found_on_its_twin(
    hidden: Callable[[Any], ModelPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build_on_meta(_bert_large(num_attention_heads=8), dtype=torch.float32)
    monkeypatch.setattr(feature, "_SHRINK", [])
    with pytest.raises(UnsupportedError, match="neither transformers nor meshlora"):
        hidden(model)
    use_twins(lambda config: shrink_config(config, tp=2))
    rule = hidden(model).linears["bert.encoder.layer.2.attention.self.query"]
    assert rule.layout is not None
    assert (rule.layout.pieces[0].num_units, rule.layout.pieces[0].unit) == (8, 64)


def test_saved_plan_is_taken_back_and_that_of_other_units_or_code_is_refused(
    tmp_path: Path, hidden: Callable[[Any], ModelPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = _model("roformer")
    expected = hidden(model)
    text = plan_text(model)
    file = tmp_path / "plan.yaml"
    file.write_text(text)
    monkeypatch.setattr(feature, "shipped", lambda _: None)

    def taken(changed: str) -> ModelPlan:
        file.write_text(changed)
        options = BaseOptions(dtype="float32", plan=str(file))
        return make_blueprint(twin_config("roformer", tp=2), Topology.parse("tp=2"), options).plan

    assert taken(text).regions == expected.regions
    with pytest.raises(UnsupportedError, match="the twin of this configuration as column"):
        taken(text.replace("attention.self.query: column", "attention.self.query: {split: column, pieces: q1 q2}"))
    with pytest.raises(UserError, match="has other code"):
        taken(text.replace("code: ", "code: 0"))
    with pytest.raises(UserError, match="'bert'"):
        taken(text.replace("model_type: roformer", "model_type: bert"))


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("[1]", "it must be a plan"),
        ("leaves: {}\nunit: {}", "no such key"),
        ("leaves: {a: both}", "it must be column or row"),
        ("leaves: {a: {split: column, groups: 0}}", "it must be column or row"),
        ("leaves: [a]", "it must be a dict"),
        ("leaves: {}\nparameters: {a: -1}", "the number of a dim"),
        ("leaves: {}\nlocal: {a: b}", "a list of attributes"),
        ("leaves: {}\nwhole: a", "it must be a list"),
        ("leaves: &a {}", "anchor"),
    ],
)
def test_file_that_is_no_plan_is_refused(text: str, rule: str) -> None:
    with pytest.raises(UserError, match=rule):
        from_yaml(text, "plan.yaml")


def test_a_plan_is_the_same_after_yaml() -> None:
    plan = FamilyPlan(
        {"attn.qkv": fused("q v k", groups=4, local_groups=4)},
        local={"attn": ("split_size",)},
        sliced={"attn": {"alibi": "batch*heads", "mask": 1}},
        parameters={"attn.sinks": 0},
        wide_norms=("attn.norm",),
        passes={"attn": ("residual",)},
        opened=("attn",),
    )
    model = AutoModelForCausalLM.from_config(twin_config("llama"))
    assert from_yaml(kept.as_yaml(Found(plan, {"attn": "8 heads"}), model), "it")[0] == Found(plan, {"attn": "8 heads"})

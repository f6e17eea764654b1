"""What a plan refuses in a block that it splits, and what it computes whole beside experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from meshlora import feature
from meshlora.feature import features
from meshlora.plan.derive import plan_model
from meshlora.verify.options import Request
from meshlora.verify.request import prepare_proof
from meshlora.wings.quantized.kinds import check_not_quantized
from meshlora_ground.errors import UnsupportedError, UserError
from meshlora_ground.topology import Topology
from meshlora_judge.twin import twin_config
from tests.blueprints import build_meta

TP = Topology(tp=2, sp=True)


def _model(family: str, **overrides: Any) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(twin_config(family, **overrides), experts_implementation="eager")


def test_a_module_for_each_head_is_refused() -> None:
    """Norms need no word in a plan, but these are of one head each, and a rank has other heads."""
    model = _model("stablelm", qk_layernorm=True)
    with pytest.raises(UnsupportedError, match=r"layernorm\.norms: a module for each head is not split yet"):
        plan_model(model, TP)
    assert plan_model(model, Topology())


def test_ranks_along_the_axis_of_a_wing_that_is_taken_out_are_not_run_as_if_there_were_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = _model("qwen3_moe")
    for wing, axis in (("stages", "pp"), ("context", "cp"), ("experts", "ep"), ("experts", "etp")):
        topology = Topology.parse(f"{axis}=2")
        assert plan_model(model, topology)
        left = tuple(each for each in features() if not type(each).__module__.startswith(f"meshlora.wings.{wing}."))
        with monkeypatch.context() as patch:
            patch.setattr(feature, "features", lambda left=left: left)
            with pytest.raises(UserError, match=f"^{axis}=2: its wing is not in WINGS"):
                plan_model(model, topology)


def test_a_split_of_what_is_no_linear_is_refused() -> None:
    model = _model("llama")
    model.config.base_model_tp_plan = {**model.config.base_model_tp_plan, "layers.*.input_layernorm": "colwise"}
    with pytest.raises(UnsupportedError, match=r"input_layernorm: .*it is not a linear layer"):
        plan_model(model, TP)


def test_what_mixes_tokens_beside_experts_sees_whole_sequences() -> None:
    """A router, and the gate of a shared expert, see single tokens; any other module with a matrix may not."""
    model = _model("qwen2_moe")
    model.model.layers[1].mlp.mixer = nn.Linear(model.config.hidden_size, model.config.hidden_size, device="meta")
    found = {region.name for region in plan_model(model, TP).regions}
    mlp = "model.layers.1.mlp"
    assert {f"{mlp}.mixer", f"{mlp}.shared_expert"} <= found
    assert not found & {f"{mlp}.gate", f"{mlp}.shared_expert_gate", f"{mlp}.experts"}


def test_layers_that_share_a_weight_are_not_sharded(monkeypatch: pytest.MonkeyPatch) -> None:
    made = LlamaForCausalLM.__init__

    def shared(self: Any, *args: Any) -> None:
        made(self, *args)
        self.model.layers[1].mlp.up_proj.weight = self.model.layers[0].mlp.up_proj.weight

    monkeypatch.setattr(LlamaForCausalLM, "__init__", shared)
    build_meta(twin_config("llama"), Topology(dp=2), dtype=torch.float32)
    with pytest.raises(UnsupportedError, match="a decoder layer shares it with another part of the model"):
        build_meta(twin_config("llama"), Topology(dp=2, dp_shard=True), dtype=torch.float32)


def test_a_quantised_matrix_is_not_trained() -> None:
    _, plan = build_meta(twin_config("llama", block=64), Topology(), dtype=torch.float32, quantization="nf4")
    with pytest.raises(UnsupportedError, match=r"mlp\.up_proj\.weight with quantization nf4: a quantised"):
        check_not_quantized(plan, "model.layers.0.mlp.up_proj.weight")
    check_not_quantized(plan, "model.layers.0.mlp.up_proj.bias")
    check_not_quantized(plan, "model.norm.weight")


def test_heads_are_those_of_each_layer() -> None:
    """The configuration has the number of key/value heads of one kind of layer."""
    model = _model("mimo_v2_flash")
    plan = plan_model(model, TP)
    for index, layer in enumerate(model.model.layers):
        attention = layer.self_attn
        (piece,) = plan.linears[f"model.layers.{index}.self_attn.k_proj"].layout.pieces
        assert piece.num_units == model.config.num_attention_heads // attention.num_key_value_groups
        assert piece.size == attention.k_proj.out_features
    assert len({layer.self_attn.num_key_value_groups for layer in model.model.layers}) == 2


def test_halves_of_a_matrix_of_heads_have_half_of_the_heads() -> None:
    model = _model("diffllama")
    for name in ("q", "v"):
        pieces = plan_model(model, TP).linears[f"model.layers.0.self_attn.{name}_proj"].layout.pieces
        heads = model.config.num_attention_heads if name == "q" else model.config.num_key_value_heads
        assert [piece.num_units for piece in pieces] == [heads // 2] * 2
    with pytest.raises(UserError, match="tp=8: tp must divide"):
        plan_model(model, Topology(tp=8))


@pytest.mark.parametrize("family", ["pp_formulanet", "qwen2_5_omni"])
def test_model_of_several_models_is_refused(family: str) -> None:
    with pytest.raises(UnsupportedError, match=f"{family}.*is several models and has no input embedding"):
        prepare_proof(Request(("tp=2",), family=family, device="cpu"))


def test_the_table_of_second_inputs_is_split_as_the_embedding_is() -> None:
    _, plan = build_meta(twin_config("gemma4_text"), Topology.parse("tp=2,sp"), dtype=torch.float32)
    assert plan.per_layer == ("model.embed_tokens_per_layer", 16)
    assert plan.after == ("model.norm",)  # the norm of second inputs, registered beside it, runs before the layers
    for table in ("model.embed_tokens", plan.per_layer[0]):
        assert plan.parameters[f"{table}.weight"].layout.local_size(2) == 128  # of 256 rows

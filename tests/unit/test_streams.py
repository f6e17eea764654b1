"""Models with several residual streams, grouped linears out of attention, indexers, and routers that look at ids."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from meshlora.adapter.targets.resolve import resolve_targets
from meshlora.model.weights import CheckpointSource, check_checkpoint, extra_weights
from meshlora.plan.derive import plan_model
from meshlora.plan.layout import Split
from meshlora.wings.mixers.block_states import keep_block_states
from meshlora_ground.errors import UnsupportedError, UserError
from meshlora_ground.topology import Topology
from meshlora_judge.inputs import write_twin
from meshlora_judge.quantized import plain_linears
from meshlora_judge.twin import twin_config
from tests.blueprints import build_meta
from tests.for_each import for_each
from tests.unit.test_expert_weights import FILE

TP = Topology(tp=2, sp=True)
ATTENTION = "model.layers.1.self_attn"
INDEXER = f"{ATTENTION}.compressor.indexer"


def _model(family: str = "deepseek_v4") -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(twin_config(family), experts_implementation="eager")


def test_heads_are_split_by_groups_and_an_indexer_with_as_many_heads_stays_whole() -> None:
    model = _model()
    attention = model.get_submodule(ATTENTION)
    assert model.get_submodule(INDEXER).num_heads == attention.num_heads == 8  # what the test is about
    plan = plan_model(model, TP)
    region = next(region for region in plan.regions if region.name == ATTENTION)
    assert region.is_split
    assert region.local == {
        ATTENTION: {"num_heads": 4, "num_key_value_groups": 4, "config.o_groups": attention.config.o_groups // 2},
        f"{ATTENTION}.o_a_proj": {"n_groups": attention.config.o_groups // 2},
    }
    assert f"{ATTENTION}.o_a_proj" not in plan.linears  # it computes no x W^T
    assert attention.o_a_proj not in plain_linears(model)  # of which the judge rounds those in few bits
    with pytest.raises(UserError, match=r"tp must divide n_groups=4 of .*o_a_proj.weight; use tp in \{1, 2, 4\}"):
        plan_model(model, Topology(tp=8))


@for_each("family", ["deepseek_v32", "glm_moe_dsa", "axk2", "dots3_note_text", "hy_v4"])
def test_attention_is_split_and_its_indexer_whole(family: str) -> None:
    model = _model(family)
    name = "model.layers.0.self_attn"
    indexer = model.get_submodule(f"{name}.indexer")
    assert indexer.n_heads == model.get_submodule(name).num_heads  # by its number alone it would be split
    plan = plan_model(model, TP)
    region = next(region for region in plan.regions if region.name == name)
    assert region.is_split
    assert set(region.local) == {name}
    assert {plan.linears[f"{name}.{path}"].split for path in ("kv_b_proj", "o_proj")} == {Split.COLUMN, Split.ROW}
    inside = {rule.split for path, rule in plan.linears.items() if path.startswith(f"{name}.indexer.")}
    assert inside == {Split.WHOLE}


def test_parameters_that_transformers_splits_and_streams_need_no_line_in_a_table() -> None:
    """hy_v4: sinks of heads under the style `local_params`."""
    plan = plan_model(_model("hy_v4"), TP)
    assert plan.parameters["model.layers.0.self_attn.sinks"].dim == 0
    assert plan.parameters["model.layers.0.self_attn.sinks"].layout.local_size(2) == 4
    assert plan.linears["model.layers.0.self_attn.gate_proj"].split is Split.COLUMN
    assert not [region.name for region in plan.regions if region.name.endswith("_hc")]
    assert "model.hc_head" in plan.after


def test_a_stage_begins_with_a_layer_that_chooses_keys_itself() -> None:
    """hy_v4: the last layer takes what the one before has chosen."""
    model = _model("hy_v4")
    assert model.config.indexer_types == ["full", "full", "shared"]
    assert plan_model(model, Topology.parse("pp=2")).stages == ((0, 1), (1, 3))
    with pytest.raises(UnsupportedError, match=r"hy_v4 on pp=3: the layers with one indexer's choice .* of one stage"):
        plan_model(model, Topology.parse("pp=3"))


def test_a_linear_with_a_forward_of_its_own_is_one_if_it_maps_as_linears_do() -> None:
    class Otherwise(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return input @ self.weight.T

    model = _model("llama")
    mlp = model.model.layers[0].mlp
    mlp.up_proj = Otherwise(mlp.up_proj.in_features, mlp.up_proj.out_features, bias=False, device="meta")
    assert "model.layers.0.mlp.up_proj" in plan_model(model, TP).linears


def test_all_linears_are_those_that_an_adapter_can_train() -> None:
    model = _model()
    plan = plan_model(model, TP)
    found = resolve_targets(model, plan, LoraConfig(r=4, target_modules="all-linear"))
    assert f"{ATTENTION}.compressor.kv_proj" in found
    assert not [name for name in found if "indexer" in name or "o_a_proj" in name]
    with pytest.raises(UnsupportedError, match=r"o_a_proj: LoRA on DeepseekV4GroupedLinear .* computes no x W\^T"):
        resolve_targets(model, plan, LoraConfig(r=4, target_modules=["o_a_proj"]))
    with pytest.raises(UserError, match=r"no gradient reaches it; .*exclude_modules: \[indexer.kv_proj\]"):
        resolve_targets(model, plan, LoraConfig(r=4, target_modules=["kv_proj"]))
    chosen = LoraConfig(r=4, target_modules=["kv_proj"], exclude_modules=["indexer.kv_proj"])
    assert not [name for name in resolve_targets(model, plan, chosen) if "indexer" in name]


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("twin")
    write_twin(twin_config("deepseek_v4"), folder, dtype=torch.float32, seed=0)
    return folder


def test_a_twins_tokens_go_to_several_experts(twin: Path) -> None:
    """transformers leaves the table at zero, by which a token would choose expert 0 twice."""
    tables = [value for name, value in load_file(twin / FILE).items() if name.endswith("tid2eid")]
    assert tables
    for table in tables:
        assert all(len({*row}) == len(row) for row in table.tolist())
        assert len({tuple(row) for row in table.tolist()}) > 8


def _as_published(name: str) -> str:
    """DeepSeek's name of a tensor: transformers writes some of its own."""
    name = name.removeprefix("model.").replace("embed_tokens.", "embed.")
    return re.sub(r"^hc_head\.hc_", "hc_head_", name)


def test_files_of_deepseeks_names_are_read_and_layers_that_predict_further_tokens_passed_over(twin: Path) -> None:
    expected = AutoModelForCausalLM.from_pretrained(twin, dtype=torch.float32).state_dict()
    tensors = {_as_published(name): value for name, value in load_file(twin / FILE).items()}
    names = {"embed.weight", "head.weight", "hc_head_fn", "layers.1.attn.wo_a.weight", "layers.1.hc_attn_fn"}
    names |= {"layers.1.attn.indexer.wq_b.weight", "layers.1.ffn.experts.3.w2.weight", "layers.0.ffn.gate.tid2eid"}
    assert names <= {*tensors}
    further = {"mtp.0.attn.wq_a.weight": torch.zeros(2, 2), "mtp.0.hc_attn_fn": torch.zeros(2, 2)}
    save_file(tensors | further, twin / FILE, metadata={"format": "pt"})
    model, _ = build_meta(twin_config("deepseek_v4"), Topology(), dtype=torch.float32)
    source = CheckpointSource(twin, model)
    check_checkpoint(model, source)
    assert "2 of multi-token prediction, first mtp" in extra_weights(model, source)
    for name, value in expected.items():
        assert torch.equal(source.read(name), value), name


def test_a_block_begins_for_its_layer_and_not_for_the_loop_around_it() -> None:
    """A layer that is computed again in a backward, between no hooks, begins its block again."""
    model = _model("inkling2_text")
    keep_block_states(model)
    first = model.model.layers[0]
    assert first.is_block_boundary
    model.block_states.is_in_loop, model.block_states.kept[2] = True, torch.zeros(1, 2, 2, 4)
    assert not first.is_block_boundary
    model.block_states._mix(None, (torch.zeros(1, 2, 0, 4), torch.zeros(1, 2, 4)))
    assert first.is_block_boundary


def test_another_stage_hands_on_the_states_that_its_next_layer_reads() -> None:
    """Of four layers in blocks of two, the last reads the streams before the first and the third."""
    model = _model("inkling2_text")
    keep_block_states(model)
    states = model.block_states
    assert states.before == [0, 1, 1, 2, 2]
    both = torch.randn(1, 3, 2, 4)
    states.kept[2] = both
    sent = states.given(3)
    assert sent.shape == (1, 3, 8)
    states.kept.clear()
    states.take(3, sent)
    assert torch.equal(states.kept[2], both)
    states.is_running = lambda layer: layer < 3
    stream = torch.randn(1, 3, 4)
    assert torch.equal(states._mix(None, (sent, stream))[0][0], stream)  # of the last stage alone

"""Adapters on pieces of fused matrices: what is trained, and what a user is told who names the wrong ones."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from peft import get_peft_model
from peft.tuners.lora import LoraLayer
from transformers import GPT2Config, LlamaConfig

from meshlora.adapter.formats.peft_format import lora_config
from meshlora.adapter.plan import plan_adapter
from meshlora.adapter.targets.resolve import resolve_targets
from meshlora.wings.proved.families import PROVED
from meshlora.wings.tables.tables import explicit_plan
from meshlora_ground.errors import UserError
from meshlora_ground.topology import Topology
from meshlora_judge.pieces import rows_of
from meshlora_judge.twin import twin_config
from tests.blueprints import build_meta

ON_Q_AND_V: dict[str, Any] = {"r": 4, "lora_alpha": 32, "target_modules": ["c_attn"], "pieces": {"c_attn": ["q", "v"]}}


@pytest.mark.parametrize("topology", ["", "tp=2", "tp=4,sp"])
def test_gpt2_medium_on_q_and_v_trains_393216_parameters(topology: str) -> None:
    """24 layers * 2 pieces * (4 * 1024 + 1024 * 4), on every topology."""
    config = GPT2Config(n_embd=1024, n_layer=24, n_head=16)
    model, plan = build_meta(config, Topology.parse(topology), dtype=torch.float32, disable_dropout=True)
    lora = lora_config(ON_Q_AND_V, "lora", unknown_is_error=True)
    planned = plan_adapter(model, plan, lora)
    assert planned.num_trainable == 393_216
    # PEFT's words for it: one adapter of both ranks, and the same scale.
    assert (lora.rank_pattern, lora.alpha_pattern) == ({"c_attn": 8}, {"c_attn": 64})
    assert {target.scaling for target in planned.targets.values()} == {32 / 4}


@pytest.mark.parametrize("use_rslora", [False, True])
def test_scale_of_pieces_is_that_of_one_of_them(use_rslora: bool) -> None:
    """To us, and to PEFT, which knows them as one adapter of both ranks."""
    small = GPT2Config(n_embd=64, n_layer=1, n_head=4)
    model, plan = build_meta(small, Topology(), dtype=torch.float32, disable_dropout=True)
    lora = lora_config({**ON_Q_AND_V, "use_rslora": use_rslora, "fan_in_fan_out": True}, "lora", unknown_is_error=True)
    (target,) = resolve_targets(model, plan, lora).values()
    assert target.scaling == 32 / (math.sqrt(4) if use_rslora else 4)
    (layer,) = (m for m in get_peft_model(model, lora).modules() if isinstance(m, LoraLayer))
    assert layer.scaling["default"] == pytest.approx(target.scaling, rel=1e-15)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"pieces": {"c_attn": ["q", "w"]}}, "its pieces are: q, k, v"),
        ({"pieces": {"c_attn": ["q", "q"]}}, "each piece once"),
        ({"pieces": {"c_fc": ["q"]}}, "'c_fc' is none of the targets"),
        ({"target_modules": ["c_fc"], "pieces": {"c_fc": ["q"]}}, "it is not a fused matrix"),
        ({"pieces": ["q"]}, "it maps targets to names"),
        ({"pieces": {"c_attn": "q"}}, "it maps targets to names"),
    ],
)
def test_wrong_pieces_are_one_clear_message(changes: dict[str, Any], words: str) -> None:
    small = GPT2Config(n_embd=64, n_layer=1, n_head=4)
    model, plan = build_meta(small, Topology(), dtype=torch.float32, disable_dropout=True)

    def resolve() -> None:
        resolve_targets(model, plan, lora_config({**ON_Q_AND_V, **changes}, "lora", unknown_is_error=True))

    with pytest.raises(UserError, match=words):
        resolve()


@pytest.mark.proof
def test_pieces_that_may_have_adapters_are_those_of_the_judge() -> None:
    """What a plan offers can be proved, and has the rows that the judge derives from the model's code."""
    found = {}
    for config in map(twin_config, sorted(PROVED)):
        family = explicit_plan(config)
        if family is None or not any(leaf.pieces for leaf in family.leaves.values()):
            continue
        _, plan = build_meta(config, Topology(), dtype=torch.float32, disable_dropout=True)
        for rule in (rule for rule in plan.linears.values() if rule.fused):
            for piece in rule.fused.pieces:
                rows = rows_of(config, rule.name, piece.name, rule.out_features)
                assert torch.equal(rows.sort().values, rule.fused.piece_rows(piece.name)), (rule.name, piece.name)
            found[config.model_type] = rule.name
    assert {"codegen", "falcon", "gpt2", "gpt_bigcode", "moshi", "mpt", "phi3"} < found.keys()


@pytest.mark.parametrize(
    ("family", "matrix", "piece"),
    [
        ("bamba", "in_proj", "x"),
        ("diffllama", "q_proj", "q1"),
        ("lfm2", "in_proj", "B"),
        ("qwen3_5_text", "in_proj_qkv", "q"),
        ("qwen3_next", "in_proj_qkvz", "v"),
    ],
)
def test_parts_that_are_not_proved_have_no_adapter_of_their_own(family: str, matrix: str, piece: str) -> None:
    model, plan = build_meta(twin_config(family), Topology(), dtype=torch.float32, disable_dropout=True)
    words = {"r": 4, "target_modules": [matrix], "pieces": {matrix: [piece]}}
    with pytest.raises(UserError, match="adapters on parts of it are not proved"):
        resolve_targets(model, plan, lora_config(words, "lora", unknown_is_error=True))


def test_tp_that_does_not_fit_names_the_values_that_do() -> None:
    config = LlamaConfig(
        hidden_size=96, intermediate_size=96, num_attention_heads=12, num_key_value_heads=4, num_hidden_layers=1
    )
    with pytest.raises(
        UserError, match=r"tp=3: tp must divide num_key_value_heads=4 or be a multiple of it; use tp in"
    ):
        build_meta(config, Topology(tp=3), dtype=torch.float32)
    with pytest.raises(UserError, match=r"tp=8: tp must divide num_attention_heads=12; use tp in \{1, 2, 4, 12\}"):
        build_meta(config, Topology(tp=8), dtype=torch.float32)

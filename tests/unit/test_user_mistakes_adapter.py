"""Mistakes in what is trained: the options of a fresh adapter, the files of one to go on from."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.for_each import for_each
from tests.unit.mistakes import (
    UP_A,
    Case,
    Setup,
    case,
    check_mistake,
    lora,
    narrower_adapter,
    remove,
    setting,
    several,
    truncate,
)

pytestmark = pytest.mark.usefixtures("nothing_has_happened_yet")


def pickled_adapter_only(s: Setup) -> None:
    s.from_adapter()
    (s.adapter / "adapter_model.safetensors").rename(s.adapter / "adapter_model.bin")


MISTAKES: dict[str, Case] = {
    # A fresh adapter.
    "lora_unknown_option": case(lora(rank=8), "lora.rank: unknown key; here it is lora.r"),
    "lora_of_another_type": case(
        lora(peft_type="IA3"), "peft_type='IA3'", "only adapters of type LORA", "leave it out"
    ),
    "lora_is_a_number": case(setting("lora", 8), "lora: 8", "a group of keys"),
    "lora_dropout_of_everything": case(lora(lora_dropout=1.0), "lora_dropout=1.0", "a share in [0, 1)"),
    "lora_dropout_is_text": case(lora(lora_dropout="a tenth"), "lora_dropout='a tenth'", "a share in [0, 1)"),
    "lora_bias_on_the_embedding": case(
        lora(lora_bias=True, target_modules=["embed_tokens"]), "an adapter on the embedding", "leave out lora_bias"
    ),
    "lora_dropout_on_the_head": case(
        lora(lora_dropout=0.1, target_modules=["lm_head"]), "the output head lm_head", "leave the head out"
    ),
    "lora_dropout_on_a_parameter": case(
        lora(lora_dropout=0.1, target_modules=["q_proj"], target_parameters=["mlp.up_proj.weight"]),
        "PEFT has no dropout",
        "leave lora_dropout",
    ),
    "lora_linear_named_twice": case(
        lora(target_parameters=["mlp.up_proj.weight"]), "both name model.layers.0.mlp.up_proj", "one of the two"
    ),
    "lora_modules_to_save_not_there": case(
        lora(modules_to_save=["lm_haed"]), "modules_to_save", "'lm_haed' is no module", "did you mean 'lm_head'?"
    ),
    "lora_modules_to_save_is_text": case(
        lora(modules_to_save="lm_head"), "modules_to_save='lm_head'", "it is a list of names"
    ),
    "lora_modules_to_save_a_target_of_several": case(
        lora(modules_to_save=["proj"]), "modules_to_save=['proj']", "q_proj is a target of LoRA too", "one of the two"
    ),
    "lora_modules_to_save_a_target": case(
        lora(modules_to_save=["q_proj"]),
        "modules_to_save=['q_proj']",
        "'q_proj' of target_modules has no effect",
        "one of the two",
    ),
    "lora_modules_to_save_every_target": case(
        lora(modules_to_save=["mlp.up_proj"], target_modules=".*up_proj"),
        "target_modules='.*up_proj'",
        "no linear layer",
        "modules_to_save=['mlp.up_proj'] leaves",
        "one of the two",
    ),
    "lora_modules_to_save_a_block": case(
        lora(modules_to_save=["mlp", "up_proj"], target_modules=["q_proj"]), "up_proj", "in another one", "one of them"
    ),
    "lora_bias": case(lora(bias="some"), "bias='some'", "none, all, lora_only"),
    "lora_bias_and_a_module_to_save_with_one": case(
        several(
            lambda s: s.family("qwen2", vocab_size=2048),
            lora(bias="all", target_modules=["up_proj"], modules_to_save=["v_proj"]),
        ),
        "modules_to_save: model.layers.0.self_attn.v_proj with bias='all'",
        "twice",
        "'lora_only'",
    ),
    "lora_fan_in_fan_out": case(lora(fan_in_fan_out=True), "fan_in_fan_out=True", "no effect", "leave it out"),
    "lora_pieces_of_what_is_not_fused": case(
        lora(pieces={"q_proj": ["q"]}), "pieces: 'q' of model.layers.0.self_attn.q_proj", "not a fused matrix"
    ),
    "lora_pieces_of_no_target": case(lora(pieces={"c_attn": ["q"]}), "pieces: c_attn", "add it to target_modules"),
    "lora_target_parameters": case(
        lora(target_parameters=["x"]), "target_parameters=['x']", "matches no parameter of the model"
    ),
    "lora_init_from_the_data": case(lora(init_lora_weights="corda"), "'corda'", "covariance", "eva"),
    "lora_task_type": case(lora(task_type="SEQ_CLS"), "SEQ_CLS", "CAUSAL_LM"),
    "lora_rank_of_zero": case(lora(r=0), "r=0", "at least 1"),
    "lora_rank_is_text": case(lora(r="8x"), "r='8x'", "whole number"),
    "lora_alpha_of_zero": case(lora(lora_alpha=0), "lora_alpha=0", "above 0"),
    "lora_target_that_matches_nothing": case(
        lora(target_modules=["q_prj"]), "q_prj", "no linear layer", "did you mean 'q_proj'?"
    ),
    "lora_one_target_of_two_matches_nothing": case(
        lora(target_modules=["q_proj", "up"]), "'up' matches no linear layer", "up_proj"
    ),
    "lora_target_pattern_is_not_a_regular_expression": case(
        lora(target_modules="(q_proj"), "'(q_proj'", "regular expression"
    ),
    "lora_target_is_not_a_linear": case(
        several(lambda s: s.family("opt", vocab_size=2048), lora(target_modules=["q_proj", "embed_positions"])),
        "model.decoder.embed_positions",
        "OPTLearnedPositionalEmbedding",
        "not supported",
    ),
    "lora_layer_that_is_not_there": case(lora(layers_to_transform=[0, 7]), "layers_to_transform", "7", "2 layers"),
    "lora_rank_pattern_matches_nothing": case(
        lora(rank_pattern={"v_proj": 8}), "rank_pattern", "'v_proj' matches none", "did you mean 'q_proj'?"
    ),
    "lora_alpha_pattern_matches_nothing": case(
        lora(alpha_pattern={"down_proj": 8}), "alpha_pattern", "'down_proj' matches none"
    ),
    "lora_target_is_a_number": case(lora(target_modules=3), "target_modules=3", "list of names"),
    "lora_target_is_a_name_where_a_pattern_is_due": case(
        lora(target_modules="q_proj"), "'q_proj'", "whole names", "[q_proj]"
    ),
    "lora_layers_are_text": case(lora(layers_to_transform=["0"]), "layers_to_transform=['0']", "whole number"),
    "lora_rank_pattern_is_a_list": case(lora(rank_pattern=["q_proj"]), "rank_pattern=['q_proj']", "{q_proj: 8}"),
    "lora_rank_pattern_is_not_a_regular_expression": case(
        lora(rank_pattern={"(q": 8}), "rank_pattern='(q'", "regular expression"
    ),
    "lora_rslora_is_text": case(lora(use_rslora="yes"), "use_rslora='yes'", "true or false"),
    "lora_weight_tying_is_text": case(lora(ensure_weight_tying="no"), "ensure_weight_tying='no'", "true or false"),
    "lora_exclude_matches_nothing": case(
        lora(exclude_modules=["q_prj"]), "exclude_modules=['q_prj']", "'q_prj' matches no", "did you mean 'q_proj'?"
    ),
    "lora_exclude_leaves_nothing": case(
        lora(exclude_modules=["q_proj", "up_proj"]), "matches no linear layer", "exclude_modules leaves"
    ),
    # An adapter to go on from.
    "adapter_folder_missing": case(
        several(lambda s: s.drop("lora"), setting("adapter", "nowhere/adapter")), "nowhere/adapter", "no such folder"
    ),
    "adapter_config_missing": case(
        several(Setup.from_adapter, remove("adapter/adapter_config.json")), "adapter_config.json", "missing"
    ),
    "adapter_weights_missing": case(
        several(Setup.from_adapter, remove("adapter/adapter_model.safetensors")), "adapter_model.safetensors", "missing"
    ),
    "adapter_of_another_model": case(
        lambda s: s.adapter_weights(narrower_adapter), "[4, 48]", "[4, 64]", "another model"
    ),
    "adapter_tensor_missing": case(
        lambda s: s.adapter_weights(lambda t: t.pop(UP_A)), "lacks 1 of", UP_A, "did you mean"
    ),
    "adapter_tensor_too_many": case(
        lambda s: s.adapter_weights(lambda t: t.update({UP_A.replace("up", "gate"): t[UP_A].clone()})),
        "no place",
        "gate_proj",
        "adapter_config.json",
    ),
    "adapter_with_nan": case(
        lambda s: s.adapter_weights(lambda t: t[UP_A].view(-1)[3].fill_(float("nan"))),
        UP_A,
        "not finite",
        "earlier checkpoint",
    ),
    "adapter_is_not_lora": case(lambda s: s.adapter_config(peft_type="IA3"), "'IA3'", "only LORA"),
    "adapter_pickled_only": case(pickled_adapter_only, "adapter_model.bin", "weights_only=True", "save the adapter as"),
    "adapter_config_cut_short": case(
        several(Setup.from_adapter, truncate("adapter/adapter_config.json", 50)), "adapter_config.json", "JSON"
    ),
    "adapter_weights_cut_short": case(
        several(Setup.from_adapter, truncate("adapter/adapter_model.safetensors", 3000)), "adapter_model", "damaged"
    ),
    "adapter_config_with_an_unsupported_option": case(
        lambda s: s.adapter_config(use_qalora=True), "use_qalora=True", "QALoRA pools inputs"
    ),
    "adapter_config_with_dora_and_weights_without": case(
        lambda s: s.adapter_config(use_dora=True), "lacks 6 of 18", "lora_magnitude_vector"
    ),
    "adapter_config_of_a_newer_peft": case(
        lambda s: s.adapter_config(use_magic=True), "use_magic", "not an option of this peft"
    ),
    "adapter_rank_that_is_not_the_files": case(lambda s: s.adapter_config(r=8), "[4, ", "[8, ", "another rank"),
}


@pytest.mark.long
@for_each("mistake", MISTAKES.values(), ids=MISTAKES.keys())
def test_mistake_is_one_clear_message(
    mistake: Case, setups: Callable[[], Setup], capfd: pytest.CaptureFixture[str]
) -> None:
    check_mistake(mistake, setups(), capfd)

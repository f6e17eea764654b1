"""Targets are those that PEFT itself would choose, and what would not be followed is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import ArrowConfig, BdLoraConfig, KasaConfig, LoraConfig, VeloraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from transformers import AutoModelForCausalLM

import meshlora
from meshlora.adapter.plan import trained_parameters
from meshlora.adapter.targets.resolve import check_supported, resolve_targets
from meshlora.plan.derive import plan_model
from meshlora_ground.errors import UnsupportedError, UserError
from meshlora_ground.topology import Topology
from meshlora_judge.twin import twin_config
from tests.for_each import for_each

CHOICES: dict[str, dict[str, Any]] = {
    "suffixes": {"target_modules": ["q_proj", "v_proj"]},
    "dotted suffix": {"target_modules": ["self_attn.o_proj"]},
    "regex": {"target_modules": r".*layers\.1\..*(gate|up)_proj"},
    "all-linear": {"target_modules": "all-linear"},
    "default of the family": {},
    "excluded": {"target_modules": "all-linear", "exclude_modules": ["down_proj"]},
    "excluded by regex": {"target_modules": "all-linear", "exclude_modules": r".*mlp.*"},
    "layers": {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": [1]},
    "one layer": {"target_modules": ["q_proj"], "layers_to_transform": 0, "layers_pattern": "layers"},
    "ranks": {
        "target_modules": ["q_proj", "v_proj", "up_proj"],
        "rank_pattern": {"v_proj": 2, r"layers\.1\..*up_proj": 3},
    },
    "alphas": {
        "target_modules": ["q_proj", "v_proj"],
        "alpha_pattern": {"self_attn.q_proj": 32, r"layers.1.self_attn.v_proj": 5},
    },
    "embedding and head": {"target_modules": ["embed_tokens", "lm_head", "q_proj"]},
    "rslora": {"target_modules": ["q_proj", "v_proj"], "use_rslora": True, "rank_pattern": {"v_proj": 2}},
}


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")  # PEFT's, about merging
@for_each("family", ["llama", "gemma2", "qwen3_5_text"])
@for_each("choice", CHOICES)
def test_targets_ranks_and_scales_are_those_of_peft(choice: str, family: str) -> None:
    if family == "qwen3_5_text" and choice in ("default of the family", "one layer", "layers", "alphas", "ranks"):
        family = "qwen3"  # the other has attention in its second layer only, which those choices do not name
    config = LoraConfig(r=4, lora_alpha=16, **CHOICES[choice])
    model = AutoModelForCausalLM.from_config(twin_config(family))
    with torch.device("meta"):
        ours_on = AutoModelForCausalLM.from_config(twin_config(family))
    ours = resolve_targets(ours_on, plan_model(ours_on, Topology()), config, strict=False)
    peft = get_peft_model(model, LoraConfig(r=4, lora_alpha=16, **CHOICES[choice]))
    theirs = {
        name.removeprefix("base_model.model."): (module.r["default"], module.scaling["default"])
        for name, module in peft.named_modules()
        if isinstance(module, LoraLayer)
    }
    assert {name: (t.r, t.scaling) for name, t in ours.items()} == theirs


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("init_lora_weights", "corda"),
        ("init_lora_weights", "lora_ga"),
        ("init_lora_weights", "loftq"),
        ("init_lora_weights", "mica"),
        ("init_lora_weights", "another"),
        ("use_qalora", True),
        ("arrow_config", ArrowConfig()),
        ("velora_config", VeloraConfig()),
        ("use_bdlora", BdLoraConfig()),
        ("kasa_config", KasaConfig()),
        ("loftq_config", {"loftq_bits": 4}),
        ("layer_replication", [(0, 1)]),
    ],
)
def test_option_that_would_not_be_followed_is_refused_by_name(option: str, value: Any) -> None:
    config = LoraConfig(target_modules=["q_proj"])
    setattr(config, option, value)
    with pytest.raises(UnsupportedError, match=option) as error:
        check_supported(config)
    # What is known has words of its own.
    assert ("not supported yet" in str(error.value)) == (option == "lora_bias")


@pytest.mark.parametrize("init", ["pissa_niter_", "pissa_niter_x", "pissa16"])
def test_number_of_iterations_that_is_none_is_refused(init: str) -> None:
    with pytest.raises(UserError, match="pissa_niter_16"):
        check_supported(LoraConfig(target_modules=["q_proj"], init_lora_weights=init))


def _resolved(family: str, **options: Any) -> tuple[list[str], list[str]]:
    """(targets, what is trained of the base)."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(twin_config(family))
    plan, config = plan_model(model, Topology()), LoraConfig(**options)
    targets = resolve_targets(model, plan, config)
    return list(targets), trained_parameters(model, plan, config, targets)


@pytest.mark.parametrize(
    ("family", "end", "other"), [("jamba", "mamba.dt_proj", "q_proj"), ("pegasus", "encoder_attn.k_proj", "fc1")]
)
def test_adapters_that_no_gradient_reaches_are_refused_with_the_way_out(family: str, end: str, other: str) -> None:
    """They would end the first step."""
    given, leaf = end.split(".")
    with pytest.raises(UserError, match=rf"no gradient reaches it; name it in exclude_modules: \[{given}\.{leaf}\]"):
        _resolved(family, target_modules=[leaf])
    assert not [name for name in _resolved(family, target_modules="all-linear")[0] if name.endswith(f".{end}")]
    left, _ = _resolved(family, target_modules=[leaf, other], exclude_modules=[end])
    assert left
    assert not [name for name in left if name.endswith(f".{end}")]


@for_each(
    ("options", "words"),
    [
        ({"target_modules": ["q_proj"], "bias": "some"}, "bias"),
        ({"target_modules": ["q_proj"], "task_type": "SEQ_CLS"}, "is one for CAUSAL_LM"),
        ({"target_modules": ["q_proj"], "use_dora": True, "init_lora_weights": "pissa"}, "use_dora"),
        ({"target_modules": ["embed_tokens"], "lora_bias": True}, "lora_bias with an adapter on the embedding"),
        ({"target_modules": ["q_proj"], "lora_bias": "yes"}, "lora_bias='yes'"),
        (
            {"target_modules": ["embed_tokens"], "init_lora_weights": "pissa"},
            "'pissa' with an adapter on the embedding",
        ),
        ({"target_modules": ["norm"]}, "LoRA on LlamaRMSNorm"),
        (
            {"target_modules": ["embed_tokens"], "init_lora_weights": "orthogonal"},
            "'orthogonal' with an adapter on the",
        ),
        ({"target_modules": ["q_proj"], "modules_to_save": ["lm_haed"]}, "did you mean 'lm_head'"),
        ({"target_modules": ["q_proj"], "modules_to_save": ["q_proj"]}, "'q_proj' of target_modules has no effect"),
        ({"target_modules": ["q_proj"], "modules_to_save": ["proj"]}, "is a target of LoRA too"),
        ({"target_modules": ["q_proj"], "fan_in_fan_out": True}, "no effect"),
        ({"target_modules": ["q_proj"], "modules_to_save": ["mlp", "up_proj"]}, "up_proj: it is in another one"),
    ],
)
def test_what_two_options_would_do_together_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        _resolved("llama", **options)


@pytest.mark.parametrize(
    ("family", "target", "saved", "words"),
    [
        ("qwen3_moe", "q_proj", "mlp", r"experts are not trained in full: model\.layers\.\d\.mlp\.experts"),
        ("gpt2", "c_attn", "0.mlp", r"mlp\.c_fc\.weight in full: it is stored \[in, out\]"),
    ],
)
def test_block_with_what_is_not_trained_in_full_is_refused(family: str, target: str, saved: str, words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        _resolved(family, target_modules=[target], modules_to_save=[saved])


def test_module_to_save_whose_bias_peft_would_store_twice_is_refused() -> None:
    options = {"target_modules": ["c_fc"], "fan_in_fan_out": True, "modules_to_save": ["ln_1"]}
    with pytest.raises(UnsupportedError, match=r"ln_1 with bias='all': PEFT stores its bias twice"):
        _resolved("gpt2", **options, bias="all")
    _, trained = _resolved("gpt2", **options, bias="lora_only")
    assert len(trained) == len(set(trained))
    assert {"transformer.h.0.ln_1.bias", "transformer.h.0.mlp.c_fc.bias"} <= set(trained)
    _, trained = _resolved("llama", target_modules=["q_proj"], modules_to_save=["norm", "model.norm"], bias="all")
    assert len(trained) == len(set(trained))
    assert trained  # norms without a bias may


def test_word_on_how_weights_are_stored_is_taken_from_a_file() -> None:
    """PEFT writes `fan_in_fan_out` of what was trained; a file that has it of a model without Conv1D is read."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(twin_config("llama"))
    config = LoraConfig(target_modules=["q_proj"], fan_in_fan_out=True)
    assert resolve_targets(model, plan_model(model, Topology()), config, strict=False)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"modules_to_save": ["lm_head", "embed_tokens", "input_layernorm"]}),
        ("llama", {"modules_to_save": ["norm"]}),  # PEFT looks at how names end, and so takes all of them
        ("llama", {"modules_to_save": ["0.self_attn.q_proj"]}),  # the other layer's keeps its adapter
        ("gpt2", {"modules_to_save": ["ln_f"], "fan_in_fan_out": True}),
        ("qwen2", {"bias": "all"}),
        ("qwen2", {"bias": "lora_only"}),
        ("gpt_neox_japanese", {"bias": "all"}),  # one is called dense_bias
    ],
)
def test_what_is_trained_of_the_base_is_what_peft_trains(family: str, options: dict[str, Any]) -> None:
    targets = "all-linear" if "bias" in options else None
    _, ours = _resolved(family, target_modules=targets or _some_linear(family), **options)
    model = AutoModelForCausalLM.from_config(twin_config(family))
    peft = get_peft_model(model, LoraConfig(target_modules=targets or _some_linear(family), **options))
    theirs = [name for name, parameter in peft.named_parameters() if parameter.requires_grad and ".lora_" not in name]
    plain = [name.replace(".modules_to_save.default", "").replace(".base_layer", "") for name in theirs]
    assert sorted(ours) == sorted(name.removeprefix("base_model.model.") for name in plain)


def _some_linear(family: str) -> list[str]:
    return ["c_attn"] if family == "gpt2" else ["q_proj"]


def test_config_of_the_caller_is_not_changed() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(twin_config("llama"))
    config = LoraConfig(target_modules="all-linear")
    before = config.to_dict()
    resolve_targets(model, plan_model(model, Topology()), config)
    assert config.to_dict() == before
    assert config.target_modules == "all-linear"


def test_bare_and_dotted_suffix_differ() -> None:
    """`mlp.c_proj` is not bare `c_proj`, which in other families hits attention and MLP."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(twin_config("starcoder2"))
    plan = plan_model(model, Topology())
    dotted = resolve_targets(model, plan, LoraConfig(target_modules=["mlp.c_proj"]))
    assert all(name.endswith("mlp.c_proj") for name in dotted)
    with pytest.raises(UserError, match="matches no linear"):
        resolve_targets(model, plan, LoraConfig(target_modules=["self_attn.c_proj"]))


def test_a_text_of_exclude_modules_that_matches_some_leaves_the_others() -> None:
    targets, _ = _resolved("llama", target_modules="all-linear", exclude_modules=r".*\.(mlp\..*|[qkv]_proj)")
    assert targets == [f"model.layers.{layer}.self_attn.o_proj" for layer in (0, 1)]


@pytest.mark.parametrize(
    ("name", "words"), [("", "is not empty"), ("a.b", "no dot"), ("a/b", "slash"), ("default", "already")]
)
def test_name_that_an_adapter_cannot_have_is_refused(name: str, words: str) -> None:
    model = meshlora.load(twin_config("llama"), lora=LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(UserError, match=words):
        meshlora.add_adapter(model, name, LoraConfig(target_modules=["v_proj"]))

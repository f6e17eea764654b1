"""Mistakes in a model's folder: its configuration, its weights, its tokenizer."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.for_each import for_each
from tests.unit.mistakes import UP, Case, Setup, case, check_mistake, remove, setting, several, text, truncate

pytestmark = pytest.mark.usefixtures("nothing_has_happened_yet")


def index_of_a_missing_shard(s: Setup) -> None:
    names = load_file(s.model / "model.safetensors").keys()
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, "model-00001-of-00002.safetensors")}
    (s.model / "model.safetensors.index.json").write_text(json.dumps(index))
    (s.model / "model.safetensors").unlink()


def index_that_maps_a_weight_to_the_wrong_shard(s: Setup) -> None:
    tensors = load_file(s.model / "model.safetensors")
    (s.model / "model.safetensors").unlink()
    moved = f"{UP}.weight"
    rest = {name: tensor for name, tensor in tensors.items() if name != moved}
    save_file(rest, s.model / "a.safetensors", metadata={"format": "pt"})
    weight_map = dict.fromkeys(tensors, "a.safetensors")
    (s.model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def pickled_weights_only(s: Setup) -> None:
    torch.save(load_file(s.model / "model.safetensors"), s.model / "pytorch_model.bin")
    (s.model / "model.safetensors").unlink()


MISTAKES: dict[str, Case] = {
    # The model.
    "model_type_that_sets_the_title_of_a_terminal": case(
        lambda s: s.config(model_type="\x1b]0;title\x07"), "\\x1b]0;title\\x07"
    ),
    "model_folder_missing": case(
        setting("model.path", "nowhere/llama"), "nowhere/llama", "no such folder", "hf download"
    ),
    "model_path_is_a_file": case(
        lambda s: s.set("model.path", str(s.model / "config.json")), "config.json", "it is a file", "folder"
    ),
    "config_missing": case(remove("model/config.json"), "no config.json", "folder of one checkpoint"),
    "config_cut_short": case(truncate("model/config.json", 100), "config.json", "not a readable JSON file"),
    "config_is_a_list": case(text("model/config.json", "[]"), "config.json"),
    "config_of_a_wrong_type": case(
        lambda s: s.config(num_attention_heads="many"), "config.json", "num_attention_heads"
    ),
    "config_that_does_not_fit_itself": case(lambda s: s.config(hidden_size=60), "hidden", "60"),
    "config_without_model_type": case(text("model/config.json", "{}"), "config.json", "model_type"),
    "unknown_model_type": case(lambda s: s.config(model_type="lama"), "config.json", "'lama'", "did you mean 'llama'?"),
    "encoder_decoder": case(lambda s: s.family("pix2struct"), "pix2struct", "those that read text alone"),
    "mixture_of_experts": case(
        several(setting("topology", "dp=2,ep=2"), lambda s: setattr(s, "nproc", 2), lambda s: s.family("dbrx")),
        "DbrxExperts",
        "do not have the form that most families share",
        "leave out ep and etp",
    ),
    "family_without_a_tp_plan": case(
        lambda s: s.family("kosmos-2"), "kosmos", "neither transformers nor meshlora has a tensor-parallel plan", "tp=1"
    ),
    "family_that_transformers_changes_on_loading": case(lambda s: s.family("youtu"), "youtu", "padding token"),
    "quantised_checkpoint": case(
        lambda s: s.config(quantization_config={"quant_method": "quanto", "bits": 4}), "quantised", "are read"
    ),
    "dropout_in_the_model": case(
        lambda s: s.config(attention_dropout=0.1), "attention_dropout=0.1", "on the topology", "disable_dropout: unsupp"
    ),
    "dropout_disabled_in_other_words": case(
        setting("model.disable_dropout", "attention"), "'attention'", "true or false or 'unsupported'"
    ),
    "attention_that_is_not_known": case(setting("model.attn_implementation", "fast"), "fast", "eager"),
    "attention_that_is_not_installed": case(
        setting("model.attn_implementation", "flash_attention_2"),
        "llama",
        "cannot build it",
        "FlashAttention2",
        "use model.attn_implementation: sdpa",
    ),
    "no_attention_heads": case(lambda s: s.config(num_attention_heads=0), "config.json", "ZeroDivisionError"),
    "pickled_weights_only": case(pickled_weights_only, "pickled", "unpickles nothing", "convert it"),
    "no_weights": case(remove("model/model.safetensors"), "no model.safetensors"),
    "weights_cut_short": case(truncate("model/model.safetensors", 5000), "model.safetensors", "damaged", "again"),
    "weights_empty": case(truncate("model/model.safetensors", 0), "model.safetensors", "damaged", "again"),
    "index_of_a_missing_shard": case(
        index_of_a_missing_shard, "index.json", "model-00001-of-00002.safetensors", "not in the folder"
    ),
    "index_is_a_list": case(text("model/model.safetensors.index.json", "[]"), "index.json", "weight_map"),
    "index_maps_a_weight_to_the_wrong_shard": case(
        index_that_maps_a_weight_to_the_wrong_shard, "lacks 1 weights", f"{UP}.weight"
    ),
    "weight_missing": case(
        lambda s: s.weights(lambda t: t.pop(f"{UP}.weight")), "lacks 1 weights", f"{UP}.weight", "did you mean"
    ),
    "weight_of_unexpected_name": case(
        lambda s: s.weights(lambda t: t.update({"model.extra.weight": torch.zeros(2)})),
        "model.extra.weight",
        "no place in LlamaForCausalLM",
        "allow_unused_weights",
    ),
    "weight_of_wrong_shape": case(
        lambda s: s.weights(lambda t: t.update({f"{UP}.weight": torch.zeros(96, 64)})),
        f"{UP}.weight",
        "[96, 64]",
        "[128, 64]",
    ),
    "weight_of_integers": case(
        lambda s: s.weights(lambda t: t.update({f"{UP}.weight": torch.zeros(128, 64, dtype=torch.int8)})),
        f"{UP}.weight",
        "integers",
        "has no quantization_config",
    ),
    # The tokenizer.
    "tokenizer_missing": case(
        remove("model/tokenizer.json", "model/tokenizer_config.json"),
        "tokenizer in",
        "cannot be loaded",
        "tokenizer.json",
    ),
    "tokenizer_damaged": case(truncate("model/tokenizer.json", 1000), "tokenizer in", "cannot be loaded", "whole"),
    "tokenizer_larger_than_the_vocabulary": case(
        several(
            lambda s: s.config(vocab_size=2000),
            lambda s: s.weights(lambda t: t.update({n: t[n][:2000].clone() for n in t if t[n].shape[0] == 2048})),
        ),
        "2048",
        "2000",
    ),
    "max_length_above_the_positions": case(
        setting("data.max_length", 4096), "data.max_length=4096", "128 positions", "at most 128"
    ),
}


@for_each("mistake", MISTAKES.values(), ids=MISTAKES.keys())
def test_mistake_is_one_clear_message(
    mistake: Case, setups: Callable[[], Setup], capfd: pytest.CaptureFixture[str]
) -> None:
    check_mistake(mistake, setups(), capfd)

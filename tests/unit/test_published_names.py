"""Checkpoints under the names that are published: transformers renames and transposes on loading, and some weights in
the files are no part of the model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText
from transformers.core_model_loading import Split, WeightConverter

from meshlora.loading.blueprint import read_model_config
from meshlora.loading.load import load
from meshlora.model.stored import Part, StoredTensor, _pieces
from meshlora.model.weights import CheckpointSource, check_checkpoint, extra_weights
from meshlora.run.config.file import read_run
from meshlora.run.evaluate import prepare_evaluation
from meshlora.run.together import prepare_run
from meshlora.verify.options import Request
from meshlora.verify.request import prepare_proof
from meshlora_extra.merging.merge import merge
from meshlora_ground.errors import UserError
from meshlora_ground.model_class import own_class, take_quantization
from meshlora_ground.topology import Topology
from meshlora_judge.inputs import write_twin
from meshlora_judge.twin import twin_config
from tests.blueprints import build_meta
from tests.unit.mistakes import Setup
from tests.unit.test_expert_weights import FILE, make_checkpoint

_ATTENTION = "layers.0.self_attn.q_proj.weight"
# Family -> the name in published files, and in the model, of one weight.
RENAMED = {
    "gemma3": (f"language_model.model.{_ATTENTION}", f"model.language_model.{_ATTENTION}"),
    "mistral3": (f"language_model.model.{_ATTENTION}", f"model.language_model.{_ATTENTION}"),
    "qwen2_5_vl": (f"model.{_ATTENTION}", f"model.language_model.{_ATTENTION}"),
    "internvl": (f"language_model.model.{_ATTENTION}", f"model.language_model.{_ATTENTION}"),
}
EXPERTS = ("gate_up_proj", "down_proj")


def _load(folder: Path) -> Any:
    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)


def _published(folder: Path, family: str) -> tuple[dict[str, Tensor], CheckpointSource]:
    """(the weights as transformers loads them, ours) of a twin that is stored under its published names."""
    config = twin_config(family)
    if family == "qwen3_vl_moe":
        config.text_config.moe_intermediate_size = 24  # or gate and up would be square, which shows nothing
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        parameter.data.normal_()
    model.save_pretrained(folder)
    if family == "qwen3_vl_moe":  # by hand: [E, 2 I, H] in the model, [E, H, 2 I] in the file
        tensors = {name: value for name, value in model.state_dict().items() if name != "lm_head.weight"}
        tensors |= {name: tensors[name].mT.contiguous() for name in tensors if name.endswith(EXPERTS)}
        tensors["lm_head.weight"] = model.state_dict()["lm_head.weight"].clone()
        save_file({name: value.clone() for name, value in tensors.items()}, folder / FILE, metadata={"format": "pt"})
    loaded = _load(folder)
    with torch.device("meta"):
        meta = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    return dict(loaded.named_parameters()), CheckpointSource(folder, meta)


@pytest.mark.parametrize("family", ["gemma3", *(pytest.param(f, marks=pytest.mark.proof) for f in [*RENAMED][1:])])
def test_old_names_are_read_as_transformers_reads_them(family: str, tmp_path: Path) -> None:
    expected, source = _published(tmp_path, family)
    there, here = RENAMED[family]
    assert there in load_file(tmp_path / FILE)
    assert here in expected
    assert all(torch.equal(source.read(name), value) for name, value in expected.items())


def test_experts_that_are_stored_transposed_are_read_as_transformers_reads_them(tmp_path: Path) -> None:
    """Whole, and in the slices of a rank."""
    expected, source = _published(tmp_path, "qwen3_vl_moe")
    stored = load_file(tmp_path / FILE)
    names = [name for name in expected if name.endswith(EXPERTS)]
    assert all(stored[name].shape == expected[name].mT.shape != expected[name].shape for name in names)
    assert all(torch.equal(source.read(name), value) for name, value in expected.items())
    for name in names:
        parts = Part(0, 1, 2), Part(1, 3, 9), Part(1, 12, 15), Part(2, 5, 8)
        rows = [*range(3, 9), *range(12, 15)]
        assert torch.equal(source.read(name, *parts), expected[name][1:2, rows, 5:8])


def test_rows_of_a_fused_matrix_are_read_as_transformers_cuts_and_orders_them(tmp_path: Path) -> None:
    """Whole, and in slices: q and k by halves of each head."""
    expected, source = _published(tmp_path, "kimi_k25")
    names = [name for name in expected if "vision_tower" in name and "_proj." in name]
    assert {name.rpartition("attn.")[2] for name in names} >= {"q_proj.weight", "k_proj.bias", "v_proj.weight"}
    assert not {*load_file(tmp_path / FILE)} & {*names}
    assert all(torch.equal(source.read(name), value) for name, value in expected.items())
    name = next(name for name in names if name.endswith("q_proj.weight"))
    assert source.mistake(name, tuple(expected[name].shape)) is None
    part = source.read(name, Part(0, 3, 9), Part(0, 12, 15), Part(1, 5, 8))
    assert torch.equal(part, expected[name][[*range(3, 9), *range(12, 15)], 5:8])


# inkling2_text interleaves gate and up of stacks along their second dim, and in transformers 5.24 pads its head;
# sarvam_moe, of 5.24, has q, k and v of three sizes in one.
@pytest.mark.parametrize("family", sorted({"inkling2_text", "sarvam_moe"} & {*CONFIG_MAPPING}))
def test_rows_that_a_conversion_chooses_are_read_as_transformers_chooses_them(family: str, tmp_path: Path) -> None:
    """Whole, and in slices of the dim that is chosen from, and of others."""
    config = twin_config(family)
    write_twin(config, tmp_path, dtype=torch.float32, seed=0)
    expected = dict(own_class(config).from_pretrained(tmp_path).named_parameters())
    with torch.device("meta"):
        model = own_class(config)(config)
    source = CheckpointSource(tmp_path, model)
    chosen = [name for name, stored in source.stored.items() if stored.tensors[0].rows is not None]
    assert len(chosen) >= 4
    assert [name for name, value in expected.items() if not torch.equal(source.read(name), value)] == []
    for name in chosen:
        dim = source.stored[name].tensors[0].rows_dim
        part = source.read(name, Part(dim, 3, 9), Part(dim, 12, 15), Part(2 * dim, 1, 3) if dim else Part(1, 5, 8))
        rows = expected[name].index_select(dim, torch.tensor([*range(3, 9), *range(12, 15)]))
        assert torch.equal(part, rows[..., 1:3] if dim else rows[:, 5:8]), name


def test_rows_of_other_sizes_than_the_models_are_one_message() -> None:
    """Not those of `torch.split`."""
    converter = WeightConverter("query_key_value", ["q_proj", "k_proj"], [Split(dim=0)])
    model = SimpleNamespace(config=None, get_parameter=lambda _: torch.empty(4, 2, device="meta"))
    tensor = StoredTensor.in_memory("query_key_value.weight", torch.zeros(9, 2))
    with pytest.raises(UserError, match=r"query_key_value.weight \[9, 2\]: .*split_sizes"):
        list(_pieces(tensor, converter, model, "q_proj.weight"))


def test_a_matrix_that_is_cut_on_loading_is_merged_as_what_it_becomes(tmp_path: Path) -> None:
    _published(tmp_path / "model", "kimi_k25")
    adapted = get_peft_model(_load(tmp_path / "model"), LoraConfig(r=2, target_modules=r".*vision_tower.*\.q_proj"))
    for parameter in adapted.parameters():
        parameter.data.normal_()  # of the base too, which is read anew below
    adapted.save_pretrained(tmp_path / "adapter")
    config = read_model_config(tmp_path / "model")
    merge(tmp_path / "model", tmp_path / "adapter", tmp_path / "out", config=config, check_logits=False)
    expected = PeftModel.from_pretrained(_load(tmp_path / "model"), tmp_path / "adapter").merge_and_unload()
    found = _load(tmp_path / "out").state_dict()
    assert all(torch.allclose(found[name], value) for name, value in expected.state_dict().items())


def test_few_bits_of_which_the_text_part_speaks_are_those_of_the_model(tmp_path: Path) -> None:
    config = twin_config("kimi_k25")
    for method, is_known in (("compressed-tensors", True), ("of its own", False)):
        config.text_config.quantization_config = {"quant_method": method, "format": "pack-quantized"}
        config.save_pretrained(tmp_path)
        if is_known:
            read = read_model_config(tmp_path)
            assert take_quantization(read) == config.text_config.quantization_config
            assert take_quantization(read) is None
        else:
            with pytest.raises(UserError, match="quant_method 'of its own'"):
                read_model_config(tmp_path)


# Family -> the names of weights that are passed over, and of which kind they are.
EXTRA: dict[str, tuple[str, dict[str, Any], tuple[str, ...], str]] = {
    "heads beside the model": ("qwen3_next", {}, ("mtp.fc.weight", "mtp.layers.0.mlp.gate.weight"), "multi-token"),
    "a layer after the last": (
        "deepseek_v3",
        {"num_nextn_predict_layers": 1},
        ("model.layers.{n}.eh_proj.weight", "model.layers.{n}.mlp.experts.1.up_proj.weight"),
        "multi-token",
    ),
    "a tower": ("llama", {}, ("model.visual.patch.weight", "multi_modal_projector.weight"), "other modalities"),
    "a buffer": ("llama", {}, ("model.layers.0.self_attn.rotary_emb.inv_freq",), "that are computed"),
}


@pytest.mark.parametrize("extra", EXTRA)
def test_known_weights_without_a_place_are_passed_over_by_name_and_others_not(extra: str, tmp_path: Path) -> None:
    family, values, names, kind = EXTRA[extra]
    config = make_checkpoint(tmp_path, family, **values)
    tensors = load_file(tmp_path / FILE)
    names = tuple(name.format(n=config.num_hidden_layers) for name in names)
    model, _ = build_meta(config, Topology(), dtype=torch.float32)
    assert extra_weights(model, CheckpointSource(tmp_path, model)) == ""
    save_file(tensors | {name: torch.zeros(2, 2) for name in names}, tmp_path / FILE, metadata={"format": "pt"})
    source = CheckpointSource(tmp_path, model)
    check_checkpoint(model, source)
    said = extra_weights(model, source)
    assert f"{len(names)} weights of" in said
    assert kind in said
    assert f"first {sorted(names)[0]}" in said


@pytest.mark.parametrize(
    "name", ["model.layers.{n}.mlp.up_proj.weight", "model.layers.0.mtp_gate", "value_head.weight"]
)
def test_weights_that_nobody_knows_are_refused(name: str, tmp_path: Path) -> None:
    config = make_checkpoint(tmp_path, "llama", num_nextn_predict_layers=1)
    name = name.format(n=config.num_hidden_layers + 1)
    save_file(load_file(tmp_path / FILE) | {name: torch.zeros(2, 2)}, tmp_path / FILE, metadata={"format": "pt"})
    model, _ = build_meta(config, Topology(), dtype=torch.float32)
    with pytest.raises(UserError, match=r"1 of its weights have no place"):
        check_checkpoint(model, CheckpointSource(tmp_path, model))


def _passed_over(notes: Sequence[str]) -> list[str]:
    return [note for note in notes if "passed over" in note]


def test_each_command_says_in_one_line_what_is_passed_over(setup: Setup, caplog: pytest.LogCaptureFixture) -> None:
    setup.weights(lambda tensors: tensors.update({"mtp.fc.weight": torch.zeros(2, 2), "mtp.norm": torch.zeros(2)}))
    setup.write()
    expected = (
        f"2 weights of checkpoint {setup.model} are passed over: 2 of multi-token prediction, first mtp.fc.weight"
    )
    run = read_run(setup.folder / "run.yaml")
    assert _passed_over(prepare_run(run).notes) == [expected]
    run = dataclasses.replace(run, topology="", data=dataclasses.replace(run.data, eval=run.data.train))
    assert _passed_over(prepare_evaluation(run, adapter=None).notes) == [expected]
    assert prepare_proof(Request(("dp=1",), model=str(setup.model))).notes == (expected,)
    with caplog.at_level("WARNING"):
        load(setup.model)
    assert [record.getMessage() for record in caplog.records if "passed over" in record.getMessage()] == [expected]


def test_proof_of_a_checkpoint_that_lacks_weights_is_refused(setup: Setup) -> None:
    setup.weights(lambda tensors: tensors.pop(sorted(tensors)[0]))
    with pytest.raises(UserError, match="it lacks 1 weights"):
        prepare_proof(Request(("dp=1",), model=str(setup.model)))

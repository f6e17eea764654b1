"""Merging into few bits: what transformers reads of it is the published rounding of what is merged without it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoConfig

from meshlora.loading.blueprint import make_blueprint, read_model_config
from meshlora.plan.base_options import BaseOptions
from meshlora_extra.merging.merge import merge
from meshlora_ground.errors import UnsupportedError
from meshlora_ground.topology import Topology
from meshlora_judge.inputs import write_twin
from meshlora_judge.packed import load_base
from meshlora_judge.quantized import _fp8, _mxfp4
from meshlora_judge.twin import twin_config
from tests.packed import write_packed

MOE = {"hidden_size": 64, "moe_intermediate_size": 256}


def _adapter(folder: Path, base: Path, parameters: list[str]) -> Path:
    """Random factors on q_proj, and on these parameters of experts."""
    model = _loaded(base)
    lora = LoraConfig(r=2, target_modules=["q_proj"], target_parameters=parameters, init_lora_weights=False)
    get_peft_model(model, lora).save_pretrained(str(folder), save_embedding_layers=False)
    return folder


def _loaded(folder: Path) -> Any:
    config = AutoConfig.from_pretrained(folder)
    return load_base(folder, config, dtype=torch.float32, local_files_only=True, trust_remote_code=False)


@pytest.mark.parametrize(
    ("family", "kind", "parameters", "left"),
    [
        ("llama", "fp8", [], ["lm_head", "model.layers.0.mlp.down_proj", "model.layers.0.mlp.gate_proj"]),
        ("qwen3_moe", "fp8", ["experts.gate_up_proj", "experts.down_proj"], ["lm_head"]),
        ("gpt_oss", "mxfp4", ["experts.gate_up_proj", "experts.down_proj"], []),
    ],
)
def test_it_is_the_published_rounding_of_what_is_merged(
    family: str, kind: str, parameters: list[str], left: list[str], tmp_path: Path
) -> None:
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    if kind == "mxfp4":
        write_packed(base, "mxfp4")
    else:
        sizes = MOE if family == "qwen3_moe" else {"hidden_size": 64, "intermediate_size": 192}
        write_twin(twin_config(family, **sizes), base, dtype=torch.float32, seed=0)
    _adapter(adapter, base, parameters)
    options = {"config": read_model_config(base), "dtype": torch.float32}
    merge(base, adapter, tmp_path / "plain", check_logits=False, **options)
    done = merge(base, adapter, tmp_path / "few", quantize=kind, **options)
    stored = json.loads((tmp_path / "few" / "config.json").read_text())["quantization_config"]
    assert stored["quant_method"] == kind
    plain, theirs = (dict(_loaded(tmp_path / name).state_dict()) for name in ("plain", "few"))
    ours = make_blueprint(tmp_path / "few", Topology(), BaseOptions(dtype="float32")).weights()
    error = weight = 0.0
    rounded = set()
    for name, value in plain.items():
        expected = _rounded(value, kind)
        if not torch.equal(theirs[name], value):
            assert torch.equal(theirs[name], expected), name
            rounded.add(name)
            error += float((expected - value).double().square().sum())
            weight += float(value.double().square().sum())
        assert torch.equal(ours.read(name).float(), theirs[name]), name
    assert all(any(name.endswith(end) for name in rounded) for end in (parameters or ["q_proj.weight"]))
    assert f"{(error / weight) ** 0.5:.1e} of their norm is lost by rounding" in done.check
    if kind == "fp8":
        assert not {f"{name}.weight" for name in stored["modules_to_not_convert"]} & rounded
        assert set(left) <= set(stored["modules_to_not_convert"])
    assert ("stay plain, as blocks of 128 do not divide them" in done.check) == (family == "llama")


def _rounded(value: Tensor, kind: str) -> Tensor:
    if value.ndim == 1 or (kind == "mxfp4" and value.ndim == 2):
        return value
    matrices = [value] if value.ndim == 2 else [*value]
    if kind == "mxfp4":
        found = [_mxfp4(matrix.T.contiguous()).T for matrix in matrices]
    elif value.ndim == 3 and value.shape[1] == 2 * MOE["moe_intermediate_size"]:  # two matrices on disk
        found = [torch.cat([_fp8(half) for half in matrix.chunk(2)]) for matrix in matrices]
    else:
        found = [_fp8(matrix) for matrix in matrices]
    return found[0] if value.ndim == 2 else torch.stack(found)


@pytest.mark.parametrize(
    ("family", "kind", "words"),
    [
        ("llama", "mxfp4", "only experts that are stored in mxfp4 are written in it"),
        ("gpt_oss", "fp8", "its experts are one tensor, and fp8 stores them one by one"),
        ("llama", "fp8", "blocks of 128 divide no matrix"),
    ],
)
def test_what_cannot_be_written_is_refused_before_anything_is(
    family: str, kind: str, words: str, tmp_path: Path
) -> None:
    sizes = {} if family == "gpt_oss" else {"hidden_size": 192, "intermediate_size": 320, "head_dim": 48}
    base = tmp_path / "base"
    write_twin(twin_config(family, **sizes), base, dtype=torch.float32, seed=0)
    _adapter(tmp_path / "adapter", base, [])
    with pytest.raises(UnsupportedError, match=words):
        merge(base, tmp_path / "adapter", tmp_path / "o", config=read_model_config(base), quantize=kind)
    assert not (tmp_path / "o").exists()

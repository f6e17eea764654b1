"""Checkpoints in few bits: the numbers that transformers makes of them, else those of the published formula."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from meshlora.adapter.merging.merge import merge
from meshlora.common.errors import UnsupportedError, UserError
from meshlora.config.run import BaseOptions
from meshlora.loading.blueprint import make_blueprint, read_model_config
from meshlora.model.packed import BlockFloat8, Mxfp4
from meshlora.model.stored import Part
from meshlora.model.weights import CheckpointSource, check_checkpoint
from meshlora.oracle.reference import as_plain_numbers
from meshlora.plan.topology import Topology
from tests.packed import FAMILIES, write_packed

SIZES = {"hidden_size": 64, "intermediate_size": 96}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Family -> a checkpoint, written once."""
    root = tmp_path_factory.mktemp("packed")
    return functools.cache(lambda family: write_packed(root / family, family))


def _source(folder: Path) -> CheckpointSource:
    model = make_blueprint(folder, Topology(), BaseOptions(dtype="float64")).model
    source = CheckpointSource(folder, model)
    check_checkpoint(model, source)
    return source


@pytest.mark.parametrize("family", FAMILIES)
def test_every_number_is_that_of_transformers(family: str, folders: Any) -> None:
    folder = folders(family)
    source, plain = _source(folder), as_plain_numbers(AutoConfig.from_pretrained(folder))
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, **plain)
    assert source.packed() is not None
    differ = [name for name, value in theirs.named_parameters() if not torch.equal(source.read(name).double(), value)]
    assert differ == []


@pytest.mark.parametrize("family", FAMILIES)
def test_slice_that_crosses_blocks_is_that_of_the_whole(family: str, folders: Any) -> None:
    """Of every weight in few bits; of experts too, one of which is left out."""
    source = _source(folders(family))
    names = [name for name, stored in source.stored.items() if any(t.packed for t in stored.tensors)]
    assert len(names) >= 4
    for name in names:
        whole = source.read(name)
        bounds = [(1, size - 1 if size < 9 else size - 5) for size in whole.shape]
        parts = [Part(dim, *bound) for dim, bound in enumerate(bounds)]
        assert torch.equal(source.read(name, *parts), whole[tuple(slice(*bound) for bound in bounds)]), name
        last = whole.ndim - 1
        both = source.read(name, Part(last, 3, 7), Part(last, 33, 40))
        assert torch.equal(both, torch.cat([whole[..., 3:7], whole[..., 33:40]], last)), name


def _read(codes: Tensor, scales: Tensor, block: list[int] | None = None) -> Tensor:
    packing = BlockFloat8.of(tuple(codes.shape), tuple(scales.shape), block)
    assert packing is not None

    def reader(tensor: Tensor) -> Any:
        return lambda bounds: tensor[tuple(slice(*bound) for bound in bounds)] if tensor.ndim > 1 else tensor

    return packing.read([(0, size) for size in codes.shape], reader(codes), reader(scales))


def test_no_more_is_read_than_the_blocks_of_a_slice() -> None:
    asked = []

    def reader(tensor: Tensor) -> Any:
        def read(bounds: Any) -> Tensor:
            asked.append(list(bounds))
            return tensor[tuple(slice(*bound) for bound in bounds)]

        return read

    codes, scales = torch.zeros(4, 6, 3, 16, dtype=torch.uint8), torch.zeros(4, 6, 3, dtype=torch.uint8)
    Mxfp4().read([(1, 2), (40, 50), (3, 5)], reader(codes), reader(scales))
    assert asked == [[(1, 2), (3, 5), (1, 2), (0, 16)], [(1, 2), (3, 5), (1, 2)]]
    asked.clear()
    BlockFloat8((32, 16)).read([(33, 40), (15, 17)], reader(torch.zeros(64, 64)), reader(torch.zeros(2, 4)))
    assert asked == [[(33, 40), (15, 17)], [(1, 2), (0, 2)]]


def test_last_blocks_may_be_partial() -> None:
    """transformers divides such a matrix into equal blocks: it refuses, or where that comes out even, it is wrong."""
    codes = torch.randn(200, 300).to(torch.float8_e4m3fn)
    scales = torch.rand(2, 3) + 0.5
    expected = torch.stack(
        [torch.stack([codes[i, j].float() * scales[i // 128, j // 128] for j in range(300)]) for i in range(0, 200, 9)]
    )
    assert torch.equal(_read(codes, scales, [128, 128])[::9], expected)


@pytest.mark.parametrize("shape", [(), (1,), (6, 1), (6,)])
def test_one_scale_for_a_matrix_or_for_each_row(shape: tuple[int, ...]) -> None:
    codes, scales = torch.randn(6, 10).to(torch.float8_e4m3fn), torch.rand(shape) + 0.5
    rows = scales.reshape(-1, 1) if scales.numel() > 1 else scales.reshape(1, 1)
    assert torch.equal(_read(codes, scales.reshape(-1, 1) if shape == (6,) else scales), codes.float() * rows)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu])
def test_scales_may_be_exponents(dtype: torch.dtype) -> None:
    codes, exponents = torch.randn(4, 8).to(torch.float8_e4m3fn), torch.tensor([[120, 127], [130, 125]])
    scales = exponents.to(torch.uint8).view(dtype) if dtype != torch.uint8 else exponents.to(torch.uint8)
    factors = (2.0 ** (exponents - 127)).repeat_interleave(2, 0).repeat_interleave(4, 1)
    assert torch.equal(_read(codes, scales, [2, 4]), codes.float() * factors)


def test_scales_of_activations_are_passed_over(tmp_path: Path) -> None:
    folder = write_packed(tmp_path / "model", "llama")
    file = folder / "model.safetensors"
    tensors = load_file(file)
    name = next(key for key in tensors if key.endswith(".q_proj.weight"))
    save_file(tensors | {f"{name.removesuffix('weight')}activation_scale": torch.ones(())}, file)
    assert name in _source(folder).stored


def _damage(folder: Path, change: str) -> None:
    config, file = folder / "config.json", folder / "model.safetensors"
    tree, tensors = json.loads(config.read_text()), load_file(file)
    quantization = tree["quantization_config"]
    scales = next(key for key in tensors if key.endswith(("down_proj.weight_scale_inv", "down_proj_scales")))
    if change == "method":
        quantization["quant_method"] = "gptq"
    elif change == "experts in four bits":
        quantization["expert_dtype"] = "fp4"
    elif change == "block":
        quantization["weight_block_size"] = [0, 128]
    elif change == "no scales":
        del tensors[scales]
    else:
        tensors[scales] = tensors[scales][..., :1].clone()
    config.write_text(json.dumps(tree))
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("family", "change", "words"),
    [
        ("llama", "method", r"quant_method 'gptq': of checkpoints that are quantised only fp8 and mxfp4 are read"),
        ("llama", "experts in four bits", "only fp8 and mxfp4 are read"),
        ("llama", "block", r"weight_block_size \[0, 128\]: it must be \[rows, columns\]"),
        ("llama", "no scales", r"down_proj\.weight: no scales are beside it"),
        ("gpt_oss", "no scales", r"down_proj_blocks: no scales are beside it"),
        ("llama", "fewer scales", r"down_proj\.weight: its scales have the shape \[2, 1\]"),
        ("gpt_oss", "fewer scales", r"down_proj_blocks: its scales have the shape"),
    ],
)
def test_what_cannot_be_read_is_one_clear_message(family: str, change: str, words: str, tmp_path: Path) -> None:
    folder = write_packed(tmp_path / "model", family)
    _damage(folder, change)
    with pytest.raises((UserError, UnsupportedError), match=words):
        _source(folder)


def test_quantising_twice_and_merging_are_refused(folders: Any, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="its checkpoint is quantised already"):
        make_blueprint(folders("llama"), Topology(), BaseOptions(dtype="float64", quantization="nf4"))
    with pytest.raises(UnsupportedError, match="merging into few bits is not supported yet"):
        merge(folders("llama"), tmp_path / "adapter", tmp_path / "merged", config=read_model_config(folders("llama")))

"""Checkpoints in few bits: the numbers that transformers makes of them, else those of the published formula."""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig

from meshlora.loading.blueprint import make_blueprint, read_model_config
from meshlora.model.stored import Bounds, Part
from meshlora.model.stream import _NUM_BYTES
from meshlora.model.weights import CheckpointSource
from meshlora.plan.base_options import BaseOptions
from meshlora.verify.options import Request
from meshlora.verify.request import prepare_proof
from meshlora.wings.quantized.fp4 import Fp4
from meshlora.wings.quantized.grouped_ints import GroupedInts
from meshlora.wings.quantized.keep_packed import keep, packings
from meshlora.wings.quantized.kinds import FACTOR_BYTES
from meshlora.wings.quantized.packed import Blocks4, Blocks8, Mxfp4, find_packed
from meshlora_extra.merging.merge import merge
from meshlora_ground.errors import UnsupportedError, UserError
from meshlora_ground.topology import Topology
from meshlora_judge.packed import load_base, plain_numbers
from tests.for_each import for_each
from tests.packed import KEPT, PUBLISHED, write_packed

DATA = Path(__file__).resolve().parents[1] / "data"
SIZES = {"hidden_size": 64, "intermediate_size": 96}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Case -> a checkpoint, written once."""
    root = tmp_path_factory.mktemp("packed")
    return functools.cache(lambda case: write_packed(root / case, case))


def _source(folder: Path) -> CheckpointSource:
    blueprint = make_blueprint(folder, Topology(), BaseOptions(dtype="float64"))
    blueprint.check_weights()
    return blueprint.weights()


@pytest.mark.parametrize("case", PUBLISHED)
def test_every_number_is_that_of_the_reference(case: str, folders: Any) -> None:
    folder = folders(case)
    source, config = _source(folder), AutoConfig.from_pretrained(folder)
    theirs = load_base(folder, config, dtype=torch.float64, local_files_only=True, trust_remote_code=False)
    assert source.packed() is not None
    differ = [name for name, value in theirs.named_parameters() if not torch.equal(source.read(name).double(), value)]
    assert differ == []


@for_each("case", PUBLISHED)
def test_slice_that_crosses_blocks_is_that_of_the_whole(case: str, folders: Any) -> None:
    """Of every weight in few bits; of experts too, one of which is left out."""
    source = _source(folders(case))
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


@for_each("case", KEPT)
def test_what_stays_packed_has_the_same_numbers(case: str, folders: Any) -> None:
    """Whole, and slices that cross blocks; no more bytes than are stored, but for scales of 8 bits that become 32,
    and a factor in each row."""
    source = _source(folders(case))
    names = list(packings(source))
    assert len(names) >= 4
    for name in names:
        whole, kept = source.read(name), keep(source, name)
        assert torch.equal(kept.whole(), whole), name
        stored = [part for t in source.stored[name].tensors if t.packed for part in t.packed[1].values()]
        num_bytes = sum(math.prod(part.shape) * _NUM_BYTES[part.dtype] for part in stored)
        of_rows = FACTOR_BYTES.get(kept.form.kind, 0) * math.prod(kept.codes.shape[:-1])
        in_bytes = {"gptq of 3 bits": 4 / 3, "gptq of 2 bits": 2}.get(case, 1)  # fewer bits take 4
        assert kept.codes.nbytes + kept.scales.nbytes - of_rows <= 1.1 * num_bytes * in_bytes
        for dim in (whole.ndim - 2, whole.ndim - 1):
            parts, size = [Part(dim, 2, 16), Part(dim, whole.shape[dim] - 12, whole.shape[dim])], whole.shape[dim]
            index = torch.tensor([*range(2, 16), *range(size - 12, size)])
            part = keep(source, name, *parts)
            assert torch.equal(part.whole(), whole.index_select(dim, index)), name
            assert part.shape == part.whole().shape


_GROUPS = {"group_size": 16, "num_bits": 4}
_OF_LIBRARIES = {
    "gptq.2": {"quant_method": "gptq", "bits": 2},
    "gptq.3": {"quant_method": "gptq", "bits": 3},
    "gptq.4": {"quant_method": "gptq", "bits": 4},
    "gptq_v2.4": {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"},
    "gptq.8": {"quant_method": "gptq", "bits": 8},
    "awq.4": {"quant_method": "awq", "bits": 4},
    "compressed-tensors.4": {"config_groups": {"a": {"weights": _GROUPS}}},
    "compressed-tensors with zeros.4": {"config_groups": {"a": {"weights": _GROUPS}}},
    "compressed-tensors with zeros.8": {"config_groups": {"a": {"weights": _GROUPS | {"num_bits": 8}}}},
}


class _Known(NamedTuple):
    shape: tuple[int, ...]
    dtype: str


@pytest.mark.parametrize("case", _OF_LIBRARIES)
def test_integers_that_libraries_packed_have_their_numbers(case: str) -> None:
    """Packed and unpacked once by gptqmodel, autoawq and compressed-tensors (versions: metadata of the file)."""
    quantization = {"quant_method": "compressed-tensors", "group_size": 16} | _OF_LIBRARIES[case]
    every = load_file(DATA.parent / "recorded" / "ints_of_libraries.safetensors")
    tensors = {f"m.{key.removeprefix(f'{case}.')}": t for key, t in every.items() if key.startswith(f"{case}.")}
    expected = tensors.pop("m.dense")
    known = {key: _Known(tuple(t.shape), "F16" if t.dtype == torch.float16 else "I32") for key, t in tensors.items()}
    ((name, form, parts, _),) = find_packed(known, quantization, tensors.__getitem__)
    assert name == "m.weight"
    assert isinstance(form, GroupedInts)

    def read(part: str, bounds: Bounds) -> Tensor:
        return _slice(tensors[parts[part]], bounds)

    whole = [(0, 32), (0, 64)]
    assert torch.equal(form.read(whole, read).half(), expected)
    assert torch.equal(form.keep(whole, read).whole().half(), expected)
    assert torch.equal(plain_numbers(tensors, quantization)["m.weight"].half(), expected)


def test_what_cannot_stay_packed_is_refused(folders: Any) -> None:
    folder = folders("compressed-tensors int8 with zeros")
    with pytest.raises(UnsupportedError, match="what compressed-tensors stores so does not stay packed"):
        make_blueprint(folder, Topology(), BaseOptions(dtype="float64", quantization="keep"))


def test_float8_without_scales_is_refused(tmp_path: Path) -> None:
    folder = write_packed(tmp_path / "model", "fp8")
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    save_file({k: v for k, v in tensors.items() if "scale" not in k}, folder / "model.safetensors")
    with pytest.raises(UnsupportedError, match=r"float8 numbers, and config\.json has no quantization_config"):
        _source(folder)


def _read(codes: Tensor, scales: Tensor, block: list[int] | None = None) -> Tensor:
    form = Blocks8.of(tuple(codes.shape), tuple(scales.shape), block)
    assert form is not None
    tensors = {"codes": codes, "scales": scales}
    return form.read([(0, size) for size in codes.shape], lambda part, bounds: _slice(tensors[part], bounds))


def _slice(tensor: Tensor, bounds: Bounds) -> Tensor:
    return tensor[tuple(slice(*bound) for bound in bounds)] if tensor.ndim == len(bounds) else tensor


@pytest.mark.parametrize(
    ("form", "bounds", "expected"),
    [
        (
            Mxfp4((4, 96, 6)),
            [(1, 2), (40, 50), (3, 5)],
            {"codes": [(1, 2), (3, 5), (1, 2), (0, 16)], "scales": [(1, 2), (3, 5), (1, 2)]},
        ),
        (
            Blocks8((64, 64), (32, 16)),
            [(33, 40), (15, 17)],
            {"codes": [(33, 40), (15, 17)], "scales": [(1, 2), (0, 2)]},
        ),
        (
            GroupedInts((64, 64), "gptq", 4, 32),
            [(9, 11), (33, 41)],
            {"codes": [(4, 6), (9, 11)], "zeros": [(1, 2), (1, 2)], "scales": [(1, 2), (9, 11)]},
        ),
        (
            Fp4((64, 64), "nvfp4", divides=True),
            [(9, 11), (33, 50)],
            {"codes": [(9, 11), (16, 25)], "scales": [(9, 11), (2, 4)], "factor": [(0, 1)] * 3},
        ),
        (
            GroupedInts((64, 64), "compressed-tensors", 8, 32),
            [(9, 13), (33, 41)],
            {"codes": [(9, 13), (8, 11)], "zeros": [(2, 4), (1, 2)], "scales": [(9, 13), (1, 2)]},
        ),
        (
            GroupedInts((64, 64), "awq", 4, 16),
            [(9, 11), (15, 17)],
            {"codes": [(15, 17), (1, 2)], "zeros": [(0, 2), (1, 2)], "scales": [(0, 2), (9, 11)]},
        ),
        (
            Blocks4((64, 64), 64, 16, 0.0),
            [(17, 19), (3, 5)],
            {
                "codes": [(544, 608), (0, 1)],
                "quant_map": [(0, 16)],
                "absmax": [(17, 19)],
                "nested_quant_map": [(0, 256)],
                "nested_absmax": [(1, 2)],
            },
        ),
    ],
)
def test_no_more_is_read_than_the_blocks_of_a_slice(form: Any, bounds: Bounds, expected: dict[str, Bounds]) -> None:
    asked: dict[str, Bounds] = {}

    def read(part: str, of_part: Bounds) -> Tensor:
        asked[part] = list(of_part)
        zeros = torch.zeros([stop - start for start, stop in of_part], dtype=torch.int32)
        if isinstance(form, Fp4):
            dtypes = {"codes": torch.uint8, "scales": torch.float8_e4m3fn, "factor": torch.float32}
            return zeros.to(dtypes[part])
        return zeros

    form.read(bounds, read)
    assert asked == expected


def test_last_blocks_may_be_partial() -> None:
    """transformers divides such a matrix into equal blocks: it refuses, or where that comes out even, it is wrong."""
    codes = torch.randn(200, 300).to(torch.float8_e4m3fn)
    scales = torch.rand(2, 3) + 0.5
    expected = torch.stack(
        [torch.stack([codes[i, j].float() * scales[i // 128, j // 128] for j in range(300)]) for i in range(0, 200, 9)]
    )
    assert torch.equal(_read(codes, scales, [128, 128])[::9], expected)


@pytest.mark.parametrize("shape", [(), (1,), (6, 1)])
def test_one_scale_for_a_matrix_or_for_each_row(shape: tuple[int, ...]) -> None:
    codes, scales = torch.randn(6, 10).to(torch.float8_e4m3fn), torch.rand(shape) + 0.5
    assert torch.equal(_read(codes, scales), codes.float() * scales)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu])
def test_scales_may_be_exponents(dtype: torch.dtype) -> None:
    codes, exponents = torch.randn(4, 8).to(torch.float8_e4m3fn), torch.tensor([[120, 127], [130, 125]])
    scales = exponents.to(torch.uint8).view(dtype) if dtype != torch.uint8 else exponents.to(torch.uint8)
    factors = (2.0 ** (exponents - 127)).repeat_interleave(2, 0).repeat_interleave(4, 1)
    assert torch.equal(_read(codes, scales, [2, 4]), codes.float() * factors)


def test_scales_of_activations_are_passed_over(tmp_path: Path) -> None:
    folder = write_packed(tmp_path / "model", "fp8")
    file = folder / "model.safetensors"
    tensors = load_file(file)
    name = next(key for key in tensors if key.endswith(".q_proj.weight"))
    save_file(tensors | {f"{name.removesuffix('weight')}activation_scale": torch.ones(())}, file)
    assert name in _source(folder).stored


def _damage(folder: Path, change: str) -> None:
    config, file = folder / "config.json", folder / "model.safetensors"
    tree, tensors = json.loads(config.read_text()), load_file(file)
    if change.startswith("{"):
        tree["quantization_config"] |= json.loads(change)
        config.write_text(json.dumps(tree))
        return
    how, _, end = change.rpartition(" ")
    leaf = end.rpartition(".")[2]
    there = end.replace(leaf, "weight_packed") if how == "also" else end
    key = next(key for key in tensors if key.endswith(there))
    if how == "also":
        tensors[key.replace("weight_packed", leaf)] = tensors[key].clone()
    elif how == "without":
        del tensors[key]
    elif how == "flat":
        tensors[key] = tensors[key].flatten()
    elif how == "bytes of":
        tensors[key] = tensors[key].view(torch.uint8)
    elif how == "padded":
        tensors[key] = torch.nn.functional.pad(tensors[key].view(torch.uint8), (0, -tensors[key].shape[1] % 4, 0, 64))
        tensors[key] = tensors[key].view(torch.float8_e4m3fn)
    else:
        tensors[key] = tensors[key][: len(tensors[key]) // 2].clone()
    save_file(tensors, file, metadata={"format": "pt"})


@for_each(
    ("case", "change", "words"),
    [
        (
            "fp8",
            '{"quant_method": "quanto"}',
            "quant_method 'quanto': of quantised checkpoints those in fp8, .* are read",
        ),
        ("fp8", '{"expert_dtype": "fp6"}', "fp8 with expert_dtype 'fp6': it is not read yet"),
        ("fp8 with mxfp4 experts", "half of experts.1.up_proj.scale", r"up_proj\.weight: its stored parts are not all"),
        ("fp8 with mxfp4 experts", "without experts.1.up_proj.scale", r"up_proj\.weight: its stored parts are not all"),
        ("fp8", '{"weight_block_size": [0, 128]}', r"weight_block_size \[0, 128\]: it must be \[rows, columns\]"),
        ("gptq", '{"bits": 5}', "gptq with bits 5: it is not read yet"),
        ("gptq", '{"checkpoint_format": "marlin"}', "gptq with checkpoint_format 'marlin': it is not read yet"),
        ("nf4", '{"bnb_4bit_quant_storage": "bfloat16"}', "with bnb_4bit_quant_storage 'bfloat16': it is not read yet"),
        ("compressed-tensors fp8", '{"transform_config": {"v1": {}}}', "with transform_config .*: it is not read yet"),
        (
            "compressed-tensors fp8",
            '{"sparsity_config": {"format": "sparse-24"}}',
            "sparse weights .'sparse-24'.: they",
        ),
        ("compressed-tensors fp8", '{"format": null}', "with format None: it is not read yet"),
        ("fp8", '{"quant_method": "mxfp4"}', "mxfp4 of model_type 'llama': only that of gpt_oss is read"),
        ("compressed-tensors int4 experts", "also down_proj.weight_zero_point", "its stored parts are not all there"),
        ("compressed-tensors int4 in order", "half of down_proj.weight_g_idx", r"down_proj\.weight: its stored parts"),
        ("nf4", "half of down_proj.weight", r"down_proj\.weight: its stored parts are not all there, or do not fit"),
        ("nf4", "half of down_proj.weight.nested_absmax", r"down_proj\.weight: its stored parts are not all there"),
        ("awq", '{"version": "gemv"}', "awq with version 'gemv': it is not read yet"),
        (
            "compressed-tensors fp8",
            '{"format": "mxfp4-pack-quantized"}',
            "with format 'mxfp4-pack-quantized': it is not",
        ),
        ("modelopt nvfp4", '{"quant_algo": "W4A8_AWQ"}', "modelopt with quant_algo 'W4A8_AWQ': it is not read yet"),
        ("modelopt nvfp4", "half of down_proj.weight_scale", r"down_proj\.weight: its stored parts are not all there"),
        ("compressed-tensors nvfp4", "also down_proj.weight_zero_point", "asymmetric NVFP4 is not read"),
        ("modelopt nvfp4", "flat down_proj.weight_scale", "in the order of TensorRT's kernels are not read"),
        ("modelopt nvfp4", "bytes of down_proj.weight_scale", "in the order of TensorRT's kernels are not read"),
        ("modelopt nvfp4", "padded down_proj.weight_scale", "in the order of an engine's kernels .128 rows, 4 blocks"),
        ("modelopt nvfp4 stack", "half of output_linear.weight_scale_2", r"output_linear\.weight: its stored parts"),
        ("compressed-tensors nvfp4", "without down_proj.weight_scale", r"down_proj\.weight: its stored parts"),
        ("llm.int8", "without down_proj.SCB", r"down_proj\.weight: its stored parts are not all there"),
        ("llm.int8", "half of down_proj.SCB", r"down_proj\.weight: its stored parts are not all there"),
        ("compressed-tensors int8 with zeros", "half of down_proj.weight_zero_point", r"down_proj\.weight: its stored"),
        (
            "compressed-tensors int8",
            '{"config_groups": {"a": {"weights": {"num_bits": 8}}, "b": {"weights": {"num_bits": 4}}}}',
            r"num_bits \[8, 4\]: one for all weights is read",
        ),
        (
            "compressed-tensors int8",
            '{"config_groups": {"a": {"weights": {"num_bits": 3}}}}',
            "weights of 3 bits: those of 4 and 8 are read",
        ),
        ("fp8", "without down_proj.weight_scale_inv", r"down_proj\.weight: its stored parts are not all there"),
        ("fp8", "half of down_proj.weight_scale_inv", r"do not fit one another \(codes \[64, 96\], scales \[1, 3\]\)"),
        ("mxfp4", "without down_proj_scales", r"down_proj: its stored parts are not all there"),
        ("mxfp4", "half of down_proj_scales", r"down_proj: its stored parts are not all there, or do not fit"),
        ("gptq", "without down_proj.qzeros", r"down_proj\.weight: its stored parts are not all there"),
        ("gptq", "half of down_proj.g_idx", r"down_proj\.weight: its stored parts are not all there"),
        ("awq", "half of down_proj.scales", r"down_proj\.weight: its stored parts are not all there"),
        ("compressed-tensors int4 experts", "without down_proj.weight_scale", r"down_proj\.weight: its stored parts"),
        ("nf4", "half of down_proj.weight.quant_state.bitsandbytes__nf4", r"down_proj\.weight: its stored parts"),
    ],
)
def test_what_cannot_be_read_is_one_clear_message(case: str, change: str, words: str, tmp_path: Path) -> None:
    folder = write_packed(tmp_path / "model", case)
    _damage(folder, change)
    with pytest.raises((UserError, UnsupportedError), match=words):
        _source(folder)


def test_a_twin_in_gptq_is_one_whose_files_are_kept(folders: Any) -> None:
    proof = prepare_proof(Request(("tp=2",), family="llama", quantization="gptq", device="cpu"))
    assert proof.case.quantization == "keep"
    (plan,) = proof.plans.values()
    assert {packing.kind for packing in plan.quantized.values()} == {"ints4"}
    with pytest.raises(UserError, match=r"only twins are rounded to it: .*; use --quantization keep"):
        prepare_proof(Request(("tp=2",), model=str(folders("gptq")), quantization="gptq", device="cpu"))


def test_quantising_twice_is_refused(folders: Any) -> None:
    with pytest.raises(UnsupportedError, match="its checkpoint is quantised already"):
        make_blueprint(folders("fp8"), Topology(), BaseOptions(dtype="float64", quantization="nf4"))


@pytest.mark.parametrize(
    "case", ["fp8 experts", "mxfp4", "nf4", "gptq", "modelopt nvfp4 experts", "fp8 with mxfp4 experts"]
)
def test_merged_it_is_in_plain_numbers(case: str, folders: Any, tmp_path: Path) -> None:
    """Those of the base where the adapter changes nothing; the logits of all are compared by the merge itself."""
    folder, adapter, out = folders(case), tmp_path / "adapter", tmp_path / "merged"
    config = read_model_config(folder)
    plain = _source(folder)
    target = next(name for name in plain.stored if name.endswith("q_proj.weight"))
    base = load_base(folder, config, dtype=torch.float32, local_files_only=True, trust_remote_code=False)
    lora = LoraConfig(r=2, target_modules=[target.removesuffix(".weight")], init_lora_weights=False)
    get_peft_model(base, lora).save_pretrained(str(adapter), save_embedding_layers=False)
    done = merge(folder, adapter, out, config=read_model_config(folder))
    assert "no longer in few bits, in bfloat16: within 4e-03 of each" in done.check
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    merged = _source(out)
    assert merged.stored.keys() == plain.stored.keys()
    differ = [n for n in merged.stored if not torch.equal(merged.read(n).float(), plain.read(n).bfloat16().float())]
    assert differ == [target]

"""Small checkpoints in the formats in which large models are published, written by hand."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from bitsandbytes.functional import quantize_4bit
from safetensors.torch import load_file, save_file
from torch import Tensor

from meshlora_judge.inputs import write_twin
from meshlora_judge.twin import twin_config

BLOCK = 32


# Two ranks cut blocks of 128, and none of a token's 32; of the last blocks none is partial, in which transformers reads
# fp8 in another way.
WIDE = {"tp": 2, "block": 192, "num_attention_heads": 12, "head_dim": 32}


@dataclass(frozen=True)
class Published:
    """A way to publish a checkpoint.

    Attributes:
        family: whose twin; sizes: what of it is another, so that there are several blocks along each dim.
        quantization: of config.json. pack: (name, weight, seed) -> the tensors of a weight.
        of: the ends of the names of weights in few bits.
    """

    family: str
    quantization: dict[str, Any]
    pack: Callable[[str, Tensor, int], dict[str, Tensor]]
    sizes: dict[str, int] = field(default_factory=lambda: {"hidden_size": 64, "intermediate_size": 96})
    of: tuple[str, ...] = ("_proj.weight",)


def write_packed(folder: Path, case: str, **sizes: int) -> Path:
    """The twin of `PUBLISHED[case]`; what is in plain numbers in bfloat16. sizes: of `twin_config`, in place of its."""
    one = PUBLISHED[case]
    write_twin(twin_config(one.family, **(sizes or one.sizes)), folder, dtype=torch.float32, seed=0)
    packed: dict[str, Tensor] = {}
    for number, (key, value) in enumerate(sorted(load_file(folder / "model.safetensors").items())):
        packed |= one.pack(key, value, number) if key.endswith(one.of) else {key: value.bfloat16()}
    save_file(packed, folder / "model.safetensors", metadata={"format": "pt"})
    file = folder / "config.json"
    config = json.loads(file.read_text()) | {"dtype": "bfloat16", "quantization_config": one.quantization}
    file.write_text(json.dumps(config))
    return folder


def _drawn(*shape: int, low: int, high: int, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, high, shape, generator=generator, dtype=torch.int64).to(dtype)


def _words(*shape: int, seed: int) -> Tensor:
    return _drawn(*shape, low=-(2**31), high=2**31, dtype=torch.int32, seed=seed)


def _scales(*shape: int, seed: int) -> Tensor:
    return (torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * 0.02 + 0.01).half()


def _fp8(key: str, value: Tensor, _: int, size: int = BLOCK) -> dict[str, Tensor]:
    """Blocks of `size`; the last ones may be partial."""
    rows, columns = value.shape
    whole = torch.nn.functional.pad(value, (0, -columns % size, 0, -rows % size))
    blocks = whole.reshape(whole.shape[0] // size, size, whole.shape[1] // size, size)
    scales = blocks.abs().amax((1, 3)) / torch.finfo(torch.float8_e4m3fn).max
    codes = (blocks / scales[:, None, :, None]).reshape(whole.shape)[:rows, :columns].to(torch.float8_e4m3fn)
    return {key: codes, f"{key}_scale_inv": scales}


def _as_deepseek_v4(key: str, value: Tensor, seed: int) -> dict[str, Tensor]:
    """Dense matrices in float8, those of experts in MXFP4; scales are exponents."""
    owner = key.removesuffix(".weight")
    if ".experts." in key:
        outputs, inputs = value.shape
        codes = _drawn(outputs, inputs // 2, low=-128, high=128, dtype=torch.int8, seed=seed)
        exponents = _drawn(outputs, inputs // 32, low=118, high=124, dtype=torch.uint8, seed=seed)
        return {key: codes, f"{owner}.scale": exponents.view(torch.float8_e8m0fnu)}
    found = _fp8(key, value, seed)
    powers = found[f"{key}_scale_inv"].log2().ceil().exp2().to(torch.float8_e8m0fnu)
    return {key: found[key], f"{owner}.scale": powers}


def _fp8_of_a_tensor(key: str, value: Tensor, _: int) -> dict[str, Tensor]:
    """One scale for the matrix, and a static one of its inputs."""
    scale = value.abs().max() / torch.finfo(torch.float8_e4m3fn).max
    bound = torch.tensor(0.02)
    owner = key.removesuffix(".weight")
    return {key: (value / scale).to(torch.float8_e4m3fn), f"{key}_scale_inv": scale, f"{owner}.activation_scale": bound}


def _fp8_rows(key: str, value: Tensor, _: int) -> dict[str, Tensor]:
    scales = (value.abs().amax(1, keepdim=True) / 448).bfloat16()
    return {key: (value / scales.float()).to(torch.float8_e4m3fn), f"{key}_scale": scales}


def _fbgemm(key: str, value: Tensor, seed: int) -> dict[str, Tensor]:
    bound = {f"{key.removesuffix('weight')}input_scale_ub": torch.tensor([1200.0])}
    return bound | {
        name: part.float() if "scale" in name else part for name, part in _fp8_rows(key, value, seed).items()
    }


def _mxfp4(key: str, value: Tensor, seed: int) -> dict[str, Tensor]:
    experts, inputs, outputs = value.shape
    blocks = _drawn(experts, outputs, inputs // 32, 16, low=0, high=256, dtype=torch.uint8, seed=seed)
    scales = _drawn(*blocks.shape[:-1], low=120, high=126, dtype=torch.uint8, seed=seed)
    return {f"{key}_blocks": blocks, f"{key}_scales": scales}


def _int4(key: str, value: Tensor, seed: int) -> dict[str, Tensor]:
    outputs, inputs = value.shape
    return {
        f"{key}_packed": _words(outputs, inputs // 8, seed=seed),
        f"{key}_scale": _scales(outputs, inputs // BLOCK, seed=seed).bfloat16(),
        f"{key}_shape": torch.tensor(value.shape),
    }


def _int4_in_order(key: str, value: Tensor, seed: int) -> dict[str, Tensor]:
    """Features in the order of their activations (`actorder: group`)."""
    order = torch.randperm(value.shape[1], generator=torch.Generator().manual_seed(seed))
    return _int4(key, value, seed) | {f"{key}_g_idx": (order // BLOCK).int()}


def _nvfp4(suffix: str, of_matrix: str) -> Callable[[str, Tensor, int], dict[str, Tensor]]:
    def pack(key: str, value: Tensor, seed: int) -> dict[str, Tensor]:
        *experts, outputs, inputs = value.shape
        # Of each matrix, and each expert of a stack, another one.
        number = 300 * (3.0 + seed % 5 + torch.arange(float(experts[0] if experts else 1)))
        if not suffix:
            number = 1 / number if experts else 1 / number[0]
        scales = _scales(*experts, outputs, inputs // 16, seed=seed).float() * 100
        return {
            f"{key}{suffix}": _drawn(*experts, outputs, inputs // 2, low=0, high=256, dtype=torch.uint8, seed=seed),
            f"{key}_scale": scales.to(torch.float8_e4m3fn),
            f"{key}_{of_matrix}": number,
            f"{key.removesuffix('weight')}input{'_global' * bool(suffix)}_scale": torch.ones(1),
        }

    return pack


def _int8(*, of_rows: bool = False, group: int = 0, zeros: bool = False) -> Callable[..., dict[str, Tensor]]:
    """LLM.int8 (`of_rows`), or compressed-tensors: a scale for each output, or for each `group` of its inputs."""

    def pack(key: str, value: Tensor, seed: int) -> dict[str, Tensor]:
        outputs, inputs = value.shape
        codes = _drawn(outputs, inputs, low=-127, high=128, dtype=torch.int8, seed=seed)
        if of_rows:
            owner, scales = key.removesuffix("weight"), _scales(outputs, seed=seed).float() * 20
            return {key: codes, f"{owner}SCB": scales, f"{owner}weight_format": torch.zeros((), dtype=torch.uint8)}
        scales = _scales(outputs, inputs // (group or inputs), seed=seed).bfloat16() / 16
        found = _drawn(*scales.shape, low=-9, high=10, dtype=torch.int8, seed=seed)
        return {key: codes, f"{key}_scale": scales} | ({f"{key}_zero_point": found} if zeros else {})

    return pack


def _with_zeros(bits: int) -> Callable[[str, Tensor, int], dict[str, Tensor]]:
    """compressed-tensors' integers in words, with zeros along the outputs."""

    def pack(key: str, value: Tensor, seed: int) -> dict[str, Tensor]:
        (outputs, inputs), number = value.shape, 32 // bits
        return {
            f"{key}_packed": _words(outputs, inputs // number, seed=seed),
            f"{key}_scale": _scales(outputs, inputs // BLOCK, seed=seed).bfloat16() * 8 / 2**bits,
            f"{key}_zero_point": _words(-(-outputs // number), inputs // BLOCK, seed=seed + 100),
            f"{key}_shape": torch.tensor(value.shape),
        }

    return pack


def _gptq(bits: int, group: int = BLOCK, *, desc_act: bool = False) -> Callable[..., dict[str, Tensor]]:
    """group: the last may be partial; 0: all inputs. desc_act: features in the order of their activations."""

    def pack(key: str, value: Tensor, seed: int) -> dict[str, Tensor]:
        (outputs, inputs), owner = value.shape, key.removesuffix(".weight")
        groups = -(-inputs // (group or inputs))
        found = {
            f"{owner}.qweight": _words(inputs * bits // 32, outputs, seed=seed),
            f"{owner}.qzeros": _words(groups, outputs * bits // 32, seed=seed + 100),
            f"{owner}.scales": _scales(groups, outputs, seed=seed) * 4 / 2**bits,
        }
        order = torch.arange(inputs)
        if desc_act:  # gate and up, of the same inputs, have the same
            order = torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))
        if bits == 4:
            found[f"{owner}.g_idx"] = (order // (group or inputs)).int()
        return found

    return pack


def _awq(key: str, value: Tensor, seed: int) -> dict[str, Tensor]:
    (outputs, inputs), owner = value.shape, key.removesuffix(".weight")
    return {
        f"{owner}.qweight": _words(inputs, outputs // 8, seed=seed),
        f"{owner}.qzeros": _words(inputs // BLOCK, outputs // 8, seed=seed + 100),
        f"{owner}.scales": _scales(inputs // BLOCK, outputs, seed=seed),
    }


def _bitsandbytes(*, nested: bool) -> Callable[[str, Tensor, int], dict[str, Tensor]]:
    def pack(key: str, value: Tensor, _: int) -> dict[str, Tensor]:
        kind = "nf4" if nested else "fp4"
        codes, state = quantize_4bit(value, blocksize=64, compress_statistics=nested, quant_type=kind)
        return {key: codes} | {f"{key}.{name}": part.clone() for name, part in state.as_dict(packed=True).items()}

    return pack


_FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
_CT = {"quant_method": "compressed-tensors", "format": "float-quantized", "sparsity_config": {"format": "dense"}}
_MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
_MOE = {"hidden_size": 64, "moe_intermediate_size": 64}
_MOE_ODD = {"hidden_size": 64, "moe_intermediate_size": 96}  # two ranks cut a group of 32
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": BLOCK, "desc_act": False}
_AWQ = {"quant_method": "awq", "bits": 4, "group_size": BLOCK, "version": "gemm"}
_EXPERTS = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")
_BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True}


def _ct(format: str, **weights: Any) -> dict[str, Any]:
    return _CT | {"format": format, "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}


PUBLISHED = {
    "fp8": Published("llama", _FP8, _fp8),
    "fp8 of 128": Published("llama", _FP8 | {"weight_block_size": [128, 128]}, functools.partial(_fp8, size=128), WIDE),
    "fp8 of a tensor": Published(
        "llama", _FP8 | {"activation_scheme": "static", "weight_block_size": None}, _fp8_of_a_tensor, WIDE
    ),
    "fp8 in part": Published(
        "llama",
        _FP8 | {"modules_to_not_convert": ["k_proj", "v_proj", "gate_proj", "down_proj"]},
        _fp8,
        of=("q_proj.weight", "o_proj.weight", "up_proj.weight"),
    ),
    "fp8 experts": Published("qwen3_moe", _FP8, _fp8, {"hidden_size": 64, "moe_intermediate_size": 64}),
    "fp8 with mxfp4 experts": Published(
        "qwen3_moe",
        _FP8 | {"scale_fmt": "ue8m0", "expert_dtype": "fp4"},
        _as_deepseek_v4,
        {"hidden_size": 64, "moe_intermediate_size": 96},  # two ranks cut a block of 32
    ),
    "mxfp4": Published("gpt_oss", {"quant_method": "mxfp4"}, _mxfp4, {}, ("gate_up_proj", "experts.down_proj")),
    "fbgemm": Published("llama", {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, _fbgemm),
    "compressed-tensors fp8": Published("llama", _CT, _fp8_rows),
    "compressed-tensors int4 experts": Published(
        "qwen3_moe", _CT | {"format": "pack-quantized"}, _int4, _MOE, _EXPERTS
    ),
    "compressed-tensors int4 with zeros": Published(
        "llama", _ct("pack-quantized", num_bits=4, group_size=BLOCK), _with_zeros(4)
    ),
    "compressed-tensors int8 in words": Published(
        "llama", _ct("pack-quantized", num_bits=8, group_size=BLOCK), _with_zeros(8)
    ),
    "compressed-tensors int4 in order": Published(
        "llama", _ct("pack-quantized", num_bits=4, group_size=BLOCK, actorder="group"), _int4_in_order
    ),
    "compressed-tensors int8": Published("llama", _ct("int-quantized", num_bits=8), _int8()),
    "compressed-tensors int8 with zeros": Published(
        "llama", _ct("int-quantized", num_bits=8, group_size=BLOCK), _int8(group=BLOCK, zeros=True)
    ),
    "compressed-tensors nvfp4": Published(
        "llama", _ct("nvfp4-pack-quantized", num_bits=4, group_size=16), _nvfp4("_packed", "global_scale")
    ),
    "modelopt nvfp4": Published("llama", _MODELOPT, _nvfp4("", "scale_2")),
    "modelopt nvfp4 experts": Published("qwen3_moe", _MODELOPT, _nvfp4("", "scale_2"), _MOE, _EXPERTS),
    "compressed-tensors nvfp4 experts": Published(
        "qwen3_moe",
        _ct("nvfp4-pack-quantized", num_bits=4, group_size=16),
        _nvfp4("_packed", "global_scale"),
        {"hidden_size": 64, "moe_intermediate_size": 80},  # two ranks cut a block of 16
    ),
    "modelopt nvfp4 stack": Published(
        "granitemoe", _MODELOPT, _nvfp4("", "scale_2"), of=("input_linear.weight", "output_linear.weight")
    ),
    "llm.int8": Published("llama", {"quant_method": "bitsandbytes", "load_in_8bit": True}, _int8(of_rows=True)),
    "gptq": Published("qwen2", _GPTQ | {"desc_act": True}, _gptq(4, desc_act=True)),
    "gptq of 8 bits": Published("llama", _GPTQ | {"bits": 8, "checkpoint_format": "gptq_v2"}, _gptq(8)),
    "gptq of 3 bits": Published("llama", _GPTQ | {"bits": 3}, _gptq(3)),
    "gptq of 2 bits": Published("llama", _GPTQ | {"bits": 2}, _gptq(2)),
    "gptq of rows": Published("llama", _GPTQ | {"group_size": -1}, _gptq(4, 0)),
    "gptq of a partial group": Published("llama", _GPTQ | {"group_size": 40}, _gptq(4, 40)),
    "gptq experts": Published("qwen3_moe", _GPTQ, _gptq(4), _MOE_ODD, _EXPERTS),
    "gptq experts in order": Published(
        "qwen3_moe", _GPTQ | {"desc_act": True}, _gptq(4, desc_act=True), _MOE_ODD, _EXPERTS
    ),
    "awq experts": Published("qwen3_moe", _AWQ, _awq, _MOE, _EXPERTS),
    "awq": Published("qwen2", _AWQ, _awq),
    # 256 scales share one: wide enough for two of these.
    "nf4": Published(
        "llama",
        _BNB | {"bnb_4bit_quant_type": "nf4"},
        _bitsandbytes(nested=True),
        {"hidden_size": 64, "intermediate_size": 512},
    ),
    "fp4": Published("llama", _BNB | {"bnb_4bit_quant_type": "fp4"}, _bitsandbytes(nested=False)),
}
# What stays packed in memory.
KEPT = tuple(case for case in PUBLISHED if case != "compressed-tensors int8 with zeros")

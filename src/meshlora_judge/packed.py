"""The reference's reading of checkpoints in few bits: whole, as plain numbers, by the libraries of the formats.

For formats whose libraries do not read them here (fbgemm, compressed-tensors, modelopt, LLM.int8, GPTQ, AWQ), the
published formula is written a second time, over bytes instead of words: nothing of `wings.quantized.packed` is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers import FineGrainedFP8Config, Mxfp4Config, PretrainedConfig

from meshlora_ground.errors import UserError
from meshlora_ground.model_class import model_class, own_class, take_quantization
from meshlora_ground.weight_files import weight_files

# Ends of the names of floating-point tensors that are parts of a weight.
_PARTS = ("scale", "scales", "scale_ub", "scale_2", "absmax", "quant_map", "SCB")


def load_base(folder: str | Path, config: PretrainedConfig, **options: Any) -> Any:
    """`model_class(config).from_pretrained(folder, config=config, **options)`, with plain numbers on any device."""
    given = take_quantization(config) or {}
    method = given.get("quant_method")
    if method in ("mxfp4", "fp8"):
        config.quantization_config = given
    if method == "mxfp4":
        options["quantization_config"] = Mxfp4Config(dequantize=True)
    elif method == "fp8":
        block = given.get("weight_block_size")
        options["quantization_config"] = FineGrainedFP8Config(dequantize=True, weight_block_size=block)
    elif method is not None:
        tensors: dict[str, Tensor] = {}
        for file in weight_files(Path(folder)):
            tensors |= load_file(file)
        del options["local_files_only"], options["trust_remote_code"]
        options["state_dict"] = plain_numbers(tensors, given)
        if config.get_text_config().model_type == "llama4_text":
            options["state_dict"] = _stacked(options["state_dict"])
        return own_class(config).from_pretrained(None, config=config, **options)
    return model_class(config).from_pretrained(folder, config=config, **options)


def plain_numbers(tensors: Mapping[str, Tensor], quantization: Mapping[str, Any]) -> dict[str, Tensor]:
    """The whole weights of a checkpoint, by name."""
    plain: dict[str, Tensor] = {}
    for key, codes in tensors.items():
        owner, _, leaf = key.rpartition(".")
        of = _under(f"{owner}.", tensors)
        if leaf == "qweight":
            made = _gptq if quantization["quant_method"] == "gptq" else _awq
            plain[f"{owner}.weight"] = made(of, quantization)
        elif leaf in ("weight_packed", "weight") and codes.dtype == torch.uint8 and "weight_scale" in of:
            plain[f"{owner}.weight"] = _nvfp4(codes, of)
        elif leaf == "weight_packed":
            plain[f"{owner}.weight"] = _integers(codes, of, quantization)
        elif leaf == "weight" and codes.dtype == torch.int8 and "SCB" in of:
            plain[key] = codes.float() * (of["SCB"] / 127)[:, None]
        elif leaf == "weight" and codes.dtype in (torch.float8_e4m3fn, torch.int8):
            scales, zeros = of["weight_scale"].float(), of.get("weight_zero_point", torch.zeros(1, 1))
            if scales.ndim == 2:  # groups of input features
                scales = scales.repeat_interleave(codes.shape[1] // scales.shape[1], 1)
                zeros = zeros.repeat_interleave(codes.shape[1] // zeros.shape[1], 1)
            plain[key] = (codes.float() - zeros.float()) * scales
        elif f"{leaf}.absmax" in of and leaf == "weight":
            plain[key] = _bitsandbytes(codes, _under("weight.", of))
        elif codes.is_floating_point() and not leaf.endswith(_PARTS):
            plain[key] = codes
    return plain


def _stacked(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Linears of single experts as the stacks of llama4, which take rows from the left: `[E, in, out]`."""
    of_stack: dict[str, dict[int, dict[str, Tensor]]] = {}
    found: dict[str, Tensor] = {}
    for key, value in tensors.items():
        owner, _, of_expert = key.rpartition(".experts.")
        number, _, name = of_expert.partition(".")
        if not number.isdecimal():
            found[key] = value
            continue
        stack = "down_proj" if name.startswith("down") else "gate_up_proj"
        of_stack.setdefault(f"{owner}.experts.{stack}", {}).setdefault(int(number), {})[name] = value.T
    for key, experts in of_stack.items():
        # gate before up, as in the alphabet.
        matrices = [torch.cat([own[name] for name in sorted(own)], 1) for _, own in sorted(experts.items())]
        found[key] = torch.stack(matrices)
    return found


def float8_modules(folder: str | Path) -> list[str]:
    """The modules whose weight is stored in e4m3, as the files name them."""
    found = []
    for file in weight_files(Path(folder)):
        with safe_open(file, framework="pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118 # no mapping
                owner, _, leaf = key.rpartition(".")
                if leaf == "weight" and tensors.get_slice(key).get_dtype() == "F8_E4M3":
                    found.append(owner)
    return found


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose names begin with `prefix`, without it."""
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def _nibbles(words: Tensor) -> Tensor:
    """The eight 4-bit numbers of each word along the last dim, lowest first."""
    values = words.contiguous().view(torch.uint8)
    return torch.stack([values % 16, values // 16], -1).flatten(-2)


def _nvfp4(codes: Tensor, of: Mapping[str, Tensor]) -> Tensor:
    """Sign, two bits of exponent with a bias of 1, one of mantissa; groups of 16, and one scale for all."""
    bits = torch.stack([codes % 16, codes // 16], -1).flatten(-2).long()
    sign, exponent, mantissa = 1 - 2 * (bits // 8), bits // 2 % 4, bits % 2
    numbers = torch.where(exponent > 0, (2 + mantissa) * 2.0**exponent, mantissa * 2.0) / 4
    groups = of["weight_scale"].float().repeat_interleave(16, -1)
    of_matrix = of.get("weight_global_scale", of.get("weight_scale_2", torch.zeros(())))
    if codes.ndim == 3:
        of_matrix = of_matrix.view(-1, 1, 1)
    if "weight_global_scale" in of:
        return sign * numbers * (groups / of_matrix)
    return sign * numbers * (groups * of_matrix)


def _integers(codes: Tensor, of: Mapping[str, Tensor], quantization: Mapping[str, Any]) -> Tensor:
    """compressed-tensors: zeros are in words along the outputs, or half of the range."""
    scales, (group, *_) = of["weight_scale"].float(), quantization.get("config_groups", {0: {}}).values()
    is_wide = group.get("weights", {}).get("num_bits") == 8

    def numbers(words: Tensor) -> Tensor:
        return words.contiguous().view(torch.uint8) if is_wide else _nibbles(words)

    zeros = torch.full(scales.shape, 128 if is_wide else 8)
    if "weight_zero_point" in of:
        zeros = numbers(of["weight_zero_point"].T).T[: len(scales)]
    values = numbers(codes).float()
    index = of.get("weight_g_idx", torch.arange(values.shape[1]) // (values.shape[1] // scales.shape[1])).long()
    return (values - zeros.float()[:, index]) * scales[:, index]


def _gptq(of: Mapping[str, Tensor], quantization: Mapping[str, Any]) -> Tensor:
    bits, size = quantization["bits"], quantization["group_size"]
    codes, zeros = _bit_by_bit(of["qweight"].T, bits), _bit_by_bit(of["qzeros"], bits)
    # GPTQ's first format stores each zero minus 1, in a number of so many bits.
    zeros = (zeros + int(quantization.get("checkpoint_format", "gptq") == "gptq")) % 2**bits
    index = torch.arange(codes.shape[1]) // (size if size > 0 else codes.shape[1])
    if "g_idx" in of:
        index = of["g_idx"].long()
    return (codes.float() - zeros[index].T) * of["scales"].float()[index].T


def _bit_by_bit(words: Tensor, bits: int) -> Tensor:
    """The numbers of `bits` bits that follow one another in the words of each row, without gaps, lowest bit first."""
    every = np.unpackbits(words.contiguous().view(torch.uint8).numpy(), axis=1, bitorder="little")
    of_each = torch.from_numpy(every).int().unflatten(1, (-1, bits))
    return (of_each << torch.arange(bits)).sum(-1)


def _awq(of: Mapping[str, Tensor], _: Mapping[str, Any]) -> Tensor:
    def ordered(words: Tensor) -> Tensor:
        stored = _nibbles(words).unflatten(-1, (-1, 8))
        numbers = torch.empty_like(stored)
        numbers[..., [0, 2, 4, 6, 1, 3, 5, 7]] = stored
        return numbers.flatten(-2)

    codes, zeros, scales = ordered(of["qweight"]), ordered(of["qzeros"]), of["scales"].float()
    size = len(codes) // len(scales)
    zeros, scales = zeros.repeat_interleave(size, 0), scales.repeat_interleave(size, 0)
    return ((codes.float() - zeros) * scales).T.contiguous()


def _bitsandbytes(codes: Tensor, state: dict[str, Tensor]) -> Tensor:
    try:
        from bitsandbytes.functional import QuantState, dequantize_4bit
    except ImportError:
        rule = "reading it on one process needs bitsandbytes, which is not installed"
        raise UserError("a checkpoint of bitsandbytes", rule, "pip install 'meshlora[quantization]'") from None
    found = QuantState.from_dict(state, device=torch.device("cpu"))
    found.dtype = torch.float32
    # As one row: bitsandbytes 0.50 is wrong on CPUs with AVX-512 where a block of weights crosses the end of a row.
    shape, found.shape = found.shape, torch.Size([found.shape.numel()])
    return dequantize_4bit(codes, found).view(shape)

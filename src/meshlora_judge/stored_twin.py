"""A twin in the files of a published format of integers, GPTQ or AWQ: numbers of 4 bits, written from the definitions.

Nothing of `wings.quantized` is used. Its numbers are rounded to the nearest, not chosen by GPTQ or AWQ: that changes
which they are, not how they are stored. Reading them: `meshlora_judge.packed`.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PretrainedConfig
from transformers.utils import logging

from meshlora_ground.errors import UnsupportedError
from meshlora_ground.model_class import model_class
from meshlora_ground.weight_files import weight_files
from meshlora_judge.inputs import write_twin
from meshlora_judge.quantized import plain_linears

_GROUP, _MOST = 8, 15
# The columns of eight that lie one after another in a word of AWQ.
_AWQ_COLUMNS = [0, 2, 4, 6, 1, 3, 5, 7]
# With features in the order of activations, and zeros stored less 1, as GPTQ's first format has them.
_CONFIGS: dict[str, dict[str, Any]] = {
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": _GROUP, "desc_act": True, "sym": False},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": _GROUP, "version": "gemm", "zero_point": True},
}


def write_stored_twin(config: PretrainedConfig, folder: Path, kind: str, *, dtype: torch.dtype) -> None:
    """The twin of `config`: its linears but head and routers, and experts, in `kind`, all else in `dtype`.

    kind: gptq or awq. Matrices with a width that is no multiple of 8 stay plain.

    Raises:
        UnsupportedError: it has none that can be.
    """
    with contextlib.ExitStack() as stack:
        if logging.is_progress_bar_enabled():
            logging.disable_progress_bar()
            stack.callback(logging.enable_progress_bar)
        write_twin(config, folder, dtype=dtype, seed=0)
    with torch.device("meta"):
        model = model_class(config).from_config(config)
    chosen = {id(module) for module in plain_linears(model)}
    names = {name for name, module in model.named_modules() if id(module) in chosen}
    num_packed = 0
    for file in weight_files(folder):
        found: dict[str, Tensor] = {}
        for key, value in load_file(file).items():
            owner = key.removesuffix(".weight")
            is_matrix = value.ndim == 2 and not any(width % 8 for width in value.shape) and owner != key
            if is_matrix and (owner in names or ".experts." in owner):
                found |= {f"{owner}.{leaf}": part for leaf, part in _packed(value.float(), kind).items()}
                num_packed += 1
            else:
                found[key] = value
        save_file(found, file, metadata={"format": "pt"})
    if not num_packed:
        rule = "none of its matrices is stored as a linear with widths that 8 divides"
        raise UnsupportedError(f"the twin of {config.model_type} in {kind}", rule, "use --quantization nf4 or mxfp4")
    path = folder / "config.json"
    tree = json.loads(path.read_text(encoding="utf-8")) | {"quantization_config": _CONFIGS[kind]}
    path.write_text(json.dumps(tree), encoding="utf-8")


def _packed(weight: Tensor, kind: str) -> dict[str, Tensor]:
    """The tensors of `weight` `[out, in]`, by the last part of their names."""
    width = weight.shape[1]
    group_of = torch.arange(width) // _GROUP
    if kind == "gptq":  # the same for all matrices with the same inputs, as of gate and up
        group_of = torch.randperm(width, generator=torch.Generator().manual_seed(width)) // _GROUP
    scales, zeros = [], []
    for group in range(width // _GROUP):
        part = weight[:, group_of == group]
        low, high = part.amin(1), part.amax(1)
        scale = ((high - low) / _MOST).half().float().clamp(min=2.0**-14)
        scales.append(scale)
        zeros.append((-low / scale).round().clamp(1, _MOST))  # GPTQ's first format has no word for 0
    scale, zero = torch.stack(scales), torch.stack(zeros)  # [groups, out]
    codes = (weight.T / scale[group_of] + zero[group_of]).round().clamp(0, _MOST)  # [in, out]
    if kind == "awq":
        return {"qweight": _words(_in_awq_order(codes)), "qzeros": _words(_in_awq_order(zero)), "scales": scale.half()}
    qweight = _words(codes.T).T.contiguous()
    return {"qweight": qweight, "qzeros": _words(zero - 1), "scales": scale.half(), "g_idx": group_of.int()}


def _in_awq_order(numbers: Tensor) -> Tensor:
    return numbers.unflatten(1, (-1, 8))[..., _AWQ_COLUMNS].flatten(1)


def _words(numbers: Tensor) -> Tensor:
    """Words int32 of eight neighbours along the last dim, the first in the lowest bits."""
    numbers = numbers.to(torch.uint8)
    return (numbers[..., 0::2] + 16 * numbers[..., 1::2]).contiguous().view(torch.int32)

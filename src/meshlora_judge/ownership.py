"""Which rows and columns of the base's weights a rank holds, found by content.

Nothing here knows a layout: a row is identified by its values, as a sequence is by its tokens.
"""

from __future__ import annotations

import numpy as np
import torch
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from meshlora_judge.experts import expert_modules, matrices, plain_name

Prints = dict[str, Tensor]


def fingerprints(model: nn.Module) -> tuple[Prints, Prints]:
    """Fingerprints of every base weight, (rows, columns): module -> int64 `[out]`, `[in]`; of experts `[E, ...]`."""
    rows: Prints = {}
    columns: Prints = {}
    inside = tuple(f"{name}." for name in expert_modules(model))
    for path, module in model.named_modules():
        if path.startswith(inside) or isinstance(module, ParamWrapper):
            continue
        weight, name = getattr(module, "weight", None), plain_name(path)
        if not isinstance(weight, Tensor) or ".lora_" in path or ".modules_to_save." in path:
            continue
        if weight.is_meta or not weight.numel():  # what stands for that of another stage, for its dtype
            continue
        matrix = weight.detach().double()
        matrix = matrix.T if isinstance(module, Conv1D) else matrix.reshape(len(matrix), -1)
        rows[name] = _prints(matrix)
        columns[name] = _prints(matrix.T)
    for name, stack in matrices(model).items():
        rows[name] = torch.stack(list(map(_prints, stack.double())))
        columns[name] = torch.stack([_prints(matrix.T) for matrix in stack.double()])
    return rows, columns


def _prints(matrix: Tensor) -> Tensor:
    """One fingerprint per row: its elements' bits times odd pseudo-random numbers, summed modulo 2^64; zeros give 0."""
    bits = matrix.contiguous().view(torch.int64).cpu()
    # Of bfloat16 only the upper 19 bits are not 0, and products would keep no more than those.
    bits = bits ^ (bits >> 32)
    raw = np.random.PCG64(1).random_raw(bits.shape[1]).view(np.int64)
    return (bits * torch.from_numpy(raw | 1)).sum(1)


def places(local: Tensor, whole: Tensor, *, rank: int, size: int) -> Tensor | None:
    """Places of the fingerprints `local` in `whole`, int64, -1 for padding; None if they cannot be determined.

    Equal rows cannot be told apart: they are taken in the order of the ranks if all rows of this rank fit that order.
    """
    start = min(rank * len(local), len(whole))
    stop = min(start + len(local), len(whole))
    if torch.equal(local[: stop - start], whole[start:stop]) and not bool(local[stop - start :].any()):
        return torch.cat([torch.arange(start, stop), torch.full((len(local) - stop + start,), -1)])
    index: dict[int, int] = {}
    for place, value in enumerate(whole.tolist()):
        if index.setdefault(value, place) != place:
            index[value] = -2  # of several equal rows
    index.setdefault(0, -1)  # zeros are padding, unless the whole has such a row
    found = torch.tensor([index.get(value, -2) for value in local.tolist()])
    return None if bool((found == -2).any()) else found

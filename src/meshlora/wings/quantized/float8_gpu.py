"""Products in float8 on a GPU: torch's product of codes with scales, ours for those of blocks, and their codes.

Owns: which GPUs have them, the two products, and their comparison with the definition on first use. Does not own: the
definition (`wings.quantized.float8`), the Triton kernels (`wings.quantized.float8_kernels`, `float8_block_kernels`).

A GPU's product has a scale for each row of either side: of a token in place of 32 of its features, and of a matrix in
place of 128 x 128 of its numbers. As all are powers of two, that changes numbers below the normal range alone: 1e-5 of
a product, where rounding to e4m3 is 3e-2 and that of the result to bfloat16 2e-3. Scales of blocks that are stored, and
may be any numbers, have a kernel of ours: torch's takes them on Hopper alone, and writes to no given tensor.

The backward multiplies by codes that lie the other way, which are made for the length of the product.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from meshlora.layers.frozen import FrozenMatrix
from meshlora.plan.base_options import BaseOptions
from meshlora.plan.rules import ModelPlan
from meshlora.wings.quantized.float8 import exponents_of, nearest, power
from meshlora.wings.quantized.kinds import COMPUTE, STORED
from meshlora_ground.compat.torch_fused import scaled_product
from meshlora_ground.compat.torch_operators import storage_id
from meshlora_ground.compat.torch_tensors import version_of
from meshlora_ground.errors import UnsupportedError

_CAPABILITY, _WIDTH = (8, 9), 16  # the least that has the kernel, and what divides both sides of a matrix
# Of the norm of a product: the rounding of its result to bfloat16, and what one scale a row changes.
_LIMIT = 2.0**-8 + 1e-3
_CHECKED_TOKENS = 512  # of a product, spread over it: the definition takes several copies in float32
_checked: set[tuple[object, ...]] = set()


def check_gpu_of(
    model: nn.Module, plan: ModelPlan, options: BaseOptions, *, dtype: torch.dtype, device: torch.device
) -> None:
    """Refuse `model.compute` on a GPU, in a dtype or of matrices that its kernels do not take.

    model: with its parallel leaves.

    Raises:
        UnsupportedError: names which.
    """
    if plan.compute is None or device.type != "cuda":
        return
    card, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    if torch.version.hip is not None:  # whose numbers would not tell: an MI300 calls itself 9.4
        rule = "its e4m3 may have another range than that of CUDA's cards, and was compared with none"
        raise UnsupportedError(f"model.compute on {card}, of ROCm", rule, "leave it out")
    if capability < _CAPABILITY:
        given = f"model.compute on {card}, capability {'.'.join(map(str, capability))}"
        raise UnsupportedError(given, "tensor cores take float8 from 8.9 on", "leave it out")
    if dtype != torch.bfloat16:
        raise UnsupportedError(
            f"model.compute of {dtype} on a GPU", "its products are bfloat16", "use model.dtype: bfloat16"
        )
    for name, packing in plan.quantized.items():
        if packing.kind not in (*COMPUTE.values(), *STORED.values()):  # held in few bits for memory alone
            continue
        leaf = model.get_submodule(name)
        assert isinstance(leaf, FrozenMatrix), name
        shape = tuple(leaf.weight.shape)
        if any(size % _WIDTH for size in shape):
            given = f"model.compute of {name}, {list(shape)} on each rank"
            raise UnsupportedError(given, f"a GPU's kernel takes multiples of {_WIDTH}", "leave it out, or use less tp")


def write_product(y: Tensor, x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None, *, step: int) -> None:
    """y `[T, out]` = Q(x) W^^T + bias: codes `[out, in]`, scales `[out, 1]`, or, with a step, of blocks of as many."""
    if not len(x):
        return
    rows = _rows(x)
    if step:
        of_blocks = codes.view(torch.float8_e4m3fn), scales, step
        torch.ops.meshlora.write_blocks(y, rows.codes, rows.scales, *of_blocks, bias)
    else:
        of_weight = codes.view(torch.float8_e4m3fn).T
        # The kernel takes a bias in the dtype of its result: one that trains may be float32.
        own_bias = None if bias is None else bias.to(y.dtype)
        scaled_product(rows.codes, of_weight, rows.scales, scales.view(1, -1), bias=own_bias, out=y)


def gradient(g: Tensor, codes: Tensor, scales: Tensor, *, step: int) -> Tensor:
    """Q(g) W^ `[T, in]`. codes: of W^, or W itself. scales: `[out, 1]`, all one number, or, with a step, of blocks."""
    _last.clear()  # else the inputs of the last product of the forward would stay for all of the backward
    found = g.new_empty(len(g), codes.shape[1])
    if len(g):
        # The scale of the matrix is along the sum: it goes with that of the tokens.
        of_g, of_tokens = torch.ops.meshlora.round_rows(g.contiguous(), None if step else scales)
        back = torch.ops.meshlora.codes_across(codes, scales)
        if step:
            torch.ops.meshlora.write_blocks(found, of_g, of_tokens, back, scales.T, step, None)
        else:
            scaled_product(of_g, back.T, of_tokens, _ones(codes.shape[1], g.device), bias=None, out=found)
    return found


def check_once(
    direction: str, found: Tensor, given: Tensor, definition: Callable[[Tensor], Tensor], bias: Tensor | None = None
) -> None:
    """Compare a product with its definition in float32, the first time that one of its shape is computed on a GPU.

    found, given: `[T, out]`, `[T, in]`. definition: the product of some rows of `given`, `[t, out]`.

    Shapes whose numbers of tokens have as many bits are one: batches of any length would each be compared. Inside a
    record nothing can be read: its first replay is compared as a whole.

    Raises:
        UnsupportedError: it is further off than rounding is.
    """
    tokens = len(found)
    key = direction, tokens.bit_length(), found.shape[1], given.shape[1], bias is None, found.device
    if not found.is_cuda or not tokens or key in _checked or torch.cuda.is_current_stream_capturing():
        return
    step = -(-tokens // _CHECKED_TOKENS)
    wanted = definition(given[::step])
    if bias is not None:
        wanted = wanted + bias.float()
    if not wanted.isfinite().all():  # the run will say where that comes from
        return
    error = ((found[::step].float() - wanted).norm() / wanted.norm().clamp(min=1e-30)).item()
    if not error <= _LIMIT:  # nor NaN
        gpu, shape = torch.cuda.get_device_name(found.device), list(found.shape)
        what = f"model.compute on {gpu}: a product {shape} of the {direction}"
        raise UnsupportedError(what, f"it is {error:.1e} off its definition (limit {_LIMIT:.1e})", "leave it out")
    _checked.add(key)


class _Rows(NamedTuple):
    """x, what it was then, and its codes with their scales."""

    x: Tensor
    state: tuple[object, ...]
    codes: Tensor
    scales: Tensor


_last: list[_Rows] = []


def _rows(x: Tensor) -> _Rows:
    """Codes of x `[T, in]`, those of the product before if that was of the same x: q, k and v share one."""
    state = storage_id(x.untyped_storage()), x.storage_offset(), x.shape, x.stride(), version_of(x)
    # It is held until the next product: its memory cannot be another tensor's.
    if not _last or _last[0].state != state:
        _last[:] = [_Rows(x.detach(), state, *torch.ops.meshlora.round_rows(x.contiguous(), None))]
    return _last[0]


@functools.cache
def _ones(number: int, device: torch.device) -> Tensor:
    return torch.ones(1, number, dtype=torch.float32, device=device)


# --- operators --------------------------------------------------------------------------------------------------------

_LIBRARY = torch.library.Library("meshlora", "DEF")
# x `[T, K]` -> its codes, e4m3, with one power of two a row, and these `[T, 1]`, times factor[0] if there is one.
_LIBRARY.define("round_rows(Tensor x, Tensor? factor) -> (Tensor, Tensor)")
# Codes `[K, N]`, uint8, or plain numbers, to be rounded with scale[0] -> the transpose of the codes, `[N, K]`.
_LIBRARY.define("codes_across(Tensor codes, Tensor scale) -> Tensor")
# out `[T, N]` = of_rows (rows W^T) + bias, where W[n,k] = scales[n // step, k // step] codes[n,k].
_OF_MATRIX = "Tensor codes, Tensor scales, int step, Tensor? bias"
_LIBRARY.define(f"write_blocks(Tensor(a!) out, Tensor rows, Tensor of_rows, {_OF_MATRIX}) -> ()")


def _rounded_by_definition(x: Tensor, factor: Tensor | None) -> tuple[Tensor, Tensor]:
    """As the kernel, on a CPU."""
    wide = x.float()
    exponents = exponents_of(wide.abs().amax(1, keepdim=True))
    codes = nearest(wide * power(-exponents, torch.float32)).to(torch.float8_e4m3fn)
    scales = power(exponents, torch.float32)
    return codes, scales if factor is None else scales * factor.flatten()[0]


def _across_by_definition(codes: Tensor, scale: Tensor) -> Tensor:
    if codes.dtype != torch.uint8:
        codes = nearest(codes.float() / scale.flatten()[0]).to(torch.float8_e4m3fn)
    return codes.view(torch.uint8).T.contiguous().view(torch.float8_e4m3fn)


def _blocks_by_definition(
    out: Tensor, rows: Tensor, of_rows: Tensor, codes: Tensor, scales: Tensor, step: int, bias: Tensor | None
) -> None:
    height, width = codes.shape
    of_codes = scales.repeat_interleave(step, 0)[:height].repeat_interleave(step, 1)[:, :width]
    product = of_rows * (rows.float() @ (of_codes * codes.float()).T)
    out.copy_(product if bias is None else product + bias.float())


def _rounded_on_gpu(x: Tensor, factor: Tensor | None) -> tuple[Tensor, Tensor]:
    from meshlora.wings.quantized import float8_kernels  # which needs Triton

    return float8_kernels.round_rows(x, factor)


def _across_on_gpu(codes: Tensor, scale: Tensor) -> Tensor:
    from meshlora.wings.quantized import float8_kernels

    return float8_kernels.codes_across(codes, scale)


def _blocks_on_gpu(
    out: Tensor, rows: Tensor, of_rows: Tensor, codes: Tensor, scales: Tensor, step: int, bias: Tensor | None
) -> None:
    from meshlora.wings.quantized import float8_block_kernels

    float8_block_kernels.write_blocks(out, rows, of_rows, codes, scales, step, bias)


def _rounded_shapes(x: Tensor, factor: Tensor | None) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x, dtype=torch.float8_e4m3fn), x.new_empty(len(x), 1, dtype=torch.float32)


def _across_shapes(codes: Tensor, scale: Tensor) -> Tensor:
    return codes.new_empty(codes.shape[1], codes.shape[0], dtype=torch.float8_e4m3fn)


_LIBRARY.impl("round_rows", _rounded_by_definition, "CPU")
_LIBRARY.impl("codes_across", _across_by_definition, "CPU")
_LIBRARY.impl("write_blocks", _blocks_by_definition, "CPU")
_LIBRARY.impl("round_rows", _rounded_on_gpu, "CUDA")
_LIBRARY.impl("codes_across", _across_on_gpu, "CUDA")
_LIBRARY.impl("write_blocks", _blocks_on_gpu, "CUDA")
_LIBRARY.impl("round_rows", _rounded_shapes, "Meta")
_LIBRARY.impl("codes_across", _across_shapes, "Meta")

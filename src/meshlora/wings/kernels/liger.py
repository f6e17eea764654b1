"""Fused kernels of liger-kernel as plain functions: the boundary to that package, and the check of its numbers.

Owns: which of its functions are called and how (`liger`), whether it is installed, and the comparison of each function
with its definition on the device and in the dtype of a run (`check_kernels`). Does not own: which modules call them
(`wings.kernels.fused`). Why these functions, and not its patched classes: docs/decisions/018.

The package is imported only where a run uses it: it needs Triton, which needs a GPU.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from meshlora.layers.head_loss import ChunkKernels
from meshlora.wings.kernels.stream_sums import StreamKernels
from meshlora.wings.kernels.tails import Tails
from meshlora_ground.errors import UnsupportedError, UserError, reason
from meshlora_ground.transfer import to_device
from meshlora_ground.versions import version_of

# A kernel may be off by so many roundings of its dtype, as the norm of the error over that of the result; and what its
# approximations of exp and tanh add in float32.
_ROUNDINGS, _LEAST = 4, 1e-5
# liger has another kernel for narrow rows where there are this many of them.
_MANY_ROWS = 4096 * 8


class Gate(NamedTuple):
    """The product `act(gate) * up`. All tensors `[..., F]`, contiguous.

    forward: gate, up -> product. back: gradient of the product, gate, up -> gradients of gate and up, which may be
    written over these. act: the activation by its definition.
    """

    forward: Callable[[Tensor, Tensor], Tensor]
    back: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    act: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Kernels:
    """Functions of one kernel each, for float32 and two-byte dtypes.

    Attributes:
        norm: x `[..., H]`, weight `[H]`, eps, offset, is_wide -> y `[..., H]` and r `[..., 1]` in float32:
            `y = n (offset + weight)`, `n = x r`, `r = (mean(x^2) + eps)^-1/2`. is_wide: rounded once, at the end; else
            n is rounded to the dtype of x before the weight.
        norm_back: gradient of y, x, weight, r, offset, is_wide -> that of x.
        rotate: q `[B, h, S, d]`, k `[B, k, S, d]`, cos and sin `[B or 1, S, d]` -> both rotated, as
            `x cos + [-x_2 | x_1] sin` with x_1 and x_2 the halves of a head. May write over q and k.
        rotate_back: their gradients -> those of q and k. May write over them.
        gates: name of an activation -> its gate.
        tails: in place of SiLU's gate, with low-rank terms, which are no package's; None: not asked for.
        chunk, stream: of the loss, and of sums of the residual stream, beside `tails`.
        errors: what a function raises that cannot run.
    """

    norm: Callable[[Tensor, Tensor, float, float, bool], tuple[Tensor, Tensor]]
    norm_back: Callable[[Tensor, Tensor, Tensor, Tensor, float, bool], Tensor]
    rotate: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    rotate_back: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    gates: Mapping[str, Gate]
    tails: Tails | None = None
    chunk: ChunkKernels | None = None
    stream: StreamKernels | None = None
    errors: tuple[type[Exception], ...] = (RuntimeError, TypeError, ValueError, AssertionError)


def liger_version() -> str:
    """The version of the installed liger-kernel; empty if it, or Triton, is not installed."""
    if importlib.util.find_spec("liger_kernel") is None or importlib.util.find_spec("triton") is None:
        return ""
    return version_of("liger-kernel")


def liger(asked: str = "liger") -> Kernels:
    """The kernels of the installed liger-kernel. asked: the value of `model.kernels`, for messages.

    Raises:
        UserError: it is not installed, does not run here, or has other functions than the versions known.
    """
    given, way_out = f"model.kernels: {asked}", "pip install 'meshlora[kernels]', or leave it out"
    if not (version := liger_version()):
        raise UserError(given, "liger-kernel and Triton are not installed", way_out)
    try:
        # Its modules import what they know of the device: drivers that do not fit raise errors of all kinds.
        from liger_kernel import ops
        from liger_kernel.ops.utils import calculate_settings
        from triton.errors import TritonError
    except (ImportError, RuntimeError, AttributeError, OSError) as error:
        raise UserError(f"{given} ({version})", f"it cannot be imported ({reason(error)})", way_out) from error
    # By name and before any call: another version fails here, with a way out, and not in a step.
    names = ("rms_norm", "rope", "swiglu", "geglu")
    if missing := [f"{n}_{way}" for n in names for way in ("forward", "backward") if not hasattr(ops, f"{n}_{way}")]:
        raise UserError(f"{given} ({version})", f"it has no {missing[0]}", "install liger-kernel>=0.8.5")
    modes = {False: "llama", True: "gemma"}

    def norm(x: Tensor, weight: Tensor, eps: float, offset: float, is_wide: bool) -> tuple[Tensor, Tensor]:
        y, _, r, *_ = ops.rms_norm_forward(x.contiguous(), weight, eps, offset, modes[is_wide], None)
        return y, r.view(*x.shape[:-1], 1)

    def norm_back(grad: Tensor, x: Tensor, weight: Tensor, r: Tensor, offset: float, is_wide: bool) -> Tensor:
        rows = x.contiguous().view(-1, x.shape[-1])
        settings = calculate_settings(x.shape[-1])
        # Not over the gradient: a residual has the same one. The weight is frozen.
        how = (offset, int(is_wide), *settings, False, None)
        dx: Tensor = ops.rms_norm_backward(grad.contiguous(), rows, weight, r.view(-1), *how, needs_dw=False)[0]
        return dx.view(x.shape)

    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        rotated_q, rotated_k, *_ = ops.rope_forward(q, k, cos, sin)
        return rotated_q, rotated_k

    def gate(name: str, act: Callable[[Tensor], Tensor]) -> Gate:
        forward, back = getattr(ops, f"{name}_forward"), getattr(ops, f"{name}_backward")
        return Gate(lambda a, b: forward(a, b)[2], lambda grad, a, b: back(a, b, grad), act)

    gates = {"silu": gate("swiglu", F.silu), "gelu_tanh": gate("geglu", lambda x: F.gelu(x, approximate="tanh"))}
    return Kernels(norm, norm_back, rotate, ops.rope_backward, gates, errors=(*Kernels.errors, TritonError))


# --- the check --------------------------------------------------------------------------------------------------------


class _Drawn:
    """Random tensors of a dtype on a device, and the same numbers in float64 on the CPU."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self._generator = torch.Generator().manual_seed(0)

    def __call__(self, *shape: int) -> tuple[Tensor, Tensor]:
        rounded = torch.randn(shape, generator=self._generator, device="cpu").to(self.dtype)
        return to_device(rounded, self.device), rounded.double()


def check_kernels(kernels: Kernels, device: torch.device, dtype: torch.dtype) -> None:
    """Compare each of `kernels` with its definition in float64, both ways.

    Raises:
        UnsupportedError: one gives other numbers, or does not run.
    """
    drawn = _Drawn(device, dtype)
    limit = max(_ROUNDINGS * torch.finfo(dtype).eps, _LEAST)
    many = (_MANY_ROWS,) if device.type == "cuda" else ()
    for name, check, instead in (
        ("liger-kernel's norm", lambda: _of_norms(kernels, drawn, (6, *many)), "none"),
        ("liger-kernel's rotation", lambda: _of_rotation(kernels, drawn), "none"),
        ("liger-kernel's gate", lambda: _of_gates(kernels, drawn), "none"),
        ("our gate with low-rank terms", lambda: _of_tails(kernels, drawn), "liger"),
        ("our loss of a chunk", lambda: _of_chunk(kernels, drawn), "liger"),
        ("our sum with a norm", lambda: _of_stream(kernels, drawn), "liger"),
    ):
        given, way_out = f"{name} on {device.type} in {dtype}", f"use model.kernels: {instead}"
        try:
            worst = max((_distance(found, right) for found, right in check()), default=0.0)
        except kernels.errors as error:
            raise UnsupportedError(given, f"it does not run here ({reason(error)})", way_out) from error
        if not worst <= limit:  # and not `>`: NaN is no pass
            raise UnsupportedError(given, f"it is {worst:.1e} off its definition, above {limit:.1e}", way_out)


def _distance(found: Tensor, right: Tensor) -> float:
    return float((found.cpu().double() - right).norm() / right.norm())


def _of_norms(kernels: Kernels, drawn: _Drawn, rows: Sequence[int]) -> Iterator[tuple[Tensor, Tensor]]:
    for number in rows:
        for offset, is_wide in ((0.0, False), (0.0, True), (1.0, True)):
            (x, x64), (weight, w64), (grad, g64) = drawn(number, 96), drawn(96), drawn(number, 96)
            y, r = kernels.norm(x, weight, 1e-5, offset, is_wide)
            dx = kernels.norm_back(grad, x, weight, r, offset, is_wide)
            r64 = (x64.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
            h = g64 * (offset + w64)
            yield y, x64 * r64 * (offset + w64)
            yield r, r64
            yield dx, r64 * h - x64 * r64**3 * (h * x64).mean(-1, keepdim=True)


def _of_rotation(kernels: Kernels, drawn: _Drawn) -> Iterator[tuple[Tensor, Tensor]]:
    batch, length, width = 2, 5, 16
    (cos, cos64), (sin, sin64) = drawn(batch, length, width), drawn(batch, length, width)
    for half in (cos, sin, cos64, sin64):
        half[..., width // 2 :] = half[..., : width // 2]  # as angles have it, and kernels may read it

    def turned(x: Tensor, way: int) -> Tensor:
        x1, x2 = x.chunk(2, -1)
        return x * cos64.unsqueeze(1) + way * torch.cat([-x2, x1], -1) * sin64.unsqueeze(1)

    for way, function in ((1, kernels.rotate), (-1, kernels.rotate_back)):
        (q, q64), (k, k64) = drawn(batch, length, 4, width), drawn(batch, length, 2, width)
        found = function(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
        yield from zip(found, (turned(x.transpose(1, 2), way) for x in (q64, k64)), strict=True)


def _of_gates(kernels: Kernels, drawn: _Drawn) -> Iterator[tuple[Tensor, Tensor]]:
    for gate in kernels.gates.values():
        (a, a64), (b, b64), (grad, g64) = drawn(6, 96), drawn(6, 96), drawn(6, 96)
        a64.requires_grad_()
        act = gate.act(a64)
        yield gate.forward(a, b), act.detach() * b64
        da, db = gate.back(grad, a, b)
        yield da, torch.autograd.grad(act, a64, g64 * b64, retain_graph=True)[0]
        yield db, g64 * act.detach()


def _of_tails(kernels: Kernels, drawn: _Drawn) -> Iterator[tuple[Tensor, Tensor]]:
    if kernels.tails is None:
        return
    tokens, width, r, scale = 70, 160, 8, 0.5
    shapes = [(tokens, width)] * 2 + [(tokens, r)] * 2 + [(width, r)] * 2 + [(r, width)]
    given, exact = zip(*(drawn(*shape) for shape in shapes), strict=True)
    (grad, g64), (dz, dz64) = drawn(tokens, width), drawn(tokens, r)
    gate, up, z_gate, z_up, b_gate, b_up, a = (leaf.requires_grad_() for leaf in exact)
    product = F.silu(gate + z_gate @ b_gate.T) * (up + z_up @ b_up.T)
    z = scale * product @ a.T
    yield from zip(kernels.tails.forward(*given, scale), (product.detach(), z.detach()), strict=True)
    right = torch.autograd.grad((product * g64).sum() + (z * dz64).sum(), exact)
    d_gate, d_up, of_z, of_factors = kernels.tails.back(grad, *given, dz, scale)
    yield from zip((d_gate, d_up), right[:2], strict=True)
    yield of_z.sum(0), torch.cat(right[2:4], 1)
    yield of_factors.sum(0), torch.cat([right[4].T, right[5].T, right[6]])


def _of_chunk(kernels: Kernels, drawn: _Drawn) -> Iterator[tuple[Tensor, Tensor]]:
    if kernels.chunk is None:
        return
    tokens, width, real = 5, 9000, 8990  # the rest is padding
    logits, exact = drawn(tokens, width)
    labels = torch.tensor([3, 8989, 0, 4096, 17], device="cpu")
    is_here = torch.tensor([True, True, False, True, True], device="cpu")  # of another rank
    place = to_device(labels.unsqueeze(1), drawn.device), to_device(is_here, drawn.device)
    sums = torch.zeros(4, tokens, device=drawn.device)
    kernels.chunk.sums(sums, logits, real, *place)
    exact = exact[:, :real]
    top = exact.amax(1)
    right = torch.stack([top, (exact - top.unsqueeze(1)).exp().sum(1), exact[range(tokens), labels] * is_here])
    yield sums[:3], right
    gradient = exact.softmax(1) - F.one_hot(labels, real) * is_here.unsqueeze(1)
    yield kernels.chunk.gradient(logits, sums, real, *place), F.pad(gradient, (0, width - real))


def _of_stream(kernels: Kernels, drawn: _Drawn) -> Iterator[tuple[Tensor, Tensor]]:
    if kernels.stream is None:
        return
    tokens, width, r, scale = 37, 600, 8, 0.5
    shapes = (tokens, width), (tokens, r), (width, r), (tokens, width), (width,)
    given, exact = zip(*(drawn(*shape) for shape in shapes), strict=True)
    y, z, b, residual, weight = exact
    h, n, inverse = kernels.stream.forward(*given, 1e-5)
    yield h, y + z @ b.T + residual
    leaf = h.cpu().double().requires_grad_()  # of h as it was rounded
    right = (leaf.square().mean(1) + 1e-5).rsqrt()
    normed = leaf * right.unsqueeze(1) * weight
    yield from zip((n, inverse), (normed.detach(), right.detach()), strict=True)
    (grad, g64), (passed, p64) = drawn(tokens, width), drawn(tokens, width)
    (of_norm,) = torch.autograd.grad(normed, leaf, g64)
    for added, total in ((None, of_norm), (passed, of_norm + p64)):
        dh, dz = kernels.stream.back(grad, added, h, given[4], inverse, given[2], scale)
        yield from zip((dh, dz), (total, scale * total @ b), strict=True)

"""Modules that compute with fused kernels: norms, rotations and gated MLPs whose code is known.

Owns: the autograd functions around the kernels, finding the modules that call them, and what may be written in place.
Does not own: the kernels and the check of their numbers (`wings.kernels.liger`), the same modules without kernels
(`wings.kernels.rms_norm`, `wings.kernels.rotary`, `wings.kernels.gate_recompute`).

Two kernels write over their arguments, and both are safe by the code that calls them, known statement by statement:

- A rotation gets queries and keys fresh from a projection or a norm, neither of which saves its output, and the code
  reads only what comes back. Its backward gets gradients from attention alone.
- The backward of a gate writes over gate and up, saved by it and by the linear that is called with the product, whose
  backward has run before. Nothing else has them.

What is written over is told to autograd: a graph that had saved it ends with an error, never with other numbers.
"""

from __future__ import annotations

import inspect
from collections import Counter
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.graph import increment_version
from transformers.activations import GELUTanh, SiLUActivation

from meshlora.layers.notes import note
from meshlora.wings.kernels.gate_recompute import Activation, Product
from meshlora.wings.kernels.known_code import digest
from meshlora.wings.kernels.liger import Gate, Kernels
from meshlora.wings.kernels.loss_chunk import note_logits
from meshlora.wings.kernels.rms_norm import RmsNormFunction
from meshlora.wings.kernels.rotary import rotates, with_rotation
from meshlora.wings.kernels.stream_sums import KnownLayer, known_layers, layer_forward, ready_norm
from meshlora.wings.kernels.tails import Tails, gated_mlp

# `digest` of forwards of transformers 5.23 -> (offset of the weight, whether only the result is rounded): of
# LlamaRMSNorm, GemmaRMSNorm and Olmo2RMSNorm.
_NORMS = {"0dcf5f011ba2ed45": (0.0, False), "69ad342be1e5763c": (1.0, True), "152131c0d8a8a799": (0.0, True)}
# Of `_norm`, which GemmaRMSNorm calls.
_NORM_OF_GEMMA = "75ad3dab46c7e16e"
# Attentions that give the rotation fresh queries and keys, and do not read these again: of llama, qwen2, qwen3,
# mistral, gemma2, gemma3 and smollm3, and of the families with the code of one of them; below as 5.24 has them.
_ATTENTIONS = {
    *("a8d13fe2a6be4594", "db5241fa49e17edc", "d630d3c34cd20646", "48223065e20a9050"),
    *("b47595a84d97d9c8", "10d0b3cbac5fc2ad", "9e530b6f556fde24"),
    *("d34a67d9e153db6f", "2550e308421a26f9", "837da7ae5bc2c8de", "964b8783fb667d01"),
    *("60833fe06346cad6", "e78354d891bb2eb7", "50afcd340fd32acc"),
}
# `down_proj(act_fn(gate_proj(x)) * up_proj(x))`: of LlamaMLP, Exaone4_5_MLP.
_MLPS = {"aff9046952d1b312", "1e2a4e208155eb34"}
_WIDEST = 65536  # of liger's `calculate_settings`
_ACTIVATIONS: dict[type, str] = {nn.SiLU: "silu", SiLUActivation: "silu", GELUTanh: "gelu_tanh"}


def fusable(model: nn.Module) -> Counter[str]:
    """How many norms, rotations and gated MLPs of `model` have known code."""
    found = Counter[str]()
    for module in model.modules():
        found["norms"] += _norm_of(module) is not None
        found["rotations"] += _rotates_safely(module)
        found["gated MLPs"] += _activation_of(module) is not None
    return +found  # without kinds of which there are none


def gates_of_silu(model: nn.Module) -> list[str]:
    """Paths of the gated MLPs whose low-rank terms can be computed with the gate."""
    return [path for path, module in model.named_modules() if _activation_of(module) == "silu"]


def sums_of_stream(model: nn.Module) -> list[str]:
    """Paths of the linears whose low-rank terms can be computed with the sum and the norm after them."""
    found = []
    for known in _layers_with_sums(model):
        found.append(f"{known.path}.self_attn.o_proj")
        if known.after is not None and _activation_of(known.layer.get_submodule("mlp")) == "silu":
            found.append(f"{known.path}.mlp.down_proj")
    return found


def _layers_with_sums(model: nn.Module) -> list[KnownLayer]:
    found = known_layers(model, lambda norm: _norm_of(norm) == (0.0, False))
    return [known for known in found if _rotates_safely(known.layer.get_submodule("self_attn"))]


def fuse(model: nn.Module, kernels: Kernels) -> None:
    """Let every module of `model` whose code is known compute with `kernels`. Before other forwards are given."""
    if kernels.chunk is not None:
        note_logits(model, kernels.chunk)
    if kernels.stream is not None:
        for known in _layers_with_sums(model):
            has_gate = _activation_of(known.layer.get_submodule("mlp")) == "silu"
            known.layer.forward = MethodType(layer_forward(known, kernels.stream, has_gate=has_gate), known.layer)
    for module in model.modules():
        if "forward" in vars(module):  # it is of another stage
            continue
        if (kind := _norm_of(module)) is not None:
            module.forward = MethodType(_norm(kernels, *kind), module)
        elif _rotates_safely(module):
            module.forward = MethodType(with_rotation(type(module).forward, _rotation(kernels)), module)
        elif (activation := _activation_of(module)) is not None:
            tails = kernels.tails if activation == "silu" else None
            module.forward = MethodType(_mlp(kernels.gates[activation], tails), module)


# --- norms ------------------------------------------------------------------------------------------------------------


def _norm_of(module: nn.Module) -> tuple[float, bool] | None:
    own: Any = type(module)
    kind = _NORMS.get(digest(own.forward))
    if kind is None or not isinstance(getattr(module, "weight", None), Tensor):
        return None
    if kind == (1.0, True) and digest(own._norm) != _NORM_OF_GEMMA:
        return None
    return kind


def _norm(kernels: Kernels, offset: float, is_wide: bool) -> Any:
    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        if (found := ready_norm(self, hidden_states)) is not None:
            return found
        weight = self.weight
        if weight.requires_grad or weight.dtype != hidden_states.dtype or not _is_computed(hidden_states):
            return type(self).forward(self, hidden_states)
        eps = self.eps if hasattr(self, "eps") else self.variance_epsilon
        if is_wide:
            return WideNormFunction.apply(hidden_states, weight, eps, offset, kernels)
        return RmsNormFunction.apply(hidden_states, weight, eps, kernels)

    return forward


class WideNormFunction(Function):
    """y = n (offset + w), rounded once; n and the gradient of x as in `RmsNormFunction`, with h = g (offset + w)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, offset: float, kernels: Kernels) -> Tensor:
        y, r = kernels.norm(x, weight, eps, offset, True)
        ctx.save_for_backward(x, weight, r)
        ctx.offset, ctx.kernels = offset, kernels
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dx = ctx.kernels.norm_back(grads[0], *ctx.saved_tensors, ctx.offset, True)
        return dx, None, None, None, None


# --- rotations --------------------------------------------------------------------------------------------------------


def _rotates_safely(module: nn.Module) -> bool:
    forward: Any = type(module).forward
    return rotates(forward) and digest(inspect.unwrap(forward), may_be_decorated=True) in _ATTENTIONS


def _rotation(kernels: Kernels) -> Any:
    def rotated(original: Any) -> Any:
        def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
            """As transformers' function of the name."""
            is_mixed = not q.dtype == k.dtype == cos.dtype == sin.dtype
            widths = {q.shape[-1], k.shape[-1], cos.shape[-1], sin.shape[-1]}
            is_other = unsqueeze_dim != 1 or cos.ndim != 3 or len(widths) > 1 or q.shape[-1] % 2
            if is_mixed or is_other or cos.requires_grad or cos.shape[0] not in (1, len(q)) or not _is_computed(q):
                return original(q, k, cos, sin, unsqueeze_dim)
            return FusedRotation.apply(q, k, cos, sin, kernels)

        return rotate

    return rotated


class FusedRotation(Function):
    """`RotationFunction` of queries and keys at once, written over them where their memory is whole tokens."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, kernels: Kernels) -> tuple[Tensor, Tensor]:
        cos, sin = cos.contiguous(), sin.contiguous()  # kernels read them by the width of a row, both ways
        found = kernels.rotate(q.detach(), k.detach(), cos, sin)
        for before, after in zip((q, k), found, strict=True):
            if after.data_ptr() == before.data_ptr():
                increment_version(before)
        ctx.save_for_backward(cos, sin)
        ctx.kernels = kernels
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dq, dk = ctx.kernels.rotate_back(*grads, *ctx.saved_tensors)
        return dq, dk, None, None, None


# --- gated MLPs -------------------------------------------------------------------------------------------------------


def _activation_of(module: nn.Module) -> str | None:
    if digest(type(module).forward) not in _MLPS:
        return None
    return _ACTIVATIONS.get(type(getattr(module, "act_fn", None)))


def _mlp(gate: Gate, tails: Tails | None) -> Any:
    activation = Activation(gate.act, gate.forward)

    def forward(self: Any, x: Tensor) -> Any:
        if tails is not None and _is_computed(x) and (found := gated_mlp(self, x, tails)) is not None:
            return found
        gated, up = self.gate_proj(x), self.up_proj(x)
        if (gated.shape, gated.dtype) != (up.shape, up.dtype) or not _is_computed(gated):
            return self.down_proj(self.act_fn(gated) * up)
        gated, up = gated.contiguous(), up.contiguous()  # a kernel reads rows by their width
        product = FusedGate.apply(gated, up, gate)
        if product.requires_grad:
            note(product, Product(gated.detach(), up, activation))
        return self.down_proj(product)

    return forward


class FusedGate(Function):
    """forward: y = act(gate) up; backward: dgate = g up act'(gate), du = g act(gate), over gate and up."""

    @staticmethod
    def forward(ctx: Any, gated: Tensor, up: Tensor, gate: Gate) -> Tensor:
        ctx.save_for_backward(gated, up)
        ctx.gate = gate
        return gate.forward(gated, up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gated, up = ctx.saved_tensors
        found = ctx.gate.back(grads[0].contiguous(), gated.detach(), up.detach())
        increment_version([gated, up])
        return *found, None


def _is_computed(x: Tensor) -> bool:
    """Whether kernels compute in the dtype of x, which has rows, of a width that one program can hold."""
    has_dtype = x.dtype in (torch.float32, torch.bfloat16, torch.float16)
    return has_dtype and x.numel() > 0 and x.shape[-1] <= _WIDEST

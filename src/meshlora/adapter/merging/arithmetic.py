"""The arithmetic of a merge: a weight and an adapter's factors in, the merged weight out.

Owns: computing it once, in float32 (float64 beside float64), rounded by nobody here. Does not own: which weights and
factors these are (`adapter.merging.merge`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from meshlora.adapter.merging.changes import Lora


def merged_weight(weight: Tensor, lora: Lora, a: Tensor, b: Tensor, magnitude: Tensor | None) -> Tensor:
    """`W + s B A` (DoRA: its rows scaled to norm m), in place where `weight` is float32 or float64.

    Args:
        weight: [out, in], or [in, out] where `lora.is_transposed`; a stack of these, `[E, ...]`, of experts.
        a: [r, in]. b: [out, r]. magnitude: [out]. Of experts a: [r*E, in], b: [out, r*E], as in `Lora`.
    """
    weight = weight.to(wide_dtype(weight))
    if lora.num_experts:
        for expert, matrix in enumerate(weight):
            matrix.add_(_product_of_expert(expert, lora, a, b, matrix.dtype))
        return weight
    view = weight.T if lora.is_transposed else weight  # [out, in]
    if lora.residual == "pissa":
        u, s, vh = torch.linalg.svd(view, full_matrices=False)
        view.addmm_(u[:, : lora.r] * s[: lora.r], vh[: lora.r], alpha=-1)
    elif lora.residual == "olora":
        q, r = torch.linalg.qr(view)
        # Times the scale, as PEFT has it: B A starts as Q R, not as Q R / s.
        view.addmm_(q[:, : lora.r], r[: lora.r], alpha=-lora.scaling)
    view.addmm_(b.to(view.dtype), a.to(view.dtype), alpha=lora.scaling)
    if magnitude is not None:
        norm = torch.linalg.vector_norm(view, dim=1)
        view.mul_((magnitude.to(view.dtype) / norm)[:, None])
    return weight


def wide_dtype(tensor: Tensor) -> torch.dtype:
    """In which products are computed."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _product_of_expert(expert: int, lora: Lora, a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """`s B A` of one expert, as its matrix is stored."""
    own_a = a.view(lora.num_experts, lora.r, -1)[expert]
    own_b = b.view(-1, lora.r, lora.num_experts)[:, :, expert]
    product = (own_b.to(dtype) @ own_a.to(dtype)) * lora.scaling
    return product.T if lora.is_transposed else product


def merged_expert(matrix: Tensor, place: tuple[slice | int, ...], lora: Lora, a: Tensor, b: Tensor) -> Tensor:
    """One matrix of one expert, which lies at `place` in the parameter that the adapter changes."""
    matrix = matrix.to(wide_dtype(matrix))
    expert, *inside = place
    assert isinstance(expert, int), place
    return matrix.add_(_product_of_expert(expert, lora, a, b, matrix.dtype)[tuple(inside)])

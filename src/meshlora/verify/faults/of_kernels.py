"""Faults of fused kernels, in what a device gives after each was compared with its definition."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from meshlora.verify.faults.fault import after
from meshlora.verify.features import Feature
from meshlora.wings.kernels import kernels as kernels_of_models
from meshlora.wings.kernels.liger import Gate, Kernels
from meshlora.wings.kernels.tails import Tails


def _with_gates(kernels: Kernels | None, change: Any) -> Kernels | None:
    if kernels is None:
        return None
    return dataclasses.replace(kernels, gates={name: change(gate) for name, gate in kernels.gates.items()})


@after(kernels_of_models, "kernels_of", needs={Feature.KERNELS})
def kernel_rotates_gradients_forward(kernels: Kernels | None, *_: Any, **__: Any) -> Kernels | None:
    """the gradient of a rotation is turned back"""
    return kernels and dataclasses.replace(kernels, rotate_back=kernels.rotate)  # None where none are in use


@after(kernels_of_models, "kernels_of", needs={Feature.KERNELS})
def kernel_norm_without_weight(kernels: Kernels | None, *_: Any, **__: Any) -> Kernels | None:
    """a norm is multiplied by its weight"""
    if kernels is None:
        return None
    norm = kernels.norm

    def plain(x: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        return norm(x, weight.new_ones(weight.shape), *rest)

    return dataclasses.replace(kernels, norm=plain)


@after(kernels_of_models, "kernels_of", needs={Feature.KERNELS})
def kernel_gate_and_up_exchanged(kernels: Kernels | None, *_: Any, **__: Any) -> Kernels | None:
    """each of gate and up gets its own gradient"""

    def exchanged(gate: Gate) -> Gate:
        return gate._replace(back=lambda grad, gated, up: gate.back(grad, gated, up)[::-1])  # both have one shape

    return _with_gates(kernels, exchanged)


@after(kernels_of_models, "kernels_of", needs={Feature.KERNELS})
def kernel_writes_product_over_gate(kernels: Kernels | None, *_: Any, **__: Any) -> Kernels | None:
    """what the backward reads is as the forward left it"""

    def over(gate: Gate) -> Gate:
        def forward(gated: Tensor, up: Tensor) -> Tensor:
            product = gate.forward(gated, up)
            gated.data.copy_(product)  # as a kernel: autograd is not told
            return product

        return gate._replace(forward=forward)

    return _with_gates(kernels, over)


def _with_tails(kernels: Kernels | None, change: Any) -> Kernels | None:
    if kernels is None or kernels.tails is None:
        return kernels
    return dataclasses.replace(kernels, tails=change(kernels.tails))


@after(kernels_of_models, "kernels_of", needs={Feature.TAILS})
def tail_left_out_of_gate(kernels: Kernels | None, *_: Any, **__: Any) -> Kernels | None:
    """both ways gate has its low-rank term"""

    def without(own: Tails) -> Tails:
        def forward(gate: Tensor, up: Tensor, z_gate: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
            return own.forward(gate, up, 0 * z_gate, *rest)

        return own._replace(forward=forward)

    return _with_tails(kernels, without)


@after(kernels_of_models, "kernels_of", needs={Feature.TAILS})
def tail_left_out_of_gradient_of_product(kernels: Kernels | None, *_: Any, **__: Any) -> Kernels | None:
    """the gradient of the product has the term of the A after it"""

    def without(own: Tails) -> Tails:
        def back(*given: Any) -> Any:
            *others, a, dz, scale = given
            of_a = own.back(*(tensor.clone() for tensor in others), a, dz, scale)[3][:, -len(a) :]
            *found, of_factors = own.back(*others, 0 * a, dz, scale)
            of_factors[:, -len(a) :] = of_a  # its own gradient is as it was
            return *found, of_factors

        return own._replace(back=back)

    return _with_tails(kernels, without)


@after(kernels_of_models, "kernels_of", needs={Feature.TAILS})
def tail_gradients_of_gate_and_up_exchanged(kernels: Kernels | None, *_: Any, **__: Any) -> Kernels | None:
    """each B has the gradient of its own term"""

    def exchanged(own: Tails) -> Tails:
        def back(*given: Any) -> Any:
            *found, of_factors = own.back(*given)
            r = given[3].shape[1]  # of both z
            parts = of_factors[:, r : 2 * r], of_factors[:, :r], of_factors[:, 2 * r :]
            return *found, torch.cat(parts, 1)

        return own._replace(back=back)

    return _with_tails(kernels, exchanged)


@after(kernels_of_models, "kernels_of", needs={Feature.TAILS})
def tail_without_scale_of_next_linear(kernels: Kernels | None, *_: Any, **__: Any) -> Kernels | None:
    """z of the linear after the gate has its scale"""

    def unscaled(own: Tails) -> Tails:
        def forward(*given: Any) -> tuple[Tensor, Tensor]:
            return own.forward(*given[:-1], 1.0)

        return own._replace(forward=forward)

    return _with_tails(kernels, unscaled)


@after(kernels_of_models, "kernels_of", needs={Feature.TAILS})
def chunk_gradient_without_labels(kernels: Kernels | None, *_: Any, **__: Any) -> Kernels | None:
    """the gradient of a label's logit is p - 1"""
    if kernels is None or kernels.chunk is None:
        return kernels
    gradient = kernels.chunk.gradient

    def without(logits: Tensor, sums: Tensor, real: int, place: Tensor, is_here: Tensor) -> Tensor:
        return gradient(logits, sums, real, place, is_here & False)

    return dataclasses.replace(kernels, chunk=kernels.chunk._replace(gradient=without))

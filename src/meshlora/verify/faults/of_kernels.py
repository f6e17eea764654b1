"""Faults of fused kernels, in what a device gives after each was compared with its definition."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor

from meshlora.verify.faults.fault import after
from meshlora.verify.features import Feature
from meshlora.wings.kernels import kernels as kernels_of_models
from meshlora.wings.kernels.liger import Gate, Kernels


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

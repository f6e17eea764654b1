"""Faults of fused kernels, in what a device gives after each was compared with its definition."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from torch import Tensor

from meshlora.verify.faults.fault import Code, after, fault
from meshlora.verify.features import Feature
from meshlora.wings.kernels import kernels as kernels_of_models
from meshlora.wings.kernels.liger import Kernels


def _changed(own: Any, name: str, wrong: Code) -> Any:
    """`own`, a function, or what has one of this name, with wrong code in its place. None: it is not there."""
    if isinstance(own, dict):
        return {key: _changed(each, name, wrong) for key, each in own.items()}
    if own is None or not name:
        return own and functools.partial(wrong, own)
    return own._replace(**{name: functools.partial(wrong, getattr(own, name))})


def _of_kernels(group: str, name: str = "") -> Any:
    """`around` of a function of the kernels in use: `group` itself, or its function `name`."""

    def put_in(wrong: Code, kernels_of: Code) -> Code:
        def of(*args: Any, **rest: Any) -> Kernels | None:
            kernels: Kernels | None = kernels_of(*args, **rest)  # None where none are in use
            return kernels and dataclasses.replace(kernels, **{group: _changed(getattr(kernels, group), name, wrong)})

        return of

    return functools.partial(fault, put_in, kernels_of_models, "kernels_of")


@after(kernels_of_models, "kernels_of", needs={Feature.KERNEL_ROTATIONS})
def kernel_rotates_gradients_forward(kernels: Kernels | None, *_: Any, **__: Any) -> Kernels | None:
    """the gradient of a rotation is turned back"""
    return kernels and dataclasses.replace(kernels, rotate_back=kernels.rotate)  # None where none are in use


@_of_kernels("norm")(needs={Feature.KERNEL_NORMS})
def kernel_norm_without_weight(norm: Any, x: Tensor, weight: Tensor, *rest: Any) -> Any:
    """a norm is multiplied by its weight"""
    return norm(x, weight.new_ones(weight.shape), *rest)


@_of_kernels("gates", "back")(needs={Feature.KERNEL_GATES})
def kernel_gate_and_up_exchanged(back: Any, *given: Tensor) -> Any:
    """each of gate and up gets its own gradient"""
    return back(*given)[::-1]  # both have one shape


@_of_kernels("gates", "forward")(needs={Feature.KERNEL_GATES})
def kernel_writes_product_over_gate(forward: Any, gated: Tensor, up: Tensor) -> Any:
    """what the backward reads is as the forward left it"""
    product = forward(gated, up)
    gated.data.copy_(product)  # as a kernel: autograd is not told
    return product


@_of_kernels("tails", "forward")(needs={Feature.TAILS})
def tail_left_out_of_gate(forward: Any, gate: Tensor, up: Tensor, z_gate: Tensor, *rest: Any) -> Any:
    """both ways gate has its low-rank term"""
    return forward(gate, up, 0 * z_gate, *rest)


@_of_kernels("tails", "back")(needs={Feature.TAILS})
def tail_left_out_of_gradient_of_product(back: Any, *given: Any) -> Any:
    """the gradient of the product has the term of the A after it"""
    *others, a, dz, scale = given
    of_a = back(*(tensor.clone() for tensor in others), a, dz, scale)[3][:, -len(a) :]
    *found, of_factors = back(*others, 0 * a, dz, scale)
    of_factors[:, -len(a) :] = of_a  # its own gradient is as it was
    return *found, of_factors


@_of_kernels("tails", "back")(needs={Feature.TAILS})
def tail_gradients_of_gate_and_up_exchanged(back: Any, *given: Any) -> Any:
    """each B has the gradient of its own term"""
    *found, of_factors = back(*given)
    r = given[3].shape[1]  # of both z
    return *found, torch.cat((of_factors[:, r : 2 * r], of_factors[:, :r], of_factors[:, 2 * r :]), 1)


@_of_kernels("tails", "forward")(needs={Feature.TAILS})
def tail_without_scale_of_next_linear(forward: Any, *given: Any) -> Any:
    """z of the linear after the gate has its scale"""
    return forward(*given[:-1], 1.0)


@_of_kernels("chunk", "gradient")(needs={Feature.LOSS_CHUNKS})
def chunk_gradient_without_labels(gradient: Any, *given: Any) -> Any:
    """the gradient of a label's logit is p - 1"""
    *others, is_here = given
    return gradient(*others, is_here & False)


@_of_kernels("stream", "forward")(needs={Feature.STREAM_SUMS})
def sum_without_low_rank_term(forward: Any, y: Tensor, z: Tensor, *rest: Any) -> Any:
    """the residual stream has the low-rank term of each linear"""
    return forward(y, 0 * z, *rest)


@_of_kernels("stream", "back")(needs={Feature.STREAM_SUMS})
def sum_without_gradient_of_stream(back: Any, grad: Tensor, _: Tensor | None, *rest: Any) -> Any:
    """the stream before a norm has the gradient of the sum after it"""
    return back(grad, None, *rest)


@_of_kernels("stream", "back")(needs={Feature.STREAM_SUMS})
def sum_without_scale_in_gradient(back: Any, *given: Any) -> Any:
    """the gradient of z has the scale"""
    return back(*given[:-1], 1.0)

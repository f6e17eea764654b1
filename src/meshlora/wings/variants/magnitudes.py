"""DoRA (Liu et al., 2024, arXiv 2402.09353): `W + s B A` with its rows scaled to trained magnitudes m.

    y = x W^T + (m / n - 1) D(x) W^T + m / n s D(x) A^T B^T + b,     n = ||W + s B A||

as PEFT has it: with dropout D only what the magnitudes change is of D(x). Computed as

    k + m / n (p - k) + b,     p = x W^T + s D(x) A^T B^T,     k = (x - D(x)) W^T

of the product p without magnitudes, so that without dropout, k = 0, there is one product with W and not two.

n is a constant in the backward (section 4.3 of the paper). Of an embedding, whose table is W^T `[V, H]`, it is taken
over the vocabulary. A row-parallel linear and a split embedding have terms of a sum over tp, each scaled before that
sum: so m lies on ranks as B does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshlora.comm.collectives import all_reduce_sum
from meshlora.layers.adapted import Variant
from meshlora.layers.dropout import DropFunction
from meshlora.layers.embedding import ParallelEmbedding
from meshlora.layers.frozen import frozen_linear, unpacked
from meshlora.layers.linear import ParallelLinear
from meshlora.layers.tokens import Mask
from meshlora.model.dp_shard import whole_weights
from meshlora.plan.layout import Split
from meshlora_ground.float64 import lift, wide_dtype

_Leaf = ParallelLinear | ParallelEmbedding


class Magnitudes(Variant):
    """The magnitudes m `[out_local]`, the part `magnitude`."""

    def product(self, leaf: _Leaf, adapter: str, y: Tensor, x: Tensor, mask: Mask | None) -> Tensor:
        ratio = self.ratio(leaf, adapter).to(y.dtype)
        if mask is None:
            return y * ratio
        kept = kept_of_base(leaf, x, mask)
        return kept + (y - kept) * ratio

    def ratio(self, leaf: _Leaf, adapter: str) -> Tensor:
        """`m / ||W + s B A||` of each output feature, `[out_local]`."""
        magnitude = self.parts["magnitude"]
        return magnitude / weight_norm(leaf, adapter).to(magnitude.dtype)


def kept_of_base(leaf: Any, x: Tensor, mask: Mask) -> Tensor:
    """`(x - D(x)) W^T` `[T, out_local]` of x `[T, in_local]`: what magnitudes leave as it is."""
    return frozen_linear(x - DropFunction.apply(x, [mask]), leaf.frozen_weight, None)


def first_magnitude(model: Any, leaf: _Leaf, adapter: str, name: str) -> Tensor:
    """That of a new adapter on the leaf `name`: with it nothing is scaled. Collective."""
    # The norm of an output feature is that of its whole row. Lifted, or it would be rounded as tp cuts its sum.
    with whole_weights(model, name), lift(model.dtype == torch.float64):
        return weight_norm(leaf, adapter).to(wide_dtype(model.dtype))


@torch.no_grad()
def weight_norm(leaf: _Leaf, adapter: str) -> Tensor:
    """Row norms `||W + s B A||`, `[out_local]`; of an embedding over the vocabulary, `[H]`.

    |w + s b A|^2 = |w|^2 + 2 s b (A w) + s^2 b (A A^T) b^T: no matrix of the size of W is allocated. Where the inputs
    of W are split each rank has the terms of its own: one small sum over tp.
    """
    if isinstance(leaf, ParallelEmbedding):
        weight, a, b = leaf.weight.T, leaf.lora_embedding_A[adapter], leaf.lora_embedding_B[adapter]
        is_split = leaf.rule is not None
    else:
        (a, b), weight = leaf.factors(adapter), unpacked(leaf.frozen_weight)
        is_split = leaf.rule.split is Split.ROW
    a, b, weight = a.float(), b.float(), weight.float()
    scale = leaf.scaling[adapter]
    squares = weight.square().sum(1)
    squares += 2 * scale * (b * (weight @ a.T)).sum(1) + scale**2 * (b @ (a @ a.T) * b).sum(1)
    if is_split:
        squares = all_reduce_sum(squares, leaf.tp)  # before the root, which is not linear
    return squares.clamp(min=0).sqrt()  # of rounded sums, one may be below 0

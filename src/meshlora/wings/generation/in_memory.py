"""Merging in memory, for long generations: the active adapter in the weights of a loaded model, and out of them again.

Owns: `merge`, `unmerge`, `merged`. Does not own: merging into a checkpoint (`meshlora_extra.merging.merge`).

Each rank adds `s B A` of its slices to its slice of W, and keeps the slice as it was: nothing is communicated, but for
the norms of DoRA, and `unmerge` puts back the very bytes. A merged forward has two products less for each linear; the
matrices with an adapter are held twice. Routers compute W + s B A whenever they are read, and stay as they are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshlora.adapter.attach import Runtime, check_not_merged, runtime
from meshlora.layers.adapted import variant_of
from meshlora.layers.embedding import ParallelEmbedding, check_looked_up_alone
from meshlora.layers.linear import ParallelHead, ParallelLinear
from meshlora.layers.token_rows import ReplacedRows, rows_of
from meshlora.model.dp_shard import whole_weights
from meshlora.model.inject import parallel_leaves
from meshlora.plan.pairs import check
from meshlora.wings.experts.module import ParallelExpertLinear
from meshlora.wings.variants.bias_of_b import BiasOfB
from meshlora.wings.variants.magnitudes import Magnitudes
from meshlora_ground.errors import UnsupportedError, UserError
from meshlora_ground.float64 import lift, wide_dtype

_Merging = ParallelLinear | ParallelExpertLinear | ParallelEmbedding


@torch.no_grad()
def merge(model: Any) -> None:
    """Merge the active adapter into the weights of `model`, until `unmerge`. Every rank calls it.

        meshlora.merge(model)
        texts = model.generate(...)
        meshlora.unmerge(model)

    Sums are computed in float32 (float64 beside float64) and rounded once, to the dtype of the base. Until then nothing
    is trained, and no adapter chosen, added or switched off; the adapter can be saved as ever.

    Raises:
        UserError: no adapter is active, or one is merged. UnsupportedError: a base in few bits.
    """
    state = runtime(model)
    check_not_merged(state, "merge")
    if state.active is None:
        raise UserError("merge without an active adapter", "there is nothing to merge", "call set_adapter first")
    config = state.adapters[state.active].plan.config
    check({"alora_invocation_tokens": config.alora_invocation_tokens, "door": "merge"})
    leaves = _leaves(model, state.active)
    for name, leaf in leaves.items():
        if isinstance(leaf, ParallelEmbedding):
            check_looked_up_alone(leaf, f"merge into {name}", "generate without merging")
        elif leaf.form is not None:
            rule = "the sum would be rounded to few bits once more, and be another model"
            raise UnsupportedError(f"merge into {name}, which is held in few bits", rule, "generate without merging")
        if isinstance(variant_of(leaf.variants, state.active), BiasOfB):
            rule = "lora_bias adds to a bias that the linear may not have"
            raise UnsupportedError(f"merge into {name}", rule, "generate without merging")
    state.unmerged = {}
    try:
        with lift(model.dtype == torch.float64):
            for name, leaf in leaves.items():
                _merge_one(model, state, name, leaf)
    except BaseException:  # Ctrl-C too: half a model is merged
        unmerge(model)
        raise


def unmerge(model: Any) -> None:
    """Put back the weights that `merge` has changed, bit for bit, and use the adapter beside them again.

    Raises:
        UserError: nothing is merged.
    """
    state = runtime(model)
    if state.unmerged is None:
        raise UserError("unmerge", "no adapter is merged", "call it after merge")
    leaves = parallel_leaves(model)
    for name, weight in state.unmerged.items():
        leaf = leaves[name]
        assert isinstance(leaf, _Merging), name
        if isinstance(leaf.weight, DTensor):
            with torch.no_grad():
                leaf.weight.to_local().copy_(weight)
        else:
            assert isinstance(weight, nn.Parameter)
            leaf.weight = weight
        leaf.active = state.active
    state.unmerged = None


@contextlib.contextmanager
def merged(model: Any) -> Iterator[None]:
    """`merge` for the length of a block.

    with meshlora.merged(model):
        model.generate(...)
    """
    merge(model)
    try:
        yield
    finally:
        unmerge(model)


def _leaves(model: Any, adapter: str) -> dict[str, _Merging]:
    """The leaves with matrices that `adapter` changes, by name."""
    return {
        name: leaf
        for name, leaf in parallel_leaves(model).items()
        if isinstance(leaf, _Merging) and (adapter in leaf.scaling or _rows(leaf, adapter) is not None)
    }


def _rows(leaf: _Merging, adapter: str) -> ReplacedRows | None:
    """The rows of `adapter` in place of those of the vocabulary of `leaf`."""
    if not isinstance(leaf, ParallelEmbedding | ParallelHead):
        return None
    return rows_of(leaf.replaced, adapter)


def _merge_one(model: Any, state: Runtime, name: str, leaf: _Merging) -> None:
    adapter, weight = str(state.active), leaf.weight
    ratio, variant = None, variant_of(leaf.variants, adapter)
    if isinstance(variant, Magnitudes):
        assert not isinstance(leaf, ParallelExpertLinear), name
        with whole_weights(model, name):
            ratio = variant.ratio(leaf, adapter)
    shard, first = weight, 0
    if isinstance(weight, DTensor):
        shard = weight.to_local()
        # torch shards by chunks of dim 0, of which the last ranks may have less.
        each = -(-weight.shape[0] // state.mesh.data.size)
        first = min(each * state.mesh.data.rank, weight.shape[0])
    rows = slice(first, first + len(shard))
    total = shard.to(wide_dtype(shard.dtype), copy=True)
    if len(shard) and adapter in leaf.scaling:
        total += _change(leaf, adapter, rows).to(total.dtype)
    if (replaced := _rows(leaf, adapter)) is not None:
        total[replaced.local] = replaced.values[replaced.here].to(total.dtype)
    if ratio is not None:
        ratio = ratio.to(total.dtype)
        total *= ratio if isinstance(leaf, ParallelEmbedding) else ratio[rows].unsqueeze(1)
    assert state.unmerged is not None
    if isinstance(weight, DTensor):
        state.unmerged[name] = shard.clone()
        shard.copy_(total)
    else:
        # Another parameter, as this one may be tied to another module's.
        state.unmerged[name] = weight
        leaf.weight = nn.Parameter(total.to(weight.dtype), requires_grad=False)
    leaf.active = None


def _change(leaf: _Merging, adapter: str, rows: slice) -> Tensor:
    """`s B A` of `rows` along dim 0 of a leaf's weight, as the weight is stored."""
    scale = leaf.scaling[adapter]
    if isinstance(leaf, ParallelEmbedding):  # [V, H], of A [r, V] and B [H, r]
        a, b = leaf.lora_embedding_A[adapter], leaf.lora_embedding_B[adapter]
        return (a[:, rows].T @ b.T) * scale
    if isinstance(leaf, ParallelLinear):
        a, b = leaf.factors(adapter)
        return (b[rows] @ a) * scale
    a, b = leaf.factors_of_experts(adapter)
    a, b = (factor.expand(leaf.num_experts, -1, -1)[rows] for factor in (a, b))  # experts may share them
    product = (b @ a) * scale
    if leaf.rule.is_transposed:
        return product.mT
    return product

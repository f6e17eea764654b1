"""Faults of models with several residual streams, and of what their attentions and routers read beside them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshlora.layers.adapted import Placement
from meshlora.model import weights
from meshlora.model.regions import TokenCut
from meshlora.verify.faults.fault import after, around, passing, result
from meshlora.verify.faults.of_shards import next_rank
from meshlora.verify.features import Feature
from meshlora.wings.mixers import block_states
from meshlora.wings.mixers.block_states import BlockStates


@after(TokenCut, "whole", needs={Feature.SP, Feature.STREAMS})
def streams_reversed_after_the_layers(found: Tensor, self: TokenCut, x: Tensor, **_: Any) -> Tensor:
    """residual streams keep their order where tokens are gathered"""
    return found.flip(2) if found.ndim > 3 else found


# The first state is what the first layer takes, without a gradient: of a twin, two stages hand on no other.
@after(BlockStates, "given", needs={Feature.BLOCK_STATES, Feature.INTERLEAVE})
def sent_block_states_without_gradient(found: Tensor, *_: Any) -> Tensor:
    """states of earlier blocks have the gradients of later stages"""
    return found.detach()


@around(TokenCut, "cut", needs={Feature.SP, Feature.HASH_ROUTER})
def ids_of_the_token_before(original: Any, self: TokenCut, x: Tensor) -> Any:
    """a router that chooses by ids has those of its rank's tokens"""
    return original(self, x if x.is_floating_point() else x.roll(1, 1))


@around(weights, "_read_local", needs={Feature.TP, Feature.GROUPED_OUTPUT})
def output_groups_of_another_rank(original: Any, name: str, placement: Placement, source: Any, mesh: Any) -> Any:
    """a rank projects its groups of heads by the rows of these groups"""
    return original(name, placement, source, next_rank(mesh) if name.endswith(".o_a_proj.weight") else mesh)


@around(weights, "_read_local", needs={Feature.TP, Feature.SINKS})
def sinks_of_another_rank(original: Any, name: str, placement: Placement, source: Any, mesh: Any) -> Any:
    """a rank has the attention sinks of its own heads"""
    return original(name, placement, source, next_rank(mesh) if name.endswith(".sinks") else mesh)


block_states_of_other_tokens = around(block_states, "_with", needs={Feature.BLOCK_STATES, Feature.SP})(
    passing("a layer reads of each token what that token's stream was", stream=lambda stream: stream.flip(1))
)
block_states_without_gradient = around(block_states, "_with", needs={Feature.BLOCK_STATES})(
    passing("a stream that is put aside has the gradients of all layers that read it", stream=torch.detach)
)
sent_block_states_of_other_tokens = after(BlockStates, "given", needs={Feature.BLOCK_STATES, Feature.PP})(
    result("a stage hands on of each token what its stream was", lambda found: found.flip(1))
)

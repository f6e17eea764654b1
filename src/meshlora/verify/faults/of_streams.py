"""Faults of models with several residual streams, and of what their attentions and routers read beside them."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from meshlora.layers.adapted import Placement
from meshlora.model import weights
from meshlora.model.regions import TokenCut
from meshlora.verify.faults.fault import after, around
from meshlora.verify.faults.of_shards import next_rank
from meshlora.verify.features import Feature
from meshlora.wings.mixers import block_states
from meshlora.wings.mixers.block_states import BlockStates


@after(TokenCut, "whole", needs={Feature.SP, Feature.STREAMS})
def streams_reversed_after_the_layers(found: Tensor, self: TokenCut, x: Tensor, **_: Any) -> Tensor:
    """residual streams keep their order where tokens are gathered"""
    return found.flip(2) if found.ndim > 3 else found


@around(block_states, "_with", needs={Feature.BLOCK_STATES})
def block_states_without_gradient(original: Any, states: Tensor, stream: Tensor) -> Any:
    """a stream that is put aside has the gradients of all layers that read it"""
    return original(states, stream.detach())


@around(block_states, "_with", needs={Feature.BLOCK_STATES, Feature.SP})
def block_states_of_other_tokens(original: Any, states: Tensor, stream: Tensor) -> Any:
    """a layer reads of each token what that token's stream was"""
    return original(states, stream.flip(1))


# The first state is what the first layer takes, without a gradient: of a twin, two stages hand on no other.
@after(BlockStates, "given", needs={Feature.BLOCK_STATES, Feature.INTERLEAVE})
def sent_block_states_without_gradient(found: Tensor, *_: Any) -> Tensor:
    """states of earlier blocks have the gradients of later stages"""
    return found.detach()


@after(BlockStates, "given", needs={Feature.BLOCK_STATES, Feature.PP})
def sent_block_states_of_other_tokens(found: Tensor, *_: Any) -> Tensor:
    """a stage hands on of each token what its stream was"""
    return found.flip(1)


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

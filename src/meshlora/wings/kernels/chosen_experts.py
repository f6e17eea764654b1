"""Weights of a token's experts from their own logits: the same numbers in fewer operations.

Owns: finding the routers whose code is known, and their weights. Does not own: the logits, which stay the router's
first output, through which every gradient passes; routers of another kind (sigmoids, groups, biases), which stay the
model's own.

transformers takes the softmax over all experts, chooses the k largest, and divides these by their sum. That is the
softmax over the k chosen logits, and the k largest logits are the experts of the k largest probabilities: three
operations in place of seven, and eleven less backward, for each layer. With other choices replayed
(`meshlora_ground.routing`) it is so for these.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshlora.wings.kernels.known_code import digest
from meshlora_ground.float64 import is_lifted

# `digest` of forwards of transformers 5.23 -> whether the weights stay in float32: of Qwen3MoeTopKRouter (also those of
# qwen2_moe, qwen3_next, olmoe, flex_olmo), Qwen3VLMoeTextTopKRouter, which always divides, and MixtralTopKRouter.
_ROUTERS = {"711491962b35ea40": False, "9f50be02ed1cea62": False, "d5517f992ed1d0f3": True}


def own_weights_of_experts(model: nn.Module) -> None:
    """Give the weights above to every router of `model` whose code is known."""
    for module in model.modules():
        if is_known(module) and "forward" not in vars(module):  # else it is of another stage
            module.forward = MethodType(_forward, module)


def is_known(module: nn.Module) -> bool:
    """Whether `module` divides the weights of the chosen experts by their sum, statement by statement as known here."""
    return digest(type(module).forward) in _ROUTERS and bool(getattr(module, "norm_topk_prob", True))


def _forward(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`[..., H]` -> logits `[T, E]`, weights `[T, k]`, the chosen experts `[T, k]`."""
    if hidden_states.dtype == torch.float64 and not is_lifted():  # transformers' own computes in float32
        return type(self).forward(self, hidden_states)
    logits = F.linear(hidden_states.reshape(-1, self.hidden_dim), self.weight)
    chosen, index = torch.topk(logits, self.top_k, dim=-1)
    if _ROUTERS[digest(type(self).forward)]:
        return logits, torch.softmax(chosen, -1, dtype=torch.float32), index
    # In a narrow dtype it computes in float32 too, and rounds the result alone, as transformers' own does.
    return logits, torch.softmax(chosen, -1), index

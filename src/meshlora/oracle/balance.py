"""The load-balancing loss of routers, by the function of transformers: over all tokens of an optimizer step at once.

Owns: whether a family has one, and its value for several micro-batches together. Does not own: how much it weighs.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING


def has_load_balancing(config: Any) -> bool:
    """Whether transformers adds such a loss for models of this configuration."""
    cls = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    has_coef = getattr(config.get_text_config(), "router_aux_loss_coef", None) is not None
    return cls is not None and has_coef and hasattr(sys.modules[cls.__module__], "load_balancing_loss_func")


def load_balancing_loss(model: Any, logits: Sequence[tuple[Tensor, ...]], masks: Sequence[Tensor]) -> Tensor:
    """Of the router logits of every layer `[T, E]` of each micro-batch, whose attention masks are `masks` `[B, S]`.

    model: the causal LM of transformers, without PEFT around it.
    """
    function = sys.modules[type(model).__module__].load_balancing_loss_func
    together = tuple(torch.cat(layer) for layer in zip(*logits, strict=True))
    mask = torch.cat([mask.flatten() for mask in masks]).unsqueeze(0)
    loss: Tensor = function(together, model.num_experts, model.num_experts_per_tok, mask)
    return loss

"""Attention masks of packed rows for models that make their own without position ids, which say where sequences begin.

Owns: for which models, and the masks, by transformers' own functions. Does not own: the check that sequences of a row
are kept apart (`run.packing_check`), which these models fail without it.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from meshlora_ground.caches import cache_argument

# Of transformers 5.17 to 5.24. Both take a dict of masks by the type of layer, as generation makes it.
_WITHOUT_POSITIONS = {"AfmoeModel", "GptOssModel"}


def read_positions_in_masks(model: nn.Module) -> None:
    """Let a model that masks without position ids get masks of them, where it is called without a mask."""
    for module in model.modules():
        kind = type(module)
        if kind.__name__ in _WITHOUT_POSITIONS and kind.__module__.startswith("transformers."):
            module.register_forward_pre_hook(_with_masks, with_kwargs=True)


def _with_masks(module: Any, args: Any, given: dict[str, Any]) -> Any:
    given = {**dict(zip(inspect.signature(module.forward).parameters, args, strict=False)), **given}
    has_others = any(given.get(name) is not None for name in ("attention_mask", cache_argument(module.forward)))
    if has_others or given.get("position_ids") is None:
        return (), given
    if given.get("inputs_embeds") is None:  # masks take their shape and dtype
        given = given | {"inputs_embeds": module.get_input_embeddings()(given["input_ids"]), "input_ids": None}
    of_rows = {
        "config": module.config,
        "inputs_embeds": given["inputs_embeds"],
        "attention_mask": None,
        cache_argument(create_causal_mask): None,
        "position_ids": given["position_ids"],
    }
    masks = {
        "full_attention": create_causal_mask(**of_rows),
        "sliding_attention": create_sliding_window_causal_mask(**of_rows),
    }
    return (), given | {"attention_mask": masks}

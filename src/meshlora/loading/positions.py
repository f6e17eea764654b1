"""How long a sequence a model has positions for. Owns the number; what to do with longer ones is the caller's."""

from __future__ import annotations

from typing import Any

from torch import nn

_LENGTHENED = ("linear", "yarn")  # rotary embeddings for `factor` times as many positions


def most_positions(config: Any, model: nn.Module | None = None) -> int | None:
    """The most tokens of a sequence that the model in `config` has positions for; None: there is no such number.

    Linear scaling and YaRN of rotary embeddings multiply what the configuration gives. model: if known; one that counts
    positions from its padding token on, as RoBERTa does, has so many less.
    """
    text = config.get_text_config()
    limit = getattr(text, "max_position_embeddings", None)
    if not isinstance(limit, int):
        return None
    rope, most = getattr(text, "rope_parameters", None) or {}, limit
    if rope.get("rope_type") in _LENGTHENED and isinstance(factor := rope.get("factor"), int | float):
        # Some give the product already.
        most = max(most, int(factor * (rope.get("original_max_position_embeddings") or limit)))
    if model is None:
        return most
    for name, module in model.named_modules():
        is_of_positions = isinstance(module, nn.Embedding) and name.endswith("position_embeddings")
        if is_of_positions and module.padding_idx is not None:
            most = min(most, module.num_embeddings - module.padding_idx - 1)
    return most

"""Private names of PEFT: how it renames the factors of an adapter's file when it loads them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


def names_as_loaded(model: Any, keys: Iterable[str]) -> dict[str, str]:
    """Key of an adapter's file -> the key that PEFT makes of it on `model`, which may be on the meta device.

    PEFT joins the factors of some families, and raises where one of those that it joins is missing: it loads no such
    file, and the keys are given back as they are.
    """
    from peft import LoraConfig
    from peft.utils.transformers_weight_conversion import convert_peft_adapter_state_dict_for_transformers

    given: dict[str, torch.Tensor] = {}
    for key in keys:
        given[key] = torch.empty(1, 1, device="meta")
    found = dict(zip(given, given, strict=True))
    key_of = {id(tensor): key for key, tensor in given.items()}
    try:
        converted = convert_peft_adapter_state_dict_for_transformers(model, LoraConfig(), dict(given))
    except (ValueError, RuntimeError):
        return found
    for loaded, tensor in converted.items():
        if id(tensor) in key_of:  # else it has put several together
            found[key_of[id(tensor)]] = loaded
    return found

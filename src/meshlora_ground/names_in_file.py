"""Names in an adapter's file that PEFT loads as those of a model's modules, where it changes these when it loads them.

Owns: which names. PEFT renames factors as transformers renames the older checkpoints of a family, and takes some of
today's for older ones: of laguna `mlp.shared_experts.` for `mlp.shared_expert.`, where a dot is any letter. Does
not own: what PEFT makes of a name (`compat.peft_names`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming

from meshlora_ground.compat.peft_names import names_as_loaded

_PREFIX, _FACTOR = "base_model.model.", ".lora_A.weight"


def names_to_write(model: Any, modules: Iterable[str]) -> dict[str, str]:
    """Module -> the name that PEFT takes for it, of those `modules` whose own name it changes; "": there is none."""
    found: dict[str, str] = {}
    for key, loaded in names_as_loaded(model, [f"{_PREFIX}{module}{_FACTOR}" for module in modules]).items():
        if loaded != key:
            found[_module(key)] = ""
    if not found:
        return found
    for renaming in get_model_conversion_mapping(model):
        if not isinstance(renaming, WeightRenaming):
            continue
        older: dict[str, str] = {}
        for module in found:  # with a dot at the end, where renamings expect one
            older[_PREFIX + renaming.reverse_transform().rename_source_key(f"{module}{_FACTOR}")[0]] = module
        for key, loaded in names_as_loaded(model, older).items():
            if _module(loaded) == older[key]:
                found[older[key]] = found[older[key]] or _module(key)
    return found


def _module(key: str) -> str:
    return key.removeprefix(_PREFIX).removesuffix(_FACTOR)

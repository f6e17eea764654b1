"""Faults of adapter files: what is read, and what is written."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from meshlora.adapter import plan as adapter_plan
from meshlora.adapter.attach import adapter_factors, runtime
from meshlora.adapter.formats import file_tensors, peft_format
from meshlora.verify.faults.fault import after, around, rank
from meshlora.verify.features import Feature

Tensors = dict[str, Tensor]


def _changed(
    full: Tensors, model: Any, adapter: str, change: Callable[[Tensor, int, int], Tensor], *, split: bool
) -> Tensors:
    """Apply change(full tensor, dim, tp) to the factors split over tp, or to the replicated ones."""
    dims = {factor.name: factor.rule.split_dim for factor in adapter_factors(model, adapter)}
    changed, tp = dict(full), runtime(model).mesh.tp.size
    for name, tensor in full.items():
        if (dims[name] is not None) == split:
            changed[name] = change(tensor, dims[name] or 0, tp)
    return changed


@around(peft_format, "attach", needs={Feature.RANKS})
def adapter_loaded_on_rank_0_only(original: Any, model: Any, name: str, planned: Any, full: Any, *rest: Any) -> None:
    """every rank holds its part of a loaded adapter"""

    def zeros(target: Any) -> Tensors:
        return {part: torch.zeros_like(t) for part, t in full(target).items()}

    original(model, name, planned, full if rank() == 0 else zeros, *rest)


@after(peft_format, "gather_adapter", needs={Feature.TP})
def shard_missing_in_file(full: Tensors, model: Any, adapter: str, **_: Any) -> Tensors:
    """the saved file has the shards of all tp ranks"""

    def first_alone(t: Tensor, dim: int, tp: int) -> Tensor:
        shards = t.tensor_split(tp, dim)
        return torch.cat([shards[0], *map(torch.zeros_like, shards[1:])], dim)

    return _changed(full, model, adapter, first_alone, split=True)


@after(peft_format, "gather_adapter", needs={Feature.TP})
def whole_entries_duplicated_in_file(full: Tensors, model: Any, adapter: str, **_: Any) -> Tensors:
    """replicated factors are saved once"""
    return _changed(full, model, adapter, lambda t, dim, tp: torch.cat([t] * tp, 0), split=False)


@after(peft_format, "gather_adapter", needs={Feature.TP})
def shards_reversed_in_file(full: Tensors, model: Any, adapter: str, **_: Any) -> Tensors:
    """the saved file has the shards in the order of the tp ranks"""
    return _changed(full, model, adapter, lambda t, dim, tp: torch.cat(t.tensor_split(tp, dim)[::-1], dim), split=True)


@around(peft_format, "save_file")
def rounded_in_file(original: Any, tensors: Tensors, path: Any, **options: Any) -> None:
    """the saved file is equal to the bit to what the ranks hold"""
    half = {torch.float64: torch.float32, torch.float32: torch.bfloat16}  # half as many bytes
    original({name: t.to(half.get(t.dtype, t.dtype)) for name, t in tensors.items()}, path, **options)


@after(peft_format, "gather_adapter")
def extra_entry_in_file(full: Tensors, *_: Any, **__: Any) -> Tensors:
    """the saved file holds the factors and nothing else"""
    if not full:  # only one rank writes
        return full
    name = min(name for name in full if ".lora_" in name)
    return full | {name.replace(".lora_", ".old_lora_"): full[name].clone()}


@after(peft_format, "config_to_store")
def alpha_doubled_in_file(stored: dict[str, Any], *_: Any) -> dict[str, Any]:
    """the stored configuration is that of the adapter"""
    return stored | {"lora_alpha": 2 * stored["lora_alpha"]}


@after(adapter_plan, "final_config", needs={Feature.TARGETS})
def target_missing_in_fresh_file(config: Any, *_: Any, **__: Any) -> Any:
    """the stored configuration of a fresh adapter names all of its targets"""
    return dataclasses.replace(config, target_modules=set(sorted(config.target_modules)[1:]))


@after(peft_format, "gather_adapter", needs={Feature.TRAINED})
def trained_weights_missing_in_file(full: Tensors, *_: Any, **__: Any) -> Tensors:
    """the saved file has the trained parameters of the base"""
    return {name: t for name, t in full.items() if ".lora_" in name}


@after(file_tensors, "_rows_of_pieces", needs={Feature.PIECES}, within=(peft_format, "file_tensors"))
def piece_on_the_next_in_file(found: Tensors, target: Any) -> Tensors:
    """the saved B of an adapter on pieces is zero outside their rows"""
    return {piece: (rows + len(rows)) % target.out_features for piece, rows in found.items()}


@after(file_tensors, "file_keys", needs={Feature.OTHER_NAMES}, within=(peft_format, "file_tensors"))
def names_that_peft_changes_in_file(keys: dict[tuple[str, str], str], targets: Any) -> dict[tuple[str, str], str]:
    """the saved file has names that PEFT loads as those of the model's modules"""
    found: dict[tuple[str, str], str] = {}
    for (name, part), key in keys.items():
        module, written = targets[name].in_file
        found[name, part] = key.replace(written, module, 1)
    return found

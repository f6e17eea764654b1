"""An adapter's folder: what is read from it, and what stands in it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from meshlora.adapter import plan as adapter_plan
from meshlora.adapter.attach import adapter_factors, runtime
from meshlora.adapter.formats import file_tensors, peft_format
from meshlora.verify.faults import wrong_code
from meshlora.verify.faults.fault import Change, by_name, in_call, mutation, then


def on_rank_0_only(original: Any) -> Any:
    def attach(model: Any, name: str, planned: Any, full: Any, *rest: Any) -> None:
        def zeros(target: Any) -> dict[str, Tensor]:
            return {part: torch.zeros_like(t) for part, t in full(target).items()}

        original(model, name, planned, full if wrong_code.rank() == 0 else zeros, *rest)

    return attach


def in_file(change: Callable[[Tensor, int, int], Tensor], *, split: bool) -> Change:
    """change(full tensor, dim, tp) on the factors that are split over tp, or on those that are whole."""

    def gathered(full: dict[str, Tensor], model: Any, adapter: str, **_: Any) -> dict[str, Tensor]:
        rules = {factor.name: factor.rule.split_dim for factor in adapter_factors(model, adapter)}
        tp = runtime(model).mesh.tp.size
        return {
            name: change(t, rules[name] or 0, tp) if (rules[name] is not None) == split else t
            for name, t in full.items()
        }

    return peft_format, "gather_adapter", then(gathered)


def first_shard_only(full: Tensor, dim: int, tp: int) -> Tensor:
    shards = full.tensor_split(tp, dim)
    return torch.cat([shards[0], *(torch.zeros_like(shard) for shard in shards[1:])], dim)


def rounded_in_file(original: Any) -> Any:
    """Half as many bytes: float64 as float32, float32 as bfloat16."""
    half = {torch.float64: torch.float32, torch.float32: torch.bfloat16}

    def save(tensors: dict[str, Tensor], path: Any, **options: Any) -> None:
        original({name: t.to(half.get(t.dtype, t.dtype)) for name, t in tensors.items()}, path, **options)

    return save


def extra_entry(full: dict[str, Tensor], *_: Any, **__: Any) -> dict[str, Tensor]:
    if not full:  # not the rank that writes
        return full
    name = min(name for name in full if ".lora_" in name)
    return full | {name.replace(".lora_", ".old_lora_"): full[name].clone()}


def one_target_less(config: Any, *_: Any, **__: Any) -> Any:
    return dataclasses.replace(config, target_modules=set(sorted(config.target_modules)[1:]))


def rows_one_piece_further(original: Any) -> Any:
    """The same in a file."""

    def rows_of(target: Any) -> dict[str, Tensor]:
        return {piece: (rows + len(rows)) % target.out_features for piece, rows in original(target).items()}

    return rows_of


OF_FILES = by_name(
    mutation(
        "adapter_loaded_on_rank_0_only",
        "every rank holds its part of a loaded adapter",
        "ranks",
        (peft_format, "attach", on_rank_0_only),
    ),
    mutation(
        "shard_missing_in_file",
        "the saved file has the shards of all tp ranks",
        "tp",
        in_file(first_shard_only, split=True),
    ),
    mutation(
        "whole_entries_duplicated_in_file",
        "what every rank holds is saved once",
        "tp",
        in_file(lambda t, dim, tp: torch.cat([t] * tp, 0), split=False),
    ),
    mutation(
        "shards_reversed_in_file",
        "the saved file has the shards in the order of the tp ranks",
        "tp",
        in_file(lambda t, dim, tp: torch.cat(t.tensor_split(tp, dim)[::-1], dim), split=True),
    ),
    mutation(
        "rounded_in_file",
        "the saved file has the bits that the ranks hold",
        "",
        (peft_format, "save_file", rounded_in_file),
    ),
    mutation(
        "extra_entry_in_file",
        "the saved file holds the factors and nothing else",
        "",
        (peft_format, "gather_adapter", then(extra_entry)),
    ),
    mutation(
        "alpha_doubled_in_file",
        "the stored configuration is that of the adapter",
        "",
        (peft_format, "_config_to_store", then(lambda v, *_: v | {"lora_alpha": 2 * v["lora_alpha"]})),
    ),
    mutation(
        "target_missing_in_fresh_file",
        "the stored configuration of a fresh adapter names all of its targets",
        "targets",
        (adapter_plan, "final_config", then(one_target_less)),
    ),
    mutation(
        "trained_weights_missing_in_file",
        "the saved file has what is trained of the base",
        "trained",
        (
            peft_format,
            "gather_adapter",
            then(lambda full, *_, **__: {n: t for n, t in full.items() if ".lora_" in n}),
        ),
    ),
    mutation(
        "piece_on_the_next_in_file",
        "the saved B of an adapter on pieces is zero outside their rows",
        "pieces",
        (
            peft_format,
            "file_tensors",
            in_call(file_tensors, "_rows_of_pieces", rows_one_piece_further),
        ),
    ),
)

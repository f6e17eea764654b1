"""microsoft/LoRA's `lora_state_dict`, to and from PEFT's factors.

Owns: names, shapes and the block form of adapters on pieces of a fused matrix; whether a model has such names. Does not
own: files and folders (`adapter.formats.export`), where the rows of a piece lie (a function is given).

loralib's `Linear` and `Embedding` hold A `[r, in]` and B `[out, r]`, as PEFT does. Its `MergedLinear`, of n equal
pieces of which k have LoRA, holds A `[k*r, in]` and B `[k * out/n, r]`, each piece's product on its own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from meshlora.adapter.merging.changes import check_mergeable
from meshlora.common.errors import UnsupportedError, UserError, did_you_mean

# (module, out_features) -> piece -> its rows in the matrix, all pieces in their order.
PieceRows = Callable[[str, int], Mapping[str, Tensor]]
# What DistributedDataParallel and torch.compile put before the names of the model inside.
_WRAPPERS = re.compile(r"(?:module\.|_orig_mod\.)*")
# A lora_state_dict does not say which modules are embeddings.
_EMBEDDINGS = {"wte", "wpe", "embed_tokens", "embed_in", "word_embeddings"}


@dataclass(frozen=True)
class Factors:
    """One module's product `lora_alpha / r * B @ A`. pieces: the enabled ones, in block form; empty: the whole."""

    a: Tensor
    b: Tensor
    r: int
    lora_alpha: float
    is_embedding: bool = False
    pieces: tuple[str, ...] = ()


def equal_blocks(names: Sequence[str] = ("q", "k", "v")) -> PieceRows:
    """Pieces of equal size one after another, as in GPT-2's c_attn: all that loralib's `MergedLinear` knows."""

    def rows(module: str, out_features: int) -> Mapping[str, Tensor]:
        if out_features % len(names):
            raise UserError(f"{module}: {out_features} outputs", f"they are not {len(names)} equal pieces")
        size = out_features // len(names)
        return {name: torch.arange(i * size, (i + 1) * size) for i, name in enumerate(names)}

    return rows


def check_for_loralib(config: LoraConfig, where: str) -> None:
    """Refuse every option that is more than `W + s B A` and biases.

    Raises:
        UnsupportedError: names the option.
    """
    check_mergeable(config, where)
    init = config.init_lora_weights
    if isinstance(init, str) and init.lower() in {"pissa", "olora"}:
        raise UnsupportedError(
            f"{where}: init_lora_weights={init!r}", "its base is not the model's; loralib adds to that"
        )
    for option in ("use_dora", "lora_bias", "modules_to_save"):
        if value := getattr(config, option, None):
            raise UnsupportedError(f"{where}: {option}={value!r}", "loralib has no such option", "use --layout peft")


def loralib_state(
    factors: Mapping[str, Factors], biases: Mapping[str, Tensor], rows: PieceRows
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The state, and what to write beside it: r, lora_alpha, enable_lora by module, and modules that differ."""
    state = dict(biases)
    enabled: dict[str, list[bool]] = {}
    for module, each in factors.items():
        state[f"{module}.lora_A"] = each.a
        state[f"{module}.lora_B"] = each.b
        if each.pieces:
            where = rows(module, each.b.shape[0])
            size = each.b.shape[0] // len(where)
            if any(not torch.equal(r, torch.arange(i * size, (i + 1) * size)) for i, r in enumerate(where.values())):
                raise UnsupportedError(
                    f"{module}", "its pieces are not equal blocks, as loralib's MergedLinear has them"
                )
            state[f"{module}.lora_B"] = torch.cat(blocks(module, each, rows))
            enabled[module] = [name in each.pieces for name in where]
    first = next(iter(factors.values()))
    metadata: dict[str, Any] = {"r": first.r, "lora_alpha": first.lora_alpha, "enable_lora": enabled}
    metadata["modules"] = {
        module: {"r": each.r, "lora_alpha": each.lora_alpha}
        for module, each in factors.items()
        if (each.r, each.lora_alpha) != (first.r, first.lora_alpha)
    }
    return state, metadata


def parse_metadata(file: Path, text: str | None) -> dict[str, Any]:
    """What `loralib_state` wrote beside the state; empty for a file of other origin."""
    if text is None:
        return {}
    try:
        found = json.loads(text)
        assert isinstance(found, dict)
        assert all(isinstance(found.get(key, {}), dict) for key in ("enable_lora", "modules"))
    except (ValueError, AssertionError):
        raise UserError(f"{file}", "its metadata `loralib` is not what `meshlora export` writes") from None
    return found


def without_wrappers(file: Path, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], str]:
    """(tensors under the names of the model inside, what was before all of them).

    Raises:
        UserError: what wrappers put there is before some names only, or within one.
    """
    prefixes = {key: match.group() for key in tensors if (match := _WRAPPERS.match(key))}
    prefix = next(iter(prefixes.values()), "")
    for key, own in prefixes.items():
        if own != prefix or "._orig_mod." in key[len(own) :]:
            raise UserError(
                f"{file}: {key}",
                "DistributedDataParallel or torch.compile was around a part of the model, which has other names",
                "save the state of the model inside: model.module, model._orig_mod",
            )
    return {key.removeprefix(prefix): tensor for key, tensor in tensors.items()}, prefix


def check_modules(file: Path, factors: Mapping[str, Factors], biases: Mapping[str, Tensor], model: nn.Module) -> None:
    """Every name of a lora_state_dict is one of `model`, which may be on the meta device, and fits there.

    Raises:
        UserError: names the first that does not.
    """
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters(remove_duplicate=False))
    for name, each in factors.items():
        weight = f"{name}.weight"
        if name not in modules or weight not in parameters:
            raise UserError(f"{file}: {name}", "the model has no such matrix", did_you_mean(name, modules))
        shape, product = tuple(parameters[weight].shape), (each.b.shape[0], each.a.shape[1])
        if isinstance(modules[name], Conv1D | nn.Embedding):  # these hold the transpose
            product = product[::-1]
        if product != shape:
            raise UserError(f"{file}: {name}", f"it is for a matrix {list(product)}, and the model's is {list(shape)}")
    for name, bias in biases.items():
        if name not in parameters or parameters[name].shape != bias.shape:
            raise UserError(
                f"{file}: {name} {list(bias.shape)}", "the model has no such bias", did_you_mean(name, parameters)
            )


def from_loralib(
    file: Path,
    module: str,
    tensors: Mapping[str, Tensor],
    alpha: float,
    enabled: Sequence[bool] | None,
    names: tuple[str, ...],
) -> Factors:
    """One module of a lora_state_dict, in block form where it is a `MergedLinear`."""
    a, b = tensors.get(f"{module}.lora_A"), tensors.get(f"{module}.lora_B")
    if a is None or b is None or a.ndim != 2 or b.ndim != 2:
        raise UserError(f"{file}: {module}", "it needs lora_A and lora_B, both matrices (Conv2d is not supported)")
    r = b.shape[1]
    if a.shape[0] == r and (enabled is None or sum(enabled) != 1):
        return Factors(a, b, r, alpha, is_embedding=module.rpartition(".")[2] in _EMBEDDINGS)
    num_enabled = a.shape[0] // r
    if a.shape[0] % r or b.shape[0] % num_enabled:
        raise UserError(f"{file}: {module}", f"lora_A {list(a.shape)} and lora_B {list(b.shape)} do not fit together")
    if enabled is None:
        raise UserError(
            f"{file}: {module}",
            f"{num_enabled} pieces have LoRA, and the file does not say which",
            "give --enable-lora, as in 1,0,1 for q and v",
        )
    if len(enabled) != len(names) or sum(enabled) != num_enabled:
        raise UserError(
            f"enable_lora={list(enabled)}",
            f"{module} has LoRA on {num_enabled} pieces of {len(names)} ({', '.join(names)})",
        )
    size = b.shape[0] // num_enabled
    where = equal_blocks(names)(module, size * len(names))
    pieces = tuple(name for name, on in zip(names, enabled, strict=True) if on)
    block_b = b.new_zeros(size * len(names), num_enabled * r)
    for j, name in enumerate(pieces):
        block_b[where[name], j * r : (j + 1) * r] = b[j * size : (j + 1) * size]
    return Factors(a, block_b, r, alpha, pieces=pieces)


def blocks(module: str, factors: Factors, rows: PieceRows) -> list[Tensor]:
    """B of each enabled piece, `[rows of the piece, r]`; everything outside of them must be zero."""
    where = rows(module, factors.b.shape[0])
    if unknown := [name for name in factors.pieces if name not in where]:
        raise UserError(f"{module}: piece {unknown[0]!r}", did_you_mean(unknown[0], where))
    if list(factors.pieces) != [name for name in where if name in factors.pieces]:
        raise UserError(f"{module}: pieces {list(factors.pieces)}", f"their order should be that of {list(where)}")
    rest = factors.b.clone()
    blocks = []
    for j, name in enumerate(factors.pieces):
        columns = slice(j * factors.r, (j + 1) * factors.r)
        blocks.append(factors.b[where[name], columns])
        rest[where[name], columns] = 0
    if rest.any():
        raise UserError(f"{module}: lora_B", f"it is not zero outside of its pieces {list(factors.pieces)}")
    return blocks

"""Adapters in foreign formats: plain PEFT folders, and the `lora_state_dict` of microsoft/LoRA, both ways.

Owns: names and shapes of loralib; adapters on pieces of fused matrices, in block form on our disk and compact in
loralib; checking names against a model; reading back written files. Does not own: writing a folder
(`adapter.formats.peft_format`), the format of serving engines (`meshlora_extra.engine_export`).

Block form, a normal PEFT adapter: for k of the n pieces of one matrix, each with rank r, A is the stack `[k*r, in]` and
B is `[out, k*r]`, zero except the rows of piece j in columns `j*r : (j+1)*r`. rank_pattern says k*r, alpha_pattern
keeps the scale alpha/r, and `meshlora.json` names the pieces: `{"pieces": {"c_attn": ["q", "v"]}}`.

loralib's `Linear` and `Embedding` hold A `[r, in]` and B `[out, r]`, like PEFT. Its `MergedLinear`, with LoRA on k of n
equal pieces, holds A `[k*r, in]` and B `[k * out/n, r]`, the products of the pieces computed separately.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from peft import LoraConfig
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from meshlora.adapter.formats.adapter_file import PREFIX, read_adapter_tensors, read_tensor
from meshlora.adapter.formats.file_tensors import ExpertFactors, from_blocks, to_blocks
from meshlora.adapter.formats.peft_format import (
    CONFIG_FILE,
    PIECES_FILE,
    WEIGHTS_FILE,
    config_to_store,
    read_config,
    write_adapter,
)
from meshlora.adapter.targets.options import check_patterns, matches, rank_and_scaling
from meshlora.adapter.targets.pieces import own_words, pieces_of
from meshlora.wings.experts.per_expert import refuse_per_expert
from meshlora_extra.merging.changes import check_mergeable
from meshlora_extra.paper.pickled import PICKLED, check_effect, read_pickled, without_base
from meshlora_ground.errors import MeshloraError, UnsupportedError, UserError, did_you_mean, reason
from meshlora_ground.files import open_safetensors, read_json, write_atomically

# Prefixes that DistributedDataParallel and torch.compile add to names.
_WRAPPERS = re.compile(r"(?:module\.|_orig_mod\.)*")
# A lora_state_dict does not say which modules are embeddings.
_EMBEDDINGS = {"wte", "wpe", "embed_tokens", "embed_in", "word_embeddings"}
# `MergedLinear` is used for GPT-2's c_attn.
_PIECES = ("q", "k", "v")
_SIDES = {".lora_A.weight": "A", ".lora_B.weight": "B", ".lora_embedding_A": "A", ".lora_embedding_B": "B"}


@dataclass(frozen=True)
class Factors:
    """One module's product `lora_alpha / r * B @ A`. pieces: the enabled ones, in block form; empty: the whole."""

    a: Tensor
    b: Tensor
    r: int
    lora_alpha: float
    is_embedding: bool = False
    pieces: tuple[str, ...] = ()


class Imported(NamedTuple):
    """The result of an import, the prefix removed from all names, and how many weights of the base were left out."""

    num_tensors: int
    prefix: str
    num_of_base: int = 0


def export(adapter: str | Path, out: str | Path, layout: Literal["peft", "loralib"]) -> int:
    """Write the adapter folder `adapter` as `out`; returns the number of tensors, all of them read back.

    Args:
        layout: "peft": a plain PEFT folder without `meshlora.json`; further training fills the zeros of its blocks.
            "loralib": one safetensors file with `<module>.lora_A`, `<module>.lora_B`, named as in
            `loralib.lora_state_dict`, and r, lora_alpha and enable_lora in its metadata.

    Raises:
        UserError: files missing or damaged; `out` exists; adapters on single experts (see `import_per_expert`).
        UnsupportedError: loralib has no such adapter.
    """
    folder, target = Path(adapter), Path(out)
    suffix, ways_out = "", ["use --layout peft"]
    if layout == "loralib":
        suffix, ways_out = ".safetensors", []
    check_new(target, suffix)
    config = read_config(folder, ignore_dropout=True)
    if layout == "loralib":
        _check_for_loralib(config, f"{folder / CONFIG_FILE}")
    tensors = read_adapter_tensors(folder / WEIGHTS_FILE)
    refuse_per_expert(folder, tensors, *ways_out)
    factors, biases = factors_of(tensors, config, f"{folder}", strict=layout == "loralib")
    if layout == "peft":
        write_folder(target, tensors, read_json(folder / CONFIG_FILE), {})
        return len(tensors)
    state, metadata = _loralib_state(factors, biases)
    _write_file(target, state, metadata)
    return len(state)


def import_loralib(
    file: str | Path,
    out: str | Path,
    *,
    lora_alpha: float | None = None,
    enable_lora: Sequence[bool] | None = None,
    model: nn.Module | None = None,
    base: Callable[[str], Tensor | None] | None = None,
) -> Imported:
    """Write a microsoft/LoRA `lora_state_dict`, in safetensors or a `.pt`, as the adapter folder `out`.

    A `.pt` may be wrapped (`{"model_state_dict": ...}`), and may hold the frozen base too, as the last one of a run of
    gpt2_ft.py does.

    PEFT matches targets by name suffix, and silently initialises those without tensors in the file, with B zero. So
    `target_modules` holds full names: in a model with other names PEFT finds none and raises.

    Args:
        lora_alpha, enable_lora: used if the file's metadata lacks them. enable_lora: for the fused modules, recognised
            by an A with several times the rank of B; with one piece enabled, for all modules.
        model: the names and shapes to check against; it may be on the meta device. A `.pt` needs it. base: the model's
            tensor of a name, if it has one, to compare the base of a `.pt` with.

    Raises:
        UserError: the file is damaged, or no lora_state_dict; it is another model's, or without effect; an argument is
            missing or does not fit.
    """
    source, target = Path(file), Path(out)
    is_pickled = source.suffix in PICKLED
    if is_pickled and (model is None or base is None):
        rule = "it comes from elsewhere, and PEFT loads an adapter of other names as one without effect"
        raise UserError(f"{source}", rule, "give --model, the base it was trained on")
    check_new(target)
    metadata: dict[str, Any] = {}
    num_of_base = 0
    if is_pickled:
        assert base is not None
        tensors, prefix = _without_wrappers(source, read_pickled(source))
        tensors, num_of_base = without_base(source, tensors, base)
    else:
        tensors, prefix = _without_wrappers(source, _read_tensors(source))
        with open_safetensors(source) as opened:
            metadata = _parse_metadata(source, (opened.metadata() or {}).get("loralib"))
    alpha = lora_alpha
    if alpha is None:
        alpha = metadata.get("lora_alpha")
    if alpha is None:
        raise UserError(f"{source}", "it does not say lora_alpha", "give --lora-alpha, the value it was trained with")
    if not (isinstance(alpha, int | float) and 0 < alpha < math.inf):
        raise UserError(f"lora_alpha={alpha!r}", "it is a number above 0")
    modules = sorted({key.rpartition(".")[0] for key in tensors if key.endswith((".lora_A", ".lora_B"))})
    if not modules:
        raise UserError(f"{source}", "it holds no <module>.lora_A", "is it a lora_state_dict of microsoft/LoRA?")
    factors = {}
    for module in modules:
        own = metadata.get("modules", {}).get(module, {})
        enabled = enable_lora
        if enabled is None:
            enabled = metadata.get("enable_lora", {}).get(module)
        factors[module] = _from_loralib(source, module, tensors, float(own.get("lora_alpha", alpha)), enabled)
    biases = _biases(source, tensors)
    if model is not None:
        _check_modules(source, factors, biases, model)
    check_effect(source, {module: each.b for module, each in factors.items()} | biases)
    config, stored = _peft_state(factors, biases)
    pieces = {_short_name(module, factors): list(each.pieces) for module, each in factors.items() if each.pieces}
    ours: dict[str, Any] = {}  # what PEFT has no place for
    if pieces:
        ours["pieces"] = pieces
    write_folder(target, stored, config, ours)
    return Imported(len(stored), prefix, num_of_base)


def _biases(file: Path, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The biases of a lora_state_dict. Raises: UserError: something else is there besides factors."""
    found = {}
    for key, tensor in tensors.items():
        if key.endswith((".lora_A", ".lora_B")):
            continue
        # Old GPT-2 code keeps its causal mask in a buffer of this name, which loralib takes for a bias.
        if key.endswith("attn.bias") and tensor.ndim > 1:
            continue
        if not key.endswith(".bias"):
            raise UserError(f"{file}: {key}", "it is neither lora_A, lora_B nor a bias")
        found[key] = tensor
    return found


def check_new(target: Path, suffix: str = "") -> None:
    """Refuse a path that exists or has the wrong suffix for the layout."""
    if target.exists():
        raise UserError(f"--out {target}", "it is there already", "choose a new path; nothing is overwritten")
    if suffix and target.suffix != suffix:
        raise UserError(f"--out {target}", f"this layout is one file, whose name ends in {suffix}")


def _check_for_loralib(config: LoraConfig, where: str) -> None:
    """Refuse options that need more than `W + s B A` and biases."""
    check_mergeable(config, where)
    init = config.init_lora_weights
    if isinstance(init, str) and init.lower() in {"pissa", "olora"}:
        rule = "its base is not the model's; loralib adds to that"
        raise UnsupportedError(f"{where}: init_lora_weights={init!r}", rule)
    for option in ("use_dora", "lora_bias", "modules_to_save", "trainable_token_indices"):
        if value := getattr(config, option, None):
            raise UnsupportedError(f"{where}: {option}={value!r}", "loralib has no such option", "use --layout peft")


def _loralib_state(
    factors: Mapping[str, Factors], biases: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The state and its metadata: r, lora_alpha, enable_lora by module, and modules that differ."""
    state = dict(biases)
    first = next(iter(factors.values()))
    enabled: dict[str, list[bool]] = {}
    modules: dict[str, dict[str, float]] = {}
    for module, each in factors.items():
        state[f"{module}.lora_A"] = each.a
        state[f"{module}.lora_B"] = each.b
        if each.pieces:
            state[f"{module}.lora_B"] = _compact_b(module, each)  # without the zeros of the block form
            enabled[module] = [name in each.pieces for name in _PIECES]
        if (each.r, each.lora_alpha) != (first.r, first.lora_alpha):
            modules[module] = {"r": each.r, "lora_alpha": each.lora_alpha}
    return state, {"r": first.r, "lora_alpha": first.lora_alpha, "enable_lora": enabled, "modules": modules}


def _parse_metadata(file: Path, text: str | None) -> dict[str, Any]:
    """The metadata of `_loralib_state`; empty for a file from elsewhere."""
    if text is None:
        return {}
    try:
        found = json.loads(text)
        assert isinstance(found, dict)
        assert all(isinstance(found.get(key, {}), dict) for key in ("enable_lora", "modules"))
    except (ValueError, AssertionError):
        raise UserError(f"{file}", "its metadata `loralib` is not what `meshlora export` writes") from None
    return found


def _without_wrappers(file: Path, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], str]:
    """(tensors without the prefix of wrappers, that prefix). Raises: UserError: it is on some names, or inside one."""
    prefixes = {key: match.group() for key in tensors if (match := _WRAPPERS.match(key))}
    prefix = next(iter(prefixes.values()), "")
    for key, own in prefixes.items():
        if own != prefix or "._orig_mod." in key[len(own) :]:
            rule = "DistributedDataParallel or torch.compile was around a part of the model, which has other names"
            raise UserError(f"{file}: {key}", rule, "save the state of the model inside: model.module, model._orig_mod")
    return {key.removeprefix(prefix): tensor for key, tensor in tensors.items()}, prefix


def _check_modules(file: Path, factors: Mapping[str, Factors], biases: Mapping[str, Tensor], model: nn.Module) -> None:
    """Check names and shapes of a lora_state_dict against `model`, which may be on the meta device."""
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
            rule = "the model has no such bias"
            raise UserError(f"{file}: {name} {list(bias.shape)}", rule, did_you_mean(name, parameters))


def _from_loralib(
    file: Path, module: str, tensors: Mapping[str, Tensor], alpha: float, enabled: Sequence[bool] | None
) -> Factors:
    """One module of a lora_state_dict, in block form if it is a `MergedLinear`."""
    a, b = tensors.get(f"{module}.lora_A"), tensors.get(f"{module}.lora_B")
    if a is None or b is None or a.ndim != 2 or b.ndim != 2:
        raise UserError(f"{file}: {module}", "it needs lora_A and lora_B, both matrices (Conv2d is not supported)")
    r = b.shape[1]  # also of a MergedLinear, whose B holds k pieces by rows
    if a.shape[0] == r and (enabled is None or sum(enabled) != 1):
        return Factors(a, b, r, alpha, is_embedding=module.rpartition(".")[2] in _EMBEDDINGS)
    num_enabled = a.shape[0] // r
    if a.shape[0] % r or b.shape[0] % num_enabled:
        raise UserError(f"{file}: {module}", f"lora_A {list(a.shape)} and lora_B {list(b.shape)} do not fit together")
    if enabled is None:
        rule = f"{num_enabled} pieces have LoRA, and the file does not say which"
        raise UserError(f"{file}: {module}", rule, "give --enable-lora, as in 1,0,1 for q and v")
    if len(enabled) != len(_PIECES) or sum(enabled) != num_enabled:
        rule = f"{module} has LoRA on {num_enabled} pieces of {len(_PIECES)} ({', '.join(_PIECES)})"
        raise UserError(f"enable_lora={list(enabled)}", rule)
    out_features = b.shape[0] // num_enabled * len(_PIECES)
    pieces = tuple(itertools.compress(_PIECES, enabled))
    # [1, k*r, in] and [1, k*out/n, r].
    each_a, each_b = a.unsqueeze(0).chunk(num_enabled, 1), b.unsqueeze(0).chunk(num_enabled, 1)
    own = {name: ExpertFactors(*sides) for name, *sides in zip(pieces, each_a, each_b, strict=True)}
    whole = to_blocks(own, rows=_equal_blocks(module, out_features), out_features=out_features)
    return Factors(a, whole.b[0], r, alpha, pieces=pieces)


def _compact_b(module: str, factors: Factors) -> Tensor:
    """B of the enabled pieces, concatenated by rows, `[sum of rows, r]`; B must be zero outside them."""
    rows = _equal_blocks(module, factors.b.shape[0])
    if unknown := [name for name in factors.pieces if name not in rows]:
        raise UserError(f"{module}: piece {unknown[0]!r}", did_you_mean(unknown[0], rows))
    if list(factors.pieces) != [name for name in rows if name in factors.pieces]:
        raise UserError(f"{module}: pieces {list(factors.pieces)}", f"their order should be that of {list(rows)}")
    whole = ExpertFactors(factors.a.unsqueeze(0), factors.b.unsqueeze(0))  # a stack of one
    found = from_blocks(whole, pieces=factors.pieces, rows=rows, where=module)
    return torch.cat([each.b[0] for each in found.values()])


def _equal_blocks(module: str, out_features: int) -> dict[str, Tensor]:
    """Piece -> its rows: loralib's `MergedLinear` only supports contiguous pieces of equal size."""
    if out_features % len(_PIECES):
        raise UserError(f"{module}: {out_features} outputs", f"they are not {len(_PIECES)} equal pieces")
    return dict(zip(_PIECES, torch.arange(out_features).chunk(len(_PIECES)), strict=True))


def side_of(key: str) -> str | None:
    """ "A" or "B" of a factor's key; None of another tensor's."""
    return next((side for suffix, side in _SIDES.items() if key.endswith(suffix)), None)


def factors_of(
    tensors: Mapping[str, Tensor], config: LoraConfig, where: str, *, strict: bool
) -> tuple[dict[str, Factors], dict[str, Tensor]]:
    """Module -> its factors, and the biases. strict (loralib): refuse other tensors, read pieces."""
    found: dict[str, dict[str, Tensor]] = {}
    embeddings: set[str] = set()
    biases: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        name = key.removeprefix(PREFIX)
        suffix = next((s for s in _SIDES if name.endswith(s)), None)
        if suffix is not None:
            module = name.removesuffix(suffix)
            found.setdefault(module, {})[_SIDES[suffix]] = tensor  # either side may come first
            if "embedding" in suffix:
                embeddings.add(module)
        elif name.endswith(".bias") and ".lora_" not in name:
            biases[name.replace(".base_layer.", ".")] = tensor
        elif strict and ".base_layer." not in name:  # PEFT stores embeddings along with LoRA on them
            raise UnsupportedError(f"{where}: {key}", "loralib has no place for it", "merge it instead: meshlora merge")
    check_patterns(config, found)  # a pattern that matches nothing is a mistake
    factors = {}
    for module, sides in sorted(found.items()):
        if sides.keys() != {"A", "B"}:
            raise UserError(f"{where}: {module}", f"it has lora_{next(iter(sides))} only")
        a, b = sides["A"], sides["B"]
        r, scaling = rank_and_scaling(config, module)
        needed, enabled = a.shape[0], []
        if strict:
            # LoRA on experts, which only layout "peft" can hold, has rank r per expert. To PEFT an adapter on pieces is
            # like any other; loralib has a form of its own, for equal blocks only.
            needed, enabled = r, pieces_of(config, module)
        if a.ndim != 2 or b.ndim != 2 or (a.shape[0], b.shape[1]) != (needed, needed):
            rule = f"A {list(a.shape)} and B {list(b.shape)} are not of rank {r}, as {CONFIG_FILE} says"
            raise UserError(f"{where}: {module}", rule)
        if enabled and r % len(enabled):
            raise UserError(f"{where}: {module}", f"rank {r} is not the same for {len(enabled)} pieces")
        rank = r // max(1, len(enabled))  # of one piece
        factors[module] = Factors(a, b, rank, scaling * rank, module in embeddings, tuple(enabled))
    if not factors:
        raise UserError(where, "it holds no lora_A")
    if strict:
        for module in own_words(config).get("pieces", {}):
            if not matches([module], factors):
                raise UserError(f"{where}: {PIECES_FILE} names {module}", "there is no such module in the adapter")
    return factors, biases


def _peft_state(
    factors: Mapping[str, Factors], biases: Mapping[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    # Most modules are like it: the config says its r.
    plain = next((f for f in factors.values() if not f.pieces), next(iter(factors.values())))
    ranks: dict[str, int] = {}
    alphas: dict[str, float] = {}
    stored = {}
    for module, each in factors.items():
        name, times = _short_name(module, factors), max(1, len(each.pieces))  # blocks, each with the rank and the scale
        if each.r * times != plain.r:
            ranks[name] = each.r * times
        if each.lora_alpha * times != plain.lora_alpha:
            alphas[name] = each.lora_alpha * times
        for side, tensor in (("A", each.a), ("B", each.b)):
            suffix = f"lora_{side}.weight"
            if each.is_embedding:
                suffix = f"lora_embedding_{side}"
            stored[f"{PREFIX}{module}.{suffix}"] = tensor
    bias: Literal["none", "all", "lora_only"] = "none"
    if biases:
        bias = "lora_only"
    for key, tensor in biases.items():
        module = key.removesuffix(".bias")
        if module in factors:
            module = f"{module}.base_layer"
        else:
            bias = "all"
        stored[f"{PREFIX}{module}.bias"] = tensor
    config = LoraConfig(
        r=plain.r,
        lora_alpha=plain.lora_alpha,
        target_modules=sorted(factors),
        rank_pattern=ranks,
        alpha_pattern=alphas,
        bias=bias,
    )
    return config_to_store(config, None), stored


def _short_name(module: str, factors: Mapping[str, Factors]) -> str:
    """The last part of the name if all modules with it are alike, else the full name."""
    suffix = module.rpartition(".")[2]
    alike = {(f.r, f.lora_alpha, f.pieces) for m, f in factors.items() if m.rpartition(".")[2] == suffix}
    if len(alike) == 1:
        return suffix
    return module


def write_folder(
    target: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any], own: Mapping[str, Any]
) -> None:
    """`write_adapter`, but `target` appears only after the files were read back and compared."""

    def check(folder: Path) -> None:
        _compare(folder / WEIGHTS_FILE, tensors)
        if read_json(folder / CONFIG_FILE) != config or own_words(read_config(folder, ignore_dropout=True)) != own:
            raise MeshloraError(f"{target}: read back, {CONFIG_FILE} differs from what was written")

    try:
        write_adapter(target, tensors, config, own, also=check)
    except (OSError, SafetensorError) as error:
        raise MeshloraError(f"{target}: it could not be written ({reason(error)})") from error


def _write_file(target: Path, state: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> None:
    ordered = {key: state[key].contiguous() for key in sorted(state)}  # safetensors refuses what is not contiguous
    text = {"format": "pt", "loralib": json.dumps(metadata, sort_keys=True)}

    def write(path: Path) -> None:
        save_file(ordered, path, metadata=text)
        _compare(path, state)  # before it appears under its name

    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        write_atomically(target, write)
    except (OSError, SafetensorError) as error:
        raise MeshloraError(f"{target}: it could not be written ({reason(error)})") from error


def _read_tensors(file: Path) -> dict[str, Tensor]:
    """All tensors of a safetensors file under the names they have there, checked by `read_tensor`."""
    with open_safetensors(file) as opened:
        return {key: read_tensor(opened, file, key) for key in opened.keys()}  # noqa: SIM118 - not a dict


def _compare(file: Path, meant: Mapping[str, Tensor]) -> None:
    found = _read_tensors(file)
    same = found.keys() == meant.keys() and all(
        torch.equal(found[key], meant[key]) and found[key].dtype == meant[key].dtype for key in meant
    )
    if not same:
        raise MeshloraError(f"{file.name}: read back, its tensors differ from what was written")

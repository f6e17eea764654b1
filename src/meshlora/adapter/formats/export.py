"""Adapters in other hands' formats: plain PEFT folders, and the `lora_state_dict` of microsoft/LoRA, both ways.

Owns: adapters on pieces of fused matrices, in block form on our disk and compact in loralib's `MergedLinear`; reading
back what was written. Does not own: where the rows of a piece lie (a function is given), how a folder is written
(`adapter.formats.peft_format`), the form of serving engines (`adapter.formats.engine_export`).

Block form, a normal PEFT adapter: for k of the n pieces of one matrix, each with rank r, A is the stack `[k*r, in]` and
B is `[out, k*r]`, zero but for the rows of piece j in columns `j*r : (j+1)*r`. rank_pattern says k*r, alpha_pattern
keeps the scale alpha/r, and `meshlora.json` beside it names the pieces: `{"pieces": {"c_attn": ["q", "v"]}}`.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from peft import LoraConfig
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from meshlora.adapter.formats.file_tensors import PREFIX, read_tensors
from meshlora.adapter.formats.loralib import (
    Factors,
    PieceRows,
    blocks,
    check_for_loralib,
    check_modules,
    equal_blocks,
    from_loralib,
    loralib_state,
    parse_metadata,
    without_wrappers,
)
from meshlora.adapter.formats.peft_format import (
    CONFIG_FILE,
    PIECES_FILE,
    WEIGHTS_FILE,
    read_config,
    write_adapter,
)
from meshlora.adapter.formats.per_expert import refuse_per_expert
from meshlora.adapter.targets.options import check_patterns, pattern_key
from meshlora.adapter.targets.pieces import own_words
from meshlora.common.errors import MeshloraError, UnsupportedError, UserError, did_you_mean, reason
from meshlora.common.files import open_safetensors, read_json, write_atomically

LAYOUTS = ("peft", "loralib")
_SIDES = {
    ".lora_A.weight": "A",
    ".lora_B.weight": "B",
    ".lora_embedding_A": "A",
    ".lora_embedding_B": "B",
}


class Imported(NamedTuple):
    """What was written, and what was taken off all names."""

    num_tensors: int
    prefix: str


def export(adapter: str | Path, out: str | Path, layout: str, *, piece_rows: PieceRows | None = None) -> int:
    """Write the adapter folder `adapter` as `out`; returns the number of tensors, all of them read back.

    Args:
        layout: "peft": a plain PEFT folder, without `meshlora.json`: whoever trains it on fills the zeros of blocks.
            "loralib": one safetensors file with `<module>.lora_A`, `<module>.lora_B` as `loralib.lora_state_dict` names
            them, and r, lora_alpha and enable_lora in its metadata.
        piece_rows: where pieces lie; default: `equal_blocks()`.

    Raises:
        UserError: files missing or damaged, `out` is there already, adapters on single experts (`import_per_expert`).
        UnsupportedError: loralib has no such adapter.
    """
    folder, target = Path(adapter), Path(out)
    if layout not in LAYOUTS:
        raise UserError(f"layout {layout!r}", f"it must be one of {', '.join(LAYOUTS)}", did_you_mean(layout, LAYOUTS))
    check_new(target, ".safetensors" if layout == "loralib" else "")
    config = read_config(folder, ignore_dropout=True)
    if layout == "loralib":
        check_for_loralib(config, f"{folder / CONFIG_FILE}")
    tensors = read_tensors(folder / WEIGHTS_FILE)
    refuse_per_expert(folder, tensors, *(["use --layout peft"] if layout == "peft" else []))
    rows = piece_rows or equal_blocks()
    # To PEFT an adapter on pieces is one like any other; loralib has its own form, for equal blocks alone.
    pieces = own_words(config).get("pieces", {}) if layout == "loralib" else {}
    factors, biases = _factors(tensors, config, pieces, f"{folder}", strict=layout == "loralib")
    for module, each in factors.items():
        if each.pieces:
            blocks(module, each, rows)  # refuses what is not block form
    if layout == "peft":
        write_folder(target, tensors, read_json(folder / CONFIG_FILE), {})
        return len(tensors)
    state, metadata = loralib_state(factors, biases, rows)
    _write_file(target, state, metadata)
    return len(state)


def import_loralib(
    file: str | Path,
    out: str | Path,
    *,
    lora_alpha: float | None = None,
    enable_lora: Sequence[bool] | None = None,
    base_model: str | None = None,
    piece_names: Sequence[str] = ("q", "k", "v"),
    model: nn.Module | None = None,
) -> Imported:
    """Write a microsoft/LoRA `lora_state_dict`, stored as safetensors, as the adapter folder `out`.

    PEFT finds targets by the ends of their names, and starts those of which the file has no tensors anew, with B zero
    and no error. So `target_modules` has whole names: in a model with other ones PEFT finds none, and says so.

    Args:
        lora_alpha, enable_lora: where the file's metadata does not say them. enable_lora: of the fused modules, which
            are those whose A has several times the rank of B; with one piece enabled, it is of all modules.
        model: whose names and shapes these have to be; it may be on the meta device.

    Raises:
        UserError: the file is pickled, damaged, or no lora_state_dict; an argument is missing or does not fit.
    """
    source, target = Path(file), Path(out)
    if source.suffix in {".bin", ".pt", ".pth", ".ckpt"}:
        raise UserError(
            f"{source}",
            "it is pickled, and meshlora unpickles nothing",
            "convert it where you trust it: safetensors.torch.save_file(torch.load(file, weights_only=True), new_file)",
        )
    check_new(target)
    tensors, prefix = without_wrappers(source, read_tensors(source))
    with open_safetensors(source) as opened:
        metadata = parse_metadata(source, (opened.metadata() or {}).get("loralib"))
    alpha = lora_alpha if lora_alpha is not None else metadata.get("lora_alpha")
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
        enabled = metadata.get("enable_lora", {}).get(module) if enable_lora is None else enable_lora
        factors[module] = from_loralib(
            source, module, tensors, float(own.get("lora_alpha", alpha)), enabled, tuple(piece_names)
        )
    known = {f"{module}.lora_{side}" for module in modules for side in "AB"}
    biases = {key: tensor for key, tensor in tensors.items() if key not in known}
    # Old GPT-2 code keeps its causal mask in a buffer of this name, and loralib takes it for a bias.
    biases = {key: tensor for key, tensor in biases.items() if not (key.endswith("attn.bias") and tensor.ndim > 1)}
    if wrong := [key for key in biases if not key.endswith(".bias")]:
        raise UserError(f"{source}: {wrong[0]}", "it is neither lora_A, lora_B nor a bias")
    if model is not None:
        check_modules(source, factors, biases, model)
    config, stored = _peft_state(factors, biases, base_model)
    pieces = {_common(module, factors): list(each.pieces) for module, each in factors.items() if each.pieces}
    write_folder(target, stored, config, {"pieces": pieces} if pieces else {})
    return Imported(len(stored), prefix)


def check_new(target: Path, suffix: str = "") -> None:
    """Refuse a path that is there, or whose name does not end as the layout's does."""
    if target.exists():
        raise UserError(f"--out {target}", "it is there already", "choose a new path; nothing is overwritten")
    if suffix and target.suffix != suffix:
        raise UserError(f"--out {target}", f"this layout is one file, whose name ends in {suffix}")


def _factors(
    tensors: Mapping[str, Tensor],
    config: LoraConfig,
    pieces: Mapping[str, Sequence[str]],
    where: str,
    *,
    strict: bool,
) -> tuple[dict[str, Factors], dict[str, Tensor]]:
    """Module -> its factors, and the biases. strict: nothing else may be in the file."""
    found: dict[str, dict[str, Tensor]] = {}
    embeddings: set[str] = set()
    biases: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        name = key.removeprefix(PREFIX)
        suffix = next((s for s in _SIDES if name.endswith(s)), None)
        if suffix is not None:
            module = name.removesuffix(suffix)
            found.setdefault(module, {})[_SIDES[suffix]] = tensor
            embeddings |= {module} if "embedding" in suffix else set()
        elif name.endswith(".bias") and ".lora_" not in name:
            biases[name.replace(".base_layer.", ".")] = tensor
        elif strict and ".base_layer." not in name:  # PEFT stores the embeddings beside LoRA on them
            raise UnsupportedError(f"{where}: {key}", "loralib has no place for it", "merge it instead: meshlora merge")
    check_patterns(config, found)
    factors = {}
    for module, sides in sorted(found.items()):
        if sides.keys() != {"A", "B"}:
            raise UserError(f"{where}: {module}", f"it has lora_{next(iter(sides))} only")
        a, b = sides["A"], sides["B"]
        r = config.rank_pattern.get(pattern_key(config.rank_pattern, module), config.r)
        alpha = config.alpha_pattern.get(pattern_key(config.alpha_pattern, module), config.lora_alpha)
        # LoRA on experts, which only a plain copy can hold, has r for each expert.
        needed = r if strict or pieces else a.shape[0]
        if a.ndim != 2 or b.ndim != 2 or (a.shape[0], b.shape[1]) != (needed, needed):
            raise UserError(
                f"{where}: {module}",
                f"A {list(a.shape)} and B {list(b.shape)} are not of rank {r}, as {CONFIG_FILE} says",
            )
        scaling = alpha / math.sqrt(r) if config.use_rslora else alpha / r
        enabled = next((names for m, names in pieces.items() if module == m or module.endswith(f".{m}")), ())
        if enabled and r % len(enabled):
            raise UserError(f"{where}: {module}", f"rank {r} is not the same for {len(enabled)} pieces")
        rank = r // max(1, len(enabled))
        factors[module] = Factors(a, b, rank, scaling * rank, module in embeddings, tuple(enabled))
    if not factors:
        raise UserError(where, "it holds no lora_A")
    if unused := [m for m in pieces if not any(module == m or module.endswith(f".{m}") for module in factors)]:
        raise UserError(f"{where}: {PIECES_FILE} names {unused[0]}", "there is no such module in the adapter")
    return factors, biases


def _peft_state(
    factors: Mapping[str, Factors], biases: Mapping[str, Tensor], base_model: str | None
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    plain = next((f for f in factors.values() if not f.pieces), next(iter(factors.values())))
    ranks = {m: f.r * max(1, len(f.pieces)) for m, f in factors.items()}
    alphas = {m: f.lora_alpha * max(1, len(f.pieces)) for m, f in factors.items()}
    config = LoraConfig(
        r=plain.r,
        lora_alpha=plain.lora_alpha,
        target_modules=sorted(factors),
        rank_pattern={_common(m, factors): r for m, r in ranks.items() if r != plain.r},
        alpha_pattern={_common(m, factors): alpha for m, alpha in alphas.items() if alpha != plain.lora_alpha},
        bias=_bias_option(factors, biases),
        task_type="CAUSAL_LM",
        base_model_name_or_path=base_model,
        inference_mode=True,
    )
    stored = {}
    for module, each in factors.items():
        for side, tensor in (("A", each.a), ("B", each.b)):
            suffix = f"lora_embedding_{side}" if each.is_embedding else f"lora_{side}.weight"
            stored[f"{PREFIX}{module}.{suffix}"] = tensor
    for key, tensor in biases.items():
        module = key.removesuffix(".bias")
        stored[f"{PREFIX}{module}.base_layer.bias" if module in factors else f"{PREFIX}{key}"] = tensor
    values = {key: sorted(value) if isinstance(value, set) else value for key, value in config.to_dict().items()}
    return json.loads(json.dumps(values, default=lambda value: getattr(value, "value", str(value)))), stored


def _bias_option(factors: Mapping[str, Factors], biases: Mapping[str, Tensor]) -> Literal["none", "all", "lora_only"]:
    if not biases:
        return "none"
    return "lora_only" if all(key.removesuffix(".bias") in factors for key in biases) else "all"


def _common(module: str, factors: Mapping[str, Factors]) -> str:
    """The last part of the name where all modules of that name are alike, else the whole name."""
    suffix = module.rpartition(".")[2]
    alike = {(f.r, f.lora_alpha, f.pieces) for m, f in factors.items() if m.rpartition(".")[2] == suffix}
    return suffix if len(alike) == 1 else module


def write_folder(
    target: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any], own: Mapping[str, Any]
) -> None:
    """`write_adapter`: write beside `target`, read back, then rename: it appears only where it is right."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.", suffix=".tmp") as temporary:
            folder = Path(temporary) / target.name
            write_adapter(folder, tensors, config, own)
            _compare(folder / WEIGHTS_FILE, tensors)
            found = read_config(folder, ignore_dropout=True)
            if read_json(folder / CONFIG_FILE) != config or own_words(found) != own:
                raise MeshloraError(f"{target}: read back, {CONFIG_FILE} differs from what was written")
            folder.rename(target)
    except (OSError, SafetensorError) as error:
        raise MeshloraError(f"{target}: it could not be written ({reason(error)})") from error


def _write_file(target: Path, state: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> None:
    ordered = {key: state[key].contiguous() for key in sorted(state)}
    text = {"format": "pt", "loralib": json.dumps(metadata, sort_keys=True)}

    def write(path: Path) -> None:
        save_file(ordered, path, metadata=text)
        _compare(path, state)

    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        write_atomically(target, write)
    except (OSError, SafetensorError) as error:
        raise MeshloraError(f"{target}: it could not be written ({reason(error)})") from error


def _compare(file: Path, meant: Mapping[str, Tensor]) -> None:
    found = read_tensors(file)
    same = found.keys() == meant.keys() and all(
        torch.equal(found[key], meant[key]) and found[key].dtype == meant[key].dtype for key in meant
    )
    if not same:
        raise MeshloraError(f"{file.name}: read back, its tensors differ from what was written")

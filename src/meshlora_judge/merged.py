"""A merged checkpoint against base and adapter, tensor by tensor, by the merge of PEFT's own layers in float64.

Owns: reading both checkpoints one tensor at a time, and what became of each: merged, not, twice, in few bits, changed
though nothing is on it. Does not own: the words of the verdict (`meshlora_judge.verbs.merge`).

A right tensor is within one rounding of the stored dtype, of the sum and of the delta: PEFT rounds both.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig

from meshlora_ground.errors import UserError
from meshlora_ground.files import open_safetensors, read_json
from meshlora_ground.weight_files import weight_files
from meshlora_judge.attached import WEIGHTS, Part, parts_of, scale_words, without_weights
from meshlora_judge.experts import plain_name
from meshlora_judge.packed import load_base
from meshlora_judge.quantized import rounded_matrix

RIGHT, KEPT = "right", "as in the base"
_FEW_BITS = ("fp8", "int8", "nf4")


@dataclass
class Found:
    """What became of a tensor.

    Attributes:
        what: RIGHT, KEPT, or the fault. kind: of the module, as in `down_proj`.
        arrived: the share of the adapter's change that is there, by projection; stayed: of its elements, those with
        the base's value. roundings: the largest error, in roundings that are allowed.
    """

    name: str
    what: str
    kind: str = ""
    arrived: float | None = None
    stayed: float | None = None
    roundings: float | None = None


@dataclass
class Merge:
    """All that was found. dtype: in which the merged checkpoint stores most of its adapted tensors."""

    tensors: list[Found] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)
    dtype: str = ""


class Stored:
    """The tensors of a checkpoint under the names of transformers' model, each read when it is asked for.

    Where files have other names, such as experts one by one, or few bits, transformers loads the whole model.
    """

    def __init__(self, folder: str, names: list[str], tied: dict[str, str], *, trust_remote_code: bool) -> None:
        self.files: dict[str, Path] = {}
        for file in weight_files(Path(folder)):
            with open_safetensors(file) as opened:
                self.files |= dict.fromkeys(opened.keys(), file)
        config = read_json(Path(folder) / "config.json")
        text = config.get("text_config") or {}
        self.is_tied = bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", True)))
        # An older checkpoint may store the head of a tied pair, and not the embedding.
        self.tied = tied | {first: name for name, first in tied.items() if first not in self.files}
        self.few_bits = bool(config.get("quantization_config") or text.get("quantization_config"))
        absent = [name for name in names if self._key(name) is None]
        self.whole: dict[str, Tensor] | None = None
        self.missing, self.extra = absent, sorted(self.files.keys() - {*names})
        if self.few_bits or any(".experts." in name for name in absent) or 2 * len(absent) > len(names):
            self._load(folder, trust_remote_code)

    def _key(self, name: str) -> str | None:
        """The key in the files that holds `name`."""
        if name in self.files:
            return name
        other = self.tied.get(name)
        return other if other in self.files and self.is_tied else None

    def _load(self, folder: str, trust_remote_code: bool) -> None:
        options = {"local_files_only": True, "trust_remote_code": trust_remote_code}
        config = AutoConfig.from_pretrained(folder, **options)
        stored = torch.float32 if self.few_bits else getattr(config, "dtype", None) or torch.float32
        model, info = load_base(folder, config, dtype=stored, output_loading_info=True, **options)
        self.whole = model.state_dict()
        # Of few bits each weight has parts, whose names are the format's.
        self.missing = sorted(info["missing_keys"])
        self.extra = [] if self.few_bits else sorted(info["unexpected_keys"])

    def read(self, name: str) -> Tensor | None:
        """The tensor as it is stored, or in plain numbers; None if it is missing."""
        if self.whole is not None:
            return None if name in self.missing else self.whole.get(name)
        key = self._key(name)
        if key is None:
            return None
        with safe_open(self.files[key], framework="pt") as opened:
            tensor: Tensor = opened.get_tensor(key)
        return tensor


def judge_merge(merged: str, base: str, adapter: Path, *, trust_remote_code: bool = False) -> Merge:
    """What became of each tensor of `base` in the folder `merged`.

        judge_merge("merged", "base", Path("adapter")).tensors

    Raises: UserError: a folder cannot be read, or the three do not belong together.
    """
    model, tied = without_weights(base, adapter, trust_remote_code=trust_remote_code)
    names, parts, replaced = _targets(model, adapter)
    options = {"trust_remote_code": trust_remote_code}
    before, after = Stored(base, names, tied, **options), Stored(merged, names, tied, **options)
    if after.whole is None and before.whole is not None and after.missing:
        after = Stored(merged, [], {}, **options)
        after._load(merged, trust_remote_code)
    found = Merge(extra=sorted({*after.extra} - {*before.extra}))
    config, dtypes = model.peft_config["default"], list[str]()
    if config.lora_bias:
        raise UserError(f"adapter {adapter}", "lora_bias: a merge of it is not judged", "compare log-probabilities")
    for name in names:
        old, new = before.read(name), after.read(name)
        if new is None:
            if old is not None:
                found.missing.append(name)
            continue
        if old is None or old.shape != new.shape:
            what = "not in the base"
            if old is not None:
                what = f"of shape {[*new.shape]}"
            found.tensors.append(Found(name, what))
            continue
        if name in replaced and name not in parts:
            is_right = torch.equal(replaced[name].to(new.dtype), new)
            what = RIGHT if is_right else _of_saved(new, old)
            found.tensors.append(Found(name, what, _kind(name)))
        elif name in parts:
            dtypes.append("few bits" if after.few_bits else f"{new.dtype}".removeprefix("torch."))
            old = replaced.get(name, old)  # an embedding that is stored beside its factors
            expected = _merged_by_peft(parts[name], old)
            found.tensors.append(_judged(name, parts[name][0].kind, old, expected, new, config, after.few_bits))
        else:
            found.tensors.append(Found(name, _without_adapter(name, old, new, tied, parts, after), _kind(name)))
    found.dtype = max(dtypes, key=dtypes.count, default="")
    return found


def _targets(model: Any, adapter: Path) -> tuple[list[str], dict[str, list[Part]], dict[str, Tensor]]:
    """(names of the base's tensors, name -> the parts of the adapter on it, name -> the values that replace it)."""
    names = []
    for key in model.state_dict():
        plain = plain_name(key)
        if ".lora_" not in key and "trainable_tokens_delta" not in key and "modules_to_save" not in key:
            names.append(plain)
    names = list(dict.fromkeys(names))
    parts: dict[str, list[Part]] = {}
    for part in parts_of(model):
        if hasattr(part.module, "merge"):
            parts.setdefault(part.name if part.name in names else f"{part.name}.weight", []).append(part)
    unknown = sorted(parts.keys() - {*names})
    if unknown:
        raise UserError(f"adapter {adapter}", f"it is on {unknown[0]}, which the base has not")
    replaced = {}
    with open_safetensors(adapter / WEIGHTS) as opened:
        for key in opened.keys():  # noqa: SIM118 - no mapping
            name = plain_name(key.replace(".modules_to_save.", "."))
            if ".lora_" not in key and name in names:
                replaced[name] = opened.get_tensor(key)
    return names, parts, replaced


def _merged_by_peft(parts: list[Part], old: Tensor) -> Tensor:
    """Float64: the weight with all parts on it, merged by PEFT's layers."""
    value = old.double()
    for part in parts:
        layer = part.module.get_base_layer()
        parameter = getattr(layer, getattr(part.module, "parameter_name", "weight"))
        # In place of the meta weight for the length of one merge: the model itself stays without weights.
        empty, parameter.data = parameter.data, value.clone()
        part.module.merge()
        value, parameter.data = parameter.data.double(), empty
    return value


def _judged(name: str, kind: str, old: Tensor, expected: Tensor, new: Tensor, config: Any, few_bits: bool) -> Found:
    before, after = old.double(), new.double()
    delta, change = expected - before, after - before
    size = float(delta.square().sum())
    if size == 0:
        same = torch.equal(old.to(new.dtype), new)
        return Found(name, KEPT if same else "changed, and its adapter is zero", kind)
    by = float((delta * change).sum()) / size
    moved = delta != 0
    stayed = float((after == old.to(new.dtype).double())[moved].double().mean())
    worst = float(_roundings(after, expected, delta, new.dtype).max())
    found = Found(name, "", kind, by, stayed, worst)
    if worst <= 1:
        found.what = RIGHT
    elif torch.equal(old.to(new.dtype), new):
        found.what = "not merged"
    elif few_bits:
        found.what = _by_projection(before, delta, after, by)
    elif float(_roundings(after, before + by * delta, by * delta, new.dtype).max()) <= 1:
        found.what = f"merged, {scale_words(config, by)}"
    else:
        unknown = f"neither the base nor merged (of the adapter's change {by:.0%} is in it)"
        found.what = next(_further(before, delta, after, new.dtype), unknown)
    return found


def _by_projection(before: Tensor, delta: Tensor, after: Tensor, by: float) -> str:
    """What became of a tensor whose format rounds in its own way: by the share `by` of the delta that is in it, within
    what noise of this size, uncorrelated with the delta, makes of it.
    """
    noise = after - before - by * delta
    if float(noise.norm() / before.norm()) > 0.2:
        return "neither the base nor merged"
    within = 0.02 + 4 * float(noise.square().mean().sqrt() / delta.norm())
    if within > 0.3:
        return "rounding is larger than the adapter, and nothing is left of it"
    if abs(by - 1) < within:
        return RIGHT
    return "not merged" if abs(by) < within else f"merged, scaled by about {by:.2g}"


def _roundings(found: Tensor, expected: Tensor, delta: Tensor, dtype: torch.dtype) -> Tensor:
    """Each error over what rounding sum and delta to `dtype`, and the product to float32, may do."""
    eps = torch.finfo(dtype).eps if dtype.is_floating_point else 1.0
    # Below the normal numbers steps no longer shrink.
    least = torch.finfo(dtype).smallest_normal * eps if dtype.is_floating_point else 1.0
    allowed = (expected.abs() + delta.abs()) * (0.51 * eps) + least
    if dtype != torch.float64:
        allowed += 8 * torch.finfo(torch.float32).eps * delta.abs().max()
    return (found - expected).abs() / allowed


def _further(before: Tensor, delta: Tensor, after: Tensor, dtype: torch.dtype) -> Iterator[str]:
    """Faults that are looked for where the simple ones do not fit."""

    def fits(expected: Tensor) -> bool:
        # Not all: what lies between two steps goes to one or the other by the last bit before.
        return float((_roundings(after, expected, delta, dtype) <= 1).double().mean()) > 0.99

    if before.ndim == 2 and before.shape[0] == before.shape[1] and fits(before + delta.T):
        yield "merged with a transposed delta"
    for kind in _roundable(before, dtype):
        if fits(_rounded(before + delta, kind)):
            yield f"merged, then rounded to {kind}"
        of_base = _rounded(before, kind)
        if fits(of_base + delta):
            yield f"merged on a base rounded to {kind}"
        if fits(_rounded(of_base + delta, kind)):
            yield f"merged on a base rounded to {kind}, and rounded again"
        if fits(of_base):
            yield f"not merged, and rounded to {kind}"


def _roundable(matrix: Tensor, dtype: torch.dtype) -> list[str]:
    """Kinds of rounding that are coarser than `dtype`, and possible."""
    kinds = [kind for kind in ("float16", "bfloat16") if torch.finfo(getattr(torch, kind)).eps > torch.finfo(dtype).eps]
    if matrix.ndim == 2:
        kinds += _FEW_BITS if importlib.util.find_spec("bitsandbytes") else ["fp8"]
    return kinds


def _rounded(matrix: Tensor, kind: str) -> Tensor:
    if kind in _FEW_BITS:
        return rounded_matrix(matrix, kind).double()
    return matrix.to(getattr(torch, kind)).double()


def _without_adapter(
    name: str, old: Tensor, new: Tensor, tied: dict[str, str], parts: dict[str, list[Part]], after: Stored
) -> str:
    """What became of a tensor that has no adapter."""
    # In the dtype of the merge: a base that was cast whole is no fault of the merge.
    if torch.equal(old.to(new.dtype), new):
        return KEPT
    first = tied.get(name)
    if first in parts:
        other = after.read(f"{first}")
        if other is not None and torch.equal(other, new):
            return f"tied to {first}, and so carries its adapter"
    if after.few_bits or not new.is_floating_point():
        away = (new.double() - old.double()).norm() / old.double().norm().clamp(min=1e-30)
        if float(away) < 0.2:
            return KEPT
    for kind in _roundable(old, new.dtype) if new.is_floating_point() else []:
        with contextlib.suppress(RuntimeError, ValueError):
            if torch.equal(_rounded(old.double(), kind).to(new.dtype), new):
                return f"no adapter is on it, and it is rounded to {kind}"
    change = float((new.double() - old.double()).norm() / old.double().norm().clamp(min=1e-30))
    return f"no adapter is on it, and it is changed by {change:.1e} of its size"


def _of_saved(new: Tensor, old: Tensor) -> str:
    return "the base's, not that of the adapter's file" if torch.equal(old.to(new.dtype), new) else "neither's"


def _kind(name: str) -> str:
    return name.removesuffix(".weight").rpartition(".")[2]

"""The changes an adapter folder makes to a model: tensors replaced, products added, and the merge arithmetic.

Owns: reading and checking a PEFT LoRA folder of any mergeable kind, in one process. PEFT attaches it on the meta
device, so options that select modules, ranks and scales mean exactly what they mean to PEFT. The arithmetic: a merged
weight is computed once, in float32 (float64 for float64), and not rounded here. Does not own: writing
(`meshlora_extra.merging.merge`).
"""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, PeftModelForCausalLM, get_peft_model_state_dict
from peft.tuners import lora as peft_lora
from peft.utils.other import TrainableTokensWrapper
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from meshlora.adapter.formats.adapter_file import (
    PREFIX,
    another_vocabulary,
    check_keys,
    check_vocabulary,
    open_adapter,
    read_tensor,
)
from meshlora.adapter.formats.peft_format import CONFIG_FILE, WEIGHTS_FILE, read_config
from meshlora.adapter.targets.options import check_patterns, check_values
from meshlora.adapter.targets.resolve import DESCRIPTIVE, SUPPORTED
from meshlora.layers.embedding import check_looked_up_alone
from meshlora.wings.experts.per_expert import refuse_per_expert
from meshlora_ground.compat.peft_names import names_as_loaded
from meshlora_ground.compat.peft_targets import is_stored_in_out, targets_as_configured
from meshlora_ground.errors import UnsupportedError, UserError, reason
from meshlora_ground.float64 import wide_dtype
from meshlora_ground.tasks import CAUSAL, task_of

# Options that change neither the base PEFT runs nor the product it adds in evaluation; all others are refused.
_FOLLOWED = (
    (SUPPORTED - {"alora_invocation_tokens"})
    | DESCRIPTIVE
    | {"lora_bias", "eva_config", "loftq_config", "ensure_weight_tying", "trainable_token_indices"}
)
_PLAIN_INITS = ("gaussian", "eva", "orthogonal", "mica")
_RESIDUAL_INITS = ("pissa", "olora")
_DELTA = "token_adapter.trainable_tokens_delta"


@dataclass(frozen=True)
class Lora:
    """`W + scaling * B @ A` on one weight, W as `[out, in]`; with a magnitude m (DoRA): rows scaled to norm m.

    Attributes:
        a, b, magnitude: keys in the adapter file.
        is_transposed: the weight is stored `[in, out]`: Conv1D, and embeddings `[V, H]`, whose A is `[r, V]`.
        residual: "pissa" or "olora": PEFT first subtracts a product of rank r from the base; "" for none.
        num_experts: size of a stack of matrices, each with its own product; 0: a single matrix. For a stack A is
            `[r*E, in]` with the expert as slow index, B `[out, r*E]` with the expert as fast index; in and out are
            PEFT's, whatever they mean in the model.
    """

    a: str
    b: str
    r: int
    scaling: float
    magnitude: str | None
    is_transposed: bool
    residual: str
    num_experts: int = 0


@dataclass(frozen=True)
class Change:
    """The change to one tensor of the model.

    Attributes:
        whole: key of the replacement tensor in the adapter file.
        lora: the product to add. bias: key of a bias to add, and its scale.
        is_own: `whole` replaces this name only, not the names tied to it (`modules_to_save`).
        beside: key of the tensor that then replaces the names tied to it.
        rows: key of rows of a vocabulary that replace its own, and their indices (`trainable_token_indices`).
    """

    whole: str | None = None
    lora: Lora | None = None
    bias: tuple[str, float] | None = None
    is_own: bool = False
    beside: str | None = None
    rows: tuple[str, tuple[int, ...]] | None = None


@dataclass(frozen=True)
class Changes:
    """All changes, by the model's own names, read from `file` on demand.

    Attributes:
        names: PEFT's name on the model -> the key in the file. in_file: key -> its name there without wrappers, which
            PEFT may change when it loads it.
    """

    file: Path
    by_name: Mapping[str, Change]
    names: Mapping[str, str]
    in_file: Mapping[str, str]

    def read(self, key: str) -> Tensor:
        """One tensor of the adapter file, in memory of its own."""
        with open_adapter(self.file, self.names) as file:
            return file.get_tensor(key).clone()  # safetensors maps the file, which is closed here


def read_changes(model: Any, folder: Path) -> Changes:
    """The changes that the adapter in `folder` makes to `model`, which is on the meta device and unusable afterwards.

    Raises:
        UserError: files missing or damaged, names, shapes or types that do not fit the model, values not finite.
        UnsupportedError: an option that cannot be merged, by name.
    """
    where = f"{folder / CONFIG_FILE}"
    try:
        config = _quietly(read_config, folder, ignore_dropout=True)
    except ImportError as error:  # some options need extra packages
        raise UnsupportedError(where, f"peft cannot read it here ({reason(error)})") from error
    check_mergeable(config, where)
    with open_adapter(folder / WEIGHTS_FILE) as file:  # names alone: no tensor is read
        stored = dict(file.names)
    refuse_per_expert(folder, stored)
    loaded = names_as_loaded(model, stored)
    names = {loaded[name]: key for name, key in stored.items()}
    check_patterns(config, [*(name for name, _ in model.named_modules()), *model.state_dict()])
    base_names = set(model.state_dict())  # before PEFT wraps it
    vocabulary = _vocabulary(model)
    wrapped = _attach(model, config, where)  # PEFT decides which modules, not a rule of ours
    expected = {
        key: tuple(tensor.shape)
        for key, tensor in _quietly(get_peft_model_state_dict, wrapped, save_embedding_layers=False).items()
    }
    # PEFT also loads any base tensors in the file: embeddings that were resized or have LoRA on them, biases.
    optional = {
        key: tuple(tensor.shape)
        for key, tensor in wrapped.state_dict().items()
        if _base_name(key) in base_names and ".modules_to_save." not in key
    }
    by_name = _products(wrapped, config) | _token_rows(wrapped, where)
    # Keys that PEFT writes once more for a tied head if the vocabulary was resized, and passes over.
    again = {f"{path}.{_DELTA}" for path, layer in _token_layers(wrapped).items() if layer.tied_adapter}
    names = {name: key for name, key in names.items() if name not in again}
    _check_file(folder / WEIGHTS_FILE, names, expected, optional, vocabulary)
    added: set[str | None] = {None}  # stands for no magnitude
    for change in by_name.values():
        if change.lora:
            added |= {change.lora.a, change.lora.b, change.lora.magnitude}
        if change.bias:
            added.add(change.bias[0])
        if change.rows:
            added.add(change.rows[0])
    assert added <= {None, *names}, added - names.keys()
    for key in sorted(names.keys() - added):
        name = _base_name(key)
        if name not in base_names:
            raise UnsupportedError(f"{folder / WEIGHTS_FILE}: {key}", "merging this kind of tensor is not supported")
        change = by_name.get(name, Change())
        if ".original_module." in key:
            by_name[name] = dataclasses.replace(change, beside=key)
        else:
            by_name[name] = dataclasses.replace(change, whole=key, is_own=key not in optional)
    return Changes(folder / WEIGHTS_FILE, by_name, names, {key: name for name, key in stored.items()})


def _vocabulary(model: Any) -> dict[str, int]:
    """The embedding and the head of a model by name -> their rows."""
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    return {
        name: len(module.weight)
        for name, module in model.named_modules()
        if any(module is end for end in ends) and isinstance(getattr(module, "weight", None), Tensor)
    }


def check_mergeable(config: LoraConfig, where: str) -> None:
    """Refuse options that no checkpoint can express, or whose base cannot be rebuilt. Raises: UnsupportedError."""
    default = LoraConfig()
    # PEFT's only: our `pieces` and `share_experts` matter for training alone.
    for field in dataclasses.fields(LoraConfig):
        value = getattr(config, field.name)
        if field.name in _FOLLOWED or value == getattr(default, field.name) or not value:
            continue
        raise UnsupportedError(f"{where}: {field.name}={value!r}", "an adapter with this option cannot be merged")
    check_values(config)
    init = config.init_lora_weights
    if isinstance(init, str) and init.lower() not in (*_PLAIN_INITS, *_RESIDUAL_INITS):
        rule = "the adapter was trained on a changed base that cannot be rebuilt from the files"
        way_out = "save it with path_initial_model_for_weight_conversion, which makes a plain adapter of it"
        raise UnsupportedError(f"{where}: init_lora_weights={init!r}", rule, way_out)


def _attach(model: Any, config: LoraConfig, where: str) -> Any:
    """The PEFT model of `config`, initialised without reading any weight."""
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(LoraConfig) if field.init}
    # Other inits would read weights, which are on meta.
    config = LoraConfig(**values | {"init_lora_weights": True, "eva_config": None, "inference_mode": False})
    try:
        with torch.device("meta"), targets_as_configured():
            if task_of(model.config) == CAUSAL:
                return _quietly(PeftModelForCausalLM, model, config)
            return _quietly(PeftModel, model, config)
    except ValueError as error:  # no match, or a module PEFT has no adapter for
        raise UserError(where, f"peft cannot attach it to this model ({reason(error)})") from error


def _quietly(function: Any, *arguments: Any, **options: Any) -> Any:
    # peft warns about cases handled here: fan_in_fan_out, tied embeddings.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(*arguments, **options)


def _base_name(key: str) -> str:
    return re.sub(r"(\.token_adapter|\.base_layer|\.original_module)+\.", ".", key.removeprefix(PREFIX))


def _check_file(
    file: Path,
    names: Mapping[str, str],
    expected: Mapping[str, tuple[int, ...]],
    optional: Mapping[str, tuple[int, ...]],
    vocabulary: Mapping[str, int],
) -> None:
    """Check `names` in the file: all of `expected`, any of `optional`, each of its shape, with finite floats."""
    shapes = {**optional, **expected}
    with open_adapter(file, names) as opened:
        check_vocabulary(opened, file, shapes, vocabulary)
    check_keys(file, names.keys() - (optional.keys() - expected.keys()), expected)
    for key in sorted(names):
        with open_adapter(file, names) as opened:  # reopened, so that at most one tensor is in memory
            read_tensor(opened, file, key, shapes[key])


def _products(wrapped: Any, config: LoraConfig) -> dict[str, Change]:
    """The products of the LoRA layers, by the name of the tensor they are added to."""
    found: dict[str, Change] = {}
    for path, module in wrapped.named_modules():
        if not isinstance(module, peft_lora.LoraLayer):
            continue
        name = path.removeprefix(PREFIX).replace(".base_layer", "")
        base = module.get_base_layer()
        is_parameter = isinstance(module, peft_lora.ParamWrapper)  # a linear, or experts: a stack of matrices
        is_stack = is_parameter and module.get_param().ndim != 2
        is_embedding = isinstance(module, peft_lora.Embedding)
        if not (is_parameter or is_embedding or (isinstance(module, peft_lora.Linear) and hasattr(base, "weight"))):
            rule = f"merging it into a {type(base).__name__} is not supported"
            raise UnsupportedError(f"LoRA on {name}", rule, "leave it unmerged")
        a, b = "lora_A.weight", "lora_B.weight"
        if is_embedding:
            check_looked_up_alone(base, f"LoRA on {name}", "leave it unmerged")
            a, b = "lora_embedding_A", "lora_embedding_B"
        is_transposed, num_experts = is_embedding or (isinstance(base, Conv1D) and not is_parameter), 0
        if is_stack:
            is_transposed, num_experts = is_stored_in_out(module), module.num_experts
        magnitude = f"{path}.lora_magnitude_vector" if config.use_dora else None
        product = Lora(
            a=f"{path}.{a}",
            b=f"{path}.{b}",
            r=module.r["default"],
            scaling=module.scaling["default"],
            magnitude=magnitude,
            is_transposed=is_transposed,
            residual=_residual(wrapped, name, base, config, is_matrix=not is_embedding and not is_stack),
            num_experts=num_experts,
        )
        found[f"{name}.{module.parameter_name if is_parameter else 'weight'}"] = Change(lora=product)
        if config.lora_bias:
            if getattr(base, "bias", None) is None:
                rule = f"{name} has no bias that it could be merged into"
                raise UnsupportedError(f"{CONFIG_FILE}: lora_bias=True", rule)
            found[f"{name}.bias"] = Change(bias=(f"{path}.lora_B.bias", product.scaling))
    return found


def _token_rows(wrapped: Any, where: str) -> dict[str, Change]:
    """The rows of `trainable_token_indices`, by the name of the weight that they are in; a tied head has the same.

    Raises:
        UserError: a token is past the end of the vocabulary. UnsupportedError: PEFT itself computes something else.
    """
    layers = _token_layers(wrapped)
    keys = {id(layer): f"{path}.{_DELTA}" for path, layer in layers.items()}
    found = {}
    for path, layer in layers.items():
        base, indices = layer.base_layer, layer.token_indices["default"]
        # PEFT takes the weight alone of what it wraps.
        if not isinstance(base, nn.Embedding | nn.Linear) or getattr(base, "bias", None) is not None:
            rule = f"PEFT has no such rows in a {type(base).__name__} with a bias or an adapter of its own"
            raise UnsupportedError(f"{where}: trainable_token_indices on {path.removeprefix(PREFIX)}", rule)
        if max(indices) >= len(base.weight):
            past = max(indices) + 1
            raise another_vocabulary(f"{where}: trainable_token_indices", past, len(base.weight), at_least=True)
        found[_base_name(f"{path}.weight")] = Change(rows=(keys[id(layer.tied_adapter or layer)], tuple(indices)))
    return found


def _token_layers(wrapped: Any) -> dict[str, Any]:
    return {p: m.token_adapter for p, m in wrapped.named_modules() if isinstance(m, TrainableTokensWrapper)}


def _residual(wrapped: Any, name: str, base: Any, config: LoraConfig, *, is_matrix: bool) -> str:
    """The product PEFT subtracts from the base whenever it attaches the adapter (`Lora.residual`)."""
    init = config.init_lora_weights
    if not isinstance(init, str) or init.lower() not in _RESIDUAL_INITS:
        return ""
    weight = getattr(base, "weight", None)  # a stack of experts has none
    # A tied weight would change under its other names too.
    num_users = sum(p is weight for _, p in wrapped.named_parameters(remove_duplicate=False))
    refused = not is_matrix or num_users > 1 or (init.lower() == "olora" and isinstance(base, Conv1D))
    if refused or config.use_dora:
        what = "together with DoRA" if config.use_dora else f"on {name}, a {type(base).__name__}"
        raise UnsupportedError(f"init_lora_weights={init!r} {what}", "this cannot be merged")
    return init.lower()


def merged_weight(weight: Tensor, lora: Lora, a: Tensor, b: Tensor, magnitude: Tensor | None) -> Tensor:
    """`W + s B A` (DoRA: its rows scaled to norm m), in place where `weight` is float32 or float64.

    Args:
        weight: [out, in], or [in, out] if `lora.is_transposed`; for experts a stack of these, `[E, ...]`.
        a: [r, in]. b: [out, r]. magnitude: [out]. For experts a: [r*E, in], b: [out, r*E], as in `Lora`.
    """
    weight = weight.to(wide_dtype(weight.dtype))
    if lora.num_experts:
        for expert, matrix in enumerate(weight):
            # In place, one expert at a time: the stack may be large.
            matrix.add_(_product_of_expert(expert, lora, a, b, matrix.dtype))
        return weight
    view = weight.T if lora.is_transposed else weight  # [out, in]
    if lora.residual == "pissa":
        u, s, vh = torch.linalg.svd(view, full_matrices=False)
        view.addmm_(u[:, : lora.r] * s[: lora.r], vh[: lora.r], alpha=-1)
    elif lora.residual == "olora":
        q, r = torch.linalg.qr(view)
        # Times the scale, as in PEFT: B A starts as Q R, not Q R / s.
        view.addmm_(q[:, : lora.r], r[: lora.r], alpha=-lora.scaling)
    view.addmm_(b.to(view.dtype), a.to(view.dtype), alpha=lora.scaling)
    if magnitude is not None:
        norm = torch.linalg.vector_norm(view, dim=1)  # of each output, as PEFT takes it
        view.mul_((magnitude.to(view.dtype) / norm)[:, None])
    return weight


def _product_of_expert(expert: int, lora: Lora, a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """`s B A` of one expert, in the orientation of the stored matrix."""
    own_a = a.view(lora.num_experts, lora.r, -1)[expert]
    own_b = b.view(-1, lora.r, lora.num_experts)[:, :, expert]  # the expert is B's fast index, and A's slow one
    product = (own_b.to(dtype) @ own_a.to(dtype)) * lora.scaling
    return product.T if lora.is_transposed else product


def merged_expert(matrix: Tensor, place: tuple[slice | int, ...], lora: Lora, a: Tensor, b: Tensor) -> Tensor:
    """One matrix of one expert, at index `place` of the parameter that the adapter changes."""
    matrix = matrix.to(wide_dtype(matrix.dtype))
    expert, *inside = place
    assert isinstance(expert, int), place
    return matrix.add_(_product_of_expert(expert, lora, a, b, matrix.dtype)[tuple(inside)])

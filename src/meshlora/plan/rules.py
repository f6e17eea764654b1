"""The plan: which module is split how, in which region. Plain data, computable without a process group.

Owns: the words of a plan (`Split`, `LinearRule`, `Region`, `ModelPlan`) and how it is derived from
`config.base_model_tp_plan` and the module tree of a model on the meta device.
Does not own: the gradient axes that follow (`plan.grads`), the layers that run it (`parallel`), LoRA targets
(`adapter`).

A *region* is a block whose input enters the tensor-parallel part once and leaves it once: an attention, an MLP.
Each direct child of a decoder layer is one of

- a split region: its linears are column- or row-parallel, each rank computes its own heads or features;
- a whole region: kept whole on every rank. Under sp it sees all tokens: gathered before, sliced after. This is the
  safe default for whatever the plan does not split: a convolution or a state-space mixer that saw only its own slice
  of the sequence would train silently wrong;
- token-wise (a norm, a dropout): works on any slice of the tokens, and is left alone.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from meshlora.errors import UnsupportedError, UserError
from meshlora.plan.families import check_family
from meshlora.plan.topology import Topology, divisors


class Split(StrEnum):
    """How a linear `y = x W^T`, W `[out, in]`, lies on the tp axis."""

    COLUMN = "column"  # W split on out: each rank makes its own output features
    ROW = "row"  # W split on in: each rank consumes its own input features, outputs are summed
    WHOLE = "whole"  # the same W on every rank


@dataclass(frozen=True)
class LinearRule:
    """One linear of the model. Widths are global: `in_features`, `out_features` of the whole matrix."""

    name: str
    split: Split
    in_features: int
    out_features: int
    has_bias: bool


@dataclass(frozen=True)
class Region:
    """A block that tensors enter and leave once. `is_split` is False where every rank computes all of it."""

    name: str
    is_split: bool


@dataclass(frozen=True)
class ModelPlan:
    """Everything that is known about a model on a topology before any process exists.

    Attributes:
        model_type: the transformers `model_type`.
        layers: name of the ModuleList of decoder layers; the residual stream is cut and joined at its ends. Empty
            where tp=1: nothing of the model's structure is then relied on.
        regions: the regions in module order; empty where tp=1.
        linears: name -> rule, for every linear of the model, split or whole.
    """

    model_type: str
    topology: Topology
    layers: str
    num_layers: int
    regions: tuple[Region, ...]
    linears: Mapping[str, LinearRule]


# Styles of `base_model_tp_plan`. The first two are split. A block with one of the next two is kept whole on every
# rank: their own plan gathers inside the block, which wastes the split. Anything else is refused.
_SPLITS = {"colwise": Split.COLUMN, "rowwise": Split.ROW}
_KEPT_WHOLE = {"colwise_gather_output", "rowwise_split_input"}
_REPLICATED = {"replicated_with_grad_allreduce"}


def plan_model(model: PreTrainedModel, topology: Topology) -> ModelPlan:
    """Derive the plan of `model` (a transformers causal LM; the meta device will do) on `topology`.

    Raises:
        UnsupportedError: the family, a style, a layer or a parameter that is not proved to be split right.
        UserError: tp does not divide the heads or a width; the message names the values that work.
    """
    config = model.config
    check_family(config, topology)
    layers_name, layers = _decoder_layers(model) if topology.tp > 1 else ("", nn.ModuleList())
    linears = {
        name: LinearRule(name, Split.WHOLE, m.in_features, m.out_features, m.bias is not None)
        for name, m in model.named_modules()
        if isinstance(m, nn.Linear)
    }
    regions: list[Region] = []
    num_layers = len(layers) or config.get_text_config().num_hidden_layers
    if topology.tp > 1:
        styles = _styles_by_module(model, layers_name)
        for index, layer in enumerate(layers):
            for child_name, child in layer.named_children():
                name = f"{layers_name}.{index}.{child_name}"
                regions += _plan_child(name, child, styles, linears)
        if list(layer_parameters_outside_children(layers)):
            raise UnsupportedError(
                f"model_type {config.model_type!r}", "its decoder layers own parameters directly", "use tp=1"
            )
        _check_divisible(config, topology, regions, linears)
    return ModelPlan(config.model_type, topology, layers_name, num_layers, tuple(regions), linears)


def layer_parameters_outside_children(layers: nn.ModuleList) -> list[str]:
    """Parameters that belong to a decoder layer itself rather than to one of its blocks."""
    return [name for layer in layers for name, _ in layer.named_parameters(recurse=False)]


def _decoder_layers(model: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """The decoder layers: the one ModuleList that is a direct child of the base model."""
    prefix = model.base_model_prefix
    lists = [(n, m) for n, m in model.base_model.named_children() if isinstance(m, nn.ModuleList) and len(m)]
    if len(lists) != 1:
        found = ", ".join(n for n, _ in lists) or "none"
        raise UnsupportedError(
            f"model_type {model.config.model_type!r}",
            f"its base model must hold exactly one list of decoder layers (found: {found})",
        )
    return f"{prefix}.{lists[0][0]}", lists[0][1]


def _styles_by_module(model: PreTrainedModel, layers_name: str) -> dict[str, str]:
    """Module name -> style, from `config.base_model_tp_plan`, for what is inside the decoder layers.

    Some versions of transformers also split the embedding; ours is whole on every rank.
    """
    plan: dict[str, str] | None = getattr(model.config, "base_model_tp_plan", None)
    what = f"model_type {model.config.model_type!r}"
    if not plan:
        raise UnsupportedError(what, "transformers has no tensor-parallel plan for it", "use tp=1, with dp as you like")
    plan = {f"{model.base_model_prefix}.{key}": style for key, style in plan.items()}
    plan = {key: style for key, style in plan.items() if key.startswith(f"{layers_name}.")}
    unknown = {style for style in plan.values() if style not in _SPLITS.keys() | _KEPT_WHOLE | _REPLICATED}
    if unknown:
        raise UnsupportedError(what, f"its plan has styles that are not supported yet: {sorted(unknown)}", "use tp=1")
    patterns = [(re.compile(re.escape(key).replace(r"\*", r"\d+")), style) for key, style in plan.items()]
    return {name: style for name, _ in model.named_modules() for pattern, style in patterns if pattern.fullmatch(name)}


def _plan_child(name: str, child: nn.Module, styles: dict[str, str], linears: dict[str, LinearRule]) -> list[Region]:
    """Classify one child of a decoder layer; the linears of a split region get their split in `linears`."""
    inside = {n: s for n, s in styles.items() if n == name or n.startswith(f"{name}.")}
    if not any(style in _SPLITS for style in inside.values()):
        return [] if _is_token_wise(child) else [Region(name, is_split=False)]
    if any(style in _KEPT_WHOLE for style in inside.values()):
        return [Region(name, is_split=False)]
    if name in inside:
        raise UnsupportedError(name, "a linear that is itself a block of the decoder layer cannot be a region")
    _check_every_parameter_is_claimed(name, child, inside)
    for linear, style in inside.items():
        if style in _SPLITS:
            rule = linears[linear]
            linears[linear] = LinearRule(linear, _SPLITS[style], rule.in_features, rule.out_features, rule.has_bias)
    return [Region(name, is_split=True)]


def _is_token_wise(module: nn.Module) -> bool:
    """Norms and dropouts treat every token by itself. Of anything else we do not know, so the answer is no."""
    kind = type(module).__name__
    return isinstance(module, nn.Dropout | nn.Identity) or (
        "Norm" in kind and all(p.ndim <= 1 for p in module.parameters()) and not list(module.children())
    )


def _check_every_parameter_is_claimed(name: str, region: nn.Module, styles: dict[str, str]) -> None:
    """In a split region each parameter is split by the plan, declared replicated, or a scalar. Else: refuse."""
    for path, module in region.named_modules(prefix=name):
        if styles.get(path) in _REPLICATED and isinstance(module, nn.Linear):
            # Its gradient would be partial over tp, as its output is used by local heads only.
            raise UnsupportedError(path, "a whole linear inside a split region is not supported yet", "use tp=1")
        if path in styles:
            continue
        for leaf, parameter in module.named_parameters(recurse=False):
            if parameter.numel() > 1:
                raise UnsupportedError(
                    f"{path}.{leaf} {list(parameter.shape)}",
                    "the tensor-parallel plan of transformers does not say how it is split",
                    "use tp=1",
                )
    splits = {styles[n] for n in styles if styles[n] in _SPLITS}
    if splits != set(_SPLITS):
        raise UnsupportedError(name, f"a split region needs column and row linears, the plan has only {sorted(splits)}")


def _check_divisible(config: Any, topology: Topology, regions: list[Region], linears: dict[str, LinearRule]) -> None:
    """tp divides heads, key/value heads and every split width; else name the values that do."""
    limits: dict[str, int] = {}
    if any(r.is_split and "att" in r.name.rsplit(".", 1)[-1] for r in regions):
        for key in ("num_attention_heads", "num_key_value_heads"):
            if getattr(config, key, None):
                limits[key] = getattr(config, key)
    for rule in linears.values():
        if rule.split is Split.COLUMN:
            limits[f"{rule.name}.out_features"] = rule.out_features
        elif rule.split is Split.ROW:
            limits[f"{rule.name}.in_features"] = rule.in_features
    for what, number in limits.items():
        if number % topology.tp:
            working = divisors(math.gcd(*limits.values()))
            raise UserError(
                f"tp={topology.tp}",
                f"tp must divide {what}={number}",
                f"use tp in {{{', '.join(map(str, working))}}}",
            )

"""Sums of a model's adapters: PEFT's `add_weighted_adapter`, and several active ones, on any mesh.

Owns: the configuration of a sum and its factors, made of whole ones. Does not own: one active adapter, and several in
training, each on its own tokens (`adapter.attach`). A sum is an adapter like others: it runs, is saved and merged.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from meshlora.adapter import attach
from meshlora.adapter.plan import AdapterPlan, plan_adapter
from meshlora.adapter.targets.resolve import Target
from meshlora.plan.pairs import check
from meshlora_ground.errors import UserError, did_you_mean

_KINDS = ("cat", "linear", "svd")


def add_weighted_adapter(
    model: Any,
    adapters: Sequence[str],
    weights: Sequence[float],
    adapter_name: str,
    combination_type: Literal["svd", "linear", "cat"] = "svd",
    svd_rank: int | None = None,
) -> None:
    """Attach the sum of `adapters`, each times its weight, as `adapter_name`, frozen until `set_adapter`. Collective.

        meshlora.add_weighted_adapter(model, ["code", "chat"], [0.7, 0.3], "both", "cat")

    Arguments are PEFT's. `cat`, of the ranks' sum, is exact; `linear` adds factors of one rank; `svd` keeps `svd_rank`
    directions, or as many as the largest rank.

    Raises:
        UserError: an adapter that is not there, a name that is, unequal numbers or ranks. UnsupportedError: parts that
            are no LoRA on linears or the embedding.
    """
    if adapter_name in attach.runtime(model).adapters:
        raise UserError(f"adapter {adapter_name!r}", "the model has one of that name already", "choose another name")
    _fill(model, adapters, weights, adapter_name, combination_type, svd_rank)


def set_adapter(model: Any, adapter_name: str | Sequence[str] | None) -> None:
    """Make one adapter active and trainable, or the sum of several active, frozen; None: the base alone.

        model.set_adapter(["code", "chat"])  # what is active is "code+chat", of the factors as they are now

    Raises:
        UserError: there is no such adapter. UnsupportedError: as `add_weighted_adapter`.
    """
    names = [adapter_name] if isinstance(adapter_name, str) else list(adapter_name or ())
    if len({*names}) != len(names) or adapter_name == []:
        raise UserError(f"set_adapter({names})", "it is one name, or different ones", "give None for the base alone")
    if len(names) < 2:
        attach.set_adapters(model, names)
        return
    own, sums = "+".join(names), vars(model).setdefault("meshlora_sums", set())
    if own in attach.runtime(model).adapters and own not in sums:
        raise UserError(f"set_adapter({names})", f"their sum would be {own!r}, the name of another", "rename that one")
    _fill(model, names, [1.0] * len(names), own, "cat", None)
    sums.add(own)
    attach.set_adapters(model, [own])
    for factor in attach.adapter_factors(model, own):
        factor.parameter.requires_grad_(False)  # its parts are trained, each by itself


class _Part(NamedTuple):
    """The whole factors of one adapter on a target: A `[r, in]`, B `[out, r]`, s, and its weight in the sum."""

    a: Tensor
    b: Tensor
    scaling: float
    weight: float


@torch.no_grad()
def _fill(
    model: Any, adapters: Sequence[str], weights: Sequence[float], name: str, kind: str, svd_rank: int | None
) -> None:
    """Attach the sum under `name`, or give the one of that name the values of now."""
    parts = _parts(model, adapters, weights)
    if len(parts) == 1:
        kind = "linear"  # as in PEFT
    if kind not in _KINDS:
        rule = f"it is one of {', '.join(_KINDS)}"
        raise UserError(f"combination_type={kind!r}", rule, did_you_mean(kind, _KINDS))
    ranks = [max(target.r for target in part.targets.values()) for part in parts]
    if kind == "linear" and any(target.r != ranks[0] for part in parts for target in part.targets.values()):
        raise UserError("combination_type='linear'", f"it adds A to A and B to B, of ranks {ranks}", "use cat or svd")
    r = sum(ranks) if kind == "cat" else max(ranks)
    if kind == "svd" and svd_rank is not None:
        r = svd_rank
    state = attach.runtime(model)
    if name not in state.adapters:
        attach.draw_adapter(model, name, _plan(model, [part.plan for part in parts], r), seed=0)
    factors = [attach.gather_adapter(model, adapter) for adapter in adapters]  # whole, on every rank
    full = dict[str, Tensor]()
    for target in state.adapters[name].targets.values():
        found = list[_Part]()
        for part, own, weight in zip(parts, factors, weights, strict=True):
            if (had := part.targets.get(target.name)) is not None:
                found.append(_Part(own[had.name_of("A")], own[had.name_of("B")], had.scaling, float(weight)))
        full |= _factors(found, target, kind)
    for factor in attach.adapter_factors(model, name):
        factor.parameter.copy_(attach.local_part(full[factor.name], factor.rule, state.mesh))


def _parts(model: Any, adapters: Sequence[str], weights: Sequence[float]) -> list[attach.Adapter]:
    """The adapters of these names. Raises: UserError, UnsupportedError: as `add_weighted_adapter`."""
    state, found = attach.runtime(model), list[attach.Adapter]()
    if not adapters or len(adapters) != len(weights) or not all(map(math.isfinite, weights)):
        raise UserError(f"adapters {[*adapters]} with weights {[*weights]}", "each has one, a finite number")
    for name in adapters:
        if name not in state.adapters:
            raise UserError(f"adapter {name!r}", "the model has no such adapter", did_you_mean(name, state.adapters))
        found.append(state.adapters[name])
        check({**found[-1].plan.asked(state.whole.plan), "door": "add_weighted_adapter"})
    return found


def _plan(model: Any, parts: Sequence[AdapterPlan], r: int) -> AdapterPlan:
    """The plan of an adapter of rank and alpha `r`, so of scale 1, on the targets of all `parts`."""
    whole, names, given = attach.runtime(model).whole, set[str](), set[str]()
    for part in parts:
        names.update(part.targets)
        given.update(part.stored.target_modules if isinstance(part.stored.target_modules, set | list) else part.targets)
    # Of the first, as in PEFT, but for what would change the scale (there rsLoRA does) or the targets.
    changed: dict[str, Any] = {"r": r, "lora_alpha": r, "lora_dropout": 0.0, "use_rslora": False}
    changed |= {"rank_pattern": {}, "alpha_pattern": {}, "exclude_modules": None, "layers_to_transform": None}
    changed |= {"init_lora_weights": True, "eva_config": None}  # its values are those of its parts
    config = dataclasses.replace(parts[0].stored, **changed, layers_pattern=None, target_modules=given)
    found = plan_adapter(whole.model, whole.plan, config, strict=False)
    if found.targets.keys() != names:  # what is short in one adapter matches more than the other has
        config = dataclasses.replace(config, target_modules=names)
        found = plan_adapter(whole.model, whole.plan, config, strict=False)
    return found


def _factors(found: Sequence[_Part], target: Target, kind: str) -> dict[str, Tensor]:
    """Name -> whole factor of the sum on `target`, with zeros in the rank that no part needs."""
    if kind == "cat":
        a = torch.cat([part.a * part.weight * part.scaling for part in found])
        b = torch.cat([part.b for part in found], 1)
    elif kind == "linear":
        a, b = torch.zeros_like(found[0].a), torch.zeros_like(found[0].b)
        for part in found:
            # The sign goes with A. PEFT has these roots, and the weights below, in float32.
            root = float(torch.tensor(math.sqrt(abs(part.weight * part.scaling))))
            a += part.a * math.copysign(root, part.weight)
            b += part.b * root
    else:
        change = torch.zeros(len(found[0].b), found[0].a.shape[1], dtype=found[0].a.dtype)
        for part in found:
            change += part.b @ part.a * part.scaling * float(torch.tensor(part.weight))
        u, s, vh = torch.linalg.svd(change, full_matrices=False)
        a, b = vh[: target.r], u[:, : target.r] * s[: target.r]
    whole_a, whole_b = a.new_zeros(target.r, a.shape[1]), b.new_zeros(len(b), target.r)
    whole_a[: len(a)], whole_b[:, : b.shape[1]] = a, b
    return {target.name_of("A"): whole_a, target.name_of("B"): whole_b}

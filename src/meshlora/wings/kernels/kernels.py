"""Whether a model computes with fused kernels: `model.kernels`.

Owns: the choice, its refusals, and the kernels of a model that has them. Does not own: the functions
(`wings.kernels.liger`), the modules that call them (`wings.kernels.fused`), their proof on the devices of a run
(`verify.preflight`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from meshlora.loading.blueprint import Blueprint
from meshlora.plan.base_options import BaseOptions
from meshlora.plan.rules import ModelPlan
from meshlora.wings.kernels.fused import fusable, gates_of_silu, sums_of_stream
from meshlora.wings.kernels.liger import Kernels, check_kernels, liger, liger_version
from meshlora.wings.kernels.loss_chunk import chunk_kernels
from meshlora.wings.kernels.stream_sums import stream_kernels
from meshlora.wings.kernels.tails import MOST_RANK, tails
from meshlora_ground.errors import UserError


def with_kernels(
    blueprint: Blueprint, *, device: str, is_proved: bool, recomputed_every: int = 0
) -> tuple[Blueprint, str]:
    """(`blueprint` with `options.kernels` decided, not auto; a message if it has some).

    device: as in a run file. is_proved: auto may take kernels, as the preflight proves them on the devices.
    recomputed_every: the distance between layers that are computed again, 0: none is.

    Raises:
        UserError: liger or fused is asked for, and this run cannot have it.
    """
    wanted = blueprint.options.kernels
    if wanted == "none":
        return blueprint, ""
    refused = _refusal(blueprint.model, blueprint.plan, dtype=blueprint.dtype, device=device)
    if wanted != "auto" and refused is not None:
        raise UserError(f"model.kernels: {wanted}", *refused)
    # Those asked for by name are compared when the model is made (`kernels_of`).
    takes = refused is None and (wanted != "auto" or is_proved)
    if not takes:
        return dataclasses.replace(blueprint, options=dataclasses.replace(blueprint.options, kernels="none")), ""
    modules = ", ".join(f"{number} {name}" for name, number in fusable(blueprint.model).items())
    said = f"kernels of liger-kernel {liger_version()}: {modules}"
    if wanted == "auto":
        wanted = "liger"
    elif wanted == "fused":
        said += f"; {_tails_in_words(blueprint, recomputed_every)}"
    return dataclasses.replace(blueprint, options=dataclasses.replace(blueprint.options, kernels=wanted)), said


def computed(blueprint: Blueprint) -> frozenset[str]:
    """What the kernels of `blueprint` compute with its adapter: of "norms", "rotations" and "gated MLPs", and of fused
    ones of "tails", low-rank terms with the gate, and "sums" of the residual stream."""
    if blueprint.options.kernels not in ("liger", "fused"):
        return frozenset()
    found = set(fusable(blueprint.model))
    if blueprint.options.kernels == "fused":
        gates, sums = (list(of_each.values()) for of_each in _terms(blueprint, 0))
        found |= {name for name, reasons in (("tails", gates), ("sums", sums)) if "" in reasons}
        if gates.count("") == fusable(blueprint.model)["gated MLPs"]:  # none is computed without them
            found.discard("gated MLPs")
    return frozenset(found)


def _terms(blueprint: Blueprint, every: int) -> tuple[dict[str, str], dict[str, str]]:
    """Gated MLPs and linears before a sum of the residual stream whose code is known -> why a low-rank term is not
    computed with the gate, or the sum; empty: it is."""
    gates, sums = gates_of_silu(blueprint.model), sums_of_stream(blueprint.model)
    others = {path: _why_no_gate(blueprint, path) for path in gates}
    topology, layers = blueprint.plan.topology, dict(blueprint.model.named_modules())
    of_sums = {}
    for path in sums:
        *_, layer, _, own = path.split(".")
        why = others[path.removesuffix(f".{own}")] if own == "down_proj" else _why_no_term(blueprint, [path])
        has_next = own == "down_proj" and f"{path.partition(f'.{layer}.')[0]}.{int(layer) + 1}" in layers
        if has_next and every and (int(layer) + 1) % every == 0:
            why = why or "before a layer that is computed again"
        of_sums[path] = why
    if topology.tp > 1 or topology.dp_shard:
        of_sums = dict.fromkeys(sums, "over tp" if topology.tp > 1 else "with dp_shard")
    return others, of_sums


def _tails_in_words(blueprint: Blueprint, every: int) -> str:
    """In how many gated MLPs low-rank terms are computed with the gate, and beside how many linears with a sum of the
    residual stream; and why not in the others."""
    others, of_sums = _terms(blueprint, every)
    said = f"low-rank terms in {_counted(others)} gated MLPs{_why(others)}"
    if not of_sums:
        return f"{said}; sums of the residual stream apart, as no code of these layers is known"
    return f"{said}; sums of the residual stream with {_counted(of_sums)} linears{_why(of_sums)}"


def _counted(others: Mapping[str, str]) -> str:
    """others: path -> why it is none of those."""
    return f"{sum(not why for why in others.values())} of {len(others)}"


def _why(others: Mapping[str, str]) -> str:
    reasons = sorted({why for why in others.values() if why})
    return f", not in those {' or '.join(reasons)}" if reasons else ""


def _why_no_gate(blueprint: Blueprint, path: str) -> str:
    """Why a gated MLP has its low-rank terms apart; empty: it has them with its gate."""
    linears = [f"{path}.{name}" for name in ("gate_proj", "up_proj", "down_proj")]
    if why := _why_no_term(blueprint, linears):
        return why
    assert blueprint.adapter is not None
    gate, up, _ = (blueprint.adapter.targets[name] for name in linears)
    return "" if gate.scaling == up.scaling else "whose gate and up have different scales"


def _why_no_term(blueprint: Blueprint, linears: Sequence[str]) -> str:
    """Why a kernel cannot compute the low-rank terms of all these `linears`; empty: it can."""
    if blueprint.adapter is None:
        return "without an adapter"
    config, targets = blueprint.adapter.config, blueprint.adapter.targets
    found = [target for target in map(targets.get, linears) if target is not None]
    if len(found) < len(linears):
        names = [name.rpartition(".")[2].removesuffix("_proj") for name in linears]
        return f"without an adapter on {' and '.join(filter(None, [', '.join(names[:-1]), names[-1]]))}"
    if config.lora_dropout:
        return "with dropout"
    if any(target.further for target in found):
        return "with more than A and B"
    if any(target.r > MOST_RANK for target in found):
        return f"of ranks above {MOST_RANK}"
    return ""


def check_loading(model: nn.Module, plan: ModelPlan, options: BaseOptions, *, dtype: torch.dtype, device: str) -> None:
    """Refuse kernels by name of a model that cannot have them. Raises: UserError: it cannot."""
    if options.kernels not in ("liger", "fused"):
        return
    if (refused := _refusal(model, plan, dtype=dtype, device=device)) is not None:
        raise UserError(f"model.kernels: {options.kernels}", *refused)


def _refusal(model: nn.Module, plan: ModelPlan, *, dtype: torch.dtype, device: str) -> tuple[str, str] | None:
    """(Why it cannot have them, the way out); None: it can."""
    if device == "cpu" or not torch.cuda.is_available():
        return "they run on GPUs alone", "leave it out"
    if dtype == torch.float64:
        return "they compute in float32 and less", "leave it out"
    if not liger_version():
        return "liger-kernel is not installed", "pip install 'meshlora[kernels]', or leave it out"
    if not fusable(model):
        return f"no code of {plan.model_type} is known that they could compute", "leave it out"
    return None


def kernels_of(options: BaseOptions, *, device: torch.device, dtype: torch.dtype) -> Kernels | None:
    """The kernels that `options` ask for, which give the right numbers on this device; None: none."""
    if options.kernels not in ("liger", "fused"):
        return None
    kernels = liger(options.kernels)
    if options.kernels == "fused":
        kernels = dataclasses.replace(kernels, tails=tails(), chunk=chunk_kernels(), stream=stream_kernels())
    check_kernels(kernels, device, dtype)
    return kernels

"""Whether a model computes with fused kernels: `model.kernels`.

Owns: the choice, its refusals, and the kernels of a model that has them. Does not own: the functions
(`wings.kernels.liger`), the modules that call them (`wings.kernels.fused`), their proof on the devices of a run
(`verify.preflight`).
"""

from __future__ import annotations

import dataclasses

import torch
from torch import nn

from meshlora.loading.blueprint import Blueprint
from meshlora.plan.base_options import BaseOptions
from meshlora.plan.rules import ModelPlan
from meshlora.wings.kernels.fused import fusable, gates_of_silu
from meshlora.wings.kernels.liger import Kernels, check_kernels, liger, liger_version
from meshlora.wings.kernels.loss_chunk import chunk_kernels
from meshlora.wings.kernels.tails import MOST_RANK, tails
from meshlora_ground.errors import UserError


def with_kernels(blueprint: Blueprint, *, device: str, is_proved: bool) -> tuple[Blueprint, str]:
    """(`blueprint` with `options.kernels` decided, not auto; a message if it has some).

    device: as in a run file. is_proved: auto may take kernels, as the preflight proves them on the devices.

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
        said += f"; {_tails_in_words(blueprint)}"
    return dataclasses.replace(blueprint, options=dataclasses.replace(blueprint.options, kernels=wanted)), said


def _tails_in_words(blueprint: Blueprint) -> str:
    """In how many gated MLPs low-rank terms are computed with the gate, and why not in the others."""
    gates = gates_of_silu(blueprint.model)
    if blueprint.adapter is None or not gates:
        return f"low-rank terms in up to {len(gates)} gated MLPs"
    config, targets = blueprint.adapter.config, blueprint.adapter.targets
    why, number = "", 0
    for path in gates:
        three = [targets.get(f"{path}.{name}") for name in ("gate_proj", "up_proj", "down_proj")]
        found = [target for target in three if target is not None]
        if len(found) < 3:
            why = "without an adapter on gate, up and down"
        elif config.lora_dropout:
            why = "with dropout"
        elif any(target.further for target in found):
            why = "with more than A and B"
        elif any(target.r > MOST_RANK for target in found):
            why = f"of ranks above {MOST_RANK}"
        elif found[0].scaling != found[1].scaling:
            why = "whose gate and up have different scales"
        else:
            number += 1
    others = f", not in those {why}" if why else ""
    return f"low-rank terms in {number} of {len(gates)} gated MLPs{others}"


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
        kernels = dataclasses.replace(kernels, tails=tails(), chunk=chunk_kernels())
    check_kernels(kernels, device, dtype)
    return kernels

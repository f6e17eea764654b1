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
from meshlora.wings.kernels.fused import fusable
from meshlora.wings.kernels.liger import Kernels, check_kernels, liger, liger_version
from meshlora_ground.errors import UserError


def with_kernels(blueprint: Blueprint, *, device: str, is_proved: bool) -> tuple[Blueprint, str]:
    """(`blueprint` with `options.kernels` decided: liger or none; a message if liger).

    device: as in a run file. is_proved: auto may take kernels, as the preflight proves them on the devices.

    Raises:
        UserError: liger is asked for, and this run cannot have it.
    """
    wanted = blueprint.options.kernels
    if wanted == "none":
        return blueprint, ""
    refused = _refusal(blueprint.model, blueprint.plan, dtype=blueprint.dtype, device=device)
    if wanted == "liger" and refused is not None:
        raise UserError("model.kernels: liger", *refused)
    # Those asked for by name are compared when the model is made (`kernels_of`).
    takes = refused is None and (wanted == "liger" or is_proved)
    if not takes:
        return dataclasses.replace(blueprint, options=dataclasses.replace(blueprint.options, kernels="none")), ""
    modules = ", ".join(f"{number} {name}" for name, number in fusable(blueprint.model).items())
    said = f"kernels of liger-kernel {liger_version()}: {modules}"
    return dataclasses.replace(blueprint, options=dataclasses.replace(blueprint.options, kernels="liger")), said


def check_loading(model: nn.Module, plan: ModelPlan, options: BaseOptions, *, dtype: torch.dtype, device: str) -> None:
    """Refuse `kernels="liger"` of a model that cannot have them. Raises: UserError: it cannot."""
    if options.kernels == "liger" and (refused := _refusal(model, plan, dtype=dtype, device=device)) is not None:
        raise UserError("model.kernels: liger", *refused)


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
    if options.kernels != "liger":
        return None
    kernels = liger()
    check_kernels(kernels, device, dtype)
    return kernels

"""Whether a model computes with fused kernels: `model.kernels`.

Owns: the choice, and its refusals. Does not own: the kernels (`wings.kernels.liger`), the modules that call them
(`wings.kernels.fused`), their proof on the devices of a run (`verify.preflight`).
"""

from __future__ import annotations

import dataclasses

import torch

from meshlora.loading.blueprint import Blueprint
from meshlora.wings.kernels.fused import fusable
from meshlora.wings.kernels.liger import liger_version
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
    version, found = liger_version(), fusable(blueprint.model)
    refusals = {
        ("they run on GPUs alone", "leave it out"): device == "cpu" or not torch.cuda.is_available(),
        ("they compute in float32 and less", "leave it out"): blueprint.dtype == torch.float64,
        ("liger-kernel is not installed", "pip install 'meshlora[kernels]', or leave it out"): not version,
        (f"no code of {blueprint.plan.model_type} is known that they could compute", "leave it out"): not found,
    }
    refused = next((words for words, is_so in refusals.items() if is_so), None)
    if wanted == "liger" and refused is not None:
        raise UserError("model.kernels: liger", *refused)
    takes = refused is None and (wanted == "liger" or is_proved)
    options = dataclasses.replace(blueprint.options, kernels="liger" if takes else "none")
    modules = ", ".join(f"{number} {name}" for name, number in found.items())
    return dataclasses.replace(blueprint, options=options), f"kernels of liger-kernel {version}: {modules}" * takes

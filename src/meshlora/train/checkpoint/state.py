"""The training state beside an adapter: the moments of the optimizer as logical tensors.

Owns: their file: full tensors named after the factors, whatever the topology. Does not own: the adapter's files
(`adapter.formats.peft_format`), other state (`train.checkpoint.manifest`), the choice of the checkpoint to resume from
(`train.checkpoint.resuming`). Data order and learning rate are functions of the step, and need no state.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from meshlora.adapter.attach import active_factors, full_factor, local_part, runtime
from meshlora.common.errors import UserError
from meshlora.common.files import open_safetensors
from meshlora.train.checkpoint.manifest import STATE_FILE, Saved

_MOMENTS = ("exp_avg", "exp_avg_sq")


def state_writer(model: Any, optimizer: torch.optim.Optimizer) -> Callable[[Path], None]:
    """Gather the training state. Returns a function for rank 0 that writes it to a folder. Collective."""
    state = runtime(model)
    tensors: dict[str, Tensor] = {}
    for factor in active_factors(model):
        held = optimizer.state[factor.parameter]
        for moment in _MOMENTS:
            # Before the first update there are none: zero.
            moment_here = held[moment] if moment in held else torch.zeros_like(factor.parameter)
            full = full_factor(moment_here, factor.rule, state.mesh)
            if state.mesh.rank == 0:
                tensors[f"{moment}/{factor.name}"] = full.to("cpu", copy=True).contiguous()

    def write(folder: Path) -> None:
        save_file(tensors, folder / STATE_FILE, metadata={"format": "pt"})
        (folder / STATE_FILE).chmod(0o644)

    return write


def restore_optimizer(model: Any, optimizer: torch.optim.Optimizer, checkpoint: Saved) -> None:
    """Restore the moments of every factor of `model` from `checkpoint`, sliced for this rank.

    Raises:
        UserError: they are of another adapter.
    """
    mesh = runtime(model).mesh
    file = checkpoint.folder / STATE_FILE
    with open_safetensors(file) as opened:
        names = {f"{moment}/{factor.name}" for factor in active_factors(model) for moment in _MOMENTS}
        if names != set(opened.keys()):
            other = sorted(names ^ set(opened.keys()))[0]
            raise UserError(f"{file}", f"it is of another adapter: {other} is on one side only")
        for factor in active_factors(model):
            value = factor.parameter
            held = {}
            for moment in _MOMENTS:
                part = local_part(opened.get_tensor(f"{moment}/{factor.name}"), factor.rule, mesh)
                if part.shape != value.shape:
                    raise UserError(f"{file}: {moment}/{factor.name}", "its shape is not that of the factor")
                held[moment] = torch.empty_like(value).copy_(part)
            step = torch.tensor(float(checkpoint.updates), dtype=torch.float32, device=value.device)
            optimizer.state[value] = {"step": step, **held}

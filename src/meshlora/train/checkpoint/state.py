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

from meshlora.adapter.attach import active_factors, gather_values, local_part, runtime
from meshlora.common.errors import UserError
from meshlora.common.files import open_safetensors
from meshlora.train.checkpoint.manifest import STATE_FILE, Saved

_MOMENTS = ("exp_avg", "exp_avg_sq")


def state_writer(model: Any, optimizer: torch.optim.Optimizer) -> Callable[[Path], None]:
    """Gather the training state. Returns a function for rank 0 that writes it to a folder. Collective."""
    state, factors = runtime(model), active_factors(model)
    assert state.active is not None
    tensors: dict[str, Tensor] = {}
    for moment in _MOMENTS:
        # Before the first update there are none: zero.
        held = {f.name: optimizer.state[f.parameter].get(moment, torch.zeros_like(f.parameter)) for f in factors}
        full = gather_values(model, state.active, held, only_rank=0)
        tensors |= {f"{moment}/{name}": tensor.contiguous() for name, tensor in full.items()}

    def write(folder: Path) -> None:
        save_file(tensors, folder / STATE_FILE, metadata={"format": "pt"})
        (folder / STATE_FILE).chmod(0o644)

    return write


def restore_optimizer(model: Any, optimizer: torch.optim.Optimizer, checkpoint: Saved) -> None:
    """Restore the moments of every factor of `model` from `checkpoint`, sliced for this rank.

    Raises:
        UserError: they are of another adapter.
    """
    state = runtime(model)
    mesh, file = state.mesh, checkpoint.folder / STATE_FILE
    assert state.active is not None
    with open_safetensors(file) as opened:
        every = state.adapters[state.active].plan.parameters
        names = {f"{moment}/{name}" for name in every for moment in _MOMENTS}
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

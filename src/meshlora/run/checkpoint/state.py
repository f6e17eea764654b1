"""The training state beside an adapter: the moments of the optimizer as logical tensors.

Owns: their file: full tensors named after the factors, whatever the topology. Does not own: moments in 8 bits
(`run.eight_bit`), the adapter's files (`adapter.formats.peft_format`), other state (`run.checkpoint.manifest`), the
choice of the checkpoint to resume from (`run.checkpoint.resuming`). Data order and learning rate are functions of the
step, and need no state.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from meshlora.adapter.attach import Factor, active_factors, gather_values, local_part, runtime
from meshlora.run.checkpoint.manifest import STATE_FILE, Saved
from meshlora.run.eight_bit import MOMENTS, AdamW8bit
from meshlora_ground.errors import UserError
from meshlora_ground.files import open_safetensors


class _InFull:
    """The moments of torch's optimizers and of LoRA-FA: of each factor's shape and dtype. As `AdamW8bit` has them."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def keys(self, name: str) -> tuple[str, ...]:
        return MOMENTS

    def held(self, key: str, factor: Factor) -> Tensor:
        # Before the first update there are none: zero.
        found: Tensor = self.optimizer.state[factor.parameter].get(key, torch.zeros_like(factor.parameter))
        return found

    def stored(self, key: str, name: str, whole: Tensor) -> Tensor:
        return whole.contiguous()

    def spread(self, key: str, name: str, stored: Tensor) -> Tensor:
        return stored

    def is_cut(self, factor: Factor) -> bool:
        return False

    def packed(self, key: str, factor: Factor, own: Tensor) -> Tensor:
        value = factor.parameter.detach()
        return torch.empty_like(value).copy_(own) if own.shape == value.shape else own

    def begin(self, factor: Factor) -> dict[str, Any]:
        return dict.fromkeys(MOMENTS, factor.parameter.detach())


def _moments(optimizer: torch.optim.Optimizer) -> _InFull | AdamW8bit:
    return optimizer if isinstance(optimizer, AdamW8bit) else _InFull(optimizer)


def state_writer(model: Any, optimizer: torch.optim.Optimizer) -> Callable[[Path], None]:
    """Gather the training state. Returns a function for rank 0 that writes it to a folder. Collective."""
    state, factors = runtime(model), active_factors(model)
    assert state.active is not None
    moments, names = _moments(optimizer), state.adapters[state.active].plan.parameters
    tensors, keys = dict[str, Tensor](), set[str]()
    for name in names:
        keys |= {*moments.keys(name)}
    for key in sorted(keys):
        held = {factor.name: moments.held(key, factor) for factor in factors}
        for name, whole in gather_values(model, state.active, held, only_rank=0).items():
            if key in moments.keys(name):
                tensors[f"{key}/{name}"] = moments.stored(key, name, whole)

    def write(folder: Path) -> None:
        save_file(tensors, folder / STATE_FILE, metadata={"format": "pt"})
        (folder / STATE_FILE).chmod(0o644)  # safetensors writes for the owner alone

    return write


def restore_optimizer(model: Any, optimizer: torch.optim.Optimizer, checkpoint: Saved) -> None:
    """Restore the moments of every factor, sliced for this rank. Raises: UserError: they are of another adapter."""
    state = runtime(model)
    mesh, file = state.mesh, checkpoint.folder / STATE_FILE
    assert state.active is not None
    moments = _moments(optimizer)
    with open_safetensors(file) as opened:
        every = state.adapters[state.active].plan.parameters
        names = {f"{key}/{name}" for name in every for key in moments.keys(name)}
        if names != set(opened.keys()):
            other = sorted(names ^ set(opened.keys()))[0]
            raise UserError(f"{file}", f"it is of another adapter: {other} is on one side only")
        for factor in active_factors(model):
            like, held = moments.begin(factor), {}
            for key in moments.keys(factor.name):
                whole = moments.spread(key, factor.name, opened.get_tensor(f"{key}/{factor.name}"))
                own = whole if moments.is_cut(factor) else local_part(whole, factor.rule, mesh)
                held[key] = moments.packed(key, factor, own)
                if held[key].shape != like[key].shape:
                    raise UserError(f"{file}: {key}/{factor.name}", "its shape is not that of the factor")
            value = factor.parameter
            # Skipped steps do not count: Adam's bias correction is of updates.
            step = torch.tensor(float(checkpoint.updates), dtype=torch.float32, device=value.device)
            optimizer.state[value] = {"step": step, **held}

"""A trainer's checkpoint on a mesh: the adapter and the optimizer as one process would write them.

Does not own: PEFT's files (`adapter.formats.peft_format`), what else Trainer writes.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshlora.adapter.attach import active_factors, gather_values, local_part, runtime
from meshlora.adapter.formats.peft_format import plan_folder, read_factors, save_adapter
from meshlora.comm.collectives import all_reduce_sum
from meshlora_ground.errors import UserError
from meshlora_ground.files import write_atomically

OPTIMIZER_FILE = "optimizer.pt"  # Trainer's


def write_adapter_into(model: Any, folder: Path) -> None:
    """Write the active adapter into a folder that may hold other files. Each file appears whole. Collective."""
    mesh, new = runtime(model).mesh, folder / ".adapter.new"
    if mesh.rank == 0:
        shutil.rmtree(new, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
    save_adapter(model, new)  # collective: every rank
    if mesh.rank == 0:
        for file in sorted(new.iterdir()):
            os.replace(file, folder / file.name)
        new.rmdir()
    all_reduce_sum(torch.zeros(1, device=mesh.device), mesh.world)  # no rank reads before they are there


def read_adapter_into(model: Any, folder: Path) -> None:
    """Give the active adapter the values of the one in `folder`, of whatever topology. Raises: UserError: it is not the
    same adapter, by its options or names; as in `load_adapter`."""
    state = runtime(model)
    assert state.active is not None
    planned = plan_folder(state.whole.model, state.whole.plan, folder)
    own = state.adapters[state.active].plan.parameters
    way_out = "resume with the adapter's own options"
    if other := sorted(planned.parameters.keys() ^ own.keys()):
        raise UserError(f"{folder}", f"it is of another adapter: {other[0]} is on one side only", way_out)
    if any(planned.parameters[name].shape != own[name].shape for name in own):
        raise UserError(f"{folder}", "it is of another adapter, by its shapes", way_out)
    full, trained = read_factors(planned, state.whole.plan)
    values = dict(trained)
    for name, parts in full.items():
        for part, value in parts.items():
            values[planned.targets[name].name_of(part)] = value
    with torch.no_grad():
        for factor in active_factors(model):
            factor.parameter.copy_(local_part(values[factor.name], factor.rule, state.mesh))


def write_optimizer(model: Any, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Write Trainer's `optimizer.pt` with whole tensors in place of this rank's. Collective."""
    state, found = runtime(model), optimizer.state_dict()
    assert state.active is not None
    factors = active_factors(model)
    found["state"] = {number: dict(own) for number, own in found["state"].items()}  # else those of the optimizer
    for name in _moments(optimizer):
        held = {f.name: optimizer.state[f.parameter][name] for f in factors}
        whole = gather_values(model, state.active, held, only_rank=0)  # collective, so on all ranks
        for number, factor in _numbered(optimizer, factors).items():
            if state.mesh.rank == 0:
                found["state"][number][name] = whole[factor.name]
    if state.mesh.rank == 0:
        write_atomically(folder / OPTIMIZER_FILE, lambda part: torch.save(found, part))


def read_optimizer(model: Any, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Restore what `write_optimizer`, or Trainer on one process, wrote: each rank its slices. Raises: UserError: it is
    of another adapter."""
    mesh = runtime(model).mesh
    found = torch.load(folder / OPTIMIZER_FILE, map_location="cpu", weights_only=True)
    numbered = _numbered(optimizer, active_factors(model))
    held, own = (
        [len(group["params"]) for group in groups] for groups in (found["param_groups"], optimizer.param_groups)
    )
    if held != own or not found["state"].keys() <= numbered.keys():
        given = f"{folder / OPTIMIZER_FILE}: groups of {held} parameters"
        raise UserError(given, f"the adapter has {own}", "resume with the adapter's own options")
    for number in found["state"]:  # none, of an optimizer without moments
        factor = numbered[number]
        for name, value in found["state"][number].items():
            if not isinstance(value, Tensor) or value.ndim == 0:  # the number of steps
                continue
            part = local_part(value, factor.rule, mesh)
            if part.shape != factor.parameter.shape:
                rule = f"its shape is not that of {factor.name}"
                raise UserError(f"{folder / OPTIMIZER_FILE}: {name} {list(value.shape)}", rule)
            found["state"][number][name] = part
    optimizer.load_state_dict(found)


def _moments(optimizer: torch.optim.Optimizer) -> list[str]:
    """Names of the tensors that `optimizer` holds in the shape of a parameter; the same on all ranks."""
    names = set()
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.ndim > 0 and value.shape == parameter.shape:
                names.add(name)
    return sorted(names)


def _numbered(optimizer: torch.optim.Optimizer, factors: Any) -> dict[int, Any]:
    """Number of a parameter in the optimizer's state dict -> the factor."""
    by_identity = {id(factor.parameter): factor for factor in factors}
    found: dict[int, Any] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            found[len(found)] = by_identity[id(parameter)]  # torch counts through all groups
    return found

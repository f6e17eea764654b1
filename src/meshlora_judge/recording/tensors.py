"""How the tensors of a trainer lie on its ranks: names without wrappers, whole values, and placements in words.

Knows DTensor (FSDP2, tensor parallelism), the wrappers of DDP, FSDP1 and torch.compile, and plain tensors, which may be
a rank's part of something larger: the judge puts these together (`steps.recorded`).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from meshlora_ground.compat.torch_tensors import of_compiled

_WRAPPERS = re.compile(r"(^|\.)(module|_fsdp_wrapped_module|_orig_mod|_checkpoint_wrapped_module)(?=\.)")
_SAMPLED = 4096  # elements of a frozen tensor that its fingerprint is of


def plain(name: str) -> str:
    """`module._orig_mod.base_model…` -> `base_model…`."""
    return _WRAPPERS.sub("", name).removeprefix(".")


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside DDP, FSDP1, DeepSpeed's engine and torch.compile."""
    while True:
        inner = getattr(model, "module", None) or of_compiled(model)
        if not isinstance(inner, nn.Module) or not type(model).__module__.startswith(("torch.", "deepspeed.")):
            return model
        model = inner


def copied(tensor: Tensor) -> Tensor:
    """A copy where it is: of a DTensor the local part stays one. No communication."""
    return tensor.detach().clone()


def local(tensor: Tensor) -> Tensor:
    """The part on this rank. No communication."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """On the CPU; of a DTensor what its ranks have together, so all of them must call it."""
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    return tensor.detach().cpu().clone()


def is_fsdp1(model: nn.Module) -> bool:
    return any(isinstance(module, FullyShardedDataParallel) for module in model.modules())


def gathered(model: nn.Module) -> AbstractContextManager[Any]:
    """Inside, parameters and gradients that FSDP1 has flattened and cut are whole; all ranks must enter."""
    if is_fsdp1(model):
        found: AbstractContextManager[Any] = FullyShardedDataParallel.summon_full_params(
            model, writeback=False, with_grads=True
        )
        return found
    return nullcontext()


def whole_gradients(
    model: nn.Module, trained: Callable[[], Mapping[str, nn.Parameter]], parts: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Of copies of gradients, as `copied` made them, the whole ones; all ranks must call it.

    FSDP1 knows how to gather only what lies in its parameters: the copies go there and back.
    """
    if not is_fsdp1(model):
        return {name: whole(part) for name, part in parts.items()}
    kept = {name: copied(p.grad) for name, p in trained().items() if p.grad is not None}
    _put(trained(), parts)
    with gathered(model):
        found = {name: whole(p.grad) for name, p in trained().items() if p.grad is not None}
    _put(trained(), kept)
    return found


def _put(trained: Mapping[str, nn.Parameter], gradients: Mapping[str, Tensor]) -> None:
    for name, value in gradients.items():
        if (grad := trained[name].grad) is not None and grad.shape == value.shape:
            grad.copy_(value)


def full_state(
    model: nn.Module, trained: Callable[[], Mapping[str, nn.Parameter]], optimizer: Any
) -> dict[str, dict[str, Tensor]]:
    """The whole optimizer state of each parameter where FSDP1 has cut it, else empty; all ranks must call it.

    torch's `full_optim_state_dict` gives both moments one memory on CPUs (2.13).
    """
    found: dict[str, dict[str, Tensor]] = {}
    if not is_fsdp1(model):
        return found
    own = {name: optimizer.state[p] for name, p in trained().items() if p in optimizer.state}
    keys = {key for state in own.values() for key, value in state.items() if isinstance(value, Tensor) and value.ndim}
    for key in sorted(keys):
        parts = {name: state[key] for name, state in own.items() if key in state}
        for name, value in whole_gradients(model, trained, parts).items():
            found.setdefault(name, {})[key] = value
    numbers = {key: value for state in own.values() for key, value in state.items() if key not in keys}
    return {name: numbers | state for name, state in found.items()}  # a parameter of other ranks has its numbers there


def placement(tensor: Tensor) -> dict[str, Any]:
    """How one tensor lies on its ranks, as plain values."""
    if not isinstance(tensor, DTensor):
        return {"kind": "plain", "shape": list(tensor.shape)}
    mesh = tensor.device_mesh
    return {
        "kind": "dtensor",
        "shape": list(tensor.shape),
        "local": list(tensor.to_local().shape),
        "placements": list(map(str, tensor.placements)),
        "mesh": [[name, size] for name, size in zip(mesh.mesh_dim_names or [""] * mesh.ndim, mesh.shape, strict=True)],
    }


def fingerprint(tensor: Tensor) -> str:
    """A hash of at most `_SAMPLED` elements, evenly spread, of a plain tensor (or a part), its shape and its dtype."""
    flat = tensor.detach().reshape(-1)
    stride = max(1, len(flat) // _SAMPLED)
    values = flat[::stride].cpu()
    if values.dtype not in (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool):
        values = values.double()
    found = hashlib.blake2b(values.contiguous().numpy().tobytes(), digest_size=8)
    found.update(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
    return found.hexdigest()


def rank_and_size() -> tuple[int, int]:
    """This process's rank and the number of processes; (0, 1) where there is no group."""
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1

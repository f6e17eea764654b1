"""Private names of torch: tensors and modules."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn


def version_of(tensor: Tensor) -> int:
    """The number of in-place writes to `tensor` or to any view that shares its memory.

    Autograd compares it with the version it saved; otherwise torch shows it only in the text of that error.
    """
    return tensor._version


def running_backward() -> int:
    """The id of the backward pass running in this thread, -1 outside. Public hooks do not tell two passes apart."""
    return int(torch._C._current_graph_task_id())


def tensor_without_storage(kind: type[Tensor], shape: Sequence[int], *, dtype: torch.dtype, device: Any) -> Any:
    """A tensor of the subclass `kind` that reports a device and holds no memory. A model sees the public one, meta."""
    return Tensor._make_wrapper_subclass(kind, tuple(shape), dtype=dtype, device=device)


def assert_on_device(condition: Tensor, message: str) -> None:
    """Fail if `condition` `[]` is false, without waiting for the device: a plain `assert` reads it on the host.

    On a GPU the process fails later, at its next synchronization.
    """
    torch._assert_async(condition, message)


def copy_each(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy each of `sources` to its counterpart in `targets`."""
    torch._foreach_copy_(targets, sources)


def multiply_each(tensors: list[Tensor], number: Tensor) -> None:
    """Multiply all `tensors` in place by `number` `[]`, which has their device and dtype."""
    torch._foreach_mul_(tensors, number)


def scale_each(tensors: list[Tensor], numbers: list[float]) -> None:
    """Multiply each of `tensors` in place by its own number."""
    torch._foreach_mul_(tensors, numbers)


def norm_of_each(tensors: list[Tensor], *, dtype: torch.dtype) -> list[Tensor]:
    """The 2-norm `[]` of each tensor, accumulated in `dtype` without converted copies."""
    return list(torch._foreach_norm(tensors, 2, dtype))


def is_mean(loss: Tensor) -> bool:
    """Whether `loss` is what `mean()`, or a loss function with its default reduction, has returned."""
    node = loss.grad_fn
    if node is None:
        return False
    # 1 is torch's number of means.
    return node.name().startswith("MeanBackward") or getattr(node, "_saved_reduction", 0) == 1


def is_dropout(module: nn.Module) -> bool:
    """Whether `module` is one of torch's dropouts or derived from one. Their base class has no public name."""
    return isinstance(module, nn.modules.dropout._DropoutNd)


def own_parameter(module: nn.Module, name: str) -> Tensor | None:
    """The parameter registered on `module` itself. `getattr` would run a parametrization."""
    return module._parameters.get(name)


def own_child(module: nn.Module, name: str) -> nn.Module | None:
    """The module registered on `module` itself; None if the name is anything else."""
    return module._modules.get(name)


def is_persistent(module: nn.Module, buffer: str) -> bool:
    """Whether checkpoints contain this buffer. The public way is to build the whole `state_dict`."""
    return buffer not in module._non_persistent_buffers_set


def forward_hooks(module: nn.Module) -> MutableMapping[int, Callable[..., Any]]:
    """The forward hooks by id, in order, for reordering: the public API only registers a hook first or last."""
    return module._forward_hooks


def clippings() -> list[tuple[Any, str]]:
    """(owner, name) of what every gradient clipping by torch goes through, given parameters, limit and norm.

    `clip_grad_norm_` itself is often imported by its name, and no longer looked up where it could be replaced.
    """
    return [(torch.nn.utils, "clip_grads_with_norm_"), (torch.nn.utils.clip_grad, "_clip_grads_with_norm_")]


def of_compiled(model: nn.Module) -> nn.Module | None:
    """The module inside what `torch.compile` returned; None of another one."""
    return getattr(model, "_orig_mod", None)

"""The frozen base sharded over dp (`dp_shard`): each dp rank holds 1/dp of every decoder layer's matrices.

Owns: passing decoder layers to torch's `fully_shard` (FSDP2; Zhao et al., 2023), which of their parameters it gets, and
access to whole weights outside a forward. Does not own: the rule for these parameters (`plan.rules`), reading them
(`model.weights`).

A decoder layer is one unit: gathered over dp before its forward, freed after it, gathered again before its backward.
Nothing is reduced: the base is frozen, and adapters are not part of a unit. What autograd saves of a weight in the
forward is a view of memory that is freed in between and refilled with the same values before the layer's backward; a
saved *copy* of a weight would defeat the purpose, so layers save the parameter itself.

Embedding, head, norms and biases stay whole on every dp rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from meshlora.comm.collectives import all_gather_into
from meshlora.comm.groups import Axis, Mesh
from meshlora.plan.pairs import check
from meshlora.plan.rules import ModelPlan
from meshlora_ground.compat.torch_tensors import forward_hooks
from meshlora_ground.errors import UnsupportedError


def check_units(model: nn.Module, plan: ModelPlan) -> None:
    """Refuse a model that cannot be sharded layer by layer. It may be on the meta device, and is not split yet.

    Raises:
        UnsupportedError: a layer shares a weight with another part of the model.
    """
    if not plan.units:
        return
    owners: dict[int, set[str]] = {}
    names: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        units = [unit for unit in plan.units if name.startswith(f"{unit}.")]
        owners.setdefault(id(parameter), set()).update(units or [""])
        names[id(parameter)] = name  # the last of its names
    for key, units_of_it in owners.items():
        if len(units_of_it) > 1:
            rule = "a decoder layer shares it with another part of the model"
            raise UnsupportedError(f"{plan.topology}: {names[key]}", rule, "leave out dp_shard")


def check_not_sharded(plan: ModelPlan, name: str, parameter: Tensor) -> None:
    """Refuse to train parameter `name` of the base if it is sharded. Raises: UnsupportedError: it is."""
    if plan.is_sharded(name, ndim=parameter.ndim):
        check({"topology": plan.topology, "sharded": name})


def shard_unit(model: nn.Module, unit: str, plan: ModelPlan, mesh: Mesh) -> None:
    """Shard the decoder layer `unit`, whose weights are whole on every dp rank so far, over dp."""
    layer = model.get_submodule(unit)
    kept = set()
    for name, parameter in layer.named_parameters():
        if not plan.is_sharded(f"{unit}.{name}", ndim=parameter.ndim):
            kept.add(parameter)
    before = list(forward_hooks(layer))  # the hooks of borders
    fully_shard(layer, mesh=mesh.data.as_torch_mesh(mesh.device.type), reshard_after_forward=True, ignored_params=kept)
    assert isinstance(layer, FSDPModule)
    layer.set_custom_all_gather(_Gather(mesh.data))  # type: ignore[arg-type]
    # FSDP's hooks come before those of the layer's borders, which may return views: its gather in the backward is tied
    # to the tensor that the layer itself returns.
    hooks = forward_hooks(layer)
    for hook in before:
        hooks[hook] = hooks.pop(hook)  # to the end: the order of a dict is that in which they run


def finish_sharding(model: nn.Module, plan: ModelPlan, mesh: Mesh) -> None:
    """Join the units in one schedule: in the backward each is gathered while the one after it computes."""
    if not plan.units:
        return
    stack = model.get_submodule(plan.units[0].rpartition(".")[0].rpartition(".")[0])  # model.layers.0 -> model
    fully_shard(stack, mesh=mesh.data.as_torch_mesh(mesh.device.type), ignored_params=set(stack.parameters()))
    layers = list(map(model.get_submodule, plan.units))
    for index, layer in enumerate(layers):
        assert isinstance(layer, FSDPModule)
        # The first names itself, which is gathered already. Left to torch, it would prefetch the last layer of an
        # evaluation before the step, for nothing.
        before = layers[max(0, index - 1)]
        assert isinstance(before, FSDPModule)
        layer.set_modules_to_backward_prefetch([before])


@contextlib.contextmanager
def whole_weights(model: nn.Module, name: str | None = None) -> Iterator[None]:
    """Inside the block the weights of the unit with module `name`, or of all units, are whole. Collective."""
    units = []
    for path, module in model.named_modules():
        if isinstance(module, FSDPModule) and (name is None or name.startswith(f"{path}.")):
            module.unshard()
            units.append(module)
    try:
        yield
    finally:
        for unit in units:
            unit.reshard()


class _Gather:
    """FSDP's all-gather of a unit by our collective: counted, and named if a rank does not arrive."""

    def __init__(self, data: Axis) -> None:
        self.data = data

    def allocate(self, size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> None:
        all_gather_into(output_tensor, input_tensor, self.data)

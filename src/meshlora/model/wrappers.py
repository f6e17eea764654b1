"""Refusal of wrappers that would shard, replicate or average a model that is already sharded over the ranks.

Owns: which wrappers of other libraries are refused, and detecting one before it communicates. Does not own: other
refusals on a model (`loading.guards`).

`DistributedDataParallel(model)` broadcasts rank 0's part of every weight over the parts of the others, and ends without
an error. Wrappers do not ask a model for permission, but each first walks its modules, through `named_modules` of every
module. So the model and its layers override that method and look at the caller. This also covers a model inside another
module, and a layer that is wrapped alone.
"""

from __future__ import annotations

import functools
import sys
from types import FrameType
from typing import Any

from torch import nn

from meshlora_ground.compat import COMPOSED
from meshlora_ground.errors import UserError
from meshlora_ground.topology import Topology

# (module, function) of the wrapping code -> what the user called.
_WRAPPERS = {
    ("torch.nn.parallel.distributed", "DistributedDataParallel.__init__"): "torch.nn.parallel.DistributedDataParallel",
    ("torch.nn.parallel.data_parallel", "DataParallel.forward"): "torch.nn.DataParallel",
    ("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel.__init__"): (
        "torch.distributed.fsdp.FullyShardedDataParallel"
    ),
    ("accelerate.accelerator", "Accelerator.prepare"): "accelerate.Accelerator.prepare",
    ("accelerate.accelerator", "Accelerator.prepare_model"): "accelerate.Accelerator.prepare_model",
    ("transformers.trainer", "Trainer.__init__"): "transformers.Trainer",
    ("deepspeed", "initialize"): "deepspeed.initialize",
}
# torch's wrappers that run in `COMPOSED`, where they are detected before they open a mesh.
_COMPOSABLE = {"fully_shard", "replicate"}


def refuse_wrappers(model: Any, topology: Topology) -> None:
    """Make `model` and its layers refuse to be wrapped. On one rank nothing is sharded, and all are allowed."""
    if topology.world == 1:
        return
    layers = [layer for module in model.modules() if isinstance(module, nn.ModuleList) for layer in module]
    for module in (model, *layers):
        object.__setattr__(module, "named_modules", functools.partial(_named_modules, module, topology))
    model.register_forward_pre_hook(lambda *_: _check_caller(topology))  # DataParallel walks no modules on CPUs


def _named_modules(module: nn.Module, topology: Topology, *args: Any, **kwargs: Any) -> Any:
    """`nn.Module.named_modules`: `modules`, `parameters` and `buffers` call it, as do those of enclosing modules."""
    _check_caller(topology)
    return type(module).named_modules(module, *args, **kwargs)


def _check_caller(topology: Topology) -> None:
    """Raises UserError if a wrapper is among the callers; the outermost is the one that the user called."""
    found = ""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if getattr(type(frame.f_locals.get("self")), "keeps_the_mesh", False):
            return  # `meshlora_extra.hf.trainer`, which wraps nothing
        where = (frame.f_globals.get("__name__", ""), frame.f_code.co_qualname)
        if where == COMPOSED and (name := getattr(frame.f_locals.get("func"), "__name__", "")) in _COMPOSABLE:
            found = f"torch's {name}"
        found = _WRAPPERS.get(where, found)
        frame = frame.f_back
    if found:
        raise UserError(
            f"{found} around a model on {topology}",
            "meshlora has divided the model among the ranks and sums its gradients itself; a wrapper would overwrite "
            "the parts of other ranks, or average what differs between them",
            "leave the wrapper out: `meshlora train`, or a loop of your own with meshlora.finish_gradients, as "
            "docs/python-api.md has it",
        )

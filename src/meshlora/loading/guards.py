"""Guards on a loaded model: what would depend on the topology, or see one rank's part, is done right or refused.

Owns: length-dependent rotary embeddings, outputs that only a whole model has, the methods that a model inherits from
transformers and torch, and wrappers of other libraries. Does not own: refusals that follow from the plan, the functions
of `meshlora` that methods call (`adapter.attach`, `adapter.formats.peft_format`).

transformers' own methods would inject layers that ignore the mesh, or give one rank's shard for the whole. Every public
method of its `PeftAdapterMixin` is in one of two tables, or is one of ours.

`DistributedDataParallel(model)` broadcasts rank 0's part of every weight over the parts of the others, and ends without
an error. Wrappers do not ask a model for permission, but each first walks its modules, through `named_modules` of every
module. So the model and its layers override that method and look at the caller. This also covers a model inside another
module, and a layer that is wrapped alone.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from peft import PeftConfig
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from meshlora.adapter import attach
from meshlora.adapter.formats import peft_format
from meshlora.feature import features
from meshlora.loading.own_loop import given_tokens
from meshlora.plan.own_dropouts import parts_of
from meshlora.plan.pairs import check
from meshlora_ground.compat.torch_distributed import COMPOSED
from meshlora_ground.errors import UnsupportedError, UserError
from meshlora_ground.topology import Topology

_LENGTH_DEPENDENT = ("longrope", "dynamic")
_NAMES = "enable one with set_adapter(name), none with `with disable_adapter()`"
_COMPILED = "compiled code was not proved", "leave it out"
# Method -> (what it would do, the way out).
_REFUSED = {
    "save_pretrained": ("it would write one rank's shard", "use meshlora.save_adapter"),
    "get_adapter_state_dict": ("it would give one rank's shard", "use meshlora.save_adapter, and read its file"),
    "resize_token_embeddings": (
        "each rank would resize its own part of the vocabulary",
        "resize the base on one process, save_pretrained it, and load that folder",
    ),
    "delete_adapter": ("an adapter stays until the model is gone", "add the next one under another name"),
    "enable_peft_hotswap": ("no adapter takes the place of another", "load the next one under another name"),
    "enable_adapters": ("it turns PEFT's layers on, and this model has others", _NAMES),
    "disable_adapters": ("it turns PEFT's layers off, and this model has others", _NAMES),
    "half": ("sums of its factors need float32", "give meshlora.load dtype='float16'"),
    "bfloat16": ("sums of its factors need float32", "give meshlora.load dtype='bfloat16'"),
    "__deepcopy__": ("a copy would share its groups and its state with this model", "load the model once more"),
    "__reduce_ex__": ("its groups are of this process", "use meshlora.save_adapter, and load the model there"),
}
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


def longest_fixed_length(config: Any) -> tuple[int, str] | None:
    """(length up to which nothing depends on the batch length, what does beyond it); None: nothing does.

    longrope and dynamic scaling use the padded length of the whole batch, which differs between topologies. Doge keeps
    the best tokens by topk, which breaks ties, as between repeated tokens, depending on the length.
    """
    if config.model_type == "doge":
        return config.keep_window_size, "dynamic mask"
    limits: list[int] = []
    for part in parts_of(config):
        rope = getattr(part, "rope_parameters", None) or {}
        # Some families have parameters of their own for each type of layer.
        for entry in (rope, *rope.values()):
            if isinstance(entry, dict) and entry.get("rope_type") in _LENGTH_DEPENDENT:
                name = "original_max_position_embeddings"
                lengths = entry.get(name), getattr(part, name, None), part.max_position_embeddings
                limits += [length for length in lengths if length]
    if not limits:
        return None
    return min(limits), "rotary embedding"


def guard_model(model: Any, topology: Topology) -> None:
    """Install the guards on a parallel model."""
    take_methods(model)
    refuse_wrappers(model, topology)
    fixed = longest_fixed_length(model.config)

    def check(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        _check_outputs(model.config, kwargs, topology)
        if torch.is_grad_enabled():
            attach.check_not_merged(model.meshlora, "a forward with gradients")
        tokens = given_tokens(args, kwargs)[1]
        if fixed is not None and torch.is_grad_enabled() and tokens is not None and tokens.shape[1] > fixed[0]:
            given = f"a batch of {tokens.shape[1]} positions"
            rule = f"beyond {fixed[0]} the model's {fixed[1]} depends on the batch's length, hence on the topology"
            raise UnsupportedError(given, rule, f"train with sequences of at most {fixed[0]} tokens")

    model.register_forward_pre_hook(check, with_kwargs=True)


def _check_outputs(config: Any, kwargs: dict[str, Any], topology: Topology) -> None:
    """Refuse hidden states and attentions of which a rank has a part only."""
    wanted: dict[str, Any] = {}
    for name in ("output_hidden_states", "output_attentions"):
        wanted[name] = kwargs.get(name)
        if wanted[name] is None:
            wanted[name] = getattr(config, name, False)
    if any(wanted.values()):  # of each forward
        check({"topology": topology, **wanted})


# --- methods of transformers and torch --------------------------------------------------------------------------------


def take_methods(model: Any) -> None:
    """Replace methods of PEFT and transformers on this model by ours, or by a refusal."""
    methods: dict[str, Callable[..., Any]] = {
        "add_adapter": _add_adapter,
        "load_adapter": _load_adapter,
        "set_adapter": attach.set_adapter,
        "active_adapters": _active_adapters,
        "disable_adapter": attach.disable_adapter,
        "save_adapter": peft_format.save_adapter,
    }
    for feature in features():
        methods |= feature.methods(model)
    for name, function in methods.items():
        object.__setattr__(model, name, functools.partial(function, model))
    for name, (rule, way_out) in _REFUSED.items():
        if hasattr(model, name) or name.startswith("__"):
            object.__setattr__(model, name, functools.partial(_refuse, name, rule, way_out))
    for module in model.modules():  # a layer can be compiled alone
        object.__setattr__(module, "compile", _refuse_compile)
    _watch_compile()  # once for the process


@functools.cache
def _watch_compile() -> None:
    """Refuse `torch.compile(module)`, which asks the module nothing and puts it into one of torch's own."""
    register_module_module_registration_hook(_check_owner)


def _check_owner(owner: Any, name: str, module: Any) -> None:
    if name == "_orig_mod" and vars(module).get("compile") is _refuse_compile:
        _refuse("torch.compile", *_COMPILED)


def _add_adapter(
    model: Any,
    name: Any = None,
    config: Any = None,
    *,
    adapter_config: Any = None,
    adapter_name: Any = None,
    seed: int = 0,
) -> None:
    """`meshlora.add_adapter`; or transformers', called as `add_adapter(config, name="default")`: active at once."""
    if adapter_config is None and not isinstance(name, PeftConfig):
        attach.add_adapter(model, name, config, seed=seed)
        return
    if adapter_config is None:
        adapter_config, name = name, config
    own = adapter_name or name or "default"
    attach.add_adapter(model, own, adapter_config, seed=seed)
    attach.set_adapter(model, own)


def _load_adapter(
    model: Any, peft_model_id: str | Path, adapter_name: str | None = None, *, is_trainable: bool = False, **others: Any
) -> None:
    """transformers': the adapter is active at once, frozen, and the model in evaluation mode, or `is_trainable`."""
    if given := sorted(name for name, value in others.items() if value):
        rule = "it takes a folder, adapter_name and is_trainable"
        way_out = "meshlora.load_adapter(model, folder, adapter=...) attaches one, and leaves the active one as it is"
        raise UserError(f"load_adapter({given[0]}={others[given[0]]!r}) on a parallel model", rule, way_out)
    name = adapter_name or "default"
    peft_format.load_adapter(model, peft_model_id, adapter=name)
    attach.set_adapter(model, name)
    if not is_trainable:
        model.eval()
        for factor in attach.active_factors(model):
            factor.parameter.requires_grad_(False)


def _active_adapters(model: Any) -> list[str]:
    """The active adapter, in a list; none: an empty one."""
    active = attach.runtime(model).active
    if active is None:
        return []
    return [active]


def _refuse(name: str, rule: str, way_out: str, *_: Any, **__: Any) -> None:
    raise UserError(f"{name} on a parallel model", rule, way_out)


def _refuse_compile(*_: Any, **__: Any) -> None:
    _refuse("compile", *_COMPILED)


# --- wrappers of other libraries --------------------------------------------------------------------------------------


def refuse_wrappers(model: Any, topology: Topology) -> None:
    """Make `model` and its layers refuse to be wrapped. On one rank nothing is sharded, and all are allowed."""
    if topology.world == 1:
        return
    modules = [model]
    for module in model.modules():
        if isinstance(module, nn.ModuleList):
            modules.extend(module)
    for module in modules:
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

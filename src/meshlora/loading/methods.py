"""Methods that a split model inherits from transformers and torch, and that know nothing of the mesh.

Owns: those that do here what they do there, and the refusal of the others by name. Does not own: the functions of
`meshlora` that they call (`adapter.attach`, `adapter.formats.peft_format`), other guards (`loading.guards`).

transformers' own would inject layers that ignore the mesh, or give one rank's shard for the whole. Every public method
of its `PeftAdapterMixin` is in one of the two tables, or is one of ours.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from peft import PeftConfig
from torch.nn.modules.module import register_module_module_registration_hook

from meshlora.adapter import attach
from meshlora.adapter.formats import peft_format
from meshlora.feature import features
from meshlora_ground.errors import UserError

_NAMES = "enable one with set_adapter(name), none with `with disable_adapter()`"
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
    "compile": ("compiled code was not proved", "leave it out"),
    "__deepcopy__": ("a copy would share its groups and its state with this model", "load the model once more"),
    "__reduce_ex__": ("its groups are of this process", "use meshlora.save_adapter, and load the model there"),
}


def take_methods(model: Any) -> None:
    """Replace methods of PEFT and transformers on this model by ours, or by a refusal."""
    methods: dict[str, Callable[..., Any]] = {
        "add_adapter": _add_adapter,
        "load_adapter": _load_adapter,
        "set_adapter": _set_adapter,
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
    _watch_compile()


@functools.cache
def _watch_compile() -> None:
    """Refuse `torch.compile(model)`, which asks the model nothing and puts it into a module of torch's own."""
    register_module_module_registration_hook(_check_owner)


def _check_owner(owner: Any, name: str, module: Any) -> None:
    if name == "_orig_mod" and isinstance(getattr(module, "meshlora", None), attach.Runtime):
        _refuse("torch.compile", *_REFUSED["compile"])


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


def _set_adapter(model: Any, adapter_name: str | list[str] | None) -> None:
    """`meshlora.set_adapter`, also called with a list of one, as transformers' may be."""
    names = list(adapter_name) if isinstance(adapter_name, list | tuple) else [adapter_name]
    if len(names) != 1:
        raise UserError(f"set_adapter({names})", "one adapter is active at a time", "give one name, or None")
    attach.set_adapter(model, names[0])


def _active_adapters(model: Any) -> list[str]:
    """The active adapter, in a list; none: an empty one."""
    active = attach.runtime(model).active
    return [] if active is None else [active]


def _refuse(name: str, rule: str, way_out: str, *_: Any, **__: Any) -> None:
    raise UserError(f"{name} on a parallel model", rule, way_out)

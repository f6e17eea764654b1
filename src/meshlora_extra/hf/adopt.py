"""A model of transformers, with PEFT's adapters or without, onto a mesh: `meshlora.adopt(get_peft_model(...))`.

Owns: which modules PEFT has put around those of the model, the weights under their plain names, the adapters as the
files that PEFT would write, and that all ranks give the same values. Does not own: the split model
(`loading.load`), reading an adapter (`adapter.formats.peft_format`).

The given model stays as it was, on every rank whole: what is not needed any more is freed with it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from peft import LoraConfig, get_peft_model_state_dict
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor
from transformers import PreTrainedModel

from meshlora.adapter import attach
from meshlora.adapter.formats.peft_format import config_to_store, write_adapter
from meshlora.adapter.replicas import fingerprint, position_weights
from meshlora.comm.collectives import all_gather
from meshlora.comm.groups import Mesh, num_processes
from meshlora.feature import check_proved, features
from meshlora.loading.blueprint import Blueprint, make_blueprint
from meshlora.loading.load import load_blueprint
from meshlora.model.weights import Part, StateDictSource
from meshlora.plan.base_options import BaseOptions
from meshlora.plan.pairs import check
from meshlora_ground.compat.transformers_models import attention_of
from meshlora_ground.errors import UnsupportedError, UserError, numbered
from meshlora_ground.objective import TEXT, Objective
from meshlora_ground.objectives.rewards import Reward
from meshlora_ground.topology import Topology

# What leaves the base as it is; others have taken something out of it, and would once more.
_OF_FACTORS_ALONE = (True, False, "gaussian", "orthogonal", "eva")


def adopt(
    model: Any,
    *,
    topology: str | Topology = "",
    source: str | Path | None = None,
    device: str = "auto",
    seed: int = 0,
    disable_dropout: bool | Literal["unsupported"] = False,
    compute: str | None = None,
    kernels: Literal["liger", "fused", "none"] = "none",
) -> Any:
    """The split model of one that is in memory: `meshlora.adopt(get_peft_model(base, config), topology="tp=2,sp")`.

    Its adapters come with their names, values and options; those that are active are, and train if they did. Call it on
    every rank, with the same model. What `meshlora.load` returns, otherwise.

    Args:
        model: of `get_peft_model`, `PeftModel.from_pretrained` or transformers, in memory or on the meta device: a
            causal LM, or a reward model (AutoModelForSequenceClassification with num_labels=1).
        source: the folder of the weights of a model on the meta device; default: where its configuration is from. Its
            adapters are fresh, from `seed`. topology, device, disable_dropout, compute, kernels: as of `meshlora.load`.

    Raises:
        UserError: no such model, a merged one, or ranks that hold other values. UnsupportedError: a quantised base, an
            adapter that is no LoRA or has changed the base, or what `meshlora.load` refuses.
    """
    base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
    configs: Mapping[str, Any] = getattr(model, "peft_config", {})
    _check(model, base, configs)
    shape = topology if isinstance(topology, Topology) else Topology.parse(topology, world=num_processes())
    check({"topology": shape, "door": "meshlora.load"})
    on_meta = any(parameter.is_meta for parameter in base.parameters())
    options = BaseOptions(
        dtype=base.dtype,
        attn_implementation=attention_of(base.config),
        disable_dropout=disable_dropout,
        compute=compute,  # type: ignore[arg-type] # a wrong one is refused by its name
        kernels=kernels,
    )
    objective: Objective = TEXT
    if getattr(base.config, "num_labels", None) == 1 and type(base).__name__.endswith("ForSequenceClassification"):
        objective = Reward()  # one output: the score of a text
    blueprint = make_blueprint(_folder(base, source) if on_meta else base.config, shape, options, objective)
    for feature in features():
        feature.check_loading(blueprint.model, blueprint.plan, options, dtype=blueprint.dtype, device=device)
    check_proved(blueprint.plan)
    tensors = _plain_tensors(base, blueprint)
    stored = {name: get_peft_model_state_dict(model, None, name, save_embedding_layers=False) for name in configs}
    with tempfile.TemporaryDirectory(prefix="meshlora-adopt-") as folder:
        planned = {}
        for name, config in configs.items():
            if any(tensor.is_meta for tensor in stored[name].values()):
                planned[name] = blueprint.with_adapter(config).trained
            else:  # by way of its file, whose reader knows every option and checks each tensor
                values = config_to_store(config, None, blueprint.plan.task)
                write_adapter(Path(folder) / name, stored[name], values, {})
                planned[name] = blueprint.with_folder(Path(folder) / name).trained
        weights = None if on_meta else _InMemory(tensors)
        loaded = load_blueprint(blueprint, device=device, seed=seed, source=weights, adapters=planned)
    for name, factors in stored.items():
        tensors |= {f"{name}: {key}": factors[key] for key in sorted(factors)}
    _check_same(loaded.meshlora.mesh, tensors)
    loaded.meshlora.source = base.config.name_or_path or None
    if configs:
        active = model.active_adapters
        loaded.set_adapter(list(active() if callable(active) else active))
    if not any(parameter.requires_grad for parameter in model.parameters()):
        loaded.requires_grad_(False)  # it was loaded to be used
    return loaded.train(model.training)


def _check(model: Any, base: Any, configs: Mapping[str, Any]) -> None:
    """Refuse what is no plain model with LoRA. Raises: UserError, UnsupportedError."""
    if not isinstance(base, PreTrainedModel):
        given = f"meshlora.adopt of a {type(base).__name__}"
        raise UserError(given, "it takes a model of transformers, with PEFT's adapters or without")
    if isinstance(getattr(base, "meshlora", None), attach.Runtime):
        raise UserError("meshlora.adopt of a parallel model", "it is on a mesh already", "use it as it is")
    if getattr(base.config, "quantization_config", None) is not None or getattr(base, "is_quantized", False):
        rule = "its weights are in few bits, in the modules of another library"
        way_out = "meshlora.load its folder, with quantization='nf4' or another kind"
        raise UnsupportedError("meshlora.adopt of a quantised model", rule, way_out)
    for name, config in configs.items():
        if not isinstance(config, LoraConfig):
            kind = getattr(config, "peft_type", type(config).__name__)
            raise UnsupportedError(f"adapter {name!r} of type {kind}", "only LoRA is trained on a mesh")
        if config.init_lora_weights not in _OF_FACTORS_ALONE:
            given = f"adapter {name!r}: init_lora_weights={config.init_lora_weights!r}"
            rule = "PEFT has taken a part out of the base in memory, and whoever loads the adapter does so again"
            raise UnsupportedError(given, rule, "give the checkpoint and this configuration to meshlora.load")
    for path, module in base.named_modules():
        if isinstance(module, BaseTunerLayer) and module.merged:
            way_out = "call unmerge_adapter() before"
            raise UserError(f"meshlora.adopt: {path}", "an adapter is merged into its weight", way_out)


def _folder(base: Any, source: str | Path | None) -> Path:
    """The folder of the weights of a model on the meta device."""
    folder = source or base.config.name_or_path
    if not folder or not Path(folder).is_dir():
        rule = "it has no values, and the folder of its weights is not known"
        raise UserError("meshlora.adopt of a model on the meta device", rule, "give source=FOLDER")
    return Path(folder)


class _InMemory(StateDictSource):
    """The weights of a model that stays another's: slices are copies."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__(dict(tensors), "the model in memory")

    def read(self, name: str, *parts: Part) -> Tensor:
        return super().read(name, *parts).clone()


def _plain_tensors(base: Any, blueprint: Blueprint) -> dict[str, Tensor]:
    """The parameters and stored buffers of `base` by their names without PEFT's modules, detached.

    Raises:
        UserError: they are not those of the model that its configuration describes.
    """
    if type(base) is not type(blueprint.model):
        rule = f"of this configuration a {type(blueprint.model).__name__} is trained"
        raise UserError(f"meshlora.adopt of a {type(base).__name__}", rule, "give that one")
    found = {}
    for name, own in blueprint.model.state_dict(keep_vars=True).items():
        value: Any = base
        for part in name.split("."):
            value = getattr(_unwrapped(value), part, None)
        if not isinstance(value, Tensor) or value.shape != own.shape:
            shape = list(value.shape) if isinstance(value, Tensor) else "not there"
            rule = f"its configuration has it in {list(own.shape)}: only models as transformers makes them are split"
            raise UserError(f"meshlora.adopt: {name} is {shape}", rule)
        found[name] = value.detach()
    return found


def _unwrapped(module: Any) -> Any:
    """The model's own module within PEFT's around it: LoRA's, and those of what is trained besides."""
    while isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper):
        module = module.get_base_layer() if isinstance(module, BaseTunerLayer) else module.original_module
    return module


def _check_same(mesh: Mesh, tensors: Mapping[str, Tensor]) -> None:
    """Refuse ranks that give other values: each would train slices of a model of its own. Collective.

    Raises:
        UserError: on every rank, with the first name.
    """
    names = [name for name, tensor in tensors.items() if not tensor.is_meta]
    if mesh.topology.world == 1 or not names:
        return
    weights = {device: position_weights(device) for device in {tensors[name].device for name in names}}
    own = [fingerprint(tensors[name], weights[tensors[name].device]).cpu() for name in names]
    every = all_gather(torch.stack(own).to(mesh.device).unsqueeze(0), mesh.world).cpu()  # [ranks, tensors, 2]
    for name, prints in zip(names, every.unbind(1), strict=True):
        others = (prints != prints[0]).any(1).nonzero().flatten().tolist()
        if others:
            given = f"meshlora.adopt: {name} has other values on {numbered('rank', others)} than on rank 0"
            way_out = "call torch.manual_seed(0) on every rank before the model and its adapter are made"
            raise UserError(given, "ranks take their slices of one model", way_out)

"""An adapter of others on its base in PEFT: attached whole or refused, and its parts by kind.

Owns: which reading of its names fits all of its factors, and words for a scale. Does not own: what is computed with it.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from peft.tuners.trainable_tokens import TrainableTokensLayer
from peft.utils.other import ModulesToSaveWrapper
from torch import nn
from transformers import AutoConfig

from meshlora_ground.compat.peft_targets import targets_as_configured
from meshlora_ground.errors import MeshloraError, UserError, reason
from meshlora_ground.files import open_safetensors
from meshlora_ground.model_class import model_class, take_quantization
from meshlora_judge.experts import PREFIX, plain_name, plain_names
from meshlora_judge.reference import reference_model
from meshlora_judge.settings import Base

WEIGHTS = "adapter_model.safetensors"
LAYER = re.compile(r"\.(\d+)\.")
_EXPERTS = re.compile(r"\.experts(\.\d+)?\.")
# Initialisations that change the base: what is saved goes with the changed one.
_CHANGES_BASE = ("pissa", "olora", "loftq", "corda", "lora_ga")


@dataclass(frozen=True)
class Part:
    """A module of PEFT with a part of the adapter.

    Attributes:
        name: in the model without adapters. kind: its leaf, as in `down_proj`, `experts.down_proj`.
        layer: the first number in its name; -1 without. scale: PEFT's; None if the part replaces weights.
    """

    name: str
    kind: str
    layer: int
    module: Any
    scale: float | None


def load_adapted(base: Base, adapter: Path) -> Any:
    """PEFT's model with the adapter in the folder `adapter`, ready to compute. Raises: UserError: `attached`."""

    def make(is_stock: bool) -> Any:
        return reference_model(base, adapter, is_stock=is_stock).eval().requires_grad_(False)

    return attached(make, base.path, adapter)


def without_weights(folder: str, adapter: Path, *, trust_remote_code: bool) -> tuple[Any, dict[str, str]]:
    """(PEFT's model of the base in `folder` with the factors in float64, but no weights of the base: zeros that take no
    memory; name -> the first name, of weights that are tied). Raises: UserError: `attached`."""
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)
    take_quantization(config)
    tied: dict[str, str] = {}

    def make(is_stock: bool) -> Any:
        with torch.device("meta"):
            model = model_class(config).from_config(config, trust_remote_code=trust_remote_code)
        model.tie_weights()
        first: dict[int, str] = {}
        tied.clear()
        with open_safetensors(adapter / WEIGHTS) as opened:
            # PEFT writes these into the base: biases, and the embedding below its factors.
            written = {plain_name(key) for key in opened.keys() if ".lora_" not in key}  # noqa: SIM118 - no mapping
        for name, parameter in [*model.named_parameters(remove_duplicate=False)]:
            if first.setdefault(id(parameter), name) != name:
                tied[name] = first[id(parameter)]
            owner, _, leaf = name.rpartition(".")
            zeros = torch.zeros((), dtype=torch.float64).expand(parameter.shape)
            zeros = zeros.clone() if name in written else zeros
            setattr(model.get_submodule(owner), leaf, nn.Parameter(zeros, requires_grad=False))
        with contextlib.nullcontext() if is_stock else targets_as_configured():
            return PeftModel.from_pretrained(model, str(adapter), torch_device="cpu")

    return attached(make, folder, adapter), tied


def attached(make: Callable[[bool], Any], base: str, adapter: Path) -> Any:
    """`make(is_stock)` of the reading of target names that places every factor of the file.

    PEFT says nothing of factors that it does not place. It is told to read the names of targets as they stand, and,
    where the factors do not fit then, as stock PEFT reads them.

    Raises: UserError: neither fits, or one of the libraries cannot read a folder.
    """
    for folder, file in ((Path(base), "config.json"), (adapter, "adapter_config.json")):
        if not (folder / file).is_file():
            raise UserError(f"{folder}", f"it holds no {file}")
    try:
        config = LoraConfig.from_pretrained(str(adapter))
    except Exception as error:  # noqa: BLE001 - of any value in a file of others
        raise UserError(f"{adapter}", f"PEFT cannot read its adapter_config.json ({reason(error)})") from None
    if f"{config.init_lora_weights}".lower().startswith(_CHANGES_BASE):
        rule = f"init_lora_weights={config.init_lora_weights}: it belongs to a base that was changed by it"
        raise UserError(f"{adapter}", rule, "convert it: save_pretrained(path_initial_model_for_weight_conversion=...)")
    with open_safetensors(adapter / WEIGHTS) as opened:
        stored = {key for key in opened.keys() if ".lora_" in key}  # noqa: SIM118 - no mapping
    why = ""
    for is_stock in (False, True):
        try:
            model = make(is_stock)
        except MeshloraError:
            raise
        except Exception as error:  # noqa: BLE001 - two libraries and every family: any type
            why = reason(error)
            continue
        expected = {key for key in get_peft_model_state_dict(model, save_embedding_layers=False) if ".lora_" in key}
        if expected == stored:
            return model
        apart = sorted(expected ^ stored)
        why = f"{len(apart)} of its factors are not the model's, or missing, such as {apart[0]}"
    raise UserError(f"adapter {adapter}", f"PEFT does not read it whole on {base}: {why}")


def parts_of(model: Any) -> list[Part]:
    """The parts of the adapter, in the order of modules."""
    found, of_experts = [], plain_names(model)
    for path, module in model.named_modules():
        if isinstance(module, LoraLayer) and "default" in module.scaling:
            scale: float | None = float(module.scaling["default"])
        elif isinstance(module, ModulesToSaveWrapper | TrainableTokensLayer):
            scale = None
        else:
            continue
        path = path.removeprefix(PREFIX)
        name = of_experts.get(path, plain_name(path))
        kind = name.rpartition(".")[2]
        if _EXPERTS.search(f".{name}"):
            kind = f"experts.{kind}"
        layer = LAYER.search(f"{name}.")
        found.append(Part(name, kind, int(layer[1]) if layer else -1, module, scale))
    return found


def scale_words(config: Any, by: float) -> str:
    """A scale of `by` times that of PEFT's configuration `config`, with the mistakes that scale so."""
    root, why = config.r**0.5, list[str]()
    scale = config.lora_alpha / (root if config.use_rslora else config.r)
    if config.use_rslora and abs(by * root - 1) < 0.03:
        why.append("as if use_rslora were off")
    if not config.use_rslora and abs(by / root - 1) < 0.03:
        why.append("as if use_rslora were on")
    if abs(by * scale - 1) < 0.03:
        why.append("as if the scale were 1")
    if abs(by - 2) < 0.03:
        why.append("applied twice, or alpha or r mistaken")
    said = ", or ".join(why)
    return f"scaled by {by:.3g}{f' ({said})' if said else ''}"

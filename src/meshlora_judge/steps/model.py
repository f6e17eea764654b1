"""The model of a recording on one process, by transformers and PEFT: its base as the trainer had it, its adapters, and
the trained values of a step put into their places.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from peft import PEFT_TYPE_TO_CONFIG_MAPPING, get_peft_model
from torch import Tensor, nn
from transformers import AutoConfig

from meshlora_ground.errors import UnsupportedError, UserError, reason
from meshlora_judge.packed import load_base
from meshlora_judge.recording.dropout import without_dropout
from meshlora_judge.recording.files import Recording
from meshlora_judge.recording.tensors import fingerprint

# Initialisations that change the base: the recording has none of its weights.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq")


def replayed_model(base: str, recording: Recording, *, dtype: torch.dtype | None) -> Any:
    """transformers' and PEFT's model of `recording`, all dropout off, in training mode.

    dtype: of every parameter; None: of each as it was recorded. The base is read in the dtype that it was recorded in.

    Raises:
        UserError: `base` is not what was trained on. UnsupportedError: it cannot be made again from its checkpoint.
    """
    packed = [name for name, lies in recording.frozen.items() if lies["dtype"] in ("uint8", "int8")]
    if packed:
        rule = "the judge replays a step on a base of floating-point numbers"
        words = f"a quantised base ({len(packed)} packed parameters, as {packed[0]})"
        raise UnsupportedError(words, rule, "record the same step on the base before it is quantised")
    config = AutoConfig.from_pretrained(base, local_files_only=True)
    stored = _dtype_of(recording.frozen) or _dtype_of(recording.trained) or torch.float32
    ways = {"attn_implementation": "eager", "experts_implementation": "eager"}
    found = load_base(base, config, dtype=stored, **ways, local_files_only=True, trust_remote_code=False)
    for name, given in recording.adapters.items():
        found = _with_adapter(found, name, given)
    if len(recording.adapters) > 1:
        found.base_model.set_adapter(recording.active or [next(iter(recording.adapters))])
    check_base(found, recording, base)
    for name, parameter in found.named_parameters():
        lies = recording.trained.get(name) or recording.frozen.get(name)
        own = getattr(torch, lies["dtype"]) if lies else stored
        parameter.data = parameter.data.to(dtype or own)
        parameter.requires_grad_(name in recording.trained)
    if missing := sorted(recording.trained.keys() - {name for name, _ in found.named_parameters()}):
        rule = "transformers and PEFT make no such parameter of this base"
        raise UserError(f"the recording trained {missing[0]}", rule, "give the base that was trained on")
    set_values(found, recording.frozen_adapters)
    without_dropout(found, [])
    return found.train()


def set_values(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Put the whole `values` of trained parameters into `model`, in its dtypes."""
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, value in values.items():
            parameters[name].copy_(value)


@contextmanager
def as_reference(model: Any, start: Mapping[str, Tensor] | None) -> Iterator[None]:
    """The model whose answers DPO and a divergence compare with: TRL's adapter "ref" if there is one, else the trained
    parameters as they were at the `start`, else the base.
    """
    if "ref" not in model.peft_config and start is not None:
        now = {name: value.detach().clone() for name, value in model.named_parameters() if name in start}
        set_values(model, start)
        try:
            yield
        finally:
            set_values(model, now)
        return
    if "ref" not in model.peft_config:
        with model.disable_adapter():
            yield
        return
    active = list(model.active_adapters)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    model.base_model.set_adapter("ref")
    try:
        yield
    finally:
        model.base_model.set_adapter(active)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in trained)


def trained_by_peft(base: str, recording: Recording) -> set[str]:
    """The parameters that PEFT itself would train for the recorded adapters, without any value. Empty without one."""
    if not recording.adapters:
        return set()
    config = AutoConfig.from_pretrained(base, local_files_only=True)
    from meshlora_ground.model_class import model_class

    with torch.device("meta"):
        model = model_class(config).from_config(config)
        for name, given in recording.adapters.items():
            model = _with_adapter(model, name, given)
    if len(recording.adapters) > 1:
        model.base_model.set_adapter(recording.active or [next(iter(recording.adapters))])
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def _with_adapter(model: Any, name: str, given: Mapping[str, Any]) -> Any:
    kind = f"{given.get('peft_type', '')}".rpartition(".")[2]
    if kind not in PEFT_TYPE_TO_CONFIG_MAPPING:
        raise UnsupportedError(f"an adapter of kind {kind or 'unknown'}", "the installed peft has none such")
    cls = PEFT_TYPE_TO_CONFIG_MAPPING[kind]
    known = {key: value for key, value in given.items() if key in cls.__dataclass_fields__}
    if str(known.get("init_lora_weights")).startswith(_CHANGES_BASE):
        rule = "it changed the base, whose weights a recording has not"
        raise UnsupportedError(f"init_lora_weights={known['init_lora_weights']}", rule, "record a run of another")
    if "init_lora_weights" in known:
        known["init_lora_weights"] = True  # values come from the recording; some initialisations take data
    known.pop("peft_type", None)
    try:
        config = cls(**known)
        if hasattr(model, "peft_config"):
            model.add_adapter(name, config)
            return model
        return get_peft_model(model, config, adapter_name=name, autocast_adapter_dtype=False)
    except (TypeError, ValueError, KeyError) as error:
        rule = f"PEFT does not take it on this base ({reason(error)})"
        raise UserError(f"adapter {name} of the recording", rule, "give the base that was trained on") from error


def _dtype_of(parameters: Mapping[str, Mapping[str, Any]]) -> torch.dtype | None:
    """The dtype that most of them have."""
    counted = Counter(lies["dtype"] for lies in parameters.values())
    name = counted.most_common(1)[0][0] if counted else ""
    found = getattr(torch, name, None)
    return found if isinstance(found, torch.dtype) and found.is_floating_point else None


def check_base(model: nn.Module, recording: Recording, base: str) -> None:
    """Compare the fingerprints of the frozen parameters. Raises: UserError."""
    parameters, others = dict(model.named_parameters()), []
    for name, lies in recording.frozen.items():
        if "fingerprint" not in lies or name not in parameters or ".lora_" in name:
            continue
        own = _part(parameters[name], lies, recording.rank)
        if own is not None and fingerprint(own.to(getattr(torch, lies["dtype"]))) != lies["fingerprint"]:
            others.append(name)
    if others:
        rule = f"{len(others)} of {len(recording.frozen)} frozen parameters differ from those recorded, as {others[0]}"
        raise UserError(f"--model {base}", rule, "give the base, and its revision, that was trained on")


def _part(whole: Tensor, lies: Mapping[str, Any], rank: int) -> Tensor | None:
    """A rank's part of a frozen parameter that lies on its ranks like this; None: where it lies is not known."""
    if list(whole.shape) != lies["shape"]:
        return None  # a part of no DTensor
    if lies["kind"] != "dtensor":  # of FSDP1 it was gathered
        return whole
    (_, size), *others = lies["mesh"]
    found = re.fullmatch(r"S(?:hard)?\((?:dim=)?(\d+)\)", lies["placements"][0])
    if others or found is None or rank >= size:
        return None
    parts = whole.chunk(size, int(found[1]))
    return parts[rank] if rank < len(parts) and list(parts[rank].shape) == lies["local"] else None

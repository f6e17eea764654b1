"""PEFT's file format, in and out: `adapter_config.json` and `adapter_model.safetensors` with full tensors.

Owns: file names, atomic writing by rank 0, checked reading. Files are independent of the topology. Does not own: keys
(`adapter.formats.file_tensors`), the targets (`adapter.targets.resolve`), merging into the base.
"""

from __future__ import annotations

import dataclasses
import json
import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from meshlora.adapter.attach import attach, draw_adapter, gather_adapter, local_part, runtime
from meshlora.adapter.formats.adapter_file import check_keys, check_vocabulary, open_adapter, read_tensor
from meshlora.adapter.formats.file_tensors import (
    base_keys,
    factors_of_file,
    file_keys,
    file_shapes,
    file_tensors,
    key_of_parameter,
)
from meshlora.adapter.plan import AdapterPlan, plan_adapter, rule_of_parameter, whole_shape
from meshlora.adapter.replicas import check_replicas
from meshlora.adapter.targets.pieces import own_words, with_own_words, with_pieces
from meshlora.adapter.targets.resolve import KINDS, Target
from meshlora.adapter.targets.token_rows import DELTA
from meshlora.comm.collectives import broadcast_text
from meshlora.feature import features, first_answer
from meshlora.model.inject import is_tied
from meshlora.plan.pairs import check
from meshlora.plan.rules import ModelPlan
from meshlora_ground.errors import MeshloraError, SaveError, UnsupportedError, UserError, did_you_mean, reason
from meshlora_ground.files import new_folder, read_json, write_json_atomically
from meshlora_ground.tasks import CAUSAL, labels_of
from meshlora_ground.weight_files import repository_of

WEIGHTS_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"
# Written for adapters on pieces of fused matrices or shared by experts: PEFT does not need it, further training does.
PIECES_FILE = "meshlora.json"
_OWN = ("pieces", "share_experts", "vision")  # options of `PieceLoraConfig`, which PEFT's configuration lacks
OPTIONS = frozenset({field.name for field in dataclasses.fields(LoraConfig)} | {*_OWN})


def save_adapter(
    model: Any,
    path: str | Path,
    *,
    adapter: str | None = None,
    also: Callable[[Path], None] | None = None,
    compares: bool = True,
) -> None:
    """Write `adapter` (the active one by default) as a PEFT adapter folder. Collective: all ranks must call it.

    The folder appears complete or not at all, and exists when any rank returns. also: called on rank 0 with the folder
    after the adapter is written, to add files. compares: the copies that ranks hold of a factor, before.

    Raises:
        UserError: no such adapter. MeshloraError: ranks hold other copies of a factor (`adapter.replicas`). SaveError:
            the folder could not be written (on all ranks, with the same message).
    """
    state, mesh = runtime(model), runtime(model).mesh
    name = adapter or state.active
    if name is None or name not in state.adapters:
        raise UserError(f"adapter {name!r}", "the model has no such adapter", did_you_mean(name or "", state.adapters))
    if compares:
        check_replicas(model, adapter=name)
    # On every rank, so that a configuration that cannot be stored ends all of them.
    planned = state.adapters[name].plan
    config = config_to_store(planned.stored, state.source, state.plan.task)
    full = gather_adapter(model, name, only_rank=0)
    tensors, broken, failure = {}, "", ""
    if mesh.rank == 0:
        for tied in planned.tied:  # PEFT has it under both names; clones: safetensors refuses shared memory
            full[tied] = full[f"{state.plan.embedding}.weight"].clone()
        tensors = file_tensors(full, planned.targets)
        broken = next((key for key, tensor in tensors.items() if not torch.isfinite(tensor).all()), "")
    if broken := broadcast_text(broken, mesh.world, mesh.device):
        raise MeshloraError(f"{path}: not saved, {broken} holds values that are not finite")
    if mesh.rank == 0:
        try:
            own = own_words(planned.stored) | labels_of(model.config)
            write_adapter(Path(path), tensors, config, own, also=also)
        except (OSError, SafetensorError, MeshloraError) as error:  # must end every rank, not leave them waiting
            failure = reason(error)
    if failure := broadcast_text(failure, mesh.world, mesh.device):
        raise SaveError(f"{path}: the adapter could not be written ({failure})")


def write_adapter(
    path: Path,
    tensors: Mapping[str, Tensor],
    config: Mapping[str, Any],
    own: Mapping[str, Any],
    *,
    also: Callable[[Path], None] | None = None,
) -> None:
    """Write full tensors and a configuration as an adapter folder, atomically. Same input, same bytes.

    own: options that PEFT's configuration lacks (`own_words`).
    """
    with new_folder(path) as folder:
        write_json_atomically(folder / CONFIG_FILE, dict(config))
        if own:
            write_json_atomically(folder / PIECES_FILE, dict(own))
        ordered = {key: tensors[key].contiguous() for key in sorted(tensors)}
        save_file(ordered, folder / WEIGHTS_FILE, metadata={"format": "pt"})
        (folder / WEIGHTS_FILE).chmod(0o644)
        if also is not None:
            also(folder)


def load_adapter(model: Any, path: str | Path, *, adapter: str = "default", ignore_dropout: bool = False) -> None:
    """Attach the PEFT adapter in folder `path` as `adapter`, frozen until `set_adapter`, on any topology.

    ignore_dropout: load an adapter trained with lora_dropout as one without.

    Raises:
        UserError: files missing or damaged, names, shapes or types that do not fit the model, values not finite.
    """
    whole = runtime(model).whole
    planned = plan_folder(whole.model, whole.plan, Path(path), ignore_dropout=ignore_dropout)
    read_adapter(model, adapter, planned)


def plan_folder(model: Any, plan: ModelPlan, folder: Path, *, ignore_dropout: bool = False) -> AdapterPlan:
    """`plan_adapter` for the adapter in `folder`; patterns of its configuration need not match."""
    config = read_config(folder, ignore_dropout=ignore_dropout)
    for feature in features():
        config = feature.config_of_file(folder / WEIGHTS_FILE, config, plan)
    return plan_adapter(model, plan, config, strict=False, folder=folder)


def begin_adapter(model: Any, name: str, planned: AdapterPlan, *, seed: int) -> None:
    """Attach the adapter `planned`: read from its folder, or drawn from `seed`."""
    if planned.folder is not None:
        read_adapter(model, name, planned)
    else:
        draw_adapter(model, name, planned, seed=seed)


def begin_reference(model: Any, of: str, planned: AdapterPlan | None) -> None:
    """Attach the frozen adapter that adapter `of` is compared with, if it is one."""
    if planned is not None:
        name = f"reference of {of}"
        read_adapter(model, name, planned)
        runtime(model).references[of] = name


def read_adapter(model: Any, name: str, planned: AdapterPlan) -> None:
    """Attach the adapter in the folder of `planned`; every rank keeps its slices."""
    assert planned.folder is not None
    _check_same_base(model, planned.folder / WEIGHTS_FILE, planned)
    full, trained = read_factors(planned, runtime(model).whole.plan)
    attach(model, name, planned, lambda target: full[target.name], trained)


def read_config(folder: Path, *, ignore_dropout: bool = False) -> LoraConfig:
    """The `LoraConfig` stored in an adapter folder. ignore_dropout: set its lora_dropout to 0.

    Raises:
        UserError: missing, not JSON, or not a LoRA adapter. UnsupportedError: an option unknown to this peft.
    """
    if not folder.is_dir():
        raise UserError(f"adapter {folder}", "there is no such folder")
    stored = read_json(folder / CONFIG_FILE)
    kind = _mapping(stored).get("peft_type")
    if kind != "LORA":
        raise UserError(f"{folder / CONFIG_FILE}", f"peft_type is {kind!r}", "only LORA adapters can be loaded")
    if ignore_dropout:
        stored["lora_dropout"] = 0.0
    config = lora_config(stored, f"{folder / CONFIG_FILE}")
    file = folder / PIECES_FILE
    if not file.is_file():
        return config
    own = read_json(file)
    if _mapping(own).get("labels") and not own.get("pieces"):  # written for the labels of a head alone
        return config
    return with_own_words(config, _pieces(own, f"{file}"), share_experts=own.get("share_experts") is True)


def lora_config(values: Mapping[str, Any], where: str, *, unknown_is_error: bool = False) -> LoraConfig:
    """A `LoraConfig` from plain values.

    unknown_is_error: refuse unknown names even when unset, as for a hand-written file. Files of other peft versions
    hold names unknown to this one, which have no effect while they are off.

    Raises:
        UserError: peft refuses a value. UnsupportedError: a name that is set and unknown to peft.
    """
    pieces: dict[str, list[str]] = {}
    if values.get("pieces"):
        pieces = _pieces(values, where)
    shared = values.get("share_experts", False)
    if not isinstance(shared, bool):
        raise UserError(f"{where}: share_experts={shared!r}", "it is true or false")
    vision = values.get("vision", False)
    if not isinstance(vision, bool) and not _are_names(vision):
        raise UserError(f"{where}: vision={vision!r}", "it is true, false or a list of names of modules")
    if (kind := values.get("peft_type", "LORA")) not in ("LORA", None):  # `LoraConfig` takes any, and is LORA
        raise UnsupportedError(f"{where}: peft_type={kind!r}", "only adapters of type LORA are trained", "leave it out")
    known = {field.name for field in dataclasses.fields(LoraConfig)}
    # An adapter that tokens invoke is one of a causal model, or PEFT runs the base.
    options: dict[str, Any] = {"task_type": CAUSAL} if values.get("alora_invocation_tokens") else {}
    for key, value in values.items():
        if key in known:
            options[key] = value
        elif key not in _OWN and (value or unknown_is_error):
            raise UnsupportedError(f"{where}: {key}", "it is not an option of this peft", did_you_mean(str(key), known))
    check({option: options[option] for option in KINDS if option in options})  # before PEFT, which refuses some
    try:
        with warnings.catch_warnings():
            # Data-driven initialisations are refused anyway: no warning besides the error.
            warnings.filterwarnings("ignore", "`init_lora_weights` is")
            # An option without effect is an error.
            warnings.filterwarnings("error", ".*will be ignored")
            config = LoraConfig(**options)
    except (TypeError, ValueError, ImportError, UserWarning) as error:  # ImportError: an option needs another package
        raise UserError(where, f"peft refuses it ({error})") from error
    return with_own_words(with_pieces(config, pieces), share_experts=shared, vision=vision)


def _pieces(values: Any, where: str) -> dict[str, list[str]]:
    """The entry `pieces` of a file; it must map targets to lists of names."""
    pieces = _mapping(values).get("pieces")
    if not isinstance(pieces, Mapping) or not all(map(_are_names, pieces.values())):
        raise UserError(f"{where}: pieces={pieces!r}", "it maps targets to names, as in {c_attn: [q, v]}")
    return {str(key): list(names) for key, names in pieces.items()}


def _are_names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _mapping(value: object) -> Mapping[str, Any]:
    """`value` as read from a file that anyone may have written: empty if it is no mapping."""
    if isinstance(value, Mapping):
        return value
    return {}


def read_factors(planned: AdapterPlan, plan: ModelPlan) -> tuple[dict[str, dict[str, Tensor]], dict[str, Tensor]]:
    """(full factors by module and part, full values of trained base parameters), all checked."""
    assert planned.folder is not None
    file = planned.folder / WEIGHTS_FILE
    targets = as_named_in(file, planned.targets)
    if (of_other_layout := first_answer(lambda wing: wing.factors_of_file(file, targets, plan))) is not None:
        return of_other_layout, {}
    expected, of_copies = file_shapes(targets), dict[str, str]()
    for name in planned.of_base:
        key = of_copies[name] = key_of_parameter(name, targets)
        expected[key] = planned.parameters[name].shape
    named = base_keys(targets, plan, planned.copies, planned.with_rows)
    of_base = {key: planned.vocabulary[name] for name, key in named.items()}
    repeated = set[str]()
    # Of a resized vocabulary PEFT writes the rows of a tied head once more, and reads them nowhere.
    for rows in planned.rows.values():
        repeated |= {key_of_parameter(f"{name}.{DELTA}", targets) for name in rows.tied}
    with open_adapter(file) as opened:
        num_rows = {name: shape[0] for name, shape in planned.vocabulary.items()}
        # Before the names: a file for another vocabulary may have others, too, and this says why.
        check_vocabulary(opened, file, of_base | expected, num_rows)
        check_keys(file, opened.keys() - of_base.keys() - repeated, expected)
        tensors = {key: read_tensor(opened, file, key, shape) for key, shape in expected.items()}
    return factors_of_file(tensors, targets, file), {name: tensors[key] for name, key in of_copies.items()}


def as_named_in(file: Path, targets: Mapping[str, Target]) -> Mapping[str, Target]:
    """`targets` as `file` names them: by their own names where an older meshlora, or PEFT itself, has written it."""
    renamed = {name: target for name, target in targets.items() if target.in_file[0]}
    if not renamed:
        return targets
    with open_adapter(file) as opened:
        if opened.keys() & set(file_keys(renamed).values()):
            return targets
    return {name: dataclasses.replace(target, in_file=("", "")) for name, target in targets.items()}


def _check_same_base(model: Any, file: Path, planned: AdapterPlan) -> None:
    """Check that base weights stored in the file, which PEFT would load, equal those of this model.

    What a trained copy takes the place of is compared only if another module is tied to it and has no copy of its own.

    Raises:
        UserError: they differ, for example after a change of the vocabulary.
    """
    state = runtime(model)
    keys = base_keys(planned.targets, state.plan, planned.copies, planned.with_rows)
    in_use = {name for name in keys if f"{name}.weight" not in (*planned.copies, *planned.tied)}
    if in_use and is_tied(state.whole.model, state.whole.plan):  # one weight, which another module still uses
        in_use = set(keys)
    with open_adapter(file) as opened:
        for name in sorted(in_use):
            key = keys[name]
            if key not in opened or not state.plan.holds(name):
                continue
            parameter = state.base.get(f"{name}.weight", model.get_parameter(f"{name}.weight"))
            given, rule = opened.get_tensor(key), rule_of_parameter(state.plan, f"{name}.weight")
            is_same = tuple(given.shape) == whole_shape(model, state.plan, f"{name}.weight")
            if is_same:
                own = local_part(given, rule, state.mesh).to(parameter.device, parameter.dtype)
                is_same = torch.equal(own, parameter.detach())
            if not is_same:
                why = "it is not the weight of this model, and PEFT would put it there"
                way_out = "give the model that was trained on, or merge the adapter, which takes it: meshlora merge"
                raise UserError(f"{file}: {key}", why, way_out)


def config_to_store(config: LoraConfig, source: str | None, task: str = CAUSAL) -> dict[str, Any]:
    """Plain, sorted values: the same configuration gives the same bytes in every process."""
    values = {key: value for key, value in config.to_dict().items() if key not in _OWN}
    if repository := repository_of(source):
        values |= {"base_model_name_or_path": repository.name, "revision": repository.commit}
    else:
        name = str(values.get("base_model_name_or_path") or source or "")
        # A relative path would be looked for in the folder of whoever loads the adapter, and then on the hub.
        if os.path.isdir(name):
            name = os.path.abspath(name)
        values["base_model_name_or_path"] = name or None
    values["inference_mode"] = True  # as PEFT saves it: whoever loads it trains only if asked to
    values["task_type"] = task
    return json.loads(json.dumps(_plain(values)))  # tuples as the lists that a file has


def _plain(value: Any) -> Any:
    if isinstance(value, set | frozenset):
        return sorted(value)
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return getattr(value, "value", value)  # enums

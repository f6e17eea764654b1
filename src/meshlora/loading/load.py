"""Loading a model onto a mesh: leaves, weights, adapter.

Owns: `load`. Does not own: everything known before any weight is read (`blueprint`).
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from peft import LoraConfig
from transformers import PretrainedConfig

from meshlora.adapter import attach
from meshlora.adapter.formats.peft_format import begin_adapter, begin_reference
from meshlora.adapter.plan import AdapterPlan
from meshlora.adapter.targets.options import check_kind
from meshlora.comm.groups import join, num_processes, open_mesh
from meshlora.feature import check_proved, features
from meshlora.layers.dropout import replace_dropouts
from meshlora.loading.blueprint import Blueprint, make_blueprint
from meshlora.loading.guards import guard_model
from meshlora.loading.own_loop import number_tokens, take_labels
from meshlora.model.dp_shard import finish_sharding
from meshlora.model.inject import parallelize
from meshlora.model.padding import expect_no_mask, is_causal
from meshlora.model.weights import Source, StateDictSource, extra_weights, fill
from meshlora.plan.base_options import BaseOptions
from meshlora.plan.pairs import check
from meshlora_ground.errors import UserError
from meshlora_ground.model_class import model_class
from meshlora_ground.topology import Topology
from meshlora_ground.weight_files import weight_files

logger = logging.getLogger(__name__)


def load(
    model: str | Path | PretrainedConfig,
    *,
    lora: LoraConfig | None = None,
    adapter: str | Path | None = None,
    topology: str | Topology = "",
    dtype: str | torch.dtype | None = None,
    device: str = "auto",
    seed: int = 0,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
    disable_dropout: bool | Literal["unsupported"] = False,
    ignore_lora_dropout: bool = False,
    allow_unused_weights: bool = False,
    quantization: str | None = None,
    compute: str | None = None,
    kernels: Literal["liger", "fused", "none"] = "none",
) -> Any:
    """A Hugging Face causal LM with parallel leaves: base frozen, adapter active and trainable.

    Call it on every rank of the job; without a launcher it loads the model in one process.

    Args:
        model: folder of a checkpoint in safetensors, or its name on the hub, as in `"Qwen/Qwen3-0.6B"` or with
            `@REVISION`; or a configuration (weights are then random, from `seed`).
        lora: a fresh adapter, named "default". `adapter`: folder or name of a PEFT adapter to continue from instead.
        topology: as in `"dp=2,tp=2,sp"`; a missing dp is inferred from the number of processes.
        dtype: of the base; default: that of the checkpoint. Adapters are fp32 (fp64 for an fp64 base).
        device: "auto", "cpu" or "cuda". seed: of the adapter, and of random weights.
        attn_implementation, trust_remote_code: as in transformers.
        disable_dropout: set the model's own dropouts to 0; "unsupported": only those that are not exact on every
            topology, for which a model is refused otherwise.
        ignore_lora_dropout: treat `adapter` as having no lora_dropout.
        allow_unused_weights: accept a checkpoint with weights that the model does not use.
        quantization: "nf4", "int8", "mxfp4", "nvfp4" or "fp8": quantise the matrices of all linears but the head, and
            of routed experts. "keep": those that the checkpoint stores in few bits stay packed.
        compute: "fp8": the products of the frozen linears in float8; "fp8_backward": those of the backward alone.
        kernels: "liger": norms, rotations and gated MLPs by kernels of liger-kernel, on a GPU; "fused": with
            low-rank terms of gated MLPs and of sums of the residual stream. Each is compared with its definition here;
            that of the whole model is `meshlora verify`.

    Raises:
        UserError: a wrong argument, checkpoint or adapter. UnsupportedError: anything not proved to be exact.
    """
    if lora is not None and adapter is not None:
        raise UserError("both lora and adapter", "a fresh adapter or one to go on from, not both")
    if lora is not None:
        check_kind(lora)
    shape = topology if isinstance(topology, Topology) else Topology.parse(topology, world=num_processes())
    # Its loops are the caller's, and stages need the order of a schedule.
    check({"topology": shape, "door": "meshlora.load"})
    options = BaseOptions(
        dtype="auto" if dtype is None else dtype,  # type: ignore[arg-type] # a wrong one is refused by its name
        attn_implementation=attn_implementation,
        trust_remote_code=trust_remote_code,
        disable_dropout=disable_dropout,
        allow_unused_weights=allow_unused_weights,
        quantization=quantization,  # type: ignore[arg-type] # the same
        compute=compute,  # type: ignore[arg-type] # the same
        kernels=kernels,
    )
    if not isinstance(model, PretrainedConfig):
        model = _folder(model, "model", trust_remote_code=trust_remote_code)
    blueprint = make_blueprint(model, shape, options)
    for feature in features():
        feature.check_loading(blueprint.model, blueprint.plan, options, dtype=blueprint.dtype, device=device)
    check_proved(blueprint.plan)
    if adapter is not None:
        blueprint = blueprint.with_folder(Path(_folder(adapter, "adapter")), ignore_dropout=ignore_lora_dropout)
    elif lora is not None:
        blueprint = blueprint.with_adapter(lora)
        check({**blueprint.asked, "door": "meshlora.load"})
    loaded = load_blueprint(blueprint, device=device, seed=seed)
    said = blueprint.source and extra_weights(blueprint.model, blueprint.weights())
    if said and loaded.meshlora.mesh.rank == 0:
        logger.warning(said)
    return loaded


def _folder(given: str | Path, kind: Literal["model", "adapter"], *, trust_remote_code: bool = False) -> str:
    """The path of a model or adapter that may be given by a name which a wing knows."""
    path = f"{given}"
    for feature in features():
        path = feature.folder_of(path, kind, trust_remote_code=trust_remote_code)
    return path


def load_blueprint(
    blueprint: Blueprint,
    *,
    device: str = "auto",
    seed: int = 0,
    source: Source | None = None,
    adapters: Mapping[str, AdapterPlan] | None = None,
) -> Any:
    """The model of `blueprint` on the mesh of this job, its adapter active. Every rank calls this. The caller checks
    that the family is proved. source, adapters: the weights and adapters in place of the blueprint's; the first is
    active.
    """
    whole, model = blueprint.plan, copy.deepcopy(blueprint.model)  # a blueprint makes several models
    if blueprint.source is not None:
        weight_files(blueprint.source)  # refused before ranks wait for each other
    mesh = open_mesh(whole.topology, device=join(device), copies=whole.copies, has_experts=bool(whole.experts))
    plan = whole
    for feature in features():
        plan = feature.plan_of_rank(plan, mesh.pp.rank)
    if source is None and blueprint.source is None:
        source = StateDictSource(_random_weights(copy.deepcopy(blueprint.config), blueprint.dtype, seed))
    source = source or blueprint.weights()
    targets = {*plan.quantized}  # what is held in few bits is a leaf of ours, with an adapter or without
    if adapters is None:
        adapters = {} if blueprint.adapter is None else {"default": blueprint.adapter}
    for adapter in (*adapters.values(), blueprint.reference):
        if adapter is not None:
            targets |= {*adapter.targets}
    cuts = parallelize(model, plan, mesh, targets=targets, dtype=blueprint.dtype, options=blueprint.options)
    of_stage = blueprint.model if plan.stages else None  # weights of other stages are checked, too
    unused = blueprint.options.allow_unused_weights
    fill(model, plan, source, mesh, whole=of_stage, allow_unused=unused, fresh=blueprint.fresh, seed=seed)
    if of_stage is None:  # else no stage has both of what could be tied
        model.tie_weights()
    finish_sharding(model, plan, mesh)
    source_of = None if blueprint.source is None else str(blueprint.source)
    model.meshlora = attach.Runtime(plan, mesh, source_of, *cuts, attach.Whole(blueprint.model, whole))
    if is_causal(blueprint.model, whole):
        model.meshlora.is_causal = True
        expect_no_mask(model)
    replace_dropouts(model, plan.model_type, model.meshlora.dropout)
    guard_model(model, plan.topology)
    take_labels(model)
    number_tokens(model)
    for feature in features():
        feature.watch(model)
    for name, planned in adapters.items():
        begin_adapter(model, name, planned, seed=seed)
        begin_reference(model, name, blueprint.reference)
    attach.set_adapter(model, next(iter(adapters), None))  # last: it says what is trained
    return model


def _random_weights(config: PretrainedConfig, dtype: torch.dtype, seed: int) -> dict[str, torch.Tensor]:
    """State dict of a freshly initialised model: the same on every rank and topology."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return dict(model_class(config).from_config(config, dtype=dtype).state_dict())

"""Loading a model onto a mesh: plan, leaves, weights, adapter.

Owns: `load`. Everything else it calls by name.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from peft import LoraConfig
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PretrainedConfig

from meshlora.adapter import manage, peft_format
from meshlora.adapter.per_expert import engine_config
from meshlora.adapter.targets import resolve_targets
from meshlora.errors import UnsupportedError, UserError, did_you_mean, reason
from meshlora.guards import check_dropouts, guard_model, handle_dropout
from meshlora.parallel.dropout import replace_dropouts
from meshlora.parallel.groups import join, num_processes, open_mesh
from meshlora.parallel.inject import parallelize
from meshlora.parallel.quantized import check_library
from meshlora.parallel.same_tokens import compare_first_tokens
from meshlora.parallel.sharding import check_units, finish_sharding
from meshlora.plan.derive import plan_model
from meshlora.plan.families import check_proved_here
from meshlora.plan.numbers import check_numbers
from meshlora.plan.quantization import with_quantization
from meshlora.plan.rules import ModelPlan
from meshlora.plan.topology import Topology
from meshlora.state.building import build_on_meta
from meshlora.state.files import read_json
from meshlora.state.stored import num_stored
from meshlora.state.weights import CheckpointSource, StateDictSource, checkpoint_files, fill, kept_wide

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
# transformers copies all of it a dozen times.
_CONFIG_BYTES = 2**19


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
) -> Any:
    """A Hugging Face causal LM with parallel leaves: base frozen, adapter active and trainable.

    Call it on every rank of the job; outside a launcher it makes a model for one process.

    Args:
        model: folder of a checkpoint in safetensors, or a configuration (weights are then random, from `seed`).
        lora: a fresh adapter, named "default". `adapter`: folder of a PEFT adapter to go on from instead.
        topology: as in `"dp=2,tp=2,sp"`; a missing dp is what the number of processes leaves.
        dtype: of the base; default: what the checkpoint says. Adapters are fp32 (fp64 beside fp64).
        device: "auto", "cpu" or "cuda". seed: of the adapter, and of random weights.
        attn_implementation, trust_remote_code: as in transformers.
        disable_dropout: set the model's own dropouts to 0; "unsupported": those of them that are not exact on every
            topology. Without it a model that has such is refused.
        ignore_lora_dropout: take `adapter` as one without lora_dropout.
        allow_unused_weights: accept a checkpoint that holds weights the model has no place for.
        quantization: "nf4" or "int8": hold the matrices of all linears but the head in so few bits.

    Raises:
        UserError: a wrong argument, checkpoint or adapter. UnsupportedError: what is not proved to be exact.
    """
    shape = topology if isinstance(topology, Topology) else Topology.parse(topology, world=num_processes())
    return _load(
        model,
        is_proved=False,
        topology=shape,
        lora=lora,
        adapter=adapter,
        dtype=dtype,
        device=device,
        seed=seed,
        attn_implementation=attn_implementation,
        trust_remote_code=trust_remote_code,
        disable_dropout=disable_dropout,
        ignore_lora_dropout=ignore_lora_dropout,
        allow_unused_weights=allow_unused_weights,
        quantization=quantization,
    )


def load_without_proof(model: str | Path | PretrainedConfig, **options: Any) -> Any:
    """`load` on a `Topology` for those who prove what they load: it does not ask for the list of proved families."""
    return _load(model, is_proved=True, **options)


def _load(
    model: str | Path | PretrainedConfig,
    *,
    is_proved: bool,
    topology: Topology,
    lora: LoraConfig | None = None,
    adapter: str | Path | None = None,
    dtype: str | torch.dtype | None = None,
    device: str = "auto",
    seed: int = 0,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
    disable_dropout: bool | Literal["unsupported"] = False,
    ignore_lora_dropout: bool = False,
    allow_unused_weights: bool = False,
    quantization: str | None = None,
) -> Any:
    if lora is not None and adapter is not None:
        raise UserError("both lora and adapter", "a fresh adapter or one to go on from, not both")
    config = copy.deepcopy(read_model_config(model, trust_remote_code=trust_remote_code))  # the caller's stays as it is
    target_dtype = resolve_dtype(dtype, config)
    hf_model, plan = build_meta(
        config,
        topology,
        dtype=target_dtype,
        attn_implementation=attn_implementation,
        disable_dropout=disable_dropout,
        trust_remote_code=trust_remote_code,
        quantization=quantization,
    )
    if not is_proved:
        check_proved_here(hf_model.config.model_type, topology, has_experts=bool(plan.experts))
    if adapter is not None:
        stored = peft_format.read_config(Path(adapter), ignore_dropout=ignore_lora_dropout)
        stored = engine_config(Path(adapter) / peft_format.WEIGHTS_FILE, stored, plan)
        found = resolve_targets(hf_model, plan, stored, strict=False)
        # Before the base, which takes its time, is read.
        peft_format.check_adapter(hf_model, Path(adapter), stored, found, plan)
    else:
        found = resolve_targets(hf_model, plan, lora) if lora else {}
    if not isinstance(model, PretrainedConfig):
        checkpoint_files(Path(model))
    mesh = open_mesh(topology, device=join(device), copies=plan.copies, has_experts=bool(plan.experts))
    source: Any = (
        StateDictSource(_random_weights(config, target_dtype, seed))
        if isinstance(model, PretrainedConfig)
        else CheckpointSource(Path(model), hf_model)
    )
    parallelize(hf_model, plan, mesh, targets={*found, *plan.quantized}, dtype=target_dtype)
    fill(hf_model, plan, source, mesh, allow_unused=allow_unused_weights)
    hf_model.tie_weights()
    finish_sharding(hf_model, plan, mesh)
    hf_model.meshlora = manage.Runtime(plan, mesh, None if isinstance(model, PretrainedConfig) else str(model))
    replace_dropouts(hf_model, plan.model_type, hf_model.meshlora.dropout)
    guard_model(hf_model, topology)
    compare_first_tokens(hf_model, mesh.tp)
    if lora is not None:
        manage.add_adapter(hf_model, "default", lora, seed=seed)
    if adapter is not None:
        peft_format.load_adapter(hf_model, adapter, ignore_dropout=ignore_lora_dropout)
    manage.set_adapter(hf_model, "default" if hf_model.meshlora.adapters else None)
    return hf_model


def read_model_config(model: str | Path | PretrainedConfig, *, trust_remote_code: bool = False) -> PretrainedConfig:
    """The configuration of a local checkpoint; never asks a hub.

    Raises:
        UserError: no such folder, no config.json, an adapter beside it, numbers that no model has, or a model type that
            transformers does not know.
    """
    if isinstance(model, PretrainedConfig):
        return model
    folder = Path(model)
    if not folder.is_dir():
        raise UserError(
            f"model {str(model)!r}", "there is no such folder", "download it first: hf download NAME --local-dir FOLDER"
        )
    if (folder / peft_format.CONFIG_FILE).exists():
        raise UserError(
            f"model {folder}",
            f"it holds {peft_format.CONFIG_FILE}, by which transformers would load another base, with that adapter",
            "give the base model's own folder, and the adapter one of its own",
        )
    if not (folder / "config.json").is_file():
        raise UserError(f"model {folder}", "it holds no config.json", "it should be the folder of one checkpoint")
    file = folder / "config.json"
    stored = read_json(file, most_bytes=_CONFIG_BYTES)
    if not isinstance(stored, dict):
        raise UserError(f"{file}", "it must be a JSON object, as transformers writes it")
    model_type = stored.get("model_type")
    if model_type is not None and not isinstance(model_type, str):
        raise UserError(f"{file}: model_type {model_type!r}", "it must be text")
    if model_type is not None and model_type not in CONFIG_MAPPING and "auto_map" not in stored:
        raise UserError(
            f"{file}: model_type {model_type!r}",
            f"transformers {transformers.__version__} has no such family",
            did_you_mean(model_type, CONFIG_MAPPING),
        )
    check_numbers(stored, f"{file}", num_tensors=lambda: num_stored(folder))
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)
    except Exception as error:  # each family checks its own fields, with exceptions of every kind
        raise UserError(f"{file}", f"transformers refuses it ({reason(error)})") from error
    if getattr(config, "quantization_config", None):
        raise UnsupportedError(f"model {folder}", "quantised checkpoints are not supported yet")
    return config


def build_meta(
    config: PretrainedConfig,
    topology: Topology,
    *,
    dtype: torch.dtype,
    attn_implementation: str | None = None,
    disable_dropout: bool | Literal["unsupported"] = False,
    trust_remote_code: bool = False,
    quantization: str | None = None,
) -> tuple[Any, ModelPlan]:
    """The model on the meta device and its plan: all that can be known, and refused, before any weight is read."""
    handle_dropout(config, disable=disable_dropout)
    model = build_on_meta(
        config, dtype=dtype, attn_implementation=attn_implementation, trust_remote_code=trust_remote_code
    )
    if dtype == torch.float64:
        for parameter in model.parameters():  # the routers of some families are float32 whatever is asked for
            parameter.data = parameter.data.to(dtype)
    wide = kept_wide(model, dtype)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name in wide:
            tensor.data = tensor.data.float()
    check_dropouts(model)
    plan = with_quantization(plan_model(model, topology), quantization)
    check_library(quantization)
    check_units(model, plan)
    return model, plan


def resolve_dtype(dtype: str | torch.dtype | None, config: PretrainedConfig) -> torch.dtype:
    """The dtype of the base.

    Raises:
        UserError: one that is not in `DTYPES`, here or in `config`.
    """
    way_out = ""
    if dtype is None or dtype == "auto":
        dtype, way_out = config.dtype or torch.float32, "config.json says so: give a dtype"
    if isinstance(dtype, torch.dtype):
        dtype = str(dtype).removeprefix("torch.")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise UserError(f"dtype {dtype!r}", f"it must be one of auto, {', '.join(DTYPES)}", way_out)
    return DTYPES[dtype]


def _random_weights(config: PretrainedConfig, dtype: torch.dtype, seed: int) -> dict[str, torch.Tensor]:
    """The state of a freshly initialised model: the same on every rank and topology."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return dict(AutoModelForCausalLM.from_config(config, dtype=dtype).state_dict())

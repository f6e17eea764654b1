"""The blueprint: everything known about a model, its split and its adapter before any weight is read.

Owns: `Blueprint` and `make_blueprint`, which refuses what is not supported; reading a model's configuration; building
the model on the meta device, once, aborted if it asks for more than its checkpoint can hold. Does not own: weights and
processes (`loading.load`), data (`run.prepare`).
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import LoraConfig
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig

from meshlora.adapter.formats.peft_format import CONFIG_FILE, plan_folder, read_factors
from meshlora.adapter.plan import AdapterPlan, plan_adapter, with_trained_head
from meshlora.feature import features
from meshlora.model.dp_shard import check_units
from meshlora.model.stored import num_stored, stored_dtype
from meshlora.model.weights import CheckpointSource, check_checkpoint, extra_weights, has_own_head, kept_wide
from meshlora.plan.base_options import BaseOptions
from meshlora.plan.derive import plan_model
from meshlora.plan.features import Asked
from meshlora.plan.numbers import check_numbers
from meshlora.plan.own_dropouts import check_dropouts, dropout_fields, handle_dropout
from meshlora.plan.pairs import check
from meshlora.plan.rules import ModelPlan, Packing
from meshlora_ground.errors import UserError, did_you_mean, reason
from meshlora_ground.files import read_json
from meshlora_ground.limits import OutOfTimeError, time_limit
from meshlora_ground.model_class import family_of, model_class, take_quantization
from meshlora_ground.objective import TEXT, Objective
from meshlora_ground.reading import no_such_folder
from meshlora_ground.tasks import CAUSAL
from meshlora_ground.topology import Topology
from meshlora_ground.weight_files import check_one_model

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Limit: transformers copies all of it a dozen times.
_CONFIG_BYTES = 2**19
_BUILD_S = 120
# Parameters allowed without a look at the checkpoint (each takes about a millisecond), and without any checkpoint.
_UNASKED, _MOST = 2_000, 300_000
_CHECK = "are its numbers of layers and experts right?"


@dataclass(frozen=True, eq=False)
class Blueprint:
    """A model on a topology, with or without an adapter.

    Attributes:
        source: folder of the checkpoint; None: only a configuration, with random weights.
        config: as read. model: on the meta device, not split; never modified.
        dtype: of the base. plan: the split. adapter: what is trained.
        reference: the frozen adapter that it is compared with; None: with the base, or with nothing.
        notes: messages for the user.
        packing: the `quantization_config` of the checkpoint; None if it is in plain numbers.
        kept: parameter -> how it stays packed in memory. objective: which decides of the model's head.
    """

    source: Path | None
    options: BaseOptions
    config: PretrainedConfig
    dtype: torch.dtype
    model: Any
    plan: ModelPlan
    adapter: AdapterPlan | None = None
    reference: AdapterPlan | None = None
    notes: tuple[str, ...] = ()
    packing: Mapping[str, Any] | None = None
    kept: Mapping[str, Packing] = field(default_factory=dict)
    objective: Objective = TEXT

    @property
    def topology(self) -> Topology:
        """The topology of the plan."""
        return self.plan.topology

    @property
    def trained(self) -> AdapterPlan:
        """The adapter; asserts that there is one."""
        assert self.adapter is not None
        return self.adapter

    @property
    def asked(self) -> Asked:
        """What is asked for, as far as the base and its adapter say it: see `plan.features`."""
        asked = self.plan.asked
        if self.adapter is not None:
            asked = self.adapter.asked(self.plan)
        dropouts = [f"{name}={rate:g}" for name, rate in self.dropouts.items()]
        return {
            **asked,
            "train.objective": self.objective,
            "model.dtype": str(self.dtype).removeprefix("torch."),
            "model.attn_implementation": self.options.attn_implementation,
            "dropout": (dropouts or [""])[0],
        }

    @property
    def dropouts(self) -> dict[str, float]:
        """Field of the configuration -> rate, of the model's own dropouts that are on."""
        return dropout_fields(self.model.config)  # of which those to be off are 0

    @property
    def num_parameters(self) -> int:
        """Of base and adapter, as PEFT counts them."""
        return self.trained.num_trainable + sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def size(self) -> str:
        """How many parameters are trained, of how many there are."""
        trained, total = self.trained.num_trainable, self.num_parameters
        return f"{trained:,} of {total:,} parameters are trained ({trained / total:.2%})"

    @property
    def fresh(self) -> tuple[str, ...]:
        """Parameters of a new head, which the checkpoint may lack: those that are trained in full."""
        if self.adapter is None or self.objective.task == CAUSAL:
            return ()
        return self.adapter.copies

    def on(self, topology: Topology, *, has_stages: bool = True) -> Blueprint:
        """This blueprint on another topology. has_stages: see `plan_model`.

        Raises:
            UserError: the model cannot be split so. UnsupportedError: the split is not proved.
        """
        plan = _split(self.model, topology, self.options, self.kept, has_stages=has_stages)

        def planned(adapter: AdapterPlan | None) -> AdapterPlan | None:
            if adapter is None:
                return None
            is_fresh = adapter.folder is None  # a stored one may name targets that this model has not
            return plan_adapter(self.model, plan, adapter.config, strict=is_fresh, folder=adapter.folder)

        return dataclasses.replace(self, plan=plan, adapter=planned(self.adapter), reference=planned(self.reference))

    def with_adapter(self, config: LoraConfig) -> Blueprint:
        """This base with a fresh adapter.

        Raises:
            UserError: the configuration does not fit the model. UnsupportedError: an option that is not proved.
        """
        config = with_trained_head(config, self.model)
        return dataclasses.replace(self, adapter=plan_adapter(self.model, self.plan, config))

    def with_folder(self, folder: Path, *, ignore_dropout: bool = False) -> Blueprint:
        """This base with the PEFT adapter in `folder`. Every tensor is checked.

        Raises:
            UserError: files are missing or damaged, or of another model. UnsupportedError: an option not proved.
        """
        adapter = plan_folder(self.model, self.plan, folder, ignore_dropout=ignore_dropout)
        read_factors(adapter, self.plan)  # and forget them: all that can be refused is refused now
        return dataclasses.replace(self, adapter=adapter)

    def with_reference(self, folder: str | None) -> Blueprint:
        """This base with the PEFT adapter in `folder` as the policy that the trained one is compared with; None: with
        the base itself.

        Raises:
            UserError: as of `with_folder`. UnsupportedError: one of the two adapters has changed the base.
        """
        if folder is not None and not Path(folder).is_dir():
            way_out = "give start, base or the folder of an adapter"
            raise UserError(f"train.objective.reference={folder}", "there is no such folder", way_out)
        reference = None
        if folder is not None:
            reference = self.with_folder(Path(folder), ignore_dropout=True).trained
        for adapter in (self.adapter, reference):
            if adapter is not None and self.objective.needs_base:  # PiSSA and OLoRA change it
                init = adapter.config.init_lora_weights
                check({"train.objective": self.objective, "init_lora_weights": init})
        return dataclasses.replace(self, reference=reference)

    @property
    def stored_config(self) -> PretrainedConfig:
        """A copy of the configuration as it is stored, `quantization_config` included."""
        config = copy.deepcopy(self.config)
        if self.packing:
            config.quantization_config = self.packing  # as transformers puts it there
        return config

    def check_weights(self) -> str:
        """Check that the checkpoint holds every weight of the model, in its shape; returns which others it holds.

        Raises:
            UserError: one is missing, of another shape, or unused.
        """
        source = self.weights()
        check_checkpoint(self.model, source, allow_unused=self.options.allow_unused_weights, fresh=self.fresh)
        return extra_weights(self.model, source)

    def weights(self) -> CheckpointSource:
        """The weights of the checkpoint; none is read yet."""
        assert self.source is not None
        return CheckpointSource(self.source, self.model, self.packing)


def make_blueprint(
    model: str | Path | PretrainedConfig, topology: Topology, options: BaseOptions, objective: Objective = TEXT
) -> Blueprint:
    """The blueprint of a base: `make_blueprint("folder", Topology(tp=2), BaseOptions(dtype="bfloat16"))`.

    objective: what it is trained for, or used.

    Raises:
        UserError: a wrong folder, option or topology. UnsupportedError: anything not proved to be exact.
    """
    config = copy.deepcopy(read_model_config(model, trust_remote_code=options.trust_remote_code))
    packing = take_quantization(config)  # the model itself is one of plain numbers
    objective.configure(config)  # before the build: it decides of the head
    dtype = resolve_dtype(options.dtype, config)
    for feature in features():
        feature.configure(config, options)
    built = _build(copy.deepcopy(config), dtype, options)  # which sets dropouts to 0
    source = None if isinstance(model, PretrainedConfig) else Path(model)
    kept: dict[str, Packing] = {}
    for feature in features():
        kept |= feature.kept_packed(source, built, packing, options.quantization)
    plan = _split(built, topology, options, kept)
    return Blueprint(source, options, config, dtype, built, plan, packing=packing, kept=kept, objective=objective)


def _split(
    model: Any, topology: Topology, options: BaseOptions, kept: Mapping[str, Packing], *, has_stages: bool = True
) -> ModelPlan:
    plan = plan_model(model, topology, has_stages=has_stages)
    for feature in features():
        plan = feature.with_quantization(plan, options.quantization, kept)
        plan = feature.with_compute(plan, options.compute)
    check_units(model, plan)
    return plan


def _build(config: PretrainedConfig, dtype: torch.dtype, options: BaseOptions) -> Any:
    """The model of `config` on the meta device. Takes ownership of `config`."""
    handle_dropout(config, disable=options.disable_dropout)
    attention, trust = options.attn_implementation, options.trust_remote_code
    model = build_on_meta(config, dtype=dtype, attn_implementation=attention, trust_remote_code=trust)
    if dtype == torch.float64:
        for parameter in model.parameters():  # routers of some families ignore `dtype` and are float32
            parameter.data = parameter.data.to(dtype)
    wide = kept_wide(model, dtype)  # known only once the model is built
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name in wide:
            tensor.data = tensor.data.float()
    check_dropouts(model)
    return model


def read_model_config(model: str | Path | PretrainedConfig, *, trust_remote_code: bool = False) -> PretrainedConfig:
    """The configuration of a local checkpoint, its `quantization_config` included; never contacts a hub.

    Raises:
        UserError: no such folder, no config.json, an adapter or a second model beside it, absurd sizes, or a model type
            unknown to transformers.
    """
    if isinstance(model, PretrainedConfig):
        return model
    folder = Path(model)
    if not folder.is_dir():
        raise no_such_folder(model)
    if (folder / CONFIG_FILE).exists():
        rule = f"it holds {CONFIG_FILE}, by which transformers would load another base, with that adapter"
        raise UserError(f"model {folder}", rule, "give the base model's own folder, and the adapter one of its own")
    if not (folder / "config.json").is_file():
        raise UserError(f"model {folder}", "it holds no config.json", "it should be the folder of one checkpoint")
    file = folder / "config.json"
    stored = read_json(file, most_bytes=_CONFIG_BYTES)
    if not isinstance(stored, dict):
        raise UserError(f"{file}", "it must be a JSON object, as transformers writes it")
    check_one_model(folder)
    model_type = stored.get("model_type")
    if model_type is not None and not isinstance(model_type, str):
        raise UserError(f"{file}: model_type {model_type!r}", "it must be text")
    if model_type is not None and model_type not in CONFIG_MAPPING and not (trust_remote_code and "auto_map" in stored):
        rule, way_out = f"transformers {transformers.__version__} has no such family", ""
        if known := family_of(stored.get("architectures")):  # of kimi_k2, as transformers reads it inside kimi_k25
            way_out = f"it names the model of {known}: write model_type {known!r} there"
            way_out += ", and leave out auto_map" if "auto_map" in stored else ""
        elif "auto_map" in stored:
            rule, way_out = f"{rule}, and its own code is not trusted", "set trust_remote_code if you trust that code"
        way_out = way_out or did_you_mean(model_type, CONFIG_MAPPING)
        raise UserError(f"{file}: model_type {model_type!r}", rule, way_out)
    check_numbers(stored, f"{file}", num_tensors=lambda: num_stored(folder))
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)
        config.get_text_config()  # there may be several, as musicgen has
    except Exception as error:  # each family checks its own fields, with errors of all kinds
        raise UserError(f"{file}", f"transformers refuses it ({reason(error)})") from error
    _complete(config, folder)
    if packing := take_quantization(config):
        for feature in features():
            feature.check_stored_quantization(packing, model_type, f"{file}")
        config.quantization_config = packing
    return config


def _complete(config: PretrainedConfig, folder: Path) -> None:
    """What transformers takes from the files of a checkpoint: the dtype where config.json has none; whether a head that
    it would tie is stored with values of its own.
    """
    if config.dtype is None:
        config.dtype = stored_dtype(folder) or config.get_text_config().dtype
    tied = [part for part in (config, config.get_text_config()) if getattr(part, "tie_word_embeddings", False)]
    if tied and has_own_head(folder):
        for part in tied:
            part.tie_word_embeddings = False


def resolve_dtype(dtype: Any, config: PretrainedConfig) -> torch.dtype:
    """The dtype of the base: a `torch.dtype` or its name; None or "auto": that of `config`.

    Raises:
        UserError: it is not in `DTYPES`.
    """
    way_out = ""
    if dtype is None or dtype == "auto":
        dtype, way_out = config.dtype or torch.float32, "config.json says so: give a dtype"
    if isinstance(dtype, torch.dtype):
        dtype = str(dtype).removeprefix("torch.")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise UserError(f"dtype {dtype!r}", f"it must be one of auto, {', '.join(DTYPES)}", way_out)
    return DTYPES[dtype]


def build_on_meta(config: PretrainedConfig, **options: Any) -> Any:
    """`model_class(config).from_config(config, **options)` on the meta device.

    Raises:
        UserError: transformers cannot build it, it takes too long, or it has far more parameters than the checkpoint
            that `config` was read from has tensors.
    """
    what = f"model_type {config.model_type!r}"
    try:
        with torch.device("meta"), _no_more_parameters_than_stored(config), time_limit(_BUILD_S):
            return model_class(config).from_config(config, **options)
    except UserError:
        raise
    except OutOfTimeError:
        raise UserError(what, f"its names and shapes alone take more than {_BUILD_S} s to build", _CHECK) from None
    except Exception as error:  # ImportError for an attention that is not installed, ZeroDivisionError for 0 heads
        way_out = ""
        if isinstance(error, ImportError) and options.get("attn_implementation") not in (None, "eager", "sdpa"):
            way_out = "use model.attn_implementation: sdpa, which is torch's own and fused, too"
        raise UserError(what, f"transformers cannot build it ({reason(error)})", way_out) from error


@contextlib.contextmanager
def _no_more_parameters_than_stored(config: PretrainedConfig) -> Iterator[None]:
    """Abort a build in the block that registers far more parameters than there are stored tensors.

    Every parameter is stored, some under two names; merging on load makes them fewer.
    """
    num_parameters, most = 0, _UNASKED

    def count(*_: Any) -> None:
        nonlocal num_parameters, most
        num_parameters += 1
        if num_parameters == _UNASKED:  # small models are built without a look at their files
            most = _MOST
            if config.name_or_path and (stored := num_stored(Path(config.name_or_path))):
                most = 4 * stored + _UNASKED
        if num_parameters > most:
            what = f"model_type {config.model_type!r} with the sizes of its configuration"
            raise UserError(what, f"it has more than {most:,} parameters to store", _CHECK)

    handle = register_module_parameter_registration_hook(count)
    try:
        yield
    finally:
        handle.remove()

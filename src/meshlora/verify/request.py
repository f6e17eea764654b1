"""The request of a proof, checked before any process starts.

Owns: its rules, the topologies of "auto", the targets of the default adapter. Does not own: its options
(`verify.options`), what is trained (`verify.case`), running it (`verify.proof`), the shapes of twins
(`meshlora_judge.twin`).
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import dataclasses
import functools
import itertools
import json
import math
import re
import shutil
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from transformers import PretrainedConfig

from meshlora.adapter.formats.peft_format import lora_config
from meshlora.comm.groups import on_gpus, sharing_note
from meshlora.loading.blueprint import Blueprint, make_blueprint, read_model_config, resolve_dtype
from meshlora.plan.base_options import BaseOptions
from meshlora.plan.features import Asked
from meshlora.plan.numbers import check_numbers
from meshlora.plan.own_dropouts import handle_dropout
from meshlora.plan.pairs import check
from meshlora.plan.rules import ModelPlan
from meshlora.run.optimizers import check_trainable
from meshlora.run.packing_check import check_packing
from meshlora.run.recompute import check_recompute, recompute_of
from meshlora.verify.case import aux_loss_coef, case_of, eva_words, in_peft_words
from meshlora.verify.faults.registry import find
from meshlora.verify.features import Feature, features_of_run
from meshlora.verify.options import DEFAULT_LORA, STEPS_OF_OTHERS, Request, same_fields
from meshlora.wings.experts.targets import with_whole_projections
from meshlora.wings.found.feature import FIELD, notes_of, plan_text, use_twins
from meshlora.wings.found.kept import text_of
from meshlora.wings.kernels.kernels import computed, with_kernels
from meshlora.wings.quantized.kinds import KEEP, STORED_TWINS, TWIN_BLOCKS, twin_block
from meshlora.wings.stages.cut import first_sharing_layer
from meshlora.wings.starts.eva import check_words
from meshlora_ground.compat.transformers_models import READ_FROM
from meshlora_ground.errors import UnsupportedError, UserError, did_you_mean, reason
from meshlora_ground.objectives.referenced import Referenced
from meshlora_ground.tasks import CAUSAL
from meshlora_ground.topology import SEQUENCES, Topology, divisors
from meshlora_judge.case import Case, batch_size_for, case_hash, file_fingerprint
from meshlora_judge.pieces import pieces_of, rows_of
from meshlora_judge.stored_twin import write_stored_twin
from meshlora_judge.twin import shrink_config, twin_config

_AUTO_PROCESSES = 4  # of "auto" without --nproc
_DTYPES = ("float64", "float32", "bfloat16")
# Linears that the default adapter excludes: those that get no gradient (attention to the encoder that a decoder alone
# has not), and those of state-space mixers that PEFT refuses, or whose weight the model reads.
_LEFT_OUT = re.compile(
    r"\.decoder\.layers\.\d+\.(encoder|cross)_attn\.|^(falcon_mamba|jamba|mamba)\..*\.dt_proj$"
    r"|^(falcon_h1|falcon_mamba|mamba|mamba2|nemotron_h)\..*\.out_proj$"
)


@dataclass(frozen=True)
class Proof:
    """A request that passed its checks.

    Attributes:
        config: of the model or its twin. plans: topology -> plan, in the order of the runs. case: without the folders
            of inputs yet to be generated. key: hash of everything that determines the reference. notes: for the user.
            found: the plan that was found for it, as YAML; "": a table has it. computed: what kernels compute on each.
    """

    request: Request
    config: PretrainedConfig
    plans: dict[Topology, ModelPlan]
    case: Case
    key: str
    notes: tuple[str, ...] = ()
    found: str = ""
    computed: Mapping[Topology, Collection[str]] = field(default_factory=dict)

    @property
    def topologies(self) -> list[Topology]:
        """The topologies, in the order of the runs."""
        return list(self.plans)

    @property
    def is_twin(self) -> bool:
        """Whether the weights are random, generated for this proof."""
        return not self.case.model

    def mutations_on(self, topology: Topology) -> list[str]:
        """The requested mutations that can show on `topology` with this model and adapter."""
        has = self.features_on(topology)
        return [name for name in self.request.mutations if find(name).needs <= has]

    def features_on(self, topology: Topology) -> set[Feature]:
        """The features of a run on `topology`."""
        plan, kernels = self.plans[topology], self.computed.get(topology, ())
        return features_of_run(self.case, plan, self.config, adapters=self.request.adapters, computed=kernels)


def prepare_proof(request: Request) -> Proof:
    """Check all that can be refused before a process starts. Raises: UserError: the request, or a topology, is bad."""
    _check(request)
    given = _topologies(request)
    use_twins(functools.partial(shrink_config, tp=2))
    largest_tp = max((t.tp for t in given), default=request.nproc or _AUTO_PROCESSES)
    stages = max((t.num_stages for t in given), default=1)
    if request.quantization in STORED_TWINS:
        request = _on_stored_twin(request, tp=largest_tp, stages=stages)
    config, is_twin = _config(request, tp=largest_tp, stages=stages)
    dtype = _dtype(request, config)
    if request.packing:
        check_packing(
            config, attn_implementation=request.attn_implementation, trust_remote_code=request.trust_remote_code
        )
    if request.plan is not None:
        setattr(config, FIELD, text_of(Path(request.plan)))  # in the twin's own file, for its ranks
    blueprints = _blueprints(request, config, given)
    plans, first = {topology: one.plan for topology, one in blueprints.items()}, next(iter(blueprints.values()))
    lora = _in_full(first.trained.config, first.trained.targets, first.plan)
    pieces = getattr(lora, "pieces", None) or {}
    for name, rule in first.plan.linears.items():
        for piece in pieces_of(name, pieces):  # refuse early what the judge does not know
            rows_of(config, name, piece, rule.out_features)
    # The same for all: the reference is on it too.
    device = _device(request.device, max(t.world for t in plans), request.ranks_per_gpu)
    model = "" if is_twin else str(request.model)
    where = {"proof.dtype": dtype, "proof.device": device, "proof.model": model}
    for blueprint in blueprints.values():
        check({**blueprint.asked, **_asked(request), **where})
    words = in_peft_words(request.lora, lora, plans)
    case = dataclasses.replace(
        case_of(request, config, first.plan, batch_size_for(max(t.dp for t in plans)), tokens=first.trained.tokens),
        model=model,
        dtype=dtype,
        router_aux_loss_coef=aux_loss_coef(request, config, plans),
        device=device,
        lora=words,
        reference=_reference(request, plans, words),
        eva=eva_words(words, lora),
        pieces=pieces,
        share_experts=bool(getattr(lora, "share_experts", False)),
    )
    if is_twin:
        values = config.to_dict()
        values.pop(READ_FROM, None)  # a folder: the same configuration elsewhere is the same
        files, notes = [json.dumps(values, sort_keys=True, default=str)], []
    else:  # after all refusals: gigabytes may be read
        options = dataclasses.replace(first.options, allow_unused_weights=True)  # as transformers has it
        # Which weights of the checkpoint both sides pass over; that it lacks some is an error.
        said = dataclasses.replace(first, source=Path(model), options=options).check_weights()
        files, notes = file_fingerprint(Path(model)), [said] if said else []
    if case.routed:
        notes.append("each token goes to the experts that its rollout says")
    notes += notes_of(first.model)
    if request.ranks_per_gpu > 1:
        notes.append(sharing_note(request.ranks_per_gpu))
    key, by_kernels = case_hash(case, inputs=files), {topology: computed(one) for topology, one in blueprints.items()}
    return Proof(request, config, plans, case, key, tuple(notes), plan_text(first.model), by_kernels)


def _dtype(request: Request, config: PretrainedConfig) -> str:
    dtype = str(resolve_dtype(request.dtype, config)).removeprefix("torch.")
    if dtype not in _DTYPES:
        raise UserError(f"--dtype {request.dtype}", f"it must be one of {', '.join(_DTYPES)}", "float64 is sharpest")
    return dtype


def _on_stored_twin(request: Request, *, tp: int, stages: int) -> Request:
    """`request` on a folder with its twin in a published format, of which the base stays as it is stored."""
    kind = str(request.quantization)
    config, is_twin = _config(request, tp=tp, stages=stages)
    if not is_twin:
        rule = "only twins are rounded to it: a checkpoint that is stored so is kept"
        raise UserError(f"--quantization {kind} of a checkpoint", rule, "use --quantization keep")
    temporary = tempfile.mkdtemp(prefix="meshlora-")
    atexit.register(shutil.rmtree, temporary, ignore_errors=True)
    folder = Path(temporary) / f"twin of {config.model_type} in {kind}"
    write_stored_twin(config, folder, kind, dtype=torch.float32)
    return dataclasses.replace(
        request, model=str(folder), family=None, twin=False, overrides={}, plan=None, quantization=KEEP
    )


def _reference(request: Request, plans: dict[Topology, ModelPlan], words: dict[str, Any]) -> dict[str, Any] | None:
    """The configuration of the frozen adapter that the objective compares with, in PEFT's words; words: of the trained
    one. None: it compares with the base, or with nothing.

    Raises:
        UnsupportedError: it has an option that only the trained one is proved with.
    """
    objective = request.objective
    if not isinstance(objective, Referenced) or not objective.needs_base or objective.reference == "base":
        return None
    if request.reference is None:
        return words
    lora = lora_config(request.reference, "reference", unknown_is_error=True)
    for name in ("pieces", "share_experts"):
        if getattr(lora, name, None):
            check({"door": "meshlora verify", "parts of a reference": name})
    plan = next(iter(plans.values()))
    targets = lora.target_modules
    if not isinstance(targets, set | list):
        targets = ()  # a pattern, or all
    return in_peft_words(request.reference, _in_full(lora, targets, plan), plans)


def _blueprints(request: Request, config: PretrainedConfig, given: list[Topology]) -> dict[Topology, Blueprint]:
    """Topology -> blueprint with the adapter, in the order of the runs."""
    options = BaseOptions(**same_fields(BaseOptions, request), disable_dropout="unsupported")
    # Of a checkpoint in few bits the files say which weights are.
    model = request.model if request.quantization == KEEP and request.model is not None else config
    base = make_blueprint(model, (given or [Topology()])[0], options, request.objective)
    base, _ = with_kernels(base, device=request.device, is_proved=True)
    if request.recompute:
        check_recompute(base.model, recompute_of(request.recompute))
    check_words(request.lora)
    lora = lora_config(request.lora, "lora", unknown_is_error=True)
    if request.lora == DEFAULT_LORA:
        lora = default_adapter(lora, base.plan, dropout=request.default_dropout)
    found = {topology: base.on(topology).with_adapter(lora) for topology in given}
    check_trainable(request.optimizer, base.with_adapter(lora).trained, base.plan)
    if "auto" in [text.strip() for text in request.topologies]:
        # First on one process: a refusal there is the reason for all.
        has_experts = bool(base.on(Topology()).with_adapter(lora).plan.experts)
        for topology in _every_topology(request.nproc or _AUTO_PROCESSES, has_experts=has_experts):
            with contextlib.suppress(UserError):
                found.setdefault(topology, base.on(topology).with_adapter(lora))
    return found


def default_adapter(lora: LoraConfig, plan: ModelPlan, *, dropout: float = 0.0) -> LoraConfig:
    """The default adapter `lora`, with experts if the model has any, else with dropout: PEFT has none for experts."""
    left_out = [name for name in plan.linears if _LEFT_OUT.search(f"{plan.model_type}.{name}")]
    if plan.task == "FEATURE_EXTRACTION" and not plan.projections:
        # Embeddings are of hidden states: a pooler gets no gradient.
        left_out += [name for name in plan.linears if "pooler" in name]
    if plan.projections:
        return dataclasses.replace(lora, target_parameters=list(plan.projections), exclude_modules=left_out or None)
    if plan.encoder:
        dropout = 0.0
    return dataclasses.replace(lora, lora_dropout=dropout, exclude_modules=left_out or None)


def _every_topology(processes: int, *, has_experts: bool) -> list[Topology]:
    """All topologies of more than one process whose number divides `processes`, small ones first.

    has_experts: each also with experts split over ep, etp and both, by the smallest possible size: more ranks on these
    axes show nothing new.
    """
    found = []
    for world in divisors(processes)[1:]:
        parts = divisors(world)[1]
        splits = [(1, 1, False)]
        if has_experts:
            splits += [(parts, 1, False), (1, parts, False)]
        if has_experts and world % parts**2 == 0:
            splits += [(parts, parts, False), (parts, parts, True)]
        for tp, sp in itertools.product(divisors(world), (False, True)):
            if sp and tp == 1:
                continue
            dense = Topology(dp=world // tp, tp=tp, sp=sp)
            found += [dataclasses.replace(dense, ep=ep, etp=etp, two_stage=way) for ep, etp, way in splits]
    return found or [Topology()]


def _in_full(lora: LoraConfig, targets: Collection[str], plan: ModelPlan) -> LoraConfig:
    """An adapter on parameters, or on a composite's text part, with all targets spelled out, as PEFT takes them."""
    if not lora.target_parameters and not plan.text:
        return lora
    found = copy.copy(with_whole_projections(lora, plan))
    ends = tuple(f".{end}" for end in found.target_parameters or ())
    experts, weights, modules = [], [], []
    for name in targets:
        weight = f"{name}.weight"
        is_expert, is_parameter = name in plan.projections, f".{weight}".endswith(ends)
        if is_expert:
            experts.append(name)
        if is_parameter:  # a linear of PEFT's target_parameters, by its end as in PEFT
            weights.append(weight)
        if not (is_expert or is_parameter):
            modules.append(name)
    found.target_parameters, found.target_modules = [*experts, *weights] or None, modules
    return found


def _check(request: Request) -> None:
    """Refuse what is wrong whatever the model."""
    if request.steps < 1:
        raise UserError(f"--steps {request.steps}", "at least 1 optimizer step is needed")
    if request.micro_batch_size < 1:
        raise UserError(f"--micro-batch-size {request.micro_batch_size}", "at least 1 sequence is computed at once")
    if not 0 <= request.neftune_alpha < math.inf:
        raise UserError(f"--neftune-alpha {request.neftune_alpha}", "it must be a number that is not negative")
    if request.adapters < 1:
        raise UserError(f"--adapters {request.adapters}", "at least 1 adapter is trained")
    if request.schedule != "linear" and request.steps < STEPS_OF_OTHERS:
        rule = f"it takes {STEPS_OF_OTHERS} steps to tell it from a line"
        raise UserError(f"--schedule {request.schedule} with --steps {request.steps}", rule, "leave out --steps")
    if request.resume and request.steps < 2:
        raise UserError(f"--resume with --steps {request.steps}", "a step is needed before it and one after it")
    if request.nproc is not None and request.nproc < 1:
        raise UserError(f"--nproc {request.nproc}", "at least 1 process is needed")
    check(_asked(request))
    for name in request.mutations:
        find(name)


def _asked(request: Request) -> Asked:
    """What is asked for, as far as the request says it: see `plan.features`."""
    names = ("objective", "optimizer", "schedule", "neftune_alpha", "lora_plus_ratio")
    return {
        # A run of several adapters has none, and their proof may have it.
        "train.router_aux_loss_coef": request.router_aux_loss_coef if request.adapters == 1 else None,
        **{f"train.{name}": getattr(request, name) for name in names},
        "train.recompute": recompute_of(request.recompute),
        "data.packing": bool(request.packing),
        "model.attn_implementation": request.attn_implementation,
        "adapters": request.adapters,
        "resumes": request.resume,
        "images": request.images,
        "door": "meshlora verify",
    }


def _topologies(request: Request) -> list[Topology]:
    """The topologies spelled out in the request, without "auto"."""
    found = []
    for text in request.topologies:
        if text.strip() == "auto":
            continue
        axes, world = {part.partition("=")[0].strip() for part in text.split(",")}, request.nproc
        if axes & SEQUENCES:
            world = None  # dp is said: it need not take all processes
        topology = Topology.parse(text, world=world)
        if request.nproc is not None and topology.world > request.nproc:
            raise UserError(f"topology {topology}", f"it needs {topology.world} processes, --nproc is {request.nproc}")
        found.append(topology)
    return list(dict.fromkeys(found))


def _config(request: Request, *, tp: int, stages: int) -> tuple[PretrainedConfig, bool]:
    """(configuration to run, whether its weights are random). stages: of layers, each of which needs one of a twin."""
    if request.plan is not None and request.family is None and not request.twin:
        way_out = "add --twin; for a run, model.plan of its file"
        raise UserError("--plan with --model", "the plan is proved on a twin, whose configuration has it", way_out)
    if (request.model is None) == (request.family is None):
        given = "neither" if request.model is None else "both"
        raise UserError(f"{given} of --model and --family", "a proof is about one model", "give one of them")
    block = twin_block(request.quantization, request.compute, tp)
    if request.quantization == KEEP and (request.family is not None or request.twin):
        given, way_out = "--quantization keep of a twin", f"use one of {', '.join(TWIN_BLOCKS)}"
        raise UserError(given, "its weights are random, and not stored in few bits", way_out)
    if request.family is not None:
        if request.twin:
            raise UserError("--twin with --family", "a family is always run as its twin", "leave out --twin")
        twin = _twin(request.family, tp, request.overrides, block=block)
        if (layers := _layers_for(twin, stages)) is not None:
            twin = _twin(request.family, tp, request.overrides, block=block, layers=layers)
        config = with_biases(twin, given=request.overrides)
    else:
        assert request.model is not None
        config = read_model_config(request.model, trust_remote_code=request.trust_remote_code)
        if request.overrides:
            raise UserError("--set with --model", "the configuration of a checkpoint is what it is", "use --family")
        if request.twin:
            twin = shrink_config(config, tp=tp, block=block, least=stages)
            layers = _layers_for(twin, stages) or stages
            config = shrink_config(config, tp=tp, block=block, least=layers) if layers > stages else twin
        elif isinstance(request.model, PretrainedConfig):
            config = copy.deepcopy(config)  # the caller's own
        else:
            handle_dropout(config, disable="unsupported")
            return config, False
    handle_dropout(config, disable=False)  # a twin keeps the dropout it was given
    if request.objective.task != CAUSAL:
        request.objective.configure(config)
        text = config.get_text_config()
        if request.family is not None and getattr(text, "is_decoder", False):
            text.is_decoder = False
        if not isinstance(text.pad_token_id, int):
            text.pad_token_id = 0  # a model of another task must know it
    return config, True


def _layers_for(twin: PretrainedConfig, stages: int) -> int | None:
    """So many layers does a twin need for `stages`, if it has fewer: one for each, and those of the last together."""
    number = getattr(twin.get_text_config(decoder=True), "num_hidden_layers", stages)
    last = first_sharing_layer(twin)
    needed = stages if last is None else number + stages - 1 - last
    return needed if needed > number else None


def _twin(
    family: str, tp: int, overrides: dict[str, Any], *, block: int, layers: int | None = None
) -> PretrainedConfig:
    """The twin of a family. layers: their number, if not as many as by itself.

    Raises:
        UserError: unknown family, or an override that is no field of its configuration.
    """
    check_numbers(overrides, "--set")
    try:
        config = twin_config(family, tp=tp, block=block)
        for name in overrides:
            if not hasattr(config, name):
                raise UserError(f"--set {name}", f"{family} has no such field", did_you_mean(name, config.to_dict()))
        if layers is not None:
            overrides = {"num_hidden_layers": layers, **overrides}
        return twin_config(family, tp=tp, block=block, **overrides) if overrides else config
    except UserError:
        raise
    except Exception as error:  # families validate their fields with arbitrary exceptions
        raise UnsupportedError(f"model_type {family!r}", f"no twin of it can be built ({reason(error)})") from error


def with_biases(config: PretrainedConfig, given: Collection[str] = ()) -> PretrainedConfig:
    """Enable the optional biases of a family: without one, a fault in adding it could not show."""
    for name in ("attention_bias", "mlp_bias"):
        if getattr(config, name, None) is False and name not in given:
            setattr(config, name, True)
    return config


def _device(wanted: str, ranks: int, ranks_per_gpu: int) -> str:
    """Where to prove. Of "auto" the GPUs if they are enough; with ranks that share them they must be."""
    if (
        wanted == "auto"
        and ranks_per_gpu == 1
        and not (torch.cuda.is_available() and torch.cuda.device_count() >= ranks)
    ):
        wanted = "cpu"
    return "cuda" if on_gpus(wanted, num_ranks=ranks, ranks_per_gpu=ranks_per_gpu) else "cpu"

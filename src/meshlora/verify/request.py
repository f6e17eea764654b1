"""The request of a proof, checked before any process starts.

Owns: its rules, the topologies of "auto", the targets of the default adapter, and the sequences: random tokens, or a
user's text. Does not own: running it (`verify.proof`), the shapes of twins (`meshlora_judge.twin`).
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import itertools
import json
import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from peft import LoraConfig
from transformers import PretrainedConfig

from meshlora.adapter.formats.peft_format import lora_config
from meshlora.adapter.initialization import start_of
from meshlora.comm.groups import on_gpus, sharing_note
from meshlora.loading.blueprint import Blueprint, make_blueprint, read_model_config, resolve_dtype
from meshlora.plan.base_options import BaseOptions
from meshlora.plan.features import Asked
from meshlora.plan.numbers import check_numbers
from meshlora.plan.own_dropouts import dropout_fields, handle_dropout
from meshlora.plan.pairs import check
from meshlora.plan.rules import ModelPlan
from meshlora.reading.processor import load_processor
from meshlora.reading.sources import read_records
from meshlora.reading.tokenization import tokenize
from meshlora.reading.tokenizer import load_tokenizer, padding_token_id
from meshlora.run.config.model_presets import num_chosen
from meshlora.run.config.run_file import Schedule
from meshlora.run.optimizers import check_trainable
from meshlora.run.packing_check import check_packing
from meshlora.run.recompute import check_recompute, recompute_of
from meshlora.verify.faults.registry import find
from meshlora.verify.features import Feature, features_of_run
from meshlora.wings.experts.targets import with_whole_projections
from meshlora.wings.found.feature import FIELD, notes_of, plan_text, use_twins
from meshlora.wings.found.kept import text_of
from meshlora.wings.kernels.kernels import with_kernels
from meshlora.wings.quantized.kinds import KEEP, TWIN_BLOCKS, twin_block
from meshlora.wings.stages.cut import first_sharing_layer
from meshlora.wings.starts.eva import check_words
from meshlora_ground.compat.transformers_models import READ_FROM
from meshlora_ground.dataset import TokenizedDataset
from meshlora_ground.errors import UnsupportedError, UserError, did_you_mean, reason
from meshlora_ground.objective import Objective, Sft
from meshlora_ground.objectives.referenced import Referenced
from meshlora_ground.proof_records import CACHE
from meshlora_ground.tasks import CAUSAL
from meshlora_ground.topology import SEQUENCES, Topology, divisors
from meshlora_judge.case import (
    Case,
    as_pairs,
    as_similar,
    batch_size_for,
    case_hash,
    check_tokens,
    distinct_sequences,
    file_fingerprint,
    num_sequences_for,
    random_tokens,
    with_context,
    with_feedback,
    with_labels,
    with_margins,
    with_rollouts,
    with_routed,
    with_teacher,
    with_tokens,
)
from meshlora_judge.images import with_images
from meshlora_judge.invoked import check_invocations, with_invocations
from meshlora_judge.objectives import has_load_balancing
from meshlora_judge.pieces import pieces_of, rows_of
from meshlora_judge.twin import shrink_config, twin_config

DEFAULT_LORA: dict[str, Any] = {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"}
DROPOUT = 0.12  # the default of the command
SEED = 3  # not 0, the default of a run
_AUTO_PROCESSES = 4  # of "auto" without --nproc
_MAX_LENGTH, _MAX_LENGTH_WITH_IMAGES = 128, 2048  # tokens of a sequence of the user's
_CHOICE = 2  # records that are read, for each that is needed: some may be equal, or have nothing trained
_AUX_LOSS_COEF = 0.1  # large enough for a wrong one to show
_MIN_8BIT_SIZE = 600  # of a twin's factors some are below it, and some above
_STEPS_OF_OTHERS = 4  # than linear schedules: in three a cosine and a line meet half-way
_DTYPES = ("float64", "float32", "bfloat16")
# Sequences of a record, by the reader of its objective; of the others 1.
_ROWS = {"pairs": 2, "margins": 2, "feedback": 2, "similar": 3}
_ANSWERS = (
    "pairs",
    "margins",
    "feedback",
    "rollouts",
    "rewarded",
)  # whose records are a prompt and an answer, of a token each
# Linears that the default adapter excludes: those that get no gradient (attention to the encoder that a decoder alone
# has not), and those of state-space mixers that PEFT refuses, or whose weight the model reads.
_LEFT_OUT = re.compile(
    r"\.decoder\.layers\.\d+\.(encoder|cross)_attn\.|^(falcon_mamba|jamba|mamba)\..*\.dt_proj$"
    r"|^(falcon_h1|falcon_mamba|mamba|mamba2|nemotron_h)\..*\.out_proj$"
)


@dataclass(frozen=True)
class Request:
    """What to prove.

    Attributes:
        model: folder of a checkpoint, or a configuration to run with random weights. family: a `model_type` instead.
        twin: shrink the model's configuration instead of reading its weights.
        topologies: as text; "auto" is every one that the model and the number of processes allow.
        lora: fields of `peft.LoraConfig`. default_dropout: lora_dropout of the default adapter, unless on experts.
        reference: fields of the frozen adapter that the objective compares with, unless it does with the base; None: as
            `lora`.
        dtype, steps, seed: of the run. micro_batch_size: sequences per micro-batch. objective, neftune_alpha,
            optimizer, lora_plus_ratio, lora_plus_embedding_lr, packing, quantization, compute: as in a run file.
            schedule and its options: too, for a peak of 0.01. recompute: of all layers,
            "keep_attention": but for their attention. resume: our side stops before its last step and resumes from its
            checkpoint. adapters: from 2 on, also prove that many trained together, each against itself alone.
        attn_implementation: as in transformers; None: its choice. kernels: of our side, as in a run file.
        router_aux_loss_coef: as in a run file; None: nonzero for a family with a load-balancing loss.
        routed: the rollouts say the experts of each token, random ones; auto: if that can be proved of the model.
        images: some sequences have images, with random pixels.
        plan: file with the family's plan; None: that of a table, or one that is found.
        overrides: fields of the twin's configuration.
        data: source of sequences; None: random tokens. nproc: maximum number of processes.
        mutations: faults to inject, one per run, after the runs without any.
        ranks_per_gpu: so many share each GPU.
    """

    topologies: tuple[str, ...]
    model: str | PretrainedConfig | None = None
    family: str | None = None
    twin: bool = False
    lora: dict[str, Any] = field(default_factory=lambda: dict(DEFAULT_LORA))
    reference: dict[str, Any] | None = None
    default_dropout: float = 0.0
    dtype: str = "float64"
    steps: int = 3
    micro_batch_size: int = 2
    adapters: int = 1
    seed: int = SEED
    objective: Objective = field(default_factory=Sft)
    packing: bool | Literal["auto"] = False
    recompute: bool | Literal["keep_attention"] = False
    resume: bool = False
    routed: bool | Literal["auto"] = False
    images: bool = False
    attn_implementation: str | None = "eager"
    quantization: str | None = None
    compute: str | None = None
    plan: str | None = None
    kernels: Literal["liger", "none"] = "none"
    router_aux_loss_coef: float | None = None
    neftune_alpha: float = 0.0
    optimizer: Literal["adamw", "adamw_8bit", "lora_fa"] = "adamw"
    lora_plus_ratio: float | None = None
    lora_plus_embedding_lr: float = 1e-6
    schedule: Schedule = "linear"
    warmup_from_zero: bool = False
    min_lr: float = 0.0
    num_cycles: int = 1
    power: float = 1.0
    timescale: int = 0
    decay_steps: int = 0
    decay_type: str = "linear"
    cycle: dict[int, float] = field(default_factory=dict)
    overrides: dict[str, Any] = field(default_factory=dict)
    data: str | None = None
    nproc: int | None = None
    mutations: tuple[str, ...] = ()
    device: str = "auto"
    ranks_per_gpu: int = 1
    trust_remote_code: bool = False
    cache_dir: Path = CACHE


def same_fields(kind: Any, source: object) -> dict[str, Any]:
    """The fields of `kind` that `source` also has, as keyword arguments."""
    names = [item.name for item in dataclasses.fields(kind) if hasattr(source, item.name)]
    return {name: getattr(source, name) for name in names}


@dataclass(frozen=True)
class Proof:
    """A request that passed its checks.

    Attributes:
        config: of the model or its twin. plans: topology -> plan, in the order of the runs. case: without the folders
            of inputs yet to be generated. key: hash of everything that determines the reference. notes: for the user.
            found: the plan that was found for it, as YAML; "": a table has it.
    """

    request: Request
    config: PretrainedConfig
    plans: dict[Topology, ModelPlan]
    case: Case
    key: str
    notes: tuple[str, ...] = ()
    found: str = ""

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
        return features_of_run(self.case, self.plans[topology], self.config, adapters=self.request.adapters)


def prepare_proof(request: Request) -> Proof:
    """Check all that can be refused before a process starts. Raises: UserError: the request, or a topology, is bad."""
    _check(request)
    given = _topologies(request)
    use_twins(functools.partial(shrink_config, tp=2))
    largest_tp = max((t.tp for t in given), default=request.nproc or _AUTO_PROCESSES)
    config, is_twin = _config(request, tp=largest_tp, stages=max((t.num_stages for t in given), default=1))
    dtype = str(resolve_dtype(request.dtype, config)).removeprefix("torch.")
    if dtype not in _DTYPES:
        raise UserError(f"--dtype {request.dtype}", f"it must be one of {', '.join(_DTYPES)}", "float64 is sharpest")
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
    words = _in_peft_words(request.lora, lora, plans)
    case = dataclasses.replace(
        _case(request, config, first.plan, batch_size_for(max(t.dp for t in plans)), tokens=first.trained.tokens),
        model=model,
        dtype=dtype,
        router_aux_loss_coef=_aux_loss_coef(request, config, plans),
        device=device,
        lora=words,
        reference=_reference(request, plans, words),
        eva=_eva(words, lora),
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
    return Proof(request, config, plans, case, case_hash(case, inputs=files), tuple(notes), plan_text(first.model))


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
    return _in_peft_words(request.reference, _in_full(lora, targets, plan), plans)


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


def _case(
    request: Request, config: PretrainedConfig, plan: ModelPlan, batch_size: int, *, tokens: Sequence[int]
) -> Case:
    """The case of `request`, on random sequences or those of the user. tokens: whose rows the adapter trains."""
    objective, number = request.objective, num_sequences_for(batch_size, request.steps)
    found, pad = _sequences(request, config, _ROWS.get(objective.reader, 1) * number)
    if tokens and request.data is None:
        found = with_tokens(found, tokens)
    invocation = request.lora.get("alora_invocation_tokens") or ()
    if request.data is None:
        found = with_invocations(found, invocation)
    if request.images and request.data is None:
        found = with_images(found, config, seed=request.seed)
    segments = (getattr(config, "type_vocab_size", None) or 0) > 1
    vocab_size = config.get_text_config().vocab_size
    data = as_records(found, objective, vocab_size=vocab_size, seed=request.seed, segments=segments)
    check_tokens(data, tokens)
    check_invocations(data, invocation)
    if request.routed:
        data = _with_experts(request, config, plan, data)
    own = {
        "adapter": "",
        "model_type": config.model_type,
        "resumes": request.resume,
        "further": data.further,
        "columns": {name: tuple(column.tolist()) for name, column in data.columns.items()},
        "rows_per_example": data.rows_per_example,
        "predicts_next": data.predicts_next,
        "routed": (),  # not as the request has it
        "input_ids": tuple(data.input_ids.tolist()),
        "is_trained": tuple(data.is_trained.tolist()),
        "offsets": tuple(data.offsets.tolist()),
        "batch_size": batch_size,
        "warmup_steps": min(1, request.steps - 1),
        "pad_token_id": pad,
        "dropout": tuple(sorted(dropout_fields(config))),
    }
    # Tuples all the way down: a case is hashed.
    if data.targets is not None:
        own["targets"] = tuple(map(tuple, data.targets.tolist()))
    if data.routed is not None:
        own["routed"] = tuple(tuple(map(tuple, token)) for token in data.routed.tolist())
    if request.optimizer == "adamw_8bit":
        own["min_8bit_size"] = _MIN_8BIT_SIZE
    if request.schedule == "cycle":
        own["warmup_steps"] = 0  # its rates say what it begins with
    return Case(**(same_fields(Case, request) | own))


def _with_experts(
    request: Request, config: PretrainedConfig, plan: ModelPlan, data: TokenizedDataset
) -> TokenizedDataset:
    """`data` with random experts of each token.

    Raises:
        UnsupportedError: below float64, where all runs replay the reference's routing; stages of layers; a router that
            chooses among groups, or an unknown number of experts, whose random choices would be none that it makes.
    """
    text = config.get_text_config()
    chosen, groups = num_chosen(text.to_dict()), getattr(text, "n_group", None) or 1
    numbers = {rule.num_experts for rule in plan.experts.values()}
    if request.dtype == "float64" and chosen and groups == 1 and len(numbers) == 1 and plan.topology.pp == 1:
        size = {"layers": text.num_hidden_layers, "experts": min(numbers), "chosen": chosen}
        return with_routed(data, **size, seed=request.seed)
    if request.routed == "auto":
        return data
    raise UnsupportedError("routed_experts", "they are proved in float64, of routers that choose among all experts")


def _sequences(request: Request, config: PretrainedConfig, number: int) -> tuple[TokenizedDataset, int]:
    """(`number` sequences, padding token id). Raises: UserError: text without a tokenizer, or too little of it."""
    text_config, data = config.get_text_config(), request.data
    size = text_config.vocab_size
    if data is None:
        pad = getattr(text_config, "pad_token_id", None)
        if not isinstance(pad, int) or not 0 <= pad < size:
            pad = 0
        options = {"seed": request.seed, "pad_token_id": pad, "shortest": 1}
        if request.objective.reader in _ANSWERS:
            options["shortest"] = 2
        return random_tokens(num_sequences=number, vocab_size=size, **options), pad
    if not isinstance(request.model, str) or request.twin:
        raise UserError(f"--data {data}", "a twin has no tokenizer", "leave out --data, or give --model without --twin")
    tokenizer = load_tokenizer(request.model, trust_remote_code=request.trust_remote_code)
    records, longest = read_records([data]), _MAX_LENGTH
    if request.images:  # each image is read, to know its tokens: not those of a whole file
        records, longest = records[: _CHOICE * number], _MAX_LENGTH_WITH_IMAGES
    limit = min(getattr(text_config, "max_position_embeddings", None) or longest, longest)
    has_images = any(record.images for record in records)
    if has_images and not request.images:
        raise UserError(f"--data {data}", "it has images", "give --images")
    if request.images and not has_images:
        rule = f"none of its first {len(records)} records has an image"
        raise UserError(f"--data {data}", rule, "leave out --images")
    processor = functools.partial(load_processor, request.model, config)
    found = tokenize(records, tokenizer, max_length=limit, vocab_size=size, processor=processor)
    return distinct_sequences(found, number, source=data), padding_token_id(tokenizer)


def of_schedule(
    kind: Schedule,
    *,
    ends_above_zero: bool,
    starts_at_zero: bool = False,
    decay_type: str = "linear",
    has_timescale: bool = False,
) -> dict[str, Any]:
    """Fields of a request with the schedule `kind`, in the steps and rates of a case.

    ends_above_zero: its final rate. starts_at_zero: its warm-up. decay_type: of warmup_stable_decay. has_timescale: of
    its own, of inverse_sqrt.
    """
    fields: dict[str, Any] = {"schedule": kind, "steps": _STEPS_OF_OTHERS, "warmup_from_zero": starts_at_zero}
    fields |= {"min_lr": 0.0, "decay_steps": 0, "cycle": {}, "num_cycles": 1, "power": 1.0, "timescale": 0}
    fields["decay_type"] = decay_type
    if kind == "linear":
        fields["steps"] = 3
    if ends_above_zero:
        fields["min_lr"] = 0.3 * Case.lr
    if kind == "warmup_stable_decay":
        fields["decay_steps"] = 2
        if decay_type != "linear":  # in the middle of its decay a cosine is a line
            fields |= {"decay_steps": 3, "steps": _STEPS_OF_OTHERS + 1}
    if kind == "cosine_with_restarts":
        fields["num_cycles"] = 2
    if kind == "polynomial":
        fields["power"] = 2.0
    if has_timescale:
        fields["timescale"] = 3
    if kind == "cycle":
        fields["cycle"] = {0: 0.2 * Case.lr, 1: Case.lr, 3: 0.4 * Case.lr}
    return fields


def as_records(
    found: TokenizedDataset, objective: Objective, *, vocab_size: int, seed: int, segments: bool = False
) -> TokenizedDataset:
    """Turn the sequences `found` into records of `objective`. segments: texts of two segments each."""
    if objective.reader == "pairs":
        return as_pairs(found)
    if objective.reader == "margins":
        return with_margins(found, seed=seed)
    if objective.reader == "feedback":
        return with_feedback(found)
    if objective.reader in ("rollouts", "rewarded"):
        is_rewarded = objective.reader == "rewarded"
        is_truncated = getattr(objective, "mask_truncated", False)
        options = {"is_rewarded": is_rewarded, "is_truncated": is_truncated}
        return with_rollouts(found, vocab_size=vocab_size, seed=seed, **options)
    if objective.reader in ("labelled", "labelled_words"):
        return with_labels(found, objective, seed=seed, segments=segments)
    if objective.reader == "taught":
        return with_teacher(found, vocab_size=vocab_size, seed=seed)
    if objective.reader == "in_context":
        return with_context(found, vocab_size=vocab_size, seed=seed)
    if objective.reader == "similar":
        return as_similar(found, _ROWS["similar"])
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
    if request.schedule != "linear" and request.steps < _STEPS_OF_OTHERS:
        rule = f"it takes {_STEPS_OF_OTHERS} steps to tell it from a line"
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


def _in_peft_words(given: dict[str, Any], lora: LoraConfig, plans: dict[Topology, ModelPlan]) -> dict[str, Any]:
    """`given`, the adapter `lora` as the user wrote it, as fields that PEFT itself understands."""
    plain = dict(given)
    for own in ("pieces", "share_experts", "vision"):
        plain.pop(own, None)
    if lora.lora_dropout:
        plain["lora_dropout"] = lora.lora_dropout
    if lora.target_parameters or any(plan.text for plan in plans.values()):
        plain |= {"target_modules": lora.target_modules, "target_parameters": lora.target_parameters}
    elif lora.exclude_modules and "exclude_modules" not in plain:
        plain["exclude_modules"] = sorted(lora.exclude_modules)
    start = start_of(lora)
    if start.changes_base or start.looks_at_data:
        plain["init_lora_weights"] = True  # initial values have their own proof, of PiSSA and OLoRA in float32
        plain.pop("eva_config", None)
    if lora.alora_invocation_tokens:
        plain["task_type"] = CAUSAL  # PEFT would warn, and run the base
    if lora.modules_to_save:
        plain["modules_to_save"] = lora.modules_to_save
    if getattr(lora, "pieces", None):
        plain |= {"rank_pattern": lora.rank_pattern, "alpha_pattern": lora.alpha_pattern}
    for plan in plans.values():
        if any(rule.is_transposed for rule in plan.linears.values()):
            plain["fan_in_fan_out"] = True  # else PEFT sets it with a warning
    found: dict[str, Any] = json.loads(json.dumps(plain))  # no tuples: as it is read from a file
    return found


def _eva(words: dict[str, Any], lora: LoraConfig) -> dict[str, Any] | None:
    """The adapter that begins as the data say, in PEFT's `words` but for its start; None: it does not."""
    if not start_of(lora).looks_at_data:
        return None
    return words | {"init_lora_weights": lora.init_lora_weights, "eva_config": dataclasses.asdict(lora.eva_config)}


def _aux_loss_coef(request: Request, config: PretrainedConfig, plans: dict[Topology, ModelPlan]) -> float:
    if request.router_aux_loss_coef is not None:
        return request.router_aux_loss_coef
    of_twin = request.family is not None and request.objective.task == CAUSAL
    if of_twin and any(plan.experts for plan in plans.values()) and has_load_balancing(config):
        return _AUX_LOSS_COEF
    return 0.0


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
    block = twin_block(request.quantization, request.compute)
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
    if wanted == "auto" and ranks_per_gpu == 1:
        takes_gpus = torch.cuda.is_available() and torch.cuda.device_count() >= ranks
    else:
        takes_gpus = on_gpus(wanted, num_ranks=ranks, ranks_per_gpu=ranks_per_gpu)
    return "cuda" if takes_gpus else "cpu"

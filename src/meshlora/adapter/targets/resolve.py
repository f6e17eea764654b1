"""Targets: the linears that an adapter applies to, with rank and scale.

Owns: reading `peft.LoraConfig` as PEFT does, refusing unsupported options by name, describing the targets. Does not
own: initial factors (`adapter.initialization`), the file format (`adapter.formats.peft_format`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING

from meshlora.adapter.targets import options
from meshlora.adapter.targets.pieces import check_pieces, piece_of, pieces_of
from meshlora.feature import features
from meshlora.plan.layout import Layout
from meshlora.plan.pairs import check
from meshlora.plan.rules import ExpertRule, ModelPlan
from meshlora_ground.compat.peft_targets import refuse_mamba_targets, rewrite_targets
from meshlora_ground.errors import UnsupportedError, UserError, did_you_mean

# How an adapter is computed, what it is on, and what we have beside PEFT.
SUPPORTED = {"r", "lora_alpha", "lora_dropout", "use_rslora", "use_dora", "lora_bias", "init_lora_weights"}
SUPPORTED |= {"alpha_pattern", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "bias"}
SUPPORTED |= {"modules_to_save", "target_parameters", "trainable_token_indices", "fan_in_fan_out"}
SUPPORTED |= {"rank_pattern", "alora_invocation_tokens", "ensure_weight_tying", "pieces", "share_experts", "vision"}
SUPPORTED |= {"eva_config"}
# The origin of an adapter, or how PEFT runs it; no effect on training.
DESCRIPTIVE = {"task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"}
DESCRIPTIVE |= {"inference_mode", "runtime_config"}
# Elements that any adapter may have: a gigabyte with optimizer state.
_SMALL = 2**26
# Which of them go together is known before any target.
KINDS = ("use_dora", "lora_bias", "init_lora_weights")
# What an adapter may have beside A and B -> its name in PEFT.
_FURTHER = {"magnitude": "magnitude_vector", "bias": "B.bias"}
_INITS = (True, False, "gaussian")


@dataclass(frozen=True)
class Target:
    """LoRA on one linear or embedding: rank r and scale s of `s * B @ A`.

    Attributes:
        pieces: the pieces of a fused matrix, each with an A and a B of rank r; empty for all of it.
        further: names of what is trained beside A and B, a number for each output feature: the `magnitude` of DoRA, the
            `bias` of B.
        is_embedding: A `[r, V]`, B `[H, r]` on an embedding.
        num_experts: E of a projection of experts, with factors `[E, r, in]`, `[E, out, r]`; 0 elsewhere.
        is_shared: one adapter for all experts, `[1, r, in]`, `[1, out, r]`.
        is_swapped: PEFT's A is on the output side, its B on the input side.
        in_features, out_features: of the full matrix; V and H of the embedding. fused: layout of its pieces.
        in_file: a module, and its name in PEFT's file where that is another.
    """

    name: str
    r: int
    scaling: float
    pieces: tuple[str, ...] = ()
    further: tuple[str, ...] = ()
    is_embedding: bool = False
    num_experts: int = 0
    is_shared: bool = False
    is_swapped: bool = False
    in_features: int = field(default=0, compare=False)
    out_features: int = field(default=0, compare=False)
    fused: Layout | None = field(default=None, compare=False, repr=False)
    in_file: tuple[str, str] = field(default=("", ""), compare=False)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Part -> full shape: `A`, `B`, of pieces `A.q`, `B.q`, then what is `further`."""
        stack: tuple[int, ...] = ()
        if self.is_shared:
            stack = (1,)
        elif self.num_experts:
            stack = (self.num_experts,)
        shapes: dict[str, tuple[int, ...]] = {}
        for piece in self.pieces:
            rows = piece_of(self.fused, self.name, piece).size
            shapes[f"A.{piece}"] = (*stack, self.r, self.in_features)
            shapes[f"B.{piece}"] = (*stack, rows, self.r)
        if not self.pieces:
            shapes = {"A": (*stack, self.r, self.in_features), "B": (*stack, self.out_features, self.r)}
        for part in self.further:
            shapes[part] = (self.out_features,)
        return shapes

    def name_of(self, part: str) -> str:
        """Name of the trained parameter: "A" of `up_proj` -> `up_proj.lora_A`."""
        if part in self.further:
            return f"{self.name}.lora_{_FURTHER[part]}"
        if self.is_embedding:
            return f"{self.name}.lora_embedding_{part}"
        return f"{self.name}.lora_{part}"


def check_supported(config: LoraConfig) -> None:
    """Refuse options that are set and not supported.

    Raises:
        UnsupportedError: names the option. UserError: a value out of range.
    """
    # First: PEFT fills in further options of some initialisations, which the user did not set.
    init = config.init_lora_weights
    is_of_wing = any(feature.start_of(config) is not None for feature in features())
    if not is_of_wing and not any(init is known or init == known for known in _INITS):
        rule = "it is none of the starts that are known"
        raise UnsupportedError(f"LoraConfig(init_lora_weights={init!r})", rule, "use one of docs/run-file.md, or true")
    default = LoraConfig()
    for option in dataclasses.fields(config):
        if option.name in SUPPORTED | DESCRIPTIVE:
            continue
        value, usual = getattr(config, option.name), getattr(default, option.name)
        if value != usual and (value or usual):  # None, [], {} and False all mean "off"
            way_out = f"leave it at {usual!r}; supported: {', '.join(sorted(SUPPORTED))}"
            raise UnsupportedError(f"LoraConfig({option.name}={value!r})", "this option is not supported yet", way_out)
    check({option: getattr(config, option) for option in KINDS})
    options.check_values(config)


def resolve_targets(model: Any, plan: ModelPlan, config: LoraConfig, *, strict: bool = True) -> dict[str, Target]:
    """Name -> target, in module order, as PEFT would choose them.

    Args:
        model: the Hugging Face model; only its module names are read.
        strict: every pattern must match something. Off for adapters from files, where the keys are checked.

    Raises:
        UserError: nothing matches, or (strict) a pattern matches nothing; names the nearest module.
        UnsupportedError: a match that is not a linear, or the output head.
    """
    check_supported(config)
    task = str(getattr(config.task_type, "value", config.task_type) or plan.task)
    if task != plan.task:
        way_out = "the objective decides of it: leave task_type out"
        raise UnsupportedError(f"LoraConfig(task_type={task!r})", f"the model is one for {plan.task}", way_out)
    options.check_patterns(config, [*(n for n, _ in model.named_modules()), *(n for n, _ in model.named_parameters())])
    for feature in features():
        config = feature.with_names_of_model(config, plan)
    config = dataclasses.replace(config, target_modules=_explicit_targets(model, plan, config))
    # On a parallel model projections of experts are modules; otherwise, as in PEFT, parameters.
    names = [name for name, _ in model.named_modules() if name and name not in plan.projections]
    # True or a match of a text; PEFT returns an object that is false for a name that it excludes.
    matched = [name for name in names if check_target_module_exists(config, name)]
    if strict:  # a file's keys decide
        matched = [name for name in matched if options.is_open(plan, config, name)]
        _check_gradients(plan, matched)
    for name in matched:
        _check_module(model, plan, config, name)
    by_weight: list[str] = []
    for feature in features():
        by_weight += feature.targets_among_parameters(model, plan, config)
    parameters = [name for name in by_weight if name not in matched]
    for feature in features():
        feature.check_targets(config, matched, by_weight, plan)
    matched += parameters
    check_pieces(config, matched, plan)
    if strict:
        options.check_each_pattern(plan, config, matched)
        _check_fan_in_fan_out(plan, config)
    if not matched:
        raise _no_match(config, plan)
    asked, wrapped = set(matched), set(parameters) - plan.projections.keys()
    targets: dict[str, Target] = {}
    # In the order of the plan, which all ranks share: they gather targets one after the other.
    for name in (*plan.tables, *plan.linears, *plan.projections, *plan.matrices):
        if name in asked:
            targets[name] = _target(model, name, config, plan, by_weight=name in wrapped)
    for feature in features():
        for name, in_file in feature.names_in_file(model, targets).items():
            targets[name] = dataclasses.replace(targets[name], in_file=in_file)
    _check_size(targets)
    return targets


def _check_module(model: Any, plan: ModelPlan, config: LoraConfig, name: str) -> None:
    """Check that the module `name`, a match of `target_modules`, can have this adapter."""
    if name not in plan.linears and name not in plan.tables:
        kind = type(model.get_submodule(name)).__name__
        rule = f"LoRA on {kind} is not supported"
        if isinstance(model.get_submodule(name), torch.nn.Linear):
            rule += ": it computes no x W^T, to which PEFT could add"
        raise UnsupportedError(f"target_modules matches {name}", rule, "target linear layers")
    try:
        refuse_mamba_targets(config, model, leaf := name.rpartition(".")[2])
    except ValueError as error:  # their fused kernels would bypass the adapter
        way_out = f"name it in exclude_modules: [{leaf}]"
        raise UnsupportedError(f"target_modules matches {name}", f"PEFT refuses it ({error})", way_out) from None
    is_tied = name == plan.head and model.get_output_embeddings().weight is model.get_input_embeddings().weight
    asked: dict[str, Any] = {option: getattr(config, option) for option in KINDS}
    if is_tied:
        asked["an adapter on the tied head"] = name
    if name in plan.tables:
        asked["an adapter on the embedding"] = name
    check(asked)


def _check_gradients(plan: ModelPlan, matched: list[str]) -> None:
    """Refuse targets that would stay as they are; "all-linear" leaves them out."""
    reasons = {name: options.why_no_gradient(plan, name) for name in matched}
    unreached = [name for name in matched if reasons[name] is not None]
    if unreached:
        ends = dict.fromkeys(".".join(name.split(".")[-2:]) for name in unreached)
        way_out = f"name it in exclude_modules: [{', '.join(ends)}]"
        raise UserError(f"target_modules matches {unreached[0]}", str(reasons[unreached[0]]), way_out)


def _no_match(config: LoraConfig, plan: ModelPlan) -> UserError:
    given = config.target_modules
    if config.exclude_modules:
        way_out = "exclude less"
    elif config.modules_to_save:
        way_out = "a module is trained in full or by LoRA: take it out of one of the two"
    elif isinstance(given, str):
        way_out = f"a text is a pattern for whole names: give a list, as in [{given}], or '.*{given}'"
    else:
        way_out = did_you_mean(next(iter(sorted(given or {""}))), options.suffixes(plan.linears))
    rule = "it matches no linear layer of the " + ("text part" if plan.text else "model")
    if config.layers_to_transform is not None:
        rule += " in the layers of layers_to_transform"
    if config.exclude_modules:
        rule += " that exclude_modules leaves"
    if config.modules_to_save:
        rule += f" that modules_to_save={list(config.modules_to_save)} leaves"
    return UserError(f"target_modules={options.shown(given)}", rule, way_out)


def _target(model: Any, name: str, config: LoraConfig, plan: ModelPlan, *, by_weight: bool) -> Target:
    key = f"{name}.weight" if by_weight else name  # PEFT's name of it in rank_pattern and alpha_pattern
    r, scaling = options.rank_and_scaling(config, key)
    pieces = pieces_of(config, name)
    if pieces and r % len(pieces):
        raise UserError(f"rank {r} of {name}", f"it is that of its pieces {pieces} together", "give each the same rank")
    # To PEFT r is the rank of all pieces together, and alpha too (`with_pieces`): the scale is that of each.
    further = tuple(part for part, is_there in (("magnitude", config.use_dora), ("bias", config.lora_bias)) if is_there)
    target = Target(name, r // max(1, len(pieces)), scaling, tuple(pieces), further, name in plan.tables)
    rule = plan.rule_of(name)
    if rule is None:
        module, split = model.get_submodule(name), plan.parameters.get(f"{name}.weight")
        vocabulary = split.layout.size if split else module.num_embeddings
        return dataclasses.replace(target, in_features=vocabulary, out_features=module.embedding_dim)
    target = dataclasses.replace(target, in_features=rule.in_features, out_features=rule.out_features, fused=rule.fused)
    if not isinstance(rule, ExpertRule):
        return target
    shared = bool(getattr(config, "share_experts", False))
    return dataclasses.replace(target, num_experts=rule.with_factors.size, is_shared=shared, is_swapped=rule.is_swapped)


def _check_size(targets: Mapping[str, Target]) -> None:
    """Refuse factors larger than their matrices (rank above width), unless small: surely a mistake."""
    own = base = 0
    for target in targets.values():
        own += sum(map(math.prod, target.shapes.values()))
        base += target.in_features * target.out_features * max(1, target.num_experts)
    if own > max(4 * base, _SMALL):
        largest = max(targets.values(), key=lambda target: target.r)
        rule = f"the adapter has {own:,} elements, and the matrices that it is on have {base:,}"
        raise UserError(f"rank {largest.r} of {largest.name}", rule, "use a lower r")


def _explicit_targets(model: Any, plan: ModelPlan, config: LoraConfig) -> set[str] | str:
    """`target_modules` with its shorthands expanded."""
    given = config.target_modules
    if given == "all-linear":  # routers are frozen unless named
        output = model.get_output_embeddings()
        # By the module, not `plan.head`, which is "" of a head that is no linear.
        heads = {name for name, module in model.named_modules() if module is output}
        names = plan.linears.keys() - heads - plan.routers
        names = {name for name in names if options.why_no_gradient(plan, name) is None}
        return {name for name in names if options.is_open(plan, config, name) and not plan.is_of_head(name)}
    if isinstance(given, str):
        return given
    if given is not None:
        return set(given)
    known = TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING.get(model.config.model_type)
    if config.target_parameters:
        as_peft = dataclasses.replace(config)
        rewrite_targets(as_peft, model)
        # Beside parameters PEFT takes its defaults, too, but of families whose experts it renames.
        if known is None or as_peft.target_modules is not None:
            return set()
    if known is None:
        rule = f"PEFT has no default targets for model_type {model.config.model_type!r}"
        raise UserError("LoraConfig(target_modules=None)", rule, 'name them, or use "all-linear"')
    return known if isinstance(known, str) else set(known)


def _check_fan_in_fan_out(plan: ModelPlan, config: LoraConfig) -> None:
    """Refuse `fan_in_fan_out` without a transposed weight: the model determines storage, so it has no effect."""
    if config.fan_in_fan_out and not any(rule.is_transposed for rule in plan.linears.values()):
        rule = f"{plan.model_type} has no weight that is stored [in, out], so it has no effect"
        raise UserError("LoraConfig(fan_in_fan_out=True)", rule, "leave it out")

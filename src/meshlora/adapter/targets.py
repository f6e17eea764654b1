"""Targets: which linears an adapter sits on, and with which rank and scale.

Owns: reading `peft.LoraConfig` as PEFT does, refusing what is not supported by name.
Does not own: drawing the factors (`adapter.initialization`), the file format (`adapter.peft_format`).
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING

from meshlora.adapter.dropout import check_dropout
from meshlora.adapter.expert_targets import (
    check_experts,
    matched_parameters,
    out_of_reach,
    stored_parameters,
    with_whole_projections,
)
from meshlora.adapter.patterns import check_each_pattern, check_patterns, pattern_key, shown, suffixes
from meshlora.adapter.pieces import check_pieces, piece_of, pieces_of
from meshlora.adapter.values import check_values
from meshlora.compat import refuse_mamba_targets
from meshlora.errors import UnsupportedError, UserError, did_you_mean
from meshlora.parallel.sharding import check_not_sharded
from meshlora.plan.experts import ExpertRule
from meshlora.plan.quantization import check_not_quantized
from meshlora.plan.rules import LinearRule, ModelPlan

_SUPPORTED = {
    "r",
    "lora_alpha",
    "lora_dropout",
    "use_rslora",
    "target_modules",
    "exclude_modules",
    "layers_to_transform",
    "layers_pattern",
    "rank_pattern",
    "alpha_pattern",
    "init_lora_weights",
    "use_dora",
    "bias",
    "modules_to_save",
    "fan_in_fan_out",
    "pieces",
    "target_parameters",
    "share_experts",
}
# These describe where an adapter comes from, or how PEFT runs it; they do not change what is trained.
DESCRIPTIVE = {
    "task_type",
    "peft_type",
    "auto_mapping",
    "peft_version",
    "base_model_name_or_path",
    "revision",
    "inference_mode",
    "runtime_config",
}
# Elements that an adapter may always have: a gigabyte with its optimizer.
_SMALL = 2**26
_INITS = (True, False, "gaussian", "pissa", "olora")


@dataclass(frozen=True)
class Target:
    """LoRA on one linear or embedding: rank r and scale s of `s * B @ A`.

    Attributes:
        pieces: the pieces of a fused matrix, each with an A and a B of rank r; empty for all of it.
        use_dora: whether there is a magnitude for each output feature.
        is_embedding: A `[r, V]`, B `[H, r]` on the input embedding.
        num_experts: of a projection of experts, whose factors are `[E, r, in]`, `[E, out, r]`; 0 elsewhere.
        is_shared: one adapter for all experts, `[1, r, in]`, `[1, out, r]`.
        is_swapped: PEFT's A is on the output side, its B on the input side.
    """

    name: str
    r: int
    scaling: float
    pieces: tuple[str, ...] = ()
    use_dora: bool = False
    is_embedding: bool = False
    num_experts: int = 0
    is_shared: bool = False
    is_swapped: bool = False

    def shapes(self, rule: LinearRule | ExpertRule | None, embedding: tuple[int, int]) -> dict[str, tuple[int, ...]]:
        """Part -> shape of the whole: `A`, `B`, on pieces `A.q`, `B.q`, with DoRA `magnitude`."""
        if self.is_embedding:
            return {"A": (self.r, embedding[0]), "B": (embedding[1], self.r)}
        assert rule is not None, self
        shapes: dict[str, tuple[int, ...]] = {}
        for piece in self.pieces or ("",):
            end = f".{piece}" if piece else ""
            rows = piece_of(rule, self.name, piece).size if piece else rule.out_features
            stack = (1 if self.is_shared else self.num_experts,) if self.num_experts else ()
            shapes |= {f"A{end}": (*stack, self.r, rule.in_features), f"B{end}": (*stack, rows, self.r)}
        return shapes | ({"magnitude": (rule.out_features,)} if self.use_dora else {})


def check_supported(config: LoraConfig) -> None:
    """Refuse every option that is set and that meshlora would not follow.

    Raises:
        UnsupportedError: names the option. UserError: a value out of range.
    """
    # First: PEFT fills in the options of a start that has some, and nobody gave those.
    if not any(config.init_lora_weights is known or config.init_lora_weights == known for known in _INITS):
        raise UnsupportedError(
            f"LoraConfig(init_lora_weights={config.init_lora_weights!r})", f"supported: {', '.join(map(repr, _INITS))}"
        )
    default = LoraConfig()
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name in _SUPPORTED | DESCRIPTIVE or value == getattr(default, field.name):
            continue
        if not value and not getattr(default, field.name):  # None, [], {} and False all say "off"
            continue
        raise UnsupportedError(
            f"LoraConfig({field.name}={value!r})",
            "this option is not supported yet",
            f"leave it at {getattr(default, field.name)!r}; supported: {', '.join(sorted(_SUPPORTED))}",
        )
    if str(getattr(config.task_type, "value", config.task_type) or "CAUSAL_LM") != "CAUSAL_LM":
        raise UnsupportedError(f"LoraConfig(task_type={config.task_type!r})", "only CAUSAL_LM is supported")
    if config.use_dora and isinstance(config.init_lora_weights, str) and config.init_lora_weights != "gaussian":
        raise UnsupportedError(
            f"use_dora with init_lora_weights={config.init_lora_weights!r}", "the two are not proved together"
        )
    check_values(config)


def resolve_targets(model: Any, plan: ModelPlan, config: LoraConfig, *, strict: bool = True) -> dict[str, Target]:
    """Name -> target, in module order, as PEFT would choose them.

    Args:
        model: the Hugging Face model; only its module names are read.
        strict: every pattern must match something. Off for adapters that come from a file, whose keys are checked.

    Raises:
        UserError: nothing matches, or (strict) one pattern matches nothing; names the nearest module.
        UnsupportedError: a match that is not a linear, or the output head.
    """
    check_supported(config)
    check_patterns(config, [*(n for n, _ in model.named_modules()), *(n for n, _ in model.named_parameters())])
    config = with_whole_projections(config, plan)
    head = _head_name(model)
    config = dataclasses.replace(config, target_modules=_explicit_targets(model, plan, config, head))
    # On a parallel model projections of experts are modules; elsewhere, as in PEFT, they are parameters.
    names = [name for name, _ in model.named_modules() if name and name not in plan.projections]
    matched = [name for name in names if check_target_module_exists(config, name) is True]
    matched += [name for name in names if isinstance(check_target_module_exists(config, name), re.Match)]
    for name in matched:
        if name not in plan.linears and name != plan.embedding:
            kind = type(model.get_submodule(name)).__name__
            raise UnsupportedError(
                f"target_modules matches {name}", f"LoRA on {kind} is not supported", "target linear layers"
            )
        try:
            refuse_mamba_targets(config, model, name.rpartition(".")[2])
        except ValueError as error:  # their fused kernels read weights past the adapter
            raise UnsupportedError(f"target_modules matches {name}", f"PEFT refuses it ({error})") from None
        is_tied = name == plan.head and model.get_output_embeddings().weight is model.get_input_embeddings().weight
        if is_tied and config.init_lora_weights in ("pissa", "olora"):
            raise UnsupportedError(
                f"init_lora_weights={config.init_lora_weights!r} on {name}", "it shares its weight with the embedding"
            )
        if name == plan.embedding and (config.use_dora or isinstance(config.init_lora_weights, str)):
            what = "use_dora" if config.use_dora else f"init_lora_weights={config.init_lora_weights!r}"
            raise UnsupportedError(f"{what} on the embedding {name}", "it is for linear layers", "leave it out")
    parameters = [name for name in matched_parameters(model, plan, config) if name not in matched]
    matched += parameters
    check_experts(config, matched, plan)
    check_pieces(config, matched, plan)
    if strict:
        check_each_pattern(plan, config, matched)
        _check_fan_in_fan_out(plan, config)
    if not matched:
        raise UserError(
            f"target_modules={shown(config.target_modules)}",
            "it matches no linear layer of the model"
            + (" in the layers of layers_to_transform" if config.layers_to_transform is not None else "")
            + (" that exclude_modules leaves" if config.exclude_modules else "")
            + (f" that modules_to_save={list(config.modules_to_save)} leaves" if config.modules_to_save else ""),
            _way_to_a_match(config, plan),
        )
    chosen = [
        name for name in (plan.embedding, *plan.linears, *plan.projections, *plan.matrices) if name in set(matched)
    ]
    by_weight = set(parameters) - plan.projections.keys()
    found = {name: _target(name, config, plan, by_weight=name in by_weight) for name in chosen}
    _check_size(found, plan, embedding_size(model, plan))
    if config.lora_dropout:
        check_dropout(final_config(config, found, plan), found, plan)
    return found


def trained_parameters(model: Any, plan: ModelPlan, config: LoraConfig, targets: Mapping[str, Target]) -> list[str]:
    """The base parameters that are trained besides: `modules_to_save` in full, and biases as `bias` says.

    Raises:
        UserError: a module to save that is not there, or that is a target too.
        UnsupportedError: one that is more than a norm, a linear or an embedding; one with a bias beside bias="all"; a
            matrix that is sharded over dp.
    """
    found: list[str] = []
    for wanted in config.modules_to_save or ():
        owners = [name for name, _ in model.named_modules() if name.endswith(wanted)]  # no dot between: so does PEFT
        if not owners:
            names = {name.rpartition(".")[2] for name, m in model.named_modules() if list(m.parameters(recurse=False))}
            raise UserError(
                f"modules_to_save={list(config.modules_to_save or ())}",
                f"{wanted!r} is no module of the model",
                did_you_mean(wanted, names),
            )
        for owner in owners:
            module = model.get_submodule(owner)
            if owner in targets:
                raise UserError(
                    f"modules_to_save={list(config.modules_to_save or ())}",
                    f"{owner} is a target of LoRA too",
                    "a module is trained in full or by LoRA: take it out of one of the two",
                )
            if list(module.children()) and owner not in {*plan.linears, plan.embedding}:
                raise UnsupportedError(
                    f"modules_to_save: {owner}", "it is a whole block", "name norms, linears or embeddings"
                )
            leaves = [leaf for leaf, _ in module.named_parameters(recurse=False)]
            if config.bias == "all" and "bias" in leaves:
                raise UnsupportedError(
                    f"modules_to_save: {owner} with bias='all'",
                    "PEFT stores its bias twice, under two names",
                    "use bias='none' or 'lora_only': modules_to_save trains that bias too",
                )
            found += [f"{owner}.{leaf}" for leaf in leaves]
    if config.bias != "none":
        biases = [name for name, _ in model.named_parameters() if name.rpartition(".")[2] == "bias"]
        if config.bias == "lora_only":
            biases = [name for name in biases if name.rpartition(".")[0] in targets]
        found += [name for name in biases if name not in found]
    for name in found:
        check_not_quantized(plan, name)
        check_not_sharded(plan, name, model.get_parameter(name))
    return found


def num_trainable(model: Any, targets: Mapping[str, Target], trained: Iterable[str], plan: ModelPlan) -> int:
    """Trainable elements of an adapter on `model` (as it is before any split), each logical element counted once."""
    embedding = embedding_size(model, plan)
    shapes = [
        shape for name, target in targets.items() for shape in target.shapes(plan.rule_of(name), embedding).values()
    ]
    return sum(math.prod(shape) for shape in shapes) + sum(model.get_parameter(name).numel() for name in trained)


def embedding_size(model: Any, plan: ModelPlan) -> tuple[int, int]:
    """(vocabulary, width) of the whole input embedding."""
    module = model.get_submodule(plan.embedding)
    rule = plan.parameters.get(f"{plan.embedding}.weight")
    return (rule.layout.size if rule else module.num_embeddings), module.embedding_dim


def final_config(config: LoraConfig, targets: Mapping[str, Target], plan: ModelPlan) -> LoraConfig:
    """The configuration to store: a copy whose `target_modules` names what is trained (`"all-linear"` resolved)."""
    config = dataclasses.replace(with_whole_projections(config, plan))
    config.target_parameters = stored_parameters(config, targets, plan)
    if any(name in plan.linears and plan.linears[name].is_transposed for name in targets):
        config.fan_in_fan_out = True  # PEFT's word for a weight that is stored [in, out]
    if config.target_modules is None and config.target_parameters:
        config.target_modules = []  # None would mean the defaults of the family to PEFT
    everywhere = targets
    if config.target_modules is None or config.target_modules == "all-linear":
        targets = {name: target for name, target in targets.items() if name in (plan.embedding, *plan.linears)}
        suffixes = {name.rpartition(".")[2] for name in targets}
        covered = {name for name in plan.linears if name.rpartition(".")[2] in suffixes}
        # A number is the name of other modules too: of a whole layer.
        is_clear = covered == set(targets) and not any(suffix.isdecimal() for suffix in suffixes)
        config.target_modules = suffixes if is_clear else set(targets)
    modules = [name for name in everywhere if name not in (*plan.projections, *plan.matrices)]
    return out_of_reach(config, modules, plan.model_type)


def _target(name: str, config: LoraConfig, plan: ModelPlan, *, by_weight: bool) -> Target:
    key = f"{name}.weight" if by_weight else name  # what PEFT calls it in patterns
    r = config.rank_pattern.get(pattern_key(config.rank_pattern, key), config.r)
    alpha = config.alpha_pattern.get(pattern_key(config.alpha_pattern, key), config.lora_alpha)
    pieces = pieces_of(config, name)
    if pieces and r % len(pieces):
        raise UserError(f"rank {r} of {name}", f"it is that of its pieces {pieces} together", "give each the same rank")
    scaling = alpha / math.sqrt(r) if config.use_rslora else alpha / r
    target = Target(name, r // max(1, len(pieces)), scaling, tuple(pieces), config.use_dora, name == plan.embedding)
    rule = plan.projections.get(name)
    if rule is None:
        return target
    shared = bool(getattr(config, "share_experts", False))
    return dataclasses.replace(target, num_experts=rule.num_experts, is_shared=shared, is_swapped=rule.is_swapped)


def _check_size(targets: Mapping[str, Target], plan: ModelPlan, embedding: tuple[int, int]) -> None:
    """Factors of a rank beyond the width of their matrix are larger than it is: of large ones that is a mistake."""
    own = sum(math.prod(shape) for n, t in targets.items() for shape in t.shapes(plan.rule_of(n), embedding).values())
    base = 0
    for name, target in targets.items():
        rule = plan.rule_of(name)
        shape = embedding if target.is_embedding or rule is None else (rule.in_features, rule.out_features)
        base += math.prod(shape) * max(1, target.num_experts)
    if own > max(4 * base, _SMALL):
        largest = max(targets.values(), key=lambda target: target.r)
        raise UserError(
            f"rank {largest.r} of {largest.name}",
            f"the adapter has {own:,} elements, and the matrices that it is on have {base:,}",
            "use a lower r",
        )


def _head_name(model: Any) -> str | None:
    head = model.get_output_embeddings()
    return next((name for name, module in model.named_modules() if module is head), None)


def _explicit_targets(model: Any, plan: ModelPlan, config: LoraConfig, head: str | None) -> set[str] | str:
    """`target_modules` with its shorthands spelled out."""
    given = config.target_modules
    if given == "all-linear":  # routers are frozen unless they are named
        return {name for name in plan.linears if name != head and name not in plan.routers}
    if given is None and config.target_parameters:
        return set()
    if given is None:
        known = TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING.get(model.config.model_type)
        if known is None:
            raise UserError(
                "LoraConfig(target_modules=None)",
                f"PEFT has no default targets for model_type {model.config.model_type!r}",
                'name them, or use "all-linear"',
            )
        return set(known)
    return given if isinstance(given, str) else set(given)


def _check_fan_in_fan_out(plan: ModelPlan, config: LoraConfig) -> None:
    """How a weight is stored is known from the model: to say it of one that is stored the other way has no effect."""
    if config.fan_in_fan_out and not any(rule.is_transposed for rule in plan.linears.values()):
        raise UserError(
            "LoraConfig(fan_in_fan_out=True)",
            f"{plan.model_type} has no weight that is stored [in, out], so it has no effect",
            "leave it out",
        )


def _way_to_a_match(config: LoraConfig, plan: ModelPlan) -> str:
    given = config.target_modules
    if config.exclude_modules:
        return "exclude less"
    if config.modules_to_save:
        return "a module is trained in full or by LoRA: take it out of one of the two"
    if isinstance(given, str):
        return f"a text is a pattern for whole names: give a list, as in [{given}], or '.*{given}'"
    return did_you_mean(next(iter(sorted(given or {""}))), suffixes(plan.linears))

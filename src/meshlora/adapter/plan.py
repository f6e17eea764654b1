"""The plan of an adapter: every trained parameter by name, with its full shape and its rule on the mesh.

Owns: `AdapterPlan`, made once per adapter by `plan_adapter`, as `plan.derive` makes the plan of a model; which base
parameters are trained; refusing a dropout that would have no effect. Does not own: which linears are targets
(`adapter.targets.resolve`), the gradient axes (`plan.grads`), dropout masks.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists

from meshlora.adapter.initialization import start_of
from meshlora.adapter.targets.options import check_kind, matches, suffixes
from meshlora.adapter.targets.resolve import KINDS, Target, resolve_targets
from meshlora.adapter.targets.token_rows import TokenRows
from meshlora.feature import features
from meshlora.layers.embedding import check_looked_up_alone
from meshlora.model.dp_shard import check_not_sharded
from meshlora.model.inject import is_tied
from meshlora.plan.features import Asked
from meshlora.plan.grads import FactorRule, Side, embedding_rule, expert_rule, factor_rule, split_rule, whole_rule
from meshlora.plan.layout import Layout, Split
from meshlora.plan.pairs import check
from meshlora.plan.rules import ModelPlan
from meshlora_ground.errors import UnsupportedError, UserError, did_you_mean
from meshlora_ground.tasks import CAUSAL, HEADS, task_of


@dataclass(frozen=True)
class Trained:
    """One trained parameter: its full shape and its rule on the mesh."""

    shape: tuple[int, ...]
    rule: FactorRule


@dataclass(frozen=True)
class AdapterPlan:
    """An adapter on a model and a topology, before any process exists.

    Attributes:
        config: as given. stored: as saved. targets: by name, in module order.
        parameters: all trained ones: `MODULE.lora_A`, `.lora_B`, `.lora_A.q` of a piece, `.lora_magnitude_vector`,
            `.lora_B.bias`, `.lora_embedding_A`, then the `copies` (base parameters) by their own names, and the `rows`.
        rows: module -> rows of its vocabulary that take the place of those of the base.
        tied: base parameters that the copy of the embedding takes the place of, too, by `ensure_weight_tying`.
        folder: the PEFT adapter that holds the initial values; None: they are drawn.
        vocabulary: the embedding and the head by name -> the full shape of their weight.
    """

    config: LoraConfig
    stored: LoraConfig
    targets: Mapping[str, Target]
    parameters: Mapping[str, Trained]
    copies: tuple[str, ...] = ()
    rows: Mapping[str, TokenRows] = dataclasses.field(default_factory=dict)
    tied: tuple[str, ...] = ()
    folder: Path | None = None
    vocabulary: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)

    @property
    def of_base(self) -> tuple[str, ...]:
        """Names of the trained parameters that stand for some of the base: `copies` and `rows`."""
        return (*self.copies, *(rows.name for rows in self.rows.values()))

    @property
    def weights(self) -> tuple[str, ...]:
        """Names of the parameters of the base that `of_base` stand for, whole or in part."""
        return (*self.copies, *(f"{module}.weight" for module in self.rows))

    def asked(self, plan: ModelPlan) -> Asked:
        """What is asked for, as far as the adapter on the model of `plan` says it: see `plan.features`."""
        asked: dict[str, Any] = {
            **plan.asked,
            "lora_dropout": self.stored.lora_dropout,
            "alora_invocation_tokens": self.config.alora_invocation_tokens,
            "pieces": any(target.pieces for target in self.targets.values()),
            "an adapter on the parameter": min(self.stored.target_parameters or [""]),
            "modules_to_save, or biases": bool(self.copies),
            "the embedding in modules_to_save": f"{plan.embedding}.weight" in self.copies,
        }
        for option in (*KINDS, "bias", "modules_to_save", "trainable_token_indices"):
            asked[option] = getattr(self.config, option)
        if self.folder is not None and not start_of(self.config).changes_base:
            asked["init_lora_weights"] = True  # it has begun
        for name in self.targets:
            if name in plan.positions:
                asked["an adapter on positions"] = name
            if name in plan.tables:
                asked["an adapter on the embedding"] = name
            if name == plan.head:
                asked["an adapter on the output head"] = name
            # A message names the first one in module order.
            if name in plan.matrices:
                asked.setdefault("LoRA on the router", name)
            if name in plan.matrices or name in plan.projections:
                asked.setdefault("an adapter on experts or routers", name)
        return asked

    @property
    def with_rows(self) -> frozenset[str]:
        """The modules that have `rows`."""
        return frozenset().union(*(rows.modules for rows in self.rows.values()))

    @property
    def tokens(self) -> tuple[int, ...]:
        """The tokens that have `rows` somewhere, each once."""
        found: dict[int, None] = {}  # a set that keeps the order
        for rows in self.rows.values():
            found |= dict.fromkeys(rows.ids)
        return tuple(found)

    @property
    def num_trainable(self) -> int:
        """Number of trainable elements, replicas counted once."""
        return sum(math.prod(parameter.shape) for parameter in self.parameters.values())


def plan_adapter(
    model: Any, plan: ModelPlan, config: LoraConfig, *, strict: bool = True, folder: Path | None = None
) -> AdapterPlan:
    """The plan of the adapter `config` on `model`, which is on the meta device or already parallel.

    strict: see `resolve_targets`.

    Raises:
        UserError: the configuration does not fit the model. UnsupportedError: an option or target not proved, by name.
    """
    check_kind(config)
    for feature in features():
        config = feature.as_tied(model, plan, config)
    targets = resolve_targets(model, plan, config, strict=strict)
    stored = final_config(config, targets, plan)
    start_of(config).check(config, targets, plan)
    copies = trained_parameters(model, plan, config, targets)
    # In the order of `AdapterPlan.parameters`: every rank gathers them in turn, so it must be the same on all.
    parameters: dict[str, Trained] = {}
    for target in targets.values():
        for part, shape in target.shapes.items():
            parameters[target.name_of(part)] = Trained(shape, rule_of_part(plan, target, part))
    for name in copies:
        parameters[name] = Trained(whole_shape(model, plan, name), rule_of_parameter(plan, name))
    rows: dict[str, TokenRows] = {}
    for feature in features():
        rows |= feature.token_rows(model, plan, config, targets=targets, copies=copies)
    if config.trainable_token_indices and not rows:
        raise UnsupportedError("trainable_token_indices", "the wing vocabulary is not in WINGS")
    for each in rows.values():
        _, width = whole_shape(model, plan, f"{each.module}.weight")
        parameters[each.name] = Trained((len(each.ids), width), rows_rule(plan, each.module))
    known = [name for name in (plan.embedding, plan.head) if name and hasattr(model.get_submodule(name), "weight")]
    vocabulary = {name: whole_shape(model, plan, f"{name}.weight") for name in known}
    tied: tuple[str, ...] = ()
    if config.ensure_weight_tying and f"{plan.embedding}.weight" in copies and is_tied(model, plan):
        tied = (f"{plan.head}.weight",)
    found = AdapterPlan(config, stored, targets, parameters, tuple(copies), rows, tied, folder, vocabulary)
    # Last, when all is known: which features meet in one adapter on this model.
    check({**found.asked(plan), "model.dtype": str(model.dtype).removeprefix("torch.")})
    for feature in features():
        feature.check_adapter(model, plan, found)
    return found


def with_trained_head(config: LoraConfig, model: Any) -> LoraConfig:
    """A fresh adapter for the task of `model`: with its head in `modules_to_save`, as PEFT adds it by itself."""
    task = task_of(model.config)
    if task == CAUSAL:
        return config
    config = copy.copy(config)
    saved = [*(config.modules_to_save or ())]
    if task != "FEATURE_EXTRACTION":  # whose models end with the hidden states
        saved += [name for name in HEADS if hasattr(model, name)]
    config.modules_to_save = list(dict.fromkeys(saved)) or None
    config.task_type = config.task_type or task
    return config


def trained_parameters(model: Any, plan: ModelPlan, config: LoraConfig, targets: Mapping[str, Target]) -> list[str]:
    """The base parameters that the adapter trains: `modules_to_save` in full, and the biases selected by `bias`.

    Raises:
        UserError: a module to save is missing, or also a target.
        UnsupportedError: it is not a norm, a linear or an embedding; it has a bias and bias="all"; a matrix is sharded
            over dp.
    """
    found: list[str] = []
    for owner in dict.fromkeys(_modules_to_save(model, plan, config)):
        module = model.get_submodule(owner)
        if owner in targets:
            given = f"modules_to_save={list(config.modules_to_save or ())}"
            rule = f"{owner} is a target of LoRA too"
            raise UserError(given, rule, "a module is trained in full or by LoRA: take it out of one of the two")
        if owner == plan.embedding:
            check_looked_up_alone(module, f"modules_to_save: {owner}", "LoRA on it is supported")
        if inside := [name for name in plan.experts if f"{name}.".startswith(f"{owner}.")]:
            raise UnsupportedError(f"modules_to_save: {owner}", f"experts are not trained in full: {inside[0]}")
        # A block with modules of its own is saved as one: an MLP, or the head of a classifier.
        is_block = owner not in {*plan.linears, plan.embedding}
        leaves = [leaf for leaf, _ in module.named_parameters(recurse=is_block)]
        if any(leaf.rpartition(".")[2] == "bias" for leaf in leaves):
            check({"bias": config.bias, "modules_to_save with a bias": owner})
        if {f"{owner}.{leaf}" for leaf in leaves} & {*found}:
            raise UserError(f"modules_to_save: {owner}", "it is in another one that is saved", "name one of them")
        found += [f"{owner}.{leaf}" for leaf in leaves]
    if config.bias != "none":
        for name, _ in model.named_parameters():
            owner, _, leaf = name.rpartition(".")
            is_chosen = leaf == "bias" and (config.bias == "all" or owner in targets)
            if is_chosen and name not in found:  # may be in a module that is saved
                found.append(name)
    for name in found:
        linear = plan.linears.get(name.removesuffix(".weight"))
        if linear is not None and linear.is_transposed:
            raise UnsupportedError(f"training {name} in full", "it is stored [in, out]", "LoRA on it is supported")
        for feature in features():
            feature.check_trained_base(plan, name)
        check_not_sharded(plan, name, model.get_parameter(name))
    return found


def _modules_to_save(model: Any, plan: ModelPlan, config: LoraConfig) -> Iterator[str]:
    """The modules whose names end with one of `modules_to_save`. Raises: UserError: there is none."""
    for wanted in dict.fromkeys(config.modules_to_save or ()):
        owners = [name for name, _ in model.named_modules() if name.endswith(wanted)]  # without a dot, as in PEFT
        yield from owners
        if owners or (wanted in HEADS and plan.task != CAUSAL):
            continue  # PEFT writes the names of all heads, whichever the model has
        with_parameters = [name for name, module in model.named_modules() if list(module.parameters(recurse=False))]
        given = f"modules_to_save={list(config.modules_to_save or ())}"
        raise UserError(given, f"{wanted!r} is no module of the model", did_you_mean(wanted, suffixes(with_parameters)))


def final_config(config: LoraConfig, targets: Mapping[str, Target], plan: ModelPlan) -> LoraConfig:
    """The configuration to store: a copy with `target_modules` resolved to names (also `"all-linear"`)."""
    config = dataclasses.replace(config)
    for feature in features():
        config = feature.with_stored_parameters(config, targets, plan)
    if any(name in plan.linears and plan.linears[name].is_transposed for name in targets):
        config.fan_in_fan_out = True  # PEFT's option for weights stored [in, out]
    vision = getattr(config, "vision", False)
    by_weight = matches(config.target_parameters or (), [f"{name}.weight" for name in targets])
    chosen = {name for name in targets if f"{name}.weight" not in by_weight} & {*plan.tables, *plan.linears}
    if config.target_modules is None and config.target_parameters:
        config.target_modules = chosen  # PEFT would take None for the defaults of the family
    elif config.target_modules is None or config.target_modules == "all-linear":
        config.target_modules = _shortest_names(targets, plan, in_full=bool(vision))
    elif vision or any(check_target_module_exists(config, name) for name in plan.linears if name not in targets):
        config.target_modules = chosen  # in full: the patterns as given match the linears of a composite's tower, too
    modules = [name for name in targets if name not in plan.projections and name not in plan.matrices]
    for feature in features():
        config = feature.as_peft_reads(config, modules, plan.model_type)
    return config


def _shortest_names(targets: Mapping[str, Target], plan: ModelPlan, *, in_full: bool) -> set[str]:
    """The last parts of the names of the modules among `targets`, or these `in_full` where others end alike."""
    modules = targets.keys() & {*plan.tables, *plan.linears}
    ends = suffixes(modules)
    covered = {name for name in plan.linears if name.rpartition(".")[2] in ends}
    # A number also names whole layers.
    if in_full or covered != modules or any(end.isdecimal() for end in ends):
        return modules
    return ends


def rule_of_part(plan: ModelPlan, target: Target, part: str) -> FactorRule:
    """The rule on the mesh of `part` of the adapter on `target`."""
    module = target.name
    side, _, piece = part.partition(".")
    if target.num_experts:
        projection = plan.projections[module]
        if piece and projection.split is Split.COLUMN:
            projection = dataclasses.replace(projection, layout=_layout_of_piece(projection.layout, piece))
        return expert_rule(projection, Side(side), is_shared=target.is_shared)
    # What is trained beside A and B acts on the output before it is summed over tp, as B does.
    acts_on = Side.INPUT if side == "A" else Side.OUTPUT
    if target.is_embedding:
        return _rule_on_embedding(plan, module, acts_on)
    linear = plan.matrices.get(module) or plan.linears[module]
    found = factor_rule(linear, acts_on, sp=plan.topology.sp)
    # Only B of a column-parallel linear is cut along the pieces; its A is whole, and so is B of any other.
    if piece and found.cuts and linear.split is Split.COLUMN:
        (cut,) = found.cuts
        return dataclasses.replace(found, cuts=(dataclasses.replace(cut, layout=_layout_of_piece(cut.layout, piece)),))
    return found


def _rule_on_embedding(plan: ModelPlan, module: str, side: Side) -> FactorRule:
    if rule := plan.parameters.get(f"{module}.weight"):
        return embedding_rule(rule, side)
    return whole_rule(plan.domain_of(module), sp=plan.topology.sp)  # as tp is 1, or it is no vocabulary


def _layout_of_piece(layout: Layout, piece: str) -> Layout:
    return Layout((next(p for p in layout.pieces if p.name == piece),))


def rule_of_parameter(plan: ModelPlan, name: str) -> FactorRule:
    """The rule on the mesh of a trained base parameter."""
    owner, _, leaf = name.rpartition(".")
    sp = plan.topology.sp
    if name in plan.parameters:
        return split_rule(plan.parameters[name].dim, plan.parameters[name].layout)
    if owner not in plan.linears:
        return whole_rule(plan.domain_of(owner), sp=sp)
    linear = plan.linears[owner]
    if leaf == "bias" or linear.split is Split.WHOLE:
        return factor_rule(linear, Side.AFTER, sp=sp)
    # The weight itself is split like its rows or columns, so each rank computes the full gradient of its slice.
    return split_rule(0 if linear.split is Split.COLUMN else 1, linear.layout)


def rows_rule(plan: ModelPlan, module: str) -> FactorRule:
    """The rule of rows of the vocabulary of `module`: whole on every rank, with the terms of its own tokens."""
    if module in plan.linears:
        return factor_rule(plan.linears[module], Side.INPUT, sp=plan.topology.sp)
    return _rule_on_embedding(plan, module, Side.OUTPUT)


def whole_shape(model: Any, plan: ModelPlan, name: str) -> tuple[int, ...]:
    """The full shape of a base parameter."""
    owner, _, leaf = name.rpartition(".")
    if owner in plan.linears:
        rule = plan.linears[owner]
        if leaf == "bias":
            return (rule.out_features,)
        return rule.out_features, rule.in_features
    shape = list(model.get_parameter(name).shape)  # of a parallel model, whose vocabulary is cut
    if (split := plan.parameters.get(name)) is not None:
        shape[split.dim] = split.layout.size
    return tuple(shape)

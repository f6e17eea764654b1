"""Adapters on a parallel model: adding, choosing, switching off, gathering.

Owns: the state of a parallel model's adapters (`Runtime`, at `model.meshlora`).
Does not own: files (`adapter.formats.peft_format`).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from peft import LoraConfig
from torch import Tensor, nn

from meshlora.adapter.initialization import start_of
from meshlora.adapter.plan import AdapterPlan, plan_adapter
from meshlora.adapter.targets.resolve import Target
from meshlora.adapter.targets.token_rows import TokenRows
from meshlora.adapter.updates import guard_updates
from meshlora.comm.collectives import all_gather, broadcast_of
from meshlora.comm.groups import Mesh
from meshlora.feature import features
from meshlora.layers.adapted import AdaptedLeaf
from meshlora.layers.embedding import ParallelEmbedding
from meshlora.layers.held_tokens import ContextCut
from meshlora.layers.linear import ParallelHead, ParallelLinear
from meshlora.layers.rounded import Rounding
from meshlora.layers.tokens import ForwardTokens
from meshlora.model.inject import adopt, parallel_leaves
from meshlora.model.pipeline import Pipeline
from meshlora.model.regions import TokenCut
from meshlora.plan.grads import FactorRule
from meshlora.plan.pairs import check
from meshlora.plan.rules import ModelPlan
from meshlora_ground.errors import UnsupportedError, UserError, did_you_mean
from meshlora_ground.float64 import wide_dtype


@dataclass(frozen=True)
class Adapter:
    """The plan of one adapter, and what it has for base parameters by name, in use while it is active: copies of whole
    ones, and rows of a vocabulary."""

    plan: AdapterPlan
    trained: Mapping[str, nn.Parameter]

    @property
    def targets(self) -> Mapping[str, Target]:
        """Targets by name, in module order."""
        return self.plan.targets


@dataclass(frozen=True, eq=False)
class Whole:
    """A model on the meta device and its plan, before the split: what a new adapter is planned on."""

    model: Any
    plan: ModelPlan


@dataclass
class Loop:
    """What a loop of a user's own is doing with a model (`train.step`).

    is_divided: a loss that is divided already, as Hugging Face's are, has given gradients since the last step.
    is_in_step: a step is open, whose forwards compare the rows of ranks. masks: (seed, number of the step) of dropout,
    if a step is running. num_steps: those that have begun.
    """

    is_divided: bool = False
    is_in_step: bool = False
    masks: tuple[int, int] | None = None
    num_steps: int = 0


@dataclass
class Runtime:
    """The state of a parallel model.

    plan: of what this rank's stage has. context, cut: the cuts of its forwards over cp, and over tp under sp. pipeline:
    their way through this stage. whole: all stages. base: the base parameters that adapters have copies of. dropout:
    the tokens of the running forward, and the adapter of each. rounding: of factors, to the base's dtype.
    is_causal: no token sees a later one, and padding at the end of rows is not masked (`model.padding`).
    references: adapter -> the frozen one that its objective compares it with; without one it is compared with the base.
    teacher: a second model. loop: of the caller's own. unmerged: while the active adapter is merged
    (`wings.generation.in_memory`), the weights before, by leaf.
    """

    plan: ModelPlan
    mesh: Mesh
    source: str | None
    context: ContextCut
    cut: TokenCut
    pipeline: Pipeline
    whole: Whole
    is_causal: bool = False
    adapters: dict[str, Adapter] = field(default_factory=dict)
    references: dict[str, str] = field(default_factory=dict)
    teacher: Any = None
    active: str | None = None
    base: dict[str, nn.Parameter] = field(default_factory=dict)
    unmerged: dict[str, Tensor] | None = None
    dropout: ForwardTokens = field(init=False)
    rounding: Rounding = field(default_factory=Rounding, init=False)
    loop: Loop = field(default_factory=Loop, init=False)

    def __post_init__(self) -> None:
        # One for all adapters: each forward has one set of tokens.
        self.dropout = ForwardTokens(self.mesh.tp, sp=self.plan.topology.sp, context=self.context)


@dataclass(frozen=True)
class Factor:
    """One trained parameter on this rank: name in `AdapterPlan.parameters`, local slice, rule on the mesh."""

    name: str
    parameter: nn.Parameter
    rule: FactorRule


def runtime(model: nn.Module) -> Runtime:
    """The `Runtime` of a model returned by `meshlora.load`. Raises: UserError: any other model."""
    found = getattr(model, "meshlora", None)
    if not isinstance(found, Runtime):
        raise UserError(f"{type(model).__name__}", "it is not a parallel model", "make it with meshlora.load")
    return found


def check_not_merged(state: Runtime, what: str) -> None:
    """Refuse `what` while the active adapter is merged into the weights. Raises: UserError: it is."""
    if state.unmerged is not None:
        rule = "its weights are those of one adapter"
        raise UserError(f"{what} while an adapter is merged", rule, "call meshlora.unmerge before")


def add_adapter(model: Any, name: str, config: LoraConfig, *, seed: int = 0) -> None:
    """Attach a newly initialised adapter, frozen until `set_adapter`. `config` is not changed.

    Raises:
        UserError: the name is taken, or the configuration does not fit the model.
    """
    whole = runtime(model).whole
    draw_adapter(model, name, plan_adapter(whole.model, whole.plan, config), seed=seed)


def draw_adapter(model: Any, name: str, planned: AdapterPlan, *, seed: int) -> None:
    """Attach the new adapter `planned`: drawn from `seed`, or taken out of the base."""
    start = start_of(planned.config)
    if start.changes_base:
        attach(model, name, planned, None)
    else:
        attach(model, name, planned, functools.partial(start.draw, seed=seed))


def attach(
    model: Any,
    name: str,
    planned: AdapterPlan,
    full: Callable[[Target], Mapping[str, Tensor]] | None,
    trained: Mapping[str, Tensor] | None = None,
) -> None:
    """Attach the adapter with the full factors `full(target)[part]`; each rank keeps its slices.

    full: called for one target at a time, so that no rank ever holds all of them; parts as in `Target.shapes`. None:
        factors decomposed from the base. A missing magnitude is that of the base with the adapter.
    trained: full values of what the adapter trains of the base, by name; None: those of the base.
    """
    state, mesh, dtype = runtime(model), runtime(model).mesh, wide_dtype(model.dtype)
    config, start = planned.config, start_of(planned.config)
    check_not_merged(state, f"adding adapter {name!r}")
    _check_name(state, name, config)
    for target in planned.targets.values():
        if not state.plan.holds(target.name):
            continue
        leaf = adopt(model, state.plan, target.name, mesh.tp)
        values: Mapping[str, Tensor] = {}
        if full is not None:
            values = full(target)
        if start.changes_base:
            assert isinstance(leaf, ParallelLinear)
            # Also where the factors are given: the file has the adapter of the base without its principal part.
            principal = start.take_out_of_base(leaf, mesh, target)
            values = values or principal
        local: dict[str, Tensor] = {}
        for part, value in values.items():
            rule = planned.parameters[target.name_of(part)].rule
            local[part] = local_part(value, rule, mesh).to(mesh.device, dtype)
        factors = {part: value for part, value in local.items() if part not in target.further}
        leaf.add_adapter(name, factors, scaling=target.scaling)
        leaf.tokens = state.dropout
        if isinstance(leaf, ParallelLinear):
            leaf.set_dropout(name, config.lora_dropout, state.dropout)
        if target.further:
            for feature in features():
                feature.vary(model, leaf, name, target, {part: local[part] for part in target.further if part in local})
    copies = _trained_of_base(model, name, planned, trained)
    if not state.adapters:  # with the first: its hooks see those of all
        state.rounding.watch(model, model.dtype)
    leaves = parallel_leaves(model).values()
    state.rounding.leaves = [leaf for leaf in leaves if isinstance(leaf, AdaptedLeaf) and leaf.rounds_factors]
    state.adapters[name] = Adapter(planned, copies)
    for feature in features():
        feature.attached(model, name, planned)
    if mesh.topology.world > 1:
        for factor in adapter_factors(model, name):
            guard_updates(factor.name, factor.parameter)


def _trained_of_base(
    model: Any, adapter: str, planned: AdapterPlan, trained: Mapping[str, Tensor] | None
) -> dict[str, nn.Parameter]:
    """The copies of base parameters that `planned` trains on this rank, and its rows. trained: as in `attach`."""
    state, mesh, dtype = runtime(model), runtime(model).mesh, wide_dtype(model.dtype)
    copies: dict[str, nn.Parameter] = {}
    copied: dict[str, list[str]] = {}
    own_copies = [of_base for of_base in planned.copies if state.plan.holds(of_base)]
    for of_base in own_copies:
        owner, _, leaf_name = of_base.rpartition(".")
        copied.setdefault(owner, []).append(leaf_name)
    # Before any is made: a module that cannot take them is an error.
    for owner, names in copied.items():
        _take_any_dtype(owner, model.get_submodule(owner), names, model.dtype)
    for of_base in own_copies:
        value = state.base.setdefault(of_base, model.get_parameter(of_base)).detach().to(dtype).clone()
        if trained is not None:
            value = local_part(trained[of_base], planned.parameters[of_base].rule, mesh).to(mesh.device, dtype)
        copies[of_base] = nn.Parameter(value, requires_grad=False)
    copies |= _under_other_names(model, planned, copies)
    for rows in planned.rows.values():
        if state.plan.holds(rows.module):
            given = trained[rows.name] if trained is not None else None
            copies[rows.name] = _replace_rows(model, adapter, rows, given)
    return copies


def _under_other_names(model: Any, planned: AdapterPlan, copies: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """The copy of the embedding by the names that it has besides, `planned.tied`: one parameter, as in the base."""
    state, found = runtime(model), dict[str, nn.Parameter]()
    for name in planned.tied:
        state.base.setdefault(name, model.get_parameter(name))
        found[name] = copies[f"{state.plan.embedding}.weight"]
    return found


def _replace_rows(model: Any, adapter: str, rows: TokenRows, values: Tensor | None) -> nn.Parameter:
    """Attach `rows` to the modules that have them. values: full, `[n, H]`; None: those of the base."""
    state = runtime(model)
    leaves: list[ParallelEmbedding | ParallelHead] = []
    for module in rows.modules:
        leaf = adopt(model, state.plan, module, state.mesh.tp)
        assert isinstance(leaf, ParallelEmbedding | ParallelHead), (module, type(leaf))
        leaves.append(leaf)
    if values is None:
        values = leaves[0].base_rows(rows.ids)
    values = values.to(state.mesh.device, wide_dtype(model.dtype), copy=True)
    parameter = nn.Parameter(values, requires_grad=False)
    for leaf in leaves:
        leaf.replace_rows(adapter, parameter, rows.ids)
    return parameter


def _take_any_dtype(name: str, module: nn.Module, copied: Collection[str], dtype: torch.dtype) -> None:
    """Let a module whose copies of its parameters are wider than the model's `dtype` take and give the model's
    activations. The hooks of a second adapter change nothing.

    Raises:
        UnsupportedError: it computes with copies and parameters of the base at once, or its weight is a shard.
    """
    is_norm = "Norm" in type(module).__name__
    if type(module) is nn.Linear or is_norm:
        module.register_forward_pre_hook(lambda inner, args: (args[0].to(inner.weight.dtype), *args[1:]))
    if is_norm:
        module.register_forward_hook(lambda _, args, found: found.to(dtype))
    is_shard = isinstance(module, ParallelLinear | nn.Embedding) and "weight" in copied
    is_mixed = is_norm and {leaf for leaf, _ in module.named_parameters(recurse=False)} != set(copied)
    if dtype != wide_dtype(dtype) and (is_shard or is_mixed):
        given = f"{name}: its {' and '.join(sorted(copied))} trained in full, of a model in {dtype}"
        rule = "what is trained is held in float32, and here the module computes with numbers of both dtypes"
        raise UnsupportedError(given.replace("torch.", ""), rule, "use model.dtype: float32, or LoRA on it")


def _check_name(state: Runtime, name: str, config: LoraConfig) -> None:
    """Refuse a taken or malformed name, and a second adapter beside PiSSA or OLoRA."""
    if name in state.adapters:
        raise UserError(f"adapter {name!r}", "the model has one of that name already", "choose another name")
    if not name or "." in name or "/" in name:
        raise UserError(f"adapter {name!r}", "a name is not empty and holds no dot or slash")
    # The new one first: a message names its option, if both have it.
    for other in [config] + [adapter.plan.stored for adapter in state.adapters.values()]:
        if start_of(other).changes_base:
            check({"adapters": len(state.adapters) + 1, "init_lora_weights": other.init_lora_weights})


def set_adapter(model: Any, name: str | None) -> None:
    """Make `name` the active, trainable adapter; None: the base alone, nothing trainable.

    Raises:
        UserError: there is no such adapter.
    """
    set_adapters(model, () if name is None else [name])


def set_adapters(model: Any, names: Sequence[str]) -> None:
    """Make `names` trainable, all others not. With several, none is active: a forward inside
    `model.meshlora.dropout.of(shares, names)` runs each on its own tokens, any other forward runs the base.

    Raises:
        UserError: there is no such adapter.
    """
    state = runtime(model)
    for name in names:
        if name not in state.adapters:
            raise UserError(f"adapter {name!r}", "the model has no such adapter", did_you_mean(name, state.adapters))
    for name in names:
        check({"adapters": len(names), "trainable_token_indices": state.adapters[name].plan.rows})
    active = names[0] if len(names) == 1 else None
    _activate(model, active)
    for owner in state.adapters:
        for factor in adapter_factors(model, owner):
            factor.parameter.requires_grad_(owner in names)


def _activate(model: Any, name: str | None) -> None:
    """Make `name` active, its copies in place of the base parameters; None: the base with its own."""
    state = runtime(model)
    check_not_merged(state, "choosing or switching off an adapter")
    state.active = name
    for leaf in parallel_leaves(model).values():
        leaf.active = name
    copies: Mapping[str, nn.Parameter] = {}
    if name is not None:
        copies = state.adapters[name].trained
    # Those of all adapters: what another one has replaced is the base's again.
    for parameter_name, base in state.base.items():
        owner, _, leaf_name = parameter_name.rpartition(".")
        setattr(model.get_submodule(owner), leaf_name, copies.get(parameter_name, base))


@contextlib.contextmanager
def in_use(model: Any, name: str | None) -> Iterator[None]:
    """Make `name` the active adapter inside the block, to save or evaluate it. `requires_grad` is left as is."""
    before = runtime(model).active
    try:
        _activate(model, name)
        yield
    finally:
        _activate(model, before)


@contextlib.contextmanager
def disable_adapter(model: Any) -> Iterator[None]:
    """Run the base model inside the block; the active and trainable adapters are restored afterwards."""
    for adapter in runtime(model).adapters.values():
        init = adapter.plan.stored.init_lora_weights
        check({"door": "disable_adapter", "init_lora_weights": init})
    state, active = runtime(model), runtime(model).active
    with in_use(model, None), state.dropout.of_base():
        state.active = active  # so that it can still be saved
        yield


@contextlib.contextmanager
def reference_in_use(model: Any) -> Iterator[None]:
    """Run the frozen policy that the active adapter is compared with inside the block: its reference, or the base."""
    state = runtime(model)
    if not state.references:
        with disable_adapter(model):
            yield
    else:
        assert state.active is not None
        with in_use(model, state.references[state.active]):
            yield


def active_factors(model: Any) -> list[Factor]:
    """The factors of the active adapter on this rank, in module order. Raises: UserError: no adapter is active."""
    state = runtime(model)
    check_not_merged(state, "training")
    if state.active is None:
        raise UserError("no active adapter", "there is nothing to train", "call set_adapter, or give lora= to load")
    return adapter_factors(model, state.active)


def adapter_factors(model: Any, adapter: str) -> list[Factor]:
    """The parts of `adapter` held by this rank, in module order, trained copies of base parameters last."""
    own = runtime(model).adapters[adapter]
    held: dict[str, nn.Parameter] = {}
    for name, leaf in parallel_leaves(model).items():
        for part, parameter in leaf.trained(adapter).items():
            held[own.targets[name].name_of(part)] = parameter
    held |= {name: copy for name, copy in own.trained.items() if name not in own.plan.tied}
    return [Factor(name, parameter, own.plan.parameters[name].rule) for name, parameter in held.items()]


def gather_adapter(model: Any, adapter: str, *, only_rank: int | None = None) -> dict[str, Tensor]:
    """Name -> copy of the full factor on the CPU, on every rank. Collective: all ranks must call it.

    only_rank: the rank to keep them; others return an empty dict and hold at most one factor at a time.
    """
    held = {factor.name: factor.parameter.detach() for factor in adapter_factors(model, adapter)}
    return gather_values(model, adapter, held, only_rank=only_rank)


def gather_values(
    model: Any, adapter: str, held: Mapping[str, Tensor], *, only_rank: int | None = None
) -> dict[str, Tensor]:
    """`gather_adapter` of values in place of the factors, `held` by name on this rank."""
    state, found = runtime(model), {}
    # In the order of the plan, which all ranks share: each is a collective.
    for name, trained in state.adapters[adapter].plan.parameters.items():
        full = None
        if name in held:
            full = full_factor(held[name], trained.rule, state.mesh)
        if state.plan.stages:  # from the one that has it to the others
            like = torch.empty(trained.shape, dtype=wide_dtype(model.dtype), device="meta")
            full = broadcast_of(full, like, state.mesh.pp, source=state.plan.rank_of(name), device=state.mesh.device)
        assert full is not None, name
        if only_rank in (None, state.mesh.rank):
            found[name] = full.to("cpu", copy=True)
    return found


def full_factor(local: Tensor, rule: FactorRule, mesh: Mesh) -> Tensor:
    """Gather the slices of one factor (or of its gradient). Collective over the axes of its cuts."""
    for cut in rule.cuts:
        axis = mesh.over({cut.axis})
        if axis.size > 1:
            every = all_gather(local.unsqueeze(0).contiguous(), axis)
            local = cut.layout.join(list(every), cut.dim)
    return local


def local_part(full: Tensor, rule: FactorRule, mesh: Mesh) -> Tensor:
    """This rank's slice of a full factor; a copy, since factors of different adapters must not share memory."""
    local = full
    for cut in rule.cuts:
        axis = mesh.over({cut.axis})
        local = cut.layout.cut(local, cut.dim, rank=axis.rank, size=axis.size)
    if local is full:  # `Layout.cut` copies
        return local.clone()
    return local

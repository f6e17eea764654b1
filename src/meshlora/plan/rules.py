"""The plan: how each module is split, and in which region. Plain data, computable without a process group.

Owns: the data types of a plan: `LinearRule`, `ParameterRule`, `Region`, `ExpertsRule`, `ModelPlan`. Does not own:
deriving it from a model (`plan.derive`), the rows a rank holds (`plan.layout`), gradient axes (`plan.grads`), the
layers that run it (`layers`), LoRA targets (`adapter`).

A *region* is a block with one tensor-parallel entry and one exit: an attention, a mixer, an MLP.
Each block of a decoder layer is one of

- a split region: its linears are column- or row-parallel, and each rank computes its own heads or features;
- a whole region: whole on every rank. Under sp it sees all tokens: gathered before, sliced after. This is the safe
  default for blocks the plan does not split: a recurrent unit that saw only its slice of the sequence would train
  silently wrong;
- token-wise (a norm, a dropout): works on any slice of the tokens, and is left alone;
- a block of routed experts: its router is token-wise, its experts dispatch tokens (`wings.experts.forms`), and any
  other child, such as a shared expert, is a block as above.

The embedding and the output head are split over the vocabulary. The modules after the last decoder layer form one more
region, with its exit at the head: each rank sees all tokens, and computes the logits of its part of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property

from meshlora.plan.features import Asked
from meshlora.plan.layout import Layout, Piece, Split
from meshlora_ground.tasks import CAUSAL, HEADS, PAIRED
from meshlora_ground.topology import FEATURES, LAYERS, Topology, copies_axis

# The attention implementations of transformers that work on cut sequences.
CONTEXT_ATTENTIONS = ("sdpa", "eager")


class Domain(StrEnum):
    """Which tokens and which gradient terms a tp rank sees of a module that is whole on every rank."""

    PARTIAL = "partial"  # inside a split region: all tokens, and its gradient is one term of a sum over tp
    EQUAL = "equal"  # in a whole region, or before the first layer: the same on every tp rank
    RESIDUAL = "residual"  # between regions: all tokens alike, or under sp its own


@dataclass(frozen=True)
class LinearRule:
    """One linear of the model. `in_features` and `out_features` are those of the whole matrix.

    Attributes:
        layout: of the split dim (out if column-parallel, in if row-parallel); None if the linear is whole.
        domain: of a whole linear, or of a row-parallel linear's output.
        is_transposed: stored as `[in, out]`, like transformers' Conv1D.
        fused: on any topology, the pieces of its output features that may have adapters of their own.
    """

    name: str
    split: Split
    in_features: int
    out_features: int
    has_bias: bool
    layout: Layout | None = None
    domain: Domain = Domain.EQUAL
    is_transposed: bool = False
    fused: Layout | None = None

    def local_features(self, tp: int) -> tuple[int, int]:
        """(in, out) of the part held by each of `tp` ranks."""
        if self.layout is None or self.split is Split.WHOLE:
            return self.in_features, self.out_features
        local = self.layout.local_size(tp)
        if self.split is Split.ROW:
            return local, self.out_features
        return self.in_features, local


@dataclass(frozen=True)
class ExpertRule(LinearRule):
    """One projection of all experts of a layer, a stack of matrices. Widths are those of one whole expert.

    Attributes:
        name: of the stack, as in `model.layers.0.mlp.experts.gate_up_proj`.
        split: over etp: COLUMN for the first projection, ROW for the second. layout: of the split dim.
        is_transposed: stored as `[E, in, out]`. fused: gate and up, if they are one matrix.
        is_swapped: PEFT mistakes the input for the output: its A is on the output side, its B on the input side.
        num_zero: of the stack's matrices behind those of the experts, which nobody multiplies with, as experts without
            a computation have them (longcat_flash). PEFT gives them factors, and here they have nothing else.
    """

    layout: Layout
    num_experts: int = 1
    is_swapped: bool = False
    num_zero: int = 0

    @property
    def with_factors(self) -> Layout:
        """The entries of a factor's stack, as ep cuts them."""
        zero = (Piece("zero", self.num_zero, 1),) if self.num_zero else ()
        return Layout((Piece("", self.num_experts, 1), *zero))


@dataclass(frozen=True)
class ExpertsRule:
    """The experts of one layer.

    Attributes:
        name: of their module. block: of the module that contains the experts and their router.
        first, second: the projections into and out of the experts' inner width.
        routers: names of the modules in the block that choose experts: each owns a matrix with a row per expert.
        weights_first: routing weights multiply the experts' inputs, not their outputs (llama4).
    """

    name: str
    block: str
    num_experts: int
    first: ExpertRule
    second: ExpertRule
    routers: tuple[str, ...] = ()
    weights_first: bool = False

    @property
    def num_choices(self) -> int:
        """The experts that a router chooses among."""
        return self.num_experts + self.first.num_zero

    @property
    def projections(self) -> tuple[ExpertRule, ExpertRule]:
        """Both projections."""
        return self.first, self.second


@dataclass(frozen=True)
class ParameterRule:
    """A parameter outside linears, split over tp along `dim`: a vocabulary, one value per head."""

    dim: int
    layout: Layout


@dataclass(frozen=True)
class Packing:
    """How a frozen matrix is held in few bits.

    Attributes:
        kind: one of `wings.quantized.kinds.BITS`. block: (outputs, inputs) that share a scale. scale_bytes: of each.
    """

    kind: str
    block: tuple[int, int]
    scale_bytes: int


@dataclass(frozen=True)
class Region:
    """A block with one tensor-parallel entry and one exit.

    Attributes:
        is_split: False if every rank computes all of it.
        local: module -> attribute -> its local value. Dotted attributes are in the module's configuration.
        sliced: argument -> (its dim of heads, the number of heads).
        passes: arguments that may carry a gradient and need no collective, as in `FamilyPlan`.
        reason: why it is not split, if its form could be.
    """

    name: str
    is_split: bool
    local: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    sliced: Mapping[str, tuple[int | str, int]] = field(default_factory=dict)
    passes: tuple[str, ...] = ()
    reason: str = ""


@dataclass(frozen=True)
class PlannedBlock:
    """A wing's plan of a block of a decoder layer: as in `ModelPlan`, by whole names, what is the block's alone."""

    region: Region
    linears: Mapping[str, LinearRule] = field(default_factory=dict)
    parameters: Mapping[str, ParameterRule] = field(default_factory=dict)
    wide_norms: Mapping[str, Layout] = field(default_factory=dict)


@dataclass(frozen=True)
class ModelPlan:
    """All facts about a model on a topology that need no process.

    Attributes:
        model_type: the transformers `model_type`.
        layers: name of the ModuleList of decoder layers, at whose ends the residual stream is scattered and gathered.
            Empty if tp=1: the structure of the model does not matter then.
        regions: in module order; empty if tp=1.
        linears: name -> rule of every linear of the model, split or whole.
        parameters: name -> rule of every other split parameter or buffer.
        attentions: modules that attend to other tokens, in the layers, by transformers' registry, once for each call;
            empty if cp=1.
        recurrent: recurrent mixers in the layers -> the attributes with the sizes of their state; empty if cp=1.
        mixing: modules in the layers that see other tokens otherwise -> in which way (`wings.context.mixing`).
        wide_norms: name -> layout of the split width. With groups each of them is normalised by itself.
        text: name of the text decoder of a composite, whose towers and projectors are whole on every rank; else empty.
        encoder: name of the ModuleList of the layers of an encoder whose states the decoder attends to; empty: none.
        embedding, head: names of the input and output embeddings; head is empty if it is not a linear. positions: of
            the embeddings of positions.
        after: modules that run after the last decoder layer, except the head.
        per_layer: (the embedding of tokens that gives each layer a second input, the width of that), or ("", 0).
        experts: name -> rule of every routed experts module.
        matrices: name -> rule of the routers that are not linears and own their `weight`.
        units: names of the decoder layers, whose matrices are sharded over dp; empty without dp_shard.
        quantized: name -> packing of every linear and projection of experts that is held in few bits. quantization:
            the kind, or "keep". compute: the products of these that are in float8, as in a run file; None: they are in
            few bits for memory alone.
        task: of the model, as PEFT names it. readers: linears known to read their block's input.
        stages: (first layer, layer after the last) of each stage of a pipeline; empty without one.
        states_every: every so many layers the stream is put aside, for later layers to read; 0: never, or no stages.
        pp_rank: the rank whose part of the model the plan is about; None: all of it.
    """

    model_type: str
    topology: Topology
    layers: str
    num_layers: int
    regions: tuple[Region, ...]
    linears: Mapping[str, LinearRule]
    parameters: Mapping[str, ParameterRule] = field(default_factory=dict)
    attentions: tuple[str, ...] = ()
    recurrent: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    mixing: Mapping[str, str] = field(default_factory=dict)
    wide_norms: Mapping[str, Layout] = field(default_factory=dict)
    text: str = ""
    encoder: str = ""
    embedding: str = ""
    positions: tuple[str, ...] = ()
    head: str = ""
    after: tuple[str, ...] = ()
    per_layer: tuple[str, int] = ("", 0)
    experts: Mapping[str, ExpertsRule] = field(default_factory=dict)
    matrices: Mapping[str, LinearRule] = field(default_factory=dict)
    units: tuple[str, ...] = ()
    quantized: Mapping[str, Packing] = field(default_factory=dict)
    quantization: str | None = None
    compute: str | None = None
    task: str = CAUSAL
    readers: frozenset[str] = frozenset()
    stages: tuple[tuple[int, int], ...] = ()
    states_every: int = 0
    pp_rank: int | None = None

    def stage_of(self, name: str) -> int:
        """The stage that has the module or parameter `name`. What is around the layers is finished on the last."""
        if not self.stages:
            return 0
        last = len(self.stages) - 1
        if name.startswith(f"{self.layers}."):
            layer = int(name.removeprefix(f"{self.layers}.").partition(".")[0])
            return next(index for index, (_, stop) in enumerate(self.stages) if layer < stop)
        # "" is the model itself; it and the modules around the layers return what the last stage has.
        if not name or f"{self.layers}.".startswith(f"{name}."):
            return last
        for module in (*self.after, self.head):
            if module and is_in(name, module):
                return last
        return 0

    @property
    def tables(self) -> tuple[str, ...]:
        """The embeddings that may have an adapter."""
        return (self.embedding, *self.positions)

    def holds(self, name: str) -> bool:
        """Whether the part of the model that the plan is about has the module or parameter `name`."""
        return self.pp_rank is None or self.rank_of(name) == self.pp_rank

    def rank_of(self, name: str) -> int:
        """The pp rank that has the module or parameter `name`."""
        # Stages go round the ranks: under interleave each has several.
        return self.stage_of(name) % self.topology.size_over(LAYERS)

    @property
    def own_stages(self) -> tuple[int, ...]:
        """The stages that the plan is about, in order; one of all layers without a pipeline."""
        if self.pp_rank is None:
            return (0,)
        return tuple(range(self.pp_rank, len(self.stages), self.topology.size_over(LAYERS)))

    @property
    def has_first_stage(self) -> bool:
        """Whether what this plan is about begins with the tokens."""
        # Rank 0, or None: all of the model.
        return not self.pp_rank

    @property
    def has_last_stage(self) -> bool:
        """Whether what this plan is about ends with the model's output."""
        return self.pp_rank is None or self.own_stages[-1] == len(self.stages) - 1

    @property
    def has_vocabulary(self) -> bool:
        """Whether its outputs are logits of a vocabulary, split over tp; else what follows the layers is whole."""
        return self.task in (CAUSAL, PAIRED)

    @property
    def asked(self) -> Asked:
        """What is asked for, as far as the plan says it: see `plan.features`."""
        return {
            "topology": self.topology,
            "task": self.task,
            "composite": self.text,
            "experts": bool(self.experts),
            "model.quantization": self.quantization,
            "model.compute": self.compute,
        }

    def is_of_head(self, name: str) -> bool:
        """Whether the module `name` is in the head of a model that is not a language model."""
        return not self.has_vocabulary and name.partition(".")[0] in HEADS

    @cached_property
    def projections(self) -> Mapping[str, ExpertRule]:
        """Name -> rule of every projection of routed experts."""
        return {rule.name: rule for layer in self.experts.values() for rule in layer.projections}

    @cached_property
    def routers(self) -> frozenset[str]:
        """Names of the modules that choose experts."""
        return frozenset().union(*(rule.routers for rule in self.experts.values()))

    def is_text(self, module: str) -> bool:
        """Whether `module` is of the text part: no tower or projector of a composite."""
        return not self.text or module in (self.embedding, self.head) or module.startswith(f"{self.text}.")

    def is_sharded(self, parameter: str, *, ndim: int) -> bool:
        """Whether a base parameter is sharded over dp, as the matrices of decoder layers are.

        One-dim parameters are small and may be trained. A router with its own weight is small too, and its adapter is
        computed from that weight. Experts that differ within a dp group are split over the expert axes instead.
        """
        if ndim < 2 or _owner(parameter) in self.matrices or not any(is_in(parameter, unit) for unit in self.units):
            return False
        # Of experts alone: it looks at every rank, which takes 50 ms of 4,096.
        return not any(is_in(parameter, name) for name in self.experts) or self.topology.experts_repeat_over_dp

    @cached_property
    def neighbours(self) -> frozenset[str]:
        """Names of the linears that may share an input tensor with another one of the same module and input width.

        A row-parallel one reads an intermediate result of its block.
        """
        entering = [name for name, rule in self.linears.items() if rule.split is not Split.ROW]
        return frozenset().union(*self._groups(entering))

    @cached_property
    def together(self) -> Mapping[str, frozenset[str]]:
        """Linear -> those called with one tensor, itself included, as the family's table tells: q, k, v; gate, up."""
        found: dict[str, frozenset[str]] = {}
        for group in self._groups(self.readers & self.neighbours):
            found |= dict.fromkeys(group, frozenset(group))
        return found

    def _groups(self, names: Iterable[str]) -> list[set[str]]:
        """The linears `names` of one module and one input width, where these are two or more."""
        groups: dict[tuple[str, int], set[str]] = {}
        for name in names:
            groups.setdefault((_owner(name), self.linears[name].in_features), set()).add(name)
        return [group for group in groups.values() if len(group) > 1]

    def riders(self, region: Region) -> tuple[str, ...]:
        """Names of the linears whose x A^T may be gathered with the input of `region`, if they have its width."""
        # Without sp nothing is gathered with the input.
        if not (region.is_split and self.topology.sp):
            return ()
        start = f"{region.name}."
        return tuple(n for n, rule in self.linears.items() if n.startswith(start) and rule.split is Split.COLUMN)

    @cached_property
    def owners(self) -> frozenset[str]:
        """Names of the parent modules of linears."""
        return frozenset(map(_owner, self.linears))

    def rule_of(self, name: str) -> LinearRule | None:
        """The rule of a linear, a projection of experts or a router; else None."""
        return self.linears.get(name) or self.projections.get(name) or self.matrices.get(name)

    def domain_of(self, module: str) -> Domain:
        """The domain of parameters of `module` that are whole on every tp rank."""
        for region in self.regions:
            if is_in(module, region.name):
                return Domain.PARTIAL if region.is_split else Domain.EQUAL
        if self.layers and module.startswith(f"{self.layers}."):
            return Domain.RESIDUAL
        if module in self.after:
            return Domain.PARTIAL
        return Domain.EQUAL

    def axes_of_norm(self, name: str) -> frozenset[str]:
        """The axes of the ranks that together hold the width, or a group of it, over which the norm `name` runs."""
        groups = self.wide_norms[name].groups
        # A group of the width lies on neighbouring ranks, as copies of a head do.
        if groups == 1:
            return FEATURES
        return frozenset({copies_axis(self.topology.tp // groups)})

    @property
    def copies(self) -> set[int]:
        """The numbers of neighbouring tp ranks, above 1, that hold replicated rows."""
        found = set[int]()
        rules: list[LinearRule | ParameterRule] = [*self.linears.values(), *self.parameters.values()]
        for rule in rules:
            if rule.layout is not None:
                found |= rule.layout.copies(self.topology.tp)
        return found - {1}


def kind_of(name: str) -> str:
    """`model.layers.17.mlp.up_proj` -> `model.layers.*.mlp.up_proj`."""
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))


def _owner(name: str) -> str:
    return name.rpartition(".")[0]


def is_in(name: str, module: str) -> bool:
    """Whether `name` is `module`, or of something inside it."""
    return name == module or name.startswith(f"{module}.")

"""The plan: which module is split how, in which region. Plain data, computable without a process group.

Owns: the words of a plan: `LinearRule`, `ParameterRule`, `Region`, `ExpertsRule`, `ModelPlan`. Does not own: how it is
derived from a model (`plan.derive`), which rows a rank holds (`plan.layout`), the gradient axes that follow
(`plan.grads`), the layers that run it (`layers`), LoRA targets (`adapter`).

A *region* is a block whose input enters the tensor-parallel part once and leaves it once: an attention, an MLP.
Each block of a decoder layer is one of

- a split region: its linears are column- or row-parallel, each rank computes its own heads or features;
- a whole region: kept whole on every rank. Under sp it sees all tokens: gathered before, sliced after. This is the
  safe default for whatever the plan does not split: a convolution or a state-space mixer that saw only its own slice
  of the sequence would train silently wrong;
- token-wise (a norm, a dropout): works on any slice of the tokens, and is left alone;
- a block of routed experts: its router works on any slice of the tokens, its experts send tokens where they belong
  (`plan.experts`), and what else it holds, a shared expert, is a block as above.

The embedding and the output head are split over the vocabulary. All that runs after the last decoder layer is one more
region, which the head leaves: its ranks each see all tokens, and make logits of their own part of the vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property

from meshlora.plan.layout import Layout, Split
from meshlora.plan.topology import Topology


class Domain(StrEnum):
    """Which tokens and which terms a module sees on one tp rank, where it is whole on every rank."""

    PARTIAL = "partial"  # inside a split region: all tokens, and its gradient is one term of a sum over tp
    EQUAL = "equal"  # in a whole region, or before the first layer: the same on every tp rank
    RESIDUAL = "residual"  # between regions: all tokens alike, or under sp its own


@dataclass(frozen=True)
class LinearRule:
    """One linear of the model. Widths are global: `in_features`, `out_features` of the whole matrix.

    Attributes:
        layout: of the dim that is split: out of a column, in of a row; None where the linear is whole.
        domain: of a whole linear; of a row-parallel one's output.
        is_transposed: stored as `[in, out]`, as transformers' Conv1D is.
        fused: the pieces that its output features are made of, where there are several; on any topology.
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
        """(in, out) of what each of `tp` ranks holds."""
        local = self.layout.local_size(tp) if self.layout else 0
        return (
            local if self.split is Split.ROW else self.in_features,
            local if self.split is Split.COLUMN else self.out_features,
        )


@dataclass(frozen=True)
class ExpertRule(LinearRule):
    """One projection of all experts of a layer, a stack of matrices. Widths are those of one whole expert.

    Attributes:
        name: of the stack, as in `model.layers.0.mlp.experts.gate_up_proj`.
        split: over etp: COLUMN of the first projection, ROW of the second. layout: of the dim that is split.
        is_transposed: stored as `[E, in, out]`. fused: gate and up, where they are one matrix.
        is_swapped: PEFT takes the input for the output: its A is on the output side, its B on the input side.
    """

    layout: Layout
    num_experts: int = 1
    is_swapped: bool = False


@dataclass(frozen=True)
class ExpertsRule:
    """The experts of one layer.

    Attributes:
        name: of their module. block: of the module that calls it with what its router chose.
        first, second: the projections into and out of the experts, in a row.
        routers: names of the modules in the block that choose: each owns a matrix with a row for every expert.
        weights_first: the block multiplies what goes into an expert, not what comes out (llama4).
    """

    name: str
    block: str
    num_experts: int
    first: ExpertRule
    second: ExpertRule
    routers: tuple[str, ...] = ()
    weights_first: bool = False

    @property
    def projections(self) -> tuple[ExpertRule, ExpertRule]:
        """Both."""
        return self.first, self.second


@dataclass(frozen=True)
class ParameterRule:
    """A parameter that is no linear's and split over tp along `dim`: a vocabulary, one value a head."""

    dim: int
    layout: Layout


@dataclass(frozen=True)
class Region:
    """A block that tensors enter and leave once.

    Attributes:
        is_split: False where every rank computes all of it.
        local: module -> attribute -> its value on a rank. A dot leads into the module's configuration.
        sliced: argument -> where its dim of heads is, and how many heads there are.
        passes: arguments that are added to the output.
    """

    name: str
    is_split: bool
    local: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    sliced: Mapping[str, tuple[int | str, int]] = field(default_factory=dict)
    passes: tuple[str, ...] = ()


@dataclass(frozen=True)
class ModelPlan:
    """Everything that is known about a model on a topology before any process exists.

    Attributes:
        model_type: the transformers `model_type`.
        layers: name of the ModuleList of decoder layers; the residual stream is cut and joined at its ends. Empty
            where tp=1: nothing of the model's structure is then relied on.
        regions: the regions in module order; empty where tp=1.
        linears: name -> rule, for every linear of the model, split or whole.
        parameters: name -> rule, of all others that are split. wide_norms: name -> layout of the width that is split.
        embedding, head: names of the input and output embeddings; head is empty where it is no linear.
        after: modules that run after the last decoder layer, but for the head.
        experts: name -> rule, of every module of routed experts.
        matrices: name -> rule, of routers that are no linears and own their `weight` themselves.
        units: names of the decoder layers, whose matrices are sharded over dp; empty without dp_shard.
        quantized: names of the linears whose matrices are stored in few bits; quantization: how.
    """

    model_type: str
    topology: Topology
    layers: str
    num_layers: int
    regions: tuple[Region, ...]
    linears: Mapping[str, LinearRule]
    parameters: Mapping[str, ParameterRule] = field(default_factory=dict)
    wide_norms: Mapping[str, Layout] = field(default_factory=dict)
    embedding: str = ""
    head: str = ""
    after: tuple[str, ...] = ()
    experts: Mapping[str, ExpertsRule] = field(default_factory=dict)
    matrices: Mapping[str, LinearRule] = field(default_factory=dict)
    units: tuple[str, ...] = ()
    quantized: frozenset[str] = frozenset()
    quantization: str | None = None

    @cached_property
    def projections(self) -> Mapping[str, ExpertRule]:
        """Name -> rule, of every projection of routed experts."""
        return {rule.name: rule for layer in self.experts.values() for rule in layer.projections}

    @cached_property
    def routers(self) -> frozenset[str]:
        """Names of the modules that choose experts."""
        return frozenset(name for rule in self.experts.values() for name in rule.routers)

    def is_sharded(self, parameter: str, *, ndim: int) -> bool:
        """Whether a parameter of the base is sharded over dp: a matrix of a decoder layer.

        What has one dim is small, and can be trained. A router that owns its weight is small too, and its adapter is
        made of the weight. Experts that differ between the ranks of a dp group are sharded over the experts' own axes.
        """
        owner = parameter.rpartition(".")[0]
        if ndim < 2 or not parameter.startswith(tuple(f"{unit}." for unit in self.units)) or owner in self.matrices:
            return False
        is_of_experts = parameter.startswith(tuple(f"{name}." for name in self.experts))
        return not is_of_experts or self.topology.experts_repeat_over_dp

    @cached_property
    def neighbours(self) -> frozenset[str]:
        """Names of the linears that may be called with the same tensor as another: of one module, of one width."""
        widths = Counter((_owner(name), rule.in_features) for name, rule in self.linears.items() if _enters(rule))
        return frozenset(
            name for name, rule in self.linears.items() if _enters(rule) and widths[_owner(name), rule.in_features] > 1
        )

    def riders(self, region: Region) -> tuple[str, ...]:
        """Names of the linears whose x A^T may ride with the input of `region`; those of its width do."""
        if not (region.is_split and self.topology.sp):
            return ()
        inside = (name for name in self.linears if name.startswith(f"{region.name}."))
        return tuple(name for name in inside if self.linears[name].split is Split.COLUMN)

    @cached_property
    def owners(self) -> frozenset[str]:
        """Names of the modules that linears are children of."""
        return frozenset(map(_owner, self.linears))

    def rule_of(self, name: str) -> LinearRule | None:
        """Of a linear, of a projection of experts, or of a router; None of what is none of them."""
        return self.linears.get(name) or self.projections.get(name) or self.matrices.get(name)

    def domain_of(self, module: str) -> Domain:
        """Of what is whole on every tp rank, in `module`."""
        region = next((r for r in self.regions if module == r.name or module.startswith(f"{r.name}.")), None)
        if region is not None:
            return Domain.PARTIAL if region.is_split else Domain.EQUAL
        if self.layers and module.startswith(f"{self.layers}."):
            return Domain.RESIDUAL
        return Domain.PARTIAL if module in self.after else Domain.EQUAL

    @property
    def copies(self) -> set[int]:
        """The numbers of neighbouring tp ranks, above 1, that hold the same rows of something."""
        layouts = [rule.layout for rule in self.linears.values()] + [rule.layout for rule in self.parameters.values()]
        return {n for layout in layouts if layout for n in layout.copies(self.topology.tp)} - {1}


def kind_of(name: str) -> str:
    """`model.layers.17.mlp.up_proj` -> `model.layers.*.mlp.up_proj`."""
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))


def _owner(name: str) -> str:
    return name.rpartition(".")[0]


def _enters(rule: LinearRule) -> bool:
    """Whether a linear reads what comes into its block: a row-parallel one reads what the block has made."""
    return rule.split is not Split.ROW

"""Routed experts with LoRA on a mesh: one module for every family with transformers' interface of experts.

Owns: the module that holds this rank's experts and runs them (`ParallelExperts`), its projections with their adapters
(`ParallelExpertLinear`), and which tokens this rank sends. Does not own: the routes of tokens
(`wings.experts.dispatch`), the grouped products (`wings.experts.products`), routers, which stay the model's own on
every rank.

The module stays the model's own: its activation and gate, with any clamping, are called unchanged on the features of
this rank. The second projection yields one term of a sum on each etp rank, LoRA's part included; the sum is taken on
the way back, so LoRA costs no collective.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from meshlora.comm.collectives import all_gather, gather_each_to_one
from meshlora.comm.groups import Axis, Mesh
from meshlora.layers.adapted import AdaptedLeaf, Placement, become
from meshlora.layers.frozen import FrozenMatrix
from meshlora.layers.tokens import CutsTokens, owners
from meshlora.plan.layout import Split
from meshlora.plan.rules import ExpertRule, ExpertsRule, ModelPlan
from meshlora.wings.experts.dispatch import Journey, Places, Slots
from meshlora.wings.experts.mlp import GroupedMlpFunction
from meshlora.wings.experts.products import Projection, by_row
from meshlora.wings.experts.row_counts import RowCounts
from meshlora_ground.compat.transformers_models import gate_of
from meshlora_ground.topology import EP, ETP
from meshlora_ground.transfer import to_device


class ParallelExpertLinear(AdaptedLeaf, FrozenMatrix):
    """One frozen projection of this rank's experts with its adapters.

    Attributes, besides those of `AdaptedLeaf` and `FrozenMatrix`:
        rule: of all experts. num_experts: of this rank.
        weight: `[E_local, out_local, in_local]`, or as stored, `[E_local, in_local, out_local]`.
        bias: `[E_local, out_local]` or None.
        lora_A, lora_B: `[E_local, r, in_local]`, `[E_local, out_local, r]`; `[1, ...]` if all experts share them.
    """

    def __init__(self, rule: ExpertRule, mesh: Mesh, *, dtype: torch.dtype, device: torch.device | str) -> None:
        etp = mesh.over({ETP})
        super().__init__(*rule.local_features(etp.size))
        self.rule, self.etp = rule, etp
        self.num_experts = rule.num_experts // mesh.over({EP}).size
        shape = [self.out_features, self.in_features]
        if rule.is_transposed:
            shape.reverse()
        empty = torch.empty(self.num_experts, *shape, dtype=dtype, device=device)
        self.weight = nn.Parameter(empty, requires_grad=False)
        self.register_parameter("bias", None)
        if rule.has_bias:
            empty = torch.empty(self.num_experts, self.out_features, dtype=dtype, device=device)
            self.bias = nn.Parameter(empty, requires_grad=False)

    def add_adapter(self, name: str, factors: Mapping[str, Tensor], *, scaling: float) -> None:
        """As in `AdaptedLeaf`; B is stored in the layout that the grouped products read."""
        held = dict(factors)
        for part, value in factors.items():
            assert len(value) in (1, self.rule.with_factors.local_size(self.rule.num_experts // self.num_experts)), part
            if part.startswith("B"):  # `B.gate` of a piece, too
                held[part] = value.mT.contiguous().mT
        super().add_adapter(name, held, scaling=scaling)

    def stored_name(self, path: str, leaf: str) -> str:
        """Before the split projections are parameters, not modules."""
        if leaf == "weight":
            return path
        return f"{path}_{leaf}"

    def placement(self, parameter: Tensor) -> Placement:
        """Where its base `parameter` is stored."""
        rule = self.rule
        if parameter.ndim == 2:  # a bias
            of_bias = (rule.num_experts, rule.out_features)
            if rule.split is not Split.COLUMN or rule.layout is None:
                return Placement(of_bias, None, None, num_experts=rule.num_experts)
            return Placement(of_bias, 1, rule.layout, num_experts=rule.num_experts)
        # Held as it is stored: no transposition.
        shape, dim = (rule.with_factors.size, rule.out_features, rule.in_features), 2
        if rule.is_transposed:
            shape = (shape[0], rule.in_features, rule.out_features)
        if (rule.split is Split.COLUMN) != rule.is_transposed:
            dim = 1
        return Placement(shape, dim, rule.layout, num_experts=rule.num_experts, has_inputs_first=rule.is_transposed)

    def projection(self) -> Projection:
        """The frozen part; for a row projection one term of a sum over etp, with the bias on the first rank only."""
        bias = self.bias if self.rule.split is Split.COLUMN or self.etp.rank == 0 else None
        scale = 1.0
        if self.in_use is not None:
            scale = self.scaling[self.in_use]
        return Projection(self.frozen_weight, bias, scale, self.rule.is_transposed)

    def active_factors(self, adapters: Sequence[str | None] = ()) -> tuple[Tensor | None, Tensor | None]:
        """A and B of the adapter in use, None if there is none.

        adapters: the K trained ones, if several. The factors are then `[E_local K, ...]`, an expert's side by side,
        zero-padded to the largest r, and B includes the scale of its adapter.
        """
        if self.in_use is not None:
            return self.factors_of_experts(self.in_use)
        pairs = {name: self.factors_of_experts(name) for name in adapters if name is not None and name in self.scaling}
        if not pairs:
            return None, None
        r = max(a.shape[-2] for a, _ in pairs.values())
        some_a, some_b = next(iter(pairs.values()))
        no_a, no_b = some_a.new_zeros(1, r, self.in_features), some_b.new_zeros(1, self.out_features, r)
        every_a, every_b = [], []
        for name in adapters:  # one that is not on these experts is of zeros
            a, b = pairs.get(str(name), (no_a, no_b))
            a, b = F.pad(a, (0, 0, 0, r - a.shape[-2])), F.pad(b, (0, r - b.shape[-1]))
            every_a.append(a.expand(self.num_experts, -1, -1))
            every_b.append((b * self.scaling.get(str(name), 1.0)).expand(self.num_experts, -1, -1))
        return torch.stack(every_a, 1).flatten(0, 1), torch.stack(every_b, 1).flatten(0, 1)

    def factors_of_experts(self, name: str) -> tuple[Tensor, Tensor]:
        """`factors`, without those of experts that compute nothing."""
        a, b = self.factors(name)
        if self.rule.num_zero == 0:  # a slice of all would cost a copy in its backward
            return a, b
        return a[: self.num_experts], b[: self.num_experts]

    def _piece_rows(self, piece: str) -> Tensor:
        assert self.rule.fused is not None, self.rule
        return self.rule.fused.piece_rows(piece, rank=self.etp.rank, size=self.etp.size)

    def extra_repr(self) -> str:
        shape = f"{self.num_experts} x ({self.in_features} -> {self.out_features})"
        return f"{self.rule.split}, {shape}, adapters={list(self.scaling)}"


class ParallelExperts(CutsTokens):
    """This rank's experts of a layer. Made by `parallelize_experts` from the model's own module.

    Attributes:
        rule: of all experts. mesh: the ranks that hold them.
    """

    rule: ExpertsRule
    mesh: Mesh
    act_fn: Any

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """`[T, H]`, the chosen experts `[T, k]` and their weights `[T, k]` -> `[T, H]`."""
        number = len(hidden_states)
        adapters = self._adapters()
        pairs = top_k_index  # ids of experts, or of pairs of an expert and an adapter
        if adapters:
            tokens = self._projections()[0].tokens
            assert tokens is not None
            owner = to_device(owners(tokens.parts(self.rule.name, number), adapters), pairs.device)
            pairs = top_k_index * len(adapters) + owner.unsqueeze(1)
        if self.cuts_tokens:
            hidden_states, top_k_weights = _TokenShare.apply(hidden_states, top_k_weights, self.mesh.tp)
            pairs = _share(pairs, self.mesh.tp)
        if self.rule.first.num_zero:
            out = self._of_choices(hidden_states, pairs, top_k_weights, adapters)
        else:
            out = self._of_own_tokens(hidden_states, pairs, top_k_weights, adapters)
        if not self.cuts_tokens:
            return out
        return gather_each_to_one(_padded(out, number, self.mesh.tp), self.mesh.tp)[:number]

    def _projections(self) -> list[ParallelExpertLinear]:
        found = []
        for rule in self.rule.projections:
            leaf = self.get_submodule(rule.name.rpartition(".")[2])
            assert isinstance(leaf, ParallelExpertLinear)
            found.append(leaf)
        return found

    def _adapters(self) -> tuple[str | None, ...]:
        """The trained adapters, if they are several and any is on these experts; identical on all ranks."""
        leaves = self._projections()
        tokens = leaves[0].tokens or leaves[1].tokens
        if tokens is None or not tokens.names_adapters:
            return ()
        for leaf in leaves:
            if not leaf.scaling.keys().isdisjoint(tokens.adapters):
                return tokens.adapters
        return ()

    def _of_choices(self, tokens: Tensor, chosen: Tensor, weights: Tensor, adapters: Sequence[str | None]) -> Tensor:
        """As `_of_own_tokens`, where some choices are experts that give back their input: they cost a multiplication
        here, and no row of theirs is sent.
        """
        is_routed = chosen < self.rule.num_experts * (len(adapters) or 1)
        at_home = tokens * torch.where(is_routed, 0, weights).sum(1, keepdim=True).to(tokens.dtype)
        numbers = is_routed.sum(1)
        # One row for each choice that is left, in the order of the tokens: the host waits to learn how many.
        routed = Places(is_routed.nonzero()[:, 0], numbers.cumsum(0) - numbers)
        of_rows = chosen[is_routed].unsqueeze(1), weights[is_routed].unsqueeze(1)
        return at_home + routed.collect(self._of_own_tokens(routed.spread(tokens), *of_rows, adapters))

    def _of_own_tokens(
        self, tokens: Tensor, top_k_index: Tensor, weights: Tensor, adapters: Sequence[str | None]
    ) -> Tensor:
        slots = Slots.of(top_k_index, self.rule.num_experts * (len(adapters) or 1))
        is_home, weights_first = self.mesh.over({EP, ETP}).size == 1, self.rule.weights_first
        norm = getattr(self, "post_expert_norm", None)
        if is_home and not weights_first and norm is None:
            return self._run(tokens, weights, slots.places, slots.counts, adapters)
        rows = slots.rows(tokens)
        if weights_first:  # they are in front of the gate, which is not linear
            rows = rows * by_row(weights, slots.places.places).unsqueeze(1).to(rows.dtype)
        if is_home:
            as_they_lie = Places.permutation(torch.arange(len(rows), device=rows.device))
            rows = self._run(rows, None, as_they_lie, slots.counts, adapters)
        else:
            journey = Journey(slots, self.mesh)
            counts = RowCounts.known(journey.counts, rows.device)
            rows = journey.back(self._run(journey.there(rows), None, journey.by_expert, counts, adapters))
        if norm is not None:  # of muse_spark: after the sum over etp, as it needs all of an expert's output
            rows = norm(rows)
        if weights_first:
            return slots.places.collect(rows)
        return slots.weighted_sum(rows, weights)

    def _run(
        self, rows: Tensor, weights: Tensor | None, places: Places, counts: RowCounts, adapters: Sequence[str | None]
    ) -> Tensor:
        """Run the MLPs of this rank's experts; `places` maps the rows to expert order and back."""
        first, second = self._projections()
        return GroupedMlpFunction.apply(
            rows,
            weights,
            places.index,
            places.places,
            counts,
            self._gated,
            first.projection(),
            second.projection(),
            *first.active_factors(adapters),
            *second.active_factors(adapters),
        )

    def _gated(self, inner: Tensor) -> Tensor:
        """The first projection's output -> the second's input, by the model's own gate if it has one."""
        if self.rule.first.fused is None:
            return self.act_fn(inner)
        own = gate_of(self)
        if own is not None:
            return own(inner)
        gate, up = inner.chunk(2, dim=-1)
        return self.act_fn(gate) * up


def replace_experts(model: nn.Module, plan: ModelPlan, mesh: Mesh, *, dtype: torch.dtype) -> None:
    """Make all experts of `model`, on the meta device, hold this rank's part of them."""
    for name, experts in plan.experts.items():
        parallelize_experts(model.get_submodule(name), experts, mesh, dtype=dtype, sp=plan.topology.sp)
        if experts.weights_first:
            become(model.get_submodule(experts.block), ScaledExpertsBlock)
    if dtype == torch.float64 and hasattr(model, "set_experts_implementation"):
        # Of those that are whole: the others do not compute in float64.
        model.set_experts_implementation("eager")  # type: ignore[operator]


def parallelize_experts(module: nn.Module, rule: ExpertsRule, mesh: Mesh, *, dtype: torch.dtype, sp: bool) -> None:
    """Make `module`, experts on the meta device, hold this rank's part of them."""
    for projection in rule.projections:
        leaf = projection.name.rpartition(".")[2]
        delattr(module, leaf)
        if projection.has_bias:
            delattr(module, f"{leaf}_bias")
        module.add_module(leaf, ParallelExpertLinear(projection, mesh, dtype=dtype, device="meta"))
    become(module, ParallelExperts)
    assert isinstance(module, ParallelExperts)
    module.rule, module.mesh = rule, mesh
    module.cuts_tokens = mesh.tp.size > 1 and not sp


class _TokenShare(Function):
    """`[T, H]`, `[T, k]`, replicated over tp -> this rank's share of both; the last ranks may have fewer tokens.

    Backward: one gather of both gradients, as bytes.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weights: Tensor, tp: Axis) -> tuple[Tensor, Tensor]:
        ctx.tp, ctx.number = tp, len(hidden)
        return _share(hidden, tp).clone(), _share(weights, tp).clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        parts = [grad.contiguous().view(torch.uint8) for grad in grads]
        both = all_gather(_padded(torch.cat(parts, 1), ctx.number, ctx.tp), ctx.tp)[: ctx.number]
        hidden, weights = both.split([part.shape[1] for part in parts], 1)
        return hidden.contiguous().view(grads[0].dtype), weights.contiguous().view(grads[1].dtype), None


def _share(tokens: Tensor, tp: Axis) -> Tensor:
    each = -(-len(tokens) // tp.size)
    return tokens[tp.rank * each : (tp.rank + 1) * each]


def _padded(own: Tensor, number: int, tp: Axis) -> Tensor:
    """A share of `number` tokens `[n, ...]`, zero-padded to the largest share."""
    each = -(-number // tp.size)
    if len(own) == each:
        return own
    return torch.cat([own, own.new_zeros(each - len(own), *own.shape[1:])])


class ScaledExpertsBlock(nn.Module):
    """A block whose own code passes every token, scaled, to every expert (llama4): here only to its chosen ones."""

    router: Any
    shared_expert: Any
    experts: Any
    hidden_dim: int
    top_k: int

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """`[..., H]` -> (`[T, H]`, router logits `[T, E]`)."""
        tokens = hidden_states.reshape(-1, self.hidden_dim)
        scores, logits = self.router(tokens)  # zero except for the chosen experts
        weights, chosen = torch.topk(scores, self.top_k, dim=1)
        return self.shared_expert(tokens) + self.experts(tokens, chosen, weights), logits

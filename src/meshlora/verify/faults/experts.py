"""Experts: the way of their tokens, the axes that they lie on, their load-balancing loss."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from meshlora.adapter import initialization
from meshlora.adapter.formats import file_tensors
from meshlora.comm.collectives import reduce_each_to_one
from meshlora.layers.experts.dispatch import Journey, Places, Slots
from meshlora.layers.experts.module import ParallelExperts
from meshlora.model import inject, weights
from meshlora.plan.grads import Segment
from meshlora.plan.topology import ETP
from meshlora.train import balance, gradsync, trainer
from meshlora.train.balance import LoadBalancing
from meshlora.verify.faults import wrong_code
from meshlora.verify.faults.fault import by_name, in_call, instead, mutation, then


def _segments(change: Callable[[Any, Segment], Segment]) -> Callable[[Any], Any]:
    """What of an expert's factor is summed over which axes, changed."""

    def replace(original: Any) -> Any:
        def segments(factor: Any, mesh: Any) -> list[Segment]:
            found: list[Segment] = original(factor, mesh)
            return [change(factor, segment) for segment in found] if factor.rule.is_expert else found

        return segments

    return replace


def _without(axis: str, *, side: str) -> Callable[[Any, Segment], Segment]:
    """Not summed over `axis`; side: "A" or "B", on whose side the factor is."""

    def change(factor: Any, segment: Segment) -> Segment:
        is_side = f".lora_{side}" in factor.name
        return dataclasses.replace(segment, grad_axes=segment.grad_axes - {axis}) if is_side else segment

    return change


def _over_dense_dp(_: Any, segment: Segment) -> Segment:
    axes = {"dp" if axis == "edp" else axis for axis in segment.grad_axes}
    return dataclasses.replace(segment, grad_axes=frozenset(axes) - ({"etp", "ep"} if "dp" in axes else set()))


def _other_experts(original: Any) -> Any:
    """Each ep rank reads the experts of the next."""

    def parts(dim: int, layout: Any, *, rank: int, size: int) -> Any:
        return original(dim, layout, rank=(rank + 1) % size if dim == 0 else rank, size=size)

    return parts


def _in_experts_read(original: Any) -> Any:
    """Only where experts are read."""
    wrong = in_call(weights, "_parts", _other_experts)(original)
    return lambda name, where, source, mesh: (wrong if where.num_experts else original)(name, where, source, mesh)


def _reduced_again(rows: Tensor, self: Any, *_: Any) -> Tensor:
    return reduce_each_to_one(rows, self.mesh.over({ETP}))


def _without_last_token(original: Any) -> Any:
    """A capacity: what comes last is not computed."""

    def weighted_sum(self: Slots, rows: Tensor, given: Tensor) -> Tensor:
        keep = torch.ones_like(given)
        keep[-1:] = 0
        out: Tensor = original(self, rows, given * keep)
        return out

    return weighted_sum


def _left_in_order(_: None, self: Journey, *args: Any) -> None:
    """Rows go home in the order in which experts took them."""
    index = self.by_expert.index
    self.by_expert = Places(index, torch.arange(len(index), device=index.device).unsqueeze(1))


def _cut_again(original: Any) -> Any:
    def parallelize_experts(module: Any, rule: Any, mesh: Any, **options: Any) -> None:
        original(module, rule, mesh, **options)
        module.cuts_tokens = mesh.tp.size > 1

    return parallelize_experts


def _swapped(inner: Tensor, rule: Any) -> Tensor:
    """gate for up and up for gate."""
    if rule.fused.groups > 1:
        return inner.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    return torch.cat(inner.chunk(2, -1)[::-1], -1)


def _gate_and_up_swapped(original: Any) -> Any:
    def gated(self: Any, inner: Tensor) -> Tensor:
        first = self.rule.first
        out: Tensor = original(self, inner if first.fused is None else _swapped(inner, first))
        return out

    return gated


def _expert_major(original: Any) -> Any:
    """B as A is: one expert after another."""

    def to_peft(a: Tensor, b: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        left, right = original(a, b, **options)
        rank = b.shape[2]
        return left, right.unflatten(1, (rank, -1)).mT.flatten(1).contiguous()

    return to_peft


def _local_counts(original: Any) -> Any:
    """The shares of experts among this rank's own tokens."""

    def add_up(self: Any, counts: Tensor) -> None:
        own = counts.clone()
        original(self, counts)
        rows = float(own[-2]) or 1.0
        self._shares = (own[:-2] / rows).to(self._shares.dtype)

    return add_up


def _same_for_all(original: Any) -> Any:
    """One draw for all experts."""
    return lambda seed, name: original(seed, name.rpartition(".")[0] if name.rpartition(".")[2].isdecimal() else name)


OF_EXPERTS = by_name(
    mutation(
        "experts_first_a_not_summed_over_etp",
        "each etp rank has the gradient of A of gate and up from its own features: it is a sum over etp",
        "expert_target etp",
        (gradsync, "_segments", _segments(_without("etp", side="A"))),
    ),
    mutation(
        "experts_second_b_not_summed_over_etp",
        "x A^T of down is a sum over etp, so the gradient of its B is one too",
        "expert_target etp",
        (gradsync, "_segments", _segments(_without("etp", side="B"))),
    ),
    mutation(
        "experts_not_summed_over_edp",
        "the gradient of an expert's factor is a sum over the ranks that hold the same part of it",
        "expert_target edp",
        (gradsync, "_segments", _segments(lambda f, s: dataclasses.replace(s, grad_axes=s.grad_axes - {"edp"}))),
    ),
    mutation(
        "experts_summed_over_dense_dp",
        "the data-parallel ranks of experts are not those of attention",
        "expert_target dense_dp_is_not_edp",
        (gradsync, "_segments", _segments(_over_dense_dp)),
    ),
    mutation(
        "experts_permuted_over_ep",
        "ep rank i holds the i-th share of the experts",
        "experts ep",
        (weights, "_read_local", _in_experts_read),
    ),
    mutation(
        "experts_reduced_twice",
        "what an expert gives is summed over etp once, on the way back",
        "experts etp",
        (ParallelExperts, "_run", then(_reduced_again)),
    ),
    mutation(
        "routing_weight_applied_twice",
        "an expert's output is multiplied by its routing weight once",
        "experts expert_axes routing_last",
        (Slots, "weighted_sum", lambda f: lambda self, rows, given: f(self, rows, given * given)),
    ),
    mutation(
        "tokens_cut_twice",
        "under sp each tp rank sends all the tokens that it has",
        "experts sp",
        (inject, "parallelize_experts", _cut_again),
    ),
    mutation(
        "rows_combined_in_order_of_arrival",
        "a row goes back to the token that it came from, whatever the order in which experts take rows",
        "experts expert_axes",
        (Journey, "__init__", then(_left_in_order)),
    ),
    mutation(
        "token_dropped",
        "no token is dropped: there is no capacity",
        "experts expert_axes routing_last",
        (Slots, "weighted_sum", _without_last_token),
    ),
    mutation(
        "experts_b_stored_expert_major",
        "in PEFT's files B of experts is expert-minor",
        "expert_target",
        (file_tensors, "to_peft", _expert_major),
    ),
    mutation(
        "experts_gate_and_up_swapped",
        "the first half of an expert's first projection goes through the activation, the second does not",
        "gated_experts",
        (ParallelExperts, "_gated", _gate_and_up_swapped),
    ),
    mutation(
        "aux_loss_of_local_tokens",
        "the load-balancing loss counts the choices of all tokens of a step, of all ranks",
        "aux_loss other_tokens",
        (balance.LoadBalancing, "_add_up", _local_counts),
    ),
    mutation(
        "aux_loss_left_out",
        "a load-balancing loss that is asked for has a gradient",
        "aux_loss",
        (balance.LoadBalancing, "term", then(lambda term, *_: term * 0)),
    ),
    mutation(
        "experts_drawn_alike",
        "each expert's factors are drawn by themselves, by its number",
        "expert_target",
        (initialization, "_generator", _same_for_all),
    ),
    mutation(
        "experts_norm_counted_per_rank",
        "in the norm of the gradient each element of an expert counts once, however many ranks hold it",
        "expert_target edp",
        (
            trainer,
            "clip_gradients_on_device",
            in_call(
                gradsync, "_segments", _segments(lambda f, s: dataclasses.replace(s, replicas=s.replicas - {"edp"}))
            ),
        ),
    ),
    mutation(
        "aux_loss_at_default",
        "the load-balancing loss weighs as configured",
        "aux_loss",
        (trainer, "LoadBalancing", lambda f: lambda model, *, coef: f(model, coef=0.001)),
    ),
    mutation(
        "shared_experts_not_summed_over_ep",
        "one adapter for all experts has the gradient of the experts of all ranks",
        "ep shared_experts_adapter",
        (gradsync, "_segments", wrong_code.segments_with(wrong_code.without_axes(lambda axis: axis == "ep"))),
    ),
    mutation(
        "balance_of_one_micro_batch_counted_locally",
        "how often each expert is chosen is counted over all ranks, of a single micro-batch too",
        "aux_loss one_micro_batch other_tokens",
        (LoadBalancing, "count_here", in_call(balance, "all_reduce_sum", instead(lambda counts, _: counts))),
    ),
)

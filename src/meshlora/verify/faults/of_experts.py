"""Faults of experts: token dispatch, their axes, load-balancing loss."""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from meshlora.adapter import initialization
from meshlora.adapter.attach import Factor
from meshlora.adapter.formats import file_tensors
from meshlora.comm.collectives import reduce_each_to_one
from meshlora.comm.groups import Mesh
from meshlora.model import weights
from meshlora.plan.grads import GradPart
from meshlora.run import trainer
from meshlora.train import gradsync
from meshlora.verify.faults.fault import after, around, instead_of, not_summed, passing, result, unreduced
from meshlora.verify.features import Feature
from meshlora.wings.experts import balance
from meshlora.wings.experts import module as experts
from meshlora.wings.experts.balance import LoadBalancing
from meshlora.wings.experts.dispatch import Journey, Places, Slots
from meshlora.wings.experts.module import ParallelExperts
from meshlora_ground.topology import DATA, ETP, EXPERT_AXES


@after(ParallelExperts, "_run", needs={Feature.EXPERT_NORM, Feature.ETP})
def expert_norm_of_each_term(found: Tensor, self: Any, *_: Any) -> Tensor:
    """an expert's output is normed once its terms of all etp ranks are summed"""
    return self.post_expert_norm(found)


@after(gradsync, "_parts", needs={Feature.EXPERT_TARGET, Feature.DENSE_DP_IS_NOT_EDP})
def experts_summed_over_dense_dp(found: list[GradPart], factor: Factor, mesh: Mesh) -> list[GradPart]:
    """the data-parallel ranks of experts are not those of attention"""
    if not factor.rule.is_expert:
        return found
    changed = []
    for part in found:
        if "edp" in part.grad_axes:
            part = dataclasses.replace(part, grad_axes=part.grad_axes - frozenset(EXPERT_AXES) | DATA)
        changed.append(part)
    return changed


@around(weights, "_read_local", "read_packed", needs={Feature.EXPERTS, Feature.EP})
def experts_permuted_over_ep(
    original: Any, name: str, where: Any, source: Any, mesh: Any, *rest: Any, **options: Any
) -> Any:
    """ep rank i holds the i-th share of the experts"""
    parts = weights.parts_of_rank

    def of_the_next(dim: int, layout: Any, *, rank: int, size: int) -> Any:
        if dim == 0:  # that of experts
            rank = (rank + 1) % size
        return parts(dim, layout, rank=rank, size=size)

    wrong = of_the_next if where.num_experts else parts
    with mock.patch.object(weights, "parts_of_rank", wrong):
        return original(name, where, source, mesh, *rest, **options)


@after(ParallelExperts, "_run", needs={Feature.EXPERTS, Feature.ETP})
def experts_reduced_twice(rows: Tensor, self: Any, *_: Any) -> Tensor:
    """the output of an expert is summed over etp once, on the way back"""
    return reduce_each_to_one(rows, self.mesh.over({ETP}))


@around(Slots, "weighted_sum", needs={Feature.EXPERTS, Feature.EXPERT_AXES, Feature.ROUTING_LAST})
def routing_weight_applied_twice(original: Any, self: Slots, rows: Tensor, given: Tensor) -> Any:
    """an expert's output is multiplied by its routing weight once"""
    return original(self, rows, given * given)


@around(experts, "parallelize_experts", needs={Feature.EXPERTS, Feature.SP})
def tokens_cut_twice(original: Any, module: Any, rule: Any, mesh: Any, **options: Any) -> None:
    """under sp each tp rank dispatches all the tokens it holds"""
    original(module, rule, mesh, **options)
    module.cuts_tokens = mesh.tp.size > 1


@after(Journey, "__init__", needs={Feature.EXPERTS, Feature.EXPERT_AXES})
def rows_combined_in_order_of_arrival(_: None, self: Journey, *args: Any) -> None:
    """a row goes back to the token that it came from, whatever the order in which experts take rows"""
    index = self.by_expert.index
    self.by_expert = Places(index, torch.arange(len(index), device=index.device).unsqueeze(1))


@around(Slots, "weighted_sum", needs={Feature.EXPERTS, Feature.EXPERT_AXES, Feature.ROUTING_LAST})
def token_dropped(original: Any, self: Slots, rows: Tensor, given: Tensor) -> Any:
    """no token is dropped: there is no capacity"""
    keep = torch.ones_like(given)
    keep[-1:] = 0
    return original(self, rows, given * keep)


@around(file_tensors, "to_peft", needs={Feature.EXPERT_TARGET})
def experts_b_stored_expert_major(original: Any, a: Tensor, b: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """in PEFT's files B of experts is expert-minor"""
    left, right = original(a, b, **options)  # lora_A, lora_B
    return left, right.unflatten(1, (b.shape[2], -1)).mT.flatten(1).contiguous()


@around(ParallelExperts, "_gated", needs={Feature.GATED_EXPERTS})
def experts_gate_and_up_swapped(original: Any, self: Any, inner: Tensor) -> Any:
    """the first half of an expert's first projection goes through the activation, the second does not"""
    fused = self.rule.first.fused
    if fused is None:
        return original(self, inner)
    if fused.groups > 1:  # gate and up alternate
        return original(self, inner.unflatten(-1, (-1, 2)).flip(-1).flatten(-2))
    return original(self, torch.cat(inner.chunk(2, -1)[::-1], -1))


@around(ParallelExperts, "_of_choices", needs={Feature.ZERO_EXPERTS})
def zero_experts_left_out(original: Any, self: Any, tokens: Tensor, chosen: Tensor, weights: Tensor, names: Any) -> Any:
    """an expert that computes nothing gives back its input, times its routing weight"""
    is_routed = chosen < self.rule.num_experts * (len(names) or 1)
    of_others = torch.where(is_routed, 0, weights).sum(1, keepdim=True)
    return original(self, tokens, chosen, weights, names) - (tokens * of_others).to(tokens.dtype)


@around(ParallelExperts, "_of_choices", needs={Feature.ZERO_EXPERTS})
def zero_experts_teach_no_router(
    original: Any, self: Any, tokens: Tensor, chosen: Tensor, weights: Tensor, names: Any
) -> Any:
    """the router has a gradient of the choices of experts that compute nothing, too"""
    is_routed = chosen < self.rule.num_experts * (len(names) or 1)
    return original(self, tokens, chosen, torch.where(is_routed, weights, weights.detach()), names)


@around(LoadBalancing, "_add_up", needs={Feature.AUX_LOSS, Feature.OTHER_TOKENS})
def aux_loss_of_local_tokens(original: Any, self: Any, counts: Tensor) -> None:
    """the load-balancing loss counts the choices of all tokens of a step, of all ranks"""
    own = counts.clone()
    original(self, counts)
    rows = float(own[-2]) or 1.0  # a rank may have no token
    self._shares = (own[:-2] / rows).to(self._shares.dtype)


@around(initialization, "generator_of", needs={Feature.EXPERT_TARGET})
def experts_drawn_alike(original: Any, seed: int, name: str) -> Any:
    """each expert's factors are drawn separately, by its number"""
    of_all, _, number = name.rpartition(".")
    return original(seed, of_all if number.isdecimal() else name)  # one name for all, and so one draw


@after(gradsync, "_parts", needs={Feature.EXPERT_TARGET, Feature.EDP}, within=(trainer, "clip_gradients_on_device"))
def experts_norm_counted_per_rank(found: list[GradPart], factor: Factor, mesh: Mesh) -> list[GradPart]:
    """in the norm of the gradient each element of an expert counts once, however many ranks hold it"""
    if not factor.rule.is_expert:
        return found
    return [dataclasses.replace(part, replicas=part.replicas - {"edp"}) for part in found]


experts_first_a_not_summed_over_etp = after(gradsync, "_parts", needs={Feature.EXPERT_TARGET, Feature.ETP})(
    not_summed(
        "etp",
        "each etp rank has the gradient of A of gate and up from its own features: it is a sum over etp",
        of=lambda factor: factor.rule.is_expert and ".lora_A" in factor.name,
    )
)
experts_second_b_not_summed_over_etp = after(gradsync, "_parts", needs={Feature.EXPERT_TARGET, Feature.ETP})(
    not_summed(
        "etp",
        "x A^T of down is a sum over etp, so the gradient of its B is one too",
        of=lambda factor: factor.rule.is_expert and ".lora_B" in factor.name,
    )
)
experts_not_summed_over_edp = after(gradsync, "_parts", needs={Feature.EXPERT_TARGET, Feature.EDP})(
    not_summed(
        "edp",
        "the gradient of an expert's factor is a sum over the ranks that hold the same part of it",
        of=lambda factor: factor.rule.is_expert,
    )
)
shared_experts_not_summed_over_ep = after(gradsync, "_parts", needs={Feature.EP, Feature.SHARED_EXPERTS_ADAPTER})(
    not_summed("ep", "one adapter for all experts has the gradient of the experts of all ranks")
)
balance_of_one_micro_batch_counted_locally = instead_of(
    balance,
    "all_reduce_sum",
    needs={Feature.AUX_LOSS, Feature.ONE_MICRO_BATCH, Feature.OTHER_TOKENS},
    within=(LoadBalancing, "count_here"),
)(unreduced("the choices of each expert are counted over all ranks, even with a single micro-batch"))


aux_loss_at_default = around(trainer, "LoadBalancing", needs={Feature.AUX_LOSS})(
    passing("the load-balancing loss weighs as configured", coef=0.001)  # that of most families in transformers
)
aux_loss_left_out = after(LoadBalancing, "term", needs={Feature.AUX_LOSS})(
    result("a configured load-balancing loss has a gradient", lambda term: term * 0)
)

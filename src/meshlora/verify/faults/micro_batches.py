"""Mutations of accumulation: what the micro-batches of a step make together, or a single one by itself."""

from __future__ import annotations

from typing import Any

from meshlora.adapter.attach import active_factors
from meshlora.train import balance
from meshlora.train.balance import LoadBalancing
from meshlora.train.trainer import Trainer
from meshlora.verify.faults.fault import Mutation, in_call, instead, mutation


def _before_each(original: Any) -> Any:
    def backward(self: Trainer, number: int, batch: Any, *, is_only: bool) -> Any:
        for one in self.adapters:
            one.optimizer.zero_grad(set_to_none=True)
        return original(self, number, batch, is_only=is_only)

    return backward


def _fourth_dropped(original: Any) -> Any:
    def backward(self: Trainer, number: int, batch: Any, *, is_only: bool) -> Any:
        if number < 3:
            return original(self, number, batch, is_only=is_only)
        factors = active_factors(self.model)
        before = [None if f.parameter.grad is None else f.parameter.grad.clone() for f in factors]
        found = original(self, number, batch, is_only=is_only)
        for factor, gradient in zip(factors, before, strict=True):
            factor.parameter.grad = gradient
        return found

    return backward


OF_MICRO_BATCHES: dict[str, Mutation] = dict(
    [
        mutation(
            "earlier_micro_batches_dropped",
            "the gradient of a step is the sum over its micro-batches",
            "",
            (Trainer, "_backward", _before_each),
        ),
        mutation(
            "fourth_micro_batch_dropped",
            "the gradient of a step is the sum over all of its micro-batches",
            "four_micro_batches",
            (Trainer, "_backward", _fourth_dropped),
        ),
        mutation(
            "balance_of_one_micro_batch_counted_locally",
            "how often each expert is chosen is counted over all ranks, of a single micro-batch too",
            "aux_loss one_micro_batch other_tokens",
            (LoadBalancing, "count_here", in_call(balance, "all_reduce_sum", instead(lambda counts, _: counts))),
        ),
    ]
)

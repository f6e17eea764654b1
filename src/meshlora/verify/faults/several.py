"""Several adapters at once: what one of them alone has, taken from another or from all."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from meshlora.layers.experts import module as experts
from meshlora.layers.linear import ParallelLinear
from meshlora.layers.tokens import ForwardTokens
from meshlora.train import gradsync, trainer
from meshlora.verify.faults.fault import by_name, in_call, instead, mutation, then


def _kept(self: torch.optim.Optimizer, **_: object) -> None:
    """Gradients stay; they are not marked as finished any more, which would be refused."""
    for group in self.param_groups:
        for parameter in group["params"]:
            parameter.grad = None if parameter.grad is None else parameter.grad.clone()


def _with_the_first_seed(original: Any) -> Any:
    def of(self: ForwardTokens, shares: Any, adapters: Any) -> Any:
        mixed = [dataclasses.replace(share, seed=1) for share in shares] if len(adapters) > 1 else shares
        return original(self, mixed, adapters)

    return of


def _of_several(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`change` of a step of several adapters; one of a single adapter stays as it is."""

    def replace(original: Any) -> Any:
        changed = change(original)
        return lambda self, adapters: (changed if len(adapters) > 1 else original)(self, adapters)

    return replace


OF_SEVERAL = by_name(
    mutation(
        "adapters_divided_by_tokens_of_all",
        "each adapter's gradients are divided by the number of its own tokens",
        "adapters",
        (
            gradsync,
            "_sum_bucket",
            lambda f: lambda *of, scales: f(*of, scales=(1 / (1 / scales).sum()).expand_as(scales)),
        ),
    ),
    mutation(
        "adapters_clipped_as_the_next",
        "each adapter is clipped to a norm of its own",
        "adapters",
        (
            trainer,
            "clip_gradients_on_device",
            lambda f: lambda mesh, adapters, limits: f(mesh, adapters, [*limits[1:], *limits[:1]]),
        ),
    ),
    mutation(
        "adapters_gradients_kept",
        "a step begins without the gradients of the last one",
        "adapters",
        (trainer.Trainer, "train_step", _of_several(in_call(torch.optim.AdamW, "zero_grad", instead(_kept)))),
    ),
    mutation(
        "adapters_dropped_as_the_first",
        "each adapter's dropout is drawn by its own seed",
        "adapters lora_dropout",
        (ForwardTokens, "of", _with_the_first_seed),
    ),
    mutation(
        "adapters_exchanged_at_experts",
        "at an expert each row gets the product of its own adapter",
        "adapters expert_target",
        (experts, "owners", then(lambda found, parts, names: (found + 1) % len(names))),
    ),
    mutation(
        "adapters_scaled_by_the_norm_of_the_first",
        "each adapter's rows are scaled by magnitudes over norms of its own",
        "adapters dora",
        (
            ParallelLinear,
            "_ratio",
            in_call(ParallelLinear, "weight_norm", lambda f: lambda self, _: f(self, next(iter(self.scaling)))),
        ),
    ),
)

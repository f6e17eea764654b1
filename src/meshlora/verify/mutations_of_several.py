"""Mutations of several adapters at once: what one of them alone has, taken from another or from all."""

from __future__ import annotations

from meshlora.train import many
from meshlora.train.many_gradients import ManyGradients
from meshlora.verify.mutation import Mutation, instead, mutation

OF_SEVERAL: dict[str, Mutation] = dict(
    [
        mutation(
            "adapters_divided_by_tokens_of_all",
            "each adapter's gradients are divided by the number of its own tokens",
            "adapters",
            (ManyGradients, "finish", lambda f: lambda self, counts: f(self, counts.sum().expand_as(counts))),
        ),
        mutation(
            "adapters_clipped_as_the_next",
            "each adapter is clipped to a norm of its own",
            "adapters",
            (ManyGradients, "clip", lambda f: lambda self, limits: f(self, limits[1:] + limits[:1])),
        ),
        mutation(
            "adapters_gradients_kept",
            "a step begins without the gradients of the last one",
            "adapters",
            (ManyGradients, "zero", instead(lambda self: None)),
        ),
        mutation(
            "adapters_dropped_as_the_first",
            "each adapter's dropout is drawn by its own seed",
            "adapters lora_dropout",
            (many, "Share", lambda f: lambda name, tokens, seed, step: f(name, tokens, 1, step)),
        ),
    ]
)

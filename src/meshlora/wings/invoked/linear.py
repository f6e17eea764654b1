"""A linear some of whose adapters act on the tokens from their invocation on alone.

Owns: the mask of rows, one with that of dropout. Does not own: which rows these are (`wings.invoked.rows`).

With D of `layers.products` zero at the other rows, z and what A and B get of them are zero, and so is their part of the
input's gradient: the base alone is left, as if the adapter were off.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from meshlora.layers.linear import ParallelLinear
from meshlora.layers.tokens import Mask, Part
from meshlora.wings.invoked.rows import Invocations


@dataclass(frozen=True)
class ActiveRows(Mask):
    """The mask of rows on which an adapter acts. acts: bool `[T]`. dropout: of these rows, or None."""

    acts: Tensor
    dropout: Mask | None

    def drop(self, x: Tensor) -> Tensor:
        """x `[T, H]` -> x with zeros at the other rows, in new memory. Linear and its own adjoint."""
        if self.dropout is not None:
            x = self.dropout.drop(x)
        return x.masked_fill(~self.acts.unsqueeze(1), 0)


class InvokedLinear(ParallelLinear):
    """Attributes, besides those of `ParallelLinear`: invocations: of the model."""

    invocations: Invocations

    def mask(self, adapter: str, x: Tensor, part: Part | None = None) -> Mask | None:
        """Of `adapter` on its rows of x: dropout, and zeros where it does not act."""
        dropped = super().mask(adapter, x, part)
        if adapter not in self.invocations.of:
            return dropped
        acts = self.invocations.acts_on(adapter, self.rule.name, x.numel() // x.shape[-1])
        if part is not None:
            acts = acts[part.start : part.stop]
        nothing = torch.empty(0, device="meta")  # dropout alone has numbers of tokens and features
        return ActiveRows(0, nothing, nothing, 0.0, acts, dropped)

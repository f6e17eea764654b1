"""Gated MLPs: `act(gate) * up` is recomputed in the backward, not saved.

Owns: detecting the product in the model's own forward, its gradient, and what a linear that is called with the product
saves instead. Does not own: that linear (`layers.products`), the list of activations (transformers, torch).

transformers writes `down_proj(act_fn(gate_proj(x)) * up_proj(x))`. Left alone, autograd saves four tensors `[T, F]`:
gate for the activation, act(gate) and up for the product, the product for A of down_proj. Two are enough. The model's
code is unchanged: its activation returns a tensor with a note of its source, which the multiplication looks up.
Every other operation on that tensor runs as usual.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function
from transformers.activations import ACT2CLS

from meshlora.layers.notes import note, noted
from meshlora.layers.products import Source
from meshlora_ground.float64 import is_lifted, lift

_MULTIPLY = {torch.mul, torch.multiply, Tensor.mul, Tensor.multiply, Tensor.__mul__, Tensor.__rmul__}
# Activations that transformers selects by name, and torch's that its models use directly; none is random.
_ACTIVATIONS = {entry[0] if isinstance(entry, tuple) else entry for entry in ACT2CLS.values()}
_ACTIVATIONS = (_ACTIVATIONS | {nn.SiLU, nn.GELU}) - {nn.RReLU}


class Activation:
    """An activation to run again, its result cached for a second use in a backward. by_kernel: `times`, if there."""

    def __init__(self, function: Callable[[Tensor], Tensor], by_kernel: Callable[..., Tensor] | None = None) -> None:
        self._function, self._by_kernel, self._is_lifted = function, by_kernel, is_lifted()
        self._kept: Tensor | None = None

    def of(self, gate: Tensor, *, keep: bool) -> Tensor:
        """act(gate), as in the forward. keep: cache it until the next call without `keep`."""
        # A backward uses it twice, for A of down_proj and for the product: the first use keeps it.
        found = self._kept
        if found is None:
            with torch.no_grad(), lift(self._is_lifted):
                found = self._function(gate)
        self._kept = found if keep else None
        return found

    def times(self, gate: Tensor, up: Tensor) -> Tensor:
        """act(gate) * up, as in the forward. The product's own backward follows, and needs the activation too."""
        return self._by_kernel(gate, up) if self._by_kernel is not None else self.of(gate, keep=True) * up


@dataclass(frozen=True)
class Product:
    """The source of a product `act(gate) * up`."""

    gate: Tensor
    up: Tensor
    activation: Activation


def product_behind(x: Tensor) -> Source | None:
    """The source of `x`, if it is such a product and unchanged."""
    found = noted(x, Product)
    if found is None:
        return None
    return Source((found.gate, found.up.detach()), found.activation.times)


class _Gated(Function):
    """forward: y = a u, a = act(gate); backward: da = g u, du = g a. The activation's own node continues from da."""

    @staticmethod
    def forward(ctx: Any, activated: Tensor, up: Tensor, gate: Tensor, activation: Activation) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        return activated * up

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        gate, up = ctx.saved_tensors
        g, needs = grads[0], ctx.needs_input_grad
        d_activated = g * up if needs[0] else None
        d_up = g * ctx.activation.of(gate, keep=False) if needs[1] else None
        return d_activated, d_up, None, None


class _Gate(NamedTuple):
    """The source of act(gate). gate: detached, as only its values are saved."""

    gate: Tensor
    activation: Activation


class _Activated(Tensor):
    """act(gate) with a note of its source: multiplied by another tensor it gives a product with a note of both."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Inside, the result of any operation is a plain tensor again: the note ends with the first use.
        with torch.DisableTorchFunctionSubclass():
            if func in _MULTIPLY and len(args) == 2 and not kwargs:
                activated, up = args if isinstance(args[0], _Activated) else reversed(args)
                source = noted(activated, _Gate)
                if source is not None and _is_gated(activated, up):
                    return _multiply(activated, up, source)
            return func(*args, **(kwargs or {}))


def _is_gated(activated: Tensor, up: Any) -> bool:
    return (
        torch.is_grad_enabled()
        and type(up) is Tensor  # a subclass may multiply in a way of its own
        and (up.shape, up.dtype, up.device) == (activated.shape, activated.dtype, activated.device)
    )


def _multiply(activated: Tensor, up: Tensor, source: _Gate) -> Tensor:
    product = _Gated.apply(activated, up, *source)
    assert isinstance(product, Tensor)
    note(product, Product(source.gate, up, source.activation))
    return product


def watch_activations(model: nn.Module, owners: Iterable[str]) -> None:
    """Make the activations that are children of the modules `owners` note the source of their output."""
    for owner in owners:
        for module in model.get_submodule(owner).children():
            if type(module) in _ACTIVATIONS and not list(module.parameters()) and not list(module.buffers()):
                module.register_forward_hook(_tell)


def _tell(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    # What changes the shape, or is called with more, is no activation of one number each.
    if len(args) != 1 or type(output) is not Tensor or not output.requires_grad or output.shape != args[0].shape:
        return output
    found = output.as_subclass(_Activated)  # the same memory: nothing is copied
    note(found, _Gate(args[0].detach(), Activation(module.forward)))
    return found

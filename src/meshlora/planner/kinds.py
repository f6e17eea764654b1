"""The kinds of decoder layers of a model, and the same model with one layer of each.

Owns: which layers are alike, and `Shrunk`. Does not own: what is made of it.

A prediction looks at one layer of each kind and counts how many there are. The first layer is a kind of its own: below
it nothing is trained as a rule, so that it keeps less and sends less back.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from meshlora.plan.derive import decoder_layers


@dataclass(frozen=True)
class Shrunk:
    """A model on the meta device with one decoder layer of each kind.

    Attributes:
        layers: name of the list of layers. order: for each layer of the whole model, which of these it is like.
    """

    model: Any
    layers: str
    order: tuple[int, ...]

    @property
    def num_kinds(self) -> int:
        """Layers that the shrunk model has."""
        return max(self.order) + 1

    def kind_of(self, name: str) -> int | None:
        """Which layer a module or parameter of that name is in; None outside them."""
        prefix = f"{self.layers}."
        if not name.startswith(prefix):
            return None
        return int(name.removeprefix(prefix).partition(".")[0])

    def times(self, name: str) -> int:
        """How often there is what has that name."""
        kind = self.kind_of(name)
        return 1 if kind is None else self.order.count(kind)


def shrink(model: Any) -> Shrunk:
    """`model`, on the meta device, with one layer of each kind; it stays as it is."""
    name, layers = decoder_layers(model)
    config = model.config.get_text_config()
    types = getattr(config, "layer_types", None)
    kinds: dict[Any, int] = {}
    order: list[int] = []
    chosen: list[int] = []
    for index, layer in enumerate(layers):
        key = (index == 0, types[index] if types else None, *_shape(layer))
        if key not in kinds:
            kinds[key] = len(kinds)
            chosen.append(index)
        order.append(kinds[key])
    parent, _, attribute = name.rpartition(".")
    owner = model.get_submodule(parent)
    setattr(owner, attribute, nn.ModuleList(layers[index] for index in chosen))
    try:
        small = copy.deepcopy(model)
    finally:
        setattr(owner, attribute, layers)
    own = small.config.get_text_config()
    for field, value in {"num_hidden_layers": len(chosen), "layer_types": types and [types[i] for i in chosen]}.items():
        if value is not None and hasattr(own, field):
            setattr(own, field, value)
    return Shrunk(small, name, tuple(order))


def _shape(layer: nn.Module) -> Iterable[Any]:
    """What two layers have in common that compute alike."""
    for path, module in layer.named_modules():
        yield path, type(module).__name__
        for leaf, parameter in module.named_parameters(recurse=False):
            yield leaf, tuple(parameter.shape), parameter.dtype

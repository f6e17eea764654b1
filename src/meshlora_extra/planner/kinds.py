"""The kinds of decoder layers in a model, and the model reduced to one layer of each.

Owns: which layers are equivalent, and `Shrunk`. Does not own: predictions from it.

Predictions multiply one layer of each kind by the number of such layers. The first layer is a separate kind: usually
nothing below it is trained, so it saves less and sends less in its backward.
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
        layers: name of the list of layers. order: for each layer, of the whole model or of a pp rank, the index of its
            kind. elsewhere: modules around the layers that other pp ranks have.
    """

    model: Any
    layers: str
    order: tuple[int, ...]
    elsewhere: frozenset[str] = frozenset()

    def kind_of(self, name: str) -> int | None:
        """The layer of the module or parameter `name`; None outside the layers."""
        prefix = f"{self.layers}."
        if not name.startswith(prefix):
            return None
        return int(name.removeprefix(prefix).partition(".")[0])

    def times(self, name: str) -> int:
        """How often the whole model, or the pp rank, has the module or parameter `name`."""
        kind = self.kind_of(name)
        if kind is not None:
            return self.order.count(kind)
        # What another pp rank has counts no times.
        return int(not any(name == module or name.startswith(f"{module}.") for module in self.elsewhere))

    @property
    def num_kinds(self) -> int:
        return len(self.model.get_submodule(self.layers))


def shrink(model: Any) -> Shrunk:
    """A copy of `model`, which is on the meta device, with one layer of each kind."""
    name, layers = decoder_layers(model)
    config = model.config.get_text_config()
    types = getattr(config, "layer_types", None)
    # Gemma's embeddings for each layer are one matrix, whose columns are those of all layers: none can be left out.
    are_all = bool(getattr(config, "hidden_size_per_layer_input", None))
    kinds: dict[Any, int] = {}
    order: list[int] = []
    chosen: list[int] = []
    for index, layer in enumerate(layers):
        # The first layer frees its input later than others.
        key = (index if are_all else index == 0, types[index] if types else None, *_shape(layer))
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
        setattr(owner, attribute, layers)  # the model given is left as it was
    own = small.config.get_text_config()
    for field, value in {"num_hidden_layers": len(chosen), "layer_types": types and [types[i] for i in chosen]}.items():
        if value is not None and hasattr(own, field):
            _set(own, own.attribute_map.get(field, field), value)
    return Shrunk(small, name, tuple(order))


def _set(config: Any, field: str, value: Any) -> None:
    try:
        setattr(config, field, value)
    except (AttributeError, NotImplementedError):  # bamba, jamba and prophetnet say it by other fields
        kind = type(config)
        config.__class__ = type(kind.__name__, (kind,), {field: value})  # a subclass whose field is plain


def _shape(layer: nn.Module) -> Iterable[Any]:
    """A key that is equal for layers with the same computation."""
    for path, module in layer.named_modules():
        yield path, type(module).__name__
        for leaf, parameter in module.named_parameters(recurse=False):
            yield leaf, tuple(parameter.shape), parameter.dtype

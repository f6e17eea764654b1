"""Forwards of a small model in which one decoder layer is watched, and its graph cut at every linear.

Owns: the small model, what is recorded of its forwards, gradients. Does not own: what follows from them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PretrainedConfig
from transformers.pytorch_utils import Conv1D

from meshlora_ground.model_class import model_class

# Sizes that no width or number of heads of a twin has, so that a dim of heads is told from one of tokens.
_BATCH, _TOKENS = 2, 11
# Below it a gradient is none: of float64, of values near 1.
_NOTHING = 1e-12


def small_model(config: PretrainedConfig) -> Any:
    """A frozen model of `config` in float64, with random weights that all matter; its embeddings have a gradient."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        cls = model_class(config)
        model = cls.from_config(copy.deepcopy(config), dtype=torch.float64, attn_implementation="eager").eval()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    for module in model.modules():
        if hasattr(getattr(module, "config", None), "use_cache"):
            module.config.use_cache = False  # a layer that is run again would see what it has left in a cache
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point():
            scale, middle = (0.3, 0.0) if parameter.ndim > 1 else (0.5, float("norm" in name.lower()))
            values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.data = values * scale + middle
    if model.config.is_encoder_decoder:
        model.set_input_embeddings(model.get_input_embeddings())  # both look up in it, and not in copies
    model.requires_grad_(False).get_input_embeddings().register_forward_hook(
        lambda _, __, out: out.detach().requires_grad_().clone()
    )
    return model


def is_linear(module: nn.Module) -> bool:
    """Whether `module` computes what a linear does: some inherit the name alone."""
    if type(module).forward in (nn.Linear.forward, Conv1D.forward):
        return True
    if not isinstance(module, nn.Linear):
        return False
    x = torch.randn(1, 3, module.in_features, generator=torch.Generator().manual_seed(4), dtype=module.weight.dtype)
    expected = nn.functional.linear(x, module.weight, module.bias)
    try:
        found = module(x)
    except (RuntimeError, TypeError):  # a router that wants more than hidden states
        return False
    return isinstance(found, Tensor) and found.shape == expected.shape and bool(torch.allclose(found, expected))


def linears_of(layer: nn.Module, apart: Collection[str]) -> list[str]:
    """The linears of a decoder layer, by path, without those of routed experts at the paths `apart`."""
    inside = tuple(f"{path}." for path in apart)
    return [p for p, m in layer.named_modules() if p not in apart and not p.startswith(inside) and is_linear(m)]


@dataclass
class Seen:
    """One forward of a layer.

    Attributes:
        calls: module -> what it was called with, and what it returned, of those that are called once.
        entered: the tensors with a gradient that the layer was called with, cut from what came before.
        read, made: linear -> the tensor that it read, and its output, cut from what it was made of.
        after: the modules of the model that were called after the layer, in order.
    """

    calls: dict[str, tuple[tuple[Any, ...], dict[str, Any], Any]] = field(default_factory=dict)
    entered: list[Tensor] = field(default_factory=list)
    read: dict[str, Tensor] = field(default_factory=dict)
    made: dict[str, Tensor] = field(default_factory=dict)
    after: list[str] = field(default_factory=list)

    @property
    def left(self) -> Tensor:
        """The hidden states that the layer returned."""
        return hidden_of(self.calls[""][2])


def hidden_of(output: Any) -> Any:
    """The hidden states among what a module returns: alone, or first."""
    return output[0] if isinstance(output, tuple | list) and output else output


def recut(value: Any, found: dict[int, tuple[Tensor, Tensor]]) -> Any:
    """`value` with each tensor that has a gradient cut from its graph; these are added to `found`: new, and a copy.

    A tensor that is given twice is cut once, as query, key and value of some attentions.
    """
    if isinstance(value, Tensor) and value.requires_grad:
        if id(value) not in found:
            new = value.detach().requires_grad_()
            found[id(value)] = new, new.clone()  # some models add to what they are given
        return found[id(value)][1]
    if type(value) in (tuple, list):
        return type(value)(recut(each, found) for each in value)
    if type(value) is dict:
        return {name: recut(each, found) for name, each in value.items()}
    return value


def look(model: Any, layer: nn.Module, linears: Iterable[str]) -> Seen:
    """What a forward of `model` on random tokens does in `layer`, its graph cut at the entry and at `linears`."""
    seen, counts, handles = Seen(), dict[str, int](), list[RemovableHandle]()

    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        found = dict[int, tuple[Tensor, Tensor]]()
        given = recut(args, found), recut(kwargs, found)
        seen.entered = [new for new, _ in found.values()]
        return given

    def note(path: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            counts[path] = counts.get(path, 0) + 1
            seen.calls[path] = (args, kwargs, output)
            seen.after.clear()  # a stack may run several times

        return hook

    def cut(path: str) -> Callable[..., Tensor]:
        def hook(_: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
            seen.read[path], seen.made[path] = args[0], output.detach().requires_grad_()
            return seen.made[path].clone()

        return hook

    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(lambda _, __, name=name: seen.after.append(name)))
    handles.append(layer.register_forward_pre_hook(enter, with_kwargs=True))
    handles += [layer.get_submodule(path).register_forward_hook(cut(path)) for path in linears]
    handles += [m.register_forward_hook(note(path), with_kwargs=True) for path, m in layer.named_modules()]
    ids = torch.randint(3, 60, (_BATCH, _TOKENS), generator=torch.Generator().manual_seed(1))
    more = {"decoder_input_ids": ids[:, _TOKENS // 2 :]} if model.config.is_encoder_decoder else {}
    try:
        with torch.enable_grad():
            model(input_ids=ids, **more)
    finally:
        for handle in handles:
            handle.remove()
    for path, number in counts.items():
        if number > 1 and path:
            del seen.calls[path]
            seen.made.pop(path, None)
    return seen


def sees_later_tokens(config: PretrainedConfig) -> bool:
    """Whether a change of the last token changes an earlier one's logits, in a small model of `config`, on text."""
    model = small_model(config)
    ids = torch.randint(3, 60, (_BATCH, _TOKENS), generator=torch.Generator().manual_seed(1))
    other = ids.clone()
    other[:, -1] += 1
    with torch.no_grad():
        first, second = (model(input_ids=each).logits[:, :-1] for each in (ids, other))
    return bool((first - second).abs().max() > _NOTHING * first.abs().max())


def gradients(of: Tensor, to: list[Tensor], *, features: Tensor | None = None) -> list[Tensor | None]:
    """The gradient of a random sum over `of`, of its last dim's `features` alone, by each of `to`."""
    if not of.requires_grad or not to:
        return [None] * len(to)
    weights = torch.randn(of.shape, generator=torch.Generator().manual_seed(2), dtype=of.dtype)
    if features is not None:
        weights = weights * torch.zeros(of.shape[-1], dtype=of.dtype).index_fill(0, features, 1.0)
    return list(torch.autograd.grad((of * weights).sum(), to, allow_unused=True, retain_graph=True))


def is_nonzero(gradient: Tensor | None) -> bool:
    """Whether a gradient has any value."""
    return gradient is not None and gradient.numel() > 0 and bool(gradient.abs().max() > _NOTHING)


def rows_in(gradient: Tensor | None) -> set[int]:
    """The features with a gradient."""
    if gradient is None:
        return set()
    return set((gradient.reshape(-1, gradient.shape[-1]).abs().amax(0) > _NOTHING).nonzero().flatten().tolist())

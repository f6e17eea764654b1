"""Region borders: the collectives on activations that enter or leave a block.

Owns: the hooks on the model's own modules that split the residual stream over the tokens (sp) and that make the input
of a region whole. Does not own: the output side of a split region, which is its row-parallel linear.

Under sp the residual stream between regions is `[1, B*S/tp, H]`: a contiguous slice of the flattened tokens. Slicing
the flattened tokens needs no transposes, and only B*S must be divisible by tp. A region sees `[B, S, H]` again, as
transformers' attention reads batch and sequence from the shape.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from meshlora.comm.collectives import copy_one_to_each, gather_each_to_each, gather_each_to_one, slice_one_to_each
from meshlora.comm.groups import Axis, Mesh, SharedByCopies
from meshlora.feature import features
from meshlora.layers.held_tokens import ContextCut, HeldTokens
from meshlora.layers.linear import ParallelLinear
from meshlora.layers.tokens import CutsTokens
from meshlora.model.pipeline import Pipeline
from meshlora.plan.rules import ModelPlan, Region
from meshlora_ground.compat.transformers_models import cut_deepstack, without_fused_projection
from meshlora_ground.errors import UnsupportedError, UserError

# Arguments of decoder layers that hold something of each token besides the stream: Gemma 4's, with a gradient, and the
# ids by which DeepSeek-V4 routes.
SECOND_INPUTS = ("per_layer_input", "input_ids")
# Keys and values that layers take from an earlier one, of the same heads of the same rank: they need no border.
SHARED_KEYS = "shared_kv_states"
# Streams of an attention's keys and values, which go the way of its queries' (inkling2).
OF_KEYS = ("key_hidden_states", "value_hidden_states")


class TokenCut(SharedByCopies):
    """The split of the running forward's tokens over tp; remembers `[B, S]`, or `[B, S/cp]` under cp, between `cut` and
    `whole`. One object per model.

    sp: whether the tokens are split. is_off: whether they are not, for now (`left`).
    """

    def __init__(self, tp: Axis, *, sp: bool) -> None:
        self.tp, self.sp, self.is_off = tp, sp, False
        self.batch_size = self.seq_len = 0

    @contextlib.contextmanager
    def left(self, model: nn.Module) -> Iterator[None]:
        """Inside the block forwards of `model`, without a gradient, are those without sp: every tp rank has all tokens
        between regions, of any number. What a tensor-parallel model needs for this is all there: weights are split in
        the same way.
        """
        if not self.sp or self.is_off:
            with torch.no_grad():
                yield
            return
        scattering, experts = [], []
        for module in model.modules():
            if isinstance(module, ParallelLinear) and module.scatters_tokens:
                scattering.append(module)
            elif isinstance(module, CutsTokens):
                experts.append(module)
        self._leave(scattering, experts, is_off=True)
        try:
            with torch.no_grad():
                yield
        finally:
            self._leave(scattering, experts, is_off=False)

    def _leave(self, leaves: Sequence[ParallelLinear], experts: Sequence[CutsTokens], *, is_off: bool) -> None:
        self.is_off = is_off  # `cut` and `whole` return what they are given
        for leaf in leaves:
            leaf.scatters_tokens = not is_off
        # Experts are given all tokens then, by every tp rank: each sends its share of them alone.
        for module in experts:
            module.cuts_tokens = is_off

    def cut(self, x: Tensor) -> Tensor:
        """`[B, S, ..., H]`, identical on all tp ranks -> `[1, B*S/tp, ..., H]`; several streams stand before H."""
        if self.is_off:
            return x
        self.batch_size, self.seq_len = x.shape[0], x.shape[1]
        tokens = self.batch_size * self.seq_len
        if tokens % self.tp.size:
            given = f"batch_size * seq_len = {self.batch_size} * {self.seq_len}"
            rule = f"under sp the number of tokens must divide by tp={self.tp.size}"
            raise UserError(given, rule, "pad the sequences (meshlora.collate does, with token_multiple=tp)")
        return slice_one_to_each(x.reshape(tokens, *x.shape[2:]), self.tp).unsqueeze(0)

    def whole(self, x: Tensor, *, terms: bool) -> Tensor:
        """`[1, B*S/tp, ..., H]` -> `[B, S, ..., H]`, or flat `[B*S/tp, H]` -> `[B*S, H]`.

        terms: whether the gradient on each rank is one term of a sum.
        """
        if self.is_off:
            return x
        gather = gather_each_to_each if terms else gather_each_to_one
        if x.ndim == 2:
            return gather(x, self.tp)
        return gather(x.flatten(0, 1), self.tp).view(self.batch_size, self.seq_len, *x.shape[2:])


def install_borders(model: nn.Module, plan: ModelPlan, mesh: Mesh, pipeline: Pipeline) -> tuple[ContextCut, TokenCut]:
    """Install the borders of `plan` on `model`; there are none if each rank runs whole layers.

    Returns the cuts of its forwards over cp and, under sp, over tp.
    """
    tp, sp = mesh.tp, plan.topology.sp
    context, cut = ContextCut(mesh.cp, mesh.device), TokenCut(tp, sp=sp)
    if plan.topology.is_whole:
        return context, cut
    for region in plan.regions:
        module = model.get_submodule(region.name)
        _install_region(module, region, cut, sp=sp, gather=_gather(model, plan, region, cut))
        _tell_local_sizes(model, region)
        if region.is_split:
            without_fused_projection(module)
        _cut_arguments(module, region, tp)
    layers = model.get_submodule(plan.layers)
    assert isinstance(layers, nn.ModuleList)

    def own(x: Tensor) -> Tensor:
        """The tokens of this rank: those of its cp rank, and of these those of its tp rank under sp."""
        x = context.cut(x)
        return cut.cut(x) if sp else x

    def own_at_first(x: Tensor) -> Tensor:
        return own(x) if pipeline.stage == 0 else x  # what comes from an earlier stage is cut already

    for feature in features():
        feature.borders(model, plan, context)
    if sp or context.axis.size > 1:
        if plan.holds(f"{plan.layers}.0"):
            map_input(layers[0], "the first decoder layer", own_at_first, passes=(*SECOND_INPUTS, SHARED_KEYS))
        pipeline.enter = own
        pipeline.noted = lambda: functools.partial(
            _known_again, cut, context, cut.batch_size, cut.seq_len, context.held
        )
        cut_deepstack(model, own)  # which adds images' features to the stream between layers
    if sp:
        for index, layer in enumerate(layers):
            if plan.holds(f"{plan.layers}.{index}"):
                _cut_second_inputs(layer, cut)

    def into_head(x: Tensor) -> Tensor:
        """Everything after the last layer is a region that ends with the head: there is no sum at its end, as logits
        stay split, but the gradient on each rank is that of its own part of the vocabulary. Without a vocabulary all
        ranks compute all of it.
        """
        if not pipeline.is_last:
            return x
        if sp or plan.has_vocabulary:
            x = cut.whole(x, terms=plan.has_vocabulary) if sp else copy_one_to_each(x, tp)
        # Without one the head takes whole texts: one cp rank counts the loss, and all have its gradient.
        return x if plan.has_vocabulary or context.held is None else context.held.gathered(x)

    if plan.has_last_stage and (sp or plan.has_vocabulary or context.axis.size > 1):
        # Of inkling2 a mixer of earlier states comes between, on own tokens.
        map_output(getattr(model.get_submodule(plan.layers.rpartition(".")[0]), "final_input", layers[-1]), into_head)
    return context, cut


def _known_again(cut: TokenCut, context: ContextCut, batch_size: int, seq_len: int, held: HeldTokens | None) -> None:
    cut.batch_size, cut.seq_len, context.held = batch_size, seq_len, held


def _gather(model: nn.Module, plan: ModelPlan, region: Region, cut: TokenCut) -> Callable[[Tensor], Tensor]:
    """How the input of a split region is made whole under sp."""

    def gather(x: Tensor) -> Tensor:
        return cut.whole(x, terms=True)

    found: Callable[[Tensor], Tensor] = gather
    for feature in features():
        found = feature.gather_input(found, model, plan, region)
    return found


def _install_region(
    module: nn.Module, region: Region, cut: TokenCut, *, sp: bool, gather: Callable[[Tensor], Tensor]
) -> None:
    # At the output of a split region nothing is to do: its row-parallel linear sums, and under sp cuts.
    if region.is_split and sp:
        map_input(module, region.name, gather, passes=region.passes)
    elif region.is_split:
        map_input(module, region.name, lambda x: copy_one_to_each(x, cut.tp), passes=region.passes)
    elif sp:
        map_input(module, region.name, lambda x: cut.whole(x, terms=False))
        map_output(module, cut.cut)


def _tell_local_sizes(model: nn.Module, region: Region) -> None:
    """Set this rank's numbers of heads, and widths, on the modules of a region."""
    for path, values in region.local.items():
        module = model.get_submodule(path)
        for name, value in values.items():
            owner, _, attribute = name.rpartition(".")
            part: Any = module
            if owner:
                # A copy, as the configuration belongs to the whole model.
                part = copy.copy(getattr(module, owner))
                setattr(module, owner, part)
            setattr(part, attribute, value)


def _cut_arguments(module: nn.Module, region: Region, tp: Axis) -> None:
    """Slice arguments that carry all heads down to this rank's heads."""
    if not region.sliced:
        return

    def cut(name: str, value: Any) -> Any:
        if name not in region.sliced or not isinstance(value, Tensor):
            return value
        dim, heads = region.sliced[name]
        if isinstance(dim, str):  # batch and heads in one dim
            return value.unflatten(0, (-1, heads)).tensor_split(tp.size, 1)[tp.rank].flatten(0, 1)
        if value.shape[dim] != heads:  # a mask that is the same for all heads has size 1 here
            return value
        return value.tensor_split(tp.size, dim)[tp.rank]

    map_arguments(module, cut)


def _cut_second_inputs(layer: nn.Module, cut: TokenCut) -> None:
    """Cut what a decoder layer is called with for each token besides the stream, as the stream is cut over tp."""
    if not set(SECOND_INPUTS) & set(inspect.signature(layer.forward).parameters):
        return

    def own(name: str, value: Any) -> Any:
        if name not in SECOND_INPUTS or not isinstance(value, Tensor):
            return value
        return _second_input(cut, value)

    map_arguments(layer, own)


def _second_input(cut: TokenCut, value: Tensor) -> Tensor:
    """`[B, S, D]`, or ids `[B, S]`, identical on all tp ranks -> `[1, B*S/tp, D]` or `[1, B*S/tp]`."""
    return cut.cut(value) if value.ndim > 2 else cut.cut(value.unsqueeze(-1)).squeeze(-1)


def map_arguments(module: nn.Module, change: Callable[[str, Any], Any]) -> None:
    """Call `module` with `change(name, value)` in place of each argument."""
    names = list(inspect.signature(module.forward).parameters)

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        own = tuple(change(name, value) for name, value in zip(names, args, strict=False))
        return own, {name: change(name, value) for name, value in kwargs.items()}

    module.register_forward_pre_hook(hook, with_kwargs=True)


def map_input(module: nn.Module, name: str, change: Any, *, passes: tuple[str, ...] = ()) -> None:
    """Apply `change` to the hidden states that `module` is called with.

    passes: other arguments that may carry a gradient.
    """
    names = list(inspect.signature(module.forward).parameters)

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        given = {**dict(zip(names, args, strict=False)), **kwargs}  # not all parameters are given
        first = names[0] if args and isinstance(args[0], Tensor) else "hidden_states"
        if not isinstance(given.get(first), Tensor):
            raise UnsupportedError(name, "a region is called with hidden_states, first or by name")
        hidden = given[first]  # the same tensor may be query, key and value
        rest = [value for key, value in given.items() if key not in (*passes, *OF_KEYS) and value is not hidden]
        _refuse_second_input(name, rest)  # before the work of the region
        changed = {id(hidden): change(hidden)}
        for key in OF_KEYS:
            if (value := kwargs.get(key)) is not None and id(value) not in changed:
                changed[id(value)] = change(value)
        # Some attentions are called with the same tensor as query, key and value.
        return (
            tuple(changed.get(id(value), value) for value in args),
            {key: changed.get(id(value), value) for key, value in kwargs.items()},
        )

    module.register_forward_pre_hook(hook, with_kwargs=True)


def map_output(module: nn.Module, change: Any) -> None:
    """Apply `change` to the hidden states that `module` returns, alone or first in a tuple."""

    def hook(_: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, tuple | list):
            return type(output)((change(output[0]), *output[1:]))
        return change(output)

    module.register_forward_hook(hook)


def _refuse_second_input(name: str, rest: Any) -> None:
    """A second input with a gradient would need its own border; without one its gradient is silently a fraction."""
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors_in(rest)):
        raise UnsupportedError(name, "only the hidden states of a region may carry a gradient", "use tp=1")


def tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors in nested tuples, lists and dictionaries."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, Mapping):  # a UserDict of transformers, too
        for item in value.values():
            yield from tensors_in(item)

"""A block in parts, in one process: whether the sum of what its parts compute, and of their gradients, is the whole.

Each part has a rank's rows of every split linear and its numbers of heads. At a row linear its output takes the value
of the sum over ranks, as the mesh makes it, and the gradient of one rank's term: so what a block does behind its row
linear (a residual of its own, a gate) shows, which would be counted once for each rank at the block's border.
"""

from __future__ import annotations

import copy
import inspect
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from meshlora.plan.blocks import Heads, leaf_layout, local_attributes, parameter_layout
from meshlora.plan.families.family import Leaf
from meshlora.plan.layout import Layout, Split
from meshlora.wings.found.probe import hidden_of, recut

# With wrong numbers the code of a family fails in any of these ways.
FAILURES = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError, ArithmeticError)
_RANKS = 2
_STATES = ("key_value_states", "encoder_hidden_states")  # of an encoder, as blocks call them
_CLOSE = 1e-9  # of float64, of values near 1


@dataclass(frozen=True)
class Proposal:
    """How a block may be split. Paths are those in the decoder layer; fields are those of a `FamilyPlan`.

    border: the layout in which the block's output leaves, if its row linear is outside.
    """

    block: str
    leaves: Mapping[str, Leaf]
    heads: Heads | None
    local: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    sliced: Mapping[str, int | str] = field(default_factory=dict)
    parameters: Mapping[str, int] = field(default_factory=dict)
    wide_norms: tuple[str, ...] = ()
    border: Layout | None = None

    def own(self, block: nn.Module) -> dict[str, tuple[Any, Leaf]]:
        """Path in the layer -> (linear, leaf) of those in `block`, the whole one or a part."""
        modules = dict(block.named_modules(prefix=self.block))
        return {path: (modules[path], leaf) for path, leaf in self.leaves.items() if path in modules}


def passes_in_parts(proposal: Proposal, layer: nn.Module, call: tuple[Any, ...]) -> tuple[str, ...] | None:
    """The arguments that the block adds to its output, if its parts sum up to the whole; else None.

    call: positional and other arguments of the block in a forward of the whole model.
    """
    block = layer.get_submodule(proposal.block)
    args, kwargs = call[:2]
    given = [*zip(inspect.signature(block.forward).parameters, args, strict=False), *kwargs.items()]
    first = args[0] if args and isinstance(args[0], Tensor) else kwargs.get("hidden_states")
    if not isinstance(first, Tensor):
        return None  # a border needs hidden states, first or by that name
    wholes, sums = dict[str, Tensor](), dict[str, Tensor]()
    own = copy.deepcopy(block)
    _change_rows(own, proposal, lambda path, y: wholes.update({path: y.detach()}))
    out, cut = _called(own, proposal, args, kwargs)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(3), dtype=out.dtype)
    expected, terms = _gradients(out, weights, cut), list[list[Tensor]]()

    def total(path: str, y: Tensor) -> Tensor:
        sums[path] = sums.get(path, 0) + y.detach()
        return y + (wholes[path] - y.detach())

    for rank in range(_RANKS):
        part = _part(block, proposal, rank)
        _change_rows(part, proposal, total)
        own_args = [_own(name, value, proposal, rank) for name, value in given[: len(args)]]
        own_kwargs = {name: _own(name, value, proposal, rank) for name, value in given[len(args) :]}
        local, own_cut = _called(part, proposal, own_args, own_kwargs)
        rows = slice(None) if proposal.border is None else proposal.border.rows(rank=rank, size=_RANKS)
        if not _is_close(local, out[..., rows]):
            return None
        terms.append(_gradients(local, weights[..., rows], own_cut))
    if not all(_is_close(sums[path], wholes[path]) for path in wholes):
        return None
    names = dict[int, str]()  # the argument of each tensor with a gradient, in the order of `recut`
    for name, value in given:
        found = dict[int, tuple[Tensor, Tensor]]()
        recut(value, found)
        for key in found:
            names.setdefault(key, "" if key == id(first) else name)
    passing = []
    for name, whole, parts in zip(names.values(), expected, zip(*terms, strict=True), strict=True):
        is_sum = _is_close(sum(parts[1:], parts[0]), whole)
        # The states of an encoder have a border of their own, where a decoder is given them.
        if name and (all(_is_close(part, whole) for part in parts) or (is_sum and name in _STATES)):
            passing.append(name)
        elif name or not is_sum:
            return None
    return tuple(passing)


def _change_rows(block: nn.Module, proposal: Proposal, change: Callable[[str, Tensor], Tensor | None]) -> None:
    """Apply `change` to the outputs of the row linears of a block."""
    for path, (module, leaf) in proposal.own(block).items():
        if leaf.split is Split.ROW:
            module.register_forward_hook(lambda _, __, y, path=path: change(path, y))


def _called(block: nn.Module, proposal: Proposal, args: Any, kwargs: Any) -> tuple[Tensor, list[Tensor]]:
    """(the hidden states that the block returns, the tensors with a gradient that it was given)."""
    for path, module in block.named_modules(prefix=proposal.block):
        if path in proposal.wide_norms:
            without_statistics(module)
    found: dict[int, tuple[Tensor, Tensor]] = {}
    with torch.enable_grad():
        out = hidden_of(block(*recut([*args], found), **recut(kwargs, found)))
    return out, [new for new, _ in found.values()]


def _gradients(out: Tensor, weights: Tensor, to: list[Tensor]) -> list[Tensor]:
    found = torch.autograd.grad((out * weights).sum(), to, allow_unused=True)
    return [torch.zeros_like(t) if each is None else each for t, each in zip(to, found, strict=True)]


def _is_close(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool((a - b).abs().max() <= _CLOSE * (1 + b.abs().max()))


def _part(block: nn.Module, proposal: Proposal, rank: int) -> nn.Module:
    """What `rank` has of the block."""
    part, heads = copy.deepcopy(block), proposal.heads

    def cut(module: Any, name: str, layout: Layout, dim: int) -> None:
        setattr(module, name, nn.Parameter(layout.cut(getattr(module, name).detach(), dim, rank=rank, size=_RANKS)))

    for path, (module, leaf) in proposal.own(part).items():
        is_column, is_transposed = leaf.split is Split.COLUMN, isinstance(module, Conv1D)  # which has [in, out]
        dim = int(is_column == is_transposed)
        layout = leaf_layout(path, leaf, module.weight.shape[dim], heads)
        cut(module, "weight", layout, dim)
        if is_column and is_transposed:
            module.nf = layout.local_size(_RANKS)
        if is_column and module.bias is not None:
            cut(module, "bias", layout, 0)
        elif rank and module.bias is not None:
            module.bias = nn.Parameter(torch.zeros_like(module.bias))  # it is added once
    dims = {**proposal.parameters, **dict.fromkeys((f"{norm}.weight" for norm in proposal.wide_norms), 0)}
    for path, module in part.named_modules(prefix=proposal.block):
        for name, parameter in list(module.named_parameters(recurse=False)):
            if (own := f"{path}.{name}") in dims:
                cut(module, name, parameter_layout(own, parameter.shape[dims[own]], heads), dims[own])
        if heads is not None and not _is_whole(path, module, proposal):
            for name, value in local_attributes(module, heads, proposal.local.get(path, ()), tp=_RANKS).items():
                owner, _, attribute = name.rpartition(".")
                setattr(operator.attrgetter(owner)(module) if owner else module, attribute, value)
    return part


def _is_whole(path: str, module: nn.Module, proposal: Proposal) -> bool:
    """As in `plan.derive`: whether a module has linears, and none of them is split."""
    linears = [name for name, part in module.named_modules(prefix=path) if isinstance(part, nn.Linear | Conv1D)]
    return bool(linears) and not set(linears) & set(proposal.leaves)


def without_statistics(norm: nn.Module) -> None:
    """Let a norm scale by its weight alone: features then depend on none but themselves."""
    norm.forward = lambda x, *_, **__: x * norm.weight


def _own(name: str, value: Any, proposal: Proposal, rank: int) -> Any:
    """What `rank` is given of an argument with a dim of heads."""
    if name not in proposal.sliced or not isinstance(value, Tensor) or proposal.heads is None:
        return value
    dim, heads = proposal.sliced[name], proposal.heads.query
    if isinstance(dim, str):
        return value.unflatten(0, (-1, heads)).tensor_split(_RANKS, 1)[rank].flatten(0, 1)
    return value.tensor_split(_RANKS, dim)[rank] if value.shape[dim] == heads else value

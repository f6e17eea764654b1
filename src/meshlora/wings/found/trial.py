"""A block in parts, in one process: whether the sum of what its parts compute, and of their gradients, is the whole.

Each part has a rank's rows of every split linear and its numbers of heads. At a row linear its output takes the value
of the sum over ranks, as the mesh makes it, and the gradient of one rank's term: so what a block does behind its row
linear (a residual of its own, a gate) shows, which would be counted once for each rank at the block's border.
"""

from __future__ import annotations

import copy
import inspect
import operator
from collections.abc import Mapping
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


def passes_in_parts(proposal: Proposal, layer: nn.Module, call: tuple[Any, ...]) -> tuple[str, ...] | None:
    """The arguments that the block adds to its output, if its parts sum up to the whole; else None.

    call: positional and other arguments of the block in a forward of the whole model.
    """
    block = layer.get_submodule(proposal.block)
    names = list(inspect.signature(block.forward).parameters)
    args, kwargs = call[0], call[1]
    first = args[0] if args and isinstance(args[0], Tensor) else kwargs.get("hidden_states")
    if not isinstance(first, Tensor):
        return None  # a border needs hidden states, first or by that name
    wholes: dict[str, Tensor] = {}
    own = copy.deepcopy(block)
    _without_wide_norms(own, proposal)
    _keep_rows(own, proposal, wholes)
    out, given = _called(own, args, kwargs)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(3), dtype=out.dtype)
    expected = _gradients(out, weights, given)
    sums, terms = [torch.zeros_like(each) for each in expected], list[list[Tensor]]()
    rows: dict[str, Tensor] = {}
    for rank in range(_RANKS):
        part = _part(block, proposal, rank)
        _sum_rows(part, proposal, wholes, rows)
        own_args = tuple(_own(name, value, proposal, rank) for name, value in zip(names, args, strict=False))
        own_kwargs = {name: _own(name, value, proposal, rank) for name, value in kwargs.items()}
        local, own_given = _called(part, own_args, own_kwargs)
        wanted, seen_by = out, weights
        if proposal.border is not None:
            chosen = proposal.border.rows(rank=rank, size=_RANKS)
            wanted, seen_by = out[..., chosen], weights[..., chosen]
        if local.shape != wanted.shape or not _is_close(local, wanted):
            return None
        found = _gradients(local, seen_by, own_given)
        terms.append(found)
        sums = [before + each for before, each in zip(sums, found, strict=True)]
    if any(not _is_close(rows[path], wholes[path]) for path in wholes):
        return None
    return _passing(expected, sums, terms, _names(names, args, kwargs, first))


def _names(names: list[str], args: tuple[Any, ...], kwargs: Mapping[str, Any], first: Tensor) -> list[str]:
    """The argument of each tensor with a gradient, in the order of `recut`; "" of the hidden states."""
    found: dict[int, str] = {}
    for name, value in [*zip(names, args, strict=False), *kwargs.items()]:
        cut: dict[int, tuple[Tensor, Tensor]] = {}
        recut(value, cut)
        for key in cut:
            found.setdefault(key, "" if key == id(first) else name)
    return list(found.values())


def _passing(
    expected: list[Tensor], sums: list[Tensor], terms: list[list[Tensor]], names: list[str]
) -> tuple[str, ...] | None:
    """The arguments whose gradient is whole on each rank; None if that of another is no sum over ranks."""
    passing = []
    for index, (whole, total, name) in enumerate(zip(expected, sums, names, strict=True)):
        if not name and _is_close(total, whole):
            continue
        if name and all(_is_close(each[index], whole) for each in terms):
            passing.append(name)
        else:
            return None
    return tuple(passing)


def _called(block: nn.Module, args: Any, kwargs: Any) -> tuple[Tensor, list[Tensor]]:
    """(the hidden states that the block returns, the tensors with a gradient that it was given)."""
    found: dict[int, tuple[Tensor, Tensor]] = {}
    with torch.enable_grad():
        out = hidden_of(block(*recut(args, found), **recut(kwargs, found)))
    return out, [new for new, _ in found.values()]


def _gradients(out: Tensor, weights: Tensor, to: list[Tensor]) -> list[Tensor]:
    if not out.requires_grad or not to:
        return [torch.zeros_like(each) for each in to]
    found = torch.autograd.grad((out * weights).sum(), to, allow_unused=True)
    return [torch.zeros_like(t) if each is None else each for t, each in zip(to, found, strict=True)]


def _is_close(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool((a - b).abs().max() <= _CLOSE * (1 + b.abs().max()))


def _inside(proposal: Proposal, path: str) -> str:
    """A path in the layer as one in the block."""
    return path.removeprefix(proposal.block).removeprefix(".")


def _owned(block: nn.Module, proposal: Proposal) -> dict[str, tuple[nn.Module, Leaf]]:
    """Path in the layer -> (linear, leaf) of those that are in the block."""
    modules = dict(block.named_modules())
    found = {}
    for path, leaf in proposal.leaves.items():
        if path == proposal.block or path.startswith(f"{proposal.block}."):
            found[path] = modules[_inside(proposal, path)], leaf
    return found


def _keep_rows(block: nn.Module, proposal: Proposal, wholes: dict[str, Tensor]) -> None:
    """Note the outputs of row linears of the whole block in `wholes`."""
    for path, (module, leaf) in _owned(block, proposal).items():
        if leaf.split is Split.ROW:

            def keep(_: nn.Module, __: Any, output: Tensor, path: str = path) -> None:
                wholes[path] = output.detach()

            module.register_forward_hook(keep)


def _sum_rows(block: nn.Module, proposal: Proposal, wholes: Mapping[str, Tensor], sums: dict[str, Tensor]) -> None:
    """Let row linears of a part return the value of the sum over ranks, and add their terms to `sums`."""
    for path, (module, leaf) in _owned(block, proposal).items():
        if leaf.split is Split.ROW:

            def total(_: nn.Module, __: Any, output: Tensor, path: str = path) -> Tensor:
                sums[path] = sums.get(path, 0) + output.detach()
                return output + (wholes[path] - output.detach())

            module.register_forward_hook(total)


def _part(block: nn.Module, proposal: Proposal, rank: int) -> nn.Module:
    """What `rank` has of the block."""
    part, heads = copy.deepcopy(block), proposal.heads
    for path, (module, leaf) in _owned(part, proposal).items():
        _cut_linear(module, path, leaf, heads, rank)
    for path, dim in proposal.parameters.items():
        owner, _, name = _inside(proposal, path).rpartition(".")
        module = part.get_submodule(owner)
        whole = getattr(module, name)
        layout = parameter_layout(path, whole.shape[dim], heads)
        setattr(module, name, nn.Parameter(layout.cut(whole.detach(), dim, rank=rank, size=_RANKS)))
    if heads is not None:
        for path, module in part.named_modules():
            own = proposal.local.get(f"{proposal.block}.{path}".rstrip("."), ())
            for name, value in local_attributes(module, heads, own, tp=_RANKS).items():
                owner, _, attribute = name.rpartition(".")
                setattr(operator.attrgetter(owner)(module) if owner else module, attribute, value)
    _without_wide_norms(part, proposal)
    return part


def _cut_linear(module: Any, path: str, leaf: Leaf, heads: Heads | None, rank: int) -> None:
    dim = 0 if leaf.split is Split.COLUMN else 1
    stored = 1 - dim if isinstance(module, Conv1D) else dim  # which has [in, out]
    whole = module.weight.detach()
    layout = leaf_layout(path, leaf, whole.shape[stored], heads)
    module.weight = nn.Parameter(layout.cut(whole, stored, rank=rank, size=_RANKS))
    if leaf.split is Split.COLUMN:
        if isinstance(module, Conv1D):
            module.nf = layout.local_size(_RANKS)
        if module.bias is not None:
            module.bias = nn.Parameter(layout.cut(module.bias.detach(), 0, rank=rank, size=_RANKS))
    elif module.bias is not None and rank:
        module.bias = nn.Parameter(torch.zeros_like(module.bias))  # it is added once


def without_statistics(norm: nn.Module) -> None:
    """Let a norm scale by its weight alone: features then depend on none but themselves."""

    def scale(x: Tensor, *_: Any, **__: Any) -> Tensor:
        weight: Any = norm.weight
        return x * weight

    norm.forward = scale


def _without_wide_norms(block: nn.Module, proposal: Proposal) -> None:
    for path in proposal.wide_norms:
        if path.startswith(f"{proposal.block}."):
            without_statistics(block.get_submodule(_inside(proposal, path)))


def _own(name: str, value: Any, proposal: Proposal, rank: int) -> Any:
    """What `rank` is given of an argument with a dim of heads."""
    if name not in proposal.sliced or not isinstance(value, Tensor) or proposal.heads is None:
        return value
    dim, heads = proposal.sliced[name], proposal.heads.query
    if isinstance(dim, str):
        return value.unflatten(0, (-1, heads)).tensor_split(_RANKS, 1)[rank].flatten(0, 1)
    return value.tensor_split(_RANKS, dim)[rank] if value.shape[dim] == heads else value

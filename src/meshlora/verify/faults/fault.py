"""A mutation: one deliberate fault, and how it is injected.

    @around(ParallelLinear, "add_adapter", needs={Feature.TP})
    def lora_scale_divided_by_tp(original: Any, self: ParallelLinear, *args: Any, scaling: float) -> None:
        '''the LoRA scale does not know tp'''
        original(self, *args, scaling=scaling / self.tp.size)

The wrong code is named after the fault; its docstring is the invariant that holds without the fault, not with it. Code
that several faults have in common is made by a function that takes the invariant, and the fault has the name of the
variable:

    noise_seed_ignored = around(noise, "noise_key", needs={Feature.NOISE, Feature.SEED})(
        passing("noise is determined by the run's seed", seed=0)
    )

Owns: `Mutation`, replacing functions of the product inside a context manager, helpers of wrong code in several files.
The product does not know of it. Does not own: the faults themselves (the other files of this folder).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any
from unittest import mock

from meshlora.processes.launchers import launcher_place
from meshlora.verify.features import Feature

# A replacement: (owner, name, original -> replacement).
Change = tuple[Any, str, Callable[[Any], Any]]
Code = Callable[..., Any]


@dataclass(frozen=True)
class Mutation:
    """One fault.

    Attributes:
        name: as in `--mutation NAME`. invariant: what holds in the product but not with the fault.
        needs: features a run must have for the fault to show.
        changes: the replaced functions.
    """

    name: str
    invariant: str
    needs: frozenset[Feature]
    changes: tuple[Change, ...]

    @contextlib.contextmanager
    def apply(self) -> Iterator[None]:
        """Inject the fault while the block runs."""
        with ExitStack() as stack:
            for change in self.changes:
                stack.enter_context(_replaced(change))
            yield


def fault(
    put_in: Callable[[Code, Any], Any],
    owner: Any,
    *names: str,
    needs: Collection[Feature] = (),
    within: tuple[Any, str] | None = None,
    also: tuple[Change, ...] = (),
) -> Callable[[Code], Mutation]:
    """A decorator: the fault whose wrong code replaces each of `names` of `owner`.

    put_in(wrong code, original): the replacement. within: (owner, name) of a function during whose calls alone the
    fault is injected. also: further replacements.
    """

    def of(wrong: Code) -> Mutation:
        changes: list[Change] = [(owner, name, functools.partial(put_in, wrong)) for name in names]
        if within is not None:
            # The outer function is replaced for good, the others while it runs.
            changes = [(*within, functools.partial(_with, change)) for change in changes]
        return Mutation(wrong.__name__, wrong.__doc__ or "", frozenset(needs), (*also, *changes))

    return of


def _after(wrong: Code, original: Code) -> Code:
    return lambda *args, **rest: wrong(original(*args, **rest), *args, **rest)


# `fault` whose wrong code takes: the original and its arguments; the original's result and its arguments; only the
# arguments.
around = functools.partial(fault, lambda wrong, original: lambda *args, **rest: wrong(original, *args, **rest))
after = functools.partial(fault, _after)
instead_of = functools.partial(fault, lambda wrong, _: wrong)


def stating(invariant: str, wrong: Code) -> Code:
    """`wrong`, an expression, as the wrong code of a fault with this invariant."""
    wrong.__doc__ = invariant
    return wrong


def passing(invariant: str, **arguments: Any) -> Code:
    """For `around`: the original with other `arguments`; a function makes one of what the call gives."""

    def wrong(original: Code, *args: Any, **rest: Any) -> Any:
        call = inspect.signature(original).bind(*args, **rest)
        call.apply_defaults()
        for name, value in arguments.items():
            own = call.arguments[name]
            call.arguments[name] = value(own) if callable(value) else value
        return original(*call.args, **call.kwargs)

    return stating(invariant, wrong)


def configured(invariant: str, **options: Any) -> Code:
    """For `around`: the original with other `options` of its first argument; a function makes one of that argument."""

    def wrong(original: Code, of: Any, *seen: Any) -> Any:
        changed = {name: value(of) if callable(value) else value for name, value in options.items()}
        return original(dataclasses.replace(of, **changed), *seen)

    return stating(invariant, wrong)


def result(invariant: str, change: Callable[[Any], Any]) -> Code:
    """For `after`: what `change` makes of the original's result."""
    return stating(invariant, lambda found, *_, **__: change(found))


def unreduced(invariant: str) -> Code:
    """For `instead_of`: what is to be summed over an axis stays that of this rank."""
    return stating(invariant, lambda values, axis: values)


def reversed_ranks(invariant: str) -> Code:
    """For `after`: what was gathered over an axis is in the opposite order."""
    return stating(invariant, lambda y, x, axis: y.unflatten(0, (axis.size, -1)).flip(0).flatten(0, 1))


def _replaced(change: Change) -> AbstractContextManager[Any]:
    owner, name, replace = change
    return mock.patch.object(owner, name, replace(getattr(owner, name)))


def _with(change: Change, original: Code) -> Code:
    """`original` with `change` injected during its calls."""

    def call(*args: Any, **rest: Any) -> Any:
        with _replaced(change):
            return original(*args, **rest)

    return call


def rank() -> int:
    """The global rank of this process."""
    place = launcher_place()
    return place.rank if place else 0  # None: one process, without a launcher


def not_summed(axis: str, invariant: str, *, of: Callable[[Any], bool] = lambda factor: True) -> Code:
    """For `after` of `gradsync._parts`: the factors of which `of` is true are not summed over `axis`."""

    def wrong(found: list[Any], factor: Any, mesh: Any) -> list[Any]:
        return [without_axis(part, axis) for part in found] if of(factor) else found

    return stating(invariant, wrong)


def without_axis(found: Any, axis: str) -> Any:
    """`found`, a rule or a part of a factor, without the sum of its gradient over `axis`."""
    return dataclasses.replace(found, grad_axes=found.grad_axes - {axis})

"""Attention of a layer that runs twice, computed once: what it gave the first time is given again the second time.

Owns: the results kept between the two forwards of a layer, in the order of its attentions. Does not own: which layers
run twice (`run.recompute`); the kernels, by name in `meshlora_ground.compat.torch_operators`.

A fused kernel gives its output and what its backward needs: the log-sum-exp of each query, and a random state. All of
it is kept, at the operator below autograd, so the second forward builds the same graph around results of the first.
torch's own selective checkpointing does it too, but refuses a second forward with an operator that the first had not,
as a weight gathered again, and does not know attention in parts, which is one autograd function here. Where there is no
kernel, as for values of another width than keys, torch computes attention in products, which run again.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from torch import Tensor

from meshlora_ground.compat.torch_operators import FUSED_ATTENTIONS, TorchDispatchMode, map_tensors, schema_of

_Result = TypeVar("_Result")
# Of each thread: autograd runs the second forward of a GPU's layers on one of its own.
_RUNNING = threading.local()


class KeptAttention:
    """What the attentions of one layer gave for one micro-batch, each under its name.

    kept = KeptAttention()
    with kept.first():
        y = layer(x)
    with kept.second():  # no attention kernel runs
        y = layer(x)
    """

    def __init__(self) -> None:
        self._results: list[tuple[str, Any]] = []

    @contextlib.contextmanager
    def first(self) -> Iterator[None]:
        """Attention in the block is computed, and kept."""

        def keep(name: str, compute: Callable[[], Any]) -> Any:
            result = compute()
            self._results.append((name, _detached(result)))  # the result itself will hold the graph
            return result

        with _by_rule(keep), _Attentions():
            yield

    @contextlib.contextmanager
    def second(self) -> Iterator[None]:
        """Attention in the block is what it was in the first one."""
        left = iter(self._results)

        def give(name: str, _: Callable[[], Any]) -> Any:
            kept, result = next(left, ("nothing", None))
            assert kept == name, f"the second forward of a layer calls {name}, where the first called {kept}"
            return _detached(result)  # objects of their own: autograd puts them into the second graph

        with _by_rule(give), _Attentions():
            yield
        missed = [name for name, _ in left]
        assert not missed, f"the second forward of a layer does not call {missed}, as the first did"


def once(name: str, compute: Callable[[], _Result]) -> _Result:
    """`compute()`, attention outside of a graph, under a name of its own; in a second forward what it gave before."""
    rule = getattr(_RUNNING, "rule", None)
    if rule is None:
        return compute()

    def as_one() -> _Result:  # of attention made of others, these are not kept as well
        with apart():
            return compute()

    return rule(name, as_one)


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """Attention in the block is none of a layer, as where a kernel is tried: it is neither kept nor given."""
    with _by_rule(None):
        yield


@contextlib.contextmanager
def _by_rule(rule: Callable[[str, Callable[[], Any]], Any] | None) -> Iterator[None]:
    before = getattr(_RUNNING, "rule", None)
    _RUNNING.rule = rule
    try:
        yield
    finally:
        _RUNNING.rule = before


class _Attentions(TorchDispatchMode):
    """Every operator passes by; those of attention go by the rule."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        compute = functools.partial(function, *args, **(kwargs or {}))
        name = schema_of(function).name
        return once(name, compute) if name in FUSED_ATTENTIONS else compute()


def _detached(result: Any) -> Any:
    return map_tensors(Tensor.detach, result)

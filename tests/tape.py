"""A recorder for machines without a GPU: what runs is written down operator by operator, and replayed in its memory.

As in a record of CUDA, arguments that are no tensors are those of the record for ever, tensors are places in memory,
and the host cannot read a number.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# What the host waits for, and tensors that it makes of its own numbers.
_OF_HOST = {"_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "_unique2", "unique_dim"}
_OF_HOST |= {"lift_fresh"}
_READING = ("tolist", "numpy", "cpu")


class NotRecordedError(RuntimeError):
    """What CUDA refuses in a record."""


def _refused(name: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise NotRecordedError(name)

    return refuse


class _Tape(TorchDispatchMode):
    """Writes down each operator with its arguments and results."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, list[Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        by_mask = name.startswith("index") and any(
            isinstance(i, Tensor) and i.dtype == torch.bool for i in (args[1] if isinstance(args[1], list) else ())
        )
        if name in _OF_HOST or by_mask:
            raise NotRecordedError(name)
        out = func(*args, **(kwargs or {}))
        if "empty" not in name:  # memory without content, whose shape may change later
            self.calls.append((func, args, kwargs or {}, tree_leaves(out)))
        return out

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, outs in self.calls:
            given = {_place(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
            for own, found in zip(outs, tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(own, Tensor) and _place(own) not in given:
                    own.copy_(found)


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class TapeRecorder:
    """See `meshlora.run.graphs.recorder.Recorder`. records: how many there are. replays: of all of them."""

    def __init__(self) -> None:
        self.records = self.replays = 0

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        tape = _Tape()
        with contextlib.ExitStack() as stack:
            for name in _READING:
                stack.enter_context(mock.patch.object(Tensor, name, _refused(name)))
            stack.enter_context(tape)
            run()
        self.records += 1

        def replay() -> None:
            self.replays += 1
            tape.replay()

        return replay

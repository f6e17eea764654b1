"""Replay: in a precision that rounds, everyone routes as the float64 reference did.

Owns: which token of a case stands where in a batch, known by its sequence, and where the record of a case lies. Does
not own: the mechanism (`meshlora.common.routing`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from meshlora.common.routing import Routing, RoutingRecord
from meshlora.oracle.capture import sequence_numbers, spans
from meshlora.oracle.case import Case
from meshlora.oracle.experts import expert_modules, matrices


def record_file(case: Case) -> Path:
    """Beside the adapter that both sides start from."""
    return Path(case.adapter).with_name("routing.safetensors")


def is_replayed(case: Case) -> bool:
    """Whether the runs of a case take the reference's choices."""
    return case.dtype != "float64" and record_file(case).is_file()


def new_record(model: nn.Module, case: Case) -> RoutingRecord:
    """An empty one for the routers of `model`, the reference's."""
    numbers = {name: len(stack) for name, stack in matrices(model).items()}
    blocks = {name: next(n for s, n in numbers.items() if s.startswith(f"{name}.")) for name in expert_modules(model)}
    return RoutingRecord(len(case.input_ids), {name.rpartition(".")[0]: n for name, n in blocks.items()})


def at_step(routing: Routing | None, step: int) -> None:
    """What follows is of optimizer step `step`."""
    if routing is not None:
        routing.step = step


def after_step(routing: Routing | None, step: int, case: Case) -> None:
    """What follows is an evaluation after `step`: it has a number of its own, after the last one that of the steps."""
    at_step(routing, case.steps if step + 1 == case.steps else case.steps + 1)


@contextlib.contextmanager
def routed(
    model: Any,
    case: Case,
    record: RoutingRecord | None,
    *,
    replays: bool,
    cut: Callable[[Tensor], Tensor] = lambda tokens: tokens,
) -> Iterator[Routing | None]:
    """Record or replay what a Hugging Face model does inside; the step is set by the caller. None: neither.

    cut: what this rank's routers see of the tokens of a forward.
    """
    if record is None:
        yield None
        return
    numbers = {tuple(s.input_ids.tolist()): start for s, start in zip(case.data, case.offsets, strict=False)}

    def begin(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        ids = kwargs["input_ids"]
        rows = torch.full(ids.shape, -1, dtype=torch.int64)
        for row, place, sequence in spans(ids, sequence_numbers(kwargs)):
            start = numbers.get(sequence)
            if start is not None:
                rows[row, place : place + len(sequence)] = torch.arange(start, start + len(sequence))
        routing.tokens = cut(rows.flatten())

    with Routing(model, record, replays=replays) as routing:
        handle = model.register_forward_pre_hook(begin, with_kwargs=True)
        try:
            yield routing
        finally:
            handle.remove()

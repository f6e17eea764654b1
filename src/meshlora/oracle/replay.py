"""Replay: in a precision that rounds, everyone routes as the float64 reference did.

Owns: which token of a case stands where in a batch, known by its sequence, and where the record of a case lies. Does
not own: the mechanism (`meshlora.common.routing`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from meshlora.common.routing import Routing, RoutingRecord
from meshlora.oracle.capture import rows_of_tokens, sequence_numbers
from meshlora.oracle.case import Case
from meshlora.oracle.experts import expert_modules, matrices


def record_file(case: Case) -> Path:
    """Beside the adapter that both sides start from."""
    return Path(case.adapter).with_name("routing.safetensors")


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
    record: RoutingRecord | None = None,
    *,
    cut: Callable[[Tensor], Tensor] = lambda tokens: tokens,
) -> Iterator[Routing | None]:
    """Inside, what a Hugging Face model does goes into `record`, or without one is what that of the case says.

    Yields None where neither is so; else the step is set by the caller. cut: what this rank's routers see of the
    tokens of a forward.
    """
    replays = record is None
    if record is None:
        if case.dtype == "float64" or not record_file(case).is_file():
            yield None
            return
        record = RoutingRecord.load(record_file(case))
    starts = {tuple(s.input_ids.tolist()): start for s, start in zip(case.data, case.offsets, strict=False)}

    def begin(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        routing.tokens = cut(rows_of_tokens(kwargs["input_ids"], sequence_numbers(kwargs), starts))

    with Routing(model, record, replays=replays) as routing:
        handle = model.register_forward_pre_hook(begin, with_kwargs=True)
        try:
            yield routing
        finally:
            handle.remove()

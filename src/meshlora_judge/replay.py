"""Replay: in low precision all runs route as the float64 reference did, and the reference as rollouts say, if they do.

A token of a case is identified in a batch by its sequence. Does not own: the mechanism (`meshlora_ground.routing`).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from meshlora_ground.routing import Routing, RoutingRecord
from meshlora_judge.capture import rows_of_tokens, sequence_numbers
from meshlora_judge.case import Case
from meshlora_judge.experts import matrices


def record_file(case: Case) -> Path:
    """The routing record of `case`, next to its adapter folder."""
    return Path(case.adapter).with_name("routing.safetensors")


def new_record(model: nn.Module, case: Case) -> RoutingRecord:
    """An empty record for the routers of the reference's `model`."""
    numbers = dict[str, int]()
    for name, stack in matrices(model).items():
        experts = name.rpartition(".")[0]  # all projections of a module have as many
        numbers[experts.rpartition(".")[0]] = len(stack)
    return RoutingRecord(len(case.input_ids), numbers)


def at_step(routing: Routing | None, step: int) -> None:
    """Record, or replay, as optimizer step `step` from now on."""
    if routing is not None:
        routing.step = step


def after_step(routing: Routing | None, step: int, case: Case) -> None:
    """Record, or replay, the evaluation after `step`: number `steps` after the last step, `steps + 1` before."""
    at_step(routing, case.steps if step + 1 == case.steps else case.steps + 1)


@contextlib.contextmanager
def routed(
    model: Any,
    case: Case,
    record: RoutingRecord | None = None,
    *,
    cut: Callable[[Tensor], Tensor] = lambda tokens: tokens,
) -> Iterator[Routing | None]:
    """Record the routing of a Hugging Face model in `record`, or without one replay the case's record.

    Yields None if the case has no record; else the caller sets the step. cut: selects the tokens of a forward that
    this rank's routers see.
    """
    replays = record is None
    if record is None:
        if case.dtype == "float64" or not record_file(case).is_file():
            yield None
            return
        record = RoutingRecord.load(record_file(case))
    with _following(model, case, Routing(model, record, replays=replays), cut) as routing:
        yield routing


@contextlib.contextmanager
def as_the_engine(model: Any, case: Case) -> Iterator[Routing]:
    """Send each token of the reference's `model` to the experts that its rollout says, in every optimizer step."""
    record, of_tokens = new_record(model, case), torch.tensor(case.routed, dtype=torch.int32)
    for block in record.num_experts:
        (layer,) = re.findall(r"\.(\d+)\.", block)
        for step in range(case.steps):
            record.choices[step, block] = of_tokens[:, int(layer)]
    is_known = (of_tokens >= 0).all(2).all(1)
    only_known = lambda tokens: torch.where(is_known[tokens], tokens, -1)  # noqa: E731 - padding is -1 already
    with _following(model, case, Routing(model, record, replays=True), only_known) as routing:
        yield routing


def free(case: Case, routing: Routing | None) -> contextlib.AbstractContextManager[None]:
    """Inside the block routers choose freely, where rollouts say the experts: of the base, and in evaluations."""
    if routing is None or not case.routed:
        return contextlib.nullcontext()
    return routing.off()


@contextlib.contextmanager
def _following(model: Any, case: Case, routing: Routing, cut: Callable[[Tensor], Tensor]) -> Iterator[Routing]:
    """`routing` in force, told before each forward of `model` which tokens of the case it has."""
    starts = {tuple(s.input_ids.tolist()): start for s, start in zip(case.data, case.offsets, strict=False)}

    def begin(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        routing.tokens = cut(rows_of_tokens(kwargs["input_ids"], sequence_numbers(kwargs), starts))

    with routing:
        handle = model.register_forward_pre_hook(begin, with_kwargs=True)
        try:
            yield routing
        finally:
            handle.remove()

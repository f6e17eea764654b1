"""What a teacher says at the trained tokens of a batch: a second model, the same model, or a record.

Does not own: what is made of it (`run.distillation.divergence`), the records (`reading.taught`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshlora.adapter.attach import reference_in_use, runtime
from meshlora.feature import check_proved
from meshlora.loading.blueprint import Blueprint, make_blueprint
from meshlora.loading.load import load_blueprint
from meshlora.plan.base_options import BaseOptions
from meshlora.reading.tokenizer import load_tokenizer
from meshlora.run.config.run_file import RunConfig
from meshlora.run.distillation.divergence import Hidden, Likeliest
from meshlora.run.heads import places_of
from meshlora.train.batch import Batch
from meshlora.train.batches import Batching, Step
from meshlora.train.losses import Found, before_last, to_head
from meshlora_ground.errors import UserError
from meshlora_ground.objectives.distillation import Distill
from meshlora_ground.topology import Topology

TOKEN, LOG_P = "teacher_token_", "teacher_log_prob_"  # columns of a record, and the rank of the token


@dataclass(frozen=True, eq=False)
class InContext:
    """What the teacher of a step says of the examples of this rank: place of an example -> `[N, H]`; its head."""

    rows: Mapping[int, Tensor]
    head: Callable[[Tensor], Tensor]

    def of(self, batch: Batch, trained: Tensor) -> Hidden:
        """At the trained tokens of a batch."""
        if batch.is_dummy:
            return Hidden(next(iter(self.rows.values())).new_zeros(0), self.head)
        of_examples = [self.rows[place // 2] for place in places_of(batch).tolist()]  # an example is two rows
        found = torch.cat(of_examples)
        assert len(found) == len(trained), (len(found), len(trained))
        return Hidden(found, self.head)


def rows_and_head(model: Any, found: Found) -> tuple[Tensor, Callable[[Tensor], Tensor], dict[str, Any]]:
    """(what the head is given at each token, `[T, H]`; the head; options of a loss over its vocabulary)."""
    if not isinstance(found, Tensor):
        return found
    axis = runtime(model).mesh.tp
    assert axis.size == 1, axis  # whole logits are of one process
    return found.flatten(0, -2), lambda logits: logits, {"parameters": [], "axis": axis, "vocab": found.shape[-1]}


@torch.no_grad()
def said(objective: Distill, model: Any, batch: Batch) -> Hidden | None:
    """What a teacher that runs says at each trained token of a batch, without dropout; None: it does not run here."""
    if objective.is_recorded or objective.context is not None:
        return None
    return _of_model(objective, model, batch)


def recorded(objective: Distill, batch: Batch, trained: Tensor) -> Likeliest:
    """What the data say of the teacher, at each of this rank's trained tokens."""
    number = sum(name.startswith(TOKEN) for name in batch.columns)
    if objective.top_k is not None:
        number = min(number, objective.top_k)

    def stacked(name: str) -> Tensor:
        of_ranks = [batch.held(batch.columns[f"{name}{rank}"]).flatten()[trained] for rank in range(number)]
        return torch.stack(of_ranks, 1)

    return Likeliest(stacked(TOKEN).long(), stacked(LOG_P))


@torch.no_grad()
def said_in_context(objective: Distill, model: Any, batching: Batching, step: Step) -> InContext:
    """What the teacher says of the examples of `step`, whose second rows it sees. Collective."""
    rows = dict[int, Tensor]()
    head: Callable[[Tensor], Tensor] = _never  # of a stage before the last, which has no loss
    for batch in with_context(batching).batches(*step):
        found = _of_model(objective, model, batch)
        if found is None:
            continue
        head = found.head
        numbers = (batch.labels >= 0).sum(1).tolist()
        places = [-1] if batch.is_dummy else [place // 2 for place in places_of(batch).tolist()]
        rows |= dict(zip(places, found.rows.split(numbers), strict=True))
    return InContext(rows, head)


def _never(_: Tensor) -> Tensor:
    raise AssertionError("the last stage alone has a head")


def with_context(batching: Batching) -> Batching:
    """Batches of what the teacher sees: the second row of each example."""
    return dataclasses.replace(batching, only=1)


def _of_model(objective: Distill, model: Any, batch: Batch) -> Hidden | None:
    """At the trained tokens of a batch, of a second model or of the reference of `model`; None: it has a later stage
    that says it.
    """
    teacher = model if objective.folder is None else runtime(model).teacher
    is_training = teacher.training
    teacher.eval()

    def as_teacher(run: Callable[[], Any]) -> Any:
        if teacher is not model:
            return run()
        with reference_in_use(model):
            return run()

    def run() -> Found | None:
        return to_head(teacher, batch) if before_last(teacher, batch) is None else None

    try:
        found: Found | None = as_teacher(run)
    finally:
        teacher.train(is_training)
    if found is None:
        return None
    rows, head, _ = rows_and_head(teacher, found)
    trained = batch.trained
    assert trained is not None
    # The head runs later, when the student is in use again.
    return Hidden(rows[trained], lambda x: as_teacher(lambda: head(x)))


def teacher_blueprint(folder: str, topology: Topology, options: BaseOptions, student: Blueprint) -> Blueprint:
    """The second model, on the topology of the student's.

    Raises:
        UserError: it is no model, or has another vocabulary. UnsupportedError: its split is not proved.
    """
    own = {"disable_dropout": True, "allow_unused_weights": True, "quantization": None, "compute": None}
    fields = {item.name: getattr(options, item.name) for item in dataclasses.fields(BaseOptions)}
    blueprint = make_blueprint(folder, topology, BaseOptions(**(fields | own | {"kernels": "none"})))
    check_proved(blueprint.plan)
    size, of_student = (each.config.get_text_config().vocab_size for each in (blueprint, student))
    if size != of_student:
        given = f"train.objective.teacher={folder}: a vocabulary of {size:,}"
        raise UserError(given, f"the student's has {of_student:,}, and the two are compared token by token", "use one")
    return blueprint


def teacher_of(config: RunConfig, student: Blueprint) -> Blueprint | None:
    """The second model of a run, checked; None: its teacher is none.

    Raises:
        UserError: as of `teacher_blueprint`; it lacks a weight, or its tokenizer has other tokens.
    """
    objective = config.train.objective
    if not isinstance(objective, Distill) or objective.folder is None:
        return None
    found = teacher_blueprint(objective.folder, student.topology, config.model, student)
    found.check_weights()
    trust = config.model.trust_remote_code
    own, other = (load_tokenizer(path, trust_remote_code=trust) for path in (config.model.path, objective.folder))
    if own.get_vocab() != other.get_vocab():
        given = f"train.objective.teacher={objective.folder}: a tokenizer of {len(other):,} tokens"
        rule = f"the student's, of {len(own):,}, has others, or in another order: one number would be two tokens"
        raise UserError(given, rule, "use a teacher with the same tokenizer")
    return found


def load_teacher(model: Any, blueprint: Blueprint | None, *, device: str) -> Any:
    """`model`, with the second one of `blueprint` beside it, frozen, if there is one. Collective."""
    if blueprint is not None:
        runtime(model).teacher = load_blueprint(blueprint, device=device).eval()
    return model

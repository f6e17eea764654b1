"""Distillation: the student's distribution at each trained token is drawn to a teacher's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from meshlora_ground.errors import UserError
from meshlora_ground.numbers import number
from meshlora_ground.objectives.referenced import Referenced

RECORDED, ITSELF = "recorded", "itself"


@dataclass(frozen=True, kw_only=True)
class Distill(Referenced):
    """Distillation from a teacher.

    teacher: recorded: its likeliest tokens stand in the data; itself: the `reference` of the same model; else the
        folder of a second model with the same vocabulary.
    context: the turn of the system that only the teacher sees, of `itself`.
    divergence: forward_kl: KL(teacher || student). reverse_kl: KL(student || teacher). jsd: the generalised one.
    beta: of jsd: the teacher's share in the mixture.
    temperature: both logits are divided by it. cross_entropy: weight of that of the data, beside the divergence.
    top_k: compare the teacher's so many likeliest tokens alone; None: all, or all that are recorded. rest: of the
        others: bucket: they are one more token; renormalize: they are left out of both distributions.
    """

    kind: Literal["distill"] = "distill"
    teacher: str = RECORDED
    context: str | None = None
    divergence: Literal["forward_kl", "reverse_kl", "jsd"] = "forward_kl"
    beta: float = number(0.5, "above 0, below 1")
    temperature: float = number(1.0, "above 0, at most 1,000,000")
    cross_entropy: float = number(0.0, "not negative, at most 1,000,000")
    top_k: int | None = number(None, "at least 1", most=1000)
    rest: Literal["bucket", "renormalize"] = "bucket"

    def __post_init__(self) -> None:
        super().__post_init__()
        where = "train.objective"
        if not self.teacher:
            raise UserError(f"{where}.teacher is empty", "it must name one", f"give {RECORDED}, {ITSELF} or a folder")
        if self.context is not None and not self.needs_base:
            rule = "a second model, or a record, sees what the student sees"
            raise UserError(f"{where}.context with teacher={self.teacher}", rule, f"use teacher: {ITSELF}")
        if self.beta != 0.5 and self.divergence != "jsd":
            rule = f"it has no effect on {self.divergence}"
            raise UserError(f"{where}.beta={self.beta}", rule, "give divergence: jsd, or leave it out")
        is_of_few = self.top_k is not None or self.is_recorded
        if self.rest != "bucket" and not is_of_few:
            raise UserError(f"{where}.rest={self.rest}", "all tokens are compared", "give top_k, or leave it out")
        if self.is_recorded and self.rest == "bucket" and self.temperature != 1:
            rule = "the probability of what is not recorded is known at temperature 1 alone"
            raise UserError(f"{where}.temperature={self.temperature}", rule, "use rest: renormalize")

    @property
    def reader(self) -> str:  # type: ignore[override] # one for each kind of teacher
        """Key of `READERS`."""
        if self.is_recorded:
            return "taught"
        return "text" if self.context is None else "in_context"

    @property
    def trained_row(self) -> int | None:  # type: ignore[override] # with a context the other row is the teacher's
        """The student's row, where teacher and student have one each."""
        return None if self.context is None else 0

    @property
    def is_of_step(self) -> bool:  # type: ignore[override] # else what the teacher says of all examples would be held
        """Whether a pass over a step finds what the teacher says."""
        return self.context is not None

    @property
    def is_summed(self) -> bool:
        """Each token has a divergence, and only their sum is needed."""
        return True

    @property
    def needs_base(self) -> bool:
        """Whether the teacher is the same model."""
        return self.teacher == ITSELF

    @property
    def is_recorded(self) -> bool:
        """Whether what the teacher says stands in the data."""
        return self.teacher == RECORDED

    @property
    def folder(self) -> str | None:
        """The folder of the second model, if the teacher is one."""
        return None if self.needs_base or self.is_recorded else self.teacher

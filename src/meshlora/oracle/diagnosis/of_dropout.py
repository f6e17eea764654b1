"""Causes in dropout, from what a failing tensor's numbers show.

Owns: the rules. Does not own: the other causes (`oracle.diagnosis.causes`), how numbers are compared
(`oracle.diagnosis.symptoms`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from meshlora.oracle.diagnosis.failure import Failure
from meshlora.oracle.diagnosis.symptoms import assembled

_OTHER_MASK = "it drops other elements than one process: its mask knows the topology, or is another module's or step's"
_NOT_SCALED = "what its dropout keeps is not divided by the share that is kept"


def of_forward(case: Failure, base_of: Callable[[str], Tensor]) -> str:
    """What is wrong with the output of a dropout, or of a linear whose adapter has one.

    base_of: output of a target of the adapter without the adapter's term.
    """
    name, whole, rates = case.result.name, case.result.whole, case.evidence.reference.dropouts
    if whole is None:
        return ""
    if name in rates:
        ours = assembled(case.result.pieces, whole)
        return _NOT_SCALED if torch.equal(ours == 0, whole == 0) else _OTHER_MASK
    rate = rates.get(f"{name}.lora_dropout", 0.0)
    b = case.evidence.reference.initial.get(f"{name}.lora_B")
    if not rate or b is None or any(name not in micro.base for micro in case.evidence.reference.micro_batches):
        return ""
    term = (whole - base_of(name)).double()
    gap = assembled(case.result.pieces, whole) - whole.double()
    # Another input of A moves the output within the span of B, and nowhere else.
    span = torch.linalg.qr(b.double()).Q
    if float((gap - gap @ span @ span.T).norm()) > case.tolerance * float(gap.norm()):
        return ""
    ratio = 1 + float((gap * term).sum() / term.square().sum())
    if float((gap - (ratio - 1) * term).norm()) > case.tolerance * float(gap.norm()):
        return _OTHER_MASK
    return _NOT_SCALED if abs(ratio - (1 - rate)) < case.tolerance else ""


def of_later_steps(case: Failure) -> str:
    """Where the first step is right and the others are not."""
    if not case.evidence.reference.dropouts:
        return ""
    return "; or dropout has the masks of another step"

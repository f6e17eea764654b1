"""A verdict on recorded steps, as plain values and in words.

Owns: what was compared, what differed and why. Does not own: comparing (`steps.judge`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from meshlora_ground.errors import numbered
from meshlora_judge.steps.causes import VAGUE

# Phase -> what it compares, and as a finding begins; in the order in which a fault shows first.
_PHASES = {
    "trained": ("which parameters are trained", "of the trained parameters"),
    "rows": ("each rank's rows are its own", "rows"),
    "replicas": ("copies on ranks are equal", "copies of"),
    "gradient": ("gradients before clipping", "gradients of"),
    "shares": ("micro-batches' shares in them", "shares in"),
    "clipping": ("clipping", "clipping of"),
    "update": ("what the optimizer changed", "the update of"),
    "between": ("nothing changed them between steps", "before it,"),
    "state": ("the optimizer's state", "the optimizer's state of"),
    "saved": ("saved file", "the saved file:"),
}
PHASES = {phase: words for phase, (words, _) in _PHASES.items()}


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong. cause: its key. names: the parameters concerned. ratio, error: where it has one."""

    step: int
    phase: str
    cause: str
    words: str
    names: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    error: float | None = None
    ratio: float | None = None

    def __str__(self) -> str:
        said = f"step {self.step + 1}, {_PHASES[self.phase][1]}"
        if self.names:
            said += f" {kinds_of(self.names)}"
        if self.ranks:
            said += f" on {numbered('rank', self.ranks)}"
        if self.error is not None:
            said += f" ({self.error:.1e} off)"
        return f"{said}: {self.words}"


@dataclass
class Verdict:
    """Attributes:
    findings: what is wrong, first what shows first. compared: phase -> (worst error, its limit, how many).
    notes: what was not judged, and what the recorder changed. facts: what was recorded, for a reader.
    """

    findings: list[Finding] = field(default_factory=list)
    compared: dict[str, tuple[float, float, int]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    facts: dict[str, str] = field(default_factory=dict)

    def compare(self, phase: str, error: float, limit: float) -> bool:
        """Keep one comparison; returns whether it passed."""
        worst, its_limit, number = self.compared.get(phase, (0.0, limit, 0))
        if error / limit >= worst / its_limit:
            worst, its_limit = error, limit
        self.compared[phase] = (worst, its_limit, number + 1)
        return error <= limit

    @property
    def is_proved(self) -> bool:
        return not self.findings

    @property
    def first(self) -> Finding:
        """The finding to say: the first whose cause is known, else the first."""
        return next((finding for finding in self.findings if finding.cause not in VAGUE), self.findings[0])

    def paragraph(self) -> str:
        """What is wrong, the first in full, the number of the others."""
        said = str(self.first)
        more = len(self.findings) - 1
        return f"refuted: {said}" + (f"; and {more} more, as --json says" if more else "")

    def as_json(self) -> dict[str, Any]:
        names = ("worst", "limit", "number")
        compared = {phase: dict(zip(names, found, strict=True)) for phase, found in self.compared.items()}
        said = {"proved": self.is_proved, "findings": list(map(asdict, self.findings)), "compared": compared}
        return {**said, "notes": self.notes, "facts": self.facts}


def kinds_of(names: Sequence[str]) -> str:
    """`o_proj.lora_A (12 layers) and down_proj.lora_A (12 layers)`: names without their places, counted."""
    counted = Counter(".".join([part for part in _short(name) if not part.isdigit()][-3:]) for name in names)
    said = [f"{kind} ({number} of them)" if number > 1 else kind for kind, number in counted.most_common(4)]
    if len(counted) > 4:
        said.append(f"{len(counted) - 4} kinds more")
    return ", ".join(said)


def _short(name: str) -> list[str]:
    return name.removesuffix(".weight").removesuffix(".default").split(".")

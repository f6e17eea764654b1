"""A failure: the first tensor that differs, and what the rules of a diagnosis ask about it.

Owns: the questions. Does not own: what follows from the answers (`oracle.diagnosis.causes`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshlora.oracle.diagnosis.symptoms import centred, simple_ratio, tolerance_of
from meshlora.oracle.judge import Evidence
from meshlora.oracle.results import Phase, TensorResult


@dataclass(frozen=True)
class Failure:
    """What a rule looks at: the first failing tensor, its phase, and everything else."""

    phase: Phase
    result: TensorResult
    evidence: Evidence

    @property
    def tolerance(self) -> float:
        return tolerance_of(self.evidence)

    @property
    def tp(self) -> int:
        return self.evidence.topology.tp

    @property
    def dp(self) -> int:
        return self.evidence.topology.dp

    @property
    def ratio(self) -> float | None:
        return simple_ratio(self.result.pieces, self.result.whole, self.tolerance)

    def fact(self, name: str) -> str:
        """What the plan says of the module `name`, or of the one that the factor `name` belongs to."""
        module = name.partition("#")[0]
        return self.evidence.ranks[0].facts.get(module.rpartition(".lora_")[0] or module, "")

    def is_embedding(self, name: str) -> bool:
        """Whether the module `name` turns tokens into vectors: it has a weight, and nothing runs before it."""
        return name == self.evidence.reference.order[0] and name in self.evidence.reference.rows

    def block(self, name: str) -> str:
        """The region that `name` is in, or ""."""
        parents = [r for r, fact in self.evidence.ranks[0].facts.items() if fact.endswith("region")]
        return next((r for r in parents if name == r or name.startswith(f"{r}.")), "")

    def adds_up_over(self, axis: str, result: TensorResult | None = None) -> bool:
        """Whether the parts of the ranks along `axis` are different terms whose sum is the reference."""
        result = result or self.result
        whole, topology = result.whole, self.evidence.topology
        if whole is None or getattr(topology, axis) == 1:
            return False
        place = topology.expert_coordinates if axis in topology.expert_sizes else topology.coordinates
        totals: dict[tuple[Any, ...], Tensor] = {}
        parts: dict[tuple[Any, ...], Tensor] = {}
        for piece in result.pieces:
            part = piece.along(whole)
            # Ranks elsewhere on the other axes have tokens of their own and copies of their own of each factor.
            others = [index for name, index in place(piece.rank).items() if name != axis and piece.rows is None]
            key = (piece.dim, piece.start, *others)
            total = totals.setdefault(key, torch.zeros_like(part, dtype=torch.float64))
            rows = torch.arange(part.shape[0]) if piece.rows is None else piece.rows
            total.index_add_(0, rows, piece.values.double())
            parts[key] = part.double()
        return all(
            float(centred(total - parts[key]).norm()) <= self.tolerance * float(centred(parts[key]).norm())
            for key, total in totals.items()
        )

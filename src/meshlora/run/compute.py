"""Where a run computes: on which devices, and whether the proof before its first step is made there, too.

Owns: what follows of it for kernels. Does not own: kernels (`wings.kernels.kernels`), the proof (`verify.preflight`).
"""

from __future__ import annotations

from dataclasses import dataclass

from meshlora.loading.blueprint import Blueprint
from meshlora.wings.kernels.kernels import with_kernels


@dataclass(frozen=True)
class Compute:
    """`device` and `preflight` of a run file."""

    device: str
    preflight: str

    def with_kernels(self, blueprint: Blueprint) -> tuple[Blueprint, str]:
        """(`blueprint` with its kernels decided; a message if it has some). Raises: UserError."""
        return with_kernels(blueprint, device=self.device, is_proved=self.preflight in ("auto", "device"))

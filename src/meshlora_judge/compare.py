"""Compare the results of two runs: adapters tensor by tensor, losses step by step. No averages, no limits."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from meshlora_ground.errors import UserError


@dataclass(frozen=True)
class Worst:
    """The worst single tensor of a comparison."""

    name: str
    relative: float


def relative(ours: Tensor, reference: Tensor) -> float:
    """Relative L2 distance; infinite if shapes differ, ours is not finite, or only ours is all zeros."""
    if ours.shape != reference.shape or not torch.isfinite(ours).all() or (not ours.any() and reference.any()):
        return float("inf")
    ours, reference = ours.double(), reference.double()
    return float((ours - reference).norm() / reference.norm().clamp_min(1e-300))


def compare_adapters(ours: str | Path, reference: str | Path) -> Worst:
    """The factor that differs most between two adapter folders; infinite if a name is in only one of them.

    Raises:
        UserError: one of them is no folder of an adapter.
    """
    a, b = (_factors_of(Path(folder)) for folder in (ours, reference))
    # A name in one file only is a difference, whatever the others are.
    if a.keys() != b.keys():
        return Worst(min(a.keys() ^ b.keys()), float("inf"))
    return max((Worst(name, relative(a[name], b[name])) for name in b), key=lambda worst: worst.relative)


def _factors_of(folder: Path) -> dict[str, Tensor]:
    file = folder / "adapter_model.safetensors"
    if not file.is_file():
        raise UserError(f"adapter {folder}", f"it holds no {file.name}", "give the folder of an adapter")
    return load_file(file)


def read_losses(metrics: str | Path) -> list[float]:
    """Training loss per step, from `metrics.jsonl`."""
    lines = map(json.loads, Path(metrics).read_text(encoding="utf-8").splitlines())
    return [line["loss"] for line in lines if "loss" in line]


def largest_loss_gap(ours: list[float], reference: list[float]) -> float:
    """max over steps of |ours - reference|; infinite if the numbers of steps differ."""
    if len(ours) != len(reference):
        return float("inf")
    return max(abs(a - b) for a, b in zip(ours, reference, strict=True))

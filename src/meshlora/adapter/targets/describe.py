"""What an adapter sits on, in words."""

from __future__ import annotations

from collections.abc import Mapping

from meshlora.adapter.targets.resolve import Target
from meshlora.plan.table import folded_names


def describe_targets(targets: Mapping[str, Target]) -> list[str]:
    """One line for each kind of target: where the adapter sits, as it came out of the configuration."""
    lines = []
    for name, same in folded_names(targets).items():
        first = targets[same[0]]
        times = f", {len(same)} layers" if len(same) > 1 else ""
        experts = f", {'one for all of' if first.is_shared else 'each of'} {first.num_experts} experts"
        pieces = f" ({', '.join(first.pieces)})" if first.pieces else ""
        lines.append(f"  LoRA r={first.r} on {name}{pieces}{times}{experts if first.num_experts else ''}")
    return lines

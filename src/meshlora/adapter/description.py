"""An adapter in words: a line for each kind of target, for terminals."""

from __future__ import annotations

from meshlora.adapter.plan import AdapterPlan
from meshlora.plan.table import folded_names


def describe_adapter(adapter: AdapterPlan) -> list[str]:
    """One line for each kind of target, and for each module's rows."""
    lines = []
    for name, same in folded_names(adapter.targets).items():
        first = adapter.targets[same[0]]
        line = f"  LoRA r={first.r} on {name}"
        if first.pieces:
            line += f" ({', '.join(first.pieces)})"
        if len(same) > 1:
            line += f", {len(same)} layers"
        if first.is_shared:
            line += f", one for all of {first.num_experts} experts"
        elif first.num_experts:
            line += f", each of {first.num_experts} experts"
        lines.append(line)
    return lines + [f"  {len(rows.ids)} rows of {' and '.join(rows.modules)}" for rows in adapter.rows.values()]

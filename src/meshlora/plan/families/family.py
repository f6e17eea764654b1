"""The words of a family's plan: which linears are split how, and what its code reads besides.

Owns: `Leaf`, `FamilyPlan`, and shorthands for what many families have in common. Does not own: the families
(`plan.families.explicit`, `plan.families.styles`), what follows (`plan.rules`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from meshlora.plan.layout import Split


@dataclass(frozen=True)
class Leaf:
    """One linear that is split.

    Attributes:
        split: of its weight, by columns or rows. pieces: of a fused one, in order: q (as many units as heads), k and v
            (as many as key/value heads), else equal parts of single rows.
        groups: how often the pieces repeat: a number, "heads" or "kv_heads". local_groups: on a rank, where it does
            not shrink.
    """

    split: Split
    pieces: str = ""
    groups: int | str = 1
    local_groups: int = 0


@dataclass(frozen=True)
class FamilyPlan:
    """One family.

    Attributes:
        leaves: the linears that are split. A block of which no linear stands here is kept whole on every rank.
        local: block -> attributes that count heads or measure widths, besides those that are known by name; what is
            "config.x" the block reads from the configuration.
        sliced: block -> names of arguments whose heads dim is cut, and that dim; "batch*heads" is one dim of both.
        parameters: parameters of a block that have a dim of heads, and that dim.
        wide_norms: RMS norms over a width that is split.
        whole: parameters of a split block that are whole on every rank.
        passes: block -> arguments that are added to its output, and need no border.
        after: modules that run after the last decoder layer and do not look like it.
    """

    leaves: Mapping[str, Leaf]
    local: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    sliced: Mapping[str, Mapping[str, int | str]] = field(default_factory=dict)
    parameters: Mapping[str, int] = field(default_factory=dict)
    wide_norms: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()
    passes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    after: tuple[str, ...] = ()


COLUMN, ROW = Leaf(Split.COLUMN), Leaf(Split.ROW)


def fused(pieces: str, *, groups: int | str = 1, local_groups: int = 0) -> Leaf:
    return Leaf(Split.COLUMN, pieces, groups, local_groups)


def separate(block: str, *, out: str = "o_proj", names: str = "q_proj k_proj v_proj") -> dict[str, Leaf]:
    """Attention with three column-parallel linears and a row-parallel one."""
    return {f"{block}.{name}": COLUMN for name in names.split()} | {f"{block}.{out}": ROW}


def gated_mlp(block: str = "mlp", *, names: str = "gate_proj up_proj down_proj") -> dict[str, Leaf]:
    """Two column-parallel linears and a row-parallel one."""
    *columns, row = (f"{block}.{name}" for name in names.split())
    return dict.fromkeys(columns, COLUMN) | {row: ROW}


def fused_mlp(block: str, column: str, row: str) -> dict[str, Leaf]:
    """Gate and up in one matrix."""
    return {f"{block}.{column}": fused("gate up"), f"{block}.{row}": ROW}

"""The data types of a family's plan: how its linears are split, and what else its code depends on.

Owns: `Leaf`, `FamilyPlan`, shorthands for common blocks. Does not own: the families (`wings.tables`,
`plan.families.styles`), the rules that follow (`plan.rules`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from meshlora.plan.layout import Split


@dataclass(frozen=True)
class Leaf:
    """One split linear.

    Attributes:
        split: column- or row-parallel. pieces: of a fused linear, in order: q (one unit per head), k and v (one per
            key/value head), others equal parts of single rows.
        groups: how often the pieces repeat: a number, "heads" or "kv_heads". local_groups: the same on a rank, if it
            does not shrink with tp.
    """

    split: Split
    pieces: str = ""
    groups: int | str = 1
    local_groups: int = 0


@dataclass(frozen=True)
class FamilyPlan:
    """The plan of one family.

    Attributes:
        leaves: path -> split linear. A block without split linears is kept whole on every rank.
        local: block -> attributes with head counts or widths, besides those known by name; the block reads "config.x"
            from its configuration.
        sliced: block -> argument -> its dim of heads, to be sliced; "batch*heads" is one dim of both.
        parameters: parameter with a dim of heads -> that dim.
        wide_norms: RMS norms over a split width.
        whole: parameters of a split block that are whole on every rank.
        passes: block -> arguments with a gradient that need no collective: they are added to its output, or come from
            blocks that are split as it is.
        token_wise: modules with matrices that see each token by itself, on any slice of the tokens, and are whole.
        per_layer: beside the layers, the embedding that gives each of them a second input.
        after: modules that run after the last decoder layer and are not recognised as such.
        opened: blocks whose children are blocks of their own: they add up inside, as bert's attention.
        before: norms that are registered after the layers and run before them.
    """

    leaves: Mapping[str, Leaf]
    local: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    sliced: Mapping[str, Mapping[str, int | str]] = field(default_factory=dict)
    parameters: Mapping[str, int] = field(default_factory=dict)
    wide_norms: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()
    passes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    token_wise: tuple[str, ...] = ()
    per_layer: str = ""
    after: tuple[str, ...] = ()
    opened: tuple[str, ...] = ()
    before: tuple[str, ...] = ()


COLUMN, ROW = Leaf(Split.COLUMN), Leaf(Split.ROW)


def fused(pieces: str, *, groups: int | str = 1, local_groups: int = 0) -> Leaf:
    return Leaf(Split.COLUMN, pieces, groups, local_groups)


def separate(block: str, *, out: str = "o_proj", names: str = "q_proj k_proj v_proj") -> dict[str, Leaf]:
    """An attention with column-parallel `names` and row-parallel `out`."""
    return {f"{block}.{name}": COLUMN for name in names.split()} | {f"{block}.{out}": ROW}


def gated_mlp(block: str = "mlp", *, names: str = "gate_proj up_proj down_proj") -> dict[str, Leaf]:
    """An MLP with column-parallel linears and a row-parallel one, the last of `names`."""
    *columns, row = (f"{block}.{name}" for name in names.split())
    return dict.fromkeys(columns, COLUMN) | {row: ROW}


def fused_mlp(block: str, column: str, row: str) -> dict[str, Leaf]:
    """An MLP with gate and up fused in one matrix."""
    return {f"{block}.{column}": fused("gate up"), f"{block}.{row}": ROW}

"""Plans as tables for the terminal: how linears are split, and where gradients are summed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from rich.table import Column, Table

from meshlora.plan.grads import FactorRule, Side, expert_rule, factor_rule
from meshlora.plan.layout import Layout, Split
from meshlora.plan.rules import Domain, ExpertRule, LinearRule, ModelPlan, kind_of


def plan_table(plan: ModelPlan) -> Table:
    """One row per linear; layers with the same plan are folded."""
    tp = plan.topology.tp
    table = Table(
        Column("linear", overflow="fold"),
        "split",
        "whole [out, in]",
        "on a rank",
        "layers",
        title=f"{plan.model_type} on {plan.topology}",
    )
    for name, layers in folded_names(plan.linears, kind=lambda name: plan.linears[name].split).items():
        rule = plan.linears[layers[0]]
        inside, out = rule.local_features(tp)
        whole, local = f"[{rule.out_features}, {rule.in_features}]", f"[{out}, {inside}]"
        table.add_row(name, f"{rule.split}{_of_pieces(rule, tp)}", whole, local, str(len(layers)))
    for name, numbers in folded_names(plan.experts).items():
        experts = plan.experts[numbers[0]]
        number = experts.num_experts // plan.topology.ep
        for projection in experts.projections:
            inside, out = projection.local_features(plan.topology.etp)
            leaf = projection.name.rpartition(".")[2]
            whole = f"{experts.num_experts} x [{projection.out_features}, {projection.in_features}]"
            split = f"ep, {projection.split} over etp{_names_of_pieces(projection)}"
            table.add_row(f"{name}.{leaf}", split, whole, f"{number} x [{out}, {inside}]", str(len(numbers)))
    for name in (plan.embedding, plan.per_layer[0]):
        if rule_of_rows := plan.parameters.get(f"{name}.weight"):
            layout = rule_of_rows.layout
            table.add_row(name, "vocabulary", f"[{layout.size}, ...]", f"[{layout.local_size(tp)}, ...]", "1")
    return table


def _of_pieces(rule: LinearRule, tp: int) -> str:
    """The pieces of a fused linear that may have adapters, and what several ranks hold alike."""
    words = _names_of_pieces(rule)
    if rule.layout is not None and tp > 1:
        shared = [piece for piece in rule.layout.pieces if piece.copies(tp) > 1]
        if shared:
            names = " ".join(piece.name or "heads" for piece in shared)
            words += f"; {names} on {shared[0].copies(tp)} ranks each"
    return words


def _names_of_pieces(rule: LinearRule) -> str:
    if rule.fused is None:
        return ""
    return f" ({' '.join(piece.name for piece in rule.fused.pieces)})"


def notes_of_whole(plan: ModelPlan) -> tuple[str, ...]:
    """A line for each kind of block that is whole on every tp rank: why, and what that costs."""
    whole = {region.name: region for region in plan.regions if not region.is_split}
    notes = []
    for name, layers in folded_names(whole, kind=lambda name: whole[name].reason).items():
        number, starts = 0, tuple(f"{layer}." for layer in layers)
        for rule in plan.linears.values():
            if rule.name.startswith(starts):
                number += rule.in_features * rule.out_features
        if number:  # of short convolutions and the like there is nothing to say
            unit = "layers"
            if len(layers) == 1:
                unit = "layer"
            notes.append(
                f"{name} ({len(layers)} {unit}) is whole on every tp rank, as "
                f"{whole[layers[0]].reason or 'no split of it is known'}: each holds and multiplies by all {number:,} "
                f"weights of its linears, {plan.topology.tp} times the share that it would have"
            )
    return tuple(notes)


def gradient_table(plan: ModelPlan) -> Table:
    """One row per kind of factor: the axes over which its gradient is a partial sum."""
    table = Table("base", "factor", "split on dim", "gradient summed over", "mean over", title="gradient axes")
    rules = general_rules(sp=plan.topology.sp)
    if plan.experts:
        rules += expert_rules()
    for words, side, rule in rules:
        dim = ", ".join(f"{cut.dim} ({cut.axis})" for cut in rule.cuts) or "-"
        name = "bias" if side is Side.AFTER else f"lora_{side}"
        table.add_row(words, name, dim, ", ".join(sorted(rule.grad_axes)), ", ".join(rule.mean_axes))
    return table


def folded_names(names: Iterable[str], *, kind: Callable[[str], Any] = lambda _: None) -> dict[str, list[str]]:
    """Name with layer numbers as `*` -> names. A name whose `kind` differs from the first one's is not folded."""
    folded: dict[str, list[str]] = {}
    for name in names:
        # Layers differ in some families, as full attention in every fourth: such a name stands for itself.
        short = kind_of(name)
        if short in folded and kind(folded[short][0]) != kind(name):
            short = name
        folded.setdefault(short, []).append(name)
    return folded


def general_rules(*, sp: bool) -> list[tuple[str, Side, FactorRule]]:
    """(kind of base, factor, its rule) for every kind of linear: the table of `plan.grads`."""
    bases = {
        "column": (Split.COLUMN, Domain.PARTIAL),
        "row": (Split.ROW, Domain.RESIDUAL),
        "whole, in a split region": (Split.WHOLE, Domain.PARTIAL),
        "whole, in a whole region": (Split.WHOLE, Domain.EQUAL),
        "whole, between regions": (Split.WHOLE, Domain.RESIDUAL),
    }
    found = []
    for words, (split, domain) in bases.items():
        rule = LinearRule("", split, 1, 1, True, Layout.plain(1), domain)
        found += [(words, side, factor_rule(rule, side, sp=sp)) for side in Side]
    return found


def expert_rules() -> list[tuple[str, Side, FactorRule]]:
    """The same as `general_rules` for the projections of experts."""
    found = []
    for is_shared, more in ((False, ""), (True, ", one adapter for all")):
        for words, split in (("first (gate, up)", Split.COLUMN), ("second (down)", Split.ROW)):
            rule = ExpertRule("", split, 1, 1, False, Layout.plain(1))
            sides, base = (Side.INPUT, Side.OUTPUT), f"experts, {words}{more}"
            found += [(base, side, expert_rule(rule, side, is_shared=is_shared)) for side in sides]
    return found

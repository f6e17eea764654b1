"""A proof on the terminal: one table of phases, one of mutations, and in words what went wrong."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from meshlora.oracle.diagnose import Divergence
from meshlora.oracle.judge import PHASES, Phase
from meshlora.verify.mutations import MUTATIONS
from meshlora.verify.proof import Outcome
from meshlora.verify.request import Proof


def show(console: Console, proof: Proof, outcomes: Sequence[Outcome]) -> None:
    """Everything that a person wants to see of a finished proof."""
    plain = [outcome for outcome in outcomes if outcome.mutation is None]
    console.print(_phase_table(proof, plain))
    for outcome in plain:
        if not outcome.passed:
            _explain(console, outcome)
    mutated = [outcome for outcome in outcomes if outcome.mutation is not None]
    if proof.request.mutations:
        _kills(console, proof, mutated)


def _phase_table(proof: Proof, outcomes: Sequence[Outcome]) -> Table:
    """Phases down, topologies across: the worst tensor's relative error."""
    case = proof.case
    what = f"twin of {case.model_type}" if not case.model else case.model
    table = Table(
        "phase",
        Column("tensors", justify="right"),
        *(Column(str(outcome.topology), justify="right") for outcome in outcomes),
        Column("limit", justify="right"),
        title=f"{what}, {case.dtype}, {case.steps} steps: worst relative error against one process",
    )
    for name in PHASES:
        phases = [next((p for p in outcome.phases if p.name == name), None) for outcome in outcomes]
        limits = [p.worst.limit for p in phases if p is not None and p.worst is not None]
        counts = [len(p.results) for p in phases if p is not None]
        table.add_row(
            PHASES[name],
            str(max(counts, default=0)),
            *(_cell(phase) for phase in phases),
            f"{max(limits):.0e}" if limits and max(limits) > 0 else "exact",
        )
    table.add_section()
    table.add_row("", "", *(_verdict(outcome) for outcome in outcomes), "")
    return table


def _cell(phase: Phase | None) -> Text:
    if phase is None or phase.worst is None:
        return Text("-", style="dim")
    if phase.passed:
        return Text(f"{phase.worst.error:.1e}" if phase.worst.error else "0", style="green")
    return Text(f"{phase.worst.error:.1e}", style="bold red")


def _verdict(outcome: Outcome) -> Text:
    return Text("proved", style="bold green") if outcome.passed else Text("DIFFERS", style="bold red")


def _explain(console: Console, outcome: Outcome) -> None:
    console.print(f"\n[bold red]{outcome.topology} is not the same as one process[/]", highlight=False)
    if outcome.error:
        console.print(outcome.error, highlight=False, markup=False)
    if outcome.divergence is not None:
        for line in divergence_lines(outcome.divergence):
            console.print(f"  {line}", highlight=False, markup=False, soft_wrap=True)


def divergence_lines(found: Divergence) -> list[str]:
    """Place, size and likely cause, a line each."""
    ratio = f", {found.ratio:.4g} times the reference" if found.ratio is not None else ""
    ranks = f" on rank{'s' if len(found.ranks) > 1 else ''} {', '.join(map(str, found.ranks))}" if found.ranks else ""
    others = f" (and {found.num_failed - 1} more)" if found.num_failed > 1 else ""
    return [
        f"first difference: {found.phase} of {found.name}{ranks}{others}",
        f"relative error:   {found.relative:.1e}{ratio}",
        f"likely cause:     {found.cause}",
    ]


def _kills(console: Console, proof: Proof, outcomes: Sequence[Outcome]) -> None:
    """The kill table of every topology, and what could not show on it."""
    for topology in proof.topologies:
        own = [outcome for outcome in outcomes if outcome.topology == topology]
        table = Table(
            "mutation", "the invariant it breaks", "caught by", "where", title=f"deliberate faults on {topology}"
        )
        for outcome in own:
            assert outcome.mutation is not None
            found = outcome.divergence
            table.add_row(
                outcome.mutation,
                MUTATIONS[outcome.mutation].invariant,
                Text("SURVIVED", style="bold red") if outcome.passed else Text(found.phase if found else "error"),
                found.name if found else outcome.error.splitlines()[-1] if outcome.error else "",
            )
        console.print(table)
        killed = sum(not outcome.passed for outcome in own)
        console.print(f"{killed} of {len(own)} killed: {killed / max(len(own), 1):.0%}", highlight=False)
        rest = [name for name in proof.request.mutations if name not in {outcome.mutation for outcome in own}]
        for name in rest:
            lacks = ", ".join(sorted(MUTATIONS[name].needs - proof.features_on(topology)))
            console.print(f"  cannot show here: {name} (needs {lacks})", style="dim", highlight=False)

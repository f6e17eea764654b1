"""A proof on the terminal: a table of phases, one of mutations, and an explanation of failures."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from meshlora.verify.faults.registry import find
from meshlora.verify.proof import Outcome
from meshlora.verify.request import Proof
from meshlora_ground.console import Console
from meshlora_judge.diagnosis.diagnose import Divergence
from meshlora_judge.judge import PHASES
from meshlora_judge.results import Phase

# Width of a topology in the table of phases: a number such as 1.2e-15 and its border.
_NUMBER = 10
# Width of its other columns, folded and unfolded.
_NARROW, _WIDE = 46, 62
# Width of the borders of the kill table.
_KILL_BORDER = 4
_SURVIVED = "SURVIVED"


def show(console: Console, proof: Proof, outcomes: Sequence[Outcome]) -> None:
    """Print a finished proof."""
    plain = [outcome for outcome in outcomes if outcome.mutation is None]
    _phases(console, proof, plain)
    for outcome in plain:
        if not outcome.passed:
            _explain(console, outcome)
    if proof.request.mutations:
        _kills(console, proof, [outcome for outcome in outcomes if outcome.mutation is not None])


def _phases(console: Console, proof: Proof, outcomes: Sequence[Outcome]) -> None:
    """The table of phases, split into several if the terminal is narrow."""
    case = proof.case
    what = case.model or f"twin of {case.model_type}"
    console.say(f"{what}, {case.dtype}, {case.steps} steps: worst relative error against one process")
    widths = [max(_NUMBER, len(str(outcome.topology)) + 3) for outcome in outcomes]
    if _WIDE + sum(widths) <= console.width:
        console.print(_phase_table(outcomes))
        return
    number = max(1, (console.width - _NARROW) // _NUMBER)
    for start in range(0, len(outcomes), number):
        console.print(_phase_table(outcomes[start : start + number], is_narrow=True))


def _phase_table(outcomes: Sequence[Outcome], *, is_narrow: bool = False) -> Table:
    """Phases down, topologies across: the worst tensor's relative error."""
    separator = ",\n" if is_narrow else ","
    table = Table(Column("phase", overflow="fold"), Column("tensors", justify="right", no_wrap=True))
    for outcome in outcomes:
        table.add_column(str(outcome.topology).replace(",", separator), justify="right", no_wrap=True)
    table.add_column("limit", justify="right", no_wrap=True)
    by_name = [{phase.name: phase for phase in outcome.phases} for outcome in outcomes]
    for name in PHASES:
        phases = [found.get(name) for found in by_name]
        # Runs that all broke off have compared nothing: each phase has a line then.
        if any(phases) or not any(by_name):
            table.add_row(PHASES[name], *_row(phases))
    table.add_section()
    table.add_row("", "", *map(_verdict, outcomes), "")
    return table


def _row(phases: Sequence[Phase | None]) -> list[str | Text]:
    """Number of tensors, a cell for each topology, limit."""
    count, limit = 0, 0.0
    for phase in phases:
        if phase is not None:
            count = max(count, len(phase.results))
        if phase is not None and phase.worst is not None:
            limit = max(limit, phase.worst.limit)
    return [str(count), *map(_cell, phases), f"{limit:.0e}" if limit > 0 else "exact"]


def _cell(phase: Phase | None) -> Text:
    if phase is None or phase.worst is None:
        return Text("-", style="dim")
    error = f"{phase.worst.error:.1e}"
    if not phase.passed:
        return Text(error, style="bold red")
    return Text(error if phase.worst.error else "0", style="green")  # equal to the bit


def _verdict(outcome: Outcome) -> Text:
    if outcome.passed:
        return Text("proved", style="bold green")
    return Text("DIFFERS" if outcome.phases else "broke off", style="bold red")


def _explain(console: Console, outcome: Outcome) -> None:
    what = "is not the same as one process" if outcome.phases else "broke off"
    console.say(f"\n{outcome.topology} {what}", style="bold red")
    if outcome.error:
        console.say(outcome.error)
    if outcome.divergence is not None:
        for line in divergence_lines(outcome.divergence):
            console.say(f"  {line}")


def divergence_lines(found: Divergence) -> list[str]:
    """Location, size and likely cause, a line each."""
    where, error = f"{found.phase} of {found.name}", f"{found.relative:.1e}"
    if found.ranks:
        where += " on ranks " if len(found.ranks) > 1 else " on rank "
        where += ", ".join(map(str, found.ranks))
    if found.num_failed > 1:
        where += f" (and {found.num_failed - 1} more)"
    if found.ratio is not None:
        error += f", {found.ratio:.4g} times the reference"
    return [f"first difference: {where}", f"relative error:   {error}", f"likely cause:     {found.cause}"]


def _kills(console: Console, proof: Proof, outcomes: Sequence[Outcome]) -> None:
    """The kill table of every topology, and the faults that cannot show on it."""
    for topology in proof.topologies:
        own = [outcome for outcome in outcomes if outcome.topology == topology]
        console.say(f"\ndeliberate faults on {topology}")
        if own:
            console.print(_kill_table(own, console.width))
            killed = sum(not outcome.passed for outcome in own)
            console.say(f"{killed} of {len(own)} killed: {killed / len(own):.0%}")
        injected, has = {outcome.mutation for outcome in own}, proof.features_on(topology)
        for name in proof.request.mutations:
            if name not in injected:
                lacks = ", ".join(sorted(find(name).needs - has))
                console.say(f"  cannot show here: {name} (needs {lacks})", style="dim")


def _kill_table(outcomes: Sequence[Outcome], width: int) -> Table:
    """Two lines per mutation, to fit 80 columns: its name and the phase that caught it; the invariant and tensor."""
    rows = list(map(_caught, outcomes))
    room = width - _KILL_BORDER
    names = left = right = 0
    for (name, invariant), (phase, where) in rows:
        names = max(names, len(name))
        left = max(left, len(name) + 1, len(invariant) + 1)
        right = max(right, len(phase) + 1, len(where) + 1)
    # A name is not folded unless it takes more than 11 parts in 20 of the width.
    right = min(right, room - min(names, room * 11 // 20))
    left = min(left, room - right)
    table = Table(
        Column("mutation, and the invariant it breaks", width=left),
        Column("caught by, first at", width=right),
        box=SIMPLE_HEAD,
        pad_edge=False,
        show_edge=False,
    )
    for (name, invariant), (phase, where) in rows:
        style = "bold red" if phase == _SURVIVED else ""
        table.add_row(_two_lines(Text(name, style="bold"), invariant), _two_lines(Text(phase, style=style), where))
    return table


def _caught(outcome: Outcome) -> tuple[tuple[str, str], tuple[str, str]]:
    """((mutation, invariant), (phase, name))."""
    assert outcome.mutation is not None
    phase, where = "error", ""
    if outcome.divergence is not None:
        phase, where = outcome.divergence.phase, outcome.divergence.name
    elif outcome.error:
        where = outcome.error.splitlines()[-1]
    if outcome.passed:
        phase = _SURVIVED
    return (outcome.mutation, find(outcome.mutation).invariant), (phase, where)


def _two_lines(first: Text, second: str) -> Group:
    first.overflow = "fold"
    return Group(first, Padding(Text(second, style="dim", overflow="fold"), (0, 0, 0, 1)))

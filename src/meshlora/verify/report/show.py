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
    mutated = [outcome for outcome in outcomes if outcome.mutation is not None]
    if proof.request.mutations:
        _kills(console, proof, mutated)


def _phases(console: Console, proof: Proof, outcomes: Sequence[Outcome]) -> None:
    """The table of phases, split into several if the terminal is narrow."""
    case = proof.case
    what = f"twin of {case.model_type}" if not case.model else case.model
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
    names = [str(outcome.topology) for outcome in outcomes]
    table = Table(
        Column("phase", overflow="fold"),
        Column("tensors", justify="right", no_wrap=True),
        *(Column(name.replace(",", ",\n") if is_narrow else name, justify="right", no_wrap=True) for name in names),
        Column("limit", justify="right", no_wrap=True),
    )
    compared = {phase.name for outcome in outcomes for phase in outcome.phases} or set(PHASES)
    for name in (name for name in PHASES if name in compared):
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
    ratio = f", {found.ratio:.4g} times the reference" if found.ratio is not None else ""
    ranks = f" on rank{'s' if len(found.ranks) > 1 else ''} {', '.join(map(str, found.ranks))}" if found.ranks else ""
    others = f" (and {found.num_failed - 1} more)" if found.num_failed > 1 else ""
    return [
        f"first difference: {found.phase} of {found.name}{ranks}{others}",
        f"relative error:   {found.relative:.1e}{ratio}",
        f"likely cause:     {found.cause}",
    ]


def _kills(console: Console, proof: Proof, outcomes: Sequence[Outcome]) -> None:
    """The kill table of every topology, and the faults that cannot show on it."""
    for topology in proof.topologies:
        own = [outcome for outcome in outcomes if outcome.topology == topology]
        console.say(f"\ndeliberate faults on {topology}")
        if own:
            console.print(_kill_table(own, console.width))
            killed = sum(not outcome.passed for outcome in own)
            console.say(f"{killed} of {len(own)} killed: {killed / len(own):.0%}")
        rest = [name for name in proof.request.mutations if name not in {outcome.mutation for outcome in own}]
        for name in rest:
            lacks = ", ".join(sorted(find(name).needs - proof.features_on(topology)))
            console.say(f"  cannot show here: {name} (needs {lacks})", style="dim")


def _kill_table(outcomes: Sequence[Outcome], width: int) -> Table:
    """Two lines per mutation, to fit 80 columns: its name and the phase that caught it; the invariant and tensor."""
    rows = [_caught(outcome) for outcome in outcomes]
    room = width - _KILL_BORDER
    names = max(len(left[0]) for left, _ in rows)
    right = min(max(len(text) + 1 for _, texts in rows for text in texts), room - min(names, room * 11 // 20))
    left = min(max(len(text) + 1 for texts, _ in rows for text in texts), room - right)
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
    found = outcome.divergence
    phase = _SURVIVED if outcome.passed else found.phase if found else "error"
    where = found.name if found else outcome.error.splitlines()[-1] if outcome.error else ""
    return (outcome.mutation, find(outcome.mutation).invariant), (phase, where)


def _two_lines(first: Text, second: str) -> Group:
    first.overflow = "fold"
    return Group(first, Padding(Text(second, style="dim", overflow="fold"), (0, 0, 0, 1)))

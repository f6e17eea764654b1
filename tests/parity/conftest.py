"""Proofs share processes; what they measured is printed as a table: worst relative error, family x topology."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from meshlora.verify.proof import Outcome
from tests.conftest import Prove

_TABLE: dict[tuple[str, str], float] = {}
_BEFORE_ADAM = ("forward", "logits", "loss", "backward", "gradients", "grad_norm")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not _TABLE:
        return
    topologies = sorted({topology for _, topology in _TABLE}, key=lambda t: (len(t), t))
    terminalreporter.section("worst relative error against one-process transformers + peft, float64")
    terminalreporter.write_line(f"{'family':14}" + "".join(f"{t:>17}" for t in topologies))
    for family in sorted({family for family, _ in _TABLE}):
        cells = (f"{_TABLE[family, t]:17.1e}" if (family, t) in _TABLE else f"{'-':>17}" for t in topologies)
        terminalreporter.write_line(f"{family:14}" + "".join(cells))


@pytest.fixture(scope="session")
def prove_and_note(prove: Prove) -> Callable[..., list[Outcome]]:
    """`prove`, with the worst error of every run kept for the table."""

    def run(**request: object) -> list[Outcome]:
        outcomes = prove(**request)
        for outcome in outcomes:
            errors = [r.error for phase in outcome.phases if phase.name in _BEFORE_ADAM for r in phase.results]
            _TABLE[str(request["family"]), str(outcome.topology)] = max(errors)
        return outcomes

    return run

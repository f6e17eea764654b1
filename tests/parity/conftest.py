"""Collects what the parity tests measured and prints it as a table: worst relative error, family x topology."""

from __future__ import annotations

import pytest

_TABLE: dict[tuple[str, str], float] = {}


@pytest.fixture(scope="session")
def parity_table() -> dict[tuple[str, str], float]:
    """(family, topology) -> worst relative error of logits, loss, gradients and gradient norm in lifted float64."""
    return _TABLE


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not _TABLE:
        return
    topologies = sorted({topology for _, topology in _TABLE}, key=lambda t: (len(t), t))
    terminalreporter.section("worst relative error against one-process transformers + peft, float64")
    terminalreporter.write_line(f"{'family':14}" + "".join(f"{t:>17}" for t in topologies))
    for family in sorted({family for family, _ in _TABLE}):
        cells = (f"{_TABLE[family, t]:17.1e}" if (family, t) in _TABLE else f"{'-':>17}" for t in topologies)
        terminalreporter.write_line(f"{family:14}" + "".join(cells))

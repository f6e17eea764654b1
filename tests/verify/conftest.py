"""Fixtures of the proofs' tests: commands inside this process prove on the session's processes."""

from __future__ import annotations

import pytest

from meshlora.verify import command, preflight
from meshlora.verify.proof import Processes


@pytest.fixture
def shared_processes(monkeypatch: pytest.MonkeyPatch, processes: Processes) -> None:
    """The session's processes instead of new ones, for `meshlora verify` and for the preflight."""

    class Shared:
        def __enter__(self) -> Processes:
            return processes

        def __exit__(self, *_: object) -> None:
            pass

    for module in (command, preflight):
        monkeypatch.setattr(module, "Processes", Shared)

"""What deliberate faults replace is there: a fault whose place was renamed says so in a second, and not on ranks."""

from __future__ import annotations

from meshlora.verify.faults.registry import MUTATIONS
from tests.for_each import for_each


@for_each("name", MUTATIONS)
def test_what_a_fault_replaces_is_there(name: str) -> None:
    gone = [(owner, attribute) for owner, attribute, _ in MUTATIONS[name].changes if not hasattr(owner, attribute)]
    assert not gone, f"{name} replaces what there is no more: {gone}"
    assert MUTATIONS[name].changes
    assert MUTATIONS[name].invariant

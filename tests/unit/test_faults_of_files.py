"""Merging, exporting, replaying and several adapters: each fault in them fails the test that is named beside it."""

from __future__ import annotations

import re

import pytest

from tests.changed import Fault, is_there, run_under
from tests.faults_of_files import OF_EXPORTING, OF_MERGING, OF_MERGING_EXPERTS
from tests.faults_of_runs import OF_DATA_AND_STATE, OF_GENERATION, OF_ROUTING, OF_SEVERAL, OF_SUMS
from tests.for_each import for_each

FAULTS: dict[str, Fault] = OF_MERGING | OF_MERGING_EXPERTS | OF_EXPORTING | OF_ROUTING | OF_SEVERAL | OF_DATA_AND_STATE
FAULTS |= OF_GENERATION | OF_SUMS
TIMEOUT_S = 500.0  # of a copy of the package with its tests, for which ten seconds are usual


@for_each("name", FAULTS)
def test_fault_can_be_put_in_and_its_test_is_there(name: str, pytestconfig: pytest.Config) -> None:
    fault = FAULTS[name]
    for file, text in fault.sources().items():
        compile(text, file, "exec")
    assert fault.new != fault.old
    assert is_there(fault.test, pytestconfig), f"there is no test {fault.test}"


@pytest.mark.proof
@pytest.mark.timeout(1800)
def test_named_tests_pass_without_a_fault() -> None:
    done = run_under({}, sorted({fault.test for fault in FAULTS.values()}))
    assert done.returncode == 0, done.stdout


@pytest.mark.proof
@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_caught(name: str) -> None:
    done = run_under(FAULTS[name].sources(), [FAULTS[name].test], timeout_s=TIMEOUT_S)
    assert done.returncode == 1, done.stdout  # of 2 to 5 no test has failed
    assert re.search(r"\b\d+ failed", done.stdout), done.stdout

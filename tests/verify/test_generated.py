"""Faults made from syntax trees: put in, taken out again, caught; those known to survive are faults that there are."""

from __future__ import annotations

from collections import Counter

import pytest

from meshlora.config import TrainConfig
from meshlora.errors import UserError
from meshlora.parallel import direct
from meshlora.train import schedule
from meshlora.verify.generated import Generated, NotPutInError, faults_of, generated
from tests.conftest import Prove
from tests.scripts import load_script

KINDS = ("equivalent", "speed or words", "test: ", "open")


def _fault(file: str, before: str, after: str) -> Generated:
    (found,) = (fault for fault in faults_of(file) if (fault.before, fault.after) == (before, after))
    return found


def test_a_fault_is_in_while_its_block_runs_and_not_after_it() -> None:
    options, code = TrainConfig(output="runs", steps=9, lr=1e-3, warmup_steps=4), schedule.learning_rate.__code__
    with _fault("train/schedule.py", "step + 1", "step - 1").apply():
        assert schedule.learning_rate(1, options=options, steps=9) == 0.0
    assert schedule.learning_rate(1, options=options, steps=9) == 5e-4
    assert schedule.learning_rate.__code__ is code


def test_a_function_that_only_a_registry_holds_gets_the_fault_too() -> None:
    """An operator of torch.library is not found by the names of its module."""
    assert direct.all_reduce.__code__.co_name == "call"
    with next(
        fault for fault in faults_of("parallel/direct.py") if fault.before == "_add_up(parts, own, axis)"
    ).apply():
        pass


def test_what_cannot_be_put_in_has_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshlora.verify.generated._functions", lambda file: [])
    with pytest.raises(NotPutInError, match="no function has this line"), faults_of("train/schedule.py")[0].apply():
        pass


def test_a_change_that_there_is_not_is_refused() -> None:
    for name in ("train/schedule.py:1:0-1:constant", "nowhere.py:1:0-1:constant"):
        with pytest.raises(UserError, match="no such change can be made"):
            generated(name)


def test_a_silent_one_is_caught_on_ranks(prove: Prove) -> None:
    scale = "1 {} (total[0].clamp(min=1).double() * mesh.over(mean_axes).size)"
    fault = _fault("train/gradsync.py", scale.format("/"), scale.format("*"))
    plain, with_fault = prove(family="llama", topologies=("tp=2,sp",), mutations=(fault.name,), steps=1)
    assert plain.passed
    assert not with_fault.passed


def test_survivors_that_are_written_down_are_changes_that_can_be_made() -> None:
    script = load_script("generate_faults")
    rows = script.known_survivors()
    keys = {script.key(fault) for file in {key.partition(" | ")[0] for key in rows} for fault in faults_of(file)}
    assert rows.keys() <= keys
    assert not [kind for kind in rows.values() if not kind.startswith(KINDS)]


def test_names_are_of_one_change_each() -> None:
    names = Counter(fault.name for file in load_script("generate_faults").files() for fault in faults_of(file))
    assert len(names) > 10_000
    assert set(names.values()) == {1}

"""No option of a run file can be ignored unseen: each has a test that fails where the product ignores it."""

from __future__ import annotations

import re
import sys
import types

import pytest

from tests.changed import is_there, run_under
from tests.ignored_options import CAUGHT_BY, ignoring, options

TIMEOUT_S = 500.0  # of a copy of the package with its tests, for which a second is usual


def test_every_option_has_a_test_that_shows_it() -> None:
    without, gone = set(options()) - CAUGHT_BY.keys(), CAUGHT_BY.keys() - set(options())
    way_out = "in CAUGHT_BY of tests/ignored_options.py name the test that fails where the product ignores it"
    assert not without, f"nothing shows that the product heeds {', '.join(sorted(without))}: {way_out}"
    assert not gone, f"there is no option {', '.join(sorted(gone))}: take it out of CAUGHT_BY"


def test_every_named_test_is_there(pytestconfig: pytest.Config) -> None:
    for option, test in CAUGHT_BY.items():
        assert is_there(test, pytestconfig), f"{option}: there is no test {test}"


def test_what_is_given_is_checked_and_then_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    made = types.ModuleType("config_that_ignores")
    monkeypatch.setitem(sys.modules, made.__name__, made)
    exec(ignoring("train.beta1")["run/config/run_file.py"], vars(made))
    options = made.TrainConfig("out", steps=1, beta1=0.5, beta2=0.5)
    assert (options.beta1, options.beta2) == (0.9, 0.5)
    with pytest.raises(Exception, match=r"train\.beta1=2: it must be in"):
        made.TrainConfig("out", steps=1, beta1=2)


@pytest.mark.proof
@pytest.mark.timeout(1800)
def test_named_tests_pass_where_nothing_is_ignored() -> None:
    done = run_under({}, sorted(set(CAUGHT_BY.values())))
    assert done.returncode == 0, done.stdout


@pytest.mark.proof
@pytest.mark.parametrize("option", CAUGHT_BY)
def test_option_that_is_ignored_is_caught(option: str) -> None:
    done = run_under(ignoring(option), [CAUGHT_BY[option]], timeout_s=TIMEOUT_S)
    assert done.returncode == 1, done.stdout  # of 2 to 5 no test has failed
    assert re.search(r"\b\d+ failed", done.stdout), done.stdout

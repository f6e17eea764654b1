"""Ranks that see different things end with one line, and one that sees late what rank 0 sees goes on."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
from torch.distributed import HashStore

from meshlora.run import agreement
from meshlora_ground.errors import UserError

Look = Callable[[], str]


def _words(found: str) -> dict[str, str]:
    return {"in runs/mine": found, "as seed": "3"}


def _agree(*looks: Look, own: Sequence[Mapping[str, str]] = ()) -> list[str | UserError]:
    """What each rank finds, or is told."""
    store = HashStore()
    own = own or [{}] * len(looks)

    def rank(number: int) -> str | UserError:
        try:
            if number == 0:
                return str(agreement._agreed_on_rank_0(looks[0], _words, own[0], store, len(looks)))
            return str(agreement._agreed_elsewhere(looks[number], _words, own[number], store, number))
        except UserError as error:
            return error

    with ThreadPoolExecutor(len(looks)) as threads:
        return list(threads.map(rank, range(len(looks))))


def _fails(words: str) -> Look:
    def look() -> str:
        raise UserError(words, "it is wrong")

    return look


@pytest.fixture(autouse=True)
def _short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "_LAG_S", 0.3)
    monkeypatch.setattr(agreement, "_AGAIN_S", 0.05)
    monkeypatch.setattr(agreement.socket, "gethostname", lambda: "node2")


def test_ranks_that_see_the_same_go_on() -> None:
    assert _agree(*[lambda: "step 8"] * 3) == ["step 8"] * 3


def test_rank_that_sees_another_step_ends_all_with_one_line() -> None:
    """Each chose its checkpoint alone: mixed steps were trained without a word."""
    found = _agree(lambda: "step 8", lambda: "step 4", lambda: "step 8")
    assert {str(one) for one in found} == {
        "rank 1 (node2) sees step 4 in runs/mine, rank 0 step 8: all ranks must begin the same run; is the folder "
        "shared by all nodes, and the file the same on each?"
    }


def test_file_system_that_lags_gets_some_seconds() -> None:
    seen = iter(["no checkpoint", "step 4", "step 8"])
    assert _agree(lambda: "step 8", lambda: next(seen)) == ["step 8", "step 8"]


def test_rank_that_finds_a_mistake_where_rank_0_finds_none_is_named() -> None:
    found = _agree(lambda: "step 8", _fails("train.jsonl"))
    assert {str(one) for one in found} == {"rank 1 (node2): train.jsonl: it is wrong; rank 0 sees it otherwise"}


@pytest.mark.parametrize("look", [_fails("train.lr"), lambda: "step 4"])
def test_rank_0_ends_when_the_others_know_why(look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under srun and mpirun the store ends with it: the others said that they had lost a connection."""
    monkeypatch.setattr(agreement, "_LAG_S", 0.0)
    store, seen = HashStore(), []
    slow = mock.Mock(wraps=store)
    slow.wait.side_effect = lambda *given: (store.wait(*given), time.sleep(0.3))
    slow.get.side_effect = lambda key: (seen.append(key), store.get(key))[1]
    with ThreadPoolExecutor(2) as threads:
        other = threads.submit(agreement._agreed_elsewhere, lambda: "step 8", _words, {}, slow, 1)
        with pytest.raises(UserError) as own:
            agreement._agreed_on_rank_0(look, _words, {}, store, 2)
        last = agreement._DECISION if "train.lr" in str(own.value) else agreement._VERDICT
        assert last in seen
        assert str(other.exception()) == str(own.value)


def test_mistake_of_rank_0_is_that_of_all_and_nobody_waits() -> None:
    found = _agree(_fails("train.lr"), lambda: "step 8", _fails("something else"))
    assert [str(one) for one in found] == ["train.lr: it is wrong"] * 3


def test_other_versions_end_all_at_once_and_before_what_they_cause() -> None:
    own = [{"as version of torch": version} for version in ("2.13.0", "2.12.0")]
    began = time.monotonic()
    assert {str(one) for one in _agree(lambda: "step 8", _fails("model_type"), own=own)} == {
        "rank 1 (node2) sees 2.12.0 as version of torch, rank 0 2.13.0: all ranks must begin the same run; install the "
        "same on all nodes"
    }
    assert time.monotonic() - began < agreement._LAG_S  # no file system makes it the same

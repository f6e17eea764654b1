"""Agreement of all ranks of a job on the run and its first step, each having read the files itself.

Owns: comparing every rank's view of the files with rank 0's, through the job's store, before any group is open. Does
not own: reading the files (`run.prepare`).

Rank 0 decides: the others find the same, or all end. A shared file system may show changes to another node some seconds
later, so a rank with a different view retries for a while.
"""

from __future__ import annotations

import base64
import json
import socket
import time
import zlib
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, TypeVar

from meshlora.comm.groups import meet
from meshlora.processes.launchers import launcher_place
from meshlora.reading.clock import today
from meshlora_ground.errors import MeshloraError, UserError, at_once, each_of

# How long a file system may lag, and how long ranks wait for each other to read, possibly all of the data.
_LAG_S = 30.0
_PATIENCE_S = 1800.0
_LOOK_S = 0.02
_AGAIN_S = 1.0
# How long rank 0, which may be the store, stays for the others to hear why all end.
_HEARD_S = 10.0
_DECISION, _DIFFERS, _DONE, _VERDICT, _HEARD, _DAY = (
    f"agreement/{name}" for name in ("decision", "differs", "done", "verdict", "heard", "day")
)

_TEXT = "agreement/text"
_PART_BYTES = 2**22  # a store takes 8 MiB at once

# Begins the name of a fact that is a version.
VERSION = "as version of "

_Found = TypeVar("_Found")
_Look = Callable[[], _Found]
_WordsOf = Callable[[_Found], Mapping[str, str]]


def agreed(look: _Look[_Found], words_of: _WordsOf[_Found], *, own: Mapping[str, str]) -> _Found:
    """The result of `look()`, once every rank has found the same. Every rank calls this, before any group opens.

    words_of: the facts of it that all ranks must share, as parts of a sentence: `{"in runs/mine": "step 8"}`.
    own: facts of this process that they must share, which no retry changes: `{"as version of torch": "2.13.0"}`.

    Raises:
        UserError: rank 0's own error, or the first difference; the same on all ranks.
    """
    place = launcher_place()
    store = meet() if place is not None and place.world > 1 else None
    if place is None or store is None:
        return look()
    if place.rank == 0:
        return _agreed_on_rank_0(look, words_of, own, store, place.world)
    return _agreed_elsewhere(look, words_of, own, store, place.rank)


def one_day() -> str:
    """Today in UTC, as rank 0 has it: the others may ask after midnight. Every rank of a job calls this, once."""
    place = launcher_place()
    store = meet() if place is not None and place.world > 1 else None
    if place is None or store is None:
        return today()
    if place.rank == 0:
        store.set(_DAY, today())  # midnight may pass between two ranks' look at the clock
    store.wait([_DAY], timedelta(seconds=_PATIENCE_S))
    return str(store.get(_DAY).decode())


def text_of_rank_0(key: str, make: Callable[[], str]) -> str:
    """The text that `make()` gives on rank 0, on every rank of a job; it runs there alone, and once for a `key`.

    Called within a `look` of `agreed`, or by every rank.

    Raises:
        UserError: as `make` on rank 0; the same on all ranks.
    """
    place = launcher_place()
    store = meet() if place is not None and place.world > 1 else None
    if place is None or store is None:
        return make()
    head = f"{_TEXT}/{key}"
    if place.rank == 0 and not store.check([head]):
        try:
            text = make()
        except UserError as error:
            store.set(head, json.dumps({"mistake": _packed(error)}))
            raise
        packed = base64.b64encode(zlib.compress(text.encode(), 1)).decode()
        starts = range(0, len(packed), _PART_BYTES)
        for number, start in enumerate(starts):
            store.set(f"{head}/{number}", packed[start : start + _PART_BYTES])
        store.set(head, json.dumps({"parts": len(starts)}))
    said = _said_by_rank_0(store, head)
    if "mistake" in said:
        raise _unpacked(said["mistake"])
    parts = [store.get(f"{head}/{number}") for number in range(said["parts"])]
    return zlib.decompress(base64.b64decode(b"".join(parts))).decode()


def _said_by_rank_0(store: Any, head: str) -> dict[str, Any]:
    """What stands under `head` once it does, or the mistake at which rank 0 has ended before."""
    deadline = time.monotonic() + _PATIENCE_S
    while not store.check([head]):
        if store.check([_DECISION]) and "mistake" in (decision := json.loads(store.get(_DECISION))):
            return {"mistake": decision["mistake"]}
        if time.monotonic() > deadline:
            raise MeshloraError(f"rank 0 did not read the data in {_PATIENCE_S:g} s")
        time.sleep(_LOOK_S)
    found: dict[str, Any] = json.loads(store.get(head))
    return found


def _agreed_on_rank_0(
    look: _Look[_Found], words_of: _WordsOf[_Found], own: Mapping[str, str], store: Any, world: int
) -> Any:
    """On rank 0: its result, after all others have compared theirs."""
    try:
        found = look()
    except UserError as error:
        store.set(_DECISION, json.dumps({"mistake": _packed(error)}))
        _wait_until_heard(store, world)
        raise
    store.set(_DECISION, json.dumps({"own": dict(own), "words": dict(words_of(found))}))
    deadline = time.monotonic() + _PATIENCE_S
    while store.add(_DONE, 0) < world - 1:
        if time.monotonic() > deadline:
            raise MeshloraError(f"{world - 1 - store.add(_DONE, 0)} ranks did not read the run in {_PATIENCE_S:g} s")
        time.sleep(_LOOK_S)
    first = store.get(_DIFFERS).decode() if store.check([_DIFFERS]) else ""
    store.set(_VERDICT, first)
    if first:
        _wait_until_heard(store, world)
    _raise(first)
    return found


def _agreed_elsewhere(
    look: _Look[_Found], words_of: _WordsOf[_Found], own: Mapping[str, str], store: Any, rank: int
) -> Any:
    """On any other rank: its result, once it matches that of rank 0."""
    found, error = _tried(look)
    store.wait([_DECISION], timedelta(seconds=_PATIENCE_S))
    decision = json.loads(store.get(_DECISION))
    if "mistake" in decision:
        store.add(_HEARD, 1)
        raise _unpacked(decision["mistake"])
    if (mistake := _unlike(own, decision["own"], rank)) is None:
        deadline = time.monotonic() + _LAG_S
        while (mistake := _difference(found, error, words_of, decision["words"], rank)) and time.monotonic() < deadline:
            time.sleep(_AGAIN_S)
            found, error = _tried(look)
    if mistake is not None:
        store.set(_DIFFERS, json.dumps(_packed(mistake)))
    store.add(_DONE, 1)  # also with a mistake: rank 0 waits for all, and then says it
    store.wait([_VERDICT], timedelta(seconds=_PATIENCE_S))
    verdict = store.get(_VERDICT).decode()
    store.add(_HEARD, 1)
    _raise(verdict)
    return found


def _wait_until_heard(store: Any, world: int) -> None:
    deadline = time.monotonic() + _HEARD_S
    while store.add(_HEARD, 0) < world - 1 and time.monotonic() < deadline:
        time.sleep(_LOOK_S)


def _tried(look: _Look[_Found]) -> tuple[_Found | None, UserError | None]:
    try:
        return look(), None
    except UserError as error:
        return None, error


def _difference(
    found: _Found | None, error: UserError | None, words_of: _WordsOf[_Found], decided: Mapping[str, str], rank: int
) -> UserError | None:
    """The first difference to what rank 0 sees, as an error to raise; None if there is none."""
    if error is not None:
        first = each_of(error)[0]
        return UserError(f"{_where(rank)}: {first.given}", first.rule, first.way_out or "rank 0 sees it otherwise")
    assert found is not None
    return _unlike(words_of(found), decided, rank)


def _unlike(own: Mapping[str, str], decided: Mapping[str, str], rank: int) -> UserError | None:
    """The first of `own` that is another on rank 0."""
    for name in [*decided, *(own.keys() - decided.keys())]:
        if (here := own.get(name, "nothing")) != (there := decided.get(name, "nothing")):
            return UserError(
                f"{_where(rank)} sees {here} {name}, rank 0 {there}",
                "all ranks must begin the same run",
                "is the folder shared by all nodes, and the file the same on each?"
                if not name.startswith(VERSION)
                else "install the same on all nodes",
            )
    return None


def _where(rank: int) -> str:
    return f"rank {rank} ({socket.gethostname()})"


def _packed(error: UserError) -> list[list[str]]:
    """The parts of each of the mistakes, for JSON."""
    return [[each.given, each.rule, each.way_out] for each in each_of(error)]


def _unpacked(mistakes: list[list[str]]) -> UserError:
    return at_once(UserError(*parts) for parts in mistakes)


def _raise(packed: str) -> None:
    if packed:
        raise _unpacked(json.loads(packed))

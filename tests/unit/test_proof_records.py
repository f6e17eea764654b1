"""Records of passed proofs: what a record must be and say to count."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshlora_ground.proof_records import proved_on, record_of, remember, usable_cache

ASKED: dict[str, Any] = {
    "key": "0123456789abcdef",
    "model_type": "llama",
    "topology": "tp=2,sp",
    "request": {"lora": {"r": 4}, "packing": False, "steps": 3, "topologies": ("tp=2,sp",)},
}


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    assert remember(tmp_path / "proofs", ASKED, {"seconds": 1.0}) == ""
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d", proved_on(tmp_path / "proofs", ASKED))
    return tmp_path / "proofs"


def _edit(**changes: Any) -> Callable[[Path], Any]:
    return lambda record: record.write_text(json.dumps(json.loads(record.read_text()) | changes))


def _text(text: str) -> Callable[[Path], Any]:
    return lambda record: record.write_text(text)


def _link(record: Path) -> None:
    record.rename(record.with_name("elsewhere"))
    record.symlink_to("elsewhere")


WRONG: dict[str, Callable[[Path], Any]] = {
    "nothing but passed": _text('{"passed": true}'),
    "passed and a date": _text('{"passed": true, "date": "2026-01-01 00:00"}'),
    "passed is no truth value": _edit(passed=1),
    "failed": _edit(passed=False),
    "of another key": _edit(key="another"),
    "of another topology": _edit(topology="tp=2"),
    "of another family": _edit(model_type="qwen2"),
    "of another request": _edit(request={**ASKED["request"], "packing": True}),
    "a number for a truth value": _edit(request={**ASKED["request"], "packing": 0}),
    "a date that is none": _edit(date="\x1b]0;title\x07"),
    "a date that is a number": _edit(date=5),
    "too long": lambda record: record.write_text(" " * 2**20 + record.read_text()),
    "deep": _text("[" * 100_000),
    "a long number": _text('{"passed": ' + "9" * 5000 + "}"),
    "empty": _text(""),
    "not UTF-8": lambda record: record.write_bytes(b"\xff\xfe\xfd"),
    "a list": _text("[]"),
    "writable by others": lambda record: record.chmod(0o666),
    "in a folder that others can write": lambda record: record.parent.chmod(0o777),
    "a link": _link,
}


@pytest.mark.parametrize("kind", list(WRONG))
def test_record_that_does_not_say_what_is_asked_is_no_proof(
    cache: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    WRONG[kind](record_of(cache, ASKED["key"]))
    assert proved_on(cache, ASKED) == ""
    (said,) = caplog.messages
    assert said.isprintable()
    assert len(said) < 1000
    assert str(cache / "passed") in said


def test_record_of_somebody_else_is_no_proof(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    other = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: other)
    assert proved_on(cache, ASKED) == ""
    assert "it belongs to " in caplog.text


def test_missing_record_is_not_mentioned(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert proved_on(tmp_path / "proofs", ASKED) == ""
    assert caplog.messages == []


def test_record_that_is_not_believed_is_replaced(cache: Path) -> None:
    record = record_of(cache, ASKED["key"])
    record.chmod(0o666)
    assert remember(cache, ASKED, {}) == ""
    assert proved_on(cache, ASKED)


def test_cache_that_others_can_write_is_not_used_and_says_the_way_out(cache: Path) -> None:
    cache.chmod(0o775)
    with usable_cache(cache) as (usable, why_not):
        assert usable != cache
    assert why_not.startswith(f"the cache of proofs, {cache}: others can write it (mode 0775), so nothing in it is")
    assert f"chmod go-w {cache}" in why_not
    (cache / "passed").chmod(0o775)
    assert "others can write it" in remember(cache, ASKED, {})

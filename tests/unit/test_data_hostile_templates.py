"""Chat templates of strangers: whatever they do, it ends soon, in bounded memory, with one message that names the
record; and the honest ones render what transformers renders.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import AutoTokenizer

import meshlora.reading.chat
from meshlora.reading.tokenization import tokenize
from meshlora_ground.apart import Failed, each_apart
from meshlora_ground.errors import UserError
from tests.run_files import TINY
from tests.unit.records import END, MARKED, TWO_TURNS, UNMARKED, chat, make_tokenizer, trained_text

# A tuple of itself twice, a hundred times: its hash takes 2 ** 100 steps in one call into C, where no signal is heard.
SELF_SIMILAR = (
    "{% set ns = namespace(t=(1, 2)) %}{% for _ in range(100) %}{% set ns.t = (ns.t, ns.t) %}{% endfor %}"
    "{{ {ns.t: 1} }}"
)
TIME = "it takes longer than 0.5 s"
MEMORY = "it needs too much memory"
HOSTILE = {
    "nested_loops": ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", TIME),
    "hash_in_c": (SELF_SIMILAR, TIME),
    "comparison_in_c": (
        "{% set a = ([0] * 10**4,) * 10**4 %}{% set b = ([0] * 10**4,) * 10**4 %}"
        "{% for _ in range(99999) %}{{ a == b }}{% endfor %}",
        TIME,
    ),
    "wide_format": ("{{ '%1000000000d'|format(1) }}", MEMORY),
    "long_text": ("{{ 'a' * 10**11 }}", MEMORY),
    "long_list": ("{{ ([0] * 10**10)|length }}", MEMORY),
    "doubled_text": (
        "{% set ns = namespace(t='a') %}{% for _ in range(99) %}{% set ns.t = ns.t + ns.t %}{% endfor %}",
        MEMORY,
    ),
    "written_without_end": ("{% for a in range(99999) %}{{ 'a' * 10**6 }}{% endfor %}", MEMORY),
    "text_over_the_limit": ("{% for a in range(40) %}{{ 'a' * 10**6 }}{% endfor %}", "its text is longer than"),
    "digits": ("{{ 10**5000 }}", "4300 digits"),
    "power_of_a_power": ("{{ 10 ** (10**10) > 1 }}", TIME),
    "range": ("{% for a in range(10**12) %}{% endfor %}", "OverflowError"),
    "recursion": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
    "division": ("{{ 1 / 0 }}", "ZeroDivisionError"),
    "undefined": ("{{ nothing.at.all }}", "UndefinedError"),
    "syntax": ("{% for %}", "TemplateSyntaxError"),
    "own_words": ("{{ raise_exception('x' * 10**6) }}", "TemplateError: xxx"),
    "lone_surrogate": ("{{ '\\ud800' }}", "surrogates not allowed"),
}


@pytest.mark.parametrize(("template", "words"), HOSTILE.values(), ids=HOSTILE)
def test_hostile_template_is_one_message_that_names_the_record(
    template: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if words == TIME:
        monkeypatch.setattr(meshlora.reading.chat, "_SECONDS", 0.5)
    begun = time.monotonic()
    with pytest.raises(UserError) as error:
        tokenize([TWO_TURNS], make_tokenizer(chat_template=template), max_length=64)
    assert time.monotonic() - begun < 4
    message = str(error.value)
    assert message.startswith("a.jsonl:1: 5 messages (system, user, assistant, user, assistant): the chat template")
    assert words in message
    assert len(message) < 1000


def _children() -> set[str]:
    """Of this process: other tests may have some."""
    return {number for task in Path("/proc/self/task").iterdir() for number in (task / "children").read_text().split()}


def test_no_child_is_left_and_an_alarm_of_the_callers_is_kept() -> None:
    rang, children = [], _children()
    before = signal.signal(signal.SIGALRM, lambda *_: rang.append(1))
    signal.setitimer(signal.ITIMER_REAL, 30)
    try:
        tokenize([TWO_TURNS], make_tokenizer(chat_template=MARKED), max_length=64)
        with pytest.raises(UserError):
            tokenize([TWO_TURNS], make_tokenizer(chat_template="{{ 1 / 0 }}"), max_length=64)
        assert 0 < signal.getitimer(signal.ITIMER_REAL)[0] < 30
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert _children() == children
    assert not rang


def test_the_record_that_fails_is_named_and_not_its_neighbour() -> None:
    template = "{% if messages|length > 2 %}{{ 1 / 0 }}{% endif %}" + MARKED
    short = [chat(("user", "a"), ("assistant", "b"), origin=f"a.jsonl:{line}") for line in (1, 2)]
    longer = chat(*[("user", "a"), ("assistant", "b")] * 2, ("user", "c"), origin="a.jsonl:3")
    with pytest.raises(UserError, match=r"a.jsonl:3: 5 messages .*ZeroDivisionError"):
        tokenize([*short, longer], make_tokenizer(chat_template=template), max_length=64)


@pytest.mark.parametrize("source", [MARKED, UNMARKED, "examples"])
def test_honest_templates_render_what_transformers_renders(source: str) -> None:
    if source == "examples":
        tokenizer = AutoTokenizer.from_pretrained(TINY)
    else:
        tokenizer = make_tokenizer(chat_template=source, eos=END)
    records = [chat(("user", "é 🙂 \u2028"), ("assistant", "a\n b " * n), origin=f"a:{n}") for n in range(1, 40)]
    ours = tokenize(records, tokenizer, max_length=4096)
    for record, sequence in zip(records, ours, strict=True):
        theirs = tokenizer.apply_chat_template(list(record.messages or ()), return_dict=True)
        assert sequence.input_ids.tolist() == theirs["input_ids"]
        assert "a\n b" in trained_text(ours, tokenizer)


# ---- the process apart


def _killed(_: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _waits(item: int) -> int:
    if item:
        threading.Event().wait()
    return item


def test_process_that_dies_or_waits_is_a_failure_after_the_results_before_it() -> None:
    assert list(each_apart(_killed, [0, 1], seconds=5, memory_bytes=2**28)) == [Failed("it ended its process")]
    begun = time.monotonic()
    found = list(each_apart(_waits, [0, 1, 0], seconds=0.2, memory_bytes=2**28))
    assert found == [0, Failed("it takes longer than 0.2 s")]
    assert time.monotonic() - begun < 3


def test_limits_are_the_copys_alone_and_leave_it_no_more_memory_than_said(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_AS)

    def allocate(size: int) -> int:
        (tmp_path / "seen").touch()
        return len(bytearray(size))

    with _hole(2**30):
        found = list(each_apart(allocate, [2**20, 2**27, 2**29], seconds=5, memory_bytes=2**28))
    assert found == [2**20, 2**27, Failed("it needs too much memory")]
    assert resource.getrlimit(resource.RLIMIT_AS) == before


@contextlib.contextmanager
def _hole(num_bytes: int) -> Iterator[None]:
    """In this process's heap, as many tests leave some: memory that is free and not given back to the system."""
    c = ctypes.CDLL(None)
    c.malloc.restype, c.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    *blocks, last = [c.malloc(100_000) for _ in range(num_bytes // 100_000)]
    for block in blocks:
        c.free(block)
    try:
        yield
    finally:
        c.free(last)


def test_results_are_not_pickles_and_text_comes_back_as_it_was() -> None:
    items = ["é🙂\u2028\0", "x" * 10**6, ""]
    assert list(each_apart(lambda text: [text, 1], items, seconds=5, memory_bytes=2**28)) == [[t, 1] for t in items]


def test_a_consumer_that_stops_early_ends_the_copy() -> None:
    children = _children()
    results = each_apart(lambda item: item, range(10**6), seconds=5, memory_bytes=2**28)
    assert next(results) == 0
    results.close()
    assert _children() == children

"""The date that a chat template writes: the same for a whole run, its ranks and its adapter."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest
import torch

from meshlora.cli.main import main
from meshlora.processes.launchers import Place
from meshlora.reading import clock
from meshlora.reading.chat import conversation_prompts
from meshlora.reading.records import Record
from meshlora.reading.streamed import read_streamed
from meshlora.reading.tokenization import tokenize
from meshlora.run import agreement
from meshlora.run.config.file import read_run
from meshlora.run.evaluate import prepare_evaluation
from meshlora.run.prepared import Prepared
from meshlora.run.run import train
from meshlora.run.together import prepare_run
from meshlora_ground.errors import UserError
from tests.unit.mistakes import Setup
from tests.unit.records import UNMARKED, chat, make_tokenizer

DATED = "{{ strftime_now('%d %b %Y') + ';' }}" + UNMARKED
CHAT = chat(("user", "hi"), ("assistant", "hello"))
NOTE = "the chat template writes the date: {} (data.date)"
TURNS = [{"role": "user", "content": "def g"}, {"role": "assistant", "content": "return g"}]


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Sets the clock of this machine, as our code sees it, and its time zone."""

    def set_clock(moment: str) -> None:
        class Now(datetime):
            @classmethod
            def now(cls, tz: object = None) -> datetime:
                return datetime.fromisoformat(moment)

        monkeypatch.setattr(clock, "datetime", Now)
        monkeypatch.setenv("TZ", "Asia/Tokyo" if moment > "2026-01-16" else "America/Lima")
        time.tzset()

    return set_clock


@pytest.mark.parametrize("streaming", [False, True])
def test_the_day_that_a_template_writes_stands_still_and_is_said(streaming: bool, tmp_path: Path) -> None:
    source = tmp_path / "chat.jsonl"
    source.write_text(json.dumps({"messages": TURNS}) + "\n")
    tokenizer, texts = make_tokenizer(chat_template=DATED), []
    for day in ("2026-01-15", "2026-01-16"):
        clock.set_day(tokenizer, day)
        said: list[str] = []
        options = {"max_length": 512, "cache_dir": tmp_path / "cache", "vocab_size": 10**6, "say": said.append}
        if streaming:
            found = read_streamed(str(source), tokenizer, **options)  # type: ignore[arg-type]
        else:
            found = tokenize([CHAT], tokenizer, **options)  # type: ignore[arg-type]
        texts.append(tokenizer.decode(found.input_ids).partition(";")[0])
        assert NOTE.format(day) in said
    assert texts == ["15 Jan 2026", "16 Jan 2026"], "the day is part of the cache's key"
    assert conversation_prompts([CHAT], tokenizer)[0].startswith("16 Jan 2026;")


def test_no_day_is_said_or_part_of_a_key_where_no_conversation_has_it(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(chat_template=DATED)
    for day in ("2026-01-15", "2026-01-16"):
        clock.set_day(tokenizer, day)
        tokenize([Record(text="a", origin="a:1")], tokenizer, max_length=8, cache_dir=tmp_path, say=pytest.fail)
    plain, said = make_tokenizer(chat_template=UNMARKED), list[str]()
    for day in ("2026-01-15", "2026-01-16"):
        clock.set_day(plain, day)
        tokenize([CHAT], plain, max_length=64, cache_dir=tmp_path, say=said.append)
    assert not [line for line in said if "date" in line]
    assert len([*tmp_path.glob("*.safetensors")]) == 2


def _run(setup: Setup, *, resume: str | None = None) -> Prepared:
    return prepare_run(read_run(setup.folder / "run.yaml"), resume=resume)


@pytest.fixture
def dated(setup: Setup) -> Setup:
    """A run of two steps whose template writes the date."""
    file = setup.folder / "dated.jinja"
    file.write_text(
        "{{ strftime_now('%d') + ' ' }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    setup.data({"messages": TURNS}, {"messages": [*TURNS, *TURNS]})
    setup.drop("data.eval")
    options = {"data.chat_template": str(file), "train.steps": 2, "train.save_every": 1, "topology": ""}
    for name, value in options.items():
        setup.set(name, value)
    setup.write()
    return setup


def test_a_resumed_run_writes_the_day_on_which_it_was_begun(dated: Setup, at: Callable[[str], None]) -> None:
    output = dated.folder / "output"
    at("2026-01-15T23:59")
    begun = _run(dated)
    assert NOTE.format("2026-01-15") in begun.notes
    train({"": begun})
    bytes_of = {
        name: (output / "adapter" / name).read_bytes() for name in ("adapter_model.safetensors", "manifest.json")
    }
    shutil.rmtree(output / "adapter")
    at("2026-01-17T00:30")
    resumed = _run(dated, resume="auto")
    assert resumed.resume is not None
    assert (resumed.resume.step, resumed.config.data.date) == (1, "2026-01-15")
    train({"": resumed})
    assert {name: (output / "adapter" / name).read_bytes() for name in bytes_of} == bytes_of
    shutil.rmtree(output / "adapter")
    shutil.rmtree(output / "checkpoints")
    assert _run(dated, resume="auto").config.data.date == "2026-01-15", "of the initial adapter"


def test_another_day_than_that_of_the_run_is_refused_by_its_name(dated: Setup, at: Callable[[str], None]) -> None:
    at("2026-01-15T10:00")
    train({"": _run(dated)})
    dated.set("data.date", "2026-01-16")
    dated.write()
    with pytest.raises(UserError, match=r"other data\.date: 2026-01-15 there, 2026-01-16 here"):
        _run(dated, resume="auto")


def test_an_adapter_is_evaluated_on_the_day_of_its_run(dated: Setup, at: Callable[[str], None]) -> None:
    at("2026-01-15T10:00")
    train({"": _run(dated)})
    at("2026-01-17T10:00")
    dated.set("data.eval", str(dated.folder / "train.jsonl"))
    dated.write()
    config = read_run(dated.folder / "run.yaml")
    days = [
        prepare_evaluation(config, adapter=adapter).config.data.date
        for adapter in (dated.folder / "output" / "adapter", None)
    ]
    assert days == ["2026-01-15", "2026-01-17"]


def test_commands_say_the_day(dated: Setup, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("data", "check"):
        main([command, str(dated.folder / "run.yaml"), "--set", "data.date=2026-01-15"])
        assert f"note: {NOTE.format('2026-01-15')}" in " ".join(capsys.readouterr().out.split())


def test_a_day_without_effect_is_said_and_a_wrong_one_refused(dated: Setup) -> None:
    (dated.folder / "dated.jinja").write_text(UNMARKED)
    dated.set("data.date", "2026-01-15")
    dated.write()
    run = _run(dated)
    assert "data.date=2026-01-15 has no effect: the chat template writes no date" in run.notes
    assert "data.date" not in run.identity
    dated.set("data.date", "2026-02-30")
    dated.write()
    with pytest.raises(UserError, match=r"data\.date='2026-02-30'"):
        _run(dated)


def test_ranks_have_the_day_of_rank_0_after_midnight(monkeypatch: pytest.MonkeyPatch) -> None:
    store, days = torch.distributed.HashStore(), []
    monkeypatch.setattr(agreement, "meet", lambda: store)
    for rank, day in ((0, "2026-01-15"), (1, "2026-01-16")):
        monkeypatch.setattr(agreement, "launcher_place", lambda rank=rank: Place(rank, 2, rank))
        monkeypatch.setattr(agreement, "today", lambda day=day: day)
        days.append(agreement.one_day())
    assert days == ["2026-01-15", "2026-01-15"]

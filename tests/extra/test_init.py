"""`meshlora init`: the file it writes passes every check and trains; what it asks, and what it refuses."""

from __future__ import annotations

import json
import os
import pty
import select
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from meshlora.cli.main import main
from meshlora.run.config.file import read_run
from meshlora.run.run import train
from meshlora.run.together import prepare_run
from meshlora_extra.commands import first_run
from meshlora_ground import console
from tests.run_files import TINY, copy_lines

Init = Callable[..., int]


@pytest.fixture
def init(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Init:
    """`init(*arguments)`: the command, in a folder with `train.jsonl`; its exit code."""
    copy_lines("train", tmp_path / "train.jsonl", 0, 12)
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> int:
        return main(["init", *arguments])

    return run


GIVEN = ("--yes", "--model", str(TINY), "--data", "train.jsonl", "--gpus", "1")


@pytest.mark.long
def test_file_passes_every_check_and_trains_as_it_says(init: Init, tmp_path: Path) -> None:
    assert init(*GIVEN, "--length", "2 steps", "--out", "mine.yaml") == 0
    config = read_run(tmp_path / "mine.yaml")
    run = prepare_run(config, world=1)
    assert (run.steps, config.train.batch_size, config.data.max_length) == (2, 12, 128)
    assert (config.preset, config.train.eps, config.train.output) == ("lora-without-regret", 1e-12, "runs/mine")
    train({"": run})
    assert (tmp_path / "runs" / "mine" / "adapter" / "README.md").is_file()
    text = (tmp_path / "mine.yaml").read_text()
    assert "#   meshlora train mine.yaml\n" in text
    schema = text.splitlines()[0].partition("# yaml-language-server: $schema=")[2]
    assert json.loads(Path(schema).read_text())["properties"]["preset"]
    assert "12 sequences, " in text
    joined = "joined as plain text, without the chat template; data.columns: {user: prompt, assistant: completion}"
    assert text.count(f"# note: {joined} makes conversations\n") == 1
    assert sum(joined in note for note in run.notes) == 1


def test_a_part_of_the_data_is_held_out_unless_they_are_few(init: Init, tmp_path: Path) -> None:
    assert init(*GIVEN, "--out", "few.yaml") == 0
    assert read_run(tmp_path / "few.yaml").data.eval is None
    copy_lines("train", tmp_path / "more.jsonl", 0, 60)
    assert init(*GIVEN[:3], "--data", "more.jsonl", "--gpus", "1", "--length", "20 steps") == 0
    config = read_run(tmp_path / "run.yaml")
    assert (config.data.eval, config.train.eval_every) == (0.05, 4)
    run = prepare_run(config, world=1)
    assert run.eval_data is not None
    assert (run.train_data.num_examples, run.eval_data.num_examples) == (57, 3)


def test_preferences_are_recognised_and_get_their_recipe(init: Init, tmp_path: Path) -> None:
    pairs = [{"prompt": "Colour?", "chosen": f" Red {i}.", "rejected": " No."} for i in range(20)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    assert init(*GIVEN[:3], "--data", "pairs.jsonl", "--gpus", "1", "--eval", "pairs.jsonl") == 0
    config = read_run(tmp_path / "run.yaml")
    assert (config.preset, config.train.objective.kind, config.train.epochs) == ("dpo", "dpo", 3)
    assert "20 pairs" in (tmp_path / "run.yaml").read_text()
    prepare_run(config, world=1)


def test_questions_are_asked_where_nothing_is_given(
    init: Init, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    answers = {"Model": str(TINY), "Training": "train.jsonl", "Processes": "1", "Goal": "", "Length": "1 epoch"}

    def ask(question: str, default: str | None) -> str:
        asked.append((question.split(":")[0].split(",")[0], default))
        return next(answer for name, answer in answers.items() if question.startswith(name))

    wishes = []
    monkeypatch.setattr(console, "ask", ask)
    monkeypatch.setattr(first_run, "first_run", lambda wish, **_: wishes.append(wish) or "written\n")
    assert init() == 0
    names = [name for name, _ in asked]
    assert names == ["Model", "Training data", "Processes", "Goal", "Length"]
    (wish,) = wishes
    assert (wish.model, wish.data, wish.gpus, wish.goal, wish.epochs, wish.steps) == (
        *(str(TINY), "train.jsonl"),
        *(1, None, 1.0, None),
    )
    assert (tmp_path / "run.yaml").read_text() == "written\n"


def test_each_answer_is_checked_as_it_is_given_and_asked_for_again(
    init: Init, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = {
        "Model": ["smoll", "", str(TINY)],
        "Training": ["nonono.jsonl", "train.jsonl"],
        "Processes": ["two", "0", "1"],
        "Goal": ["grpo", "sft"],
        "Length": ["banana", "1 epoch"],
    }

    def ask(question: str, default: str | None) -> str:
        return next(given for name, given in answers.items() if question.startswith(name)).pop(0)

    wishes = []
    monkeypatch.setattr(console, "ask", ask)
    monkeypatch.setattr(first_run, "first_run", lambda wish, **_: wishes.append(wish) or "written\n")
    assert init() == 0
    assert not any(answers.values())
    (wish,) = wishes
    assert (wish.data, wish.gpus, wish.goal, wish.epochs) == ("train.jsonl", 1, "sft", 1.0)
    said = capsys.readouterr().out
    for words in (
        "model 'smoll': there is no such folder",
        "nonono.jsonl: there is no such file",
        "--gpus two: it is a number of processes",
        "--gpus 0: it is a number of processes",
        "--goal grpo: it is one of sft, qlora, dpo; rewards are trained on by meshlora rl",
        "--length 'banana': it is a number of epochs or steps",
    ):
        assert words in said


def test_answers_are_not_lost_where_the_rows_do_not_fit(
    init: Init, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "odd rows.jsonl").write_text('{"a": 1}\n')
    monkeypatch.setattr(console, "ask", lambda question, default: default or "1 epoch")
    given = ("--model", str(TINY), "--data", "odd rows.jsonl", "--gpus", "1", "--goal", "sft")
    assert init(*given) == 2
    out, err = capsys.readouterr()
    assert "malformed" in err
    line = out.splitlines()[-1].strip()
    assert line == f"meshlora init {shlex.join(given)} --length '1 epoch' --yes --out run.yaml"


@pytest.mark.timeout(300)
def test_on_a_terminal_a_slip_costs_one_answer(init: Init, tmp_path: Path) -> None:
    """In a process of its own with a terminal, as `accelerate config` is tried; the first masked sequence is shown."""
    leader, follower = pty.openpty()
    words = [sys.executable, "-m", "meshlora", "init", "--gpus", "1", "--goal", "sft"]
    process = subprocess.Popen(words, stdin=follower, stdout=follower, stderr=follower, cwd=tmp_path, close_fds=True)
    os.close(follower)
    seen, answers = "", ["smoll", str(TINY), "none.jsonl", "train.jsonl", "banana", "2 steps"]
    try:
        while select.select([leader], [], [], 120)[0]:
            try:
                seen += os.read(leader, 2**16).decode(errors="replace")
            except OSError:  # the other end is closed
                break
            if answers and seen.endswith(": "):
                os.write(leader, f"{answers.pop(0)}\n".encode())
        assert process.wait(60) == 0, seen
    finally:
        process.kill()
        os.close(leader)
    assert not answers
    for words_said in ("model 'smoll': there is no such folder", "none.jsonl: there is no such file", "'banana'"):
        assert words_said in seen
    assert "sequence 0: " in seen
    assert read_run(tmp_path / "run.yaml").train.steps == 2


MISTAKES: dict[str, tuple[list[str], str]] = {
    "no model": (["--yes", "--data", "train.jsonl"], "--yes without --model: it has no default"),
    "nobody to ask": (["--model", str(TINY)], "--data: there is nobody to ask"),
    "no such data": ([*GIVEN[:3], "--data", "nowhere.jsonl"], "nowhere.jsonl"),
    "length": ([*GIVEN, "--length", "soon"], "--length 'soon': it is a number of epochs or steps"),
    "no length": ([*GIVEN, "--length", "0 steps"], "as in"),
    "gpus": ([*GIVEN[:-1], "0"], "--gpus 0: it is a number of processes"),
    "goal": ([*GIVEN, "--goal", "grpo"], "it is one of sft, qlora, dpo; rewards are trained on by meshlora rl"),
    "columns": ([*GIVEN, "--columns", "x"], "--columns x: it must read OURS=THEIRS"),
    "a folder": ([*GIVEN, "--out", "."], "it is a folder"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake_is_one_line_and_nothing_is_written(
    mistake: str, init: Init, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, said = MISTAKES[mistake]
    assert init(*arguments) == 2
    err = capsys.readouterr().err
    assert said in err
    assert len(err.splitlines()) == 1
    assert not list(tmp_path.glob("*.yaml"))


def test_file_that_is_there_stays_unless_forced(
    init: Init, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_run, "first_run", lambda *_, **__: "written\n")
    (tmp_path / "run.yaml").write_text("mine")
    assert init(*GIVEN) == 2
    assert "it is there already; choose another, or --force" in capsys.readouterr().err
    assert (tmp_path / "run.yaml").read_text() == "mine"
    assert init(*GIVEN, "--force") == 0
    assert (tmp_path / "run.yaml").read_text() == "written\n"

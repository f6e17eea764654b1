"""`meshlora chat`: what it answers is what transformers + peft answer, in a terminal, from a pipe, on a mesh."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from meshlora.cli.main import main
from tests.extra.talking import QUESTIONS, TEMPLATE, answered, asked, trained
from tests.extra.terminals import CTRL_C, CTRL_D, Terminal
from tests.run_files import TINY

ON = [pytest.param((), id="one"), pytest.param(("--nproc", "2", "--topology", "tp=2"), id="tp=2")]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run file of a run on conversations, with a template of its own."""
    folder = tmp_path_factory.mktemp("talk")
    (folder / "own.jinja").write_text(TEMPLATE)
    return trained(folder, chat_template=str(folder / "own.jinja"))


def _words(run: Path, *more: str) -> list[str]:
    adapter = str(run.parent / "run" / "adapter")
    return ["chat", "--model", str(TINY), "--adapter", adapter, "--dtype", "float32", "--max-new-tokens", "24", *more]


def _expected(run: Path, questions: list[str], *, system: str = "", of_base: bool = False) -> list[str]:
    """The answers of a conversation, one after the other."""
    adapter = run.parent / "run" / "adapter"
    turns = asked("", system=system)[:-1]
    said = []
    for question in questions:
        turns += asked(question)
        said += answered(adapter, [turns], template=TEMPLATE)
        turns.append({"role": "assistant", "content": said[-1]})
    if of_base:
        said += answered(None, [turns[:-1]], template=TEMPLATE)
    return said


@pytest.mark.long
@pytest.mark.parametrize("on", ON)
def test_conversation_in_a_terminal(on: tuple[str, ...], run: Path, tmp_path: Path) -> None:
    first, second, base = _expected(run, QUESTIONS, of_base=True)
    briefly, *_ = _expected(run, QUESTIONS[1:], system="Be brief.")
    assert len({first, second, base, briefly}) > 2
    with Terminal(*_words(run, *on), folder=tmp_path) as terminal:
        begun = terminal.until("you> ")
        assert f"chat template of {run.parent / 'run' / 'adapter'}" in begun
        terminal.type("/base")
        assert "nothing has been asked yet" in terminal.until("you> ")
        terminal.type(QUESTIONS[0])
        assert _shown(terminal, QUESTIONS[0]) == first
        terminal.type(QUESTIONS[1])
        assert _shown(terminal, QUESTIONS[1]) == second
        terminal.type("/base")
        assert _shown(terminal, "/base").removeprefix("base: ").partition("\n(cut")[0] == base
        terminal.type("/system Be brief.")
        terminal.until("system: Be brief.)\n")
        terminal.until("you> ")
        terminal.type(QUESTIONS[1])
        assert _shown(terminal, QUESTIONS[1]) == briefly
        terminal.type("/nothing")
        assert "there is no such command" in terminal.until("you> ")
        terminal.type("/system")
        terminal.until("you> ")
        terminal.type("/reset")
        terminal.until("you> ")
        terminal.type(QUESTIONS[0])
        assert _shown(terminal, QUESTIONS[0]) == first
        terminal.type(CTRL_D)
        assert terminal.end() == 0, terminal.shown


def _shown(terminal: Terminal, echo: str) -> str:
    """What is answered, without the line that was typed and the prompt that follows."""
    found = terminal.until("you> ").removesuffix("\nyou> ")
    assert found.startswith(f"{echo}\n"), found
    return found.removeprefix(f"{echo}\n")


@pytest.mark.long
@pytest.mark.parametrize("on", ON)
def test_ctrl_c_stops_the_answer_and_not_the_program(on: tuple[str, ...], run: Path, tmp_path: Path) -> None:
    words = _words(run, "--temperature", "9", *on)  # of such noise hardly a token ends
    words[words.index("24")] = "440"
    with Terminal(*words, folder=tmp_path) as terminal:
        terminal.until("you> ")
        for _ in range(2):
            terminal.type("Say something.")
            terminal.until("Say something.\n")
            while len(terminal.shown) < 20:
                terminal._read()
            terminal.type(CTRL_C)
            assert "(stopped)" in terminal.until("you> ")
        time.sleep(0.5)  # readline looks for signals, and then waits for a key: one just between waits, too
        terminal.type(CTRL_C)
        assert "/exit or Ctrl-D leaves" in terminal.until("you> ")
        terminal.type("/exit")
        assert terminal.end() == 0, terminal.shown


@pytest.mark.long
@pytest.mark.parametrize("on", ON)
def test_lines_of_a_pipe_are_answered(on: tuple[str, ...], run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    expected = _expected(run, QUESTIONS, of_base=True)
    found = _piped(_words(run, *on), f"{QUESTIONS[0]}\n\n{QUESTIONS[1]}\n/base\n")
    assert (found.returncode, found.stdout) == (0, "".join(f"{text}\n" for text in expected))
    assert "you>" not in found.stderr


def _piped(words: list[str], lines: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "meshlora", *words], input=lines, text=True, capture_output=True, check=False
    )


@pytest.mark.long
def test_run_file_names_model_and_adapter(run: Path) -> None:
    found = _piped(["chat", "--run", str(run), "--max-new-tokens", "24"], f"{QUESTIONS[0]}\n")
    assert (found.returncode, found.stdout) == (0, f"{_expected(run, QUESTIONS[:1])[0]}\n")


@pytest.mark.long
@pytest.mark.parametrize("on", ON)
def test_conversation_beyond_the_positions_is_said_with_the_way_out(on: tuple[str, ...], run: Path) -> None:
    """And no rank of a mesh is left waiting for it."""
    found = _piped(_words(run, *on), f"{QUESTIONS[0]}\n{'word ' * 600}\n{QUESTIONS[1]}\n")
    assert found.returncode == 2
    assert found.stdout == f"{_expected(run, QUESTIONS[:1])[0]}\n"
    (error,) = (line for line in found.stderr.splitlines() if line.startswith("error: "))
    assert error.endswith("tokens: the model has 512 positions; begin anew with /reset, or ask more briefly")


@pytest.mark.long
def test_answer_that_the_positions_cut_is_said(run: Path) -> None:
    words = _words(run, "--temperature", "9")
    words[words.index("24")] = "5000"
    found = _piped(words, "a\n")
    assert found.returncode == 0
    assert "the model has no more positions; /reset begins anew)" in found.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--model", "{model}", "--port", "80"), "no effect without --page"),
        (("--model", "{model}", "--page", "--port", "70000"), "a port is below 65536"),
        (("--run", "{run}", "--adapter", "x"), "give --model and --adapter, or --run alone"),
        (("--model", "nowhere"), "model 'nowhere': there is no such folder"),
        (("--model", "{bare}"), "give --chat-template NAME or FILE"),
        (("--model", "{model}", "--chat-template", "nope"), "--chat-template nope: there is no such file"),
        (("--run", "{other}"), "it has no finished adapter; train it"),
        (("--model", "{model}", "--topology", "pp=2,interleave=2", "--nproc", "2"), "leave out interleave"),
    ],
)
def test_mistake_is_one_line(
    words: tuple[str, ...], said: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(TINY, tmp_path / "bare", ignore=shutil.ignore_patterns("chat_template.jinja"))
    other = tmp_path / "other.yaml"
    other.write_text(run.read_text().replace(str(run.with_suffix("")), str(tmp_path / "nowhere")))
    names = {"model": str(TINY), "run": str(run), "bare": str(tmp_path / "bare"), "other": str(other)}
    assert main(["chat", *(word.format(**names) for word in words)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert len(err.splitlines()) == 1


def test_nothing_heavy_is_imported_to_show_help() -> None:
    code = "import sys; from meshlora.cli.main import _parser; _parser(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ)

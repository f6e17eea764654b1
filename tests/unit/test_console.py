"""What others wrote reaches the terminal as words: no markup is obeyed, no control character passes."""

from __future__ import annotations

import errno
import io
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.table import Table
from rich.text import Text

from meshlora.cli import main as cli
from meshlora.cli.main import main
from meshlora.run.config.run_file import GenerateConfig
from meshlora.run.watch import samples
from meshlora.run.watch.metrics import Reporter, StepMetrics
from meshlora.verify.proof import Outcome
from meshlora.verify.report.show import show
from meshlora_ground.console import Console, hand_over
from meshlora_ground.errors import MeshloraError
from meshlora_ground.topology import Topology
from meshlora_judge.diagnosis.diagnose import Divergence
from meshlora_judge.results import Phase, TensorResult
from tests.for_each import for_each
from tests.unit.mistakes import Setup

# What is said -> what must be seen.
WORDS = {
    "[/INST]": "[/INST]",
    "list[int]": "list[int]",
    "[bold]x": "[bold]x",
    "[link=file:///etc]x[/link]": "[link=file:///etc]x[/link]",
    ":warning: 3 of 4": ":warning: 3 of 4",
    "\\[x] \\x1b": "\\[x] \\x1b",
    "\x1b]0;title\x07": "\\x1b]0;title\\x07",
    "lost\rfound\x08\x7f\x9b": "lost\\rfound\\x08\\x7f\\x9b",
    "a\u202eb\u2066c": "a\\u202eb\\u2066c",
    "\ud800": "\\ud800",
    "größer, 更大": "größer, 更大",
}
PLACES: dict[str, Callable[[Console, str], Any]] = {
    "line": lambda console, text: console.say(text),
    "styled": lambda console, text: console.say(text, style="bold red"),
    "cell": lambda console, text: console.print(_table(text)),
    "cell_as_text": lambda console, text: console.print(_table(Text(text))),
    "title": lambda console, text: console.print(Table("", title=text, width=60)),
    "column": lambda console, text: console.print(Table(text)),
}
OBEYED = {
    chr(n) for n in (*range(9), *range(0xB, 0x20), *range(0x7F, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A))
}


def _table(cell: Any) -> Table:
    table = Table(show_header=False)
    table.add_row(cell)
    return table


def _seen(file: io.StringIO) -> str:
    """What a terminal shows of what was written, by rich's own reading of escape sequences: styles go."""
    from rich.ansi import AnsiDecoder

    return "\n".join(line.plain for line in AnsiDecoder().decode(file.getvalue()))


def _console(is_terminal: bool) -> Console:
    return Console(file=io.StringIO(), force_terminal=is_terminal, width=100)


@pytest.fixture(params=[False, True], ids=["file", "terminal"])
def console(request: pytest.FixtureRequest) -> Console:
    return _console(request.param)


@for_each("is_terminal", [False, True], ids=["file", "terminal"])
@for_each("place", PLACES)
@for_each("words", WORDS, ids=ascii)
def test_text_is_shown_as_it_is_and_obeyed_nowhere(words: str, place: str, is_terminal: bool) -> None:
    console = _console(is_terminal)
    PLACES[place](console, words)
    # A `Text` is measured before it is escaped, and what does not fit into its column goes.
    if place != "cell_as_text" or words.isprintable():
        assert WORDS[words] in _seen(console.file)
    assert not set(console.file.getvalue()) & OBEYED - {"\x1b"}
    assert "\x1b]" not in console.file.getvalue()


def test_no_character_passes_that_a_terminal_obeys() -> None:
    file = io.StringIO()
    Console(file=file).say("".join(map(chr, [*range(0x3000), *range(0xD800, 0xE000)])))
    assert not set(file.getvalue()) & OBEYED
    file.getvalue().encode()  # no half of a surrogate pair


def test_numbers_and_paths_have_no_colour_of_their_own() -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True)
    console.say("step 3/4 of '/x/y' at http://z: True")
    console.print(_table("step 3/4 of '/x/y' at http://z: True"))
    assert "\x1b" not in file.getvalue()


def test_words_that_the_terminal_cannot_encode_end_nothing() -> None:
    """Else a sample of the model ends training where the locale is not of UTF-8."""
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding="latin-1", write_through=True)
    Console(file=file).say("größer … 更大")
    assert raw.getvalue() == "größer \\u2026 \\u66f4\\u5927\n".encode("latin-1")


class _Full(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_full_disk_below_the_output_is_one_message() -> None:
    with pytest.raises(MeshloraError, match=r"output of this command could not be written \(No space left"):
        Console(file=_Full()).say("x")


@pytest.mark.parametrize("columns", ["0", "1"])
def test_rows_are_shown_where_nobody_has_set_the_size_of_the_terminal(
    columns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    file = io.StringIO()
    Console(file=file).show_rows([("output", "runs/mine")])
    assert file.getvalue().split() == ["output", "runs/mine"]


def test_long_line_and_its_spaces_stay_as_they_are() -> None:
    file = io.StringIO()
    Console(file=file, width=20).say("  a  b   " + "long/" * 30 + " x\n  y")
    assert file.getvalue() == "  a  b   " + "long/" * 30 + " x\n  y\n"


@pytest.mark.parametrize("text", ["[/INST]", "preflight: [/x]", "\x1b]0;title\x07"])
def test_line_beside_a_spinner_is_no_markup(text: str) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    with console.busy(text) as update:
        update(f"{text} more")
    assert text.replace("\x1b", "\\x1b").replace("\x07", "\\x07") in _seen(console.file)
    assert "\x1b]" not in console.file.getvalue()


@pytest.mark.parametrize("is_terminal", [False, True])
def test_generated_text_is_unchanged_for_programs_and_escaped_on_a_terminal(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = io.StringIO()
    monkeypatch.setattr(file, "isatty", lambda: is_terminal)
    monkeypatch.setattr(sys, "stdout", file)
    hand_over("[/INST]\n\x1b]0;title\x07")
    assert file.getvalue() == ("[/INST]\n\\x1b]0;title\\x07\n" if is_terminal else "[/INST]\n\x1b]0;title\x07\n")


# --- who speaks -------------------------------------------------------------------------------------------------------


@pytest.fixture
def reporter(console: Console, tmp_path: Path) -> Iterator[Reporter]:
    with Reporter(tmp_path / "metrics.jsonl", steps=1, log_every=1, is_main=True, console=console) as reporter:
        yield reporter


@for_each("words", WORDS, ids=ascii)
def test_reporter_says_any_text(words: str, reporter: Reporter, console: Console) -> None:
    console.file.truncate(console.file.seek(0))
    reporter.say(words)
    assert WORDS[words] in _seen(console.file)


def test_bars_show_names_and_not_markup(reporter: Reporter, console: Console) -> None:
    reporter.step(StepMetrics(1, 0.5, 1e-3, 2.0, 100, 0.5, means={"list[int]": 0.75, "[/x]": 0.5}))
    with reporter.doing("evaluation of [/INST]", total=1) as advance:
        advance()
        reporter._progress.refresh()
        assert ("evaluation of [/INST]" in _seen(console.file)) == console.is_terminal
    reporter._progress.refresh()
    assert "list[int] 0.75  [/x] 0.5" in _seen(console.file)


def test_sample_that_holds_markup_ends_no_run(
    reporter: Reporter, console: Console, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = "</s> [/INST] \x1b]0;title\x07 x: list[int]"
    model = SimpleNamespace(training=False, dtype=torch.float32, eval=lambda: None, train=lambda mode: None)
    monkeypatch.setattr(samples, "continuations", lambda *_: [said])
    monkeypatch.setattr(samples, "runtime", lambda _: SimpleNamespace(mesh=SimpleNamespace(rank=0)))
    prompts: Any = samples.Samples(("[INST] x[bold]",), ((1,),), None, GenerateConfig())  # type: ignore[arg-type]
    file = tmp_path / "samples.jsonl"
    prompts.write(model, file, step=1, say=reporter.say)
    assert json.loads(file.read_text()) == {"step": 1, "prompt": "[INST] x[bold]", "text": said}
    seen = _seen(console.file)
    assert "'[INST] x[bold]' -> '</s> [/INST] " in seen
    assert "x: list[int]'" in seen


def test_failed_proof_is_shown_whatever_modules_are_called(console: Console) -> None:
    topology = Topology.parse("tp=2", world=2)
    name, cause = "model.layers[0].mlp[/x].list[int]", "[bold]\x1b]0;title\x07 was summed twice"
    phases = [Phase("forward", [TensorResult(name, 1.0, 1e-9)])]
    found = Divergence("forward", name, 1.0, [1], None, cause, 2)
    outcomes = [
        Outcome(topology, None, phases, found, 1.0),
        Outcome(topology, None, [], None, 1.0, error="RuntimeError: [/y] \x1b[31m"),
        Outcome(topology, "row_output_averaged", phases, found, 1.0),
    ]
    proof: Any = SimpleNamespace(
        case=SimpleNamespace(model="[/INST]", model_type="", dtype="float64", steps=3),
        request=SimpleNamespace(mutations=("row_output_averaged", "row_output_not_reduced")),
        topologies=[topology],
        features_on=lambda _: frozenset[str](),
    )
    show(console, proof, outcomes)
    seen = _seen(console.file)
    for words in (
        "[/INST], float64",
        f"forward of {name} on rank 1",
        "[bold]\\x1b]0;title\\x07 was summed",
        "[/y] \\x1b[31m",
    ):
        assert words in seen
    assert name in seen.partition("deliberate faults")[2]  # in a cell of the kill table
    assert "\x1b]" not in console.file.getvalue()
    if console.is_terminal:
        assert f"\x1b[1;31m{topology} is not the same as one process\x1b[0m" in console.file.getvalue()


def test_check_of_a_run_whose_paths_hold_markup(
    setup: Setup, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")  # a table shortens what does not fit
    folder = setup.folder / "[" / "x] :warning:"  # [/x] in a path
    folder.mkdir(parents=True)
    setup.model.rename(folder / "model")
    setup.set("model.path", str(folder / "model"))
    setup.set("train.output", str(setup.folder / "list[int]"))
    setup.write()
    assert main(setup.command_lines()[0]) == 0, capfd.readouterr().err
    said = capfd.readouterr().out
    assert f"{setup.folder}/[/x] :warning:/model (llama" in said
    assert "list[int]" in said


def test_fault_of_ours_is_shown_escaped_and_bounded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    monkeypatch.setattr(sys, "argv", ["meshlora", "check", "run.yaml"])
    monkeypatch.setattr(cli, "_parser", lambda: (_ for _ in ()).throw(RuntimeError("\x1b]0;t\x07" * 10**5 + "the end")))
    with pytest.raises(RuntimeError) as caught:
        main()
    sys.excepthook(caught.type, caught.value, caught.tb)
    said = capsys.readouterr().err
    assert said.startswith("Traceback (most recent call last)")
    assert said.endswith("]0;t\\x07the end\n")
    assert "\x1b" not in said
    assert len(said) <= 20_001

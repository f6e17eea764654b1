"""`meshlora plot` and `meshlora check --plot`: what is drawn, and what is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from meshlora.cli.main import main
from meshlora_extra import plot
from meshlora_extra.plot import plot_runs, plot_schedule, read_metrics
from meshlora_ground.errors import UserError

SIGNATURES = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF", ".html": b"<!doctype html>"}


def make_run(folder: Path, *, steps: int = 6, ending: str = "") -> Path:
    folder.mkdir(parents=True)
    lines: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        lines.append({"step": step, "loss": 4 / step, "lr": 1e-3, "grad_norm": 0.5, "tokens": 100, "step_time_s": 0.25})
        if step % 3 == 0:
            lines.append({"step": step, "eval_loss": 5 / step, "eval_tokens": 50})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + ending)
    return folder


@pytest.fixture
def lines_of(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[tuple[str, list[float], list[float]]]]:
    """Panel -> (label, x, y) of each line of the picture that is saved."""
    found: dict[str, list[tuple[str, list[float], list[float]]]] = {}
    original = plot._save

    def save(figure: Any, file: Path) -> None:
        for axis in figure.axes:
            found[axis.get_title(loc="left")] = [
                (line.get_label(), list(line.get_xdata()), list(line.get_ydata())) for line in axis.lines
            ]
        original(figure, file)

    monkeypatch.setattr(plot, "_save", save)
    return found


def test_each_panel_shows_every_step_of_every_run(lines_of: dict[str, Any], tmp_path: Path) -> None:
    plot_runs([make_run(tmp_path / "one"), make_run(tmp_path / "two", steps=2)], tmp_path / "out.png")
    assert list(lines_of) == ["loss", "learning rate", "gradient norm, before clipping", "trained tokens/s"]
    steps = [1, 2, 3, 4, 5, 6]
    assert lines_of["loss"] == [
        ("one", steps, [4 / step for step in steps]),
        ("one, held out", [3, 6], [5 / 3, 5 / 6]),
        ("two", [1, 2], [4, 2]),
    ]
    assert lines_of["trained tokens/s"][1] == ("two", [1, 2], [400, 400])


def test_steps_are_marked_by_whole_numbers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    marks: list[list[float]] = []
    monkeypatch.setattr(plot, "_save", lambda figure, _: marks.extend(list(a.get_xticks()) for a in figure.axes))
    plot_runs([make_run(tmp_path / "run", steps=9)], tmp_path / "out.png")
    plot_schedule([1e-3, 5e-4, 1e-4], tmp_path / "rates.png", title="linear")
    assert len(marks) == 5
    assert all(mark == round(mark) for axis in marks for mark in axis)


@pytest.mark.parametrize("suffix", SIGNATURES)
def test_picture_is_of_the_kind_that_its_name_says(suffix: str, tmp_path: Path) -> None:
    file = tmp_path / f"out{suffix}"
    plot_schedule([1e-3, 5e-4], file, title="linear")
    assert file.read_bytes().startswith(SIGNATURES[suffix])
    assert [path.name for path in tmp_path.iterdir()] == [file.name]


def test_pixels_are_drawn(tmp_path: Path) -> None:
    plot_runs([make_run(tmp_path / "one")], tmp_path / "out.png")
    with Image.open(tmp_path / "out.png") as image:
        assert len(image.convert("RGB").getcolors(10**6) or []) > 50


def test_runs_of_one_name_are_told_apart(lines_of: dict[str, Any], tmp_path: Path) -> None:
    runs = [make_run(tmp_path / "a" / "run"), make_run(tmp_path / "b" / "run")]
    plot_runs(runs, tmp_path / "out.svg")
    assert [label for label, *_ in lines_of["learning rate"]] == [str(run) for run in runs]


def test_line_that_is_being_written_is_left_out(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", ending='{"step": 7, "lo')
    assert [step["step"] for step in read_metrics(run).steps] == [1, 2, 3, 4, 5, 6]
    assert read_metrics(run / "metrics.jsonl").name == "run"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "no step is recorded there yet"),
        ('{"step": 1}\n', "line 1: it is not a line of a run's metrics"),
        ("[1]\n", "line 1: it is not a line of a run's metrics"),
        ("no json\n", "line 1: it is not a line of a run's metrics"),
        (None, "it is no run: it has no metrics.jsonl"),
    ],
)
def test_folder_without_metrics_is_refused(content: str | None, words: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    with pytest.raises(UserError) as caught:
        plot_runs([tmp_path], tmp_path / "out.png")
    assert words in str(caught.value)
    assert not (tmp_path / "out.png").exists()


def test_name_that_is_not_there_is_said_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nowhere = str(tmp_path / "nowhere")
    assert main(["plot", nowhere, "--out", str(tmp_path / "out.png")]) == 2
    said = capsys.readouterr().err
    assert (
        said
        == f"error: {nowhere}: there is no such folder or file; give the output folder of a run, or its metrics.jsonl\n"
    )


def test_command_refuses_what_cannot_be_drawn_before_it_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = str(make_run(tmp_path / "run"))
    (tmp_path / "folder.png").mkdir()
    for out, words in (
        (tmp_path / "out.gif", "ends in one of .png, .svg, .pdf, .html"),
        (tmp_path / "nowhere" / "out.png", "there is no folder"),
        (tmp_path / "folder.png", "it is a folder"),
        (Path("/proc/out.png"), "it cannot be written"),
    ):
        assert main(["plot", run, "--out", str(out)]) == 2
        assert words in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["plot", run, "--out", str(tmp_path / "out.png")]) == 2
    assert capsys.readouterr().err == "error: pictures: they need matplotlib; pip install 'meshlora[plot]'\n"


def test_commands_say_what_they_drew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out.html"
    assert main(["plot", str(make_run(tmp_path / "run")), "--out", str(file)]) == 0
    assert capsys.readouterr().out == f"drawn: {file}\n"
    assert "<svg" in file.read_text()

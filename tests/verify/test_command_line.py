"""`meshlora verify` as a process: signals, files that cannot be written, terminals, launchers."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from meshlora.cli.main import main
from meshlora.run.launch import signals_end_what_was_started
from meshlora.verify import command
from meshlora.verify.command import NotProvedError
from meshlora.verify.options import DEFAULT_LORA, Request
from meshlora.verify.proof import Outcome, Processes, run_proof
from meshlora_ground.console import Console
from meshlora_ground.errors import MeshloraError
from tests.processes import Started, wait_until

FAMILY = ["--family", "llama", "--topology", "tp=2"]
VERIFY = ["-m", "meshlora", "verify", *FAMILY]


@pytest.mark.proof
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_during_a_proof_ends_all_ranks_and_leaves_nothing(number: signal.Signals, tmp_path: Path) -> None:
    with Started(tmp_path, *VERIFY, "--mutation", "all") as started:
        # A run has begun where the folder of the ranks has a folder in it. Others come and go meanwhile.
        wait_until(lambda: [run for folder in started.folders() for _, runs, _ in os.walk(folder) for run in runs])
        assert len(started.living()) >= 3  # the reference and two ranks
        begun = time.monotonic()
        started.process.send_signal(number)
        code, out, err = started.end()
        assert time.monotonic() - begun < 15
        if number == signal.SIGINT:
            assert (code, err) == (130, "interrupted\n")
        else:
            assert (code, err) == (128 + number, f"error: ended by signal {number:d} (SIGTERM)\n")
        assert "proved" not in out
        wait_until(lambda: not started.living(), timeout_s=10)  # multiprocessing's own tracker ends a moment later
        assert started.folders() == []


@pytest.mark.parametrize(
    ("number", "error", "code"),
    [
        (signal.SIGINT, KeyboardInterrupt, None),
        (signal.SIGTERM, MeshloraError, 143),
        (signal.SIGHUP, MeshloraError, 129),
    ],
)
def test_first_signal_raises_and_later_ones_wait_for_the_cleaning_up(
    number: signal.Signals, error: type[BaseException], code: int | None
) -> None:
    cleaned: list[int] = []
    before = signal.signal(number, signal.default_int_handler)  # tests in the background ignore some
    try:
        with pytest.raises(error) as caught:
            _end_by(number, cleaned)
    finally:
        signal.signal(number, before)
    assert cleaned == [number]
    assert getattr(caught.value, "exit_code", None) == code


def _end_by(number: signal.Signals, cleaned: list[int]) -> None:
    with signals_end_what_was_started():
        try:
            os.kill(os.getpid(), number)
            time.sleep(60)
        finally:
            for each in (signal.SIGINT, signal.SIGTERM):
                os.kill(os.getpid(), each)
            cleaned.append(number)


@pytest.mark.long
@pytest.mark.parametrize(
    "library", ["_multiarray_umath", "libtorch_python", pytest.param("tokenizers", marks=pytest.mark.proof)]
)
def test_interrupt_while_libraries_are_imported_is_one_word(library: str, tmp_path: Path) -> None:
    """The moment is when the process has mapped a file of that name, not a time: before it Python itself may start."""
    with Started(tmp_path, *VERIFY) as started:
        wait_until(lambda: library in started.maps(), pause_s=0.001)
        started.process.send_signal(signal.SIGINT)
        code, out, err = started.end()
    assert (code, out, err) == (130, "", "interrupted\n")


@pytest.fixture
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*_: object, **__: object) -> None:
        raise AssertionError("processes were started")

    monkeypatch.setattr(command, "run_proof", started)
    monkeypatch.setattr(command, "Processes", started)


@pytest.mark.usefixtures("no_process")
@pytest.mark.parametrize("option", ["--json", "--html"])
@pytest.mark.parametrize("name", ["nowhere/out", "", ".", "closed/out", "pipe"])
def test_file_that_cannot_be_written_is_refused_before_any_process_starts(
    option: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    Path("closed").mkdir()
    _refuse_files_in(tmp_path / "closed", monkeypatch)
    assert main(["verify", *FAMILY, option, name]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(f"error: {option} {name}")
    assert len(said.err.splitlines()) == 1


def _refuse_files_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modes do not stop root."""
    original = Path.touch

    def touch(self: Path, *args: Any, **options: Any) -> None:
        if self.parent == folder:
            raise PermissionError(13, "Permission denied")
        original(self, *args, **options)

    monkeypatch.setattr(Path, "touch", touch)


@pytest.mark.usefixtures("no_process")
@pytest.mark.parametrize(
    "variables",
    [
        {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"},
        {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"},
        {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "4"},
    ],
)
def test_inside_a_launcher_it_is_refused(
    variables: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("meshlora.run.edge._RANK_0_FIRST_S", 0.0)
    monkeypatch.setattr("meshlora.run.edge._end", lambda code: (_ for _ in ()).throw(SystemExit(code)))
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "word"))
    with pytest.raises(SystemExit) as ended:
        main(["verify", *FAMILY])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("error: meshlora verify as one of ")
    assert said.endswith("start it once, without torchrun or srun\n")
    assert "it starts ranks of its own" in (tmp_path / "word").read_text()


@pytest.mark.usefixtures("no_process")
def test_batch_script_of_slurm_is_no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("SLURM_NTASKS", "4")
    with pytest.raises(AssertionError, match="processes were started"):
        main(["verify", *FAMILY])


@pytest.fixture
def outcomes(processes: Processes, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """One proof for all tests here: what is shown of it, and where, is what they are about."""

    def run(proof: Any, _: Any, **__: Any) -> list[Outcome]:
        if not _CACHED:
            _CACHED.extend(run_proof(proof, processes))
        return _CACHED

    monkeypatch.setattr(command, "run_proof", run)


_CACHED: list[Outcome] = []


def _request(tmp_path: Path) -> Request:
    return Request(
        ("tp=2",),
        family="llama",
        lora=dict(DEFAULT_LORA),
        cache_dir=tmp_path / "cache",
        steps=1,
        mutations=("row_output_averaged",),
        device="cpu",
    )


@pytest.mark.long
@pytest.mark.usefixtures("outcomes")
@pytest.mark.parametrize("width", [20, 40, 80])
def test_narrow_terminal_shows_the_result(width: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(width=width, force_terminal=True)
    command.verify(_request(tmp_path), command="", html_file=str(tmp_path / "out.html"), console=console)
    said = capsys.readouterr().out
    assert "proved in" in said
    assert str(tmp_path / "out.html") in said  # a path is never folded


@pytest.mark.long
@pytest.mark.usefixtures("outcomes")
@pytest.mark.parametrize("breaks", ["write_json_atomically", "write_report"])
def test_file_that_fails_at_the_end_takes_neither_the_other_file_nor_the_result(
    breaks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(command, breaks, full)
    files = {"write_json_atomically": tmp_path / "out.json", "write_report": tmp_path / "out.html"}
    broken = files.pop(breaks)
    (whole,) = files.values()
    with pytest.raises(MeshloraError) as caught:
        command.verify(
            _request(tmp_path), command="", json_file=str(tmp_path / "out.json"), html_file=str(tmp_path / "out.html")
        )
    assert not isinstance(caught.value, NotProvedError)
    assert caught.value.exit_code == 1
    assert str(caught.value) == f"{broken}: it cannot be written (No space left on device)"
    assert whole.is_file()
    said = capsys.readouterr().out
    assert "proved in" in said
    assert ("report:" in said) == (whole.suffix == ".html")


@pytest.mark.long
@pytest.mark.usefixtures("outcomes")
def test_what_differs_is_said_before_the_file_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(command, "write_report", full)
    monkeypatch.setattr(command, "is_proved", lambda _: False)
    monkeypatch.setattr(command, "_what_differs", lambda _: "tp=2 differs")
    with pytest.raises(NotProvedError, match=r"^tp=2 differs; .*out\.html: it cannot be written"):
        command.verify(_request(tmp_path), command="", html_file=str(tmp_path / "out.html"))

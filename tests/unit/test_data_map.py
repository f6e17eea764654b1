"""`data.map`: rows that a user's function makes, on rank 0 alone, and what is said of one that fails."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from typing import Any
from unittest import mock

import pytest
from torch.distributed import HashStore

from meshlora.cli.main import main
from meshlora.run import agreement
from meshlora.run.config.file import read_run
from meshlora.run.prepared import Prepared
from meshlora.run.run import train
from meshlora.run.together import prepare_run
from meshlora_ground.errors import UserError
from tests.for_each import for_each
from tests.unit.mistakes import Setup, texts_of

MAP = """
def rows(row):
    if row["number"] == 1:
        return None
    if row["number"] == 2:
        return [{"text": row["words"] + " one"}, {"text": row["words"] + " two"}]
    return {"text": row["words"]}

def bad(row):
    return EXPRESSION
"""


def run_of(setup: Setup, expression: str = "row", **options: object) -> Prepared:
    rows = [json.dumps({"number": number, "words": f"row {number}"}) + "\n" for number in range(6)]
    (setup.folder / "train.jsonl").write_text("".join(rows))
    (setup.folder / "own.py").write_text(MAP.replace("EXPRESSION", expression))
    setup.set("data.eval", None)
    setup.set("data.map", f"{setup.folder / 'own.py'}:rows")
    return setup.prepared(**options)


def test_rows_are_what_the_function_makes_of_each(setup: Setup) -> None:
    run = run_of(setup)
    assert texts_of(run, run.train_data) == ["row 0", "row 2 one", "row 2 two", "row 3", "row 4", "row 5"]
    few = run_of(setup, data__max_samples=3)
    assert texts_of(few, few.train_data) == ["row 0", "row 2 one", "row 2 two"], "of the rows that are read"


def test_all_columns_of_a_table_are_given(setup: Setup) -> None:
    (setup.folder / "table.csv").write_text("number,words\n7,row 7\n1,row 1\n")
    (setup.folder / "by.py").write_text("def rows(row):\n    return {'text': row['words'] + row['number']}\n")
    run = run_of(setup, data__train=str(setup.folder / "table.csv"), data__map=f"{setup.folder / 'by.py'}:rows")
    assert texts_of(run, run.train_data) == ["row 77", "row 11"]


def test_rows_made_of_one_row_are_held_out_together(setup: Setup) -> None:
    for seed in range(6):
        run = run_of(setup, data__eval=2, train__seed=seed)
        held, trained = texts_of(run, run.eval_data), texts_of(run, run.train_data)
        assert len(held) + len(trained) == 6
        assert ("row 2 one" in held) == ("row 2 two" in held)


def test_the_file_and_the_function_are_part_of_the_run(setup: Setup) -> None:
    run = run_of(setup)
    assert run.identity["data.map"] == "rows"
    assert [file.name for file in run.files["data.map file"]] == ["own.py"]


def test_a_run_with_another_file_does_not_resume(setup: Setup) -> None:
    train({"": run_of(setup, train__steps=2, train__save_every=1, topology="")})
    with (setup.folder / "own.py").open("a") as file:
        file.write("# other words\n")
    with pytest.raises(UserError, match=r"it is of a run with other data\.map file"):
        prepare_run(read_run(setup.folder / "run.yaml"), resume="auto")


@for_each(
    ("expression", "words"),
    [
        ("1 / 0", r"train\.jsonl:1: data\.map=.*own\.py:bad: it raised ZeroDivisionError"),
        ("5", r"train\.jsonl:1: data\.map=.*: it returned a number"),
        ("[row, 5]", r"it returned a number"),
        ("{'text': {1, 2}}", "what it returned is not JSON"),
        ("{'text': float('nan')}", "what it returned is not JSON"),
        ("None", "it leaves out all 6 rows"),
        ("exit(3)", "it raised SystemExit"),
        ("{'nothing': 'x'}", r"train\.jsonl:1, .*nothing"),
    ],
)
def test_a_function_that_fails_is_named_with_its_row(setup: Setup, expression: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        run_of(setup, expression, data__map=f"{setup.folder / 'own.py'}:bad")


@for_each(
    ("name", "words"),
    [
        ("own:rows", r"it must be path/to/file\.py:function"),
        ("own.py", r"it must be path/to/file\.py:function"),
        ("nowhere.py:rows", r"there is no file nowhere\.py"),
        ("{folder}/own.py:none", r"has no function none"),
        ("{folder}/broken.py:rows", r"its code raised SyntaxError"),
    ],
)
def test_what_is_no_function_is_refused(setup: Setup, name: str, words: str) -> None:
    (setup.folder / "broken.py").write_text("def")
    with pytest.raises(UserError, match=words):
        run_of(setup, data__map=name.format(folder=setup.folder))


def test_streaming_is_refused(setup: Setup) -> None:
    with pytest.raises(UserError, match="what its function makes is held in memory"):
        run_of(setup, data__streaming=True)


def test_check_and_data_run_it(setup: Setup, capfd: pytest.CaptureFixture[str]) -> None:
    run_of(setup)
    assert main(["data", str(setup.folder / "run.yaml")]) == 0
    assert "data.train  6 records" in capfd.readouterr().out
    run_of(setup, "1 / 0")
    setup.set("data.map", f"{setup.folder / 'own.py'}:bad")
    setup.write()
    assert main(["check", str(setup.folder / "run.yaml")]) == 2
    assert "it raised ZeroDivisionError" in capfd.readouterr().err


def test_ranks_of_a_job_train_the_rows_of_rank_0(setup: Setup) -> None:
    """Each process would make other rows."""
    run_of(setup, train__steps=1, topology="dp=2")
    (setup.folder / "pids.py").write_text("import os\ndef rows(row):\n    return {'text': f'row {os.getpid()}'}\n")
    setup.set("data.map", f"{setup.folder / 'pids.py'}:rows")
    setup.write()
    words = [
        sys.executable,
        "-m",
        "meshlora",
        "train",
        str(setup.folder / "run.yaml"),
        "--nproc",
        "2",
        "--no-preflight",
    ]
    found = subprocess.run(words, capture_output=True, text=True, timeout=200, check=False)
    assert found.returncode == 0, found.stderr


def _on_ranks(monkeypatch: pytest.MonkeyPatch, *makes: Any) -> list[Any]:
    """What `text_of_rank_0` gives each rank, which would make the text by its own of `makes`."""
    store, here, found = HashStore(), threading.local(), [None] * len(makes)
    monkeypatch.setattr(agreement, "meet", lambda: store)
    monkeypatch.setattr(agreement, "launcher_place", lambda: mock.Mock(rank=here.rank, world=len(makes)))

    def on(rank: int) -> None:
        here.rank = rank
        try:
            found[rank] = agreement.text_of_rank_0("key", makes[rank])
        except UserError as error:
            found[rank] = error

    threads = [threading.Thread(target=on, args=[rank]) for rank in range(len(makes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return found


def test_text_is_made_on_rank_0_alone_and_is_the_same_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "_PART_BYTES", 7)
    never = mock.Mock(side_effect=AssertionError("only rank 0 runs it"))
    text = "ä" + "".join(map(str, range(200)))
    assert _on_ranks(monkeypatch, lambda: text, never, never) == [text] * 3
    never.assert_not_called()


def test_mistake_of_rank_0_is_that_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = mock.Mock(side_effect=UserError("a.jsonl:3", "it raised", "mend it"))
    found = _on_ranks(monkeypatch, wrong, mock.Mock())
    assert [str(each) for each in found] == ["a.jsonl:3: it raised; mend it"] * 2

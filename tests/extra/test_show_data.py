"""`meshlora data`: the sequences, numbers and lengths that it shows are those that a run is trained on."""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from meshlora.cli.main import main
from meshlora.reading.nlg import of_categories
from meshlora.reading.sources import read_records
from meshlora.reading.summary import parts, summary
from meshlora.reading.tokenization import tokenize
from meshlora_extra.commands.data import show_sequence
from meshlora_ground.console import Console
from tests.unit.mistakes import Setup
from tests.unit.records import END, MARKED, TWO_TURNS, chat, make_tokenizer, pair
from tests.unit.test_data_turns import PROMPTS_THOUGHT


def test_trained_parts_are_marked_and_numbers_are_those_of_the_run(
    setup: Setup, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    setup.data(
        {"prompt": "def f():", "completion": " return \u001b[31mf"},
        {"prompt": "def g():", "completion": " return g" * 90},
    )
    run = setup.prepared(data__too_long="drop").train_data
    files = [str(tmp_path / "numbers.json"), str(tmp_path / "lengths.png")]
    main(["data", str(setup.folder / "run.yaml"), "--show", "3", "--json", files[0], "--plot", files[1]])
    printed = capsys.readouterr().out
    assert "sequence 0:" in printed
    assert "sequence 1:" not in printed
    assert "def f():⟦ return \\x1b[31mf" in printed
    assert "2 records, 1 longer than max_length=64, 1 left out" in printed
    found = json.loads(Path(files[0]).read_text())
    assert (found["tokens"], found["trained_tokens"]) == (len(run.input_ids), run.num_trained_tokens)
    assert (found["records"], found["too_long"], found["dropped"], found["sequences"]) == (2, 1, 1, 1)
    assert Path(files[1]).read_bytes().startswith(b"\x89PNG")
    main(["data", str(setup.folder / "run.yaml"), "--eval", "--show", "0"])
    assert "data.eval" in capsys.readouterr().out


def test_parts_are_all_tokens_in_order_and_the_first_is_no_target() -> None:
    tokenizer = make_tokenizer(chat_template=MARKED)
    data = tokenize([TWO_TURNS, pair("", "near the river")], tokenizer, max_length=256)
    for index in range(2):
        found = parts(data, index)
        assert [token for _, ids in found for token in ids] == data[index].input_ids.tolist()
        assert all(one[0] != other[0] for one, other in itertools.pairwise(found))
    assert [is_trained for is_trained, _ in parts(data, 1)] == [False, True]
    assert sum(len(ids) for n in range(2) for is_trained, ids in parts(data, n) if is_trained) == (
        data.num_trained_tokens
    )


@pytest.mark.parametrize("is_terminal", [True, False])
def test_words_that_the_template_leaves_out_are_struck_through_or_stand_above(is_terminal: bool) -> None:
    tokenizer, file = make_tokenizer(chat_template=PROMPTS_THOUGHT, eos=END), io.StringIO()
    records = [TWO_TURNS, chat(("user", "hi"), ("assistant", "<think>\nwhy not</think>hello"))]
    data = tokenize(records, tokenizer, max_length=256, lost_text="note")
    for index in range(2):
        show_sequence(data, index, tokenizer, Console(file=file, force_terminal=is_terminal, width=200))
    shown = file.getvalue()
    if is_terminal:
        assert shown.count("\x1b[9;31m") == 1
        _, _, after = shown.partition("\x1b[9;31mwhy not\x1b[0m")
        assert after.startswith("\x1b[1;32mhello")
    else:
        assert 'trained; left out by the chat template: ["why not"]\n' in shown
        assert "assistant\n⟦hello<|end|>⟧" in shown


@pytest.mark.parametrize("lengths", [[3], [2, 3, 50, 51], [7] * 5, list(range(2, 200))])
def test_every_length_is_in_the_bin_that_names_it(lengths: list[int]) -> None:
    text = "the " * 300
    records = [pair("a", text) for _ in lengths]
    data = tokenize(records, make_tokenizer(), max_length=400)
    ids = [data[0].input_ids[:length] for length in lengths]
    data = dataclasses.replace(
        data,
        input_ids=np.concatenate(ids),
        is_trained=np.ones(sum(lengths), dtype=bool),
        offsets=np.cumsum([0, *lengths]),
    )
    found = summary(data)
    assert [sum(first <= length <= last for length in lengths) for first, last, _ in found.bins] == [
        number for *_, number in found.bins
    ]
    assert sum(number for *_, number in found.bins) == len(lengths)
    assert len(found.bins) <= 12


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--show", "-1"], "must not be negative"),
        (["--plot", "x.bmp"], "a picture ends in one of"),
        (["--json", "nowhere/x.json"], "nowhere"),
    ],
)
def test_wrong_request_is_one_line(
    setup: Setup, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    setup.write()
    assert main(["data", str(setup.folder / "run.yaml"), *words]) == 2
    assert message in capsys.readouterr().err


def test_held_out_records_are_those_that_are_evaluated(setup: Setup, tmp_path: Path) -> None:
    webnlg = Path(__file__).parents[1] / "recorded" / "webnlg.json"
    number = len(of_categories(read_records(webnlg), "unseen"))
    file = tmp_path / "numbers.json"
    options = [
        "--set",
        f"data.eval={webnlg}",
        "--set",
        "data.eval_categories=unseen",
        "--set",
        "data.train_on=everything",
        "--set",
        "data.too_long=truncate",
    ]
    setup.write()
    main(["data", str(setup.folder / "run.yaml"), "--eval", "--show", "0", "--json", str(file), *options])
    assert 0 < number < len(read_records(webnlg))
    assert json.loads(file.read_text())["records"] == number

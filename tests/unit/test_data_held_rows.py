"""`data.eval` as a part of the training data: which rows it has, that none is trained, on any mesh, after resuming."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshlora.cli.main import main
from meshlora.reading.held_rows import held_rows, split_off
from meshlora.run.config.file import read_run, read_runs
from meshlora.run.run import train
from meshlora.run.together import prepare_run, prepare_runs
from meshlora_ground.dataset import TokenizedDataset
from meshlora_ground.errors import UserError
from meshlora_ground.further_inputs import KnownInputs
from tests.for_each import for_each
from tests.unit.mistakes import Setup
from tests.unit.saved import save_steps


def dataset(*rows: str, **more: Any) -> TokenizedDataset:
    """A sequence of one or more tokens for each of `rows`, which names the row it is of."""
    offsets = np.cumsum([0, *(1 + place % 3 for place in range(len(rows)))])
    ids = np.arange(offsets[-1], dtype=np.int32)
    return TokenizedDataset(ids, ids % 2 == 0, offsets, origins=list(rows), **more)


def names(*numbers: int, file: str = "a") -> list[str]:
    return [f"{file}:{number}" for number in numbers]


def words_of(data: TokenizedDataset | None) -> list[list[int]]:
    assert data is not None
    return [sequence.input_ids.tolist() for sequence in data]


@for_each(("wanted", "number"), [(0.05, 5), (0.041, 5), (0.07, 7), (8, 8)])
def test_a_share_is_rounded_up_exactly_and_a_number_is_one(wanted: float, number: int) -> None:
    assert len(held_rows([dataset(*names(*range(100)))], wanted, seed=3)) == number


def test_rows_depend_on_the_seed_and_the_rows_alone() -> None:
    rows = names(*range(40))
    found = held_rows([dataset(*rows)], 10, seed=1)
    assert held_rows([dataset(*rows, rows_per_example=1)], 10, seed=1) == found
    assert held_rows([dataset(*rows)], 10, seed=2) != found
    # Recorded, on purpose: a change here trains what a run that is resumed has held out.
    assert sorted(held_rows([dataset(*names(*range(9)))], 3, seed=0)) == RECORDED


RECORDED = ["a:1", "a:5", "a:7"]


@for_each(
    ("more", "rows"),
    [
        ({}, names(0, 0, 0, 1, 2, 2, 3, 4)),
        ({"rows_per_example": 2}, names(0, 0, 1, 1, 2, 2, 3, 3)),
        ({"examples": np.array([0, 3, 4, 6, 8])}, names(0, 0, 0, 1, 2, 2, 3, 3)),
        ({}, names(0, 1, 2, 3, 0, 1, 2, 3)),
    ],
    ["windows of a text", "both texts of a pair", "answers apart", "a file given twice"],
)
def test_what_one_row_has_become_is_on_one_side(more: dict[str, Any], rows: list[str]) -> None:
    data = dataset(*rows, **more)
    ids = np.array([name for name, length in zip(rows, np.diff(data.offsets), strict=True) for _ in range(length)])
    for seed in range(6):
        held = held_rows([data], 2, seed=seed)
        assert len(held) == 2
        (trained,), (evaluated,) = split_off([data], held)
        assert {*ids[evaluated.input_ids]} == held
        assert not {*ids[trained.input_ids]} & held
        both = np.concatenate([trained.input_ids, evaluated.input_ids])
        assert sorted(both) == data.input_ids.tolist(), "every token is on one side"
        assert trained.num_examples + evaluated.num_examples == data.num_examples


def test_what_belongs_to_a_sequence_goes_with_it() -> None:
    rows = names(*range(6))
    base = dataset(*rows)
    size = len(base.input_ids)
    data = dataset(
        *rows,
        columns={"weight": np.arange(size, dtype=np.float32)},
        targets=np.arange(6.0)[:, None],
        sources=np.arange(6) * 10,
        routed=np.arange(size)[:, None, None],
        further=KnownInputs([{"number": np.array(index)} for index in range(6)]),
        lost_words=lambda index: [(index, "lost")],
    )
    found = data.chosen(np.array([4, 1]))
    assert [sequence.input_ids.tolist() for sequence in found] == [
        data[4].input_ids.tolist(),
        data[1].input_ids.tolist(),
    ]
    assert found.is_trained.tolist() == [*data[4].is_trained, *data[1].is_trained]
    assert found.columns["weight"].tolist() == found.input_ids.tolist()
    assert found.routed is not None
    assert found.routed.ravel().tolist() == found.input_ids.tolist()
    assert found.targets is not None
    assert found.sources is not None
    assert (found.targets.tolist(), found.sources.tolist()) == ([[4.0], [1.0]], [40, 10])
    assert [int(found[index].more()["number"]) for index in range(2)] == [4, 1]
    assert found.lost_words is not None
    assert found.lost_words(0) == [(4, "lost")]


@for_each(
    ("counts", "wanted", "quotas"),
    [
        ((60, 30, 10), 10, [6, 3, 1]),
        ((97, 2, 2), 3, [1, 1, 1]),
        ((50, 1), 5, [5, 0]),
        ((10, 10, 10), 2, [1, 1, 0]),
        ((2, 3, 1), 3, [1, 2, 0]),
    ],
    ["by size", "represented", "of a row alone none", "fewer than sources", "all but one each"],
)
def test_each_source_gives_its_share_and_one_at_least_if_it_can(
    counts: tuple[int, ...], wanted: int, quotas: list[int]
) -> None:
    found = [dataset(*names(*range(count), file=f"{source}")) for source, count in enumerate(counts)]
    held = held_rows(found, wanted, seed=0)
    assert [sum(name.startswith(f"{source}:") for name in held) for source in range(len(counts))] == quotas


def test_sources_of_one_size_have_a_choice_of_their_own() -> None:
    held = held_rows([dataset(*names(*range(30))), dataset(*names(*range(30), file="b"))], 12, seed=0)
    numbers = [{name[2:] for name in held if name[0] == file} for file in "ab"]
    assert numbers[0] != numbers[1]


def test_a_row_of_two_sources_is_held_out_of_both() -> None:
    found = [dataset(*names(0, 1, 2, 3)), dataset(*names(2, 3, 4, 5))]
    for seed in range(4):
        held = held_rows(found, 3, seed=seed)
        trained, _ = split_off(found, held)
        for data, rows in zip(trained, (names(0, 1, 2, 3), names(2, 3, 4, 5)), strict=True):
            assert data.num_examples == len({*rows} - held)


def test_nothing_left_to_train_is_refused() -> None:
    data = dataset(*names(0, 1, 2))
    for wanted in (3, 0.9):
        with pytest.raises(UserError, match=rf"data\.eval={wanted} of 3 rows: each source keeps a row"):
            held_rows([data], wanted, seed=0)
    assert len(held_rows([data], 2, seed=0)) == 2


@for_each("options", [{}, {"data__too_long": "split", "data__max_length": 24}], ["plain", "windows"])
def test_rows_are_those_of_one_process_on_every_mesh(setup: Setup, options: dict[str, Any]) -> None:
    whole = setup.prepared(data__eval=None, train__seed=0, **options)
    run = setup.prepared(data__eval=0.25, **options)
    assert sorted(words_of(run.train_data) + words_of(run.eval_data)) == sorted(words_of(whole.train_data))
    for topology in ("dp=2,tp=2", "tp=2,sp", "cp=2"):
        other = setup.prepared(topology=topology)
        assert words_of(other.eval_data) == words_of(run.eval_data)
        assert words_of(other.train_data) == words_of(run.train_data)
        assert {**other.identity} == {**run.identity}
    assert words_of(setup.prepared(train__seed=3).eval_data) != words_of(run.eval_data)


def test_another_split_is_other_data_for_a_run_that_resumes(setup: Setup) -> None:
    run = setup.prepared(data__eval=0.25)
    save_steps(setup.folder / "output", 2, steps=4, identity=run.identity)
    for changed in ({"data__eval": 0.5}, {"data__eval": str(setup.folder / "train.jsonl")}):
        for name, value in changed.items():
            setup.set(name.replace("__", "."), value)
        setup.write()
        with pytest.raises(UserError, match=r"it is of a run with other data\.eval: 0\.25 of the rows there"):
            prepare_run(read_run(setup.folder / "run.yaml"), resume="auto")


def test_each_adapter_has_a_split_of_its_own_seed(setup: Setup) -> None:
    alone = {seed: words_of(setup.prepared(data__eval=0.25, train__seed=seed).eval_data) for seed in (0, 1)}
    setup.set("adapters", {"one": {"train": {"seed": 0}}, "other": {"train": {"seed": 1}}})
    setup.write()
    runs = prepare_runs(read_runs(setup.folder / "run.yaml"))
    assert [words_of(run.eval_data) for run in runs.values()] == [alone[0], alone[1]]
    assert alone[0] != alone[1]


def test_sources_with_weights_are_drawn_without_their_held_out_rows(setup: Setup) -> None:
    for name, number in (("a", 8), ("b", 4)):
        rows = [json.dumps({"text": f"{name} {index}"}) + "\n" for index in range(number)]
        (setup.folder / f"{name}.jsonl").write_text("".join(rows))
    sources = [{"path": str(setup.folder / f"{name}.jsonl"), "weight": 1.0} for name in "ab"]
    run = setup.prepared(data__train=sources, data__eval=3)
    assert run.train_data.parts == ((6, 1.0), (3, 1.0))
    assert run.eval_data is not None
    assert (run.eval_data.num_examples, run.eval_data.parts) == (3, ())
    assert not {*map(tuple, words_of(run.train_data))} & {*map(tuple, words_of(run.eval_data))}


@for_each(
    ("options", "words"),
    [
        ({"data__eval": 1.5}, r"data\.eval=1\.5: it must be a share of the rows"),
        ({"data__eval": 0}, r"data\.eval=0: it must be a share of the rows"),
        ({"data__eval": True}, r"data\.eval: True"),
        ({"data__eval": 0.5, "data__streaming": True}, "are not cut"),
        ({"data__eval": 0.5, "data__eval_categories": "seen"}, "are those of the training data"),
        ({"data__eval": 0.5, "train__objective": {"kind": "policy"}}, "of one prompt are compared"),
    ],
    ["share", "none", "truth", "streaming", "categories", "rollouts"],
)
def test_what_cannot_be_held_out_is_refused(setup: Setup, options: dict[str, Any], words: str) -> None:
    nothing: dict[str, Any] = {"data__streaming": False, "data__eval_categories": "all"}
    with pytest.raises(UserError, match=words):
        setup.prepared(**nothing | options)


def test_samples_continue_prompts_that_are_held_out(setup: Setup) -> None:
    run = setup.prepared(data__eval=2, train__sample_every=2)
    assert run.samples is not None
    lines = [json.loads(line) for line in (setup.folder / "train.jsonl").read_text().splitlines()]
    tokens = {line["prompt"]: index for index, line in enumerate(lines)}
    assert len(run.samples.prompts) == 2
    held = words_of(run.eval_data)
    for encoded in run.samples.encoded:
        assert any(sequence[: len(encoded)] == list(encoded) for sequence in held)
    assert {*run.samples.prompts} < {*tokens}


def test_data_shows_each_side(setup: Setup, capsys: pytest.CaptureFixture[str]) -> None:
    setup.prepared(data__eval=0.25)
    numbers = []
    for words in ([], ["--eval"]):
        out = setup.folder / "numbers.json"
        assert main(["data", str(setup.folder / "run.yaml"), "--show", "0", "--json", str(out), *words]) == 0
        numbers.append(json.loads(out.read_text())["examples"])
    assert numbers == [6, 2]
    assert "data.eval: 2 rows are held out (train.seed 0): 2 examples" in capsys.readouterr().out


def test_evaluate_scores_the_rows_that_its_run_held_out_and_no_others(
    setup: Setup, capfd: pytest.CaptureFixture[str]
) -> None:
    out = setup.folder / "result.json"
    run = setup.prepared(data__eval=2)
    evaluate = ["evaluate", str(setup.folder / "run.yaml"), "--json", str(out)]
    assert main([*evaluate, "--base"]) == 0
    by_share = json.loads(out.read_text())
    lines = (setup.folder / "train.jsonl").read_text().splitlines()
    tokens = words_of(setup.prepared(data__eval=None).train_data)
    held = [line for line, own in zip(lines, tokens, strict=True) if own in words_of(run.eval_data)]
    (setup.folder / "held.jsonl").write_text("\n".join(held))
    assert main([*evaluate, "--base", "--data", str(setup.folder / "held.jsonl")]) == 0
    of_file = json.loads(out.read_text())
    assert (by_share["examples"], by_share["loss"]) == (2, of_file["loss"])
    assert by_share["data"] == "2 of the rows of data.train"


def test_evaluate_refuses_a_split_that_its_run_has_not_held_out(
    setup: Setup, capfd: pytest.CaptureFixture[str]
) -> None:
    train({"": setup.prepared(data__eval=2, train__steps=1, train__batch_size=2, topology="")})
    file = str(setup.folder / "run.yaml")
    assert main(["evaluate", file]) == 0
    capfd.readouterr()
    assert main(["evaluate", file, "--set", "train.seed=3"]) == 2
    assert "held out other rows, so that it may have been trained on these" in capfd.readouterr().err
    card = Path(setup.folder / "output" / "adapter" / "README.md").read_text()
    assert "| held out | 2 of its rows, drawn by the seed: loss " in card

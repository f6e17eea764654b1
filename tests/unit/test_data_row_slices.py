"""Which rows of a source are read, and in which order they are trained: `rows`, `max_samples`, `shuffle`."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest

from meshlora.reading.row_slices import Chosen, Slice
from meshlora.reading.sources import read_records
from meshlora.run.config.file import read_run
from meshlora_ground.errors import UserError
from tests.for_each import for_each
from tests.unit.mistakes import Setup, texts_of


def texts(folder: Path, **files: int) -> list[str]:
    """Files of as many rows, each of which says the file and its number."""
    for name, number in files.items():
        rows = [json.dumps({"text": f"{name} {index}"}) + "\n" for index in range(number)]
        (folder / f"{name}.jsonl").write_text("".join(rows))
    return [str(folder / f"{name}.jsonl") for name in files]


def read(paths: Any, rows: str, most: int | None = None) -> list[str]:
    return [record.text or "" for record in read_records(Chosen(paths, Slice(rows, most)))]


@for_each("rows", [":", "2:5", ":3", "7:", "-3:", ":-4", ":25%", "25%:", "50%:75%", "33%:66%", "-6:50%", "8:100"])
def test_a_slice_is_that_of_python_or_of_datasets(tmp_path: Path, rows: str) -> None:
    files = texts(tmp_path, a=7, b=6)
    every = [f"a {index}" for index in range(7)] + [f"b {index}" for index in range(6)]
    if "%" in rows and "-" not in rows:
        table = datasets.Dataset.from_dict({"text": every})
        table.to_parquet(str(tmp_path / "all.parquet"))
        data = datasets.load_dataset(
            "parquet",
            data_files=str(tmp_path / "all.parquet"),
            split=f"train[{rows}]",
            cache_dir=str(tmp_path / "cache"),
        )
        expected = data["text"][:] if len(data) else []
    else:
        bounds = [
            round(int(each[:-1]) * 13 / 100) if each.endswith("%") else int(each or -99) for each in rows.split(":")
        ]
        start, stop = (None if bound == -99 else bound for bound in bounds)
        expected = every[start:stop]
    if not expected:
        with pytest.raises(UserError, match="there are none"):
            read(files, rows)
        return
    assert read(files, rows) == list(expected)


def test_no_row_behind_the_last_is_read(tmp_path: Path) -> None:
    (file,) = texts(tmp_path, a=4)
    with open(file, "a") as opened:
        opened.write("{broken\n")
    assert read([file], ":4") == [f"a {index}" for index in range(4)]
    assert read([file], "1:4", 2) == ["a 1", "a 2"]
    assert read([file, str(tmp_path / "a.jsonl")], "", 3) == ["a 0", "a 1", "a 2"]
    with pytest.raises(UserError, match="bad JSON"):
        read([file], ":5")


@for_each("rows", ["5", "a:b", "1:2:3", ":101%", "1.5:", ":-5%", "::"])
def test_what_is_no_slice_is_refused(rows: str) -> None:
    with pytest.raises(UserError, match=r"rows: .*it is START:STOP"):
        Slice(rows)


def test_rows_of_a_source_are_those_of_the_run_file(setup: Setup) -> None:
    a, b = texts(setup.folder, a=6, b=4)
    setup.drop("data.eval")
    run = setup.prepared(data__train=[{"path": a, "rows": "2:4"}, {"path": b, "rows": "50%:"}])
    assert texts_of(run, run.train_data) == ["a 2", "a 3", "b 2", "b 3"]
    alone = setup.prepared(data__train={"path": a, "rows": ":2"})
    assert texts_of(alone, alone.train_data) == ["a 0", "a 1"]


def test_at_most_so_many_rows_of_each_source_are_read(setup: Setup) -> None:
    a, b = texts(setup.folder, a=6, b=4)
    run = setup.prepared(data__train=[a, b], data__eval=b, data__max_samples=2)
    assert texts_of(run, run.train_data) == ["a 0", "a 1", "b 0", "b 1"]
    assert texts_of(run, run.eval_data) == ["b 0", "b 1"]
    run = setup.prepared(data__train=[{"path": [a, b], "rows": "5:"}], data__max_samples=3)
    assert texts_of(run, run.train_data) == ["a 5", "b 0", "b 1"], "several files of one source"


def test_only_the_first_rows_are_streamed(setup: Setup) -> None:
    (a,) = texts(setup.folder, a=6)
    run = setup.prepared(data__train=a, data__max_samples=4, data__streaming=True)
    assert texts_of(run, run.train_data) == ["a 0", "a 1", "a 2", "a 3"]


def test_one_source_alone_has_its_own_columns(setup: Setup) -> None:
    file = setup.folder / "own.jsonl.gz"
    file.write_bytes(gzip.compress(json.dumps({"question": "a", "answer": " b", "text": "t"}).encode()))
    setup.drop("data.eval")
    own = {"path": str(file), "columns": {"prompt": "question", "completion": "answer"}}
    run = setup.prepared(data__train=own)
    assert texts_of(run, run.train_data) == ["a b"]


@for_each("streams", [False, True])
def test_epochs_have_the_order_of_the_files_where_nothing_is_shuffled(setup: Setup, streams: bool) -> None:
    files = texts(setup.folder, a=5, b=2)
    run = setup.prepared(
        data__train=files, data__shuffle=False, data__streaming=streams, train__batch_size=3, train__steps=6
    )
    assert run.batches.steps_per_epoch == 3
    drawn = [run.batches.batch(step) for step in range(6)]
    assert np.concatenate(drawn).tolist() == [*range(7), *range(7)]
    assert [len(batch) for batch in drawn[:3]] == [3, 3, 1]
    assert run.batches.batch(4).tolist() == [3, 4, 5], "as of a run that resumes"
    shuffled = setup.prepared(data__shuffle=True)
    assert shuffled.identity != run.identity, "a run in another order is another run"


def test_sources_with_weights_have_no_order_of_their_own(setup: Setup) -> None:
    files = texts(setup.folder, a=5, b=2)
    sources = [{"path": file, "weight": 1.0} for file in files]
    with pytest.raises(UserError, match=r"data\.shuffle=false with weights of sources: sources with weights are drawn"):
        setup.prepared(data__train=sources, data__shuffle=False)


def test_length_is_that_of_the_models_positions(setup: Setup) -> None:
    setup.config(max_position_embeddings=96)
    run = setup.prepared(data__max_length="model")
    assert run.config.data.max_length == 96
    long = {"text": "word " * 300}
    setup.data(long)
    run = setup.prepared(data__eval=None)
    assert len(run.train_data[0].input_ids) == 96
    setup.config(max_position_embeddings=48)
    assert len(setup.prepared().train_data[0].input_ids) == 48, "the cache knows the length"
    setup.family("bloom")
    with pytest.raises(
        UserError, match=r"data\.max_length=model: the config\.json of .* has no max_position_embeddings"
    ):
        read_run(setup.folder / "run.yaml")


def test_length_of_a_composite_is_that_of_its_text(setup: Setup) -> None:
    from meshlora_judge.twin import twin_config

    twin_config("qwen2_vl").save_pretrained(setup.model)
    setup.set("data.max_length", "model")
    setup.write()
    config = twin_config("qwen2_vl").get_text_config()
    assert read_run(setup.folder / "run.yaml").data.max_length == config.max_position_embeddings

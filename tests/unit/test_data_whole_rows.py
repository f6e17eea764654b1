"""`data.packing: rows`: rows of all of the data are TRL's, and are what a step counts."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from trl.data_utils import pack_dataset

from meshlora.reading.whole_rows import best_fit_rows
from meshlora.run.run import train
from meshlora_ground.errors import UserError
from tests.run_files import metrics_of
from tests.unit.mistakes import Setup


def test_rows_are_those_of_trl() -> None:
    import datasets

    random = np.random.default_rng(0)
    for row_length in (16, 100, 129):
        lengths = random.integers(1, row_length + 1, size=200).tolist()
        texts = [[number] * length for number, length in enumerate(lengths)]
        table = datasets.Dataset(pa.table({"input_ids": texts}))
        packed = pack_dataset(table, row_length, strategy="bfd")["input_ids"]
        theirs = [list(dict.fromkeys(row)) for row in packed]
        assert best_fit_rows(lengths, row_length) == theirs


def test_a_row_is_what_a_step_counts(setup: Setup) -> None:
    alone = setup.prepared(
        data__packing=True, train__steps=None, train__epochs=2, train__batch_size=2, data__max_length=24
    )
    run = setup.prepared(data__packing="rows")
    data = run.train_data
    assert data.examples is not None
    assert sorted(one.input_ids.tolist() for one in data) == sorted(one.input_ids.tolist() for one in alone.train_data)
    tokens = np.add.reduceat(np.diff(data.offsets), data.examples[:-1])
    assert tokens.max() <= 24
    assert data.num_examples < len(data)
    assert run.steps == 2 * -(-data.num_examples // 2)
    assert run.config.data.packing is True
    assert setup.prepared(topology="dp=2,tp=2").identity == run.identity
    assert run.identity["data"] != alone.identity["data"]


def test_a_step_has_the_loss_of_its_sequences_one_by_one(setup: Setup) -> None:
    """All rows in one step: the same tokens as all sequences in one."""
    losses = []
    for packing, size in (("rows", 1000), (False, 1000)):
        setup.set("train.overwrite", True)
        run = setup.prepared(
            data__packing=packing,
            data__max_length=24,
            data__eval=None,
            model__dtype="float64",
            train__batch_size=size,
            train__steps=2,
            topology="",
        )
        train({"": run})
        losses.append([line["loss"] for line in metrics_of(setup.folder / "output")])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_weights_and_streams_are_refused(setup: Setup) -> None:
    with pytest.raises(UserError, match="its rows are made of all of the data, once"):
        setup.prepared(data__packing="rows", data__streaming=True)
    with pytest.raises(UserError, match="a pair is two rows"):
        setup.prepared(data__streaming=False, train__objective={"kind": "dpo"})

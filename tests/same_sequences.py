"""What `meshlora train` reads of one file and `meshlora evaluate --data` of another are the same sequences."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from meshlora.cli.main import _parser
from meshlora.loading.blueprint import read_model_config
from meshlora.run.config.file import read_run
from meshlora.run.config.run_file import RunConfig
from meshlora.run.texts import Texts
from meshlora_extra.commands import evaluate
from meshlora_ground.dataset import TokenizedDataset


def assert_same_sequences(run: Path, trained: Path, evaluated: Path) -> None:
    ours = read_run(run, [f"data.train={trained}"])
    theirs = evaluate._config(_parser().parse_args(["evaluate", str(run), "--data", str(evaluated)]), None)
    first, second = _read(ours, ours.data.train), _read(theirs, theirs.data.eval)
    assert first.arrays.keys() == second.arrays.keys()
    for name, array in first.arrays.items():
        assert np.array_equal(array, second.arrays[name]), name


def _read(config: RunConfig, given: object) -> TokenizedDataset:
    model = read_model_config(config.model.path)
    texts = Texts(config.model, config.data, config.train.objective)
    return texts.read(given, texts.tokenizer(), model)  # type: ignore[arg-type] # of either kind

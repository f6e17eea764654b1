"""A run file's run as transformers + peft train it on one process: what every mesh is compared with."""

from __future__ import annotations

from pathlib import Path

from meshlora.run.config.file import read_run
from meshlora.run.together import prepare_run
from meshlora.verify.alone import reference_run


def train_alone(file: Path, *, initial: Path, out: Path) -> list[float]:
    """Train from the adapter in `initial`, save it to `out`; returns the losses. An output of `file` is left alone."""
    run = prepare_run(read_run(file, ["train.overwrite=true"]))
    return reference_run(
        run.config, run.train_data, steps=run.steps, pad_token_id=run.pad_token_id, adapter=initial, out=out
    )

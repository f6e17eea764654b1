"""A run on one process, by the judge (`meshlora_judge.reference`): its values, made of those of a run file."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from pathlib import Path
from typing import Any

from meshlora.run.config.run_file import RunConfig
from meshlora_ground.dataset import TokenizedDataset
from meshlora_ground.errors import UnsupportedError
from meshlora_judge import reference
from meshlora_judge.settings import Base, Training


def reference_run(
    config: RunConfig,
    data: TokenizedDataset,
    *,
    steps: int,
    pad_token_id: int,
    adapter: str | Path,
    out: str | Path,
    dropouts: Collection[str] = (),
) -> list[float]:
    """A whole run on one process: start from `adapter`, save with peft to `out`, return the losses.

        losses = meshlora.reference_run(
            config, prepared.data, steps=20, pad_token_id=0, adapter="runs/mine/initial", out="alone"
        )

    The sequences are the run's; everything else is transformers, peft and torch. dropouts: configuration fields of the
    model whose dropout stays on.

    Raises:
        UnsupportedError: the run takes its data in an order that the reference does not draw.
    """
    given = "sources of data.train with weights" if data.parts else "data.shuffle=false"
    if data.parts or not config.data.shuffle:
        rule = "the reference draws its own order, of all examples in each epoch"
        raise UnsupportedError(f"{given} in reference_run", rule, "leave it out, or compare with a run on one process")
    return reference.reference_run(
        Base(**_values_of(Base, config.model)),
        Training(**_values_of(Training, config.train) | {"steps": steps}),
        data,
        pad_token_id=pad_token_id,
        adapter=adapter,
        out=out,
        compared_with=config.reference,
        dropouts=dropouts,
    )


def _values_of(kind: Any, group: object) -> dict[str, Any]:
    """The fields of `kind` as a group of a run file has them, all of them."""
    return {field.name: getattr(group, field.name) for field in dataclasses.fields(kind)}

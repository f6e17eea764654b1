"""Adapters that begin as the data of the run say: their factors, before the first step.

Owns: which data these are: the steps of the first epoch, in the run's order. Does not own: what becomes of them
(`wings.starts.eva`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

from meshlora.adapter.attach import runtime
from meshlora.adapter.initialization import start_of
from meshlora.run.prepared import Prepared
from meshlora.train.batches import Batching, Step
from meshlora.wings.starts.eva import initialize_eva


def begun(run: Prepared, model: Any, adapter: str) -> Prepared:
    """`run`, whose adapter has begun in `model`: with another plan, if it looks at data first. Collective then."""
    state = runtime(model)
    planned = state.adapters[adapter].plan
    if planned.folder is not None or not start_of(planned.config).looks_at_data:
        return run
    # Not packed: each token has the input that it has in a row of its own.
    batching = Batching(
        state.mesh, run.config.train.micro_batch_size, run.pad_token_id, balances=state.context.balances
    )
    batches, data = run.batches, run.train_data

    def step(number: int) -> Step:
        return data, data.rows_of(batches.batch(number))

    plan = initialize_eva(model, adapter, batching, batches.steps_per_epoch, step)
    return dataclasses.replace(run, blueprint=dataclasses.replace(run.blueprint, adapter=plan))

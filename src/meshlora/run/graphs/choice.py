"""Whether a run replays its micro-batches, before it starts: `train.cuda_graphs`.

Owns: what `auto` becomes, and what a record needs of the machine, the model and the rows. Does not own: what records do
not go with (`plan.pairs`); what nobody knows before a micro-batch is recorded (`run.graphs.graphs`).
"""

from __future__ import annotations

import dataclasses

import numpy as np

from meshlora.loading.blueprint import Blueprint
from meshlora.model.padding import is_causal
from meshlora.plan.features import Asked
from meshlora.plan.pairs import refusal
from meshlora.run.config.run_file import RunConfig
from meshlora.run.graphs.buckets import rounded_up
from meshlora.run.graphs.recorder import recorder
from meshlora.wings.experts.recorded import why_host_asks
from meshlora.wings.packed_rows.varlen import why_none
from meshlora_ground.dataset import TokenizedDataset
from meshlora_ground.errors import UserError


def with_graphs(
    config: RunConfig, blueprint: Blueprint, data: TokenizedDataset, asked: Asked
) -> tuple[RunConfig, tuple[str, ...]]:
    """The run, with `off` for an `auto` that comes to that, and what is to be said of it.

    asked: for, by the run, its model and its data.

    Raises:
        UserError: on, and there is no GPU, or the host would read it. UnsupportedError: on, beside what has no record.
    """
    wanted = config.train.cuda_graphs
    if wanted == "off":
        return config, ()
    error: UserError | None = refusal({**asked, "train.cuda_graphs": "on"})
    if error is None and not is_causal(blueprint.model, blueprint.plan):
        rule = f"{blueprint.plan.model_type} must be told where padding is, by a mask that the host reads"
        error = UserError("train.cuda_graphs=on", rule, "leave it out")
    if error is None and (config.device == "cpu" or recorder() is None):
        error = UserError("train.cuda_graphs=on", "CPUs record no kernels", "leave it out, or train on a GPU")
    if error is None and (why := why_host_asks(blueprint)) is not None:
        error = UserError("train.cuda_graphs=on", why, "leave it out")
    if error is None and config.data.packing is not False:
        why = why_none(blueprint.model, blueprint.dtype, _longest_row(config, data))
        if why is not None:
            rule = f"attention of joined rows has no kernel that takes all sequences at once: {why}"
            error = UserError("train.cuda_graphs=on", rule, "set data.packing: false, or leave it out")
    if error is None:
        said = "forward and backward of a micro-batch are replayed as a CUDA graph, from the second of its length on"
        return config, (f"train.cuda_graphs: {said}; evaluations run without",)
    if wanted == "on":
        raise error
    train = dataclasses.replace(config.train, cuda_graphs="off")
    beside = f": {error.given}".removeprefix(": train.cuda_graphs=on")  # nobody gave it
    said = f"train.cuda_graphs: auto: micro-batches run eagerly{beside}: {error.rule}"
    return dataclasses.replace(config, train=train), (said,)


def _longest_row(config: RunConfig, data: TokenizedDataset) -> int:
    """Tokens of the longest row that can come, its padding included."""
    if config.data.packing is True:
        return rounded_up(config.data.longest)
    return rounded_up(int(np.sort(np.diff(data.offsets))[-config.train.micro_batch_size :].sum()))

"""Whether a run replays its micro-batches, before it starts: `train.cuda_graphs`.

Owns: what `auto` becomes, and that a GPU is needed. Does not own: what records do not go with (`plan.pairs`).
"""

from __future__ import annotations

import dataclasses

from meshlora.loading.blueprint import Blueprint
from meshlora.model.padding import is_causal
from meshlora.plan.features import Asked
from meshlora.plan.pairs import refusal
from meshlora.run.config.run_file import RunConfig
from meshlora.run.graphs.recorder import recorder
from meshlora_ground.errors import UserError


def with_graphs(config: RunConfig, blueprint: Blueprint, asked: Asked) -> tuple[RunConfig, tuple[str, ...]]:
    """The run, with `off` for an `auto` that comes to that, and what is to be said of it.

    asked: for, by the run, its model and its data.

    Raises:
        UserError: on, and there is no GPU, or padding needs a mask. UnsupportedError: on, beside what is not recorded.
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
    if error is None:
        said = "forward and backward of a micro-batch are replayed as a CUDA graph, from the second of its length on"
        return config, (f"train.cuda_graphs: {said}; evaluations run without",)
    if wanted == "on":
        raise error
    train = dataclasses.replace(config.train, cuda_graphs="off")
    said = f"train.cuda_graphs: auto: micro-batches run eagerly: {error.given}: {error.rule}"
    return dataclasses.replace(config, train=train), (said,)

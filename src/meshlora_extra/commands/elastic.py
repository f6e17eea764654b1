"""Going on with another number of processes than a run's topology asks for: `train.on_fewer: continue`.

Every rank chooses by itself, to the same result. Does not own: plans (`meshlora_extra.planner.choose`), their proof
(`verify.preflight`), going on from a checkpoint, which knows no topology (`run.checkpoint`).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from meshlora.comm.groups import on_gpus
from meshlora.run.config.run_file import RunConfig
from meshlora.run.prepare import blueprint_of, check_request
from meshlora_extra.planner.choose import choose
from meshlora_extra.planner.hardware import GPUS, Hardware, card_of
from meshlora_extra.planner.problem import problem_of_run
from meshlora_ground.errors import UnsupportedError, UserError
from meshlora_ground.topology import Topology

# A run on devices that no table has, as CPUs, is ranked as if it were on these: any topology trains the same adapter.
_ELSE = "h100"
# Where NVIDIA's driver describes each GPU.
_DRIVER = Path("/proc/driver/nvidia/gpus")


def fitted(configs: Mapping[str, RunConfig], *, world: int) -> tuple[dict[str, RunConfig], tuple[str, ...]]:
    """(`configs` on a topology of `world` processes, a note that says so): the planner's best that can train them.

    As they are, if their topology has as many.

    Raises:
        UserError: no topology of as many processes fits the run or the memory of its devices.
    """
    first = next(iter(configs.values()))
    if _has(first.topology, world):
        return dict(configs), ()
    gpu = _gpu_of(first)
    for topology in _ranked(first, world, gpu):
        try:  # a run file alone may say that it does not go with the topology
            changed = {name: dataclasses.replace(config, topology=str(topology)) for name, config in configs.items()}
            for config in changed.values():
                check_request(config, world=world, resumes=True)
        except (UserError, UnsupportedError):  # the planner knows no options of training
            continue
        note = f"{world} processes, where topology={first.topology} has {Topology.parse(first.topology).world}"
        return changed, (f"{note}: the run is on {topology} (train.on_fewer; the planner's choice for {gpu.name})",)
    rule = "train.on_fewer=continue, and no topology of as many fits this run"
    raise UserError(f"topology={first.topology} on {world} processes", rule, "start more, or see `meshlora plan`")


def _has(text: str, world: int) -> bool:
    """Whether topology `text`, whose dp may be missing, has `world` processes."""
    has_dp = any(part.strip().startswith("dp=") for part in text.split(","))
    given = Topology.parse(text)  # a mistake in it stays one
    return given.world == world if has_dp else world % given.world == 0


def _ranked(config: RunConfig, world: int, gpu: Hardware) -> Iterator[Topology]:
    """Topologies of `world` GPUs whose memory suffices, the fastest first."""
    model = dataclasses.replace(config.model, disable_dropout=True)
    one = blueprint_of(dataclasses.replace(config, model=model), Topology())
    problem = problem_of_run(config, one, gpus=world, gpu=gpu, seq=config.data.longest)
    return (prediction.topology for prediction in choose(problem).ranked if prediction.fits)


def _gpu_of(config: RunConfig) -> Hardware:
    if not on_gpus(config.device, num_ranks=1):
        return GPUS[_ELSE]
    return card_of(_name_of_gpu()) or GPUS[_ELSE]


def _name_of_gpu() -> str:
    """As the driver says it. Asking torch opens CUDA, in a process that is to fork for templates: only without."""
    for file in sorted(_DRIVER.glob("*/information")):
        if found := re.search(r"^Model:\s*(.+)$", file.read_text("utf-8", "replace"), re.MULTILINE):
            return found[1]
    return str(torch.cuda.get_device_properties(0).name)

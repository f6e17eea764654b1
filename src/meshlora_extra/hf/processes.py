"""What accelerate and transformers are told of the processes: each rank by itself, rank 0 the one that writes.

Owns: the state of accelerate, and its collectives over dp. Does not own: process groups (`comm.groups`).

Trainer counts every process of a job as one of data parallelism: it would give tp ranks other rows, multiply the batch
by the size of the world, wrap the model in DistributedDataParallel. So each rank is told that it is alone, and what one
rank has of a global batch is shared (`meshlora_extra.hf.rows`), counted and summed (`meshlora_extra.hf.trainer`) by the
mesh.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType, recursively_apply
from torch import Tensor

from meshlora.comm.collectives import all_reduce_sum
from meshlora.comm.groups import Axis, Mesh
from meshlora_extra.hf.rows import gathered_rows, padded_over
from meshlora_ground.errors import UnsupportedError


def be_alone(mesh: Mesh) -> None:
    """Tell accelerate that this process is the only one."""
    state = PartialState()
    state.distributed_type, state.num_processes = DistributedType.NO, 1
    # The first, as all ranks do alike: TRL slices rows and seeds generators by this number.
    state.process_index = state.local_process_index = 0
    state.device = mesh.device


def stay_alone(accelerator: Accelerator, mesh: Mesh, mixed_precision: str) -> None:
    """`be_alone` again for an accelerator whose state may be gone: every new `TrainingArguments` throws it away."""
    be_alone(mesh)
    if not hasattr(accelerator.state, "mixed_precision"):
        Accelerator(mixed_precision=mixed_precision)  # of all accelerators there is one state
    elif accelerator.num_processes != 1:
        rule = "another Accelerator has counted the processes since this trainer was made"
        raise UnsupportedError(f"Trainer with {accelerator.num_processes} processes", rule, "make that one after it")


@contextlib.contextmanager
def numbered_by(dp: Axis, accelerator: Accelerator) -> Iterator[None]:
    """Inside the block accelerate has the number of this rank's share as that of the process."""
    states = (PartialState(), accelerator.state)  # the second copies the first, again and again
    for state in states:
        state.process_index = dp.rank
    try:
        yield
    finally:
        for state in states:
            state.process_index = 0


class Writer:
    """What `TrainingArguments` see of the processes: as accelerate does, but rank 0 alone writes and logs."""

    def __init__(self, mesh: Mesh) -> None:
        self.process_index = self.local_process_index = mesh.rank

    def __getattr__(self, name: str) -> Any:
        return getattr(PartialState(), name)


def collect_over(accelerator: Accelerator, mesh: Mesh) -> None:
    """Let the collectives of `accelerator` run over the dp ranks of `mesh`."""

    def gather(value: Any, use_gather_object: bool = False) -> Any:
        if use_gather_object and mesh.dp.size > 1:
            rule = "objects are not gathered over a mesh"
            raise UnsupportedError("eval_use_gather_object=True", rule, "leave it out")
        rows = gathered_rows(value, mesh.dp)
        if isinstance(value, Tensor) and not value.ndim:  # one of each rank, not of each row
            return rows
        # Trainer repeats a loss as if the last batch were as large as the others.
        data = accelerator.gradient_state
        last = data.remainder
        if not data.end_of_dataloader or last <= 0:
            return rows
        return recursively_apply(lambda tensor: tensor[:last], rows)

    def reduce(value: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        whole = all_reduce_sum(value.clone(), mesh.dp) * scale
        if reduction == "mean":
            whole = whole / mesh.dp.size
        return whole

    accelerator.gather = functools.partial(gathered_rows, dp=mesh.dp)
    accelerator.gather_for_metrics = gather
    accelerator.reduce = reduce
    accelerator.pad_across_processes = lambda tensor, dim=0, pad_index=0, pad_first=False: padded_over(
        tensor, mesh.dp, dim=dim, pad_index=pad_index, pad_first=pad_first
    )

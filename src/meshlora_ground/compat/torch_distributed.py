"""Private names of torch.distributed: groups, stores and time limits."""

from __future__ import annotations

import contextlib
from datetime import timedelta

import torch
from torch.distributed import ProcessGroup, Store, distributed_c10d

from meshlora_ground.compat import replaced


class NamedGroup(ProcessGroup):
    """A process group written in Python. torch.distributed names each group through private methods."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # missing in the stub
        self._name = self._description = ""

    @property
    def group_name(self) -> str:  # type: ignore[override]  # torch's own subclass does the same
        return self._name

    @property
    def group_desc(self) -> str:
        return self._description

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, description: str) -> None:
        self._description = description


def job_store() -> Store:
    """The store of this job's rendezvous. torch does not expose it, and a second store would need its own port."""
    return distributed_c10d._get_default_store()


def can_split_groups() -> bool:
    """Whether `torch.distributed.split_group` works on this job: NCCL, bound to a device. torch does not say so."""
    group = distributed_c10d._get_default_group()
    return distributed_c10d.get_backend(group) == "nccl" and group.bound_device_id is not None


def abort_groups() -> None:
    """Abort the communicators of all NCCL groups: their kernels wait for ranks that are gone. May block."""
    if distributed_c10d.is_initialized() and distributed_c10d.get_backend() == "nccl":
        distributed_c10d._abort_process_group()


def set_timeout(group: ProcessGroup, limit_s: float) -> None:
    """Set the timeout of later collectives of `group`. Before torch 2.14 the public API sets that of new groups."""
    set_timeout = getattr(distributed_c10d, "set_timeout", None) or distributed_c10d._set_pg_timeout
    set_timeout(timedelta(seconds=limit_s), group)


def timeout_of(group: ProcessGroup) -> timedelta:
    """The timeout of collectives of `group`, a group of CPUs. The public API can set it but not read it. Raises:
    RuntimeError: some versions of torch hide it under TORCH_DISTRIBUTED_DEBUG=DETAIL."""
    limit: timedelta = group._get_backend(torch.device("cpu")).options._timeout
    return limit


def fake_store() -> Store:
    """The store of a job whose other ranks do not exist. Importing it registers torch's "fake" backend."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    store: Store = FakeStore()
    return store


def meta_parameters_allowed() -> contextlib.AbstractContextManager[None]:
    """Let modules under `fully_shard` run on the meta device inside the block. torch has no option for that."""
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    return replaced(FSDPParamGroup, "_validate_no_meta_params", lambda self: None)


# (module, function) that runs the body of torch's `fully_shard` and `replicate`, which is its variable `func`.
COMPOSED = ("torch.distributed._composable.contract", "contract.<locals>.inner.<locals>.wrapper")

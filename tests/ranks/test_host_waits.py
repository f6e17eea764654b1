"""Where a step of the real trainer makes the host wait for the device: counted on CPU, where waiting costs nothing.

On a GPU an operator whose result the host needs stops it until all work given before is done, and the device idles
while the host prepares more. What asks for such a result is the same on CPU.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import yaml
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from meshlora.layers import head_loss as vocabulary
from meshlora.run.trainer import Trainer
from tests.pool import Pool
from tests.ranks.test_several_adapters import _file as many_file
from tests.ranks.test_several_adapters import _train as run_many
from tests.ranks.test_several_adapters import folder as texts
from tests.ranks.test_trainer import folder, run_and_keep_groups, run_file
from tests.ranks.test_training_experts import _run_file as experts_file
from tests.ranks.test_training_experts import folder as experts

__all__ = ["experts", "folder", "texts"]  # fixtures

_ASKING = {"_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "_unique2", "unique_dim"}
_READING = ("tolist", "numpy", "cpu")
_HERE = Path(__file__)


def _asker() -> str:
    """The first function outside torch that led here: in a file of meshlora, or of transformers."""
    frame = sys._getframe(2)
    while frame is not None:
        parts = Path(frame.f_code.co_filename).parts
        own = frame.f_code.co_name not in ("__torch_dispatch__", "__torch_function__")
        if own and ("meshlora" in parts or "transformers" in parts) and parts[-1] != _HERE.name:
            return f"{parts[-1]}:{frame.f_code.co_name}"
        assert frame.f_back is not None
        frame = frame.f_back
    raise AssertionError


class _Waits(TorchDispatchMode):
    """Counts the functions that ask the device for numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        by_mask = name.startswith("index") and any(
            isinstance(i, Tensor) and i.dtype == torch.bool for i in (args[1] if isinstance(args[1], list) else ())
        )
        if name in _ASKING or by_mask:
            self.found[_asker()] += 1
        return func(*args, **(kwargs or {}))


def _waits_of_a_step(trainer: type, batches: str, run: Callable[[], None]) -> dict[str, int]:
    """Function -> how often it asks in the second step of `run`, by `trainer`; and how many `micro-batches` that has.

    batches: the method that makes some, on the host, also where there is a GPU.
    """
    waits = _Waits()
    train_step, make = trainer.train_step, getattr(trainer, batches)
    steps = itertools.count()

    def watched(*args: Any) -> Any:
        if next(steps) != 1:
            return train_step(*args)
        with contextlib.ExitStack() as stack:
            for name in _READING:
                stack.enter_context(mock.patch.object(Tensor, name, reading(getattr(Tensor, name))))
            stack.enter_context(mock.patch.object(trainer, batches, made))
            # What it finds is asserted on a GPU, by the GPU (`torch._assert_async`).
            stack.enter_context(mock.patch.object(vocabulary, "_check_labels"))
            stack.enter_context(waits)
            return train_step(*args)

    def reading(original: Any) -> Any:
        def read(*args: Any, **kwargs: Any) -> Any:
            waits.found[_asker()] += 1
            return original(*args, **kwargs)

        return read

    def made(*args: Any) -> Any:
        with _disable_current_modes():
            found = make(*args)
            found = list(found) if isinstance(found, Iterator) else found
        waits.found["micro-batches"] += len(found) if isinstance(found, list) else 1
        return found

    with mock.patch.object(trainer, "train_step", watched):
        run()
    return dict(waits.found)


def _of_one(file: Path, world: int) -> dict[str, int]:
    return _waits_of_a_step(Trainer, "_micro_batches", lambda: run_and_keep_groups(file, world))


def _of_many(file: Path, world: int) -> dict[str, int]:
    return _waits_of_a_step(Trainer, "_micro_batches", lambda: run_many(file, world))


def _check(ranks: list[dict[str, int]]) -> None:
    """One read, of padded rows too.

    Messages between ranks on CPUs are tensors in the host's own memory; NCCL's are not.
    """
    for found in ranks:
        found.pop("links.py:_memory", None)
        assert found.pop("micro-batches")
        assert found == {"step_sums.py:read": 1}


@pytest.mark.long
@pytest.mark.parametrize(
    ("topology", "world"),
    [
        ("dp=2,tp=2,sp", 4),
        *(pytest.param(topology, world, marks=pytest.mark.proof) for topology, world in (("", 1), ("tp=2,sp", 2))),
    ],
)
def test_a_step_reads_its_numbers_once(topology: str, world: int, folder: Path, pools: Callable[[int], Pool]) -> None:
    file = run_file(
        folder,
        f"waits-{topology or 'alone'}",
        topology,
        data__eval=None,
        train__eval_every=0,
        train__on_spike={"factor": 3.0},
        train__steps=2,
        train__warmup_steps=0,
    )
    _check([_of_one(file, 1)] if world == 1 else pools(world).run(_of_one, file, world))


@pytest.mark.long
@pytest.mark.parametrize(("topology", "world"), [pytest.param("", 1, marks=pytest.mark.proof), ("tp=2,sp", 2)])
def test_a_step_of_several_adapters_does_too(
    topology: str, world: int, texts: Path, pools: Callable[[int], Pool]
) -> None:
    file = many_file(texts, f"waits-{topology or 'alone'}", topology)
    tree = yaml.safe_load(file.read_text())
    for adapter in tree["adapters"].values():
        adapter["train"] |= {"steps": 2, "warmup_steps": 0}
    file.write_text(yaml.safe_dump(tree))
    _check([_of_many(file, 1)] if world == 1 else pools(world).run(_of_many, file, world))


def _of_experts(found: dict[str, int], asker: str, *, each: int = 1) -> None:
    blocks, micro_batches = 2, found["micro-batches"]
    assert found.pop(asker) == each * blocks * micro_batches


def test_experts_ask_once_a_block_how_many_rows_each_has(experts: Path) -> None:
    found = _of_one(experts_file(experts, "waits", "dp=1"), 1)
    _of_experts(found, "row_counts.py:on_host")  # products one after the other; those in one call do not ask
    _check([found])


def test_experts_of_other_ranks_do_too_and_rows_are_sorted_on_the_device(
    experts: Path, pools: Callable[[int], Pool]
) -> None:
    ranks = pools(2).run(_of_one, experts_file(experts, "waits-ep", "dp=2,ep=2"), 2)
    for found in ranks:
        # One copy to the host, whose own numbers make three lists: ours, sent, received.
        _of_experts(found, "dispatch.py:__init__", each=4)
    _check(ranks)

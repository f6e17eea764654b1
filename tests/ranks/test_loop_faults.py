"""Deliberate faults in what a loop of a user's own rests on: each shows in a loss, a norm or the adapter.

As in `verify.faults`, the docstring of each is what holds without it. `meshlora verify` runs no loop of a user's own,
so that these are no mutations of its registry; those there that a step can have are injected too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import Tensor
from torch.utils.data import DataLoader

import meshlora
from meshlora.comm.collectives import all_reduce_sum
from meshlora.comm.groups import Mesh
from meshlora.layers.tokens import Share
from meshlora.loading import own_loop
from meshlora.run import feeding
from meshlora.train import step as steps
from meshlora.train.gradsync import Adapters
from meshlora.verify.faults.fault import Mutation, after, around, instead_of
from meshlora.verify.faults.registry import find
from meshlora_judge.compare import compare_adapters
from tests.pool import Pool

BASE = str(Path(__file__).parents[2] / "examples/tiny_base")
LIMIT = 1e-9
SHOWS_ON: dict[str, str] = {}


def on(topology: str) -> Callable[[Mutation], Mutation]:
    """A decorator of a fault: where it is put in."""

    def of(fault: Mutation) -> Mutation:
        SHOWS_ON[fault.name] = topology
        return fault

    return of


@on("tp=2,sp")
@after(own_loop, "shifted")
def labels_not_shifted(found: Tensor, labels: Tensor) -> Tensor:
    """a token is predicted by those before it"""
    return labels


@on("cp=2")
@instead_of(own_loop, "reduce_each_to_one")
def loss_of_own_tokens_shown(total: Tensor, _: Any) -> Tensor:
    """a loss that is returned is of whole rows"""
    return total


@on("dp=2")
@after(steps, "own_loss")
def mean_taken_for_the_sum(found: Any, loss: Tensor) -> Any:
    """a micro-batch weighs as much as it has tokens"""
    return own_loop.OwnLoss(found.total / found.number.clamp(min=1), found.number)


@on("dp=2")
@around(steps, "finish_gradients_on_device")
def step_divides_by_own_tokens(original: Any, mesh: Mesh, adapters: Adapters, num_tokens: Sequence[int]) -> Tensor:
    """gradients are divided by the tokens of all ranks"""
    totals: Tensor = original(mesh, adapters, num_tokens)
    for factor in adapters[0]:
        assert factor.parameter.grad is not None
        factor.parameter.grad.mul_(totals[0] / max(1, num_tokens[0]))
    return totals


@on("cp=2")
@around(steps, "finish_gradients_on_device")
def step_counts_each_cp_rank(original: Any, mesh: Mesh, adapters: Adapters, num_tokens: Sequence[int]) -> Tensor:
    """the tokens of whole rows count once, though each cp rank is given them"""
    number = all_reduce_sum(torch.tensor(num_tokens), mesh.cp).tolist()
    totals: Tensor = original(mesh, adapters, number)
    return totals


@on("tp=2,sp")
@around(steps, "clip_gradients_on_device")
def step_does_not_clip(original: Any, mesh: Mesh, adapters: Adapters, limits: Sequence[float | None]) -> Tensor:
    """gradients are scaled down to the largest norm"""
    norms: Tensor = original(mesh, adapters, [None] * len(limits))
    return norms


@on("tp=2,sp")
@around(feeding, "fitted")
def filling_is_trained(original: Any, inputs: Any, topology: Any, *, pad_token_id: int) -> dict[str, Tensor]:
    """what rows are filled up with is not trained"""
    found: dict[str, Tensor] = original(inputs, topology, pad_token_id=pad_token_id)
    return found | {"labels": found["labels"].masked_fill(found["attention_mask"] == 0, 7)}


@on("dp=2")
@after(feeding.RankSampler, "_rows")
def last_rows_left_out(found: Any, sampler: Any, *_: Any) -> Any:
    """every row of an epoch is seen, by whatever number of ranks they divide"""
    return found[: len(found) // 2 * 2]


@on("dp=2")
@after(feeding.RankSampler, "_rows")
def epochs_in_one_order(found: Any, sampler: Any, epoch: int, place: int) -> Any:
    """each epoch has an order of its own"""
    return sampler._batches.batch(place)


@on("dp=2")
@around(own_loop, "Share")
def masks_of_each_rank(original: Any, adapter: Any, tokens: Tensor, seed: int, step: int) -> Share:
    """a mask is a function of step and token, not of the rank"""
    share: Share = original(adapter, tokens, seed + torch.distributed.get_rank(), step)
    return share


@on("dp=2")
@around(own_loop, "Share")
def masks_of_one_step(original: Any, adapter: Any, tokens: Tensor, seed: int, step: int) -> Share:
    """each step has masks of its own"""
    share: Share = original(adapter, tokens, seed, 0)
    return share


FAULTS = {fault.name: fault for fault in list(vars().values()) if isinstance(fault, Mutation)}
# Of the registry: (name, topology).
KNOWN = [
    ("column_a_not_summed", "tp=2,sp"),
    ("row_b_not_summed", "tp=2,sp"),
    ("factor_gradients_averaged", "tp=2,sp"),
    ("clip_norm_counts_replicas", "tp=2,sp"),
    ("dp_reduction_skipped", "dp=2"),
]


def _loop(topology: str, fault: str | None, start: Path, out: Path) -> list[tuple[float, float, int]]:
    """Body of a rank: two epochs of 13 rows, with dropout, two batches a step, and clipping that bites."""
    numbers = torch.Generator().manual_seed(0)
    lengths = torch.randint(5, 30, (13,), generator=numbers).tolist()
    rows = [{"input_ids": torch.randint(3, 200, (length,), generator=numbers).tolist()} for length in lengths]
    mutation = None if fault is None else FAULTS.get(fault) or find(fault)
    if mutation is not None:
        with mutation.apply():
            return _steps(topology, rows, start, out)
    return _steps(topology, rows, start, out)


def _steps(topology: str, rows: Any, start: Path, out: Path) -> list[tuple[float, float, int]]:
    model = meshlora.load(BASE, adapter=start, topology=topology, dtype="float64").train()
    sampler = meshlora.sampler(model, rows, batch_size=4 // model.meshlora.mesh.dp.size, seed=5)
    collate = meshlora.collator(model, SimpleNamespace(pad_token_id=0, eos_token_id=0))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    said = []
    for _ in range(2):
        batches = list(DataLoader(rows, batch_sampler=sampler, collate_fn=collate))
        for place in range(0, len(batches), 2):
            with meshlora.step(model, optimizer, max_norm=0.1) as step, meshlora.lift():
                for batch in batches[place : place + 2]:
                    loss = model(**batch).loss
                    step.backward(loss)
            said.append((step.loss, step.grad_norm, step.num_tokens))
    said.append((float(loss.detach()) if model.meshlora.mesh.dp.size == 1 else 0.0, 0.0, 0))  # what is returned
    meshlora.save_adapter(model, out, compares=False)  # what drifts is for the comparison to find
    return said


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("start") / "adapter"
    lora = LoraConfig(r=4, lora_alpha=16, target_modules="all-linear", init_lora_weights=False, lora_dropout=0.2)
    meshlora.save_adapter(meshlora.load(BASE, lora=lora, dtype="float64", seed=3), folder)
    return folder


@pytest.fixture(scope="module")
def alone(start: Path, tmp_path_factory: pytest.TempPathFactory, pools: Callable[[int], Pool]) -> tuple[Path, Any]:
    out = tmp_path_factory.mktemp("alone") / "adapter"
    return out, pools(1).run(_loop, "", None, start, out)[0]


def _is_same(found: Any, out: Path, alone: Any) -> bool:
    folder, said = alone
    if out.name == "dp":
        said = [*said[:-1], (0.0, 0.0, 0)]
    is_close = len(found) == len(said) and all(
        ours == pytest.approx(theirs, rel=LIMIT) for ours, theirs in zip(found, said, strict=True)
    )
    return is_close and compare_adapters(out, folder).relative <= LIMIT


@pytest.mark.proof
@pytest.mark.parametrize("topology", ["tp=2,sp", "cp=2", "dp=2"])
def test_without_a_fault_a_loop_ends_where_that_of_one_process_ends(
    topology: str, alone: Any, start: Path, pools: Callable[[int], Pool], tmp_path: Path
) -> None:
    out = tmp_path / topology[:2]
    assert _is_same(pools(2).run(_loop, topology, None, start, out)[0], out, alone)


@pytest.mark.proof
@pytest.mark.parametrize(("name", "topology"), [*SHOWS_ON.items(), *KNOWN])
def test_a_fault_shows(
    name: str, topology: str, alone: Any, start: Path, pools: Callable[[int], Pool], tmp_path: Path
) -> None:
    out = tmp_path / topology[:2]
    assert not _is_same(pools(2).run(_loop, topology, name, start, out)[0], out, alone)

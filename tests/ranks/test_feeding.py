"""The rows that a sampler gives each rank, and the batches that a collator makes of them."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

import meshlora
from meshlora.reading.sampler import GlobalBatches
from meshlora_judge.compare import compare_adapters
from meshlora_judge.twin import twin_config
from tests.pool import Pool

BASE = str(Path(__file__).parents[2] / "examples/tiny_base")
TOKENIZER = SimpleNamespace(pad_token_id=None, eos_token_id=1)
ROWS, PER_STEP = 13, 2  # of batches of 4: the last one of an epoch has one row


def _rows() -> list[dict[str, list[int]]]:
    """Of unequal lengths, the first third of each untrained."""
    numbers = torch.Generator().manual_seed(0)
    found = []
    for length in torch.randint(5, 30, (ROWS,), generator=numbers).tolist():
        ids = torch.randint(3, 200, (length,), generator=numbers).tolist()
        found.append({"input_ids": ids, "labels": [-100] * (length // 3) + ids[length // 3 :]})
    return found


def _twin(topology: str) -> Any:
    return meshlora.load(twin_config("llama"), lora=LoraConfig(r=2, target_modules=["q_proj"]), topology=topology)


def _sampled(topology: str, batch_size: int, options: dict[str, Any]) -> list[list[list[int]]]:
    """Body of a rank: the rows of each batch, of two epochs."""
    sampler = meshlora.sampler(_twin(topology), range(ROWS), batch_size=batch_size, **options)
    found = [list(sampler) for _ in range(2)]
    assert [len(epoch) for epoch in found] == [len(sampler)] * 2
    return found


def _joined(of_ranks: list[list[list[list[int]]]]) -> list[list[list[int]]]:
    """The global batches of each epoch, from the shares of the ranks of dp."""
    epochs = zip(*of_ranks, strict=True)
    return [[list(chain.from_iterable(shares)) for shares in zip(*epoch, strict=True)] for epoch in epochs]


@pytest.mark.long
def test_each_row_goes_to_one_dp_rank_in_the_order_of_one_process(pools: Callable[[int], Pool]) -> None:
    (alone,) = pools(1).run(_sampled, "", 4, {"seed": 5})
    apart = pools(2).run(_sampled, "dp=2", 2, {"seed": 5})
    assert _joined(apart) == alone
    assert [len(batch) for batch in apart[1][0]] == [2, 2, 2, 0]
    assert all(sorted(chain.from_iterable(epoch)) == list(range(ROWS)) for epoch in alone)
    assert alone[0] != alone[1]
    first, second = pools(2).run(_sampled, "tp=2,sp", 4, {"seed": 5})
    assert first == second == alone
    in_order = _joined(pools(2).run(_sampled, "dp=2", 2, {"shuffle": False, "drop_last": True}))
    assert in_order == [np.arange(12).reshape(3, 4).tolist()] * 2


def test_a_sampler_goes_on_where_it_was_on_any_mesh() -> None:
    model = _twin("")
    whole = meshlora.sampler(model, range(ROWS), batch_size=4, seed=5)
    every = [batch for _ in range(3) for batch in whole]
    loop: Iterator[list[int]] = iter(first := meshlora.sampler(model, range(ROWS), batch_size=4, seed=5))
    assert [next(loop) for _ in range(3)] == every[:3]
    again = meshlora.sampler(model, range(ROWS), batch_size=4, seed=5)
    again.load_state_dict(first.state_dict())
    again.set_epoch(0)
    assert [batch for _ in range(2) for batch in again] == every[3:8]
    again.load_state_dict(first.state_dict(done=6))  # of a loop whose workers have fetched ahead
    assert next(iter(again)) == every[6]
    again.set_epoch(2)
    assert list(again) == every[8:]
    other = meshlora.sampler(model, range(ROWS), batch_size=4, seed=6)
    with pytest.raises(meshlora.UserError, match="with seed=5: this one has 6"):
        other.load_state_dict(first.state_dict())


def _unlike() -> str:
    model = _twin("dp=2")
    with pytest.raises(meshlora.UserError) as refused:
        meshlora.sampler(model, range(ROWS + model.meshlora.mesh.rank), batch_size=2)
    return str(refused.value)


def test_ranks_with_datasets_of_their_own_would_wait_for_each_other(pools: Callable[[int], Pool]) -> None:
    for said in pools(2).run(_unlike):
        assert "len(dataset)=14 on rank 1, 13 on rank 0" in said


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"batch_size": 0}, "batch_size=0: must be at least 1"),
        ({"batch_size": 2, "seed": -1}, "seed=-1: must not be negative"),
        ({"batch_size": 14, "drop_last": True}, "a dataset of 13 rows: a batch is of 14 rows"),
    ],
)
def test_a_sampler_that_would_give_nothing_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(meshlora.UserError, match=message):
        meshlora.sampler(_twin(""), range(ROWS), **given)
    with pytest.raises(meshlora.UnsupportedError, match="it has no length"):
        meshlora.sampler(_twin(""), iter(range(ROWS)), batch_size=1)


def test_a_collator_pads_masks_and_takes_columns_along() -> None:
    collate = meshlora.collator(_twin(""), TOKENIZER, columns=["advantages"])
    batch = collate(
        [
            {"input_ids": [5, 6, 7], "labels": [-100, 6, 7], "advantages": [0, 0.5, 1], "text": "left out"},
            {"input_ids": torch.tensor([8, 9]), "attention_mask": [1, 0], "advantages": torch.tensor([2.0, 3.0])},
        ]
    )
    expected: dict[str, Any] = {
        "input_ids": [[5, 6, 7], [8, 9, 1]],
        "attention_mask": [[1, 1, 1], [1, 0, 0]],
        "labels": [[-100, 6, 7], [8, -100, -100]],
        "advantages": [[0, 0.5, 1], [2, 3, 0]],
    }
    assert {name: value.tolist() for name, value in batch.items()} == expected
    dummy = pickle.loads(pickle.dumps(collate))([])  # as a worker of a loader has it
    assert (dummy["labels"] == -100).all()
    assert dummy["attention_mask"].all()
    with pytest.raises(meshlora.UserError, match="row 0 of a batch: 1 labels for 2 input_ids"):
        collate([{"input_ids": [1, 2], "labels": [1], "advantages": [0, 0]}])
    with pytest.raises(meshlora.UserError, match="row 0 of a batch: no advantages for 2 input_ids"):
        collate([{"input_ids": [1, 2]}])


def _alone(start: Path, out: Path) -> float:
    """A plain loop with transformers and PEFT over the global batches, two of them a step, two epochs."""
    model = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float64)
    model = PeftModel.from_pretrained(model, str(start), is_trainable=True).train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    data, order = _rows(), GlobalBatches(ROWS, 4, 5)
    for step in range(4):
        rows = [data[i] for place in range(2 * step, 2 * step + PER_STEP) for i in order.batch(place)]
        number = sum(sum(label != -100 for label in row["labels"][1:]) for row in rows)
        for row in rows:
            with meshlora.lift():
                ids, labels = (torch.tensor([row[name]]) for name in ("input_ids", "labels"))
                model(input_ids=ids, labels=labels, num_items_in_batch=number).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(str(out))
    total, number = 0.0, 0
    with torch.no_grad(), meshlora.lift():
        for row in data:
            ids, labels = (torch.tensor([row[name]]) for name in ("input_ids", "labels"))
            total += float(model.eval()(input_ids=ids, labels=labels, num_items_in_batch=1).loss)
            number += sum(label != -100 for label in row["labels"][1:])
    return total / number


def _on_mesh(topology: str, batch_size: int, start: Path | None, out: Path) -> float:
    """Body of a rank. start: None: a mixture of experts, with an adapter of its own."""
    if start is None:
        lora = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
        model = meshlora.load(twin_config("qwen3_moe"), lora=lora, topology=topology, dtype="float64", seed=3).train()
    else:
        model = meshlora.load(BASE, adapter=start, topology=topology, dtype="float64").train()
    data = Dataset.from_list(_rows())
    rows = meshlora.sampler(model, data, batch_size=batch_size, seed=5)
    collate = meshlora.collator(model, TOKENIZER)
    loader = DataLoader(data, batch_sampler=rows, collate_fn=collate)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    for _ in range(2):
        epoch = list(loader)
        for place in range(0, len(epoch), PER_STEP):
            with meshlora.step(model, optimizer) as step, meshlora.lift():
                for batch in epoch[place : place + PER_STEP]:
                    step.backward(model(**batch).loss)
    meshlora.save_adapter(model, out)
    held_out = meshlora.sampler(model, data, batch_size=batch_size, shuffle=False)
    with meshlora.lift():
        found = meshlora.mean_loss(model, DataLoader(data, batch_sampler=held_out, collate_fn=collate))
    assert model.training
    return found


@pytest.mark.long
@pytest.mark.parametrize(
    ("topology", "batch_size"),
    [
        ("dp=2", 2),
        pytest.param("tp=2,sp", 4, marks=pytest.mark.proof),
        pytest.param("cp=2", 4, marks=pytest.mark.proof),
    ],
)
def test_epochs_of_a_loader_end_with_the_adapter_of_one_process(
    topology: str, batch_size: int, pools: Callable[[int], Pool], tmp_path: Path
) -> None:
    """Of the last batch of an epoch the second of two dp ranks has no row."""
    start = tmp_path / "start"
    lora = LoraConfig(r=4, lora_alpha=16, target_modules="all-linear", init_lora_weights=False)
    meshlora.save_adapter(meshlora.load(BASE, lora=lora, dtype="float64", seed=3), start)
    loss = _alone(start, tmp_path / "alone")
    found = pools(2).run(_on_mesh, topology, batch_size, start, tmp_path / "mesh")
    assert found == pytest.approx([loss] * 2, rel=1e-9)
    worst = compare_adapters(tmp_path / "mesh", tmp_path / "alone")
    assert worst.relative <= 1e-9, worst


@pytest.mark.proof
@pytest.mark.parametrize(("topology", "batch_size"), [("dp=2,ep=2", 2), ("tp=2,sp,ep=2", 4), ("dp=2,dp_shard", 2)])
def test_ranks_that_share_experts_or_weights_have_equally_many_forwards(
    topology: str, batch_size: int, pools: Callable[[int], Pool], tmp_path: Path
) -> None:
    """Also where one of them has no row: it would be waited for."""
    pools(1).run(_on_mesh, "", 4, None, tmp_path / "alone")
    pools(2).run(_on_mesh, topology, batch_size, None, tmp_path / "mesh")
    worst = compare_adapters(tmp_path / "mesh", tmp_path / "alone")
    assert worst.relative <= 1e-9, worst

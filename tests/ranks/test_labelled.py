"""A model's forward with labels gives the loss of transformers and PEFT on one process, and its gradients."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM

import meshlora
from meshlora.comm.collectives import all_reduce_sum
from meshlora_ground.errors import UserError
from meshlora_judge.twin import twin_config
from tests.pool import Pool

BASE = str(Path(__file__).parents[2] / "examples/tiny_base")
LIMIT = 1e-12


def _rows() -> dict[str, Tensor]:
    """Two rows of unequal lengths, padded on the right, prompts untrained."""
    ids = torch.randint(3, 200, (2, 16), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, 11:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[0, :6] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


# Divisors of the sum: none, that of all, and one; the rows once more in a tuple.
GIVEN: list[dict[str, Any]] = [{}, {"num_items_in_batch": 17}, {"num_items_in_batch": torch.tensor(1)}]


def _alone(folder: Path) -> tuple[list[float], Tensor, Tensor]:
    model = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float64)
    model = PeftModel.from_pretrained(model, str(folder), is_trainable=True).train()
    with meshlora.lift():
        outputs = [model(**_rows(), **given) for given in GIVEN]
    grad = torch.autograd.grad(outputs[0].loss, next(p for n, p in model.named_parameters() if "lora_B" in n))[0]
    return [float(o.loss.detach()) for o in outputs], outputs[0].logits.detach(), grad


def _on_mesh(topology: str, folder: Path) -> tuple[list[float], Tensor, Tensor]:
    """Body of a rank."""
    model = meshlora.load(BASE, adapter=folder, topology=topology, dtype="float64").train()
    mesh, rows = model.meshlora.mesh, _rows()
    with meshlora.lift():
        outputs = [model(**rows, **given) for given in GIVEN]
        as_tuple = model(rows["input_ids"], rows["attention_mask"], labels=rows["labels"], return_dict=False)
        with torch.no_grad():
            seen = model(**rows)
    assert float(as_tuple[0].detach()) == float(outputs[0].loss.detach())
    assert float(seen.loss) == pytest.approx(float(outputs[0].loss.detach()), rel=LIMIT)
    assert (outputs[0].logits is None) == (mesh.cp.size > 1)
    outputs[0].loss.backward()
    factor = next(f for f in _factors(model) if "lora_B" in f.name)
    # tp and cp ranks hold terms of the sum, or slices: this factor's rule says which.
    axes = frozenset().union(*(part.grad_axes for part in factor.rule.parts(rank=mesh.tp.rank, size=mesh.tp.size)))
    from meshlora.adapter.attach import full_factor

    assert factor.parameter.grad is not None
    grad = full_factor(all_reduce_sum(factor.parameter.grad, mesh.over(axes)), factor.rule, mesh)
    return [float(o.loss.detach()) for o in outputs], seen.logits, grad


def _factors(model: Any) -> Any:
    from meshlora.adapter.attach import active_factors

    return active_factors(model)


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("start") / "adapter"
    lora = LoraConfig(r=4, lora_alpha=16, target_modules="all-linear", init_lora_weights=False)
    meshlora.save_adapter(meshlora.load(BASE, lora=lora, dtype="float64", seed=3), folder)
    return folder


@pytest.mark.long
@pytest.mark.parametrize("topology", ["tp=2,sp", "cp=2", pytest.param("tp=2", marks=pytest.mark.proof)])
def test_loss_of_labels_is_that_of_one_process(topology: str, start: Path, pools: Callable[[int], Pool]) -> None:
    losses, logits, grad = pools(1).run(_alone, start)[0]
    for found, seen, own in pools(2).run(_on_mesh, topology, start):
        assert found == pytest.approx(losses, rel=LIMIT)
        torch.testing.assert_close(seen, logits, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(own, grad, rtol=1e-9, atol=1e-12)


def test_mean_that_would_be_divided_again_is_refused_and_a_sum_is_not() -> None:
    model = meshlora.load(twin_config("llama"), lora=LoraConfig(target_modules=["q_proj"])).train()
    ids = torch.randint(3, 200, (2, 8), generator=torch.Generator().manual_seed(0))
    (2 * model(input_ids=ids, labels=ids).loss).backward()
    with pytest.raises(UserError, match="after the backward of a mean"):
        meshlora.finish_gradients(model, num_tokens=14)
    model.zero_grad()
    model(input_ids=ids, labels=ids, num_items_in_batch=1).loss.backward()
    assert meshlora.finish_gradients(model, num_tokens=14) == 14


def test_labels_with_what_is_not_a_sum_over_tokens_are_refused() -> None:
    model = meshlora.load(twin_config("llama"), lora=LoraConfig(target_modules=["q_proj"])).train()
    ids = torch.randint(3, 200, (2, 8), generator=torch.Generator().manual_seed(0))
    with pytest.raises(UserError, match=r"labels \[2, 8\]: its logits are of \[2, 1\] tokens"):
        model(input_ids=ids, labels=ids, logits_to_keep=1)

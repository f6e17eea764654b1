"""Mistakes with `MeshTrainer` that would make another adapter than one process are refused by all ranks alike."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig

import meshlora
from meshlora.adapter.attach import active_factors
from meshlora.common.errors import MeshloraError
from tests.pool import Pool
from tests.ranks.test_hf_trainer import BASE, _arguments, _entropies, _with

LORA = LoraConfig(r=2, target_modules="all-linear")


def _said(model: Any, out: Path, arguments: dict[str, Any] | None = None, **options: Any) -> str:
    """What MeshTrainer says of a mistake, after which the adapter is as it was."""
    from meshlora.hf import MeshTrainer

    start = [factor.parameter.detach().clone() for factor in active_factors(model)]
    more = {"max_steps": 1, "eval_strategy": "no", "save_strategy": "no", **(arguments or {})}
    with pytest.raises(MeshloraError) as caught:
        _with(model, _arguments(out, batch=2, **more), MeshTrainer, **options).train()
    for factor, before in zip(active_factors(model), start, strict=True):
        assert torch.equal(factor.parameter, before), factor.name
    model.zero_grad()
    return str(caught.value)


def _mean(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
    return _entropies(outputs, labels, "mean")


def _nearly_summed(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
    """A sum, with a mean of the rank's own rows that a rule by the signature, or by doubled tokens, would let pass."""
    return (_entropies(outputs, labels, "sum") + 10 * outputs.logits.square().mean()) / num_items_in_batch


def _mistaken_losses(out: Path) -> list[str]:
    model = meshlora.load(BASE, lora=LORA, topology="dp=2", dtype="float32")
    return [_said(model, out, compute_loss_func=loss) for loss in (_mean, _nearly_summed)]


def test_a_loss_function_that_is_a_mean_is_refused_on_dp(pools: Callable[[int], Pool], tmp_path: Path) -> None:
    """Loss and gradient would be those of one process times dp, or of unequal shares."""
    for said in pools(2).run(_mistaken_losses, tmp_path):
        for words in said:
            assert words.startswith("a compute_loss_func that is a mean and dp=2: each rank has a share"), said

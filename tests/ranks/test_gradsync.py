"""Finishing gradients: what a training loop of the user's own relies on."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from peft import LoraConfig

import meshlora
from meshlora.adapter.attach import active_factors, runtime
from meshlora.train.losses import summed_cross_entropy
from meshlora_judge.twin import twin_config
from tests.pool import Pool, RankError

LORA = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)


def _missing_gradient() -> None:
    model = meshlora.load(twin_config("llama"), lora=LORA, topology="tp=2")
    meshlora.finish_gradients(model, num_tokens=8)


def test_missing_gradient_is_an_error_that_names_the_factor(pools: Callable[[int], Pool]) -> None:
    with pytest.raises(RankError, match=r"model\.layers\.0\.self_attn\.q_proj\.lora_A has no gradient"):
        pools(2).run(_missing_gradient)


def _no_tokens() -> None:
    model = meshlora.load(twin_config("llama"), lora=LORA, topology="dp=2")
    model(input_ids=torch.ones(1, 8, dtype=torch.int64)).logits.sum().backward()
    meshlora.finish_gradients(model, num_tokens=0)


def test_step_without_trained_tokens_is_an_error(pools: Callable[[int], Pool]) -> None:
    with pytest.raises(RankError, match="no rank has a trained token"):
        pools(2).run(_no_tokens)


def test_gradients_stay_numbers_where_no_token_was_trained() -> None:
    """For a loop that goes on after the error: what it adds to is not spoilt."""
    model = meshlora.load(twin_config("llama"), lora=LORA)
    (model(input_ids=torch.ones(1, 8, dtype=torch.int64)).logits.sum() * 0).backward()
    with pytest.raises(meshlora.MeshloraError, match="no rank has a trained token"):
        meshlora.finish_gradients(model, num_tokens=0)
    assert all(torch.isfinite(f.parameter.grad).all() for f in active_factors(model) if f.parameter.grad is not None)


def _clipped(topology: str) -> tuple[float, float, int]:
    model = meshlora.load(twin_config("llama"), lora=LORA, topology=topology, dtype="float64")
    ids = torch.arange(3, 35).view(2, 16)
    summed_cross_entropy(model(input_ids=ids).logits, ids.roll(-1, 1)).backward()
    tokens = meshlora.finish_gradients(model, num_tokens=32)
    before = meshlora.clip_gradients(model, 0.25)
    return before, meshlora.clip_gradients(model, None), tokens


def test_norm_counts_every_logical_element_once_and_tokens_once(pools: Callable[[int], Pool]) -> None:
    norm, clipped, tokens = _clipped("")
    assert norm > 0.25
    assert tokens == 32
    assert clipped == pytest.approx(0.25, rel=1e-4)
    for topology, size, expected in (("tp=2", 2, 32), ("tp=4,sp", 4, 32), ("dp=2,tp=2", 4, 64)):
        for ours in pools(size).run(_clipped, topology):
            assert ours == (pytest.approx(norm, rel=1e-6), pytest.approx(clipped, rel=1e-6), expected)


def _whole_factors() -> dict[str, torch.Tensor]:
    model = meshlora.load(twin_config("llama"), lora=LORA, topology="dp=2,tp=2,sp")
    mesh = runtime(model).mesh
    factors = active_factors(model)
    optimizer = torch.optim.AdamW([f.parameter for f in factors], lr=1e-2)
    generator = torch.Generator().manual_seed(mesh.dp.rank)
    for _ in range(5):
        ids = torch.randint(3, 256, (2, 16), generator=generator)
        optimizer.zero_grad()
        summed_cross_entropy(model(input_ids=ids).logits, ids.roll(-1, 1)).backward()
        meshlora.finish_gradients(model, num_tokens=32)
        optimizer.step()
    return {f.name: f.parameter.detach() for f in factors if f.rule.split_dim is None}


def test_whole_factors_stay_equal_to_the_bit_on_all_ranks(pools: Callable[[int], Pool]) -> None:
    first, *others = pools(4).run(_whole_factors)
    assert len(first) == 14
    for other in others:
        assert all(torch.equal(first[name], other[name]) for name in first)


def _noisy_whole_gradients(topology: str) -> dict[str, torch.Tensor]:
    """Of an attention that every tp rank computes whole."""
    model = meshlora.load(twin_config("doge", num_hidden_layers=1), lora=LORA, topology=topology)
    summed_cross_entropy(model(input_ids=torch.arange(3, 35).view(2, 16)).logits, torch.ones(2, 16).long()).backward()
    whole = [f for f in active_factors(model) if f.rule.mean_axes]
    for factor in whole:
        assert factor.parameter.grad is not None
        factor.parameter.grad.mul_(1 + 1e-6 * runtime(model).mesh.rank)
    meshlora.finish_gradients(model, num_tokens=32)
    return {f.name: f.parameter.grad for f in whole if f.parameter.grad is not None}


def test_copies_stay_equal_where_kernels_are_not_deterministic(pools: Callable[[int], Pool]) -> None:
    first, second = pools(2).run(_noisy_whole_gradients, "tp=2")
    assert len(first) == 10
    assert all(torch.equal(mean, second[name]) for name, mean in first.items())
    alone = _noisy_whole_gradients("")
    for name, mean in first.items():
        torch.testing.assert_close(mean, alone[name], rtol=1e-4, atol=1e-5 * float(alone[name].abs().max()))


def test_model_that_was_not_loaded_by_meshlora_is_refused() -> None:
    with pytest.raises(meshlora.UserError, match=r"meshlora\.load"):
        meshlora.finish_gradients(torch.nn.Linear(2, 2), num_tokens=1)

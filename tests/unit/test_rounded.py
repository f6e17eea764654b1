"""Factors rounded once a forward: always those of the running forward, and no cast of a factor on its use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import meshlora
from meshlora.adapter.attach import active_factors
from meshlora.layers import rounded
from meshlora.train.losses import shifted_loss
from meshlora_judge.twin import twin_config

R = 5  # no other dim of the twin
IDS = torch.arange(3, 19).view(2, 8)


def _model(**options: Any) -> Any:
    lora = LoraConfig(r=R, lora_alpha=12, target_modules="all-linear", init_lora_weights=False)
    return meshlora.load(twin_config("llama", **options), lora=lora, dtype="bfloat16").train()


def _backward(model: Any) -> Tensor:
    loss = shifted_loss(model, IDS, None, IDS.roll(-1, 1))
    loss.backward()
    return loss.detach()


def _gradients(model: Any) -> list[Tensor]:
    return [factor.parameter.grad for factor in active_factors(model) if factor.parameter.grad is not None]


def _by_fused_adamw(factors: list[Tensor]) -> None:
    torch.optim.AdamW(factors, lr=0.1, fused=True).step()  # its writes have no version number


def _by_data(factors: list[Tensor]) -> None:
    for factor in factors:
        factor.data.mul_(1.5)


def _in_place(factors: list[Tensor]) -> None:
    with torch.no_grad():
        for factor in factors:
            factor.mul_(1.5)


@pytest.mark.parametrize("change", [_by_fused_adamw, _by_data, _in_place])
def test_a_changed_factor_is_rounded_again(
    change: Callable[[list[Tensor]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for rounds in (True, False):
        model = _model()
        if not rounds:
            monkeypatch.setattr(rounded, "noted", lambda *_: None)
        _backward(model)
        change([factor.parameter for factor in active_factors(model)])
        model.zero_grad()
        found.append([_backward(model), *_gradients(model)])
    for ours, expected in zip(*found, strict=True):
        assert torch.equal(ours, expected)


def test_a_backward_that_waits_for_the_next_forward_has_its_own_factors() -> None:
    """As in a pipeline, where an optimizer's step never comes in between: here one does."""
    model = _model()
    first = shifted_loss(model, IDS, None, IDS.roll(-1, 1))
    _in_place([factor.parameter for factor in active_factors(model)])
    shifted_loss(model, IDS, None, IDS.roll(-1, 1))
    first.backward()
    waited = _gradients(model)
    other = _model()
    _backward(other)
    for ours, expected in zip(waited, _gradients(other), strict=True):
        assert torch.equal(ours, expected)


class _Casts(TorchDispatchMode):
    """Counts changes of dtype of tensors with a dim of LoRA's rank, alone or joined."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and args[0].dtype != found.dtype:
            self.count += found.ndim == 2 and min(found.shape) in (R, 2 * R, 3 * R)
        return found


def test_copies_of_factors_that_are_stacked_lie_so() -> None:
    model = _model()
    factors: dict[str, Tensor] = {factor.name: factor.parameter for factor in active_factors(model)}
    attention = [next(f for n, f in factors.items() if f"layers.1.self_attn.{own}" in n and "_A" in n) for own in "qkv"]
    lie_so = []

    def look(*_: Any) -> None:
        for given in (attention, attention[::-1], attention[::2]):
            stack = rounded.stacked(given, torch.bfloat16)
            assert torch.equal(stack, torch.cat([factor.bfloat16() for factor in given]))
            lie_so.append(stack.data_ptr() == rounded.rounded(given[0], torch.bfloat16).data_ptr())

    model.model.layers[1].mlp.register_forward_hook(look)
    model(input_ids=IDS)
    assert lie_so == [True, False, False]


@pytest.mark.parametrize("rank", [1, 3, 8])
def test_copies_that_begin_at_whole_bytes_are_stacked_as_they_are(rank: int) -> None:
    """Each begins where grouped products can take it: between copies of odd sizes there is a gap."""
    factors = [torch.nn.Parameter(torch.randn(rank, 6)) for _ in range(3)]
    rounded.round_each(factors, torch.bfloat16)
    for given in (factors, factors[1:]):
        assert torch.equal(rounded.stacked(given, torch.bfloat16), torch.cat([factor.bfloat16() for factor in given]))


def test_no_factor_is_cast_where_it_is_used() -> None:
    """In the layers: the head, which the loss calls, is not in a forward of the model any more."""
    model = _model()
    with _Casts() as casts:
        model.model(input_ids=IDS)
    assert casts.count == 14 * model.config.num_hidden_layers  # not the whole model's forward
    with _Casts() as casts:
        loss = model(input_ids=IDS).logits.float().square().mean()
    assert casts.count == 0
    with _Casts() as casts:
        loss.backward()
    # A CPU hands out no wide product: a cast for each gradient of a B, and for joined ones of A. Nothing is joined in
    # the first attention, whose input has no gradient.
    assert casts.count == (7 + 4) * model.config.num_hidden_layers + 2


def test_copies_end_with_the_forward_also_if_it_fails() -> None:
    model = _model()
    with pytest.raises(IndexError):
        model(input_ids=IDS + 10**6)
    for factor in active_factors(model):
        with _Casts() as casts:
            rounded.rounded(factor.parameter, torch.bfloat16)
        assert casts.count == 1

"""Rotations of queries and keys: transformers' values and gradients, with less rounding."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import Tensor
from transformers.models.gemma2.modeling_gemma2 import Gemma2Attention
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, apply_rotary_pos_emb
from transformers.models.phi3.modeling_phi3 import Phi3Attention
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

import meshlora
from meshlora.wings.kernels import rotary
from meshlora.wings.kernels.rotary import RotationFunction, rotates
from meshlora_judge.twin import twin_config

B, S, D = 2, 5, 8


def _drawn(dtype: torch.dtype) -> list[Tensor]:
    """q, k, cos, sin, g of q, g of k; as in an attention, heads lie inside tokens."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((B, S, 4, D), (B, S, 2, D), (B, S, D), (B, S, D), (B, S, 4, D), (B, S, 2, D))
    found = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    found[2:4] = found[2].cos(), found[2].sin() * 0.7  # unlike halves, and no rotation: nothing cancels
    return [(t.transpose(1, 2) if t.ndim == 4 else t).to(dtype) for t in found]


def _run(function: Any, dtype: torch.dtype) -> list[Tensor]:
    q, k, cos, sin, *grads = _drawn(dtype)
    q, k = q.requires_grad_(), k.requires_grad_()
    rotated = function(q, k, cos, sin)
    return [*(t.detach() for t in rotated), *torch.autograd.grad(rotated, (q, k), grads)]


def _ours(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return rotary._rotated(None)(q, k, cos, sin)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_rotation_is_that_of_transformers_with_less_rounding(dtype: torch.dtype) -> None:
    exact = _run(apply_rotary_pos_emb, torch.float64)
    for ours, theirs, right in zip(_run(_ours, dtype), _run(apply_rotary_pos_emb, dtype), exact, strict=True):
        assert ours.dtype == dtype
        if dtype == torch.float64:
            torch.testing.assert_close(ours, right, rtol=0, atol=1e-15)
        else:
            assert float((ours - right).norm()) <= 1.2 * float((theirs - right).norm())


def test_gradients_of_a_rotation_pass_gradcheck() -> None:
    q, _, cos, sin, *_ = _drawn(torch.float64)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    assert torch.autograd.gradcheck(lambda q: RotationFunction.apply(q, cos, sin), (q.requires_grad_(),))


@pytest.mark.parametrize("change", ["wider", "trained", "partial"])
def test_what_the_formula_does_not_cover_is_left_to_transformers(change: str) -> None:
    q, k, cos, sin, *_ = _drawn(torch.float32)
    if change == "wider":
        cos, sin = cos.double(), sin.double()
    elif change == "trained":
        cos.requires_grad_()
    else:
        q, k = q.repeat(1, 1, 1, 2), k.repeat(1, 1, 1, 2)
    calls = []

    def original(*given: Any) -> tuple[Tensor, Tensor]:
        calls.append(given)
        return given[0], given[1]

    rotary._rotated(original)(q, k, cos, sin)
    assert len(calls) == 1


def test_only_attentions_that_call_the_known_rotation_are_taken() -> None:
    assert all(rotates(kind.forward) for kind in (LlamaAttention, Qwen3Attention, Gemma2Attention))
    assert not any(rotates(kind.forward) for kind in (Phi3Attention, LlamaMLP))


@pytest.mark.parametrize("name", ["apply_rotary_pos_emb", "rotate_half"])
def test_a_changed_rotation_is_trained_as_it_is(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def other(q: Any, k: Any = None, *_: Any, **__: Any) -> Any:
        return q if k is None else (q * 2, k)

    monkeypatch.setattr(modeling_llama, name, other)
    assert not rotates(LlamaAttention.forward)
    model = meshlora.load(twin_config("llama"), lora=LoraConfig(target_modules=["q_proj"]), dtype="float64")
    assert not any("forward" in vars(m) for m in model.modules() if isinstance(m, LlamaAttention))


def test_the_model_of_another_reads_the_functions_of_transformers() -> None:
    before = modeling_llama.apply_rotary_pos_emb
    model = meshlora.load(twin_config("llama"), lora=LoraConfig(target_modules=["q_proj"]), dtype="float64")
    (first, *_) = (m for m in model.modules() if isinstance(m, LlamaAttention))
    assert "forward" in vars(first)
    assert modeling_llama.apply_rotary_pos_emb is before


def test_a_forward_that_is_decorated_keeps_its_decorators() -> None:
    def renames(function: Any) -> Any:
        @functools.wraps(function)
        def renaming(*args: Any, old: Any = None, **kwargs: Any) -> Any:
            return function(*args, **kwargs, new=old)

        return renaming

    def forward(x: int, new: int = 0) -> int:
        return apply_rotary_pos_emb(x) + new

    own = rotary.with_rotation(renames(forward), lambda _: lambda x: 10 * x)
    assert own(1, old=2) == 12
    assert inspect.unwrap(own).__globals__ is not forward.__globals__, "the one of transformers is as it was"


def test_a_decorator_that_hides_what_it_wraps_is_left_alone() -> None:
    class Hides:
        def __init__(self, function: Any) -> None:
            functools.update_wrapper(self, function)

    assert not rotates(Hides(LlamaAttention.forward))

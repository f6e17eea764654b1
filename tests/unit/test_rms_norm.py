"""RMS norms with a frozen weight: transformers' values, its gradients with less rounding, and less that is kept."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import Tensor, nn
from torch._decomp import decomposition_table
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRMSNorm

import meshlora
from meshlora.wings.kernels import rms_norm
from meshlora.wings.kernels.rms_norm import is_known, own_gradients_of_norms
from meshlora_ground.float64 import lift
from meshlora_judge.twin import twin_config

SHAPES = {"tokens": (2, 5, 32), "heads": (2, 5, 4, 32), "flat": (7, 32)}


def _norms(dtype: torch.dtype) -> tuple[nn.Module, nn.Module]:
    """(transformers' own, ours), with the same frozen weight."""
    norm = LlamaRMSNorm(32, eps=1e-5).to(dtype)
    norm.weight = nn.Parameter(torch.rand(32, generator=_seeded(1)).to(dtype) + 0.5, requires_grad=False)
    ours = copy.deepcopy(norm)
    own_gradients_of_norms(ours)
    return norm, ours


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _run(norm: nn.Module, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    x = x.detach().clone().requires_grad_()
    y = norm(x)
    y.backward(g.to(y.dtype))
    assert x.grad is not None
    return y.detach(), x.grad


def _drawn(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    x = torch.randn(shape, generator=_seeded(2), dtype=torch.float64) * 3
    return x.to(dtype), torch.randn(shape, generator=_seeded(3), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_float64_is_that_of_transformers(shape: tuple[int, ...]) -> None:
    norm, ours = _norms(torch.float64)
    x, g = _drawn(shape, torch.float64)
    with lift():
        (y, dx), (expected_y, expected_dx) = _run(ours, x, g), _run(norm, x, g)
    assert torch.equal(y, expected_y)
    torch.testing.assert_close(dx, expected_dx, rtol=0, atol=2e-15)
    assert float(dx.norm()) > 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_values_are_the_same_bits_and_gradients_no_further_off(dtype: torch.dtype) -> None:
    """float64 without the lift has float32 inside, on both sides."""
    norm, ours = _norms(dtype)
    x, g = _drawn((3, 64, 32), dtype)
    with lift():
        _, exact = _run(_norms(dtype)[0].double(), x.double(), g.double())
    (y, dx), (expected_y, expected_dx) = _run(ours, x, g), _run(norm, x, g)
    assert torch.equal(y, expected_y)
    assert dx.dtype == expected_dx.dtype
    assert float((dx - exact).norm()) <= 1.2 * float((expected_dx - exact).norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_kernels_of_a_gpu_compute_the_same(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here torch has their arithmetic, for the compiler; the kernels themselves run in tests/gpu."""
    norm, ours = _norms(dtype)
    x, g = _drawn((3, 64, 32), dtype)
    with lift():
        _, exact = _run(_norms(dtype)[0].double(), x.double(), g.double())
    expected_y, expected_dx = _run(norm, x, g)
    calls: list[str] = []

    def back(grad: Tensor, x: Tensor, weight: Tensor, r: Tensor) -> Tensor:
        calls.append("back")
        given = grad, x, [x.shape[-1]], r, weight, [True, False]
        return decomposition_table[torch.ops.aten._fused_rms_norm_backward.default](*given)[0]

    monkeypatch.setattr(rms_norm, "_has_kernel", lambda *_: True)
    monkeypatch.setattr(rms_norm, "fused_norm_back", back)
    y, dx = _run(ours, x, g)
    assert calls
    assert torch.equal(y, expected_y)
    assert dx.dtype == dtype
    assert float((dx - exact).norm()) <= 1.2 * float((expected_dx - exact).norm())


def test_beside_bfloat16_the_input_is_kept_as_it_came() -> None:
    def kept(norm: nn.Module) -> int:
        found: dict[int, int] = {}

        def pack(t: Tensor) -> Tensor:
            found[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        x, g = _drawn((64, 32), torch.bfloat16)
        x.requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            norm(x).backward(g)
        found.pop(norm.weight.untyped_storage().data_ptr(), None)
        return sum(found.values())

    norm, ours = _norms(torch.bfloat16)
    assert kept(ours) == 64 * 32 * 2 + 64 * 4
    assert kept(norm) >= 64 * 32 * 4


def test_a_trained_weight_gets_its_gradient() -> None:
    norm, ours = _norms(torch.float64)
    x, g = _drawn((4, 32), torch.float64)
    for one in (norm, ours):
        one.weight.requires_grad_()
        _run(one, x, g)
    assert torch.equal(ours.weight.grad, norm.weight.grad)


def test_a_copy_of_a_model_has_its_own_norm() -> None:
    _, ours = _norms(torch.float64)
    other = copy.deepcopy(ours)
    with torch.no_grad():
        other.weight.zero_()
    x, g = _drawn((4, 32), torch.float64)
    assert not _run(other, x, g)[0].any()
    assert _run(ours, x, g)[0].any()


class Scaled(LlamaRMSNorm):
    def forward(self, hidden_states: Tensor) -> Tensor:
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(3).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance.abs() + self.variance_epsilon)
        return self.weight * hidden_states.to(input_dtype)


def test_only_norms_with_the_code_of_the_formula_are_taken() -> None:
    taken = [LlamaRMSNorm, Qwen3RMSNorm, Qwen3MoeRMSNorm]
    assert all(is_known(kind) for kind in taken)
    assert not any(is_known(kind) for kind in (GemmaRMSNorm, Olmo2RMSNorm, nn.RMSNorm, nn.LayerNorm, Scaled))


@pytest.mark.parametrize("has_source", [True, False])
def test_a_changed_library_is_trained_as_it_is(has_source: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of whatever transformers has: taken for the norm that it was, training would be 1.9 off its evaluation."""
    forward = Scaled.forward
    if not has_source:
        names: dict[str, Any] = {"torch": torch}
        source = "def forward(self, x):\n    return self.weight * x.pow(3)\n"
        exec(source, names)
        forward = names["forward"]
    monkeypatch.setattr(LlamaRMSNorm, "forward", forward)
    model = meshlora.load(twin_config("llama"), lora=LoraConfig(target_modules=["q_proj"]), dtype="float64")
    tokens = torch.arange(3, 19).reshape(1, 16)
    with torch.no_grad():
        evaluated = model(input_ids=tokens).logits
    trained = model.train()(input_ids=tokens).logits
    assert trained.requires_grad
    assert torch.equal(trained, evaluated)

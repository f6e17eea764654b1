"""Weights of experts from their own logits: against transformers' routers, with gradients, and where they are not."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn
from transformers import MixtralConfig, Qwen3MoeConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Config, DeepseekV3TopkRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextConfig, Qwen3NextTopKRouter
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import Qwen3VLMoeTextConfig, Qwen3VLMoeTextTopKRouter

from meshlora.wings.kernels.chosen_experts import is_known, own_weights_of_experts
from meshlora_ground.float64 import lift
from meshlora_ground.routing import Routing, RoutingRecord
from tests.for_each import for_each

T, E, K, H = 7, 6, 3, 8
QWEN = {"num_experts": E, "num_experts_per_tok": K, "hidden_size": H}
ROUTERS = {
    "qwen3_moe": lambda: Qwen3MoeTopKRouter(Qwen3MoeConfig(**QWEN, norm_topk_prob=True)),
    "qwen3_next": lambda: Qwen3NextTopKRouter(Qwen3NextConfig(**QWEN, norm_topk_prob=True)),
    "qwen3_vl_moe": lambda: Qwen3VLMoeTextTopKRouter(Qwen3VLMoeTextConfig(**QWEN)),
    "mixtral": lambda: MixtralTopKRouter(MixtralConfig(num_local_experts=E, num_experts_per_tok=K, hidden_size=H)),
}


def _router(name: str, dtype: torch.dtype) -> tuple[Any, Tensor]:
    """(A router with weights, hidden states of tokens)."""
    generator = torch.Generator().manual_seed(0)
    router: Any = ROUTERS[name]()
    with torch.no_grad():
        router.weight.copy_(torch.randn(E, H, generator=generator))
    return router.to(dtype), torch.randn(T, H, generator=generator).to(dtype).requires_grad_()


def _run(router: Any, x: Tensor) -> list[Tensor]:
    """Outputs, and the gradients of the logits and of x."""
    logits, weights, index = router(x)
    logits.retain_grad()
    shape = torch.arange(1.0, K + 1).to(weights.dtype)
    ((weights * shape).sum() + logits.square().sum()).backward()
    found, x.grad = x.grad, None
    assert found is not None
    assert logits.grad is not None
    return [logits, weights, index, logits.grad, found]


@for_each("dtype", [torch.float64, torch.float32, torch.bfloat16])
@for_each("name", ROUTERS)
def test_router_chooses_weighs_and_learns_as_transformers_does(name: str, dtype: torch.dtype) -> None:
    router, x = _router(name, dtype)
    with lift(dtype == torch.float64):
        expected = _run(router, x)
        own_weights_of_experts(router)
        assert "forward" in vars(router)
        found = _run(router, x)
    assert [t.dtype for t in found] == [t.dtype for t in expected]
    assert torch.equal(found[2], expected[2])
    tolerance = 16 * torch.finfo(dtype).eps
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs.double(), rtol=tolerance, atol=tolerance)


def test_float64_that_is_not_lifted_is_transformers_own() -> None:
    router, x = _router("mixtral", torch.float64)
    expected = _run(router, x)
    own_weights_of_experts(router)
    for ours, theirs in zip(_run(router, x), expected, strict=True):
        assert torch.equal(ours, theirs)


def test_choices_are_recorded_and_replayed() -> None:
    router, x = _router("qwen3_moe", torch.float64)
    block = nn.ModuleDict({"mlp": nn.Sequential(router)})
    other = (torch.arange(T).unsqueeze(1) + torch.arange(K)) % E
    results = []
    for knows in (False, True):
        if knows:
            own_weights_of_experts(router)
        record = RoutingRecord(T, {"mlp": E})
        record.choices[0, "mlp"] = other.int()
        with lift(), contextlib.ExitStack() as stack:
            routing = stack.enter_context(Routing(block, record, replays=True))
            routing.tokens = torch.arange(T)
            results.append(block["mlp"](x))
    for ours, theirs in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    assert torch.equal(results[1][2], other)


def test_routers_that_do_not_divide_or_are_of_another_kind_stay_their_own() -> None:
    others = (
        Qwen3MoeTopKRouter(Qwen3MoeConfig(**QWEN, norm_topk_prob=False)),
        DeepseekV3TopkRouter(DeepseekV3Config(n_routed_experts=8, hidden_size=H)),
        type("Changed", (MixtralTopKRouter,), {"forward": lambda self, x: x})(MixtralConfig(hidden_size=H)),
    )
    for router in others:
        assert not is_known(router)
        own_weights_of_experts(router)
        assert "forward" not in vars(router)

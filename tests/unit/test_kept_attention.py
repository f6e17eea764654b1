"""Attention of a layer that runs twice is computed once, whichever kernel it is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from meshlora.layers.kept_attention import KeptAttention, apart, once
from meshlora.wings.context import attention_parts
from meshlora.wings.packed_rows import varlen
from meshlora_ground.compat.torch_operators import FUSED_ATTENTIONS, TorchDispatchMode

aten = torch.ops.aten


class _Calls(TorchDispatchMode):
    """Counts kernels that run."""

    def __init__(self) -> None:
        super().__init__()
        self.of: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.of[func.name().split(".")[0]] += 1
        return func(*args, **(kwargs or {}))


def _varlen(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    ends = torch.zeros(3, dtype=torch.int32, device=query.device)
    each = [x.transpose(1, 2).flatten(0, 1) for x in (query, key, value)]
    return varlen_attn(*each, ends, ends, 8, 8)


# Those of GPUs on the meta device, where their shapes are known.
KERNELS: dict[str, tuple[str, Callable[[Tensor, Tensor, Tensor], Tensor]]] = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": ("cpu", F.scaled_dot_product_attention),
    "aten::_scaled_dot_product_flash_attention": (
        "meta",
        lambda q, k, v: aten._scaled_dot_product_flash_attention(q, k, v)[0],
    ),
    "aten::_scaled_dot_product_efficient_attention": (
        "meta",
        lambda q, k, v: aten._scaled_dot_product_efficient_attention(q, k, v, None, True)[0],
    ),
    "aten::_scaled_dot_product_cudnn_attention": (
        "meta",
        lambda q, k, v: aten._scaled_dot_product_cudnn_attention(q, k, v, None, True)[0],
    ),
    "torch_attn::_varlen_attn": ("meta", _varlen),
}


def test_every_kernel_has_its_case() -> None:
    assert KERNELS.keys() == FUSED_ATTENTIONS


def _inputs(device: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(2, 4, 8, 16, generator=generator).to(torch.bfloat16) for _ in range(3)]
    return [tensor.to(device).requires_grad_() for tensor in given]


@pytest.mark.parametrize("name", KERNELS)
def test_kernel_runs_once_and_its_second_result_has_the_graph_of_the_first(name: str) -> None:
    device, attention = KERNELS[name]
    inputs, kept = _inputs(device), KeptAttention()
    with _Calls() as calls:
        with kept.first():
            first = attention(*inputs)
        with kept.second():
            second = attention(*inputs)
    assert calls.of[name] == 1
    assert second.shape == first.shape
    assert second.grad_fn is not None
    assert second.grad_fn is not first.grad_fn
    gradients = [torch.autograd.grad(out.sum(), inputs) for out in (first, second)]
    if device == "cpu":
        assert torch.equal(second, first)
        for of_first, of_second in zip(*gradients, strict=True):
            assert torch.equal(of_first, of_second)


def test_each_attention_of_a_layer_gets_its_own() -> None:
    (query, key, value), kept = _inputs("cpu"), KeptAttention()

    def layer() -> list[Tensor]:
        return [F.scaled_dot_product_attention(query * scale, key, value) for scale in (1, 2)]

    with kept.first():
        first = layer()
    with kept.second():
        second = layer()
    assert not torch.equal(*first)
    assert all(map(torch.equal, first, second))


def test_attention_made_of_others_is_kept_as_one_and_what_is_tried_apart_not_at_all() -> None:
    inputs, kept = _inputs("cpu"), KeptAttention()
    calls = []

    def layer() -> Tensor:
        def in_parts() -> Tensor:
            calls.append(1)
            return F.scaled_dot_product_attention(*inputs) + F.scaled_dot_product_attention(*inputs)

        with torch.no_grad():
            if len(calls) == 0:
                with apart():
                    F.scaled_dot_product_attention(*inputs)
            return once("parts", in_parts)

    with kept.first():
        first = layer()
    with kept.second():
        second = layer()
    assert len(calls) == 1
    assert torch.equal(first, second)
    layer()
    assert len(calls) == 2, "outside of both nothing is kept or given"


def _attended(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, enable_gqa=True).transpose(1, 2)


def test_kernels_that_are_compared_at_first_use_are_none_of_the_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would be in the first forward, and not in the second."""
    inputs, kept, cpu = _inputs("cpu"), KeptAttention(), torch.device("cpu")
    monkeypatch.setattr(varlen, "in_one_call", _attended)
    with kept.first():
        assert attention_parts.agrees.__wrapped__(cpu, torch.bfloat16, 16)
        varlen.agrees.__wrapped__(cpu, torch.bfloat16, 16)
        first = F.scaled_dot_product_attention(*inputs)
    with kept.second():
        assert torch.equal(F.scaled_dot_product_attention(*inputs), first)


@pytest.mark.parametrize(
    ("times", "words"),
    [((1, 2), "where the first called nothing"), ((2, 1), "does not call .'aten::_scaled_dot"), ((0, 1), "nothing")],
)
def test_a_second_forward_that_attends_otherwise_ends(times: tuple[int, int], words: str) -> None:
    inputs, kept = _inputs("cpu"), KeptAttention()

    def layer(number: int) -> None:
        for _ in range(number):
            F.scaled_dot_product_attention(*inputs)

    with kept.first():
        layer(times[0])
    with pytest.raises(AssertionError, match=words), kept.second():
        layer(times[1])
    once("parts", lambda: None)


def test_another_kernel_than_the_first_time_ends() -> None:
    inputs, kept = _inputs("cpu"), KeptAttention()
    with kept.first():
        F.scaled_dot_product_attention(*inputs)
    with pytest.raises(AssertionError, match="calls parts, where the first called aten::"), kept.second():
        once("parts", lambda: None)

"""What rides with a region's input: the numbers and gradients of the linear that has all of x, however it is called."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from meshlora.comm.groups import Axis
from meshlora.layers.linear import ParallelLinear
from meshlora.layers.rounded import scaled_product
from meshlora.layers.tokens import ForwardTokens, Share
from meshlora.plan.layout import Split
from meshlora.plan.rules import LinearRule
from meshlora.wings.kernels import early_a
from meshlora.wings.kernels.early_a import Rider, pack, rider, rode_along, unpack
from meshlora.wings.kernels.entrance import Entrance
from meshlora.wings.quantized import quantized

ALONE = Axis(1, 0, (0,), None)
T, H, R = 48, 64, (2, 3)
OUT = 8, 5


def _linears(
    *, bias: bool = False, dropout: float = 0.0, packed: str | None = None, has_one_scale: bool = False
) -> list[ParallelLinear]:
    torch.manual_seed(0)
    found = []
    for number, (out, r) in enumerate(zip(OUT, R, strict=True)):
        rule = LinearRule(f"linear-{number}", Split.WHOLE, H, out, has_bias=bias)
        leaf = ParallelLinear(rule, ALONE, scatters_tokens=False, dtype=torch.float64, device="cpu")
        with torch.no_grad():
            for parameter in leaf.parameters():
                parameter.normal_()
        if packed:
            leaf.hold(quantized.pack(leaf.weight, packed))
        factors = {"A": torch.randn(r, H, dtype=torch.float64), "B": torch.randn(out, r, dtype=torch.float64)}
        leaf.add_adapter("one", factors, scaling=0.6 if has_one_scale else 0.5 + number)
        if dropout:
            leaf.set_dropout("one", dropout, ForwardTokens(ALONE, sp=False))
            assert leaf.tokens is not None
            leaf.tokens._shares = (Share(None, torch.arange(T).unsqueeze(0)),)
        for factor in leaf.trained("one").values():
            factor.requires_grad_(True)
        leaf.active = "one"
        found.append(leaf)
    for leaf in found:
        leaf.enter = Entrance(has_neighbours=True, together=found)
    return found


def _riding(x: Tensor, leaves: list[ParallelLinear]) -> tuple[Tensor, list[Rider]]:
    """x as a region gets it: on one rank what is gathered is what was put together."""
    riders = [one for leaf in leaves if (one := rider(leaf, x))]
    return unpack(pack(x, riders), x.shape[-1], riders), riders


def _results(leaves: list[ParallelLinear], called: Callable[[Tensor], list[Tensor]]) -> list[Tensor]:
    """Outputs, the gradient of x, and those of all factors, of `called` with the input of `leaves`."""
    torch.manual_seed(1)
    x = torch.randn(2, T // 2, H, dtype=torch.float64, requires_grad=True)
    inner = x * 1.0  # in a region x comes from another operation
    ys = called(inner)
    torch.autograd.backward(ys, [torch.randn_like(y) for y in ys])
    assert x.grad is not None
    grads = [factor.grad for leaf in leaves for factor in leaf.trained("one").values()]
    assert all(grad is not None for grad in grads)
    return [*(y.detach() for y in ys), x.grad, *(grad for grad in grads if grad is not None)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bias": True},
        {"dropout": 0.4},
        {"packed": "nf4"},
        {"has_one_scale": True},
        {"has_one_scale": True, "dropout": 0.4},
    ],
    ids=str,
)
def test_linears_whose_z_rides_compute_what_they_compute_by_themselves(options: dict[str, object]) -> None:
    def together(x: Tensor) -> list[Tensor]:
        whole, riders = _riding(x, leaves)
        assert [one.leaf for one in riders] == leaves
        assert all(rode_along(leaf, whole) is not None for leaf in leaves)
        return [leaf(whole) for leaf in leaves]

    leaves = _linears(**options)  # type: ignore[arg-type]
    ours = _results(leaves, together)
    leaves = _linears(**options)  # type: ignore[arg-type]
    alone = _results(leaves, lambda x: [leaf(x) for leaf in leaves])
    for mine, other in zip(ours, alone, strict=True):
        assert float((mine - other).norm() / other.norm()) < 1e-14


@pytest.mark.parametrize(
    "change",
    [lambda x: x.clone(), lambda x: x.view(-1, H), lambda x: x.mul_(1.0)],
    ids=["a copy", "another shape", "changed in place"],
)
def test_a_linear_that_is_called_with_another_tensor_takes_that_one(change: Callable[[Tensor], Tensor]) -> None:
    def together(x: Tensor) -> list[Tensor]:
        whole, _ = _riding(x, leaves)
        first = leaves[0](whole)
        other = change(whole)
        assert rode_along(leaves[1], other) is None
        return [first, leaves[1](other).view(2, T // 2, -1)]

    leaves = _linears()
    ours = _results(leaves, together)
    leaves = _linears()
    alone = _results(leaves, lambda x: [leaf(x) for leaf in leaves])
    for mine, other in zip(ours, alone, strict=True):
        assert float((mine - other).norm() / other.norm()) < 1e-14


@pytest.mark.parametrize("frozen", [0, 1])
def test_one_frozen_factor_of_joined_products_has_no_gradient_and_changes_no_other(frozen: int) -> None:
    found = []
    for is_frozen in (False, True):
        leaves = _linears(has_one_scale=True)
        if is_frozen:
            leaves[frozen].trained("one")["A"].requires_grad_(False)
        torch.manual_seed(1)
        x = torch.randn(1, T, H, dtype=torch.float64, requires_grad=True)
        whole, _ = _riding(x * 1.0, leaves)
        torch.stack([leaf(whole).square().sum() for leaf in leaves]).sum().backward()
        found.append([leaf.trained("one")["A"].grad for leaf in leaves])
    (plain, changed), other = found, 1 - frozen
    assert changed[frozen] is None
    torch.testing.assert_close(changed[other], plain[other], rtol=1e-13, atol=1e-13)


ONE_SCALE = {"has_one_scale": True}


@pytest.mark.parametrize(("options", "expected"), [({}, 2), (ONE_SCALE, 1), (ONE_SCALE | {"dropout": 0.4}, 2)], ids=str)
def test_riders_with_one_scale_have_one_product(
    options: dict[str, Any], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    product = mock.Mock(side_effect=scaled_product)
    monkeypatch.setattr(early_a, "scaled_product", product)
    _riding(torch.randn(1, T, H, dtype=torch.float64, requires_grad=True) * 1.0, _linears(**options))
    assert product.call_count == expected


def test_who_rides() -> None:
    leaf = _linears()[0]
    x = torch.randn(1, T, H, dtype=torch.float64)
    assert rider(leaf, x) is not None
    assert rider(leaf, x[..., :-1]) is None, "its input is another"
    leaf.active = None
    assert rider(leaf, x) is None, "the base alone"


def test_what_was_gathered_and_all_of_x_are_gone_after_the_forward() -> None:
    """z and the tokens of this rank are kept."""
    leaves = _linears()
    x = torch.randn(1, T, H, dtype=torch.float64, requires_grad=True) * 1.0
    riders = [one for leaf in leaves if (one := rider(leaf, x))]
    gathered = pack(x, riders)
    storage = weakref.ref(gathered.untyped_storage())
    whole = unpack(gathered, H, riders)
    ys = [leaf(whole) for leaf in leaves]
    seen = weakref.ref(whole)
    del gathered, whole
    gc.collect()
    assert seen() is None
    assert storage() is None
    assert all(y.requires_grad for y in ys)

"""The MLP of all experts of a layer as one function: against a loop over tokens and choices, float64."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from meshlora.wings.experts.mlp import GroupedMlpFunction
from meshlora.wings.experts.products import Projection, inverse_of, sort_by_expert
from tests.for_each import for_each
from tests.unit.test_grouped import assert_exact, by_loop, drawn, make_case, saved_by

TOKENS, TOP_K, EXPERTS, HIDDEN, WIDTH = 7, 3, 5, 6, 4


def _gate(up: Tensor) -> Tensor:
    gate, value = up.chunk(2, -1)
    return F.silu(gate) * value


@dataclass
class _Mlp:
    """Experts with their tokens. Expert 3 is never chosen."""

    fc1: Projection
    fc2: Projection
    x: Tensor
    weights: Tensor
    factors: list[Tensor]
    chosen: Tensor
    g: Tensor

    @property
    def leaves(self) -> list[Tensor]:
        return [self.x, self.weights, *self.factors]

    def run(self, *, leaves: list[Tensor] | None = None, has_weights: bool = True) -> Tensor:
        x, weights, *factors = leaves or self.leaves
        order, counts = sort_by_expert(self.chosen, EXPERTS)
        places = inverse_of(order).view(self.chosen.shape)
        index = order // self.chosen.shape[1]
        return GroupedMlpFunction.apply(
            x, weights if has_weights else None, index, places, counts, _gate, self.fc1, self.fc2, *factors
        )

    def plain(self, *, has_weights: bool = True) -> Tensor:
        """Token by token, choice by choice."""
        a1, b1, a2, b2 = self.factors
        out = []
        for token, experts in enumerate(self.chosen.tolist()):
            total = torch.zeros(HIDDEN, dtype=self.x.dtype)
            for choice, e in enumerate(experts):
                counts = [int(i == e) for i in range(EXPERTS)]
                up = by_loop(self.x[token : token + 1], self.fc1, counts, a1, b1)
                y = by_loop(_gate(up), self.fc2, counts, a2, b2)[0]
                total = total + (self.weights[token, choice] * y if has_weights else y)
            out.append(total)
        return torch.stack(out) if out else self.x * 0


def _mlp(*, has_bias: bool = False, is_transposed: bool = False, shared: bool = False, tokens: int = TOKENS) -> _Mlp:
    counts = [1] * EXPERTS
    first = make_case(
        counts, has_bias=has_bias, is_transposed=is_transposed, shared="a" * shared, sizes=(HIDDEN, 2 * WIDTH, 2)
    )
    second = make_case(
        counts, has_bias=has_bias, is_transposed=is_transposed, shared="b" * shared, sizes=(WIDTH, HIDDEN, 3)
    )
    scores = drawn(tokens, EXPERTS, seed=7)
    scores[:, 3] = -torch.inf
    return _Mlp(
        first.projection,
        second.projection,
        drawn(tokens, HIDDEN, seed=8).requires_grad_(),
        drawn(tokens, TOP_K, seed=9).softmax(1).requires_grad_(),
        [first.a, first.b, second.a, second.b],
        scores.topk(TOP_K, dim=1).indices,
        drawn(tokens, HIDDEN, seed=10),
    )


@for_each("has_weights", [True, False], ids=["weights", "no weights"])
@for_each("shared", [False, True], ids=["own", "shared"])
@for_each("is_transposed", [False, True], ids=["out-in", "in-out"])
@for_each("has_bias", [False, True], ids=["no bias", "bias"])
def test_mlp_is_a_loop_over_tokens_and_choices(
    has_bias: bool, is_transposed: bool, shared: bool, has_weights: bool
) -> None:
    mlp = _mlp(has_bias=has_bias, is_transposed=is_transposed, shared=shared)
    out, expected = mlp.run(has_weights=has_weights), mlp.plain(has_weights=has_weights)
    assert_exact(out, expected)
    leaves = mlp.leaves if has_weights else [mlp.x, *mlp.factors]
    found = torch.autograd.grad(out, leaves, mlp.g)
    for actual, wanted in zip(found, torch.autograd.grad(expected, leaves, mlp.g), strict=True):
        assert_exact(actual, wanted)


def test_mlp_of_no_tokens() -> None:
    mlp = _mlp(tokens=0)
    out = mlp.run()
    assert out.shape == (0, HIDDEN)
    for leaf, gradient in zip(mlp.leaves, torch.autograd.grad(out, mlp.leaves, mlp.g), strict=True):
        assert gradient.shape == leaf.shape
        assert not gradient.any()


@pytest.mark.parametrize("trained", ["x", "weights", "a1", "b1", "a2", "b2"])
def test_mlp_gives_each_gradient_alone(trained: str) -> None:
    mlp = _mlp(has_bias=True)
    place = ["x", "weights", "a1", "b1", "a2", "b2"].index(trained)
    (expected,) = torch.autograd.grad(mlp.plain(), mlp.leaves[place], mlp.g)
    leaves = [leaf if i == place else leaf.detach() for i, leaf in enumerate(mlp.leaves)]
    (found,) = torch.autograd.grad(mlp.run(leaves=leaves), leaves[place], mlp.g)
    assert_exact(found, expected)


def test_mlp_without_factors() -> None:
    mlp = _mlp(has_bias=True)
    order, counts = sort_by_expert(mlp.chosen, EXPERTS)
    places = inverse_of(order).view(mlp.chosen.shape)
    out = GroupedMlpFunction.apply(
        mlp.x, mlp.weights, order // TOP_K, places, counts, _gate, mlp.fc1, mlp.fc2, None, None, None, None
    )
    with torch.no_grad():
        for b in mlp.factors[1::2]:
            b.zero_()
    expected = mlp.plain()
    assert_exact(out, expected)
    leaves = (mlp.x, mlp.weights)
    for actual, wanted in zip(
        torch.autograd.grad(out, leaves, mlp.g), torch.autograd.grad(expected, leaves, mlp.g), strict=True
    ):
        assert_exact(actual, wanted)


def test_mlp_keeps_one_tensor_with_a_row_for_each_choice() -> None:
    mlp = _mlp()
    _, kept = saved_by(mlp.run)
    wide = [t for t in kept if t.dim() == 2 and t.shape[0] == TOKENS * TOP_K]
    assert [tuple(t.shape) for t in wide] == [(TOKENS * TOP_K, 2 * WIDTH)]  # fc1(x)

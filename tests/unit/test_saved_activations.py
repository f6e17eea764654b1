"""What a dense layer keeps for its backward: counted, to the tensor; and that keeping less changes no gradient."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable
from itertools import chain
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import meshlora
from meshlora.adapter.attach import active_factors
from meshlora.layers.products import Entered, GivenZFunction, LoraLinearFunction
from meshlora.layers.tokens import Segment
from meshlora.train.losses import shifted_loss
from meshlora.wings.kernels.gate_recompute import product_behind, watch_activations
from meshlora.wings.kernels.shared_input import Joined, share
from meshlora_judge.twin import twin_config
from tests.pool import Pool

B, S, R = 2, 8, 4
T, H, F_, HEADS, KV, D = B * S, 64, 128, 8, 4, 8  # of the llama twin


def _model(topology: str = "", **options: Any) -> Any:
    lora = LoraConfig(r=R, target_modules="all-linear", init_lora_weights=False)
    return meshlora.load(twin_config("llama", **options), lora=lora, topology=topology, dtype="float32")


def _saved(model: nn.Module) -> Counter[int]:
    """Numbers of elements of what the forward and the loss leave, each storage once, without parameters."""
    own = {t.untyped_storage().data_ptr() for t in chain(model.parameters(), model.buffers())}
    held: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        pointer = tensor.untyped_storage().data_ptr()
        if pointer not in own:
            held.setdefault(pointer, tensor.detach())
        return tensor

    ids = torch.arange(3, 3 + T).view(B, S)
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        shifted_loss(model.train(), ids, None, ids.roll(-1, 1))
    return Counter(t.untyped_storage().nbytes() // t.element_size() for t in held.values())


def _of_a_layer(topology: str) -> Counter[int]:
    two, four = (_saved(_model(topology, num_hidden_layers=n)) for n in (2, 4))
    return Counter({size: (four[size] - two[size]) // 2 for size in four if four[size] != two[size]})


def _expected(tp: int, *, sp: bool) -> Counter[int]:
    residual = T * H // tp if sp else T * H
    tensors = [
        *(residual, residual // H) * 2,  # what each norm reads, and one number a token
        residual,  # what q, k and v read: once for the three; under sp this rank's tokens of it
        *(T * HEADS * D // tp,) * 2,  # q, and what the attention returns, which o reads too
        *(T * KV * D // tp,) * 2,  # k, v
        T * HEADS // tp,  # of each row of scores the logarithm of its sum
        residual,  # what gate and up read
        *(T * F_ // tp,) * 2,  # gate, up: neither the activation nor the product
        *(T * R,) * (7 if sp else 2),  # x A^T of each linear
    ]
    tensors += [3 * R * H, 2 * R * H]  # the A of q, k, v, and of gate, up
    if not sp:  # and their x A^T, together
        tensors += [3 * T * R, 2 * T * R]
    return Counter(tensors)


def test_a_layer_keeps_exactly_these_tensors() -> None:
    assert _of_a_layer("") == _expected(1, sp=False)


@pytest.mark.parametrize("topology", ["tp=2", "tp=2,sp"])
def test_a_layer_on_two_ranks_keeps_exactly_these_tensors(topology: str, pools: Callable[[int], Pool]) -> None:
    for found in pools(2).run(_of_a_layer, topology):
        assert found == _expected(2, sp="sp" in topology)


# --- the gated product


class _Mlp(nn.Module):
    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.act_fn = act

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        return self.act_fn(gate) * up


def _gate_and_up() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    leaves = torch.randn(2, 3, 5, generator=generator, dtype=torch.float64)
    return leaves[0].requires_grad_(), leaves[1].requires_grad_()


def _watched(act: nn.Module) -> _Mlp:
    model = nn.ModuleDict({"mlp": _Mlp(act)})
    watch_activations(model, ["mlp"])
    return model["mlp"]  # type: ignore[return-value]


@pytest.mark.parametrize("act", [nn.SiLU(), nn.GELU(), nn.GELU(approximate="tanh"), nn.ReLU()], ids=str)
def test_gradients_of_a_gated_product_pass_gradcheck(act: nn.Module) -> None:
    mlp = _watched(act)
    assert product_behind(mlp(*_gate_and_up())) is not None
    assert torch.autograd.gradcheck(mlp, _gate_and_up())


def test_a_linear_on_a_gated_product_has_the_gradients_of_the_formula() -> None:
    mlp, plain = _watched(nn.SiLU()), _Mlp(nn.SiLU())
    weight, a, b = (torch.randn(shape, dtype=torch.float64) for shape in ((7, 5), (2, 5), (7, 2)))
    a, b = a.requires_grad_(), b.requires_grad_()

    def gradients(mlp: nn.Module) -> tuple[Tensor, ...]:
        gate, up = _gate_and_up()
        x = mlp(gate, up)
        entered = Entered(x, source=product_behind(x))
        y = LoraLinearFunction.apply(x, None, weight, None, [Segment(0, 3, 0.5)], entered, a, b)
        return torch.autograd.grad(y.square().sum(), (gate, up, a, b))

    for ours, expected in zip(gradients(mlp), gradients(plain), strict=True):
        assert torch.allclose(ours, expected, rtol=1e-12)


def test_a_product_that_was_changed_in_place_is_none_any_more() -> None:
    x = _watched(nn.SiLU())(*_gate_and_up())
    x.mul_(2)
    assert product_behind(x) is None


def test_whatever_else_is_done_with_an_activation_is_done_as_always() -> None:
    gate, up = _gate_and_up()
    activated, plain = _watched(nn.SiLU()).act_fn(gate), F.silu(gate)
    for function in (lambda t: t + up, lambda t: t * 2.0, lambda t: up * t[:1], lambda t: t.mul(up[:1]), torch.relu):
        found = function(activated)
        assert type(found) is Tensor
        assert torch.equal(found, function(plain))
    with torch.no_grad():
        assert product_behind(_watched(nn.SiLU())(gate, up)) is None


# --- the shared input


@pytest.mark.parametrize("dropped", [(), (1,), (0, 2)], ids=str)
def test_joined_products_with_a_have_the_gradients_of_each(dropped: tuple[int, ...]) -> None:
    """dropped: linears that are not called with this input after all."""
    generator = torch.Generator().manual_seed(0)
    leaf = torch.randn(2, 3, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    factors = [torch.randn(r, 5, generator=generator, dtype=torch.float64, requires_grad=True) for r in (2, 4, 3)]
    leaves = [nn.Identity() for _ in factors]
    used = [place for place in range(3) if place not in dropped]

    def gradients(*, is_joined: bool) -> tuple[Tensor | None, ...]:
        x = leaf * 1
        flat = x.view(-1, 5)
        if is_joined:
            shared = share(x, Joined(leaves, factors, 0.5))
            assert shared is not None
            zs = [shared.zs[leaves[place]] for place in used]
        else:
            zs = [0.5 * flat @ factors[place].T for place in used]
        total = sum((z.square().sum() * (n + 1) for n, z in enumerate(zs)), x.sum())
        return torch.autograd.grad(total, (leaf, *factors), allow_unused=True)

    for ours, expected in zip(gradients(is_joined=True), gradients(is_joined=False), strict=True):
        assert (ours is None) == (expected is None)
        if ours is not None and expected is not None:
            torch.testing.assert_close(ours, expected, rtol=1e-13, atol=1e-13)


def test_joined_gradients_are_those_of_each_linear_however_often_it_is_called() -> None:
    """The first is called twice, the second is read in the graph too, the third is left out, and a backward before it
    ends without reaching the input."""
    generator = torch.Generator().manual_seed(0)
    leaf = torch.randn(2, 3, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    shapes = (2, 5), (4, 5), (3, 5), (7, 2), (6, 4), (7, 5), (6, 5)
    a1, a2, a3, b1, b2, w1, w2 = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
    trained = [factor.requires_grad_() for factor in (a1, a2, a3, b1, b2)]
    leaves = [nn.Identity() for _ in range(3)]

    def gradients(*, is_joined: bool) -> tuple[Tensor | None, ...]:
        x = leaf * 1
        if is_joined:
            shared = share(x, Joined(leaves, (a1, a2, a3), 0.3))
            assert shared is not None
            z2 = shared.zs[leaves[1]]

            def linear(place: int, w: Tensor, b: Tensor) -> Tensor:
                z, take_dz = shared.zs[leaves[place]], shared.takes[leaves[place]]
                own = Entered(x.detach(), z, None, shared.gradient, shared.token, take_dz)
                return GivenZFunction.apply(own.x, own.token, w, None, own, z, b)

        else:
            z2 = 0.3 * x.view(-1, 5) @ a2.T

            def linear(place: int, w: Tensor, b: Tensor) -> Tensor:
                return x @ w.T + 0.3 * (x @ (a1, a2)[place].T) @ b.T

        total, stops_at = z2.pow(3).sum(), [b1, z2]
        for place, w, b in ((0, w1, b1), (0, 2 * w1, 2 * b1), (1, w2, b2)):
            total = total + linear(place, w, b).square().sum()
        torch.autograd.grad(total, stops_at, retain_graph=True)
        return torch.autograd.grad(total, (leaf, *trained), allow_unused=True)

    for ours, expected in zip(gradients(is_joined=True), gradients(is_joined=False), strict=True):
        assert (ours is None) == (expected is None)
        if ours is not None and expected is not None:
            torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)


def test_a_backward_that_was_aborted_leaves_nothing_for_the_next() -> None:
    leaf, w, a, b = (torch.ones(s, requires_grad=True) for s in ((3, 5), (7, 5), (2, 5), (7, 2)))
    shared = share(x := leaf * 1, Joined([own := nn.Identity()], [a], 0.5))
    assert shared is not None
    z = shared.zs[own]
    entered = Entered(x.detach(), z, None, shared.gradient, shared.token, shared.takes[own])
    y = GivenZFunction.apply(entered.x, entered.token, w.detach(), None, entered, z, b)
    torch.autograd.grad(y.sum(), z, allow_unused=True)
    assert torch.autograd.grad(shared.token.sum(), (leaf, a), allow_unused=True) == (None, None)


def _shared_and_apart(*, is_shared: bool) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    leaf, w, a, b = (
        torch.randn(s, generator=generator, dtype=torch.float64) for s in ((2, 3, 5), (7, 5), (2, 5), (7, 2))
    )
    leaf, a, b = (t.requires_grad_() for t in (leaf, a, b))
    x = leaf * 1
    total = x.sum()  # another reader
    for scale in (0.5, 2.0, 3.0):
        shared = share(x) if is_shared else None
        known = {} if shared is None else {"gradient": shared.gradient, "token": shared.token}
        own = Entered(x if shared is None else x.detach(), **known)  # type: ignore[arg-type]
        y = LoraLinearFunction.apply(own.x, own.token, w * scale, None, [Segment(0, 6, scale)], own, a, b)
        total = total + y.square().sum()
    # Stops before the input: what was added up there must not come into the next backward.
    torch.autograd.grad(total, (a,), retain_graph=True)
    return torch.autograd.grad(total, (leaf, a, b))


def test_linears_that_share_an_input_add_up_its_gradient() -> None:
    for ours, expected in zip(_shared_and_apart(is_shared=True), _shared_and_apart(is_shared=False), strict=True):
        assert torch.allclose(ours, expected, rtol=1e-12)


def test_an_input_that_was_changed_in_place_is_another_input() -> None:
    x = torch.ones(2, 3, requires_grad=True) * 1
    before = share(x)
    assert before is not None
    assert share(x) is before
    x.mul_(2)
    assert share(x) is not before


def test_a_change_of_a_shared_input_is_noticed_by_who_saved_it() -> None:
    leaf, w, a, b = (torch.ones(s, requires_grad=True) for s in ((3, 5), (7, 5), (2, 5), (7, 2)))
    x = leaf * 1
    shared = share(x)
    assert shared is not None
    own = Entered(x.detach(), gradient=shared.gradient, token=shared.token)
    y = LoraLinearFunction.apply(own.x, own.token, w.detach(), None, [Segment(0, 3, 0.5)], own, a, b)
    x.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_graph_that_nobody_holds_is_freed_with_its_input() -> None:
    gc.disable()
    try:
        x = torch.ones(2, 3, requires_grad=True) * 1
        shared = share(x)
        assert shared is not None
        found = weakref.ref(shared.gradient)
        del x, shared
        assert found() is None
    finally:
        gc.enable()


def test_gradients_of_a_whole_model_do_not_depend_on_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def gradients() -> dict[str, Tensor]:
        lora = LoraConfig(r=R, target_modules="all-linear", init_lora_weights=False)
        model = meshlora.load(twin_config("llama"), lora=lora, dtype="float64")
        ids = torch.arange(3, 3 + T).view(B, S)
        shifted_loss(model.train(), ids, None, ids.roll(-1, 1)).backward()
        return {f.name: f.parameter.grad for f in active_factors(model) if f.parameter.grad is not None}

    ours = gradients()
    monkeypatch.setattr("meshlora.wings.kernels.entrance.product_behind", lambda x: None)
    monkeypatch.setattr("meshlora.wings.kernels.entrance.share", lambda *_: None)
    for name, expected in gradients().items():
        assert torch.allclose(ours[name], expected, rtol=1e-10), name

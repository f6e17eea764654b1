"""Sums of the residual stream with the norm after them: what the operators compute, and which layers take them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM

import meshlora
from meshlora.layers.frozen import FewBits
from meshlora.run.recompute import recompute_layers
from meshlora.train.losses import shifted_loss
from meshlora.wings.kernels import fused
from meshlora.wings.kernels import kernels as chosen
from meshlora.wings.kernels import stream_sums as module
from meshlora.wings.kernels.stream_sums import (
    NormFunction,
    Ready,
    StreamKernels,
    SumFunction,
    Unfinished,
    stream_kernels,
)
from meshlora_ground.errors import UnsupportedError
from meshlora_ground.float64 import lift
from tests.kernels import STAND_IN
from tests.twins import make_batches, make_twin

TOKENS, WIDTH, SCALE, EPS = 37, 300, 0.7, 1e-5


def drawn(dtype: torch.dtype, rank: int) -> list[Tensor]:
    """y, z, B, residual, weight, and the gradients of n and of h."""
    generator = torch.Generator().manual_seed(0)
    whole = TOKENS, WIDTH
    shapes = [whole, (TOKENS, rank), (WIDTH, rank), whole, (WIDTH,), whole, whole]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def distances(dtype: torch.dtype, rank: int, own: StreamKernels) -> dict[str, float]:
    """How far each result is from the same computed in float64 by autograd, relative to its norm."""
    y, z, b, residual, weight, of_n, of_h = drawn(dtype, rank)
    h, n, r = own.forward(y, z, b, residual, weight, EPS)
    exact = y.double() + z.double() @ b.double().T + residual.double()
    leaf = h.double().clone().requires_grad_()  # of the sum as it was rounded
    inverse = (leaf.square().mean(1) + EPS).rsqrt()
    normed = leaf * inverse.unsqueeze(1) * weight.double()
    (of_norm,) = torch.autograd.grad(normed, leaf, of_n.double())
    found = {"h": (h, exact), "n": (n, normed.detach()), "r": (r, inverse.detach())}
    for name, passed, total in (("last", None, of_norm), ("between", of_h, of_norm + of_h.double())):
        dh, dz = own.back(of_n, passed, h, weight, r, b, SCALE)
        found |= {f"dh, {name}": (dh, total), f"dz, {name}": (dz, SCALE * total @ b.double())}
    return {name: float((mine.double() - right).norm() / right.norm()) for name, (mine, right) in found.items()}


@pytest.mark.parametrize(
    ("dtype", "limit"),
    [(torch.float64, 1e-13), (torch.float32, 1e-6), (torch.bfloat16, 2**-7), (torch.float16, 2**-10)],
)
def test_operators_compute_what_autograd_does(dtype: torch.dtype, limit: float) -> None:
    found = distances(dtype, 5, stream_kernels())
    assert max(found.values()) < limit, found


@pytest.mark.liger
@pytest.mark.parametrize("rank", [1, 16, 32])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-6), (torch.float16, 2**-10)])
def test_kernels_compute_what_autograd_does(dtype: torch.dtype, limit: float, rank: int) -> None:
    """By the interpreter, which computes bfloat16 wrongly."""
    found = distances(dtype, rank, StreamKernels(module._on_gpu, module._back_on_gpu))
    assert max(found.values()) < limit, found


# --- the graph --------------------------------------------------------------------------------------------------------


class _Whole(FewBits):
    """A matrix whose products are those of kernels, which add to nothing."""

    has_forward = has_backward = True

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    shape = property(lambda self: self.weight.shape)
    mT = property(lambda self: _Whole(self.weight.mT))

    def __len__(self) -> int:
        return len(self.weight)

    def __getitem__(self, expert: int) -> Tensor:
        return self.weight[expert]

    def whole(self) -> Tensor:
        return self.weight


class _Shared:
    """The gradient of an input to which another linear has added ones."""

    def __init__(self) -> None:
        self.total = torch.ones(TOKENS, WIDTH, dtype=torch.float64)

    def so_far(self) -> Tensor:
        return self.total

    def hold(self, total: Tensor) -> None:
        self.total = total


@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("has_z", [False, True])
@pytest.mark.parametrize("is_packed", [False, True])
def test_gradients_are_those_of_autograd(is_packed: bool, has_z: bool, is_shared: bool) -> None:
    _, z, b, residual, w, of_n, of_h = drawn(torch.float64, 5)
    x, weight = torch.randn(2, TOKENS, WIDTH, dtype=torch.float64), torch.randn(WIDTH, WIDTH, dtype=torch.float64)
    x, a = x[0], x[1, :5]
    leaves = [tensor.clone().requires_grad_() for tensor in (x, z if has_z else a, b, residual)]

    def loss(n: Tensor, h: Tensor) -> Tensor:
        return (n * of_n).sum() + (h * of_h).sum()

    of_x, low, of_b, stream = leaves
    h = of_x @ weight.T + (low if has_z else SCALE * of_x @ low.T) @ of_b.T + stream
    n = h * (h.square().mean(1, keepdim=True) + EPS).rsqrt() * w
    right = list(torch.autograd.grad(loss(n, h), leaves))

    norm = SimpleNamespace(weight=w, variance_epsilon=EPS)
    ready, shared = Ready(norm, stream_kernels()), _Shared() if is_shared else None
    given_x = of_x.detach() if is_shared else of_x
    terms = (low, None) if has_z else (None, low)
    matrix = _Whole(weight) if is_packed else weight
    how = 1.0 if has_z else SCALE, shared, ready
    found = SumFunction.apply(given_x, None, matrix, None, *terms, of_b, stream, how)
    own = loss(*NormFunction.apply(found, w, ready))
    gradients = list(torch.autograd.grad(own, leaves[is_shared:]))
    if shared is not None:
        gradients.insert(0, shared.total - 1.0)
    for mine, wanted in zip(gradients, right, strict=True):
        assert float((mine - wanted).norm() / wanted.norm()) < 1e-12


# --- the layers that call them ----------------------------------------------------------------------------------------


class _Counting:
    """The operators, counting their calls."""

    def __init__(self) -> None:
        self.forwards = self.backwards = 0

    def kernels(self) -> StreamKernels:
        own = stream_kernels()

        def forward(*given: Any) -> Any:
            self.forwards += 1
            return own.forward(*given)

        def back(*given: Any) -> Any:
            self.backwards += 1
            return own.back(*given)

        return StreamKernels(forward, back)


Hook = Callable[[Any, Any, Tensor], Tensor | None]


def _gradients(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    recompute: str | int = "none",
    hook: Hook | None = None,
    **options: Any,
) -> tuple[dict[str, dict[str, Tensor]], _Counting]:
    """The gradients of a twin of two layers without kernels and with them, by their names, and what was called.

    hook: of the first layer's output."""
    monkeypatch.setattr(chosen, "liger", lambda *_: STAND_IN)
    monkeypatch.setattr(chosen, "_refusal", lambda *_, **__: None)  # which asks for a GPU
    monkeypatch.setattr(chosen, "check_kernels", lambda *_: None)
    counting = _Counting()
    monkeypatch.setattr(chosen, "stream_kernels", counting.kernels)
    found: dict[str, dict[str, Tensor]] = {}
    for kernels in ("none", "fused"):
        given = {"dtype": "float32"} | options
        model = meshlora.load(folder / "model", kernels=kernels, **given).train(not options["lora"].lora_dropout)
        recompute_layers(model, recompute)
        if hook is not None:
            model.model.layers[0].register_forward_hook(hook)
        ids = make_batches().input_ids
        loss = shifted_loss(model, ids, None, ids.roll(-1, 1))
        if hook is not None:
            loss = loss + sum(kept.square().sum() for kept in _KEPT)
            _KEPT.clear()
        loss.backward()
        trained = {name: p for name, p in model.named_parameters() if p.grad is not None}
        found[kernels] = {name: p.grad for name, p in trained.items() if p.grad is not None} | {"loss": loss.detach()}
        found["factors"] = {name: p.detach() for name, p in trained.items()}
    return found, counting


def _lora(**options: Any) -> LoraConfig:
    return LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "init_lora_weights": False} | options)


def _distance(found: dict[str, dict[str, Tensor]]) -> float:
    right = found["none"]
    assert right.keys() == found["fused"].keys()
    return max(float((found["fused"][name] - right[name]).norm() / right[name].norm()) for name in right)


@pytest.mark.parametrize(
    ("family", "lora", "number"),
    [
        ("llama", {}, 4),
        ("qwen3", {}, 4),
        ("mistral", {"use_rslora": True}, 4),
        ("llama", {"target_modules": ["o_proj"]}, 2),
        # The first gate has an input without a gradient, and no low-rank terms of its own.
        ("llama", {"target_modules": ["gate_proj", "up_proj", "down_proj"]}, 1),
        ("llama", {"target_modules": ["down_proj"]}, 1),  # the input of the second is computed again
        ("llama", {"rank_pattern": {"o_proj": 33}}, 2),
        ("llama", {"lora_dropout": 0.1, "target_modules": ["o_proj"]}, 0),
        ("llama", {"use_dora": True}, 0),
        ("llama", {"lora_bias": True}, 0),
        ("gemma2", {}, 0),
        ("olmo2", {}, 0),
    ],
    ids=str,
)
def test_a_layer_takes_them_where_its_code_is_known(
    family: str, lora: dict[str, Any], number: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found, counting = _gradients(make_twin(tmp_path, family), monkeypatch, lora=_lora(**lora))
    assert (counting.forwards, counting.backwards) == (number, number)
    assert _distance(found) < 1e-5


@pytest.mark.parametrize("options", [{"quantization": "nf4"}, {"compute": "fp8_backward"}, {"compute": "fp8"}], ids=str)
def test_a_base_in_few_bits_has_them(options: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found, counting = _gradients(make_twin(tmp_path, "llama"), monkeypatch, lora=_lora(), **options)
    assert counting.forwards == 4
    assert _distance(found) < 1e-5


def test_in_float64_they_are_what_transformers_and_peft_compute(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With all that `fused` has, of which kernels compute in float32 and less, and definitions in float64 too."""
    monkeypatch.setattr(fused, "_is_computed", lambda *_: True)
    folder = make_twin(tmp_path, "llama")
    with lift(True):  # of transformers' norms, too
        found, counting = _gradients(folder, monkeypatch, lora=_lora(), dtype="float64")
    assert (counting.forwards, counting.backwards) == (4, 4)
    peft = get_peft_model(AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float64), _lora())
    trained = {name: p for name, p in peft.named_parameters() if p.requires_grad}
    for name, parameter in trained.items():
        parameter.data = found["factors"][_ours(name)].clone()
    ids = make_batches().input_ids
    with lift(True):
        logits = peft(input_ids=ids).logits
        F.cross_entropy(logits.flatten(0, 1), ids.roll(-1, 1).flatten(), reduction="sum").backward()
    right = {_ours(name): p.grad for name, p in trained.items() if p.grad is not None}
    assert right.keys() == found["factors"].keys()
    for name, gradient in right.items():
        assert float((found["fused"][name] - gradient).norm() / gradient.norm()) < 1e-11, name


def _ours(name: str) -> str:
    """Our name of a factor of PEFT."""
    return name.removeprefix("base_model.model.").removesuffix(".weight")


_KEPT: list[Tensor] = []


def _read_too(_: Any, __: Any, output: Tensor) -> None:
    _KEPT.append(output)


def _changed_in_place(_: Any, __: Any, output: Tensor) -> None:
    output.mul_(1.5)


def _changed(_: Any, __: Any, output: Tensor) -> Tensor:
    return output * 1.5


def _read_by_another_norm(module: Any, _: Any, output: Tensor) -> None:
    _KEPT.append(module.post_attention_layernorm(output))


@pytest.mark.parametrize("hook", [_read_too, _read_by_another_norm, _changed, _changed_in_place])
def test_a_stream_that_others_read_or_change_is_theirs_too(
    hook: Hook, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found, counting = _gradients(make_twin(tmp_path, "llama"), monkeypatch, hook=hook, lora=_lora())
    assert counting.forwards == 4
    assert counting.backwards == (
        3 if hook in (_changed, _changed_in_place) else 4
    )  # the norm of a changed one is computed as usual
    assert _distance(found) < 1e-5


@pytest.mark.parametrize(("recompute", "number"), [("full", 3), ("keep_attention", 3), (2, 4)])
def test_a_layer_that_is_computed_again_has_its_sums(
    recompute: str | int, number: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """But for those before the norm of such a layer: of two layers the first down_proj, if the second is one."""
    found, counting = _gradients(make_twin(tmp_path, "llama"), monkeypatch, recompute=recompute, lora=_lora())
    assert (counting.forwards, counting.backwards) == (6, number)
    assert _distance(found) < 1e-5


def test_whoever_reads_what_is_not_there_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = make_twin(tmp_path, "llama")
    _gradients(folder, monkeypatch, lora=_lora())
    model = meshlora.load(folder / "model", lora=_lora(), dtype="float32", kernels="fused").train()
    outputs: list[Tensor] = []
    model.model.layers[0].self_attn.o_proj.register_forward_hook(lambda *given: outputs.append(given[2]))
    model(input_ids=make_batches().input_ids)
    assert isinstance(outputs[0], Unfinished)
    with pytest.raises(UnsupportedError, match="computes it with the sum after it"):
        outputs[0] + 1

"""Low-rank terms of a gated MLP beside its gate: what the operators compute, and when an MLP takes them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig
from torch import Tensor

import meshlora
from meshlora.layers.head_loss import ChunkKernels
from meshlora.train.losses import shifted_loss
from meshlora.wings.kernels import kernels as chosen
from meshlora.wings.kernels import loss_chunk
from meshlora.wings.kernels import tails as module
from meshlora.wings.kernels.liger import check_kernels
from meshlora.wings.kernels.tails import GateFunction, Tails, tails
from tests.kernels import STAND_IN
from tests.twins import make_batches, make_twin

TOKENS, WIDTH, SCALE = 37, 150, 0.7


def drawn(dtype: torch.dtype = torch.float64, ranks: tuple[int, int, int] = (3, 5, 4)) -> list[Tensor]:
    """gate, up, both z, both B, and A."""
    generator = torch.Generator().manual_seed(0)
    of_gate, of_up, of_down = ranks
    shapes = [(TOKENS, WIDTH), (TOKENS, WIDTH), (TOKENS, of_gate), (TOKENS, of_up)]
    shapes += [(WIDTH, of_gate), (WIDTH, of_up), (of_down, WIDTH)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def by_autograd(given: list[Tensor], of_product: Tensor, of_z: Tensor) -> list[Tensor]:
    """p and z, and the gradients of all that is given; in float64, one operator after the other."""
    leaves = [tensor.double().requires_grad_() for tensor in given]
    gate, up, z_gate, z_up, b_gate, b_up, a = leaves
    product = F.silu(gate + z_gate @ b_gate.T) * (up + z_up @ b_up.T)
    z = SCALE * product @ a.T
    loss = (product * of_product.double()).sum() + (z * of_z.double()).sum()
    return [product.detach(), z.detach(), *torch.autograd.grad(loss, leaves)]


def by_function(given: list[Tensor], of_product: Tensor, of_z: Tensor, own: Tails) -> list[Tensor]:
    """The same of `GateFunction`."""
    leaves = [tensor.clone().requires_grad_() for tensor in given]
    gate, up = (leaf * 1 for leaf in leaves[:2])  # it writes over them
    product, z = GateFunction.apply(gate, up, *leaves[2:], SCALE, own)
    grads = torch.autograd.grad([product, z], leaves, [of_product, of_z])
    return [product.detach(), z.detach(), *grads]


NAMES = ("p", "z", "gate", "up", "z_gate", "z_up", "B_gate", "B_up", "A")


def distances(given: list[Tensor], own: Tails) -> dict[str, float]:
    """How far each result is from that of autograd in float64, relative to its norm."""
    generator = torch.Generator().manual_seed(1)
    sizes = given[0].shape, (TOKENS, len(given[6]))
    drawn = [torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes]
    of_product, of_z = (each.to(given[0].dtype) for each in drawn)
    right = by_autograd(given, of_product, of_z)
    found = by_function(given, of_product, of_z, own)
    return {
        name: float((mine.double() - wanted).norm() / wanted.norm())
        for name, mine, wanted in zip(NAMES, found, right, strict=True)
    }


def _check(found: dict[str, float], dtype: torch.dtype, limit: float) -> None:
    assert max(found.values()) < limit, found
    if dtype.itemsize == 2:  # a result that is rounded once is 0.21 of eps off; from numbers that were rounded, 0.29
        assert max(found[name] for name in ("p", "gate", "up")) < torch.finfo(dtype).eps / 4, found


@pytest.mark.parametrize(
    ("dtype", "limit"),
    [(torch.float64, 1e-13), (torch.float32, 1e-6), (torch.bfloat16, 2**-7), (torch.float16, 2**-10)],
)
def test_operators_compute_what_autograd_does(dtype: torch.dtype, limit: float) -> None:
    _check(distances(drawn(dtype), tails()), dtype, limit)


# --- the kernels ------------------------------------------------------------------------------------------------------


@pytest.mark.liger
@pytest.mark.parametrize("ranks", [(3, 5, 4), (1, 1, 1), (8, 20, 32)])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-6), (torch.float16, 2**-10)])
def test_kernels_compute_what_autograd_does(dtype: torch.dtype, limit: float, ranks: tuple[int, int, int]) -> None:
    """By the interpreter, which computes bfloat16 wrongly."""
    _check(distances(drawn(dtype, ranks), Tails(module._on_gpu, module._back_on_gpu)), dtype, limit)


@pytest.mark.liger
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_kernels_of_the_loss_compute_its_definition(dtype: torch.dtype) -> None:
    own = ChunkKernels(loss_chunk._sums_on_gpu, loss_chunk._gradient_on_gpu)
    check_kernels(dataclasses.replace(STAND_IN, chunk=own), torch.device("cpu"), dtype)


# --- the MLP that calls them ------------------------------------------------------------------------------------------


def _mlp(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, **lora: Any) -> int:
    """How many gates of a twin of two layers have their low-rank terms in a step, whose gradients are those without."""
    monkeypatch.setattr(chosen, "liger", lambda *_: STAND_IN)
    monkeypatch.setattr(chosen, "_refusal", lambda *_, **__: None)  # which asks for a GPU
    number = 0

    def counted(*given: Any) -> Any:
        nonlocal number
        number += 1
        return tails().forward(*given)

    monkeypatch.setattr(chosen, "tails", lambda: tails()._replace(forward=counted))
    folder = make_twin(tmp_path, "llama")
    config = LoraConfig(**{"r": 4, "target_modules": "all-linear", "init_lora_weights": False} | lora)
    found: dict[str, dict[str, Tensor]] = {}
    for kernels in ("none", "fused"):
        model = meshlora.load(folder / "model", lora=config, dtype="float32", kernels=kernels).train()
        ids = make_batches().input_ids
        shifted_loss(model, ids, None, ids.roll(-1, 1)).backward()
        found[kernels] = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for name, right in found["none"].items():
        assert float((found["fused"][name] - right).norm() / right.norm()) < 1e-5, name
    return number - 1  # the first was the comparison with its definition


@pytest.mark.parametrize(
    ("lora", "number"),
    [
        ({}, 2),
        ({"rank_pattern": {"up_proj": 3}, "alpha_pattern": {"up_proj": 6}}, 2),  # of one scale
        ({"rank_pattern": {"up_proj": 3}}, 0),
        ({"use_dora": True}, 0),
        ({"lora_bias": True}, 0),
        ({"target_modules": ["gate_proj", "up_proj"]}, 0),
        ({"rank_pattern": {"down_proj": 33}}, 0),
    ],
    ids=str,
)
def test_an_mlp_takes_them_where_its_linears_have_nothing_else(
    lora: dict[str, Any], number: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert _mlp(monkeypatch, tmp_path, lora_alpha=8, **lora) == number

"""Quantised frozen matrices: shards are slices of the whole, nothing is kept unpacked, and what is refused."""

from __future__ import annotations

import weakref
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from torch import Tensor

import meshlora
from meshlora.adapter.attach import active_factors
from meshlora.common.errors import UnsupportedError, UserError
from meshlora.common.float64 import lift
from meshlora.layers import quantized
from meshlora.layers.linear import ParallelLinear
from meshlora.layers.quantized import Packed, pack, plain_weights
from meshlora.oracle.inputs import write_twin
from meshlora.oracle.quantized import _rounded
from meshlora.plan.families.twin import twin_config
from meshlora.plan.quantization import KINDS
from meshlora.plan.topology import Topology
from tests.blueprints import build_meta


def _matrix(rows: int = 40, width: int = 256) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_packed_shards_are_slices_of_what_the_library_makes_of_the_whole(kind: str, dtype: torch.dtype) -> None:
    matrix = _matrix().to(dtype)
    whole = _rounded(matrix.float(), kind).to(dtype)
    assert torch.equal(pack(matrix, kind).whole(), whole)
    for rows, columns in [((0, 20), (0, 256)), ((7, 9), (0, 256)), ((0, 40), (64, 192)), ((31, 40), (192, 256))]:
        part = (slice(*rows), slice(*columns))
        assert torch.equal(pack(matrix[part], kind).whole(), whole[part])


@pytest.mark.parametrize(("kind", "largest"), [("nf4", 0.16), ("int8", 0.51 / 127)])
def test_what_is_lost_and_what_is_held(kind: str, largest: float) -> None:
    """About half the widest gap between two levels, of the block's largest; a scale of 4 bytes for 64 weights."""
    matrix = _matrix()
    packed = pack(matrix, kind)
    blocks = matrix.view(40, -1, 64)
    lost = (packed.whole().view_as(blocks) - blocks).abs().amax(2) / blocks.abs().amax(2)
    assert float(lost.max()) <= largest
    assert packed.codes.dtype == torch.uint8
    assert packed.codes.numel() == matrix.numel() * KINDS[kind] // 8
    assert packed.absmax.numel() * packed.absmax.element_size() * 16 == matrix.numel()


def _twin(folder: Path) -> Path:
    write_twin(twin_config("llama", block=64), folder, dtype=torch.float64, seed=0)
    return folder


@pytest.mark.parametrize("adapter", ["lora", "dora", "none below"])
def test_gradients_are_those_of_plain_weights_and_nothing_unpacked_is_kept(
    adapter: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    targets = ["q_proj", "down_proj"] if adapter == "none below" else "all-linear"
    lora = LoraConfig(r=4, target_modules=targets, init_lora_weights=False, use_dora=adapter == "dora")
    model = meshlora.load(_twin(tmp_path), lora=lora, dtype="float64", quantization="nf4")
    packed = [m for m in model.modules() if isinstance(m, ParallelLinear) and m.quantized]
    assert len(packed) == 14
    alive: list[weakref.ref[Tensor]] = []
    unpack = Packed.whole

    def whole(self: Packed) -> Tensor:
        found = unpack(self)
        alive.append(weakref.ref(found))
        return found

    def gradients() -> tuple[Tensor, list[Tensor]]:
        model.zero_grad()
        with lift():
            loss = model(input_ids=ids, labels=ids).loss
            held.append(sum(reference() is not None for reference in alive))
            loss.backward()
        return loss.detach(), [f.parameter.grad.clone() for f in active_factors(model) if f.parameter.grad is not None]

    ids, held = torch.arange(3, 35).view(2, 16), []
    monkeypatch.setattr(quantized.Packed, "whole", whole)
    loss, ours = gradients()
    assert len(alive) >= 2 * len(packed) - 4  # of the first attention, under a frozen embedding, no dx is asked for
    assert held == [0]
    with plain_weights(model):
        plain_loss, plain = gradients()
    assert torch.equal(loss, plain_loss)
    assert all(torch.equal(one, other) for one, other in zip(ours, plain, strict=True))
    assert all(module.weight.dtype == torch.uint8 for module in packed)


def _plan(family: str, topology: str, kind: str, **overrides: int) -> None:
    config = twin_config(family, tp=2, block=64, **overrides)
    build_meta(config, Topology.parse(topology), dtype=torch.float32, quantization=kind)


@pytest.mark.parametrize(
    ("family", "topology", "kind", "overrides", "words"),
    [
        ("llama", "", "nf5", {}, "must be one of nf4, int8"),
        ("llama", "", "nf4", {"intermediate_size": 160}, "down_proj with 160 input features: blocks of 64"),
        ("llama", "tp=2", "int8", {"intermediate_size": 192}, "a part of a block of 64; use a tp that divides its 3"),
        ("mixtral", "dp=2,ep=2", "nf4", {}, "routed experts are not quantised"),
    ],
)
def test_what_cannot_be_quantised_alike_everywhere_is_refused(
    family: str, topology: str, kind: str, overrides: dict[str, int], words: str
) -> None:
    with pytest.raises((UserError, UnsupportedError), match=words):
        _plan(family, topology, kind, **overrides)


def test_an_input_of_a_column_linear_may_be_cut_anywhere() -> None:
    _plan("llama", "tp=2", "nf4", intermediate_size=256, num_key_value_heads=2)


@pytest.mark.parametrize(
    ("lora", "words"),
    [
        ({"init_lora_weights": "pissa"}, "it changes the base, which is quantised"),
        ({"modules_to_save": ["o_proj"]}, "a quantised matrix is frozen"),
    ],
)
def test_a_quantised_matrix_is_frozen(lora: dict[str, object], words: str, tmp_path: Path) -> None:
    config = LoraConfig(target_modules=["q_proj"], **lora)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match=words):
        meshlora.load(_twin(tmp_path), lora=config, dtype="float32", quantization="nf4")


def test_without_the_library_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'meshlora\[quantization\]'"):
        quantized.check_library("nf4")

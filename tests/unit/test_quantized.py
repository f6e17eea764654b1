"""Quantised frozen matrices: shards are slices of the whole, nothing is kept unpacked, and what is refused."""

from __future__ import annotations

import dataclasses
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import Tensor

import meshlora
from meshlora.adapter.attach import active_factors
from meshlora.layers.linear import ParallelLinear
from meshlora.wings.experts.products import Projection, backward_rows, forward_rows
from meshlora.wings.experts.row_counts import RowCounts
from meshlora.wings.quantized import kinds, quantized
from meshlora.wings.quantized.kinds import FACTOR_BYTES, KINDS, check_library
from meshlora.wings.quantized.quantized import Form, Packed, joined, pack, plain_weights, stacked, with_factors
from meshlora_ground.errors import UnsupportedError, UserError
from meshlora_ground.float64 import lift
from meshlora_ground.topology import Topology
from meshlora_judge.inputs import write_twin
from meshlora_judge.quantized import _ROUNDED
from meshlora_judge.twin import twin_config
from tests.blueprints import build_meta
from tests.for_each import for_each


def _matrix(rows: int = 200, width: int = 320) -> Tensor:
    """With blocks of large and of small numbers, and one of zeros."""
    matrix = torch.randn(rows, width, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    matrix[:, 64:192] *= 1e-3
    matrix[128:, 256:] = 0
    return matrix


@for_each("dtype", [torch.float64, torch.float32, torch.bfloat16])
@for_each("kind", KINDS)
def test_packed_shards_are_slices_of_what_the_library_makes_of_the_whole(kind: str, dtype: torch.dtype) -> None:
    matrix = _matrix().to(dtype)
    whole = _ROUNDED[kind](matrix.float()).to(dtype)
    packed = pack(matrix, kind)
    assert torch.equal(packed.whole(), whole)
    for rows, columns in [((0, 20), (0, 320)), ((7, 199), (0, 320)), ((0, 200), (64, 192)), ((130, 135), (62, 300))]:
        part = packed.part(rows, columns)
        assert torch.equal(part.whole(), whole[slice(*rows), slice(*columns)])
        assert torch.equal(part.mT.whole(), part.whole().T)
    assert torch.equal(joined([packed.part((0, 200), (0, 62)), packed.part((0, 200), (62, 320))], -1).whole(), whole)
    halves = [packed.part((0, 130), (0, 320)).mT, packed.part((130, 200), (0, 320)).mT]
    assert torch.equal(joined(halves, -1).whole(), whole.T)
    assert torch.equal(stacked([packed, packed])[1], whole)


def test_mxfp4_rounds_ties_to_the_even_code_and_saturates() -> None:
    """One block, whose largest number gives it a scale of 1."""
    given = [4.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 0.26, 0.74, -0.75, 7.9, -7.9, 0.0, -0.0, 1e-9]
    expected = [4.0, 0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 0.5, 0.5, -1.0, 6.0, -6.0, 0.0, 0.0, 0.0]
    packed = pack(torch.tensor(given + [0.0] * 16).view(1, 32), "mxfp4")
    assert packed.whole()[0, :16].tolist() == expected
    assert packed.scales.tolist() == [[127]]


def test_scales_of_nvfp4_are_e4m3_times_the_factor_of_the_matrix() -> None:
    """Blocks of zeros, and of numbers that e4m3 has no scale for, are zeros."""
    matrix = torch.zeros(2, 48)
    matrix[0, :16], matrix[0, 16:32], matrix[1, :16] = 2688.0, 1e-3, -1.5
    packed = pack(matrix, "nvfp4")
    scales = packed.form.numbers(packed.scales)
    assert scales.tolist() == [[448.0, 1.0, 1.0], [0.25, 1.0, 1.0]]
    assert packed.whole()[:, ::16].tolist() == [[2688.0, 0.0, 0.0], [-1.5, 0.0, 0.0]]


def test_factors_of_matrices_above_one_another_stay_with_their_rows() -> None:
    """A gate and an up projection have a factor each, as have experts."""
    gate, up = torch.randn(6, 64), 100 * torch.randn(6, 64)
    parts = [pack(gate, "nvfp4"), pack(up, "nvfp4")]
    whole = joined(parts, -2)
    assert torch.equal(whole.whole(), torch.cat([part.whole() for part in parts]))
    assert torch.equal(whole.part((4, 9), (14, 40)).whole(), whole.whole()[4:9, 14:40])
    assert torch.equal(stacked([*parts])[1], parts[1].whole())


def test_a_factor_divides_or_multiplies_as_it_is_stored() -> None:
    """1 / x rounds: of a hundred factors some would give other numbers."""
    codes, scales = torch.full((100, 8), 0x77, dtype=torch.uint8), torch.full((100, 1), 3.5).to(torch.float8_e4m3fn)
    factors = torch.rand(100, generator=torch.Generator().manual_seed(0)) * 1000 + 3
    form = Form("nvfp4", torch.float32, (1,) * 100, (16,), divides=True)
    divided = form.matrix(codes, with_factors(scales, factors)).whole()[:, 0]
    multiplied = dataclasses.replace(form, divides=False).matrix(codes, with_factors(scales, 1 / factors)).whole()[:, 0]
    assert divided.tolist() == (6 * (torch.full_like(factors, 3.5) / factors)).tolist()
    assert multiplied.tolist() == (6 * (3.5 * (1 / factors))).tolist()
    assert not torch.equal(divided, multiplied)


def test_an_expert_is_unpacked_alone() -> None:
    """A product with a stack never has two of its matrices in plain numbers at once."""
    matrices = torch.randn(5, 48, 64, dtype=torch.float64)
    stack, alive, most = stacked([pack(matrix, "mxfp4") for matrix in matrices]), list[weakref.ref[Tensor]](), 0
    unpack = Packed.whole

    def whole(self: Packed) -> Tensor:
        nonlocal most
        most = max(most, sum(reference() is not None for reference in alive))
        found = unpack(self)
        alive.append(weakref.ref(found))
        return found

    counts, x = [3, 0, 2, 4, 1], torch.randn(10, 64, dtype=torch.float64)
    a, b = torch.randn(5, 2, 64, dtype=torch.float64), torch.randn(5, 48, 2, dtype=torch.float64)
    plain = stack.whole()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Packed, "whole", whole)
        found = [one for factors in ((None, None), (a, b)) for one in _both_ways(stack, x, counts, *factors)]
    expected = [one for factors in ((None, None), (a, b)) for one in _both_ways(plain, x, counts, *factors)]
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert most == 0
    assert len(alive) == 4 * 4  # an expert without rows is not unpacked


def _both_ways(weight: Any, x: Tensor, counts: list[int], a: Tensor | None, b: Tensor | None) -> list[Tensor]:
    projection = Projection(weight)
    rows = RowCounts.known(counts, x.device)
    y, zt = forward_rows(x, projection, rows, a, b)
    dx, da, db = backward_rows(y, x, zt, projection, rows, a, b)
    return [one for one in (y, dx, da, db) if one is not None]


@pytest.mark.parametrize(
    ("kind", "block", "largest"),
    [
        ("nf4", (1, 64), 0.16),
        ("int8", (1, 64), 0.51 / 127),
        ("mxfp4", (1, 32), 0.251),
        ("nvfp4", (1, 16), 0.25),
        ("fp8", (128, 128), 0.036),
    ],
)
def test_what_is_lost_and_what_is_held(kind: str, block: tuple[int, int], largest: float) -> None:
    """About half the widest gap between two levels, of the block's largest: in mxfp4 all above 6 becomes 6."""
    matrix = _matrix()[:128, :256]
    packed = pack(matrix, kind)
    blocks = [part.reshape(128 // block[0], block[0], -1, block[1]) for part in (matrix, packed.whole())]
    lost = (blocks[1] - blocks[0]).abs().amax((1, 3)) / blocks[0].abs().amax((1, 3))
    assert largest / 2 < float(lost.max()) <= largest
    assert packed.codes.dtype == torch.uint8
    assert packed.codes.numel() == matrix.numel() * KINDS[kind] // 8
    factors = FACTOR_BYTES.get(kind, 0) * len(packed.scales)
    assert (packed.scales.numel() - factors) * block[0] * block[1] == matrix.numel()


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
    packed = [m for m in model.modules() if isinstance(m, ParallelLinear) and m.form]
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
        ("llama", "tp=2", "mxfp4", {"intermediate_size": 160 + 2}, "down_proj with 162 input features: blocks of 32"),
        ("mixtral", "etp=32", "mxfp4", {"intermediate_size": 96}, "two of 4 bits share a byte, which cannot be cut"),
        ("llama", "", "keep", {}, "its checkpoint is not quantised; use one of nf4, int8, mxfp4, nvfp4, fp8"),
    ],
)
def test_what_cannot_be_quantised_alike_everywhere_is_refused(
    family: str, topology: str, kind: str, overrides: dict[str, int], words: str
) -> None:
    with pytest.raises((UserError, UnsupportedError), match=words):
        _plan(family, topology, kind, **overrides)


def test_blocks_may_be_cut_anywhere() -> None:
    _plan("llama", "tp=2", "nf4", intermediate_size=192, num_key_value_heads=2)
    _plan("mixtral", "tp=2,etp=2", "fp8", intermediate_size=100)


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
    monkeypatch.setattr(kinds.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'meshlora\[quantization\]'"):
        check_library(["fp8", "nf4"])
    check_library(["fp8", "mxfp4"])

"""What a rank holds of a base that stays packed: its share of the stored bytes, and nothing behind it."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest

import meshlora
from meshlora.layers.frozen import FrozenMatrix
from meshlora.loading.blueprint import make_blueprint
from meshlora.model.stream import _NUM_BYTES
from meshlora.plan.base_options import BaseOptions
from meshlora.wings.quantized.keep_packed import packings
from meshlora_extra.planner.memory import held
from meshlora_ground.topology import Topology
from tests.packed import write_packed
from tests.pool import Pool


def _held_bytes(folder: Path, topology: str, quantization: str) -> tuple[int, int, int]:
    """Of this rank: bytes of its packed matrices, of the whole base, and of the base by the plan.

    Those of storages: a slice that is a view holds all that it was cut from.
    """
    model = meshlora.load(folder, topology=topology, dtype="bfloat16", quantization=quantization)
    packed = [m for m in model.modules() if isinstance(m, FrozenMatrix) and m.form is not None]
    parts = [part for m in packed for part in (m.weight, m.weight_scales)]
    plan = make_blueprint(folder, Topology.parse(topology), BaseOptions(dtype="bfloat16", quantization=quantization))
    shapes = {name: (p.shape, p.dtype) for name, p in plan.model.named_parameters()}
    planned = [t for name, of in shapes.items() for t in held(name, *of, plan.plan, plan.plan.quantized)]
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
    own = sum(part.untyped_storage().nbytes() for part in parts)
    return own, sum(storages.values()), sum(t.nbytes for t in planned)


@pytest.mark.parametrize(
    ("case", "topology", "quantization"),
    [("fp8", "tp=2", "keep"), ("mxfp4", "dp=2,ep=2", "keep"), ("nf4", "tp=2", "keep")],
)
def test_a_rank_holds_its_packed_bytes_and_a_tenth_at_most(
    case: str, topology: str, quantization: str, tmp_path: Path, pools: Callable[[int], Pool]
) -> None:
    folder = write_packed(tmp_path / "model", case)
    source = make_blueprint(folder, Topology(), BaseOptions(dtype="bfloat16", quantization=quantization)).weights()
    stored = [
        math.prod(part.shape) * _NUM_BYTES[part.dtype]
        for name in packings(source)
        for tensor in source.stored[name].tensors
        if tensor.packed
        for part in tensor.packed[1].values()
    ]
    for own, whole, planned in pools(2).run(_held_bytes, folder, topology, quantization):
        assert 0 < own <= 1.1 * sum(stored) / 2, (own, sum(stored))
        assert whole <= 1.1 * planned, (whole, planned)

"""AdamW with moments in 8 bits on meshes is bitsandbytes' own on one process; and what it cannot be is refused."""

from __future__ import annotations

import dataclasses
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file

from meshlora.adapter.plan import Trained
from meshlora.loading.blueprint import make_blueprint
from meshlora.plan.base_options import BaseOptions
from meshlora.plan.grads import Cut, FactorRule
from meshlora.plan.layout import Layout, Piece
from meshlora.run.checkpoint.manifest import STATE_FILE
from meshlora.run.config.file import read_run
from meshlora.run.config.run_file import TrainConfig
from meshlora.run.optimizers import BLOCK, cuts_blocks, has_eight_bits
from meshlora.run.together import prepare_run
from meshlora.verify import preflight
from meshlora.verify.options import DEFAULT_LORA, Request
from meshlora.verify.request import prepare_proof
from meshlora_ground.errors import UnsupportedError, UserError
from meshlora_ground.topology import Topology
from meshlora_judge.compare import compare_adapters
from tests.conftest import Prove
from tests.for_each import for_each
from tests.pool import Pool
from tests.ranks.test_trainer import _train, folder, run_and_keep_groups, run_file

__all__ = ["folder"]  # a fixture

_DORA = {"r": 8, "lora_alpha": 6, "use_dora": True, "target_modules": "all-linear", "modules_to_save": ["model.norm"]}
WIDE = {"hidden_size": 512, "intermediate_size": 512}


@pytest.mark.long
@pytest.mark.parametrize(
    "request_",
    [
        {"family": "llama", "topologies": ("tp=2,sp", "dp=2"), "steps": 2},
        *(
            pytest.param(given, marks=pytest.mark.proof)
            for given in (
                {"family": "llama", "topologies": ("tp=2,sp", "dp=2"), "steps": 3, "resume": True},
                {"family": "llama", "topologies": ("pp=2", "cp=2", "dp=2,tp=2,sp"), "packing": True},
                {"family": "llama", "topologies": ("tp=4,sp",), "overrides": {"num_key_value_heads": 2}},
                {"family": "llama", "topologies": ("tp=2,sp", "pp=2"), "lora": _DORA, "steps": 3, "resume": True},
                {"family": "llama", "topologies": ("tp=2",), "lora_plus_ratio": 4.0},
                {"family": "llama", "topologies": ("tp=2,sp",), "overrides": WIDE},
                {"family": "gpt2", "topologies": ("tp=2",)},
                {"family": "phi3", "topologies": ("tp=2",)},
            )
        ),
    ],
    ids=str,
)
def test_run_is_the_one_of_bitsandbytes_own_optimizer(request_: dict[str, Any], prove: Prove) -> None:
    outcomes = prove(**{"optimizer": "adamw_8bit", "steps": 3} | request_)
    assert all(o.passed for o in outcomes), [(o.topology, o.divergence, o.error) for o in outcomes]


def test_proof_has_factors_of_each_kind() -> None:
    """Moments in 32 bits; in 8 bits with whole blocks on each rank; and with blocks that the mesh cuts."""
    proof = prepare_proof(Request(("tp=2",), family="llama", lora=DEFAULT_LORA, optimizer="adamw_8bit"))
    least, topology = proof.case.min_8bit_size, proof.topologies[0]
    lora = LoraConfig(**proof.case.lora)
    blueprint = make_blueprint(proof.config, topology, BaseOptions(dtype="float64")).with_adapter(lora)
    kinds = {
        cuts_blocks(trained, topology) if has_eight_bits(trained.shape, least) else None
        for trained in blueprint.trained.parameters.values()
    }
    assert kinds == {None, False, True}


def _split(shape: tuple[int, ...], dim: int, layout: Layout | None = None) -> Trained:
    cut = Cut(dim, "tp", layout or Layout((Piece("", shape[dim], 1),)))
    return Trained(shape, FactorRule((cut,), frozenset()))


@for_each(
    ("trained", "tp", "is_cut"),
    [
        (_split((16, 4096), 1), 8, False),  # A of a row-parallel linear: 512 columns a rank
        (_split((16, 896), 1), 2, True),  # 448 columns
        (_split((1, 896), 1), 2, True),
        (_split((4096, 16), 0), 8, False),  # B of a column-parallel linear: neighbouring rows
        (_split((4864, 8), 0), 2, False),
        (_split((4864, 8), 0), 4, False),
        (_split((1216, 8), 0), 4, True),  # 2,432 elements, 9.5 blocks
        (_split((100, 8), 0), 2, True),  # whole on none, and the end is no block
        (_split((1000, 8), 0), 1, False),
        (_split((96, 8), 0, Layout((Piece("q", 8, 8), Piece("k", 4, 8)))), 2, True),  # blocks of two pieces
        (_split((192, 8), 0, Layout((Piece("q", 16, 8), Piece("k", 8, 8)))), 2, False),
    ],
)
def test_blocks_are_cut_where_a_part_is_other_than_whole_blocks(trained: Trained, tp: int, is_cut: bool) -> None:
    """Against blocks that are counted one by one."""
    assert cuts_blocks(trained, Topology(tp=tp)) == is_cut
    (cut,) = trained.rule.cuts
    number = math.prod(trained.shape)
    whole = {frozenset(range(start, min(start + BLOCK, number))) for start in range(0, number, BLOCK)}
    places = torch.arange(number).view(trained.shape)
    parts = [cut.layout.cut(places, cut.dim, rank=rank, size=tp).flatten().tolist() for rank in range(tp)]
    blocks = [part[start : start + BLOCK] for part in parts for start in range(0, len(part), BLOCK)]
    assert all(block == sorted(block) and frozenset(block) in whole for block in blocks) != is_cut


@pytest.mark.long
def test_run_goes_on_with_its_codes_on_another_mesh(folder: Path, pools: Callable[[int], Pool]) -> None:
    options: dict[str, Any] = {"train__optimizer": "adamw_8bit", "train__min_8bit_size": 300, "train__eps": 1e-3}
    pools(2).run(run_and_keep_groups, run_file(folder, "coded", "tp=2", **options), 2)
    stored = load_file(next((folder / "coded" / "checkpoints").glob("step-*")) / STATE_FILE)
    codes = {name: tensor for name, tensor in stored.items() if tensor.dtype == torch.uint8}
    assert codes, sorted(stored)
    assert all(stored[name.replace("/", "_absmax/", 1)].numel() == -(-t.numel() // BLOCK) for name, t in codes.items())
    shutil.copytree(folder / "coded", folder / "coded-alone", symlinks=True)
    shutil.rmtree(folder / "coded-alone" / "adapter")
    _train(run_file(folder, "coded-alone", "", **options), 1, resume="auto")
    found = compare_adapters(folder / "coded-alone" / "adapter", folder / "coded" / "adapter")
    assert found.relative < 1e-6, found


@pytest.mark.parametrize(
    ("family", "lora", "words"),
    [
        ("llama", {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}, "the embedding in modules_to"),
        ("gpt2", {"target_modules": ["c_attn"], "pieces": {"c_attn": ["q"]}}, "pieces"),
        ("qwen3_moe", {"target_parameters": ["experts.down_proj"]}, "an adapter on the parameter"),
    ],
)
def test_what_has_other_blocks_in_peft_is_refused(family: str, lora: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"train\.optimizer=adamw_8bit with .*{words}"):
        prepare_proof(Request(("tp=2",), family=family, lora={"r": 4, **lora}, optimizer="adamw_8bit"))


def test_what_is_proved_and_needed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    request = Request(("tp=2",), family="llama", optimizer="adamw_8bit")
    with pytest.raises(UnsupportedError, match="adamw_8bit with a proof in float32: rounding moves codes"):
        prepare_proof(dataclasses.replace(request, dtype="float32", device="cpu"))
    with pytest.raises(UserError, match=r"train\.min_8bit_size with train\.optimizer=adamw: it has no effect"):
        TrainConfig("out", steps=1, min_8bit_size=1)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="it needs bitsandbytes; pip install"):
        prepare_proof(request)


def test_preflight_proves_the_optimizer_of_the_run(folder: Path) -> None:
    run = prepare_run(read_run(run_file(folder, "coded-proof", "tp=2", train__optimizer="adamw_8bit")))
    proof, _ = preflight.proof_of(run, folder)
    assert (proof.case.optimizer, proof.case.min_8bit_size) == ("adamw_8bit", 600)

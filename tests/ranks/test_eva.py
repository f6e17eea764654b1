"""`init_lora_weights: eva` in `meshlora train`: what a run begins with, saves and goes on with."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from meshlora.adapter.formats.peft_format import CONFIG_FILE, WEIGHTS_FILE
from meshlora.loading.blueprint import make_blueprint
from meshlora.plan.base_options import BaseOptions
from meshlora.run.config.file import read_run
from meshlora.run.together import prepare_run
from meshlora_ground.errors import UnsupportedError, UserError
from meshlora_ground.topology import Topology
from meshlora_judge.compare import compare_adapters, largest_loss_gap, read_losses
from tests.for_each import for_each
from tests.one_process import train_alone
from tests.pool import Pool
from tests.ranks.test_resume import _stopped_after
from tests.ranks.test_trainer import folder, run_and_keep_groups, run_file, small_base

__all__ = ["folder"]  # a fixture

EVA = {"lora__init_lora_weights": "eva", "lora__eva_config": {"rho": 2.0, "tau": 0.9}}


def _config(output: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((output / "adapter" / CONFIG_FILE).read_text())
    return config


@pytest.mark.long
def test_run_begins_alike_on_every_mesh_and_peft_reads_what_it_saves(
    folder: Path, pools: Callable[[int], Pool], tmp_path: Path
) -> None:
    outputs = {}
    for topology, world in (("", 1), ("tp=2,sp", 2), ("dp=2,dp_shard", 2)):
        file = run_file(folder, f"eva-{topology}", topology, data__packing=bool(topology), **EVA)
        pools(world).run(run_and_keep_groups, file, world)
        outputs[topology] = folder / f"eva-{topology}"
    one = outputs[""]
    start = load_file(one / "initial" / WEIGHTS_FILE)
    # A of orthonormal rows, of other ranks than 4; B 0.
    assert len({len(value) for key, value in start.items() if "lora_A" in key}) > 1
    for key, value in start.items():
        if "lora_A" in key:
            torch.testing.assert_close(value @ value.T, torch.eye(len(value)).to(value), rtol=0, atol=1e-5)
        else:
            assert not value.any()
    losses = train_alone(file, initial=one / "initial", out=tmp_path / "reference")
    for output in outputs.values():
        assert _config(output) == _config(one)
        assert compare_adapters(output / "initial", one / "initial").relative < 1e-5
        assert compare_adapters(output / "adapter", tmp_path / "reference").relative < 1e-5
        assert largest_loss_gap(read_losses(output / "metrics.jsonl"), losses) < 1e-7
    # The scale of each target is that of its first rank.
    config = _config(one)
    assert config["rank_pattern"].keys() == config["alpha_pattern"].keys()
    for name, rank in config["rank_pattern"].items():
        assert config["alpha_pattern"][name] == 2 * rank


@pytest.mark.long
def test_run_goes_on_with_its_own_ranks(folder: Path, pools: Callable[[int], Pool]) -> None:
    whole, file = run_file(folder, "whole", "", **EVA), run_file(folder, "stopped", "", **EVA)
    pools(1).run(run_and_keep_groups, whole, 1)
    pools(1).run(_stopped_after, 2, file, 1, None, timeout_s=120)
    pools(1).run(_stopped_after, None, file, 1, "auto", timeout_s=120)
    assert _config(folder / "stopped") == _config(folder / "whole")
    assert compare_adapters(folder / "stopped" / "adapter", folder / "whole" / "adapter").relative == 0
    # What has begun goes with what a beginning does not go with.
    saved = make_blueprint(small_base(), Topology(), BaseOptions()).with_folder(folder / "whole" / "adapter")
    assert saved.asked["init_lora_weights"] is True


@for_each(
    ("changes", "words"),
    [
        ({"lora__r": 512}, "use a lower r"),
        ({"lora__eva_config": {"rho": 1e4}}, "rho=10000: it is at most 1000"),
        ({"lora__eva_config": {"rho": 0.5}}, "rho"),
        ({"lora__eva_config": {"roh": 2.0}}, "roh"),
        ({"train__objective": "dpo"}, "it begins by data in meshlora train"),
        ({"lora__target_modules": ["embed_tokens"]}, "'eva' with an adapter on the embedding"),
    ],
)
def test_what_cannot_begin_so_is_refused(changes: dict[str, Any], words: str, folder: Path) -> None:
    with pytest.raises((UserError, UnsupportedError), match=words):
        prepare_run(read_run(run_file(folder, "refused", "", **{**EVA, **changes})))


def test_data_on_which_nothing_settles_are_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshlora.wings.starts.eva._MOST_STEPS", 4)
    file = run_file(folder, "restless", "", **{**EVA, "lora__eva_config": {"tau": 1.0}})
    with pytest.raises(UserError, match="nothing settles in 4 steps"):
        run_and_keep_groups(file, 1)

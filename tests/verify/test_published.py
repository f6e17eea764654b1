"""Published checkpoints: each configuration is planned at full size, and twins in the published formats are proved."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from meshlora.plan.derive import plan_model
from meshlora.verify.proof import Processes
from meshlora_ground.errors import UnsupportedError
from meshlora_ground.topology import Topology
from meshlora_judge.twin import shrink_config
from tests.published_twins import config_of, names, read_published, stored_keys, write_published_twin
from tests.scripts import load_script

SCRIPT = load_script("prove_published")


@pytest.mark.long
def test_a_checkpoint_of_each_format_is_planned_or_refused_with_its_reason() -> None:
    published = {name: read_published(name) for name in names()}
    assert len(published) >= 60
    assert all(name == one.repository.replace("/", "--") for name, one in published.items())
    of_each_format = {one.format: name for name, one in published.items()}
    found = {name: SCRIPT.plan(name, (2,)) for name in of_each_format.values()}
    assert all(one.bytes_of or one.reason for one in found.values()), found
    of_rank = SCRIPT.plan("deepseek-ai--DeepSeek-V3", (2,)).bytes_of
    assert of_rank[2, 1] > 1.9 * of_rank[2, 2]  # most of it are experts


@pytest.mark.parametrize(
    ("name", "stored", "absent"),
    [
        (
            "Qwen--Qwen3-30B-A3B-FP8",
            "model.layers.0.mlp.experts.7.up_proj.weight_scale_inv",
            "lm_head.weight_scale_inv",
        ),
        ("deepseek-ai--DeepSeek-V3", "model.layers.4.eh_proj.weight", "model.layers.0.mlp.gate.weight_scale_inv"),
        (
            "unsloth--Llama-3.2-1B-Instruct-bnb-4bit",
            "model.layers.0.mlp.up_proj.weight.nested_absmax",
            "lm_head.weight",
        ),
        ("Qwen--Qwen3-Embedding-0.6B", "layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
    ],
)
def test_twin_has_the_names_and_the_format_of_the_published_files(
    name: str, stored: str, absent: str, tmp_path: Path
) -> None:
    keys = stored_keys(write_published_twin(read_published(name), tmp_path / "model"))
    assert stored in keys, sorted(keys)
    assert absent not in keys


QUICK = ("Qwen--Qwen3-32B-FP8", "unsloth--Llama-3.2-1B-Instruct-bnb-4bit")


@pytest.mark.long
@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(n, marks=pytest.mark.proof) for n in names() if n not in QUICK)]
)
def test_twin_of_a_published_checkpoint_is_proved_or_refused(name: str, processes: Processes) -> None:
    found = SCRIPT.plan(name, (1, 2))
    if not found.reason:
        found = SCRIPT.prove(found, processes, {})
    assert found.status == "ready" if name in QUICK else found.status in ("ready", "refused"), found.reason


def test_twin_of_layers_that_differ_ends_with_the_kind_of_the_last() -> None:
    """Gemma 4 makes its last layer a full one, whose heads are others."""
    config = config_of(read_published("google--gemma-4-26B-A4B"))
    twin = shrink_config(config, tp=2, layers={0: ("a",), 5: ("b",)}).get_text_config()
    assert twin.layer_types[-1] == "full_attention"
    full = {layer for layer, kind in enumerate(twin.layer_types) if kind == "full_attention"}
    assert full == {int(layer) for layer in twin.to_dict()["per_layer_config"]}
    with torch.device("meta"):
        assert plan_model(AutoModelForCausalLM.from_config(twin), Topology.parse("tp=2")).experts


def test_tables_of_relative_positions_are_refused_where_linears_are_split() -> None:
    """Deberta's linears of tokens project them, too; without such a table its plan is found and proved."""
    config = shrink_config(config_of(read_published("microsoft--deberta-v3-base")))
    with torch.device("meta"):
        model = AutoModelForSequenceClassification.from_config(config)
    plan_model(model, Topology.parse("dp=2"))
    with pytest.raises(UnsupportedError, match="a table of relative positions by linears"):
        plan_model(model, Topology.parse("tp=2"))

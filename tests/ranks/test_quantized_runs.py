"""Training on a quantised frozen base: against the same base on one process, and runs from file to adapter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

from meshlora.adapter.formats.peft_format import CONFIG_FILE, WEIGHTS_FILE
from meshlora.run.config.file import read_run
from meshlora.run.together import prepare_run
from meshlora_ground.errors import UserError
from tests.conftest import Prove
from tests.pool import Pool
from tests.ranks.test_trainer import folder, run_and_keep_groups, run_file

__all__ = ["folder"]  # a fixture


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "kind", "topologies"),
    [
        ("llama", "nf4", ("dp=2,dp_shard",)),
        pytest.param("llama", "nf4", ("dp=2,tp=2,sp,dp_shard",), marks=pytest.mark.proof),
        ("llama", "int8", ("tp=2",)),
        pytest.param("llama", "int8", ("dp=2,tp=2,sp",), marks=pytest.mark.proof),
        pytest.param("gpt2", "nf4", ("tp=2,sp",), marks=pytest.mark.proof),
    ],
)
def test_adapter_is_the_one_of_the_same_base_on_one_process(
    family: str, kind: str, topologies: tuple[str, ...], prove: Prove
) -> None:
    for outcome in prove(family=family, quantization=kind, topologies=topologies, steps=1):
        assert outcome.passed, (outcome.topology, outcome.divergence, outcome.error)


@pytest.mark.long
def test_low_precision_stays_within_the_references_own_rounding(prove: Prove) -> None:
    for outcome in prove(family="llama", quantization="nf4", dtype="bfloat16", topologies=("tp=2,sp",), steps=1):
        assert outcome.passed, (outcome.topology, outcome.divergence, outcome.error)


@pytest.mark.long
def test_a_run_gives_the_same_bytes_sharded_over_dp_and_a_plain_peft_folder(
    folder: Path, pools: Callable[[int], Pool]
) -> None:
    """Layers computed twice, evaluation and checkpoints among it; the base's kind is no part of the adapter's files."""
    short = {"train__steps": 2, "train__warmup_steps": 1, "train__save_every": 1}
    options = {"model__quantization": "nf4", "train__recompute": "full", **short}
    plain = run_file(folder, "whole", "dp=2", **options)
    pools(2).run(run_and_keep_groups, plain, 2, timeout_s=120)
    sharded = run_file(folder, "sharded", "dp=2,dp_shard", **options)
    pools(2).run(run_and_keep_groups, sharded, 2, timeout_s=120)
    base = run_file(folder, "not-quantised", "dp=2", **short)
    pools(2).run(run_and_keep_groups, base, 2, timeout_s=120)
    with pytest.raises(UserError, match=r"a run with other model\.quantization"):
        prepare_run(read_run(plain, ["model.quantization=int8"]), world=2, resume="auto")
    weights = (folder / "whole" / "adapter" / WEIGHTS_FILE).read_bytes()
    assert (folder / "sharded" / "adapter" / WEIGHTS_FILE).read_bytes() == weights
    other = folder / "not-quantised" / "adapter"
    assert (other / WEIGHTS_FILE).read_bytes() != weights
    assert load_file(other / WEIGHTS_FILE).keys() == load_file(folder / "whole" / "adapter" / WEIGHTS_FILE).keys()
    assert (other / CONFIG_FILE).read_text() == (folder / "whole" / "adapter" / CONFIG_FILE).read_text()

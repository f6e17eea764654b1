"""transformers' continuous batching on a mesh: the tokens of plain `generate` by transformers + peft on one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

import meshlora
from meshlora_ground.compat.peft_targets import targets_as_configured
from meshlora_ground.errors import UnsupportedError
from tests.pool import Pool
from tests.twins import make_twin

# More than a cache of four blocks and steps of eight tokens hold at once: the scheduler has to choose.
PROMPTS = [[5, 9, 200, 31, 77, 8, 19], [44, 45, 46], [120, 3, 99, 7, 250], [9, 9, 8], [17], [33, 2, 18, 200]] * 2
NEW = 8


def _batched(folder: Path, topology: str) -> list[list[int]]:
    """Body of a rank."""
    model = meshlora.load(folder / "model", adapter=folder / "adapter", topology=topology).eval()
    outputs = model.generate_batch(
        inputs=PROMPTS,
        generation_config=GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0),
        continuous_batching_config=ContinuousBatchingConfig(num_blocks=4, max_batch_tokens=8),
    )
    assert not [each.error for each in outputs.values() if each.error]
    return [each.generated_tokens for each in outputs.values()]


@pytest.mark.proof
@pytest.mark.parametrize(
    ("family", "topology"),
    [
        ("llama", "tp=2,sp"),
        ("llama", "tp=2"),
        ("llama", "dp=2"),
        ("gemma3_text", "tp=2"),
        ("gpt_oss", "tp=2"),
        ("qwen3_moe", "tp=2,sp,ep=2"),
        ("llama", "pp=2"),
        ("gemma3_text", "pp=2"),
    ],
)
def test_tokens_are_those_of_plain_generate_on_one_process(
    family: str, topology: str, tmp_path: Path, pools: Callable[[int], Pool]
) -> None:
    folder = make_twin(tmp_path / "twin", family)
    reference = AutoModelForCausalLM.from_pretrained(
        folder / "model", dtype=torch.float64, experts_implementation="eager"
    )
    with targets_as_configured():
        reference = PeftModel.from_pretrained(reference, str(folder / "adapter")).eval()
    words: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = [
        reference.generate(input_ids=torch.tensor([ids]), **words)[0, len(ids) :].tolist() for ids in PROMPTS[:6]
    ] * 2
    assert len({tuple(tokens) for tokens in expected}) > 3
    assert pools(2).run(_batched, folder, topology) == [expected] * 2


def _refused(folder: Path, topology: str) -> str:
    model = meshlora.load(folder / "model", adapter=folder / "adapter", topology=topology).eval()
    with pytest.raises(UnsupportedError) as batch:
        model.generate_batch(inputs=PROMPTS)
    with pytest.raises(UnsupportedError) as manager:
        model.init_continuous_batching()
    return f"{batch.value} {manager.value}"


def test_meshes_whose_replicas_need_each_other_are_refused(tmp_path: Path, pools: Callable[[int], Pool]) -> None:
    folder = make_twin(tmp_path / "twin", "llama")
    for topology, words in (("dp=2,dp_shard", "need each other's forwards"), ("cp=2", "an attention of its own")):
        for said in pools(2).run(_refused, folder, topology):
            assert words in said
            assert "use model.generate" in said
            assert f"a manager of continuous batching on {topology}" in said
    shared = make_twin(tmp_path / "shared", "llama", num_key_value_heads=1)
    for said in pools(2).run(_refused, shared, "tp=2"):
        assert "1 key/value heads divided by tp, and here ranks share some" in said

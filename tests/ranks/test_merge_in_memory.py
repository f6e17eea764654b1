"""Merging in memory: the numbers of transformers + peft, and afterwards the very bits of before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

import meshlora
from meshlora_ground.compat.peft_targets import targets_as_configured
from meshlora_ground.errors import UserError
from meshlora_judge.inputs import write_adapter, write_twin
from meshlora_judge.twin import twin_config
from tests.pool import Pool

IDS = torch.tensor([[5, 9, 200, 31, 77, 8], [44, 45, 46, 3, 99, 7]])
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
PIECES = {"qkv_proj": ["q", "v"]}
# Family, its overrides, the adapter.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "linears": ("llama", {}, {"target_modules": "all-linear"}),
    "dora": ("llama", {}, {"target_modules": ["q_proj", "o_proj", "embed_tokens"], "use_dora": True}),
    "tied": ("llama", {"tie_word_embeddings": True}, {"target_modules": ["embed_tokens", "lm_head", "o_proj"]}),
    "pieces": ("phi3", {}, {"target_modules": ["qkv_proj"], "use_rslora": True}),
    "experts": ("qwen3_moe", {}, {"target_modules": ["q_proj"], "target_parameters": EXPERTS}),
    "transposed": ("gpt_oss", {}, {"target_modules": ["o_proj"], "target_parameters": EXPERTS}),
}


def _local(parameter: Any) -> torch.Tensor:
    return (parameter.to_local() if isinstance(parameter, DTensor) else parameter).detach().clone()


def _merged(folder: Path, topology: str) -> torch.Tensor:
    """Body of a rank: logits while merged. Around it all that must be as it was."""
    model = meshlora.load(folder / "model", adapter=folder / "adapter", topology=topology).eval()

    def logits() -> torch.Tensor:
        with meshlora.lift(), torch.no_grad():
            found: torch.Tensor = model(input_ids=IDS).logits
        return found

    before, beside = {name: _local(p) for name, p in model.named_parameters(remove_duplicate=False)}, logits()
    with meshlora.merged(model):
        changed = [
            name
            for name, p in model.named_parameters(remove_duplicate=False)
            if not torch.equal(_local(p), before[name])
        ]
        assert changed
        assert not [name for name in changed if "lora_" in name]
        found = logits()
        for what, act in REFUSED:
            with pytest.raises(UserError, match=f"{what} while an adapter is merged"):
                act(model)
    after = dict(model.named_parameters(remove_duplicate=False))
    assert before.keys() == after.keys()
    assert [name for name, p in after.items() if not torch.equal(_local(p), before[name])] == []
    assert torch.equal(logits(), beside), "the adapter is used again beside the base"
    with pytest.raises(UserError, match="no adapter is merged"):
        meshlora.unmerge(model)
    with meshlora.lift():
        meshlora.language_model_loss(model, IDS, None, IDS).backward()
    return found


def _trains(model: Any) -> None:
    meshlora.language_model_loss(model, IDS, None, IDS)


REFUSED: list[tuple[str, Callable[[Any], Any]]] = [
    ("merge", meshlora.merge),
    ("a forward with gradients", _trains),
    ("training", lambda model: meshlora.clip_gradients(model, 1.0)),
    ("switching off an adapter", lambda model: meshlora.set_adapter(model, None)),
    ("switching off an adapter", lambda model: meshlora.disable_adapter(model).__enter__()),
]


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings")
@pytest.mark.parametrize(
    ("case", "topology"),
    [
        ("dora", "tp=2,sp"),
        ("tied", "tp=2"),
        ("experts", "dp=2,ep=2,dp_shard"),
        *(
            pytest.param(case, topology, marks=pytest.mark.proof)
            for case, topology in (
                ("linears", "tp=2,sp"),
                ("linears", "dp=2,dp_shard"),
                ("pieces", "tp=2"),
                ("dora", "dp=2,dp_shard"),
                ("experts", "tp=2,sp,etp=2"),
                ("transposed", "tp=2,etp=2"),
                ("transposed", "dp=2,dp_shard"),
            )
        ),
    ],
)
def test_merged_model_says_what_peft_says_and_comes_back_bit_for_bit(
    case: str, topology: str, tmp_path: Path, pools: Callable[[int], Pool]
) -> None:
    family, overrides, lora = CASES[case]
    write_twin(twin_config(family, **overrides), tmp_path / "model", dtype=torch.float64, seed=0)
    words = {"r": 4, "lora_alpha": 12, **lora}
    pieces = PIECES if case == "pieces" else None
    write_adapter(tmp_path / "model", words, tmp_path / "adapter", seed=1, trust_remote_code=False, pieces=pieces)
    reference = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", dtype=torch.float64, experts_implementation="eager"
    )
    with targets_as_configured():
        reference = PeftModel.from_pretrained(reference, str(tmp_path / "adapter")).eval()
    with meshlora.lift(), torch.no_grad():
        expected = reference(input_ids=IDS).logits
    for found in pools(2).run(_merged, tmp_path, topology):
        assert torch.allclose(found, expected, rtol=1e-9, atol=1e-11)


def test_pissa_merged_at_its_start_is_the_base(tmp_path: Path) -> None:
    """In float32, in which alone PEFT has it. Without its product the base lacks its largest part."""
    write_twin(twin_config("llama"), tmp_path / "model", dtype=torch.float32, seed=0)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
    lora = LoraConfig(r=4, target_modules="all-linear", init_lora_weights="pissa")
    model = meshlora.load(tmp_path / "model", lora=lora).eval()
    with torch.no_grad(), meshlora.merged(model):
        assert torch.allclose(model(input_ids=IDS).logits, base(input_ids=IDS).logits, rtol=1e-4, atol=1e-4)


def test_base_in_few_bits_is_refused(tmp_path: Path) -> None:
    write_twin(twin_config("llama"), tmp_path / "model", dtype=torch.float32, seed=0)
    write_adapter(
        tmp_path / "model", {"target_modules": "all-linear"}, tmp_path / "adapter", seed=1, trust_remote_code=False
    )
    model = meshlora.load(tmp_path / "model", adapter=tmp_path / "adapter", quantization="mxfp4")
    with pytest.raises(UserError, match=r"merge into .*q_proj, which is held in few bits"):
        meshlora.merge(model)
    assert model.meshlora.unmerged is None
    meshlora.set_adapter(model, None)
    with pytest.raises(UserError, match="merge without an active adapter"):
        meshlora.merge(model)

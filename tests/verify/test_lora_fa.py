"""LoRA-FA on meshes is PEFT's own optimizer on one process, in float64; and what PEFT's would get wrong is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig

import meshlora
from meshlora.run.config.file import read_run
from meshlora.run.together import prepare_run
from meshlora.train.losses import shifted_loss
from meshlora.verify import preflight
from meshlora.verify.options import Request
from meshlora.verify.request import prepare_proof
from meshlora_ground.errors import UnsupportedError
from meshlora_judge.twin import twin_config
from tests.conftest import Prove
from tests.ranks.test_trainer import folder, run_file

__all__ = ["folder"]  # a fixture

# Ranks and scales of some modules of their own.
PATTERNS = {
    "r": 4,
    "lora_alpha": 6,
    "target_modules": "all-linear",
    "use_rslora": True,
    "rank_pattern": {"q_proj": 6, "layers.1.mlp.down_proj": 2},
    "alpha_pattern": {"up_proj": 5},
}


@pytest.mark.long
@pytest.mark.parametrize(
    "request_",
    [
        {"family": "llama", "topologies": ("tp=2,sp", "dp=2"), "lora": PATTERNS, "steps": 3, "resume": True},
        *(
            pytest.param(given, marks=pytest.mark.proof)
            for given in (
                {"family": "llama", "topologies": ("pp=2", "cp=2", "dp=2,tp=2,sp"), "lora": PATTERNS, "packing": True},
                {"family": "gpt2", "topologies": ("tp=2",)},
                {"family": "llama", "topologies": ("tp=4,sp",), "overrides": {"num_key_value_heads": 2}},
                {"family": "qwen3", "topologies": ("dp=2,dp_shard",), "recompute": True, "quantization": "nf4"},
                {"family": "qwen3", "topologies": ("tp=2",), "dtype": "float32"},
                {"family": "qwen3", "topologies": ("tp=2",), "dtype": "bfloat16"},
                {"family": "qwen3", "topologies": ("tp=2,sp",), "adapters": 2},
            )
        ),
    ],
    ids=str,
)
def test_run_is_the_one_of_pefts_own_optimizer(request_: dict[str, Any], prove: Prove) -> None:
    outcomes = prove(**{"optimizer": "lora_fa", "steps": 2} | request_)
    assert all(o.passed for o in outcomes), [(o.topology, o.divergence, o.error) for o in outcomes]


@pytest.mark.parametrize(
    ("family", "lora", "words"),
    [
        ("llama", {"target_modules": ["q_proj"], "use_dora": True}, "use_dora"),
        ("llama", {"target_modules": ["q_proj", "embed_tokens"]}, "an adapter on the embedding"),
        ("llama", {"target_modules": ["q_proj"], "modules_to_save": ["model.norm"]}, "modules_to_save, or biases"),
        ("gpt2", {"target_modules": ["c_attn"], "pieces": {"c_attn": ["q"]}}, "pieces"),
        ("qwen3_moe", {"target_parameters": ["experts.down_proj"]}, "an adapter on the parameter"),
    ],
)
def test_what_peft_would_pair_wrongly_is_refused(family: str, lora: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"train\.optimizer=lora_fa with .*{words}"):
        prepare_proof(Request(("tp=2",), family=family, lora={"r": 4, **lora}, optimizer="lora_fa"))


def test_preflight_proves_the_optimizer_of_the_run(folder: Path) -> None:
    run = prepare_run(read_run(run_file(folder, "lora-fa", "tp=2", train__optimizer="lora_fa")))
    proof, _ = preflight.proof_of(run, folder)
    assert proof.case.optimizer == "lora_fa"


def test_no_input_of_a_linear_is_saved_where_a_is_frozen() -> None:
    """What LoRA-FA is for: of a linear's input `[T, in]` only `x A^T` `[T, r]` is kept for the backward."""
    rows, length, rank, saved = 2, 8, 4, []
    for is_frozen in (False, True):
        lora = LoraConfig(r=rank, target_modules=["o_proj"], init_lora_weights=False)
        model = meshlora.load(twin_config("llama", num_hidden_layers=2), lora=lora, dtype="float32").train()
        for name, parameter in model.named_parameters():
            if is_frozen and "lora_A" in name:
                parameter.requires_grad_(False)
        own = {p.data_ptr() for p in model.parameters()}
        sizes: dict[int, int] = {}

        def keep(tensor: torch.Tensor, own: set[int] = own, sizes: dict[int, int] = sizes) -> torch.Tensor:
            if tensor.data_ptr() not in own:
                sizes.setdefault(tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes())
            return tensor

        ids = torch.arange(3, 3 + rows * length).view(rows, length)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = shifted_loss(model, ids, None, ids.roll(-1, 1))
        saved.append(sum(sizes.values()))
        loss.backward()
    width = model.config.num_attention_heads * model.config.head_dim
    # The input of o_proj is a copy of what attention puts out and saves.
    assert saved[0] - saved[1] >= rows * length * width * 4

"""Methods around LoRA against transformers + peft on one process: rsLoRA, DoRA, LoRA+, label smoothing, pieces."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import meshlora
from meshlora.adapter.attach import active_factors, full_factor, runtime
from meshlora.adapter.formats.peft_format import lora_config
from meshlora.comm.groups import num_processes
from meshlora.train.losses import shifted_loss
from meshlora_ground.objective import Sft
from meshlora_judge.compare import relative
from meshlora_judge.inputs import write_twin
from meshlora_judge.twin import twin_config
from tests.blueprints import load_without_proof
from tests.conftest import Prove
from tests.pool import Pool
from tests.twins import make_batches

TOPOLOGIES = ("tp=2", "tp=2,sp", "dp=2,tp=2")
LORA: dict[str, Any] = {"r": 4, "lora_alpha": 8}
LINEARS = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]  # column and row, with fewer heads and without any
PIECES = {"r": 2, "lora_alpha": 4, "target_modules": ["c_attn"], "pieces": {"c_attn": ["q", "v"]}}

PROOFS: dict[str, dict[str, Any]] = {
    "rslora": {"family": "llama", "lora": {**LORA, "target_modules": LINEARS, "use_rslora": True}},
    "dora": {"family": "llama", "lora": {**LORA, "target_modules": "all-linear", "use_dora": True}},
    "dora with dropout": {
        "family": "llama",
        "lora": {**LORA, "target_modules": ["embed_tokens", *LINEARS], "use_dora": True, "lora_dropout": 0.1},
    },
    "positions": {"family": "gpt2", "lora": {**LORA, "target_modules": ["wpe", "wte", "c_attn"]}},
    "bias of B": {
        "family": "gpt2",
        "lora": {**LORA, "target_modules": ["c_attn", "c_proj"], "lora_bias": True},
        "lora_plus_ratio": 4.0,
    },
    "dora of fused, transposed": {
        "family": "gpt2",
        "lora": {**LORA, "target_modules": "all-linear", "use_dora": True, "use_rslora": True},
    },
    "lora+": {
        "family": "llama",
        "lora": {**LORA, "target_modules": [*LINEARS, "embed_tokens"], "modules_to_save": ["norm", "lm_head"]},
        "lora_plus_ratio": 4.0,
    },
    "lora+ with layer norms and biases": {
        "family": "gpt2",
        "lora": {**LORA, "target_modules": ["c_attn", "c_proj"], "use_dora": True, "modules_to_save": ["ln_1", "ln_f"]},
        "lora_plus_ratio": 4.0,
    },
    "label smoothing": {
        "family": "llama",
        "lora": {**LORA, "target_modules": [*LINEARS, "lm_head"]},
        "objective": Sft(label_smoothing=0.1),
    },
    "pieces": {"family": "gpt2", "lora": PIECES},
    "pieces out of order, of every kind": {
        "family": "phi3",
        "lora": {
            **LORA,
            "target_modules": ["qkv_proj", "gate_up_proj", "o_proj"],
            "pieces": {"qkv_proj": ["v", "q"], "gate_up_proj": ["up"]},
        },
    },
}

# Each method once. The second DoRA has rsLoRA too, the second LoRA+ and the second pieces all of the first; the kill
# table has label smoothing, and DoRA on ranks that hold the same heads.
COVER = {
    "dora with dropout": "tp=2,sp",
    "bias of B": "tp=2,sp",
    "positions": "dp=2,tp=2",
    "dora of fused, transposed": "tp=2,sp",
    "lora+ with layer norms and biases": "tp=2",
    "pieces out of order, of every kind": "tp=2,sp",
}


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "topologies"),
    [
        *((name, (topology,)) for name, topology in COVER.items()),
        *(pytest.param(name, (*TOPOLOGIES, "dp=2"), marks=pytest.mark.proof) for name in PROOFS),
    ],
)
def test_trains_as_one_process_does(name: str, topologies: tuple[str, ...], prove: Prove) -> None:
    for outcome in prove(**PROOFS[name], topologies=topologies, steps=2):
        assert outcome.passed, (outcome.topology, outcome.divergence, outcome.error)


# --- pieces ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A float64 twin."""
    folder = tmp_path_factory.mktemp("gpt2")
    write_twin(twin_config("gpt2"), folder, dtype=torch.float64, seed=0)
    return folder


def _load(folder: Path, topology: str, **adapter: Any) -> Any:
    """In float64, also of a family whose proofs are not on record."""
    shape = meshlora.Topology.parse(topology, world=num_processes())
    return load_without_proof(folder, topology=shape, dtype="float64", **adapter)


def _train_a_step(folder: Path, out: Path, topology: str) -> tuple[Tensor, int]:
    """(logits after one step, trainable elements of the whole adapter); saves to `out`."""
    model = _load(folder, topology, lora=lora_config(PIECES, "test")).train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.1)
    batch = make_batches()
    for _ in range(2):  # B is zero in the first
        optimizer.zero_grad()
        with meshlora.lift():
            shifted_loss(model, batch.input_ids, batch.attention_mask, batch.labels).backward()
        meshlora.finish_gradients(model, num_tokens=int((batch.labels != -100).sum()))
        optimizer.step()
    meshlora.save_adapter(model, out)
    mesh = runtime(model).mesh
    number = sum(full_factor(f.parameter.detach(), f.rule, mesh).numel() for f in active_factors(model))
    with torch.no_grad(), meshlora.lift():
        return model.eval()(input_ids=batch.input_ids).logits, number


@pytest.mark.parametrize("topology", ["", "tp=2,sp"])
def test_adapter_on_pieces_is_one_of_peft_that_is_zero_elsewhere(
    topology: str, gpt2: Path, tmp_path: Path, pools: Callable[[int], Pool]
) -> None:
    arguments = (gpt2, tmp_path / "adapter", topology)
    ours, number = pools(2).run(_train_a_step, *arguments)[0] if topology else _train_a_step(*arguments)
    base = AutoModelForCausalLM.from_pretrained(gpt2, dtype=torch.float64)
    peft_model = PeftModel.from_pretrained(base, str(tmp_path / "adapter")).eval()
    with torch.no_grad(), meshlora.lift():
        assert relative(ours, peft_model(input_ids=make_batches().input_ids).logits) < 1e-11
    width, layers, r = base.config.n_embd, base.config.n_layer, PIECES["r"]
    assert number == layers * 2 * (r * width + width * r), "q and v have an A and a B each"
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    for layer in range(layers):
        key = f"base_model.model.transformer.h.{layer}.attn.c_attn.lora_B.weight"
        q, k, v = tensors[key].split(width)
        for enabled, disabled in ((q[:, :r], q[:, r:]), (v[:, r:], v[:, :r])):
            assert enabled.abs().min() > 0
            assert not disabled.any()
        assert not k.any()
    with torch.no_grad(), meshlora.lift(), peft_model.disable_adapter():
        assert relative(ours, peft_model(input_ids=make_batches().input_ids).logits) > 1e-6, "it has learnt something"


def test_adapter_on_pieces_goes_on_as_one_on_pieces(gpt2: Path, tmp_path: Path, pools: Callable[[int], Pool]) -> None:
    _train_a_step(gpt2, tmp_path / "first", "")
    for folder in pools(2).run(_load_and_save, gpt2, tmp_path / "first", tmp_path / "second"):
        assert folder == ["A.q", "B.q", "A.v", "B.v"]
    for file in sorted(path.name for path in (tmp_path / "first").iterdir()):
        assert (tmp_path / "first" / file).read_bytes() == (tmp_path / "second" / file).read_bytes(), file


def _load_and_save(folder: Path, adapter: Path, out: Path) -> list[str]:
    """What the adapter is made of on the first layer."""
    model = _load(folder, "tp=2", adapter=adapter)
    meshlora.save_adapter(model, out)
    first = "transformer.h.0.attn.c_attn.lora_"
    return [f.name.removeprefix(first) for f in active_factors(model) if f.name.startswith(first)]

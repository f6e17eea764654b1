"""On a GPU: the same numbers as on the CPU. Collected only where there is one (tests/conftest.py)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import LoraConfig

import meshlora
from meshlora.train.losses import summed_cross_entropy
from tests.parity.harness import compare, make_batches, make_twin, run_ours, run_reference

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_one_gpu_matches_one_process_on_the_cpu_in_float64(family: str, tmp_path: Path) -> None:
    folder = make_twin(tmp_path, family)
    ref = run_reference(folder, make_batches(), steps=2)
    ours = run_ours(folder, make_batches(), "", 2, "cuda")
    assert ours is not None
    errors = compare(ours, ref)
    assert all(errors[phase] <= 1e-11 for phase in ("logits", "loss", "gradients", "grad_norm")), errors
    assert errors["adapter"] <= 1e-6


def test_bf16_base_trains_fp32_factors_on_the_gpu(tmp_path: Path) -> None:
    folder = make_twin(tmp_path, "llama")
    lora = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    model = meshlora.load(folder / "model", lora=lora, dtype="bfloat16", device="cuda").train()
    ids = make_batches().input_ids.cuda()
    summed_cross_entropy(model(input_ids=ids).logits, ids.roll(-1, 1)).backward()
    meshlora.finish_gradients(model, num_tokens=ids.numel())
    norm = meshlora.clip_gradients(model, 1.0)
    assert 0 < norm < float("inf")
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}

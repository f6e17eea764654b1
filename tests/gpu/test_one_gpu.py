"""On a GPU: the same numbers as on the CPU. Collected only where there is one (tests/conftest.py)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from torch.profiler import ProfilerActivity, profile

import meshlora
from meshlora.run.recompute import recompute_layers
from meshlora.train.losses import shifted_loss
from meshlora.wings.kernels.liger import check_kernels, liger
from meshlora.wings.kernels.rms_norm import RmsNormFunction
from meshlora.wings.packed_rows import varlen
from meshlora.wings.quantized.kinds import KINDS
from meshlora.wings.quantized.quantized import pack, unpacked_slowly
from tests.conftest import Prove
from tests.twins import make_batches, make_twin

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_one_gpu_matches_one_process_in_float64(family: str, prove: Prove) -> None:
    (outcome,) = prove(family=family, topologies=("",), steps=2, device="cuda")
    assert outcome.passed, (outcome.divergence, outcome.error)


def test_as_many_gpus_as_there_are_match_one_process_in_float64(prove: Prove) -> None:
    for outcome in prove(family="llama", topologies=("auto",), nproc=min(4, torch.cuda.device_count()), device="cuda"):
        assert outcome.passed, (outcome.topology, outcome.divergence, outcome.error)


def test_bf16_base_trains_fp32_factors_on_the_gpu(tmp_path: Path) -> None:
    folder = make_twin(tmp_path, "llama")
    lora = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    model = meshlora.load(folder / "model", lora=lora, dtype="bfloat16", device="cuda").train()
    ids = make_batches().input_ids.cuda()
    shifted_loss(model, ids, None, ids.roll(-1, 1)).backward()
    meshlora.finish_gradients(model, num_tokens=ids.numel())
    norm = meshlora.clip_gradients(model, 1.0)
    assert 0 < norm < float("inf")
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_kernel_of_a_norm_computes_its_formula(dtype: torch.dtype) -> None:
    x, g = torch.randn(2, 3, 257, 512, dtype=torch.float64).to(dtype)
    weight = torch.rand(512).to(dtype)
    x64 = x.double().requires_grad_()
    y64 = x64 * (x64.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()
    y64.backward(g.double())
    own = x.cuda().requires_grad_()
    y = RmsNormFunction.apply(own, weight.cuda(), 1e-5)
    y.backward(g.cuda())
    for found, right in ((y.detach(), y64.detach()), (own.grad, x64.grad)):
        assert float((found.cpu().double() - right).norm() / right.norm()) < torch.finfo(dtype).eps


@pytest.mark.liger
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_kernels_of_liger_compute_their_definitions(dtype: torch.dtype) -> None:
    check_kernels(liger(), torch.device("cuda"), dtype)


@pytest.mark.liger
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "olmo2"])
def test_a_model_with_kernels_of_liger_matches_one_process(family: str, prove: Prove) -> None:
    asked = {"dtype": "float32", "kernels": "liger", "device": "cuda", "recompute": True}
    (outcome,) = prove(family=family, topologies=("",), steps=2, **asked)
    assert outcome.passed, (outcome.divergence, outcome.error)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_kept_attention_is_launched_once(dtype: str, tmp_path: Path) -> None:
    """By the thread of autograd too, on which layers run a second time."""
    folder = make_twin(tmp_path, "llama")
    lora = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    model = meshlora.load(folder / "model", lora=lora, dtype=dtype, device="cuda").train()
    ids, launched, gradients = make_batches().input_ids.cuda(), {}, {}
    for recompute in ("none", "full", "keep_attention"):
        recompute_layers(model, recompute)
        model.zero_grad()
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            shifted_loss(model, ids, None, ids.roll(-1, 1)).backward()
        # What the operators of sdpa call to launch a kernel.
        names = [event.name for event in seen.events()]
        launched[recompute] = sum(
            name.endswith(("_flash_attention_forward", "_efficient_attention_forward")) for name in names
        )
        gradients[recompute] = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    once = launched["none"]
    assert once > 0
    assert launched == {"none": once, "full": 2 * once, "keep_attention": once}
    plain = gradients["none"].norm()
    for recompute in ("full", "keep_attention"):
        assert (gradients[recompute] - gradients["none"]).norm() <= plain * torch.finfo(getattr(torch, dtype)).eps


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("width", [64, 128])
def test_sequences_of_a_row_are_attended_in_one_call(dtype: torch.dtype, width: int) -> None:
    assert varlen.agrees(torch.device("cuda"), dtype, width)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_quantised_matrix_is_unpacked_to_the_bits_of_the_cpu(kind: str, dtype: torch.dtype) -> None:
    packed = pack(torch.randn(300, 1280).to(dtype), kind)
    expected, on_gpu = packed.whole(), packed.to(torch.device("cuda"), dtype)
    assert unpacked_slowly(on_gpu) is None
    assert torch.equal(on_gpu.whole().cpu(), expected)
    cut = on_gpu.part((7, 300), (32, 1200))  # across blocks
    assert torch.equal(cut.whole().cpu(), expected[7:300, 32:1200])


@pytest.mark.parametrize("kind", KINDS)
def test_a_matrix_is_packed_on_the_gpu_to_the_codes_of_the_cpu(kind: str) -> None:
    weight = torch.randn(1024, 4096)
    there, here = pack(weight.cuda(), kind), pack(weight, kind)
    assert there.codes.is_cuda
    assert torch.equal(there.scales.cpu(), here.scales)
    # Of nf4 bitsandbytes' kernels divide otherwise, which tells between two levels equally near.
    most = 4e-6 if kind == "nf4" else 0.0
    assert float((there.codes.cpu() != here.codes).float().mean()) <= most

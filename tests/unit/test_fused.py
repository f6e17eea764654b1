"""Fused kernels: which modules take them, what they may write over, and that wrong numbers end a run."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import Tensor, nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaConfig, LlamaMLP, LlamaRMSNorm

import meshlora
from meshlora.loading.blueprint import make_blueprint
from meshlora.plan.base_options import BaseOptions
from meshlora.verify.preflight import _devices_of
from meshlora.wings.kernels import fused
from meshlora.wings.kernels import kernels as module
from meshlora.wings.kernels import liger as package
from meshlora.wings.kernels.fused import FusedGate, FusedRotation, fusable, fuse
from meshlora.wings.kernels.kernels import kernels_of, with_kernels
from meshlora.wings.kernels.liger import Kernels, check_kernels
from meshlora.wings.kernels.loss_chunk import chunk_kernels
from meshlora.wings.kernels.stream_sums import stream_kernels
from meshlora.wings.kernels.tails import tails
from meshlora_ground.errors import UnsupportedError, UserError
from meshlora_ground.topology import Topology
from meshlora_judge.twin import twin_config
from tests.kernels import STAND_IN

CPU = torch.device("cpu")
_OURS = dataclasses.replace(STAND_IN, tails=tails(), chunk=chunk_kernels(), stream=stream_kernels())


def _blueprint(family: str = "llama", **options: Any) -> Any:
    return make_blueprint(twin_config(family), Topology(), BaseOptions(**{"dtype": "bfloat16"} | options))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with a GPU and liger-kernel, as far as the choice asks."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(module, "liger_version", lambda: "0.8.5")


@pytest.mark.parametrize(
    ("family", "found"),
    [
        ("llama", {"norms": 5, "rotations": 2, "gated MLPs": 2}),
        ("gemma2", {"norms": 9, "rotations": 2, "gated MLPs": 2}),
        ("qwen3", {"norms": 9, "rotations": 2, "gated MLPs": 2}),
        ("olmo2", {"norms": 9, "gated MLPs": 2}),  # its rotation is in float32
        ("phi3", {"norms": 5}),  # fused matrices
        ("gpt2", {}),
    ],
)
def test_modules_whose_code_is_known_are_found(family: str, found: dict[str, int]) -> None:
    assert fusable(_blueprint(family).model) == found


def test_changed_code_is_not_known() -> None:
    class Norm(LlamaRMSNorm):
        def forward(self, hidden_states: Tensor) -> Tensor:
            return 2 * super().forward(hidden_states)

    class Inner(Gemma2RMSNorm):
        def _norm(self, x: Tensor) -> Tensor:
            return 2 * super()._norm(x)

    mlp = LlamaMLP(LlamaConfig(hidden_size=8, num_attention_heads=2, intermediate_size=16))
    mlp.act_fn = nn.ReLU()
    assert not fusable(nn.ModuleList([Norm(8), Inner(8), mlp]))
    assert fusable(nn.ModuleList([LlamaRMSNorm(8), Gemma2RMSNorm(8)])) == {"norms": 2}


@pytest.mark.parametrize("wanted", ["auto", "liger"])
def test_kernels_are_taken_on_a_gpu_and_said(wanted: str, gpu: None) -> None:
    taken, said = with_kernels(_blueprint(kernels=wanted), device="auto", is_proved=True)
    assert taken.options.kernels == "liger"
    assert said == "kernels of liger-kernel 0.8.5: 5 norms, 2 rotations, 2 gated MLPs"


_SUMS = "sums of the residual stream"


@pytest.mark.parametrize(
    ("lora", "gates", "sums"),
    [
        ({}, "2 of 2 gated MLPs", "4 of 4 linears"),
        (
            {"lora_dropout": 0.1},
            "0 of 2 gated MLPs, not in those with dropout",
            "0 of 4 linears, not in those with dropout",
        ),
        (
            {"use_dora": True},
            "0 of 2 gated MLPs, not in those with more than A and B",
            "0 of 4 linears, not in those with more than A and B",
        ),
        (
            {"r": 64},
            "0 of 2 gated MLPs, not in those of ranks above 32",
            "0 of 4 linears, not in those of ranks above 32",
        ),
        (
            {"rank_pattern": {"up_proj": 4}},
            "0 of 2 gated MLPs, not in those whose gate and up have different scales",
            "2 of 4 linears, not in those whose gate and up have different scales",
        ),
        (
            {"target_modules": ["q_proj"]},
            "0 of 2 gated MLPs, not in those without an adapter on gate, up and down",
            "0 of 4 linears, not in those without an adapter on gate, up and down or without an adapter on o",
        ),
    ],
    ids=str,
)
@pytest.mark.usefixtures("gpu")
def test_where_low_rank_terms_are_fused_is_said(lora: dict[str, Any], gates: str, sums: str) -> None:
    config = LoraConfig(**{"target_modules": "all-linear"} | lora)
    taken, said = with_kernels(_blueprint(kernels="fused").with_adapter(config), device="auto", is_proved=False)
    assert taken.options.kernels == "fused"
    assert said.endswith(f"; low-rank terms in {gates}; {_SUMS} with {sums}")


@pytest.mark.parametrize(
    ("family", "topology", "every", "words"),
    [
        ("llama", "", 1, "with 3 of 4 linears, not in those before a layer that is computed again"),
        ("llama", "", 2, "with 4 of 4 linears"),
        ("llama", "tp=2", 0, "with 0 of 4 linears, not in those over tp"),
        ("llama", "dp=2,dp_shard", 0, "with 0 of 4 linears, not in those with dp_shard"),
        ("llama", "dp=2", 0, "with 4 of 4 linears"),
        ("qwen3", "", 0, "with 4 of 4 linears"),
        ("qwen3_moe", "", 0, "with 3 of 3 linears"),  # two o_proj, and down_proj of the dense layer
        ("gemma2", "", 0, "apart, as no code of these layers is known"),
    ],
)
@pytest.mark.usefixtures("gpu")
def test_where_sums_of_the_stream_are_fused_is_said(family: str, topology: str, every: int, words: str) -> None:
    options = BaseOptions(dtype="bfloat16", kernels="fused")
    base = make_blueprint(twin_config(family), Topology.parse(topology), options)
    adapted = base.with_adapter(LoraConfig(target_modules="all-linear"))
    _, said = with_kernels(adapted, device="auto", is_proved=False, recomputed_every=every)
    assert said.endswith(f"{_SUMS} {words}")


@pytest.mark.usefixtures("gpu")
def test_what_is_not_proved_on_the_device_is_only_taken_if_asked_for() -> None:
    assert with_kernels(_blueprint(), device="auto", is_proved=False)[0].options.kernels == "none"
    assert with_kernels(_blueprint(kernels="none"), device="auto", is_proved=True)[0].options.kernels == "none"
    asked, _ = with_kernels(_blueprint(kernels="liger"), device="auto", is_proved=False)
    assert asked.options.kernels == "liger"


@pytest.mark.parametrize(
    ("lacking", "options", "device", "rule"),
    [
        ("cuda", {}, "auto", "run on GPUs alone; leave it out"),
        ("", {}, "cpu", "run on GPUs alone; leave it out"),
        ("", {"dtype": "float64"}, "auto", "compute in float32 and less"),
        ("liger", {}, "auto", r"is not installed; pip install 'meshlora\[kernels\]'"),
        ("", {"family": "gpt2"}, "auto", "no code of gpt2 is known"),
    ],
)
@pytest.mark.usefixtures("gpu")
def test_kernels_that_cannot_be_are_refused_if_asked_for(
    lacking: str, options: dict[str, Any], device: str, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if lacking == "cuda":
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    if lacking == "liger":
        monkeypatch.setattr(module, "liger_version", lambda: "")
    auto, said = with_kernels(_blueprint(**options), device=device, is_proved=True)
    assert (auto.options.kernels, said) == ("none", "")
    with pytest.raises(UserError, match=rule):
        with_kernels(_blueprint(**options, kernels="liger"), device=device, is_proved=True)


def test_load_refuses_them_on_a_cpu() -> None:
    with pytest.raises(UserError, match=r"model\.kernels: liger: they run on GPUs alone"):
        meshlora.load(twin_config("llama"), lora=LoraConfig(target_modules=["q_proj"]), kernels="liger")


@pytest.mark.parametrize("asked", ["liger", "fused"])
def test_a_package_that_is_missing_is_said_of_what_was_asked(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(package, "liger_version", lambda: "")
    with pytest.raises(UserError, match=f"kernels: {asked}: liger-kernel and Triton are not installed"):
        kernels_of(BaseOptions(kernels=asked), device=CPU, dtype=torch.bfloat16)  # type: ignore[arg-type]


# --- the numbers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_right_kernels_pass_their_check(dtype: torch.dtype) -> None:
    check_kernels(_OURS, CPU, dtype)


def _wrong() -> dict[str, Kernels]:
    gate = STAND_IN.gates["silu"]
    back = {
        "no gradient of the gate's slope": lambda g, a, b: (g * b, g * gate.act(a)),
        "gate for up": lambda g, a, b: gate.back(g, a, b)[::-1],
    }
    change, own = dataclasses.replace, tails()

    def without_a(*given: Any) -> Any:
        *others, dz, scale = given
        of_factors = own.back(*(tensor.clone() for tensor in others), dz, scale)[3]
        return *own.back(*others, 0 * dz, scale)[:3], of_factors

    def without_label(logits: Tensor, sums: Tensor, real: int, place: Tensor, is_here: Tensor) -> Tensor:
        return chunk_kernels().gradient(logits, sums, real, place, is_here & False)

    def twice(gate: Tensor, up: Tensor, z: Tensor, *rest: Any) -> Any:
        return own.forward(gate, up, 2 * z, *rest)

    stream = stream_kernels()
    without_stream = stream._replace(back=lambda grad, _, *rest: stream.back(grad, None, *rest))
    unscaled = stream._replace(back=lambda *rest: stream.back(*rest[:-1], 1.0))
    return {
        "a term of the stream": change(STAND_IN, stream=without_stream),
        "the scale of a term": change(STAND_IN, stream=unscaled),
        "epsilon": change(STAND_IN, norm=lambda x, w, eps, *rest: STAND_IN.norm(x, w, eps * 1e4, *rest)),
        "offset": change(STAND_IN, norm=lambda x, w, eps, _, wide: STAND_IN.norm(x, w, eps, 0.0, wide)),
        "norm's slope": change(STAND_IN, norm_back=lambda g, x, w, r, *_: g * w * r),
        "turned forward": change(STAND_IN, rotate_back=STAND_IN.rotate),
        "a term of A": change(STAND_IN, tails=own._replace(back=without_a)),
        "a term of B twice": change(STAND_IN, tails=own._replace(forward=twice)),
        "a term of the loss": change(STAND_IN, chunk=chunk_kernels()._replace(gradient=without_label)),
        "signature": change(STAND_IN, rotate=lambda q, k: (q, k)),
        **{name: change(STAND_IN, gates={"silu": gate._replace(back=wrong)}) for name, wrong in back.items()},
    }


@pytest.mark.parametrize("name", _wrong())
def test_a_kernel_with_other_numbers_is_refused(name: str) -> None:
    rule = r"our .*; use model\.kernels: liger" if "term" in name else r"liger-kernel's .*; use .*: none"
    with pytest.raises(UnsupportedError, match=rule):
        check_kernels(_wrong()[name], CPU, torch.bfloat16)


def test_what_a_kernel_has_written_over_is_known_to_autograd() -> None:
    gate, up = (torch.randn(3, 8, requires_grad=True) * 1 for _ in range(2))
    loss = FusedGate.apply(gate, up, STAND_IN.gates["silu"]).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()

    q, k = (torch.randn(1, 5, heads, 8, requires_grad=True) * 1 for heads in (4, 2))
    squares = q * q  # has saved q
    cos, sin = torch.randn(2, 1, 5, 8)
    rotated, _ = FusedRotation.apply(q.transpose(1, 2), k.transpose(1, 2), cos, sin, STAND_IN)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (squares.sum() + rotated.sum()).backward()


def test_a_rotation_gives_its_kernels_whole_rows_both_ways() -> None:
    seen = []

    def noted(function: Any) -> Any:
        def call(q: Any, k: Any, cos: Any, sin: Any) -> Any:
            seen.extend((cos.is_contiguous(), sin.is_contiguous()))
            return function(q, k, cos, sin)

        return call

    kernels = dataclasses.replace(STAND_IN, rotate=noted(STAND_IN.rotate), rotate_back=noted(STAND_IN.rotate_back))
    q, k = (torch.randn(1, heads, 5, 8, requires_grad=True) * 1 for heads in (4, 2))
    cos, sin = torch.randn(2, 1, 8, 5).transpose(2, 3)
    sum(found.sum() for found in FusedRotation.apply(q, k, cos, sin, kernels)).backward()
    assert seen == [True] * 4


@pytest.mark.parametrize("change", ["trained norm", "wider dtype", "too wide", "rotation of pairs"])
def test_what_kernels_do_not_compute_is_left_to_transformers(change: str) -> None:
    width = 65544 if change == "too wide" else 8
    norm = LlamaRMSNorm(width).requires_grad_(change == "trained norm")
    fuse(norm, dataclasses.replace(STAND_IN, norm=None))  # type: ignore[arg-type]
    x = torch.randn(2, 3, width, dtype=torch.bfloat16 if change == "wider dtype" else torch.float32)
    if change == "rotation of pairs":
        calls: list[Any] = []
        rotate = fused._rotation(STAND_IN)(lambda *given: calls.append(given) or given[:2])
        cos = torch.randn(1, 3, 4)
        rotate(torch.randn(1, 2, 3, 8), torch.randn(1, 2, 3, 8), cos, cos)
        assert len(calls) == 1
    else:
        torch.testing.assert_close(norm(x), LlamaRMSNorm.forward(norm, x))


# --- the proof --------------------------------------------------------------------------------------------------------


def test_kernels_are_proved_on_one_gpu_where_the_topology_needs_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshlora.verify.preflight.on_gpus", lambda *_, **__: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    name = type("Properties", (), {"name": "GPU"})()
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: name)
    for kernels in ("liger", "none"):
        blueprint = _blueprint(kernels=kernels).on(Topology(tp=2))
        run: Any = type("Run", (), {"blueprint": blueprint, "topology": blueprint.topology})()
        run.config = type("Config", (), {"preflight": "auto", "device": "auto"})()
        places, said = _devices_of(run)
        assert [(p.topology, p.most_ranks, p.has_kernels) for p in places] == (
            [(Topology(), 1, True)] if kernels == "liger" else []
        )
        assert ("for the kernels" if kernels == "liger" else "is left out") in said

"""The preflight of several adapters: together on the twin as alone, on every kind of split; a difference is refused."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from meshlora.run.config.file import read_runs
from meshlora.run.prepared import Prepared
from meshlora.run.together import prepare_runs
from meshlora.verify import preflight as module
from meshlora.verify.faults.of_objectives import PROVED, as_proved
from meshlora.verify.preflight import compare_on_twin, preflight, preflight_state
from meshlora.verify.proof import Outcome, Processes
from meshlora.verify.request import Proof
from meshlora_ground.console import Console
from meshlora_ground.errors import UnsupportedError
from meshlora_ground.objectives.distillation import Distill
from meshlora_ground.tasks import CAUSAL
from meshlora_ground.topology import Topology
from meshlora_judge.compare import Worst
from meshlora_judge.inputs import write_twin
from meshlora_judge.twin import twin_config
from tests.conftest import Prove
from tests.run_files import TINY, copy_tokenizer, write_run_file

# Of a fused matrix, of which one key/value head lies on two ranks: rows of one factor are summed over unlike axes.
FUSED = {"num_key_value_heads": 1}


_ON_LINEARS: dict[str, dict[str, Any]] = {
    "all": {"r": 4, "target_modules": "all-linear", "lora_dropout": 0.1},
    "some": {"r": 2, "target_modules": ["o_proj", "down_proj"]},
    "same": {"r": 4, "target_modules": "all-linear"},
}
# One on both projections of experts, one on one, one on none.
_ON_EXPERTS: dict[str, dict[str, Any]] = {
    "both": {"r": 4, "target_modules": ["q_proj"], "target_parameters": ["gate_up_proj", "down_proj"]},
    "attention": {"r": 4, "target_modules": ["q_proj", "o_proj"], "lora_dropout": 0.1},
    "one": {"r": 2, "target_modules": ["k_proj"], "target_parameters": ["down_proj"]},
}


def _runs(
    folder: Path,
    topology: str,
    *,
    model: Path = TINY,
    quantization: str | None = None,
    adapters: dict[str, dict[str, Any]] = _ON_LINEARS,
) -> dict[str, Prepared]:
    (folder / "train.jsonl").write_text('{"prompt": "def f(x):", "completion": " return x"}\n' * 4)
    file = write_run_file(
        folder / "out.yaml",
        model={"path": str(model), "dtype": "float32", "quantization": quantization},
        data={"max_length": 32},
        train={"steps": 1, "batch_size": 2, "micro_batch_size": 1},
        lora=None,
        adapters={name: {"lora": lora} for name, lora in adapters.items()},
        topology=topology,
        device="cpu",
    )
    return prepare_runs(read_runs(file))


def _model(folder: Path, family: str, **options: int) -> Path:
    """A small model of `family` with a tokenizer."""
    write_twin(twin_config(family, vocab_size=2048, **options), folder / "model", dtype=torch.float32, seed=0)
    copy_tokenizer(folder / "model")
    return folder / "model"


@pytest.mark.long
@pytest.mark.parametrize(
    ("topology", "family", "options", "quantization"),
    [
        ("tp=2,sp", "phi3", FUSED, None),
        ("tp=2,sp", "llama", {"tp": 2, "block": 64}, "nf4"),
        pytest.param("dp=2,dp_shard", "llama", {"block": 64}, "int8", marks=pytest.mark.proof),
        ("tp=2,sp,ep=2", "qwen3_moe", {}, None),
        pytest.param("dp=2,ep=2", "qwen3_moe", {}, None, marks=pytest.mark.proof),
    ],
)
def test_together_on_the_twin_is_as_alone(
    topology: str, family: str, options: dict[str, int], quantization: str | None, tmp_path: Path, processes: Processes
) -> None:
    adapters = _ON_EXPERTS if "moe" in family else _ON_LINEARS
    model = _model(tmp_path, family, **options)
    runs = _runs(tmp_path, topology, model=model, quantization=quantization, adapters=adapters)
    worst = compare_on_twin(runs, Topology.parse(topology), processes)
    assert worst.keys() == runs.keys()
    assert max(found.relative for found in worst.values()) < 1e-11


# What one adapter may have several may: each the adapter that transformers + peft make of it alone.
MAY_HAVE: dict[str, tuple[str, tuple[str, ...], dict[str, Any]]] = {
    "DoRA": ("llama", ("tp=2,sp", "dp=2"), {"lora": {"r": 4, "target_modules": "all-linear", "use_dora": True}}),
    "pieces": (
        "phi3",
        ("tp=2,sp",),
        {"lora": {"r": 4, "target_modules": ["qkv_proj", "down_proj"], "pieces": {"qkv_proj": ["q", "v"]}}},
    ),
    "the embedding": ("gemma2", ("tp=2,sp",), {"lora": {"r": 4, "target_modules": ["embed_tokens", "q_proj"]}}),
    "the head": ("llama", ("tp=2,sp", "dp=2"), {"lora": {"r": 4, "target_modules": ["lm_head", "q_proj"]}}),
    "experts": ("qwen3_moe", ("tp=2,sp,ep=2", "dp=2,ep=2", "tp=2,etp=2"), {}),
    "experts with biases": ("gpt_oss", ("tp=2,etp=2",), {}),
    "experts of scaled tokens": ("llama4_text", ("dp=2,ep=2",), {}),
    "attention beside experts": (
        "mixtral",
        ("tp=2,sp,ep=2",),
        {"lora": {"r": 4, "target_modules": ["q_proj", "o_proj"]}},
    ),
    "packing": ("llama", ("dp=2", "tp=2,sp"), {"packing": True}),
    "dropout of the model": ("gpt2", ("tp=2,sp",), {"overrides": {"resid_pdrop": 0.1}, "recompute": True}),
    **{
        f"objective {kind}": (
            "llama",
            ("dp=2", "tp=2,sp") if kind == "dpo" else ("tp=2,sp", "dp=2"),
            {"objective": as_proved(kind)},
        )
        for kind in PROVED
        # What a teacher says is not proved of several: refused in words.
        if as_proved(kind).task == CAUSAL and not isinstance(as_proved(kind), Distill)
    },
}


# Of these each part is in another case: the loss of the next token in most, smoothing, pairs and the base in that of
# dpo, an adapter on attention beside experts on the twins above, DoRA and experts in the kill table, the embedding as
# the head.
_NOTHING_NEW = (
    *("objective sft", "objective orpo", "objective kto", "objective policy"),
    *(
        "DoRA",
        "experts",
        "experts with biases",
        "experts of scaled tokens",
        "attention beside experts",
        "the embedding",
    ),
)


@pytest.mark.long
@pytest.mark.parametrize(
    ("case", "topologies", "adapters"),
    [
        *(
            pytest.param(case, given[:1], 3 if case in ("the head", "experts") else 2, id=case)
            for case, (_, given, _) in MAY_HAVE.items()
            if case not in _NOTHING_NEW
        ),
        *(
            pytest.param(case, given, 3, id=f"{case}, three", marks=pytest.mark.proof)
            for case, (_, given, _) in MAY_HAVE.items()
        ),
    ],
)
def test_what_one_adapter_may_have_several_may(
    case: str, topologies: tuple[str, ...], adapters: int, prove: Prove
) -> None:
    """After one step of the proof of one adapter, which is not what this is about; those at once take their own."""
    family, _, options = MAY_HAVE[case]
    for outcome in prove(family=family, topologies=topologies, adapters=adapters, steps=1, **options):
        assert outcome.passed, (outcome.topology, outcome.divergence, outcome.error)
        (at_once,) = [phase for phase in outcome.phases if phase.name == "adapters"]
        assert max(result.error for result in at_once.results) < 1e-11


def test_together_is_proved_once_and_a_difference_refuses_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gap, calls, singles = [1e-13], list[str](), list[str]()

    def compared(runs: Mapping[str, Prepared], topology: Topology, processes: Processes) -> dict[str, Worst]:
        calls.append(str(topology))
        return {name: Worst("q_proj.lora_A", gap[0] if name == "some" else 0.0) for name in runs}

    monkeypatch.setattr(module, "compare_on_twin", compared)

    def proved(proof: Proof, *_: Any, **__: Any) -> list[Outcome]:
        singles.append(proof.key)
        return [Outcome(proof.topologies[0], None, [], None, 1.0)]

    monkeypatch.setattr(module, "run_proof", proved)
    runs, cache = _runs(tmp_path, "tp=2"), tmp_path / "cache"
    assert preflight_state(runs, cache_dir=cache).endswith("together: preflight: train will prove it")
    gap[0] = 1e-3
    with pytest.raises(
        UnsupportedError, match=r"on the twin some does not train as it would by itself \(q_proj.lora_A"
    ):
        preflight(runs, cache_dir=cache)
    gap[0] = 1e-13
    preflight(runs, cache_dir=cache)
    preflight(runs, cache_dir=cache)
    assert calls == ["tp=2", "tp=2"]
    assert len(singles) == len(set(singles)) == len(runs)
    assert "3 adapters at once on tp=2 proved in" in capsys.readouterr().out
    assert "together: preflight: proved, 20" in preflight_state(runs, cache_dir=cache)
    preflight(dict(list(runs.items())[:2]), cache_dir=cache, console=Console(file=io.StringIO()))
    assert calls == ["tp=2"] * 3, "other adapters are another combination"

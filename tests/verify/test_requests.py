"""A wrong request: one message that names what was given, the rule and the way out, before any process starts."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import get_args

import pytest

from meshlora.cli.main import main
from meshlora.run.config.run_file import Schedule
from meshlora.verify import command
from meshlora.verify.at_once import adapters_of
from meshlora.verify.options import DEFAULT_LORA, Request
from meshlora.verify.ours import run_config
from meshlora.verify.request import prepare_proof
from meshlora_ground.errors import UnsupportedError
from meshlora_ground.topology import Topology
from meshlora_judge.case import Case
from meshlora_judge.reference import rates_of

TINY = "examples/tiny_base"
FAMILY = ["--family", "llama"]
TP2 = ["--topology", "tp=2"]


@pytest.fixture(autouse=True)
def _no_process_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*_: object, **__: object) -> None:
        raise AssertionError("processes were started")

    monkeypatch.setattr(command, "run_proof", started)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (TP2, "neither of --model and --family"),
        ([*FAMILY, "--model", TINY, *TP2], "both of --model and --family"),
        (["--family", "gemma4_unified_assistant", *TP2], "transformers cannot build it (The set of layer types"),
        ([*FAMILY, "--twin", *TP2], "leave out --twin"),
        (["--family", "lama", *TP2], "did you mean 'llama'?"),
        ([*FAMILY, "--topology", "tq=2"], "'tq' is not an axis"),
        (["--model", TINY, "--topology", "tp=3"], "tp must divide"),
        ([*FAMILY, "--topology", "tp=2,ep=2"], "has no routed experts"),
        (["--family", "mixtral", "--topology", "tp=2,ep=3,dp=3"], "ep must divide"),
        ([*FAMILY, "--topology", "tp=4", "--nproc", "2"], "tp must divide the number of processes"),
        ([*FAMILY, "--topology", "dp=2,tp=2", "--nproc", "2"], "it needs 4 processes, --nproc is 2"),
        ([*FAMILY, *TP2, "--nproc", "0"], "at least 1 process"),
        ([*FAMILY, *TP2, "--steps", "0"], "at least 1 optimizer step"),
        ([*FAMILY, *TP2, "--micro-batch-size", "0"], "at least 1 sequence is computed at once"),
        ([*FAMILY, *TP2, "--adapters", "0"], "at least 1 adapter"),
        ([*FAMILY, *TP2, "--adapters", "2", "--resume"], "--resume with 2 adapters: it is not proved"),
        ([*FAMILY, *TP2, "--adapters", "2", "--dtype", "float32"], "several adapters are proved on twins, in float64"),
        (["--model", TINY, *TP2, "--adapters", "2"], "several adapters are proved on twins, in float64"),
        ([*FAMILY, *TP2, "--resume", "--steps", "1"], "a step is needed before it and one after it"),
        ([*FAMILY, *TP2, "--schedule", "cosine", "--steps", "3"], "it takes 4 steps to tell it from a line"),
        ([*FAMILY, *TP2, "--adapters", "2", "--schedule", "cosine"], "several adapters are not proved with it"),
        ([*FAMILY, *TP2, "--dtype", "float16"], "one of float64, float32, bfloat16"),
        ([*FAMILY, *TP2, "--dtype", "fp64"], "must be one of"),
        ([*FAMILY, *TP2, "--mutation", "row_output_not_reducd"], "did you mean 'row_output_not_reduced'?"),
        ([*FAMILY, *TP2, "--lora", "nowhere.yaml"], "there is no such file"),
        ([*FAMILY, *TP2, "--lora", "a.yaml", "--lora", "b.yaml"], "one file says what the adapter is"),
        ([*FAMILY, *TP2, "--lora", "rank=4"], "here it is lora.r"),
        ([*FAMILY, *TP2, "--lora", "alora_invocation_tokens=[5, 900]"], "the vocabulary has 256 tokens"),
        ([*FAMILY, *TP2, "--data", "train.jsonl"], "a twin has no tokenizer"),
        ([*FAMILY, *TP2, "--json", "/nowhere/out.json"], "there is no folder /nowhere"),
        ([*FAMILY, *TP2, "--html", "/tmp"], "it is a folder"),
        ([*FAMILY, *TP2, "--html", "/dev/null"], "it is not a file that can be replaced"),
        ([*FAMILY, *TP2, "--html", "/proc/out.html"], "it cannot be written ("),
        ([*FAMILY, *TP2, "--device", "cuda"], "no CUDA device"),
        (["--model", "nowhere", *TP2], "there is no such folder"),
        (["--family", "youtu", "--topology", "dp=2"], "zeroes the padding token's embedding"),
        (["--family", "musicgen", "--topology", "cp=2"], "transformers cannot build it"),
        (["--family", "kosmos-2", *TP2], "neither transformers nor meshlora has a tensor-parallel plan"),
        ([*FAMILY, *TP2, "--set", "num_key_value_head=2"], "did you mean 'num_key_value_heads'?"),
        ([*FAMILY, *TP2, "--set", "num_key_value_heads"], "it must read KEY=VALUE"),
        ([*FAMILY, *TP2, "--set", "num_key_value_heads=[2"], "not a YAML value"),
        (["--model", TINY, *TP2, "--set", "num_key_value_heads=2"], "--set with --model"),
    ],
)
def test_wrong_request_is_refused_with_exit_code_2(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(["verify", *words])
    except SystemExit as exit_:  # argparse
        code = int(exit_.code or 0)
    said = capsys.readouterr().err
    assert code == 2, said
    assert message in said
    assert said.startswith("error: ")
    assert len(said.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("r: [", "not readable YAML"),
        ("- 8", "fields of peft.LoraConfig"),
        ("rank: 8", "lora.rank: unknown key; here it is lora.r"),
        ("{r: 8, target_modules: [q_prj]}", "did you mean 'q_proj'?"),
        ("{r: 8, target_modules: all-linear, init_lora_weights: lora_ga}", "'lora_ga'"),
        ("{r: 8, target_modules: [embed_tokens], lora_bias: true}", "lora_bias with an adapter on the embedding"),
        ("{r: 8, target_modules: [q_proj], pieces: {q_proj: [q]}}", "it is not a fused matrix"),
        ("{r: 8, target_modules: [q_proj], fan_in_fan_out: true}", "fan_in_fan_out"),
    ],
)
def test_wrong_lora_file_is_refused(
    content: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "lora.yaml").write_text(content)
    assert main(["verify", *FAMILY, *TP2, "--lora", str(tmp_path / "lora.yaml")]) == 2
    assert message in capsys.readouterr().err


def _with_inputs(request: Request) -> Case:
    """Its case, with the names of inputs that nobody reads."""
    return dataclasses.replace(prepare_proof(request).case, model="unused", adapter="unused")


@pytest.mark.parametrize("lora", [{"target_modules": ["q_proj"]}, {"r": 2, "lora_alpha": 4, "lora_dropout": 0.9}])
def test_adapters_at_once_are_made_of_whatever_the_file_has(lora: dict[str, object]) -> None:
    case = _with_inputs(Request(("tp=2",), family="llama", lora=lora, adapters=12))
    made = [run.lora or {} for run in adapters_of(case, Topology(tp=2), 12, Path("unused")).values()]
    assert all(0 <= one["lora_dropout"] < 1 for one in made)
    for option in ("r", "lora_alpha", "lora_dropout"):
        assert len({one[option] for one in made}) == 12, option


def test_lora_file_may_be_a_part_of_a_run_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.yaml").write_text("model: {path: x}\nlora: {r: 3, target_modules: [q_proj]}\n")
    with pytest.raises(AssertionError, match="processes were started"):
        main(["verify", *FAMILY, *TP2, "--lora", str(tmp_path / "run.yaml")])


def test_fields_of_the_adapter_take_the_place_of_those_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[Request]()
    monkeypatch.setattr("meshlora.verify.command.verify", lambda request, **_: asked.append(request))
    (tmp_path / "lora.yaml").write_text("r: 3\ntarget_modules: [q_proj]\n")
    words = ["--lora", "r=5", "--lora", "alora_invocation_tokens=[5, 9]"]
    assert main(["verify", *FAMILY, *TP2, "--lora", str(tmp_path / "lora.yaml"), *words]) == 0
    assert main(["verify", *FAMILY, *TP2, *words]) == 0
    own = {"r": 5, "alora_invocation_tokens": [5, 9]}
    assert asked[0].lora == {"target_modules": ["q_proj"]} | own
    assert asked[1].lora == DEFAULT_LORA | own


def test_schedule_that_is_asked_for_is_proved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has rates of its own, and faults that ignore it or its end can be put in."""
    asked: list[Request] = []
    monkeypatch.setattr(command, "verify", lambda request, **_: asked.append(request))
    kinds = get_args(Schedule)
    for kind in kinds:
        main(["verify", *FAMILY, *TP2, "--schedule", kind])
    assert [request.schedule for request in asked] == list(kinds)
    proofs = [
        prepare_proof(dataclasses.replace(request, mutations=("schedule_taken_for_linear",))) for request in asked
    ]
    assert len({tuple(rates_of(dataclasses.replace(proof.case, steps=4))) for proof in proofs}) == len(kinds)
    assert [bool(proof.mutations_on(Topology(tp=2))) for proof in proofs] == [kind != "linear" for kind in kinds]
    assert {proof.case.schedule for proof in proofs if proof.case.min_lr} == {
        "cosine", "cosine_of_run", "cosine_with_restarts", "polynomial", "warmup_stable_decay",
    }  # fmt: skip


def test_recomputation_that_is_asked_for_is_proved(monkeypatch: pytest.MonkeyPatch) -> None:
    """What attention gave can be kept with sdpa alone, on both sides."""
    asked: list[Request] = []
    monkeypatch.setattr(command, "verify", lambda request, **_: asked.append(request))
    for words in ([], ["--recompute"], ["--recompute", "offload"], ["--recompute", "keep_attention"]):
        main(["verify", *FAMILY, *TP2, *words])
    found = [(request.recompute, request.attn_implementation) for request in asked]
    assert found == [(False, "eager"), (True, "eager"), ("offload", "eager"), ("keep_attention", "sdpa")]
    of_runs = [run_config(_with_inputs(request), "tp=2", Path("unused")) for request in asked]
    assert [config.train.recompute for config in of_runs] == ["none", "full", "offload", "keep_attention"]
    with pytest.raises(
        UnsupportedError, match=r"keep_attention with attn_implementation=eager.*use model.attn_implementation"
    ):
        prepare_proof(dataclasses.replace(asked[-1], attn_implementation="eager"))


def test_auto_is_every_topology_that_family_and_processes_allow() -> None:
    proof = prepare_proof(Request(("auto",), family="llama", nproc=4))
    assert list(map(str, proof.topologies)) == [
        "dp=2", "tp=2", "tp=2,sp", "dp=4", "dp=2,tp=2", "dp=2,tp=2,sp", "tp=4", "tp=4,sp",
    ]  # fmt: skip
    # No split that is right: dp alone.
    assert prepare_proof(Request(("auto",), family="reformer", nproc=4)).topologies == [Topology(dp=2), Topology(dp=4)]


def test_auto_splits_experts_too_and_trains_them() -> None:
    proof = prepare_proof(Request(("auto",), family="mixtral", nproc=2))
    assert list(map(str, proof.topologies)) == [
        "dp=2", "dp=2,ep=2", "dp=2,etp=2", "tp=2", "tp=2,ep=2", "tp=2,etp=2",
        "tp=2,sp", "tp=2,sp,ep=2", "tp=2,sp,etp=2",
    ]  # fmt: skip
    assert sum(name.endswith("experts.down_proj") for name in proof.case.lora["target_parameters"]) == 2
    assert {name.rpartition(".")[2] for name in proof.case.lora["target_modules"]} == {
        "q_proj", "k_proj", "v_proj", "o_proj",
    }  # fmt: skip
    four = prepare_proof(Request(("auto",), family="mixtral", nproc=4)).topologies
    assert len(four) < 40
    for axis in ("dp", "tp", "sp", "edp", "ep", "etp", "two_stage"):
        assert any(int(getattr(topology, axis)) > int(axis not in ("sp", "two_stage")) for topology in four), axis


def test_missing_dp_is_what_nproc_leaves() -> None:
    assert prepare_proof(Request(("tp=2",), family="llama", nproc=4)).topologies == [Topology(dp=2, tp=2)]
    assert prepare_proof(Request(("tp=2",), family="llama")).topologies == [Topology(tp=2)]


def test_twin_of_a_model_keeps_its_flags_and_real_weights_are_its_own(tmp_path: Path) -> None:
    config = json.loads(Path(TINY, "config.json").read_text()) | {"mlp_bias": True, "num_hidden_layers": 40}
    (tmp_path / "config.json").write_text(json.dumps(config))
    proof = prepare_proof(Request(("tp=2",), model=str(tmp_path), twin=True))
    assert proof.is_twin
    assert proof.config.mlp_bias
    assert proof.config.num_hidden_layers < 5
    assert not prepare_proof(Request(("tp=2",), model=TINY)).is_twin

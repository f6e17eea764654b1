"""The preflight: a proof before the first step, remembered; a combination that fails is refused, with its report."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch

from meshlora.cli.main import main
from meshlora.loading.blueprint import read_model_config
from meshlora.run.config.file import read_run
from meshlora.run.config.run_file import Schedule
from meshlora.run.prepared import Prepared
from meshlora.run.together import prepare_run
from meshlora.verify import preflight as module
from meshlora.verify import request, stand_in
from meshlora.verify.preflight import preflight, preflight_state, proof_words
from meshlora.verify.proof import Outcome, Processes, run_proof
from meshlora.verify.stand_in import provable
from meshlora_ground.console import Console
from meshlora_ground.errors import MeshloraError, UnsupportedError
from meshlora_ground.proof_records import record_of, remember
from meshlora_ground.topology import Topology
from meshlora_judge.inputs import write_twin
from meshlora_judge.reference import rates_of
from meshlora_judge.twin import layers_of_twin, twin_config
from tests.for_each import for_each
from tests.run_files import TINY, copy_tokenizer, write_run_file

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.usefixtures("shared_processes")


def _run_file(folder: Path, **changes: Any) -> Path:
    (folder / "train.jsonl").write_text('{"prompt": "def f(x):", "completion": " return x"}\n' * 4)
    groups: dict[str, Any] = {
        "model": {"dtype": "float32"},
        "data": {"max_length": 32},
        "lora": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"]},
        "topology": "tp=2,sp",
        "device": "cpu",
        **changes,
    }
    groups["train"] = {"steps": 1, "batch_size": 2, "micro_batch_size": 1} | changes.get("train", {})
    return write_run_file(folder / "out.yaml", **groups)


def _prepared(folder: Path, **changes: Any) -> Prepared:
    return prepare_run(read_run(_run_file(folder, **changes)))


def _count(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The topologies that are proved from here on: in truth the first time, and then in words alone."""
    seen: list[str] = []
    outcomes: list[Outcome] = []

    def run(proof: Any, processes: Processes, **options: Any) -> list[Outcome]:
        seen.append(str(proof.topologies[0]))
        outcomes.extend(run_proof(proof, processes, **options) if not outcomes else ())
        return [dataclasses.replace(outcome, topology=proof.topologies[0]) for outcome in outcomes]

    monkeypatch.setattr(module, "run_proof", run)
    return seen


@pytest.mark.long
def test_combination_is_proved_once_and_again_when_anything_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    proved, cache = _count(monkeypatch), tmp_path / "cache"
    run = _prepared(tmp_path)
    assert preflight_state({"": run}, cache_dir=cache).startswith("preflight: train will prove this")
    preflight({"": run}, cache_dir=cache)
    assert "proved in" in capsys.readouterr().out
    assert preflight_state({"": run}, cache_dir=cache).startswith("preflight: proved, 20")
    preflight({"": run}, cache_dir=cache)
    preflight({"": _prepared(tmp_path, train={"output": str(tmp_path / "other"), "steps": 7})}, cache_dir=cache)
    assert capsys.readouterr().out == ""
    assert proved == ["tp=2,sp"]

    other_lora = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    for changes in ({"topology": "tp=2"}, {"lora": other_lora}):
        preflight({"": _prepared(tmp_path, **changes)}, cache_dir=cache)
    with monkeypatch.context() as patch:
        patch.setattr(module, "own_sources", lambda: ["other code"])
        preflight({"": run}, cache_dir=cache)
    assert proved == ["tp=2,sp", "tp=2", "tp=2,sp", "tp=2,sp"]


def test_other_flags_of_the_model_are_another_combination(tmp_path: Path) -> None:
    run = _prepared(tmp_path)
    other = tmp_path / "model"
    other.mkdir()
    for file in TINY.iterdir():
        (other / file.name).symlink_to(file)
    (other / "config.json").unlink()

    def key(**changes: Any) -> str:
        config = json.loads((TINY / "config.json").read_text()) | changes
        (other / "config.json").write_text(json.dumps(config))
        moved = dataclasses.replace(run.blueprint, config=read_model_config(other))
        return module.proof_of(dataclasses.replace(run, blueprint=moved), tmp_path / "cache")[1]

    assert key() == module.proof_of(run, tmp_path / "cache")[1]
    assert key(hidden_act="gelu") != key()
    assert key(vocab_size=4096, max_position_embeddings=4096) == key()  # sizes are the twin's own
    assert key(vocab_size=4097) != key()  # but for what a rank has less of than others


def test_schedule_that_is_proved_is_that_of_the_run(tmp_path: Path) -> None:
    """The twin of every run had a line to zero, so that nothing was proved of a cosine or of a final rate."""
    given: dict[str, dict[str, Any]] = {name: {"schedule": name} for name in get_args(Schedule)}
    given["cosine"]["min_lr"] = given["cosine_of_run"]["min_lr"] = 1e-5
    given["warmup_stable_decay"]["decay_steps"] = 20
    given["cycle"]["cycle"] = {0: 1e-5, 7: 1e-4, 9: 0.0}
    falls = {"schedule": "warmup_stable_decay", "decay_steps": 20}
    given["by a cosine"] = {**falls, "decay_type": "cosine"}
    given["by a root"] = {**falls, "decay_type": "1-sqrt"}
    given["on its own scale"] = {"schedule": "inverse_sqrt", "timescale": 50}
    given["to more than zero"] = {"min_lr": 1e-5}
    given["from zero"] = {"warmup_steps": 10, "warmup_from_zero": True}
    run, rates = _prepared(tmp_path), set()
    for options in given.values():
        train = dataclasses.replace(run.config.train, **options)
        one = dataclasses.replace(run, config=dataclasses.replace(run.config, train=train))
        case = module.proof_of(one, tmp_path)[0].case
        assert case.schedule == train.schedule
        assert case.steps == {"linear": 3}.get(train.schedule, 4) + (train.decay_type != "linear")
        rates.add(tuple(rates_of(dataclasses.replace(case, steps=5))))
        assert f"with the schedule {train.schedule}, was" in proof_words(one, skip=False)
    assert len(rates) == len(given)


def test_block_that_is_trained_in_full_is_so_in_the_twin_without_adapters_in_it(tmp_path: Path) -> None:
    lora = {"r": 4, "target_modules": ["q_proj", "down_proj"], "modules_to_save": ["1.mlp"]}
    proof, _ = module.proof_of(_prepared(tmp_path, lora=lora), tmp_path / "cache")
    assert proof.case.lora["modules_to_save"] == ["model.layers.1.mlp"]
    targets = set(proof.case.lora["target_modules"])
    assert "model.layers.1.mlp.down_proj" not in targets
    assert {"model.layers.0.mlp.down_proj", "model.layers.1.self_attn.q_proj"} <= targets


def test_module_that_is_trained_in_full_in_one_layer_is_so_in_one_of_the_twin(tmp_path: Path) -> None:
    """PEFT leaves what is trained in full out of the targets: by its last name alone no adapter of it was proved."""
    lora = {"r": 4, "target_modules": ["q_proj", "down_proj"], "modules_to_save": ["1.self_attn.q_proj", "model.norm"]}
    proof, _ = module.proof_of(_prepared(tmp_path, lora=lora), tmp_path / "cache")
    assert proof.case.lora["modules_to_save"] == ["model.layers.1.self_attn.q_proj", "norm"]
    targets = set(proof.case.lora["target_modules"])
    assert "model.layers.1.self_attn.q_proj" not in targets
    assert {"model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"} <= targets


def _with_fault(proof: Any, processes: Processes, fault: str) -> list[Outcome]:
    """That of `proof`, and that with a fault, which does not say so."""
    request = dataclasses.replace(proof.request, mutations=(fault,))
    plain, mutated = run_proof(dataclasses.replace(proof, request=request), processes)
    return [plain, dataclasses.replace(mutated, mutation=None)]


def test_combination_that_fails_is_refused_with_its_report_and_not_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faulty: list[Outcome] = []
    asked = 0

    def run(proof: Any, processes: Processes, **_: Any) -> list[Outcome]:
        """The proof with a fault in the product, which is not told."""
        nonlocal asked
        asked += 1
        faulty.extend([] if faulty else _with_fault(proof, processes, "row_output_averaged")[1:])
        return faulty

    monkeypatch.setattr(module, "run_proof", run)
    prepared, cache = _prepared(tmp_path), tmp_path / "cache"
    for number in (1, 2):
        with pytest.raises(UnsupportedError, match="does not train as one process would") as caught:
            preflight({"": prepared}, cache_dir=cache)
        assert asked == number
    assert "row-parallel output averaged over tp instead of summed" in str(caught.value)
    report = Path(re.findall(r"the report is (\S+\.html);", str(caught.value))[0])
    assert "row-parallel output averaged" in report.read_text()
    assert preflight_state({"": prepared}, cache_dir=cache).startswith("preflight: train will prove")


def test_record_of_a_proof_of_something_else_is_no_proof(tmp_path: Path) -> None:
    """`{"passed": true}` of nobody counted; what a record must be is in tests/unit/test_proof_records.py."""
    run, cache = _prepared(tmp_path), tmp_path / "cache"
    (claim,) = module._claims({"": run}, cache)
    assert remember(cache, claim.asked, {}) == ""
    assert preflight_state({"": run}, cache_dir=cache).startswith("preflight: proved, 20")
    record = record_of(cache, claim.asked["key"])
    other = _prepared(tmp_path, lora={"r": 8, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"]})
    shutil.copy(record, record_of(cache, module.proof_of(other, cache)[1]))
    assert preflight_state({"": other}, cache_dir=cache).startswith("preflight: train will prove")
    for content in ("", "{", '{"passed": true, "date": "2026-01-01 00:00"}'):
        record.write_text(content)
        assert preflight_state({"": run}, cache_dir=cache).startswith("preflight: train will prove"), content


@pytest.mark.long
def test_cache_that_cannot_be_written_does_not_stop_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    preflight({"": _prepared(tmp_path)}, cache_dir=tmp_path / "file" / "proofs")
    said = capsys.readouterr().out
    assert "not remembered, so the next run proves it again: " in said
    assert "cannot be written (Not a directory)" in said


def test_proof_that_breaks_off_is_not_called_a_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(proof: Any, *_: Any, **__: Any) -> list[Outcome]:
        return [Outcome(proof.topologies[0], None, [], None, 1.0, "rank 1:\nMemoryError: no memory")]

    monkeypatch.setattr(module, "run_proof", run)
    with pytest.raises(MeshloraError, match=r"the proof broke off \(MemoryError: no memory\); the report is") as caught:
        preflight({"": _prepared(tmp_path)}, cache_dir=tmp_path / "cache")
    assert caught.value.exit_code == 1


def test_skipping_says_what_it_gives_up_and_takes_only_families_that_are_proved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    proved, run = _count(monkeypatch), _prepared(tmp_path)
    preflight({"": run}, skip=True, console=Console())
    assert "is not proved on this machine" in capsys.readouterr().out
    monkeypatch.setattr("meshlora.wings.proved.families.PROVED", frozenset({"qwen2"}))
    with pytest.raises(UnsupportedError, match="not proved against one process"):
        preflight({"": run}, skip=True)
    assert proved == []


def test_block_that_the_twin_does_not_have_is_refused(tmp_path: Path) -> None:
    run = _prepared(tmp_path)
    name = "model.layers.3.self_attn.q_proj"
    odd = dataclasses.replace(run.plan.linears[name], name="model.layers.3.self_attn.extra_proj")
    plan = dataclasses.replace(run.plan, linears={**run.plan.linears, odd.name: odd})
    odd_run = dataclasses.replace(run, blueprint=dataclasses.replace(run.blueprint, plan=plan))
    with pytest.raises(UnsupportedError, match=r"model\.layers\.\*\.self_attn\.extra_proj \(column\): its twin has no"):
        preflight_state({"": odd_run}, cache_dir=tmp_path / "cache")


@for_each(
    ("given", "expected"),
    [
        ("dp=2,tp=4,sp", "dp=2,tp=4,sp"),
        ("dp=64,tp=4,sp", "dp=2,tp=4,sp"),
        ("dp=64,tp=8", "dp=2,tp=8"),  # sixteen ranks: with one on dp nothing is summed over it
        ("dp=64", "dp=2"),
        ("dp=64,dp_shard", "dp=2,dp_shard"),
        ("dp=64,tp=8,dp_shard", "dp=2,tp=8,dp_shard"),
        ("dp=2,cp=8,tp=2,sp", "dp=2,cp=2,tp=2,sp"),
        ("cp=16,ring", "cp=3,ring"),
        ("dp=64,tp=2,ep=16", "dp=4,tp=2,ep=4"),  # with ep=2 experts would be summed over the same ranks as the rest
        ("dp=32,ep=8,etp=2", "dp=8,ep=2,etp=2"),
        ("dp=4,tp=4,sp,ep=4,etp=4,two-stage", "dp=2,tp=4,sp,ep=2,etp=4,two-stage"),
        ("dp=8,tp=8,ep=8,etp=8", "dp=2,tp=8,ep=2,etp=2"),
    ],
)
def test_large_topologies_are_proved_with_fewer_dp_ranks(given: str, expected: str) -> None:
    assert str(provable(Topology.parse(given))) == expected


def test_adapter_on_chosen_layers_is_proved_on_a_layer_of_its_own(tmp_path: Path) -> None:
    lora = {"r": 4, "lora_alpha": 8, "target_modules": ["up_proj"], "layers_to_transform": [4]}
    proof, _ = module.proof_of(_prepared(tmp_path, lora=lora), tmp_path / "cache")
    assert proof.case.lora["target_modules"] == ["model.layers.2.mlp.up_proj"]
    assert proof.config.num_hidden_layers == 3  # two without, and the last


@pytest.mark.parametrize(
    ("of_run", "of_proof"), [(None, None), ("eager", "eager"), ("sdpa", "sdpa"), ("flash_attention_2", None)]
)
def test_attention_of_the_run_is_that_of_the_proof(of_run: str | None, of_proof: str | None, tmp_path: Path) -> None:
    """None: the choice of transformers, which for a run is not eager."""
    run = _prepared(tmp_path)
    options = dataclasses.replace(run.blueprint.options, attn_implementation=of_run)
    changed = dataclasses.replace(run, blueprint=dataclasses.replace(run.blueprint, options=options))
    assert module.proof_of(changed, tmp_path / "cache")[0].case.attn_implementation == of_proof


def test_recomputation_of_the_run_is_that_of_the_proof(tmp_path: Path) -> None:
    run, keys = _prepared(tmp_path), {}
    by_name = [("keep_attention", "keep_attention"), ("offload", "offload")]
    for recompute, of_proof in (("none", False), ("full", True), (2, True), *by_name):
        train = dataclasses.replace(run.config.train, recompute=recompute)
        one = dataclasses.replace(run, config=dataclasses.replace(run.config, train=train))
        proof, key = module.proof_of(one, tmp_path / "cache")
        assert proof.case.recompute == of_proof
        keys[recompute] = key
    assert keys["full"] == keys[2]
    assert len({*keys.values()}) == 4, "a proof of one is none of another"


@pytest.mark.parametrize("topology", ["dp=1", "tp=2"])
@pytest.mark.parametrize("layer", [3, 4])
def test_a_layer_that_a_pattern_names_has_one_of_the_twin(layer: int, topology: str, tmp_path: Path) -> None:
    pattern = {rf".*\.layers\.{layer}\..*q_proj$": 8}
    lora = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "rank_pattern": pattern}
    proof, _ = module.proof_of(_prepared(tmp_path, lora=lora, topology=topology), tmp_path / "cache")
    (name,) = proof.case.lora["rank_pattern"]
    assert name.endswith("self_attn.q_proj")
    assert proof.case.lora["rank_pattern"][name] == 8
    assert proof.config.num_hidden_layers > 2


def test_more_kinds_of_layers_than_fit_beside_each_other_have_one_layer_each() -> None:
    config = twin_config("llama", num_hidden_layers=32)
    assert {3, 20} <= {*layers_of_twin(config, layers={3: "one", 20: "another"})}
    many = {layer: f"rank {layer}" for layer in range(3, 30, 4)}
    assert layers_of_twin(config, layers=many) == [0, *many]


def test_patterns_of_ranks_and_scales_are_proved(tmp_path: Path) -> None:
    lora = {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["up_proj", "q_proj"],
        "rank_pattern": {"layers.3.mlp.up_proj": 6},
        "alpha_pattern": {"q_proj": 20},
    }
    proof, _ = module.proof_of(_prepared(tmp_path, lora=lora), tmp_path / "cache")
    layers = range(proof.config.num_hidden_layers)
    assert proof.case.lora["rank_pattern"] == {"model.layers.2.mlp.up_proj": 6}
    assert proof.case.lora["alpha_pattern"] == {f"model.layers.{layer}.self_attn.q_proj": 20 for layer in layers}


def test_twin_that_lacks_what_the_model_has_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = _prepared(tmp_path, topology="tp=2")
    has = stand_in.features_of_model
    monkeypatch.setattr(stand_in, "features_of_model", lambda *args, **kw: has(*args, **kw) | {"padded_vocabulary"})
    with pytest.raises(UnsupportedError, match=r"llama on tp=2: padded_vocabulary: its twin on tp=2 has none of it"):
        preflight_state({"": run}, cache_dir=tmp_path / "cache")


def _odd_model(folder: Path, *, tp: int) -> None:
    """A vocabulary of 2,049, three heads a rank and one key/value head for two ranks."""
    heads = {"num_attention_heads": 3 * tp, "num_key_value_heads": tp // 2, "hidden_size": 24 * tp}
    config = twin_config("llama", vocab_size=2049, num_hidden_layers=2, **heads)
    write_twin(config, folder, dtype=torch.float32, seed=0)
    copy_tokenizer(folder)


@pytest.mark.long
@pytest.mark.parametrize("tp", [2, pytest.param(4, marks=pytest.mark.proof)])
def test_numbers_that_ranks_cannot_share_evenly_are_those_of_the_twin(
    tp: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And padding in the softmax, which a vocabulary of 256 does not have, is a refusal rather than a wrong loss."""
    _odd_model(tmp_path / "model", tp=tp)
    model = {"path": str(tmp_path / "model"), "dtype": "float32"}
    run = _prepared(tmp_path, model=model, topology=f"tp={tp}", lora={"r": 4, "target_modules": "all-linear"})
    proof, _ = module.proof_of(run, tmp_path / "cache")
    twin = proof.config
    assert (twin.vocab_size % tp, twin.num_attention_heads, twin.num_key_value_heads) == (1, 3 * tp, tp // 2)
    outcomes: list[Outcome] = []

    def one_by_one(proof: Any, processes: Processes, **_: Any) -> list[Outcome]:
        outcomes.extend([] if outcomes else _with_fault(proof, processes, "padding_in_softmax"))
        return [outcomes.pop(0)]

    monkeypatch.setattr(module, "run_proof", one_by_one)
    preflight({"": run}, cache_dir=tmp_path / "cache")
    with pytest.raises(UnsupportedError, match="does not train as one process would"):
        preflight({"": run}, cache_dir=tmp_path / "other")
    assert not outcomes


def test_adapter_on_experts_is_proved_on_the_twins_experts(tmp_path: Path) -> None:
    """The same projections, in pieces and shared as in the run, on a topology that splits experts as the run does."""
    vocab = json.loads((TINY / "config.json").read_text())["vocab_size"]
    config = twin_config("mixtral", vocab_size=vocab, num_hidden_layers=3, num_local_experts=16)
    write_twin(config, tmp_path / "model", dtype=torch.float32, seed=0)
    copy_tokenizer(tmp_path / "model")
    run = _prepared(
        tmp_path,
        model={"path": str(tmp_path / "model"), "dtype": "float32"},
        topology="dp=64,tp=2,sp,ep=16",
        train={"batch_size": 64},
        lora={
            "r": 4,
            "target_modules": ["q_proj"],
            "target_parameters": ["layers.2.mlp.experts.up_proj", "experts.down_proj"],
            "share_experts": True,
        },
    )
    proof, _ = module.proof_of(run, tmp_path / "cache")
    assert str(proof.topologies[0]) == "dp=4,tp=2,sp,ep=4"
    assert proof.case.share_experts
    assert set(proof.case.lora["target_parameters"]) == {
        "model.layers.2.mlp.experts.gate_up_proj",
        *(f"model.layers.{layer}.mlp.experts.down_proj" for layer in range(3)),
    }
    assert proof.case.pieces == {"model.layers.2.mlp.experts.gate_up_proj": ["up"]}
    assert proof.case.lora["target_modules"] == [f"model.layers.{layer}.self_attn.q_proj" for layer in range(3)]


def test_train_proves_before_it_trains_and_only_the_first_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """By the command: with a rank of a launcher of our own, and in this process, as a rank of any other launcher."""
    monkeypatch.setenv("HOME", str(tmp_path))
    words = ["train", str(_run_file(tmp_path, topology=""))]
    assert main([*words, "--nproc", "1"]) == 0
    said = capfd.readouterr().out
    assert said.count("preflight: llama on ") == 1
    assert said.index("preflight: llama on ") < said.index("proved in") < said.index("step 1/1")
    assert (tmp_path / "out" / "adapter").is_dir()

    before_training: list[str] = []
    monkeypatch.setattr("meshlora.cli.job.train", lambda *_, **__: before_training.append(capfd.readouterr().out))
    monkeypatch.setattr("meshlora.cli.job.join", lambda *_: None)
    words += ["--set", "train.overwrite=true"]
    assert main(words) == 0
    shutil.rmtree(tmp_path / ".cache/meshlora/proofs/passed")
    assert main(words) == 0
    remembered, proved = before_training
    assert "preflight" not in remembered
    assert "preflight: llama on " in proved
    assert "proved in" in proved


@pytest.mark.proof
def test_train_proves_before_it_trains_under_each_launcher(tmp_path: Path) -> None:
    """The whole way: two ranks of a launcher of our own, then two of torchrun."""
    file = _run_file(tmp_path)
    own = [sys.executable, "-m", "meshlora", "train", str(file), "--nproc", "2"]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "meshlora"]
    again = [sys.executable, *torchrun, "train", str(file), "--set", "train.overwrite=true"]
    said = []
    for command in (own, again):
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
        assert done.returncode == 0, done.stderr
        said.append(done.stdout)
    assert said[0].index("preflight: llama on tp=2,sp proved in") < said[0].index("step 1/1")
    assert "preflight" not in said[1]


@pytest.mark.long
@pytest.mark.parametrize(
    ("wanted", "where"),
    [("cpu", []), ("auto", []), ("device", ["CPUs"])],  # without a GPU the devices of a run are its CPUs
)
def test_run_is_proved_where_it_says(
    wanted: str, where: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    proved = _count(monkeypatch)
    run = _prepared(tmp_path, preflight=wanted)
    preflight({"": run}, cache_dir=tmp_path / "cache")
    assert len(proved) == 1 + len(where)
    out = capsys.readouterr().out
    assert all(f"on tp=2,sp on {name}, float32, proved in" in out for name in where)
    state = preflight_state({"": run}, cache_dir=tmp_path / "cache").splitlines()
    assert [line.partition(": proved")[0] for line in state] == ["preflight", *(f"preflight: {name}" for name in where)]


def test_devices_are_another_proof_than_cpus_and_are_compared_in_float32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With eight GPUs that are not there: what is asked of them, not that they do it."""
    run = _prepared(tmp_path, preflight="auto")
    on_cpus, key = module.proof_of(run, tmp_path / "cache")
    monkeypatch.setattr(module, "on_gpus", lambda *_, **__: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(name="H100"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    (place,), _ = module._devices_of(run)
    assert (place.device, place.dtype, place.most_ranks) == ("cuda", "float32", 8)
    monkeypatch.setattr(request, "on_gpus", lambda *_, **__: True)
    on_gpus, other = module.proof_of(run, tmp_path / "cache", place)
    assert (on_cpus.case.device, on_cpus.case.dtype) == ("cpu", "float64")
    assert (on_gpus.case.device, on_gpus.case.dtype) == ("cuda", "float32")
    a100 = dataclasses.replace(place, name="A100")
    assert len({key, other, module.proof_of(run, tmp_path / "cache", a100)[1]}) == 3
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    places, why_not = module._devices_of(run)  # a task that sees its own GPU alone
    assert places == []
    assert "needs 2 GPUs of one machine to have every axis" in why_not
    with pytest.raises(UnsupportedError, match="needs 2 GPUs of one machine to have every axis"):
        module._devices_of(_prepared(tmp_path, preflight="device"))


@pytest.mark.long
def test_check_proves_before_the_run_if_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a login node, or while an image is built: `train` then finds it in the cache."""
    proved = _count(monkeypatch)
    words = [str(_run_file(tmp_path)), "--set", "topology=dp=2"]
    assert main(["check", *words]) == 0
    assert "preflight: train will prove this" in capsys.readouterr().out
    assert proved == []
    assert main(["check", *words, "--prove"]) == 0
    assert "preflight: proved, 20" in capsys.readouterr().out
    assert proved == ["dp=2"]


def test_preflight_off_in_the_run_file_is_the_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = _prepared(tmp_path, preflight="off")
    assert preflight_state({"": run}, cache_dir=tmp_path / "cache") == "preflight: off"
    preflight({"": run}, cache_dir=tmp_path / "cache")
    assert "no preflight: that this model" in capsys.readouterr().out

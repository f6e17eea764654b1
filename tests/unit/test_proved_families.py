"""Libraries of another minor version: a family counts as proved where it was proved with them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

import meshlora
from meshlora import feature
from meshlora.cli.main import main
from meshlora.feature import check_proved
from meshlora.loading.blueprint import make_blueprint
from meshlora.model import padding
from meshlora.model.padding import is_causal
from meshlora.plan.base_options import BaseOptions
from meshlora.verify import command
from meshlora.verify.proof import Processes, run_proof
from meshlora.wings.proved import families
from meshlora.wings.proved.families import check_proved_here, proof_of_family
from meshlora.wings.proved.feature import Wing
from meshlora_ground.errors import UnsupportedError
from meshlora_ground.proof_records import remember
from meshlora_ground.topology import Topology
from meshlora_ground.versions import versions
from meshlora_judge.twin import twin_config
from tests.blueprints import build_meta

OTHER = {"transformers": "5.99.1", "peft": versions()["peft"] + ".post1"}


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def _warm_processes(processes: Processes, monkeypatch: pytest.MonkeyPatch) -> None:
    """`meshlora verify` in the processes of the session: starting its own takes longer than a proof."""
    monkeypatch.setattr(command, "_run", lambda proof, _: list(run_proof(proof, processes)))


def _install(monkeypatch: pytest.MonkeyPatch, **other: str) -> None:
    monkeypatch.setattr(families, "versions", lambda: versions() | other)


def test_the_versions_of_the_proofs_are_those_of_the_constraints() -> None:
    check_proved_here("llama", Topology(tp=2, sp=True), has_experts=False)


def test_a_split_is_refused_under_another_minor_version_with_the_command_that_proves_it(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _install(monkeypatch, **OTHER)
    with pytest.raises(UnsupportedError) as caught:
        meshlora.load(twin_config("llama"), topology=Topology(dp=16, tp=2, sp=True))
    proved_with = families._FILE["versions"]["transformers"]
    assert str(caught.value) == (
        "model_type 'llama' on dp=16,tp=2,sp with transformers 5.99.1: its split is proved with transformers "
        f"{proved_with}; prove it with yours, once: meshlora verify --family llama --topology dp=2,tp=2,sp"
    )
    check_proved_here("llama", Topology(dp=16), has_experts=False)


def test_without_the_wing_of_proofs_no_split_is_taken_as_proved(monkeypatch: pytest.MonkeyPatch) -> None:
    config = twin_config("llama")
    whole = make_blueprint(config, Topology(dp=2), BaseOptions())
    check_proved(whole.on(Topology(tp=2)).plan)
    assert is_causal(whole.model, whole.plan)
    left = tuple(each for each in feature.features() if not isinstance(each, Wing))
    monkeypatch.setattr(feature, "features", lambda: left)
    monkeypatch.setattr(padding, "features", lambda: left)
    for refused in (Topology(tp=2), Topology(cp=2), Topology(pp=2), Topology(dp=2, ep=2)):
        with pytest.raises(UnsupportedError, match=f"^model_type 'llama' on {refused}: no wing in WINGS .* is proved"):
            check_proved(dataclasses.replace(whole.plan, topology=refused))
    with pytest.raises(UnsupportedError, match="no wing in WINGS"):
        meshlora.load(config, topology=Topology(tp=2))
    check_proved(whole.plan)  # the model's code, unchanged
    assert not is_causal(whole.model, whole.plan)


@pytest.mark.long
@pytest.mark.usefixtures("_warm_processes")
def test_a_family_that_verify_has_proved_here_is_taken(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _install(monkeypatch, **OTHER)
    assert main(["verify", "--family", "llama", "--steps", "1"]) == 0  # on tp=2,sp
    check_proved_here("llama", Topology(tp=2, sp=True), has_experts=False, cache_dir=home / ".cache/meshlora/proofs")
    refused = [("llama", Topology(tp=2)), ("llama", Topology(dp=2, tp=2, sp=True)), ("qwen3", Topology(tp=2, sp=True))]
    for family, topology in refused:
        with pytest.raises(UnsupportedError, match="prove it with yours"):
            check_proved_here(family, topology, has_experts=False)
    _install(monkeypatch, transformers="5.98.0")
    with pytest.raises(UnsupportedError, match=r"transformers 5\.98\.0"):
        check_proved_here("llama", Topology(tp=2, sp=True), has_experts=False)


@pytest.mark.usefixtures("_warm_processes")
@pytest.mark.parametrize(
    "words",
    [
        pytest.param(["--set", "vocab_size=250"], marks=pytest.mark.proof),
        pytest.param(["--dtype", "float32"], marks=pytest.mark.proof),
        ["--lora", "lora.yaml"],
    ],
)
def test_a_proof_of_less_is_none_of_the_family(words: list[str], home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _install(monkeypatch, **OTHER)
    monkeypatch.chdir(home)
    Path("lora.yaml").write_text("target_modules: [q_proj]\n", "utf-8")
    assert main(["verify", "--family", "llama", "--topology", "tp=2", "--steps", "1", *words]) == 0
    with pytest.raises(UnsupportedError, match="prove it with yours"):
        check_proved_here("llama", Topology(tp=2), has_experts=False)


def test_bloom_that_slices_a_weight_past_its_adapter_is_refused() -> None:
    config = twin_config("bloom", pretraining_tp=2, slow_but_exact=True)
    with pytest.raises(UnsupportedError, match="slow_but_exact: it slices a weight past its adapter"):
        build_meta(config, Topology(tp=2), dtype=torch.float32)


def test_a_proof_on_two_replicas_stands_for_one_on_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _install(monkeypatch, **OTHER)
    assert remember(tmp_path, proof_of_family("qwen3_moe", Topology(dp=2, tp=2, sp=True, ep=2)), {}) == ""
    for dp in (2, 8):
        check_proved_here("qwen3_moe", Topology(dp=dp, tp=2, sp=True, ep=2), has_experts=True, cache_dir=tmp_path)
    with pytest.raises(UnsupportedError):  # its experts are not replicated
        check_proved_here("qwen3_moe", Topology(tp=2, sp=True, ep=2), has_experts=True, cache_dir=tmp_path)
    assert remember(tmp_path, proof_of_family("qwen3_moe", Topology(dp=4, ep=4)), {}) == ""
    with pytest.raises(UnsupportedError):  # its experts are replicated
        check_proved_here("qwen3_moe", Topology(dp=8, ep=4), has_experts=True, cache_dir=tmp_path)

"""A cached reference is used again only where everything that goes into it is the same."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshlora.verify.faults.of_objectives import PROVED
from meshlora.verify.options import Request
from meshlora.verify.proof import Processes, reference_of
from meshlora.verify.request import prepare_proof
from meshlora_ground.further_inputs import KnownInputs
from meshlora_ground.versions import sources_of
from meshlora_judge import case as case_module
from meshlora_judge.case import Case, case_hash, file_fingerprint
from tests.conftest import Prove

BASE = prepare_proof(Request(("tp=2",), family="llama"))
CHANGED: dict[str, Any] = {
    "model_type": "qwen2",
    "dtype": "float32",
    "lora": {"r": 4},
    "pieces": {"c_attn": ["q"]},
    "router_aux_loss_coef": 0.5,
    "share_experts": True,
    "objective": PROVED["dpo"],
    "columns": {"weight": (1.0,)},
    "rows_per_example": 2,
    "targets": ((1.0,),),
    "predicts_next": False,
    "further": KnownInputs([{"token_type_ids": np.zeros(1)}]),
    "dropout": ("resid_pdrop",),
    "packing": True,
    "recompute": True,
    "resumes": True,
    "quantization": "nf4",
    "compute": "fp8",
    "neftune_alpha": 5.0,
    "optimizer": "lora_fa",
    "min_8bit_size": 600,
    "lora_plus_ratio": 4.0,
    "lora_plus_embedding_lr": 1e-5,
    "reference": {"r": 4},
    "eva": {"r": 4},
    "input_ids": (5, *BASE.case.input_ids[1:]),
    "is_trained": (*BASE.case.is_trained[:-1], False),
    "offsets": (0, 16, *BASE.case.offsets[2:]),
    "routed": (((0, 1),),),
    "steps": 4,
    "batch_size": 8,
    "micro_batch_size": 1,
    "seed": 1,
    "lr": 1e-3,
    "max_grad_norm": 1.0,
    "eps": 1e-8,
    "schedule": "cosine",
    "warmup_steps": 0,
    "warmup_from_zero": True,
    "min_lr": 1e-3,
    "num_cycles": 2,
    "power": 2.0,
    "timescale": 3,
    "decay_steps": 1,
    "decay_type": "cosine",
    "cycle": {0: 1e-3, 1: 1e-2},
    "beta1": 0.9,
    "beta2": 0.999,
    "weight_decay": 0.0,
    "decay_biases_and_norms": True,
    "pad_token_id": 1,
    "trust_remote_code": True,
    "attn_implementation": "sdpa",
    "device": "cuda",
    "kernels": "liger",
}


def test_every_field_of_a_case_counts_but_the_folders() -> None:
    assert {f.name for f in dataclasses.fields(Case)} - CHANGED.keys() == {"model", "adapter"}
    before = case_hash(BASE.case, inputs=["config"])
    for name, value in CHANGED.items():
        assert case_hash(dataclasses.replace(BASE.case, **{name: value}), inputs=["config"]) != before, name
    for name in ("model", "adapter"):
        assert case_hash(dataclasses.replace(BASE.case, **{name: "elsewhere"}), inputs=["config"]) == before
    assert case_hash(BASE.case, inputs=["another config"]) != before


@pytest.mark.parametrize(
    "change",
    [
        {"steps": 4},
        {"seed": 1},
        {"dtype": "float32"},
        {"family": "mistral"},
        {"lora": {"r": 4, "target_modules": ["q_proj"]}},
    ],
)
def test_request_that_changes_what_is_computed_has_another_key(change: dict[str, Any]) -> None:
    values = {"topologies": ("tp=2",), "family": "llama", **change}
    assert prepare_proof(Request(**values)).key != BASE.key


def test_topologies_share_a_reference_as_long_as_the_batch_is_the_same() -> None:
    assert prepare_proof(Request(("tp=2,sp", "dp=2,tp=2", "dp=2"), family="llama")).key == BASE.key
    assert prepare_proof(Request(("tp=2,sp", "dp=4"), family="llama")).key != BASE.key  # which needs a larger one


def test_versions_and_the_references_own_code_count(monkeypatch: pytest.MonkeyPatch) -> None:
    before = case_hash(BASE.case, inputs=[])
    with monkeypatch.context() as patch:
        patch.setattr(case_module, "versions", lambda: {"torch": "0.0"})
        assert case_hash(BASE.case, inputs=[]) != before
    with monkeypatch.context() as patch:
        patch.setattr(case_module, "sources_of", lambda *_: ["other code"])
        assert case_hash(BASE.case, inputs=[]) != before
    assert case_hash(BASE.case, inputs=[]) == before


def test_the_references_own_code_is_all_that_it_imports() -> None:
    """A list by hand had forgotten some. Tokens are part of a case, so how texts become tokens is not."""
    root, hashed = Path(case_module.__file__).parents[1], sources_of("meshlora_judge.reference_case")
    for file in (
        "meshlora_judge/reference_case.py",
        "meshlora_judge/reference.py",
        "meshlora_judge/settings.py",
        "meshlora_ground/masks.py",
        "meshlora_ground/tasks.py",
        "meshlora_ground/model_class.py",
        "meshlora_ground/further_inputs.py",
        "meshlora_ground/dataset.py",
    ):
        assert (root / file).read_text("utf-8") in hashed, file
    assert (root / "meshlora/run/trainer.py").read_text("utf-8") not in hashed


@pytest.mark.parametrize("hashed_bytes", [2**28, 0], ids=["small files by content", "large files by size and time"])
def test_files_of_a_checkpoint_count(hashed_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(case_module, "_HASHED_BYTES", hashed_bytes)
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    before = file_fingerprint(tmp_path)
    (tmp_path / "README.md").write_text("no part of the model")
    assert file_fingerprint(tmp_path) == before
    (tmp_path / "model.safetensors").write_bytes(b"Weights, changed")
    assert file_fingerprint(tmp_path) != before


@pytest.fixture(scope="module")
def made(prove: Prove, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with one reference, which each test copies: a copy is believed, as the next test shows."""
    folder = tmp_path_factory.mktemp("made")
    _prove(prove, folder)
    return folder


def _prove(prove: Prove, cache: Path) -> None:
    (outcome,) = prove(family="llama", topologies=("",), cache_dir=cache, steps=1)
    assert outcome.passed, (outcome.divergence, outcome.error)


@pytest.mark.long
def test_reference_runs_once_and_again_where_its_files_are_gone(made: Path, prove: Prove, tmp_path: Path) -> None:
    cache = shutil.copytree(made, tmp_path / "cache")

    def run() -> float:
        _prove(prove, cache)
        (file,) = cache.glob("*/reference.safetensors")
        return file.stat().st_mtime_ns

    (first,) = (file.stat().st_mtime_ns for file in made.glob("*/reference.safetensors"))
    assert run() == first
    shutil.rmtree(next(path for path in cache.iterdir() if path.is_dir()))
    assert run() != first


REFERENCE, ADAPTER, MODEL = "reference.safetensors", "adapter/adapter_model.safetensors", "model/config.json"


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "damage"),
    [
        (REFERENCE, "cut short"),
        (ADAPTER, "cut short"),
        (MODEL, "gone"),
        pytest.param(REFERENCE, "gone", marks=pytest.mark.proof),
        pytest.param(ADAPTER, "gone", marks=pytest.mark.proof),
        pytest.param(MODEL, "cut short", marks=pytest.mark.proof),
    ],
)
def test_damaged_reference_is_made_again(name: str, damage: str, made: Path, prove: Prove, tmp_path: Path) -> None:
    cache = shutil.copytree(made, tmp_path / "cache")
    (file,) = cache.glob(f"*/{name}")
    whole = file.read_bytes()
    if damage == "gone":
        file.unlink()
    else:
        file.write_bytes(whole[: len(whole) // 2])
    _prove(prove, cache)
    assert file.read_bytes() == whole


@pytest.mark.long
@pytest.mark.parametrize("how", ["writable by others", "a link", "more than was written"])
def test_reference_that_somebody_else_may_have_written_is_made_again(
    how: str, made: Path, prove: Prove, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = shutil.copytree(made, tmp_path / "cache")

    def found() -> Path:
        (file,) = cache.glob("*/reference.safetensors")
        assert not file.parent.is_symlink()
        assert {path.stat().st_mode & 0o077 for path in (file.parent, *file.parent.rglob("*"))} == {0}
        return file

    file = found()
    before = file.stat().st_mtime_ns
    if how == "writable by others":
        file.chmod(0o602)
    elif how == "a link":
        file.parent.rename(tmp_path / "elsewhere")
        file.parent.symlink_to(tmp_path / "elsewhere")
    else:
        (file.parent / "rounded-7.safetensors").write_bytes(file.read_bytes())
    _prove(prove, cache)
    assert found().stat().st_mtime_ns != before
    assert ("so the reference is not believed" in caplog.text) == (how != "more than was written")


def test_proofs_that_need_one_reference_make_it_once(processes: Processes, tmp_path: Path) -> None:
    """The second waits, and does not take the files away from under the first."""
    proof = prepare_proof(Request(("",), family="llama", cache_dir=tmp_path, steps=1))
    calls, first_is_at_work = [], threading.Event()

    class Worker:
        def run(self, *args: Any, **options: Any) -> list[Any]:
            calls.append(args)
            assert len(calls) == 1
            first_is_at_work.set()
            time.sleep(0.5)  # and longer yet: the second has begun, and would be here too
            return processes.reference("cpu").run(*args, **options)

    with ThreadPoolExecutor(2) as two:
        first = two.submit(reference_of, proof, Worker())
        assert first_is_at_work.wait(60)
        second = two.submit(reference_of, proof, Worker())
        assert first.result()[0] == second.result()[0]
    assert len(calls) == 1


@pytest.mark.proof
def test_commands_that_need_one_reference_make_it_once(tmp_path: Path) -> None:
    """Two at once, as users start them."""
    command = [sys.executable, "-m", "meshlora", "verify", "--family", "llama", "--topology", "dp=1", "--steps", "1"]
    environment = {**os.environ, "HOME": str(tmp_path)}
    both = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for _ in range(2)
    ]
    said = [process.communicate(timeout=300)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    (file,) = tmp_path.glob(".cache/meshlora/proofs/*/reference.safetensors")
    assert file.is_file()

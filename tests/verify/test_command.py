"""`meshlora verify` from words to files: exit codes, the documented JSON, the report; a fault is never hidden."""

from __future__ import annotations

import dataclasses
import errno
import functools
import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from meshlora.adapter import attach
from meshlora.cli.main import main
from meshlora.model import weights
from meshlora.plan.layout import Layout, Run
from meshlora.verify import command, pool
from meshlora.verify.faults import registry
from meshlora.verify.options import DROPOUT, SEED, Request
from meshlora.verify.pool import Pool
from meshlora.verify.proof import Outcome, Processes, reference_of, run_proof
from meshlora.verify.request import prepare_proof

PHASES = {
    "sequences",
    "loaded_adapter",
    "forward",
    "logits",
    "loss",
    "backward",
    "gradients",
    "grad_norm",
    "deltas",
    "saved_file",
    "fresh_adapter",
    "collectives",
}
UNTIL_CAUGHT = {"sequences", "loaded_adapter", "forward"}
PHASE_KEYS = {"passed", "worst_relative", "worst_name", "limit", "num_tensors"}
DIVERGENCE_KEYS = {"phase", "name", "relative", "ranks", "ratio", "cause", "num_failed"}
WORDS = ["verify", "--family", "llama", "--topology", "tp=2,sp"]
ONE_STEP = [*WORDS, "--steps", "1"]

pytestmark = pytest.mark.usefixtures("shared_processes")


@pytest.mark.long
def test_proof_leaves_the_documented_json_and_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, report = tmp_path / "out.json", tmp_path / "report.html"
    words = [
        *ONE_STEP,
        "--topology",
        "dp=2",
        "--mutation",
        "row_output_averaged",
        "--json",
        str(file),
        "--html",
        str(report),
    ]
    assert main(words) == 0
    written = json.loads(file.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert written["schema_version"] == 1
    assert written["passed"] is True
    assert written["command"].startswith("meshlora verify --family llama --topology tp=2,sp")
    assert {"model_type": "llama", "dtype": "float64", "seed": SEED, "steps": 1}.items() <= written.items()
    assert {"objective": "sft", "label_smoothing": 0.1, "recompute": False}.items() <= written.items()
    assert written["lora"]["lora_dropout"] == DROPOUT
    assert {"torch", "transformers", "peft", "meshlora", "python"} <= written["versions"].keys()
    assert [(r["topology"], r["mutation"], r["passed"]) for r in written["runs"]] == [
        ("tp=2,sp", None, True),
        ("tp=2,sp", "row_output_averaged", False),
        ("dp=2", None, True),
    ]
    for run in written["runs"]:
        assert run["phases"].keys() == (PHASES if run["mutation"] is None else UNTIL_CAUGHT)
        assert all(phase.keys() == PHASE_KEYS for phase in run["phases"].values())
        assert run["seconds"] > 0
    good, bad, _ = written["runs"]
    assert good["first_divergence"] is None
    assert good["phases"]["gradients"]["num_tensors"] == 28
    assert 0 < good["phases"]["gradients"]["worst_relative"] < good["phases"]["gradients"]["limit"] == 1e-11
    assert bad["first_divergence"].keys() == DIVERGENCE_KEYS
    assert bad["first_divergence"]["ratio"] == 0.5
    assert bad["invariant"] == "the output of a row-parallel linear is a sum over tp, not a mean"
    said = capsys.readouterr().out
    assert "row_output_averaged" in said
    assert "1 of 1 killed: 100%" in said
    assert "cannot show here: row_output_averaged (needs tp)" in said
    assert "<html" in report.read_text()


@pytest.mark.long
def test_fault_that_survives_is_exit_code_1(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A squared scale is no fault where the scale is 1; here the registry claims that it shows."""
    (tmp_path / "lora.yaml").write_text("{r: 4, lora_alpha: 4, target_modules: all-linear}")
    name = "lora_scale_squared"
    claimed = dataclasses.replace(registry.MUTATIONS[name], needs=frozenset())
    monkeypatch.setitem(registry.MUTATIONS, name, claimed)
    words = [*ONE_STEP, "--lora", str(tmp_path / "lora.yaml"), "--mutation", name]
    assert main([*words, "--json", str(tmp_path / "out.json")]) == 1
    assert json.loads((tmp_path / "out.json").read_text())["passed"] is False


_RUNS = Layout.runs


def _backwards(layout: Layout, *, rank: int, size: int) -> tuple[Run, ...]:
    return _RUNS(layout, rank=size - 1 - rank, size=size)


def _counted_backwards(original: Callable[..., Any]) -> Callable[..., Any]:
    """`original` with the tp ranks counted backwards: what cuts then gives what what joins puts together again."""

    def call(*args: Any) -> Any:
        with mock.patch.object(Layout, "runs", _backwards):
            return original(*args)

    return call


# What of the product cuts and joins, by what it is about.
_SLICING = {"adapter": [(attach, "local_part"), (attach, "full_factor")], "base": [(weights, "_read_local")]}


def _with_fault(kind: str, function: Callable[..., Any], *args: Any) -> Any:
    """Body of a rank: `function` with a fault in how the product slices and joins."""
    with ExitStack() as stack:
        for owner, name in _SLICING[kind]:
            stack.enter_context(mock.patch.object(owner, name, _counted_backwards(getattr(owner, name))))
        return function(*args)


class _Faulty:
    """A pool whose ranks run with a fault; the process of the reference runs without."""

    def __init__(self, ranks: Pool, kind: str) -> None:
        self.pool, self.kind = ranks, kind

    def start(self) -> None:
        self.pool.start()

    def scratch(self, num_bytes: int) -> AbstractContextManager[Path]:
        return self.pool.scratch(num_bytes)

    def run(self, function: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
        return self.pool.run(_with_fault, self.kind, function, *args, **options)


class _FaultyProcesses:
    def __init__(self, processes: Processes, kind: str) -> None:
        self.processes, self.kind = processes, kind

    def reference(self, device: str) -> Pool:
        return self.processes.reference(device)

    def ranks(self, number: int, device: str, **options: Any) -> Any:
        return _Faulty(self.processes.ranks(number, device, **options), self.kind)


Sliced = Callable[[str], Outcome]


@pytest.fixture(scope="module")
def sliced(processes: Processes, tmp_path_factory: pytest.TempPathFactory) -> Sliced:
    """`sliced("adapter")`: what a proof finds of that fault, once."""
    cache = tmp_path_factory.mktemp("sliced")

    @functools.cache
    def outcome(kind: str) -> Outcome:
        proof = prepare_proof(Request(("tp=2,sp",), family="llama", cache_dir=cache, steps=1))
        (found,) = run_proof(proof, _FaultyProcesses(processes, kind))  # type: ignore[arg-type]
        return found

    return outcome


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "cause"),
    [("adapter", "another rank's slice"), ("base", "cut in the order of the ranks, and the base weight that it goes")],
)
def test_fault_in_the_products_own_slicing_is_caught(kind: str, cause: str, sliced: Sliced) -> None:
    """Shards in reversed order when they are cut and when they are joined: the product alone cannot see it.

    Of the adapter alone or of the base alone: with both in the same other order each rank computes what goes together.
    """
    outcome = sliced(kind)
    assert not outcome.passed
    assert outcome.divergence is not None
    assert outcome.divergence.phase == "loaded_adapter"
    assert cause in outcome.divergence.cause
    assert not next(p for p in outcome.phases if p.name == "forward").passed  # they do not go together


def test_difference_without_a_mutation_is_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, sliced: Sliced, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "run_proof", lambda *_, **__: [sliced("adapter")])
    assert main(ONE_STEP) == 1
    captured = capsys.readouterr()
    assert "DIFFERS" in captured.out
    assert "first difference: loaded_adapter of model.layers.0.self_attn.q_proj.lora_B on ranks 0, 1" in captured.out
    assert captured.err.startswith("error: tp=2,sp differs from one process: loaded_adapter of model.layers.0.")


@pytest.mark.long
@pytest.mark.parametrize(
    ("end", "said"),
    [
        ("_kill", "rank 1: the process was ended by signal 9 (SIGKILL); the machine may be out of memory"),
        # These end in the same error: tests/verify/test_pool.py.
        pytest.param("_hang", "ranks without an answer in 1 s: [0, 1]", marks=pytest.mark.proof),
        pytest.param("_fill", "rank 1: the machine has no room for it (MemoryError: )", marks=pytest.mark.proof),
    ],
)
def test_rank_that_ends_while_a_fault_is_in_has_not_caught_it(
    end: str,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    processes: Processes,
    without_fault: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Neither the run without a fault, which passed, nor the one with it makes a verdict."""
    monkeypatch.setattr(pool, "_GRACE_S", 0.5)
    failing = _Failing(processes, globals()[end], without_fault)
    monkeypatch.setattr(command, "run_proof", lambda proof, _, **options: run_proof(proof, failing, **options))
    assert main([*ONE_STEP, "--mutation", "row_output_averaged"]) == 1
    captured = capsys.readouterr()
    assert captured.err == f"error: tp=2,sp with row_output_averaged: no verdict: {said}\n"
    assert captured.out == ""


@pytest.mark.long
def test_error_that_the_fault_raises_on_a_rank_has_caught_it(
    monkeypatch: pytest.MonkeyPatch, processes: Processes, without_fault: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pool, "_GRACE_S", 0.5)
    failing = _Failing(processes, _raise, without_fault)
    monkeypatch.setattr(command, "run_proof", lambda proof, _, **options: run_proof(proof, failing, **options))
    assert main([*ONE_STEP, "--mutation", "row_output_averaged"]) == 0
    assert "1 of 1 killed: 100%" in capsys.readouterr().out


def test_rank_that_fails_is_shown_with_its_first_cause(
    monkeypatch: pytest.MonkeyPatch, processes: Processes, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pool, "_GRACE_S", 0.5)
    monkeypatch.setattr(command, "run_proof", lambda proof, _, **o: run_proof(proof, _Failing(processes, _raise), **o))
    assert main(ONE_STEP) == 1
    captured = capsys.readouterr()
    assert "rank 1 is out of luck" in captured.err
    assert "ranks without an answer" in captured.out


def test_cache_on_a_file_system_without_locks_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def flock(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", flock)
    assert main(WORDS) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: the cache of proofs, ")
    assert "its file system has no locks (No locks available); let HOME be on another file system" in said


def test_remains_of_a_reference_that_was_killed_are_removed(processes: Processes, tmp_path: Path) -> None:
    proof = prepare_proof(Request(("",), family="llama", cache_dir=tmp_path, steps=1))
    for name in (f".{proof.key}.abc.tmp", ".another.abc.tmp"):
        (tmp_path / name / "model").mkdir(parents=True)
    reference_of(proof, processes.reference("cpu"))
    assert sorted(path.name for path in tmp_path.glob(".*")) == [".another.abc.tmp"]


@pytest.fixture(scope="module")
def without_fault(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For what the run without a fault leaves, the first time: later ones are the same, on ranks that are new."""
    return tmp_path_factory.mktemp("without-fault")


class _Failing(_FaultyProcesses):
    """Ranks that call `end` before what they are to do: always, or with the folder `without_fault`, where what they are
    to do has a fault.
    """

    def __init__(self, processes: Processes, end: Callable[[], None], without_fault: Path | None = None) -> None:
        super().__init__(processes, "")
        self.end, self.without_fault = end, without_fault

    def ranks(self, number: int, device: str, **options: Any) -> Any:
        ranks = self.processes.ranks(number, device, **options)
        faulty = _Faulty(ranks, "")

        def run(function: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
            _, _, folder, mutation = args
            if mutation is None and self.without_fault is not None:
                if not list(self.without_fault.iterdir()):
                    ranks.run(function, *args)
                    shutil.copytree(folder, self.without_fault, dirs_exist_ok=True)
                shutil.copytree(self.without_fault, folder, dirs_exist_ok=True)
                return []
            if self.end is _hang:
                options["timeout_s"] = 1.0
            return ranks.run(_ends, self.end, function, *args, **options)

        faulty.run = run  # type: ignore[method-assign]
        return faulty


def _ends(end: Callable[[], None], function: Callable[..., Any], *args: Any) -> Any:
    from meshlora.verify.faults.fault import rank

    if rank() == 1:
        end()
    return function(*args)


def _raise() -> None:
    raise RuntimeError("rank 1 is out of luck")


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _hang() -> None:
    time.sleep(1000)


def _fill() -> None:
    raise MemoryError

"""Faults made from syntax trees: put in, taken out again, caught; those known to survive are faults that there are."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from meshlora.cli.main import main
from meshlora.comm import direct
from meshlora.run.config.run_file import TrainConfig
from meshlora.run.learning_rate import learning_rate
from meshlora.verify import proof
from meshlora.verify.faults.generated import Generated, NotPutInError, faults_of, generated
from meshlora.verify.options import Request
from meshlora.verify.pool import RankError
from meshlora.verify.request import prepare_proof
from meshlora_ground.errors import UserError
from meshlora_ground.topology import Topology
from tests.scripts import load_script

KINDS = ("equivalent", "speed or words", "test: ", "open")


def _fault(file: str, before: str, after: str) -> Generated:
    (found,) = (fault for fault in faults_of(file) if (fault.before, fault.after) == (before, after))
    return found


def test_a_fault_is_in_while_its_block_runs_and_not_after_it() -> None:
    options, code = TrainConfig(output="runs", steps=9, lr=1e-3, warmup_steps=4), learning_rate.__code__
    with _fault(
        "run/learning_rate.py", "step + (not options.warmup_from_zero)", "step - (not options.warmup_from_zero)"
    ).apply():
        assert learning_rate(1, options=options, steps=9) == 0.0
    assert learning_rate(1, options=options, steps=9) == 5e-4
    assert learning_rate.__code__ is code


def test_a_function_that_only_a_registry_holds_gets_the_fault_too() -> None:
    """An operator of torch.library is not found by the names of its module."""
    assert direct.all_reduce.__code__.co_name == "call"
    with next(fault for fault in faults_of("comm/direct.py") if fault.before == "_add_up(parts, own, axis)").apply():
        pass


@pytest.mark.parametrize(
    ("file", "before", "after"),
    [
        ("reading/rollouts.py", "column[:length]", "column[-length:]"),
        (
            "wings/quantized/quantized.py",
            "for count, number in equal:",
            "in (lambda parts: parts[:1] * len(parts))([*equal]):",
        ),
        ("run/checkpoint/state.py", "checkpoint.updates", "checkpoint.step"),
        ("run/loss_scale.py", "if math.isfinite(grad_norm):", "if True:"),
        ("run/loss_scale.py", "self.good_steps, self.skipped = (int(state", "(left out)"),
        ("run/formulas/preferences.py", "(margin > 0).to(margin.dtype)", "(margin > 0.5).to(margin.dtype)"),
        (
            "train/batches.py",
            "mine[j * micro_batch_size:(j + 1) * micro_batch_size]",
            "(j + 1) * micro_batch_size - 1]",
        ),
    ],
)
def test_a_class_of_faults_that_no_test_saw_once_is_made(file: str, before: str, after: str) -> None:
    (fault,) = (one for one in faults_of(file) if one.before.startswith(before) and after in one.after)
    assert fault.is_keeping


def test_what_cannot_be_put_in_has_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshlora.verify.faults.generated._functions", lambda file: [])
    with pytest.raises(NotPutInError, match="no function has this line"), faults_of("run/optimizer.py")[0].apply():
        pass


@pytest.mark.parametrize(
    "file", ["run/optimizer.py", "nowhere.py", "/etc/passwd", "../../../../../../etc/passwd", "a" * 5000, "a\0", ""]
)
def test_a_change_that_there_is_not_is_refused(file: str) -> None:
    with pytest.raises(UserError, match="no such change can be made"):
        generated(f"{file}:1:0-1:constant")


def test_a_change_that_no_rank_can_make_is_no_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cannot(*_: object, **__: object) -> None:
        raise RankError("on rank 0", NotPutInError("--mutation x", "no function has this line"))

    monkeypatch.setattr(proof, "evidence_of", cannot)
    asked = prepare_proof(Request(("tp=2",), family="llama", cache_dir=tmp_path))
    with pytest.raises(NotPutInError):
        proof._run(asked, (None, None, []), Topology(), "x", None, None)  # type: ignore[arg-type]


@pytest.mark.long
@pytest.mark.usefixtures("shared_processes")
def test_a_silent_one_is_caught_on_ranks(tmp_path: Path) -> None:
    scale = "1 {} totals.clamp(min=1).double()"
    fault = _fault("train/gradsync.py", scale.format("/"), scale.format("*"))
    file = tmp_path / "proof.json"
    words = ["--family", "llama", "--topology", "tp=2,sp", "--steps", "1", "--mutation", fault.name]
    assert main(["verify", *words, "--json", str(file)]) == 0
    plain, with_fault = json.loads(file.read_text())["runs"]
    assert (plain["passed"], with_fault["passed"]) == (True, False)
    assert with_fault["invariant"] == fault.invariant


def test_survivors_that_are_written_down_are_changes_that_can_be_made() -> None:
    script = load_script("generate_faults")
    rows = script.known_survivors()
    keys = {script.key(fault) for file in {key.partition(" | ")[0] for key in rows} for fault in faults_of(file)}
    assert rows.keys() <= keys
    assert not [kind for kind in rows.values() if not kind.startswith(KINDS)]


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.proof)])
def test_names_are_of_one_change_each(every: bool) -> None:
    """A name begins with its file: of those whose survivors are known, or of every one."""
    script = load_script("generate_faults")
    files = script.files_of_product() if every else {key.partition(" | ")[0] for key in script.known_survivors()}
    names = Counter(fault.name for file in files for fault in faults_of(file))
    assert len(names) > (10_000 if every else 5_000)
    assert set(names.values()) == {1}

"""A run that was stopped and goes on ends in the adapter of the run that was not; what cannot go on is refused."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from meshlora.adapter.peft_format import WEIGHTS_FILE
from meshlora.data import GlobalBatches
from meshlora.errors import UserError
from meshlora.oracle.inputs import write_twin
from meshlora.plan.twin import twin_config
from meshlora.run_file import read_run
from meshlora.train import trainer
from meshlora.train.checkpoint import MANIFEST, STATE_FILE, restore_optimizer
from meshlora.train.keeping import LATEST, point
from meshlora.train.prepare import Prepared, prepare
from tests.pool import Pool
from tests.ranks.test_trainer import EXAMPLES, folder, run_and_keep_groups, run_file

__all__ = ["folder"]  # a fixture

WORLD = {"": 1, "tp=2,sp": 2, "dp=2": 2, "dp=2,tp=2,sp": 4}
SCRIPT = Path(__file__).parents[2] / "scripts" / "kill_and_resume.py"
STEPS, STOPPED = 6, 2  # the second epoch begins with step 4


def _file(folder: Path, name: str, topology: str, **changes: Any) -> Path:
    return run_file(folder, name, topology, **{"train__steps": STEPS} | changes)


@pytest.fixture(scope="module")
def whole(folder: Path, pools: Callable[[int], Pool]) -> Callable[[str], Path]:
    """Topology -> output of the run that nothing stopped."""

    def run(topology: str) -> Path:
        output = folder / f"whole-{topology}"
        if not output.exists():
            file = _file(folder, output.name, topology)
            pools(WORLD[topology]).run(run_and_keep_groups, file, WORLD[topology], timeout_s=120)
        return output

    return run


@pytest.fixture
def stopped(folder: Path, whole: Callable[[str], Path], request: pytest.FixtureRequest) -> Callable[[str], Path]:
    """Topology -> output of a run that was stopped right after its checkpoint of step 2, in the midst of an epoch."""

    def run(topology: str) -> Path:
        output = folder / f"stopped-{abs(hash(request.node.name))}"
        shutil.copytree(whole(topology), output, symlinks=True)
        shutil.rmtree(output / "adapter")
        for step in range(STOPPED + 2, STEPS, 2):
            shutil.rmtree(output / "checkpoints" / f"step-{step:06d}")
        point(output / "checkpoints" / LATEST, f"step-{STOPPED:06d}")
        return output

    return run


def _difference(one: Path, other: Path) -> float:
    a, b = (load_file(path / "adapter" / WEIGHTS_FILE) for path in (one, other))
    assert a.keys() == b.keys()
    return max(float((a[key] - b[key]).norm() / b[key].norm()) for key in a)


def _metrics(output: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "step_time_s"} for line in lines]


@pytest.mark.parametrize("topology", ["", "tp=2,sp", "dp=2"])
def test_on_the_same_topology_every_bit_is_that_of_the_run_that_was_not_stopped(
    topology: str,
    folder: Path,
    whole: Callable[[str], Path],
    stopped: Callable[[str], Path],
    pools: Callable[[int], Pool],
) -> None:
    output, world = stopped(topology), WORLD[topology]
    pools(world).run(run_and_keep_groups, _file(folder, output.name, topology), world, "auto", timeout_s=120)
    assert (output / "adapter" / WEIGHTS_FILE).read_bytes() == (whole(topology) / "adapter" / WEIGHTS_FILE).read_bytes()
    assert _metrics(output) == _metrics(whole(topology))


@pytest.mark.parametrize(
    ("first", "second"),
    [("dp=2", "tp=2,sp"), ("tp=2,sp", "dp=2"), ("tp=2,sp", ""), ("", "dp=2,tp=2,sp"), ("dp=2,tp=2,sp", "tp=2,sp")],
)
def test_on_another_topology_only_the_rounding_differs(
    first: str,
    second: str,
    folder: Path,
    whole: Callable[[str], Path],
    stopped: Callable[[str], Path],
    pools: Callable[[int], Pool],
) -> None:
    output, world = stopped(first), WORLD[second]
    pools(world).run(run_and_keep_groups, _file(folder, output.name, second), world, "auto", timeout_s=120)
    assert _difference(output, whole(first)) < 1e-9


def test_dropout_goes_on_with_the_masks_of_its_step(folder: Path, pools: Callable[[int], Pool]) -> None:
    """Of the adapter and of the model; on the same topology to the bit, on another to rounding."""
    rates = {"resid_pdrop": 0.1, "embd_pdrop": 0.1}
    model = folder / "gpt2"
    write_twin(twin_config("gpt2", vocab_size=2048, n_positions=128, **rates), model, dtype=torch.float64, seed=0)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EXAMPLES / "tiny_base" / name, model)
    lora = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "lora_dropout": 0.2}

    def run(name: str, topology: str, resume: str | None = None) -> Path:
        changes = {"model__path": str(model), **{f"lora__{key}": value for key, value in lora.items()}}
        file = _file(folder, name, topology, train__steps=4, train__eval_every=0, **changes)
        pools(2).run(run_and_keep_groups, file, 2, resume, timeout_s=120)
        return folder / name

    whole = run("dropout", "dp=2")
    for name, topology in (("dropout-same", "dp=2"), ("dropout-other", "tp=2,sp")):
        shutil.copytree(whole, folder / name)
        shutil.rmtree(folder / name / "adapter")
        assert (folder / name / "checkpoints" / "step-000002").is_dir()
        run(name, topology, "auto")
    assert (folder / "dropout-same" / "adapter" / WEIGHTS_FILE).read_bytes() == (
        whole / "adapter" / WEIGHTS_FILE
    ).read_bytes()
    assert _difference(folder / "dropout-other", whole) < 1e-9
    off = json.loads((model / "config.json").read_text()) | dict.fromkeys(rates, 0.0)
    (model / "config.json").write_text(json.dumps(off))
    assert _difference(run("dropout-off", "dp=2"), whole) > 1e-3


def test_moments_matter(
    folder: Path, whole: Callable[[str], Path], stopped: Callable[[str], Path], pools: Callable[[int], Pool]
) -> None:
    """That the others agree is due to them: without, the end is another one."""
    output = stopped("dp=2")
    checkpoint = output / "checkpoints" / f"step-{STOPPED:06d}"
    state = load_file(checkpoint / STATE_FILE)
    save_file({name: torch.zeros_like(tensor) for name, tensor in state.items()}, checkpoint / STATE_FILE)
    _sign(checkpoint)
    pools(2).run(run_and_keep_groups, _file(folder, output.name, "dp=2"), 2, "auto", timeout_s=120)
    assert _difference(output, whole("dp=2")) > 1e-3


def _spoil_moments(model: Any, optimizer: Any, checkpoint: Any) -> None:
    """Restore, and give every rank the part of the moments that belongs to its neighbour."""
    restore_optimizer(model, optimizer, checkpoint)
    for held in optimizer.state.values():
        for moment in ("exp_avg", "exp_avg_sq"):
            held[moment].copy_(held[moment].roll(1, dims=0))


def _resume_with_fault(file: Path, world: int, fault: str) -> None:
    """Every rank of the pool goes on with a fault put in."""
    batch = GlobalBatches.batch
    with pytest.MonkeyPatch.context() as patch:
        if fault == "moments resharded wrongly":
            patch.setattr(trainer, "restore_optimizer", _spoil_moments)
        if fault == "data position off by one":
            patch.setattr(GlobalBatches, "batch", lambda self, step: batch(self, step + 1))
        if fault == "steps of the optimizer forgotten":
            read = trainer.restore_optimizer
            patch.setattr(trainer, "restore_optimizer", lambda m, o, c: read(m, o, dataclasses.replace(c, updates=0)))
        run_and_keep_groups(file, world, "auto")


@pytest.mark.parametrize(
    "fault", ["moments resharded wrongly", "data position off by one", "steps of the optimizer forgotten"]
)
def test_fault_in_going_on_shows(
    fault: str,
    folder: Path,
    whole: Callable[[str], Path],
    stopped: Callable[[str], Path],
    pools: Callable[[int], Pool],
) -> None:
    output = stopped("tp=2,sp")
    pools(2).run(_resume_with_fault, _file(folder, output.name, "tp=2,sp"), 2, fault, timeout_s=120)
    assert _difference(output, whole("tp=2,sp")) > 1e-4


def _sign(checkpoint: Path) -> None:
    """Make the manifest that of the files as they are."""
    import hashlib

    manifest = json.loads((checkpoint / MANIFEST).read_text())
    for name, entry in manifest["files"].items():
        content = (checkpoint / name).read_bytes()
        entry.update(bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
    (checkpoint / MANIFEST).write_text(json.dumps(manifest))


def _resumed(
    folder: Path, output: Path, resume: str = "auto", despite: tuple[str, ...] = (), **changes: Any
) -> Prepared:
    return prepare(read_run(_file(folder, output.name, "dp=2", **changes)), resume=resume, despite=despite)


@pytest.mark.parametrize(
    "damage",
    ["a byte", "cut short", "file missing", "manifest missing", "manifest cut", "other", "other format", "wrong type"],
)
def test_damaged_checkpoint_is_passed_over_with_a_word(
    damage: str, folder: Path, whole: Callable[[str], Path], stopped: Callable[[str], Path]
) -> None:
    output = stopped("dp=2")
    new = output / "checkpoints" / "step-000004"
    shutil.copytree(whole("dp=2") / "checkpoints" / new.name, new)
    file = new / (MANIFEST if "manifest" in damage else STATE_FILE)
    content = bytearray(file.read_bytes())
    if damage == "a byte":
        content[-3] ^= 1
    if damage == "other":
        file, content = new / MANIFEST, bytearray(b'{"format": 1, "files": []}')
    if damage in ("other format", "wrong type"):
        file = new / MANIFEST
        changes = {"format": 2} if damage == "other format" else {"updates": "four"}
        content = bytearray(json.dumps(json.loads(file.read_text()) | changes).encode())
    file.write_bytes(content[: len(content) // 2] if "cut" in damage else content)
    if "missing" in damage:
        file.unlink()
    run = _resumed(folder, output)
    assert run.resume is not None
    assert run.resume.step == STOPPED
    (note,) = run.notes
    assert note.startswith("passed over: ")
    assert str(new) in note
    with pytest.raises(UserError) as caught:
        _resumed(folder, output, str(new))
    assert str(new) in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"train__lr": 1e-3}, "train.lr"),
        ({"train__batch_size": 8}, "train.batch_size"),
        ({"train__seed": 3}, "train.seed"),
        ({"train__steps": STEPS + 1}, "steps"),
        ({"data__loss_on": "all"}, "data"),
        ({"lora__r": 8}, "lora"),
        ({"model__dtype": "float32"}, "model.dtype"),
    ],
)
def test_checkpoint_of_another_run_is_refused_by_name(
    changes: dict[str, Any], name: str, folder: Path, stopped: Callable[[str], Path]
) -> None:
    output = stopped("dp=2")
    with pytest.raises(UserError, match=f"with other {name}.*--resume-despite {name}"):
        _resumed(folder, output, **changes)
    run = _resumed(folder, output, despite=(name,), **changes)
    assert run.resume is not None


def test_what_changes_no_step_may_differ(folder: Path, stopped: Callable[[str], Path]) -> None:
    run = _resumed(folder, stopped("dp=2"), train__save_every=1, train__log_every=3, train__micro_batch_size=1)
    assert run.resume is not None


def test_without_a_checkpoint_the_run_begins_and_says_so(folder: Path) -> None:
    run = _resumed(folder, folder / "nothing-there")
    assert run.resume is None
    assert "begins at its first step" in run.notes[0]


def test_run_that_has_all_its_steps_is_finished(folder: Path, whole: Callable[[str], Path]) -> None:
    whole("dp=2")
    assert _resumed(folder, whole("dp=2")).is_finished


def _kill(kills: int) -> str:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--kills", str(kills)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_three_kills_and_the_same_bytes() -> None:
    out = _kill(3)
    assert out.splitlines()[-1] == "byte-identical"
    assert out.count("all ended in") == 3


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_twenty_kills_and_the_same_bytes() -> None:
    out = _kill(20)
    assert out.splitlines()[-1] == "byte-identical"
    assert out.count("inside a save") >= 3

"""A run that was stopped and goes on ends in the adapter of the run that was not; what cannot go on is refused."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from meshlora.adapter.formats.peft_format import WEIGHTS_FILE
from meshlora.run import trained, trainer
from meshlora.run.checkpoint.manifest import FILE, STATE_FILE, read_whole
from meshlora.run.checkpoint.retention import LATEST, point
from meshlora.run.config.file import read_run
from meshlora.run.prepared import Prepared
from meshlora.run.together import prepare_run
from meshlora_ground.errors import UserError
from meshlora_ground.topology import Topology
from meshlora_judge.inputs import write_twin
from meshlora_judge.twin import twin_config
from tests.manifests import manifest_of
from tests.pool import Pool, RankError
from tests.ranks.test_trainer import folder, run_and_keep_groups, run_file
from tests.run_files import copy_tokenizer, untimed_metrics_of

__all__ = ["folder"]  # a fixture

WORLD = {"": 1, "tp=2,sp": 2, "dp=2": 2, "dp=2,tp=2,sp": 4, "pp=2": 2, "cp=2": 2}
STEPS, STOPPED = 5, 2  # the second epoch begins with step 4


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


# dp=2 to the bit with every dropout, and one process where later steps are set aside: below.
@pytest.mark.parametrize("topology", ["tp=2,sp", *(pytest.param(t, marks=pytest.mark.proof) for t in ("", "dp=2"))])
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
    assert untimed_metrics_of(output) == untimed_metrics_of(whole(topology))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("tp=2,sp", "dp=2"),
        ("tp=2,sp", "pp=2"),
        pytest.param("tp=2,sp", "cp=2", marks=pytest.mark.proof),
        pytest.param("cp=2", "", marks=pytest.mark.proof),
        pytest.param("pp=2", "cp=2", marks=pytest.mark.proof),
        pytest.param("pp=2", "", marks=pytest.mark.proof),
        pytest.param("", "dp=2,tp=2,sp", marks=pytest.mark.proof),
        pytest.param("dp=2,tp=2,sp", "tp=2,sp", marks=pytest.mark.proof),
    ],
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


@pytest.mark.proof  # each link by itself is above, most of them here too
def test_run_goes_on_over_tensor_context_and_pipeline_parallel_and_ends_alone(
    folder: Path, whole: Callable[[str], Path], pools: Callable[[int], Pool]
) -> None:
    links: list[tuple[str, int | None]] = [("tp=2,sp", 1), ("cp=2", 2), ("pp=2", 4), ("", None)]
    output = folder / "chain-of-four"
    for topology, step in links:
        file, world = _file(folder, output.name, topology, train__eval_every=0, train__save_every=0), WORLD[topology]
        resume = "auto" if output.exists() else None
        pools(world).run(_stopped_after, step, file, world, resume, timeout_s=120)
        assert (output / "adapter").exists() == (step is None), topology
    assert [f.name for f in sorted((output / "checkpoints").glob("step-*"))] == [
        f"step-{step:06d}" for _, step in links if step
    ]
    assert _difference(output, whole("tp=2,sp")) < 1e-9


# --- one run over three topologies, with dropout


CHAIN = (("dp=2", 2), ("tp=2,sp", 4), ("", None))  # (topology, after which step it is stopped)
DROPOUT = {"resid_pdrop": 0.1, "embd_pdrop": 0.1}


def _stopped_after(step: int | None, file: Path, world: int, resume: str | None) -> None:
    """Every rank of the pool: the last one gets SIGTERM in the second micro-batch of `step`, from 1."""
    train_step, forward, now = trainer.Trainer.train_step, trainer.Trainer._forward, [0]

    def noticed(self: Any, adapters: Any) -> Any:
        now[0] = adapters[0].done + 1
        return train_step(self, adapters)

    def asked(self: Any, number: int, batch: Any, *, is_only: bool) -> Any:
        if (now[0], number, self.mesh.rank) == (step, 1, world - 1):
            os.kill(os.getpid(), signal.SIGTERM)
            while not self.stop.is_set():
                time.sleep(0.001)
        return forward(self, number, batch, is_only=is_only)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer.Trainer, "train_step", noticed)
        patch.setattr(trainer.Trainer, "_forward", asked)
        run_and_keep_groups(file, world, resume)


@pytest.fixture(scope="module")
def with_dropout(folder: Path, pools: Callable[[int], Pool]) -> Callable[..., Path]:
    """A run of a GPT-2 with every dropout that is exact; checkpoints are only those that it is stopped with.

    Epochs have three steps, the third of five sequences; dp=2 makes two micro-batches of a step, other topologies four.
    """
    model = folder / "gpt2"
    write_twin(twin_config("gpt2", vocab_size=2048, n_positions=128, **DROPOUT), model, dtype=torch.float64, seed=0)
    copy_tokenizer(model)
    lora = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "lora_dropout": 0.1}

    def run(name: str, topology: str, *, resume: str | None = None, stop: int | None = None, **more: Any) -> Path:
        changes = {"model__path": str(model), **{f"lora__{key}": value for key, value in lora.items()}, **more}
        file = _file(folder, name, topology, train__eval_every=0, train__save_every=0, **changes)
        world = WORLD[topology]
        pools(world).run(_stopped_after, stop, file, world, resume, timeout_s=120)
        return folder / name

    return run


@pytest.fixture(scope="module")
def whole_with_dropout(with_dropout: Callable[..., Path]) -> Path:
    return with_dropout("dropout", "dp=2")


@pytest.fixture(scope="module")
def first_part(folder: Path, with_dropout: Callable[..., Path]) -> Path:
    """The first part of the chain: in the midst of its first epoch, stopped between micro-batches of its last step."""
    topology, step = CHAIN[0]
    return with_dropout("chain", topology, stop=step)


@pytest.mark.long
def test_run_that_is_stopped_twice_goes_on_over_three_topologies(
    folder: Path, first_part: Path, whole_with_dropout: Path, with_dropout: Callable[..., Path]
) -> None:
    """The same masks, sequences and moments: the end is that of the run that nothing stopped, to rounding."""
    output = folder / "chain-of-three"
    shutil.copytree(first_part, output, symlinks=True)
    for topology, step in CHAIN[1:]:
        with_dropout(output.name, topology, resume="auto", stop=step)
        if step is not None:
            assert not (output / "adapter").exists()
    assert [f.name for f in sorted((output / "checkpoints").glob("step-*"))] == ["step-000002", "step-000004"]
    assert [c["topology"] for c in map(manifest_of, sorted((output / "checkpoints").glob("step-*")))] == [
        str(Topology.parse(topology, world=WORLD[topology])) for topology, _ in CHAIN[:2]
    ]
    assert [line["step"] for line in untimed_metrics_of(output) if "loss" in line] == list(range(1, STEPS + 1))
    assert _difference(output, whole_with_dropout) < 1e-9


@pytest.mark.long
def test_dropout_goes_on_with_the_masks_of_its_step(
    folder: Path, first_part: Path, whole_with_dropout: Path, with_dropout: Callable[..., Path]
) -> None:
    """Of the adapter and of the model, on the same topology: to the bit."""
    shutil.copytree(first_part, folder / "dropout-same", symlinks=True)
    output = with_dropout("dropout-same", "dp=2", resume="auto")
    assert (output / "adapter" / WEIGHTS_FILE).read_bytes() == (
        whole_with_dropout / "adapter" / WEIGHTS_FILE
    ).read_bytes()
    off = with_dropout("dropout-off", "dp=2", model__disable_dropout=True)
    assert _difference(off, whole_with_dropout) > 1e-3


@pytest.mark.long
def test_run_that_goes_on_from_an_earlier_step_sets_the_rest_aside(
    folder: Path, whole: Callable[[str], Path], pools: Callable[[int], Pool]
) -> None:
    """Else `auto` would go on with the other future, or say that all is done; and nothing that was saved is lost."""
    output = folder / "from-earlier"
    shutil.copytree(whole(""), output, symlinks=True)
    checkpoints, old = output / "checkpoints", (output / "adapter" / WEIGHTS_FILE).read_bytes()
    point(checkpoints / "best", "step-000004")
    early = str(checkpoints / f"step-{STOPPED:06d}")
    file = _file(folder, output.name, "")
    pools(1).run(_stopped_after, STOPPED + 1, file, 1, early, timeout_s=120)
    aside = checkpoints / "set-aside-1"
    assert sorted(f.name for f in aside.iterdir()) == ["adapter", "metrics.jsonl", "step-000004"]
    assert (aside / "adapter" / WEIGHTS_FILE).read_bytes() == old
    assert len((aside / "metrics.jsonl").read_text().splitlines()) > len(
        (output / "metrics.jsonl").read_text().splitlines()
    )
    assert sorted(f.name for f in checkpoints.glob("[!.]*")) == ["latest", aside.name, "step-000002", "step-000003"]
    run = _resumed(folder, output, topology="")
    assert run.resume is not None
    assert (run.resume.step, run.is_finished) == (STOPPED + 1, False)
    pools(1).run(run_and_keep_groups, file, 1, "auto", timeout_s=120)
    assert (output / "adapter" / WEIGHTS_FILE).read_bytes() == old
    assert not (checkpoints / "set-aside-2").exists()


def _with_nan(most: int, *given: Any) -> None:
    """`_stopped_after` with a NaN in the place of every loss that is trained. most: steps in a row left out."""
    losses = trainer.Trainer._losses

    def broken(self: Any, *given: Any) -> Any:
        ((loss, sums),) = losses(self, *given)
        return [(loss * (float("nan") if torch.is_grad_enabled() else 1.0), sums)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trained, "_MOST_SKIPPED", most)
        patch.setattr(trainer.Trainer, "_losses", broken)
        _stopped_after(*given)


@pytest.mark.long
def test_steps_that_were_left_out_in_a_row_are_counted_over_a_resume(
    folder: Path, whole: Callable[[str], Path], stopped: Callable[[str], Path], pools: Callable[[int], Pool]
) -> None:
    output = stopped("")
    file = _file(folder, output.name, "", train__on_nonfinite="skip", train__save_every=1)
    pools(1).run(_with_nan, 10, 4, file, 1, "auto", timeout_s=120)
    last = output / "checkpoints" / "step-000004"
    assert read_whole(last).skipped_in_row == 2
    assert read_whole(output / "checkpoints" / "step-000002").skipped_in_row == 0
    with pytest.raises(RankError, match="3 steps in a row were left out"):
        pools(1).run(_with_nan, 3, None, file, 1, "auto", timeout_s=120)


def _resumed(
    folder: Path,
    output: Path,
    resume: str = "auto",
    despite: tuple[str, ...] = (),
    topology: str = "tp=2,sp",
    **changes: Any,
) -> Prepared:
    return prepare_run(read_run(_file(folder, output.name, topology, **changes)), resume=resume, despite=despite)


@pytest.mark.long
@pytest.mark.parametrize(
    "damage",
    ["a byte", "cut short", "file missing", "manifest missing", "manifest cut", "other", "other format", "wrong type"],
)
def test_damaged_checkpoint_is_passed_over_with_a_word(
    damage: str, folder: Path, whole: Callable[[str], Path], stopped: Callable[[str], Path]
) -> None:
    output = stopped("tp=2,sp")
    new = output / "checkpoints" / "step-000004"
    shutil.copytree(whole("tp=2,sp") / "checkpoints" / new.name, new)
    file = new / (FILE if "manifest" in damage else STATE_FILE)
    content = bytearray(file.read_bytes())
    if damage == "a byte":
        content[-3] ^= 1
    if damage == "other":
        file, content = new / FILE, bytearray(b"[2, {}]")
    if damage in ("other format", "wrong type"):
        file = new / FILE
        changes = {"format": 3} if damage == "other format" else {"updates": "four"}
        content = bytearray(json.dumps(json.loads(file.read_text()) | changes).encode())
    file.write_bytes(content[: len(content) // 2] if "cut" in damage else content)
    if "missing" in damage:
        file.unlink()
    run = _resumed(folder, output)
    assert run.resume is not None
    assert run.resume.step == STOPPED
    (note,) = (note for note in run.notes if note.startswith("passed over: "))
    assert str(new) in note
    with pytest.raises(UserError) as caught:
        _resumed(folder, output, str(new))
    assert str(new) in str(caught.value)


@pytest.mark.long
@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"train__lr": 1e-3}, "train.lr"),
        ({"train__batch_size": 8}, "train.batch_size"),
        ({"train__seed": 3}, "train.seed"),
        ({"train__steps": STEPS + 1}, "steps"),
        ({"data__train_on": "everything"}, "data"),
        ({"lora__r": 8}, "lora"),
        ({"model__dtype": "float32"}, "model.dtype"),
    ],
)
def test_checkpoint_of_another_run_is_refused_by_name(
    changes: dict[str, Any], name: str, folder: Path, stopped: Callable[[str], Path]
) -> None:
    output = stopped("tp=2,sp")
    with pytest.raises(UserError, match=f"with other {name}.*--resume-despite {name}"):
        _resumed(folder, output, **changes)
    run = _resumed(folder, output, despite=(name,), **changes)
    assert run.resume is not None


def test_what_changes_no_step_may_differ(folder: Path, stopped: Callable[[str], Path]) -> None:
    run = _resumed(folder, stopped("tp=2,sp"), train__save_every=1, train__log_every=3, train__micro_batch_size=1)
    assert run.resume is not None


def test_without_a_checkpoint_the_run_begins_and_says_so(folder: Path) -> None:
    run = _resumed(folder, folder / "nothing-there")
    assert run.resume is None
    assert "begins at its first step" in run.notes[-1]


def test_run_that_has_all_its_steps_is_finished(folder: Path, whole: Callable[[str], Path]) -> None:
    whole("tp=2,sp")
    assert _resumed(folder, whole("tp=2,sp")).is_finished

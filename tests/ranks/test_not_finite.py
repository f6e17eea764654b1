"""A step with a NaN is explained, or left out without a trace in the adapter; which checkpoints a run keeps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from meshlora.adapter.formats.peft_format import WEIGHTS_FILE
from meshlora.run import trained, trainer
from meshlora.run.checkpoint.retention import point
from meshlora.run.checkpoint.state import STATE_FILE
from meshlora.run.config.file import read_run
from meshlora.run.together import prepare_run
from meshlora_ground.errors import MeshloraError
from tests.pool import Pool, RankError
from tests.ranks.test_trainer import folder, run_and_keep_groups, run_file
from tests.run_files import metrics_of

__all__ = ["folder"]  # a fixture

# In the batch of step 2 of the data of `folder`: 7 sequences in micro-batches of 2.
STEP = 2


def _sequence(file: Path) -> int:
    """A sequence of step 2 that step 1 does not have."""
    return int(prepare_run(read_run(file, ["train.overwrite=true"])).batches.batch(STEP - 1)[3])


def _run_with_nan(file: Path, world: int, sequences: list[int], module: str, where: str) -> None:
    """Every rank of the pool trains; `module` makes NaN of these sequences, in its output or in the gradient of it."""
    data = prepare_run(read_run(file, ["train.overwrite=true"]), world=world).train_data
    each = data.rows_per_example
    wanted = [torch.from_numpy(data[n * each + row].input_ids.copy()) for n in sequences for row in range(each)]
    init, losses = trainer.Trainer.__post_init__, trainer.Trainer._losses
    here = [False]

    def broken(_: Any, __: Any, output: torch.Tensor) -> torch.Tensor:
        if not here[0]:
            return output
        if where == "gradient":
            if output.requires_grad:
                output.register_hook(lambda grad: grad * float("inf"))
            return output
        return output * float("nan")

    def watched(self: Any, *args: Any) -> None:
        init(self, *args)
        self.model.get_submodule(module).register_forward_hook(broken)

    def noticed(self: Any, micro: Any, *given: Any) -> Any:
        batch = micro.batch
        lengths = batch.lengths or batch.attention_mask.sum(1, keepdim=True).tolist()
        rows = [
            part
            for row, each in zip(batch.input_ids, lengths, strict=True)
            for part in row[: sum(each)].split(list(each))
        ]
        here[0] = any(len(row) == len(w) and bool((row == w).all()) for row in rows for w in wanted)
        return losses(self, micro, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer.Trainer, "__post_init__", watched)
        patch.setattr(trainer.Trainer, "_losses", noticed)
        run_and_keep_groups(file, world)


@pytest.mark.parametrize("topology", [pytest.param("tp=2,sp", marks=pytest.mark.proof), "dp=2"])
def test_message_names_step_sequences_and_the_first_module(
    topology: str, folder: Path, pools: Callable[[int], Pool]
) -> None:
    file = run_file(folder, f"nan-{topology}", topology)
    sequence = _sequence(file)
    with pytest.raises(RankError) as caught:
        pools(2).run(_run_with_nan, file, 2, [sequence], "model.layers.1.mlp.down_proj", "output")
    cause = caught.value.cause
    assert isinstance(cause, MeshloraError)
    text = str(cause)
    order = list(prepare_run(read_run(file, ["train.overwrite=true"])).batches.batch(STEP - 1))
    dp = 2 if topology == "dp=2" else 1
    mine = order[order.index(sequence) % dp :: dp]
    place = mine.index(sequence) // 2 * 2
    both = ", ".join(map(str, sorted(mine[place : place + 2])))
    assert text.startswith(f"step {STEP}: the loss is nan: in sequence"), text
    assert f" {both} of the training data (from 0), first the output of model.layers.1.mlp.down_proj;" in text


@pytest.mark.long
def test_skipped_step_changes_neither_parameters_nor_moments(folder: Path, pools: Callable[[int], Pool]) -> None:
    short = {"data__eval": None, "train__eval_every": 0, "train__steps": STEP + 1, "train__save_every": 1}
    file = run_file(folder, "skips", "tp=2,sp", train__on_nonfinite="skip", **short)
    pools(2).run(_run_with_nan, file, 2, [_sequence(file)], "model.layers.1.mlp.down_proj", "gradient")
    one, two = (folder / "skips" / "checkpoints" / f"step-{step:06d}" for step in (STEP - 1, STEP))
    for name in (WEIGHTS_FILE, STATE_FILE):
        assert (one / name).read_bytes() == (two / name).read_bytes()
    lines = metrics_of(folder / "skips")
    assert [line["step"] for line in lines if line.get("skipped")] == [STEP]
    assert all(torch.isfinite(tensor).all() for tensor in load_file(folder / "skips/adapter" / WEIGHTS_FILE).values())


def test_ten_skipped_steps_in_a_row_end_the_run(folder: Path) -> None:
    short = {"data__eval": None, "train__eval_every": 0, "train__save_every": 0, "train__batch_size": 1}
    file = run_file(folder, "skips-all", "", train__on_nonfinite="skip", train__steps=12, **short)
    with pytest.raises(MeshloraError, match=r"step 10: .*10 steps in a row were left out"):
        _run_with_nan(file, 1, list(range(19)), "model.layers.1.mlp.down_proj", "output")


def test_last_and_best_checkpoints_stay(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    losses = iter([3.0, 1.0, 2.0, 4.0, 1.5, 1.2])
    monkeypatch.setattr(trained.TrainedAdapter, "evaluate", lambda self, data: (next(losses), 1))
    changes = {"keep_last": 2, "keep_best": True, "save_every": 1, "eval_every": 1, "steps": 6}
    run_and_keep_groups(run_file(folder, "keeps", "", **{f"train__{key}": value for key, value in changes.items()}), 1)
    found = folder / "keeps" / "checkpoints"
    assert sorted(path.name for path in found.iterdir()) == [
        *("best", "latest", "step-000002", "step-000004", "step-000005")
    ]
    assert {name: (found / name).resolve().name for name in ("best", "latest")} == {
        "best": "step-000002",
        "latest": "step-000005",
    }


def test_older_checkpoint_goes_only_once_the_newer_one_is_whole(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save that fails takes nothing with it."""
    file = run_file(folder, "keeps-one", "", train__keep_last=1, train__save_every=1)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    save = trained.TrainedAdapter._save_checkpoint

    def save_until_full(self: Any, done: int, **options: Any) -> None:
        if done == 3:
            monkeypatch.setattr("meshlora.run.checkpoint.state.save_file", full)
        save(self, done, **options)

    monkeypatch.setattr(trained.TrainedAdapter, "_save_checkpoint", save_until_full)
    with pytest.raises(MeshloraError, match=r"step-000003: .*No space left on device"):
        run_and_keep_groups(file, 1)
    found = folder / "keeps-one" / "checkpoints"
    assert sorted(path.name for path in found.iterdir()) == ["latest", "step-000002"]
    run = prepare_run(read_run(file), resume=str(found / "latest"))
    assert run.resume is not None
    assert (run.resume.step, run.resume.folder) == (2, (found / "step-000002").resolve())


def test_name_is_there_at_every_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed before its last act, `point` has changed nothing."""
    point(tmp_path / "latest", "one")

    def killed(*_: Any) -> None:
        assert (tmp_path / "latest").readlink() == Path("one")
        raise KeyboardInterrupt

    monkeypatch.setattr("meshlora.run.checkpoint.retention.os.replace", killed)
    with pytest.raises(KeyboardInterrupt):
        point(tmp_path / "latest", "two")
    assert (tmp_path / "latest").readlink() == Path("one")

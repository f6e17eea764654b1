"""`meshlora train` on a stream of rollouts: step by step, as they come, and the adapter of one process."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from meshlora.cli.main import main
from meshlora.comm.groups import open_mesh
from meshlora.reading.stream import RolloutStream
from meshlora.run.checkpoint.manifest import read_whole
from meshlora.run.config.file import read_run
from meshlora.run.followed import Followed, no_tokens
from meshlora.run.together import prepare_run
from meshlora_ground.errors import UserError
from meshlora_ground.topology import Topology
from meshlora_judge.compare import compare_adapters, largest_loss_gap, read_losses
from tests.one_process import train_alone
from tests.pool import Pool
from tests.ranks.test_train_objectives import SHORT, objective_file
from tests.ranks.test_trainer import run_and_keep_groups
from tests.run_files import metrics_of

RECORD = {"input_ids": [5, 6, 7], "is_trained": [0, 1, 1], "advantage": 1.0}


def _steps_of(file: Path) -> list[list[dict[str, Any]]]:
    """The records of each step of an ordinary run of `file`, in its order."""
    run = prepare_run(read_run(file))
    assert isinstance(run.config.data.train, str)
    records = [json.loads(line) for line in Path(run.config.data.train).read_text().splitlines()]
    return [[records[index] for index in run.batches.batch(step)] for step in range(run.steps)]


@pytest.mark.long
@pytest.mark.parametrize("topology", ["dp=2", pytest.param("tp=2,sp", marks=pytest.mark.proof)])
def test_steps_are_the_files_as_they_come(topology: str, tmp_path: Path, pools: Callable[[int], Pool]) -> None:
    """Two are there, the last is written while the run waits for it, and the mark ends a run that allows for more."""
    ordinary = objective_file(tmp_path, "ordinary", topology, "policy", **SHORT)
    stream = RolloutStream(tmp_path / "stream")
    *first, last = _steps_of(ordinary)
    for number, records in enumerate(first):
        stream.write(1 + number, records)

    def later() -> None:
        deadline = time.monotonic() + 60
        while not (tmp_path / "followed" / "metrics.jsonl").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        stream.write(3, last)
        stream.end(3)

    follows = {
        "data__train": str(stream.folder),
        "data__follow_s": 60.0,
        "train__steps": 5,
        "train__eval_every": 2,
        "train__schedule": "constant",
    }
    file = objective_file(tmp_path, "followed", topology, "policy", **SHORT | follows)
    alone = objective_file(tmp_path, "ordinary", topology, "policy", **SHORT | {"train__schedule": "constant"})
    writer = threading.Thread(target=later)
    writer.start()
    pools(2).run(run_and_keep_groups, file, 2)
    writer.join()
    output = tmp_path / "followed"
    losses = train_alone(alone, initial=output / "initial", out=tmp_path / "reference")
    assert compare_adapters(output / "adapter", tmp_path / "reference").relative < 1e-6
    assert largest_loss_gap(read_losses(output / "metrics.jsonl"), losses) < 1e-11
    assert read_whole(output / "adapter", kinds=("adapter",)).step == 3
    assert [line["step"] for line in metrics_of(output) if "eval_loss" in line] == [2, 3]
    assert prepare_run(read_run(file), resume="auto").is_finished


def test_a_file_is_waited_for_until_the_limit_or_a_request_to_stop(tmp_path: Path) -> None:
    mesh: Any = SimpleNamespace(device=torch.device("cpu"), world=SimpleNamespace(size=1))
    followed = Followed(RolloutStream(tmp_path), mesh, lambda _: no_tokens(), 0.1, 4)
    with pytest.raises(UserError, match=r"step_000001\.jsonl: it has not come within data\.follow_s=0\.1"):
        followed.fetch(1, threading.Event())
    asked = threading.Event()
    threading.Timer(0.1, asked.set).start()
    assert Followed(RolloutStream(tmp_path), mesh, lambda _: no_tokens(), 60, 4).fetch(1, asked) == "asked"
    RolloutStream(tmp_path).write(1, [RECORD])
    assert followed.fetch(1, threading.Event()) == "there"
    RolloutStream(tmp_path).end(1)
    assert followed.fetch(2, threading.Event()) == "ended"


def _waits_otherwise(folder: Path) -> str:
    """What a rank says whose clock has run longer than that of the other."""
    mesh = open_mesh(Topology(dp=2))
    followed = Followed(RolloutStream(folder), mesh, lambda _: no_tokens(), 600.0 * mesh.rank, 4)
    try:
        return followed.fetch(1, threading.Event())
    except UserError as error:
        return str(error)


def test_all_ranks_end_by_the_first_clock(tmp_path: Path, pools: Callable[[int], Pool]) -> None:
    assert all("it has not come within" in said for said in pools(2).run(_waits_otherwise, tmp_path))


def test_a_stream_is_whole(tmp_path: Path) -> None:
    stream = RolloutStream(tmp_path / "new")
    with pytest.raises(UserError, match=r"the rollouts of step 1: a record is not JSON"):
        stream.write(1, [{**RECORD, "reward": float("nan")}])
    with pytest.raises(UserError, match="a step has at least one record"):
        stream.write(1, [])
    assert stream.state(1) == "missing"
    stream.end(2)
    with pytest.raises(UserError, match=re.escape("step_000001.jsonl: the file is missing, and end.json beside it")):
        stream.state(1)
    assert stream.state(3) == "ended"
    (tmp_path / "new" / "end.json").write_text("[]")
    with pytest.raises(UserError, match="it does not say how many steps the stream has"):
        stream.state(3)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"train.objective": "sft"}, "a stream holds rollouts, which this objective does not read"),
        ({"train.epochs": "1", "train.steps": "null"}, "a stream has no epochs; give train.steps"),
        ({"data.train": "[a, b]"}, "a stream is one folder"),
        ({"train.routing_record": "routes"}, "such a record is of data that are known beforehand"),
    ],
)
def test_what_needs_all_data_beforehand_is_refused(
    changes: dict[str, str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = objective_file(tmp_path, "run", "", "policy", data__train="stream", data__follow_s=1.0)
    overrides = [word for key, value in changes.items() for word in ("--set", f"{key}={value}")]
    assert main(["check", str(file), "--set", "train.objective=policy", *overrides]) == 2
    assert words in capsys.readouterr().err


def test_a_step_has_at_most_a_batch(tmp_path: Path) -> None:
    mesh: Any = SimpleNamespace(device=torch.device("cpu"), world=SimpleNamespace(size=1))
    RolloutStream(tmp_path).write(1, [RECORD])
    two = prepare_run(read_run(objective_file(tmp_path, "two", "", "policy"))).train_data.first(2)
    with pytest.raises(UserError, match=r"step_000001\.jsonl with 2 records: a step has at most train\.batch_size=1"):
        Followed(RolloutStream(tmp_path), mesh, lambda _: two, 1, 1).fetch(1, threading.Event())


def test_rollouts_of_the_run_itself_that_cannot_be_read_are_made_again(tmp_path: Path) -> None:
    """Else each run that goes on would end by them. Those of others, and those just made, are an error."""
    mesh: Any = SimpleNamespace(device=torch.device("cpu"), world=SimpleNamespace(size=1), rank=0)
    stream, said, made = RolloutStream(tmp_path), list[str](), list[int]()

    def read(file: str) -> Any:
        if json.loads(Path(file).read_text())["input_ids"][0] == 10**30:
            raise UserError(file, "it has a token outside the vocabulary")
        return no_tokens()

    def make(step: int, token: int = 5) -> None:
        made.append(step)
        stream.write(step, [{**RECORD, "input_ids": [token, 6, 7]}])

    stream.write(1, [{**RECORD, "input_ids": [10**30, 6, 7]}])
    with pytest.raises(UserError, match="outside the vocabulary"):
        Followed(stream, mesh, read, 1, 1).fetch(1, threading.Event())
    followed = Followed(stream, mesh, read, 1, 1, make=make, say=said.append)
    assert [followed.fetch(1, threading.Event()), followed.fetch(1, threading.Event()), made] == ["there", "there", [1]]
    assert len(said) == 1
    assert said[0].startswith(f"{stream.file(1)}: it has a token outside the vocabulary: these rollouts cannot be read")
    followed.make = lambda step: make(step, 10**30)
    with pytest.raises(UserError, match="outside the vocabulary"):
        followed.fetch(2, threading.Event())
    assert made == [1, 2]

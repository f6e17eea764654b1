"""Samples of a run: the same on every topology, and no influence on what is trained."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import meshlora
from meshlora.run.config.file import read_run
from meshlora.run.decoding import generate
from meshlora.run.together import prepare_run
from meshlora.run.watch.samples import forget_after
from tests.pool import Pool
from tests.ranks.test_trainer import run_and_keep_groups
from tests.run_files import EXAMPLES, TINY, write_run_file

PROMPT = 'def list_paths(target):\n    """'


def run_file(folder: Path, name: str, topology: str = "", *, sample_every: int = 2, **data: Any) -> Path:
    return write_run_file(
        folder / f"{name}.yaml",
        model={"dtype": "float64"},
        data={"train": str(EXAMPLES / "docstrings" / "train.jsonl"), **data},
        train={"lr": 1e-2, "sample_every": sample_every},
        generate={"max_new_tokens": 8},
        topology=topology,
    )


def samples(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


@pytest.mark.long
@pytest.mark.parametrize("topology", ["tp=2,sp", "pp=2", pytest.param("dp=2", marks=pytest.mark.proof)])
def test_samples_are_what_the_adapter_says_on_one_process(
    topology: str, tmp_path: Path, pools: Callable[[int], Pool]
) -> None:
    """Of step 2 and of the end; the last is compared with the saved adapter."""
    file = run_file(tmp_path, "run", topology, sample_prompts=[PROMPT, "x"])
    pools(2).run(run_and_keep_groups, file, 2)
    found = samples(tmp_path / "run")
    assert [(line["step"], line["prompt"]) for line in found] == [(2, PROMPT), (2, "x"), (3, PROMPT), (3, "x")]
    options = prepare_run(read_run(file, ["train.overwrite=true"]), world=2).samples
    assert options is not None
    words: dict[str, Any] = {"options": options.options, "dtype": "float64"}
    base, trained = (
        list(generate(TINY, [PROMPT, "x"], adapter=adapter, **words))
        for adapter in (None, tmp_path / "run" / "adapter")
    )
    assert base != trained, "the adapter says nothing of its own: this test shows nothing"
    assert [line["text"] for line in found[2:]] == trained


def test_samples_leave_random_numbers_and_mode_as_they_were(tmp_path: Path) -> None:
    """Else dropout after them would not be that of a run without samples."""
    run = prepare_run(read_run(run_file(tmp_path, "run", sample_prompts=[PROMPT])))
    assert run.samples is not None
    model = meshlora.load(TINY, dtype="float64").train()
    before = torch.get_rng_state()
    run.samples.write(model, tmp_path / "samples.jsonl", step=1, say=print)
    assert torch.equal(torch.get_rng_state(), before)
    assert model.training


def test_a_run_that_goes_on_forgets_samples_of_later_steps(tmp_path: Path) -> None:
    file = tmp_path / "samples.jsonl"
    lines = [json.dumps({"step": step, "prompt": "a", "text": "b"}) + "\n" for step in (2, 4, 6)]
    file.write_text("".join(lines) + '{"step": 6, "pro')
    forget_after(file, 4)
    assert file.read_text() == "".join(lines[:2])


def test_prompts_are_those_of_the_held_out_data_where_none_are_given(tmp_path: Path) -> None:
    """Each once, the first ones."""
    lines = [{"prompt": name, "completion": "x"} for name in "aabcdef"]
    (tmp_path / "eval.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = prepare_run(read_run(run_file(tmp_path, "run", eval=str(tmp_path / "eval.jsonl"))))
    assert run.samples is not None
    assert run.samples.prompts == ("a", "b", "c", "d")

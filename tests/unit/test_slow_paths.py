"""What costs speed or memory is said with cause and way out, in a run, in its metrics and by `check`; or refused."""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from meshlora.adapter.attach import runtime
from meshlora.cli.main import main
from meshlora.comm import collectives
from meshlora.processes.arrivals import Arrivals
from meshlora.run import slow_paths as facts
from meshlora.run.prepared import Prepared
from meshlora.run.run import train
from meshlora.train import losses
from meshlora.wings.experts import products
from meshlora.wings.experts.products import grouped_product
from meshlora.wings.experts.row_counts import RowCounts
from meshlora.wings.packed_rows import by_sequence, varlen
from meshlora_ground import slow_paths as module
from meshlora_ground.compat import transformers_attention
from meshlora_ground.console import Console
from meshlora_ground.errors import UserError
from meshlora_ground.slow_paths import (
    EXPERTS_ONE_BY_ONE,
    ONE_BY_ONE,
    OVER_CPU,
    PADDING_MASK,
    WHOLE_MASK,
    SlowPath,
    take,
    watching,
)
from meshlora_judge.twin import twin_config
from tests.run_files import metrics_of
from tests.unit.mistakes import Setup
from tests.unit.test_by_sequence import _batch

GPU = torch.device("cuda")


@pytest.fixture
def unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither torch's kernel for packed rows nor transformers' rule of them is known."""
    monkeypatch.setattr(transformers_attention, "rule_of_one_sequence", lambda function: None)
    monkeypatch.setattr(varlen, "has_kernel", lambda query: False)


def _lines(run: Any) -> tuple[list[str], list[dict[str, Any]]]:
    """(slow paths that a run says, the lines of its steps)."""
    said = io.StringIO()
    train({"": run}, console=Console(file=said, width=1000))
    found = [line.removeprefix("slow path: ") for line in said.getvalue().splitlines() if line.startswith("slow path")]
    return found, [line for line in metrics_of(Path(run.config.train.output)) if "loss" in line]


def test_a_mask_of_whole_rows_is_said_with_its_cost_before_the_first_step(
    setup: Setup, unknown: None, capsys: pytest.CaptureFixture[str]
) -> None:
    run = setup.prepared(data__packing=True, topology="", train__steps=2)
    said, metrics = _lines(run)
    lengths = [len(sequence.input_ids) for sequence in run.train_data]
    times = 64 / (sum(n * n for n in lengths) // sum(lengths))
    assert said == [
        "attention of joined sequences with a mask of the whole row, 64 x 64, "
        f"{times:.1f} times the scores of the sequences by themselves: "
        f"transformers {transformers.__version__} makes masks of packed rows in a way that is not known here; "
        "pip install transformers==5.23, or data.packing: false"
    ], "once, though a step takes it too"
    assert [line.get("slow_paths") for line in metrics] == [said, None]

    file = setup.folder / "checked.json"
    options = ["--set", f"train.output={setup.folder / 'other'}", "--json", str(file)]
    assert main(["check", str(setup.folder / "run.yaml"), *options]) == 0
    assert f"slow path: {said[0]}" in " ".join(capsys.readouterr().out.split())
    (of_run,) = json.loads(file.read_text())["runs"].values()
    assert of_run["slow_paths"] == said


def test_rows_padded_for_an_unknown_transformers_are_said(setup: Setup, unknown: None) -> None:
    (path,) = setup.prepared().slow_paths
    assert path.what == "rows padded to the longest of a micro-batch"
    assert path.way_out == "pip install transformers==5.23"


@pytest.mark.parametrize("command", [["check"], ["train", "--nproc", "2"]], ids=["check", "train"])
def test_a_slow_path_that_is_known_before_ends_a_run_that_requires_fast(
    command: list[str], setup: Setup, unknown: None, nothing_has_happened_yet: None, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"data.packing": True, "train.require_fast": True}.items():
        setup.set(name, value)
    setup.write()
    assert main([*command, str(setup.folder / "run.yaml")]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert "train.require_fast: the run takes a slow path: attention of joined sequences with a mask of" in error
    assert "pip install transformers==5.23, or data.packing: false; or leave it out" in error
    assert not (setup.folder / "output").exists()


def test_rows_of_one_sequence_each_have_no_mask_to_be_said(setup: Setup, unknown: None) -> None:
    setup.drop("data.eval")
    setup.config(max_position_embeddings=2048)
    setup.data(*[{"text": f"def f_{number}(): return {number}" * 20} for number in range(8)])
    assert _lines(setup.prepared(data__packing=True, topology="", train__require_fast=True))[0] == []


def test_on_a_cpu_a_run_has_no_slow_path(setup: Setup) -> None:
    said, metrics = _lines(setup.prepared(topology="", train__require_fast=True, train__steps=1))
    assert said == []
    assert "slow_paths" not in metrics[0]


def test_what_a_step_is_the_first_to_take_is_said_after_it(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU without the kernel for joined rows."""
    monkeypatch.setattr(by_sequence, "take", lambda path, device: take(path, GPU))
    said, metrics = _lines(setup.prepared(topology="", train__steps=2))
    assert said == [str(ONE_BY_ONE)]
    assert [line.get("slow_paths") for line in metrics] == [said, None]
    with pytest.raises(UserError, match=r"train\.require_fast: .* one after the other .*; or leave it out"):
        _lines(setup.prepared(topology="", train__require_fast=True, train__overwrite=True))
    assert metrics_of(setup.folder / "output") == []
    assert (setup.folder / "output" / "initial").is_dir()


def _slow(run: Prepared, device: str = "cpu", **options: Any) -> Iterator[SlowPath]:
    options = {"kernels": "auto", "row_length": None} | options
    return facts.slow_paths(run.blueprint, run.train_data, device=device, preflight="auto", **options)


def test_those_of_a_gpu_are_known_before(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(facts, "liger_version", lambda: "")
    run = setup.prepared()
    assert [path.what for path in run.slow_paths] == ["ranks on CPUs"]

    def found(version: str = "", **options: Any) -> list[tuple[str, str]]:
        monkeypatch.setattr(facts, "liger_version", lambda: version)
        given = _slow(run, device="auto", is_apart=True, **options)
        return [(path.cause, path.way_out) for path in given]

    assert found() == [("liger-kernel is not installed", "pip install 'meshlora[kernels]'")]
    assert found("0.8.5", kernels="none") == [("model.kernels: none", "leave it out")]
    assert found("0.8.5") == [("preflight: auto does not prove kernels", "preflight: auto")]
    options = dataclasses.replace(run.blueprint.options, kernels="liger")
    run = dataclasses.replace(run, blueprint=dataclasses.replace(run.blueprint, options=options))
    assert found("0.8.5") == []


def test_float8_that_is_emulated_is_said(setup: Setup) -> None:
    said = [str(path) for path in setup.prepared(model__compute="fp8_backward", topology="").slow_paths]
    assert said == [
        "products in float8 emulated in float32: CPUs do not multiply e4m3; leave out model.compute, or train on a GPU"
    ]


def test_eager_attention_is_one_where_there_is_sdpa(setup: Setup) -> None:
    (path,) = setup.prepared(model__attn_implementation="eager").slow_paths
    assert (path.cause, path.way_out) == ("model.attn_implementation: eager", "leave it out, for sdpa")


def test_norms_of_another_transformers_are_said(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "is_known", lambda kind: False)
    (path,) = setup.prepared().slow_paths
    assert path.what.startswith("norms in separate operations")


def test_a_family_whose_rows_need_the_whole_mask_is_named(setup: Setup) -> None:
    run = setup.prepared(data__packing=True)
    given = _slow(run, row_length=run.config.data.max_length, is_apart=False)
    assert [(path.cause, path.way_out) for path in given] == [
        ("attention of llama depends on more than the positions of tokens", "data.packing: false")
    ]


def _joined(model: Any) -> None:
    by_sequence.keep_apart(model)
    losses.batch_log_probabilities(model, _batch([8, 5]))


def _padded(model: Any) -> None:
    runtime(model).is_causal = False  # as of a family that is not proved
    losses.batch_log_probabilities(model, _batch([8], [5], is_packed=False))


@pytest.mark.parametrize(
    ("code", "run", "path"),
    [(by_sequence, _joined, ONE_BY_ONE), (losses, _padded, PADDING_MASK)],
    ids=["joined", "padded"],
)
def test_code_says_what_it_takes_on_a_gpu_and_nothing_of_it_on_a_cpu(
    code: Any, run: Callable[[Any], None], path: module.SlowPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    import meshlora

    model = meshlora.load(twin_config("llama"), dtype="float64")
    with watching() as taken:
        run(model)
    assert not taken
    monkeypatch.setattr(code, "take", lambda path, device: take(path, GPU))
    with watching() as taken:
        run(model)
    assert taken == {path}


def test_products_of_experts_that_no_kernel_takes_at_once_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "take", lambda path, device: take(path, GPU))
    x, weight = torch.zeros(4, 8, dtype=torch.bfloat16), torch.zeros(2, 8, 8, dtype=torch.bfloat16)
    counts = RowCounts.known([2, 2], "cpu")
    with watching() as taken:
        grouped_product(x, weight, counts)
        assert not taken
        grouped_product(x.double(), weight.double(), counts)
    assert taken == {EXPERTS_ONE_BY_ONE}


def test_a_watcher_hears_what_is_taken_inside_it_alone() -> None:
    take(WHOLE_MASK, GPU)
    mine: set[module.SlowPath] = set()
    with watching() as outer, watching(mine):
        take(ONE_BY_ONE, GPU)
    take(WHOLE_MASK, GPU)
    assert (outer, mine) == (set(), {ONE_BY_ONE})


def test_a_tensor_of_a_gpu_that_leaves_over_a_group_of_cpus_is_said() -> None:
    axis: Any = SimpleNamespace(is_direct=True, group=None, ranks=(0, 1), arrivals=Arrivals())
    tensor = SimpleNamespace(is_cpu=False, device=torch.device("cuda"))
    with watching() as taken:
        collectives._together("all_reduce", pytest.fail, lambda tensor, group: tensor, axis, tensor)
    assert taken == {OVER_CPU}

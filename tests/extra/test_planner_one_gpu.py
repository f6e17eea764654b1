"""`meshlora plan` for one who has a card and a question: cards by name, five rows, what must be given up on one GPU."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig

from meshlora.cli.main import main
from meshlora.loading.blueprint import make_blueprint
from meshlora.plan.base_options import BaseOptions
from meshlora.run.config.file import read_run
from meshlora_extra.planner import one_gpu
from meshlora_extra.planner.hardware import GPUS, card_of, hardware_named
from meshlora_extra.planner.one_gpu import Rung, Way
from meshlora_extra.planner.problem import Problem
from meshlora_ground.errors import UserError
from meshlora_ground.topology import Topology
from meshlora_judge.twin import twin_config
from tests.for_each import for_each
from tests.scripts import ROOT

SHAPE = ROOT / "examples" / "llama-3.1-70b-shape.json"


def test_page_has_the_numbers_and_the_source_of_every_card() -> None:
    page = (ROOT / "docs" / "planner.md").read_text("utf-8")
    for gpu in GPUS.values():
        numbers = (gpu.memory_gb, gpu.half_tflops, gpu.full_tflops, gpu.memory_gb_s, gpu.node_gb_s, gpu.network_gb_s)
        cells = " | ".join(f"{number:,g}" for number in numbers)
        assert f"| `{gpu.name}` | {cells} | {gpu.source.partition('; efficiencies')[0]} |" in page


def test_cards_of_every_size_that_people_have_are_there() -> None:
    assert {24, 32, 48, 80, 96, 141} <= {gpu.memory_gb for gpu in GPUS.values()}
    assert all(gpu.half_tflops > gpu.full_tflops and "(20" in gpu.source for gpu in GPUS.values())


@for_each("given", ["RTX 4090", "rtx-4090", "4090", "RTX4090"])
def test_name_of_a_card_may_be_spelled_as_people_do(given: str) -> None:
    assert hardware_named(given) == GPUS["rtx4090"]


NAMES = {
    "NVIDIA GeForce RTX 4090": "rtx4090",
    "NVIDIA GeForce RTX 4090 Laptop GPU": None,
    "NVIDIA L4": "l4",
    "NVIDIA L40": None,
    "NVIDIA L40S": "l40s",
    "NVIDIA A100-SXM4-80GB": "a100",
    "NVIDIA A100-SXM4-40GB": "a100-40",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA RTX 6000 Ada Generation": "rtx6000-ada",
    "NVIDIA RTX A6000": "a6000",
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": "rtx-pro-6000",
}


@for_each("name", NAMES)
def test_card_that_is_here_is_that_of_the_table_or_none(name: str) -> None:
    found = card_of(name)
    assert (found and found.name) == NAMES[name]


def test_card_that_is_not_in_the_table_has_a_way_out() -> None:
    with pytest.raises(UserError) as raised:
        hardware_named("rtx2080", option="--one-gpu")
    said = str(raised.value)
    assert all(gpu.name in said for gpu in GPUS.values())
    assert all(word in said for word in ("--one-gpu rtx2080", "--hardware FILE", "memory_gb", "meshlora calibrate"))


def _model(folder: Path, **changes: Any) -> str:
    file = folder / "config.json"
    file.write_text(json.dumps({**twin_config("llama").to_dict(), **changes}))
    return str(file)


def test_five_rows_are_shown_and_all_are_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--model", _model(tmp_path, dtype="float32"), "--gpus", "2", "--gpu", "h100", "--seq", "32"]
    assert main(words) == 0
    few = capsys.readouterr().out
    assert main([*words, "--all"]) == 0
    every = capsys.readouterr().out
    rows = [re.findall(r"^ ([\w=,]*\w=[\w=,]*) +\d+ x \d+", said, re.MULTILINE) for said in (few, every)]
    assert len(rows[0]) == 5
    assert rows[0] == rows[1][:5]
    assert f"not shown: {len(rows[1]) - 5} more topologies" in few
    assert "--all" in few
    assert "not shown" not in every
    assert few.count(" x the time: ") == 4


def test_dtype_of_the_arithmetic_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--model", _model(tmp_path, dtype="float32"), "--gpus", "1", "--gpu", "h100", "--seq", "32"]
    assert main(words) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "67 TFLOP/s in float32 (the checkpoint's; in bfloat16 989: --dtype bfloat16)" in said
    assert main([*words, "--dtype", "bfloat16"]) == 0
    assert "989 TFLOP/s in bfloat16 at" in capsys.readouterr().out


def _problem_of(memory_gb: float) -> Any:
    """Of a small model on a card of `memory_gb`: a way -> its problem."""
    gpu = dataclasses.replace(GPUS["rtx4090"], memory_gb=memory_gb)
    lora = LoraConfig(r=4, target_modules="all-linear")
    config = twin_config("llama", max_position_embeddings=2048)

    def problem_of(way: Way) -> Problem:
        base = BaseOptions(dtype=way.dtype, disable_dropout=True, quantization=way.quantization)  # type: ignore[arg-type]
        blueprint = make_blueprint(config, Topology(), base)
        sizes: dict[str, Any] = {"micro_batch": way.micro_batch, "recompute": way.recompute}
        return Problem(blueprint, lora, gpus=1, gpu=gpu, seq=way.seq, global_batch=8, **sizes)

    return problem_of


def _climbed(memory_gb: float) -> list[Rung]:
    return one_gpu.climb(one_gpu.ways("float32", None, 1024, 4), _problem_of(memory_gb))


@pytest.fixture(scope="module")
def ladder() -> list[Rung]:
    """Every rung, of a card on which nothing fits but the last."""
    return _climbed(1e-6)


def test_ladder_goes_from_what_costs_time_to_what_costs_data(ladder: list[Rung]) -> None:
    lost = [rung.way.words for rung in ladder]
    assert lost[:4] == ["as it is", "bfloat16", "one row at a time", "all layers recomputed"]
    assert lost[4:6] == ["the base in 8 bits", "the base in 4 bits"]
    needed = [rung.prediction.memory_bytes for rung in ladder if rung.prediction]
    assert len(needed) == len(ladder)
    assert needed == sorted(needed, reverse=True)
    assert len(set(needed)) == len(needed)


def test_the_first_way_that_fits_is_the_answer(ladder: list[Rung]) -> None:
    for number, rung in enumerate(ladder[:5]):
        assert rung.prediction is not None
        just = (rung.prediction.memory_bytes + 1) / 1e9 / GPUS["rtx4090"].usable_memory
        found = _climbed(just)
        fits = [each.fits for each in found]
        assert fits.index(True) == number
        assert found[number].way == rung.way
        # What follows gives up nothing more: other micro-batches, or less recomputation, and is no slower.
        for faster in found[number + 1 :]:
            assert (faster.way.dtype, faster.way.quantization, faster.way.seq) == (
                *(rung.way.dtype, rung.way.quantization),
                rung.way.seq,
            )
            assert faster.fits
            assert faster.prediction is not None
            assert faster.prediction.time_s <= rung.prediction.time_s


def test_rows_are_not_cut_where_the_weights_alone_have_no_room(ladder: list[Rung]) -> None:
    assert ladder[-1].way.seq == 1024
    prediction = ladder[-1].prediction
    assert prediction is not None
    between = (prediction.states.kept + prediction.memory_bytes) / 2 / 1e9 / GPUS["rtx4090"].usable_memory
    found = _climbed(between)
    assert found[-1].way.seq < 1024
    assert found[-1].fits


def test_what_is_said_can_be_pasted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, numbers = tmp_path / "run.yaml", tmp_path / "ways.json"
    words = ["plan", "--model", _model(tmp_path, dtype="float32"), "--one-gpu", "RTX 4090", "--seq", "64"]
    assert main([*words, "--out", str(out), "--json", str(numbers)]) == 0
    said = capsys.readouterr().out
    (line,) = [line for line in said.splitlines() if line.startswith("so: meshlora train RUN.yaml ")]
    overrides = [word for word in shlex.split(line) if "=" in word]
    run, written = read_run(out, overrides), read_run(out)
    assert run == written
    assert (run.data.max_length, run.train.batch_size) == (64, one_gpu.BATCH)
    assert json.loads(numbers.read_text())[0]["fits"]


def test_where_nothing_fits_it_is_said_how_many_cards_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", str(SHAPE), "--one-gpu", "rtx4090", "--seq", "256"]) == 1
    said = capsys.readouterr()
    assert "the base in 4 bits" in said.out
    found = re.search(r"no way fits on one rtx4090; (\d+) of them have room.*: ([\w=,]+), ([\d.]+) GB each", said.err)
    assert found is not None
    assert Topology.parse(found[2]).world == int(found[1])
    assert float(found[3]) * 1e9 <= GPUS["rtx4090"].usable_bytes


def test_one_gpu_has_no_number_of_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", str(SHAPE), "--one-gpu", "rtx4090", "--gpus", "2"]) == 2
    assert "--gpus with --one-gpu" in capsys.readouterr().err


def test_dtypes_of_the_ladder_are_those_of_a_run_file() -> None:
    assert {way.dtype for way in one_gpu.ways("float32", None, 1024, 4)} == {"float32", "bfloat16"}
    assert all(isinstance(getattr(torch, way.dtype), torch.dtype) for way in one_gpu.ways("float64", None, 1024, 1))

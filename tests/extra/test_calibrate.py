"""What follows from times, by a clock of devices that are known: their numbers come back, and so does the time of work
that was not timed. Nothing here depends on how fast this machine is.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from meshlora.cli.main import main
from meshlora.comm.groups import open_mesh
from meshlora_extra.planner import show
from meshlora_extra.planner.calibrate import Timing, calibrate, fields_of, measure, samples_of
from meshlora_extra.planner.choose import choose
from meshlora_extra.planner.fake import Work
from meshlora_extra.planner.hardware import Hardware, hardware_named
from meshlora_ground.errors import UserError
from meshlora_ground.topology import Topology
from tests.extra.test_planner import problem_of
from tests.for_each import for_each

HOST_S = 20e-6


def tflops(work: Work, *, is_half: bool) -> float:
    """Of a known device: skinny products reach less, attention a third, bfloat16 twice as much."""
    of_shape = min(0.1, 0.02 * math.log2(work.flops / work.num_bytes))
    return of_shape * (2 if is_half else 1) / (3 if work.is_attention else 1)


def gb_s(*, is_half: bool) -> float:
    return 12.0 if is_half else 20.0


def message_s(what: Timing) -> float:
    hop, beta = (4e-5, 1e-9) if what.is_network else (1e-5, 4e-10)
    return 3e-5 + hop * math.log2(what.ranks) + beta * what.wire_bytes


def clock(what: Timing, run: Callable[[], object]) -> float:
    """Runs a sample once, to see that it can, and tells the known device's time."""
    run()
    if what.what == "host":
        return what.number * HOST_S
    if what.what == "message":
        return message_s(what)
    if what.what == "operators":
        return what.work.num_bytes / (1e9 * gb_s(is_half=what.is_half))
    return what.work.flops / (1e12 * tflops(what.work, is_half=what.is_half))


@pytest.fixture(scope="module")
def measured() -> tuple[Hardware, list[Timing]]:
    mesh = open_mesh(Topology())
    fields, timings = calibrate(mesh, [torch.float32, torch.bfloat16], clock=clock)
    return of_fields(fields), timings


def of_fields(fields: dict[str, object]) -> Hardware:
    rates = {name: tuple(map(tuple, value)) if isinstance(value, list) else value for name, value in fields.items()}
    none = dict.fromkeys(("half_tflops", "full_tflops", "node_gb_s", "network_gb_s"), 0.0)
    return Hardware(**none | rates)  # type: ignore[arg-type]


@pytest.mark.long
@for_each("is_half", [False, True], ids=["float32", "bfloat16"])
@for_each(
    "work",
    [
        pytest.param(Work(2 * 512 * 1024 * 1024, 4 * (2 * 512 * 1024 + 1024**2)), id="product"),
        pytest.param(Work(2 * 512 * 1024 * 16, 4 * (512 * 1024 + 1024 * 16 + 512 * 16)), id="skinny_product"),
        pytest.param(Work(7 * 512 * 512 * 384, 12 * 512 * 512 * 4, is_attention=True), id="attention"),
        pytest.param(Work(0, 10**7), id="operator"),
        pytest.param(Work(0, 64), id="operator_without_work"),
    ],
)
def test_work_that_was_not_timed_takes_what_the_device_takes(
    work: Work, is_half: bool, measured: tuple[Hardware, list[Timing]]
) -> None:
    """The host, and products at their own rate, or else bytes at that of the dtype."""
    work = work._replace(num_bytes=work.num_bytes // (2 if is_half else 1))
    product_s = work.flops / (1e12 * tflops(work, is_half=is_half)) if work.flops else 0.0
    bytes_s = 0.0 if work.flops else work.num_bytes / (1e9 * gb_s(is_half=is_half))
    expected = HOST_S + product_s + bytes_s
    assert measured[0].work_s({work: 3}, is_half=is_half) == pytest.approx(3 * expected, rel=0.05)


@pytest.mark.long
def test_products_skinnier_than_any_that_was_timed_are_bound_by_their_bytes(
    measured: tuple[Hardware, list[Timing]],
) -> None:
    gpu = measured[0]
    least = gpu.full_products[0][0]
    one, fourth = (
        gpu.work_s({Work(int(least * part * 10**6), 10**6): 1}, is_half=False) - HOST_S for part in (1, 0.25)
    )
    assert fourth == pytest.approx(one, rel=1e-3)
    # Attention to few keys is not: its rows are short, its rate is what it is.
    rate = gpu.full_attention[0][1]
    few = Work(10**7, 10**6, is_attention=True)
    assert gpu.work_s({few: 1}, is_half=False) - HOST_S == pytest.approx(10**7 / (1e12 * rate))


def test_where_the_host_runs_ahead_its_time_is_the_least_between_kernels(
    measured: tuple[Hardware, list[Timing]],
) -> None:
    fields = fields_of(measured[1], waits=False)
    assert "host_s" not in fields
    gpu = of_fields({"name": "gpu", "memory_gb": 80, **fields})
    assert gpu.work_s({Work(0, 64): 5}, is_half=False) == pytest.approx(5 * HOST_S)
    large = Work(0, 10**9)  # hides it
    assert gpu.work_s({large: 1}, is_half=False) == pytest.approx(10**9 / (1e9 * gb_s(is_half=False)))


@pytest.mark.parametrize("sizes", [(2,), (2, 8)], ids=["one_size", "two_sizes"])
def test_alpha_and_bandwidth_of_each_link_come_back(sizes: tuple[int, ...]) -> None:
    """What a doubling of the ranks adds is known from groups of two sizes only."""
    messages = [
        Timing("message", ranks=ranks, is_network=is_network, wire_bytes=float(wire), axis="tp")
        for ranks in sizes
        for is_network in (False, True)
        for wire in (64, 2**14, 2**18, 2**21, 2**23)
    ]
    operators = Timing("operators", Work(0, 100), seconds=1e-6)
    timed = [dataclasses.replace(one, seconds=message_s(one)) for one in messages]
    gpu = of_fields({"name": "x", "memory_gb": 1, **fields_of([operators, *timed], waits=True)})
    for is_network in (False, True):
        for ranks, wire in ((2, 5e5), (4, 1e7)) if len(sizes) > 1 else ((2, 5e5), (2, 1e7)):
            one = Timing("message", ranks=ranks, is_network=is_network, wire_bytes=wire)
            assert gpu.message_s(wire, ranks=ranks, is_network=is_network) == pytest.approx(message_s(one), rel=1e-3)


def test_samples_take_turns_and_count_with_the_median_of_all_rounds() -> None:
    """So a disturbance is in one turn of each sample, not in all of one."""
    order = list[str]()

    def clock(what: Timing, run: Callable[[], object]) -> float:
        order.append(what.what)
        return 9.0 if len(order) in (3, 4) else float(len(order))

    found = measure([(Timing("a"), lambda: None), (Timing("b"), lambda: None)], clock, rounds=3)
    assert order == ["a", "b"] * 3
    assert [timing.seconds for timing in found] == [5.0, 6.0]


def test_no_sample_reads_again_what_a_cache_may_still_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes as much memory as caches have before it takes the same again; its results are kept as long."""
    seen, results = list[int](), list[int]()

    def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        result = left.new_empty(len(left), right.shape[1])
        seen.append(left.data_ptr())
        results.append(result.data_ptr())
        return result

    monkeypatch.setattr(torch.Tensor, "__matmul__", product)
    run = next(run for what, run in samples_of(open_mesh(Topology()), [torch.float32], gpus_per_node=1))
    for _ in range(100):
        run()
    size, of_result = 256 * 768 * 4, 256 * 2048 * 4
    assert len(set(seen)) * size > 0.9 * 64 * 2**20
    number = 64 * 2**20 // of_result
    assert len(set(results[:number])) == number


def test_what_was_not_measured_is_refused(measured: tuple[Hardware, list[Timing]]) -> None:
    only = of_fields(
        {"name": "x", "memory_gb": 1, **fields_of([t for t in measured[1] if not t.is_half], waits=True)}
        | {"half_tflops": 0.0}
    )
    with pytest.raises(UserError, match="between machines: they were not measured; calibrate with ranks on several"):
        only.message_s(8, ranks=2, is_network=True)
    with pytest.raises(UserError, match="its products were not measured; calibrate with --dtype bfloat16"):
        only.work_s({Work(8, 8): 1}, is_half=True)


def test_file_is_read_back_and_planned_with(tmp_path: Path, measured: tuple[Hardware, list[Timing]]) -> None:
    gpu, file = measured[0], tmp_path / "hardware.json"
    written = {name: value for name, value in dataclasses.asdict(gpu).items() if value not in (0.0, ())}
    file.write_text(json.dumps(written))
    assert hardware_named(None, str(file)) == gpu
    problem = dataclasses.replace(problem_of("llama", 1), gpu=gpu)
    [best] = choose(problem, [Topology()]).ranked
    assert best.time_s > 0
    assert "measured on 1 cpu ranks" in show.assumptions(problem)
    assert "planned for 8" in show.assumptions(dataclasses.replace(problem, gpus=8))


def test_plan_that_needs_a_link_that_was_not_measured_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], measured: tuple[Hardware, list[Timing]]
) -> None:
    file, shape = tmp_path / "hardware.json", Path(__file__).parents[2] / "examples" / "llama-3.1-70b-shape.json"
    written = {name: value for name, value in dataclasses.asdict(measured[0]).items() if value not in (0.0, ())}
    file.write_text(json.dumps(written))
    words = ["--gpus", "2", "--seq", "64", "--topology", "tp=2"]
    assert main(["plan", "--model", str(shape), "--hardware", str(file), *words]) == 2
    assert "messages between machines: they were not measured" in capsys.readouterr().err


@for_each(
    ("change", "words"),
    [
        pytest.param({"full_products": 3}, "pairs [flops per byte, TFLOP/s] above 0", id="rates_are_a_number"),
        pytest.param({"full_products": [[8, 1], [4, 2]]}, "by the former", id="rates_out_of_order"),
        pytest.param({"full_products": [[8, 0]]}, "above 0", id="rate_of_nothing"),
        pytest.param({"half_attention": []}, "pairs", id="no_rates"),
        pytest.param({"half_memory_efficiency": 1.5}, "at most 1", id="more_than_all"),
        pytest.param({"device": "tpu"}, "cpu or cuda", id="unknown_device"),
        pytest.param({"ranks": 1.5}, "a whole number", id="half_a_rank"),
        pytest.param({"host_us": 20}, "did you mean 'host_s'?", id="unknown_key"),
        pytest.param({"memory_gb_s": None}, "it lacks memory_gb_s", id="missing"),
    ],
)
def test_wrong_file_is_one_line(
    change: dict[str, object], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, shape = tmp_path / "hardware.json", Path(__file__).parents[2] / "examples" / "llama-3.1-70b-shape.json"
    values = {"name": "x", "memory_gb": 1, "memory_gb_s": 1, "full_tflops": 1, **change}
    file.write_text(json.dumps({name: value for name, value in values.items() if value is not None}))
    assert main(["plan", "--model", str(shape), "--hardware", str(file), "--gpus", "1", "--seq", "64"]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        pytest.param(["--nproc", "0"], ("--nproc 0", "at least 1"), id="no_ranks"),
        pytest.param(["--nproc", "2", "--topology", "tp=4"], ("tp=4", "2"), id="topology_of_another_size"),
        pytest.param(["--topology", "tq=2"], ("'tq'",), id="unknown_axis"),
        pytest.param(["--out", "nowhere/h.json"], ("nowhere",), id="no_such_folder"),
    ],
)
def test_wrong_request_ends_before_anything_is_measured(
    arguments: list[str], words: tuple[str, ...], capfd: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(["calibrate", *arguments])
    except SystemExit as ended:  # of a rank's edge
        code = int(str(ended.code))
    assert code == 2
    error = capfd.readouterr().err
    assert all(word in error for word in words), error
    assert error.count("\n") == 1

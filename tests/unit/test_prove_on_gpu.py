"""scripts/prove_on_gpu.py without a GPU: limits, order, its file, what it reads of its steps, the pages it writes."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshlora.cli.main import _parser
from meshlora_extra.planner.hardware import card_of
from meshlora_ground.errors import UserError
from meshlora_ground.topology import Topology, field_of
from tests.scripts import ROOT, load_script

script = load_script("prove_on_gpu")
results = script.gpu_results
VERSIONS = {"torch": "2.13.0"}


def _step(code: str, name: str = "a step", **rest: Any) -> Any:
    return script.Step(name, [sys.executable, "-S", "-c", code], **rest)


def _part(*steps: Any, limit_s: float = 60, **rest: Any) -> Any:
    return script.Part("", limit_s, lambda setting: [*steps], **rest)


def _run(tmp_path: Path, parts: dict[str, Any], *, total_s: float = 100.0) -> dict[str, Any]:
    """Part -> its last line."""
    lines: list[Any] = []
    script.Campaign(script.Setting(tmp_path / "logs", is_tiny=False), lines.append, total_s).run(parts)
    return {line.part: line for line in lines}


def _is_running(pid: int) -> bool:
    """A zombie is not: nobody may have waited for it yet."""
    status = Path(f"/proc/{pid}/stat")
    return status.is_file() and status.read_text().rpartition(")")[2].split()[0] != "Z"


def _wait_until(is_so: Callable[[], bool]) -> None:
    until = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.01)


# A process and its child, which say their numbers in a file, and stay.
_STAYS = """
import os, pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(300)"])
file = pathlib.Path({file!r})
file.with_suffix(".part").write_text(f"{{os.getpid()}} {{child.pid}}")
file.with_suffix(".part").rename(file)
print("it began", flush=True)
time.sleep(300)
"""


def test_no_part_ends_another(tmp_path: Path) -> None:
    """One raises, one hangs with a child of its own, one fails, one cannot be read, one cannot even start."""

    def raises(setting: Any) -> list[Any]:
        raise KeyError("no such shape")

    def unreadable(folder: Path) -> tuple[str, dict[str, Any]]:
        raise ValueError("no numbers")

    pids = tmp_path / "pids"
    parts = {
        "raises": script.Part("", 60, raises),
        "hangs": _part(_step(_STAYS.format(file=str(pids))), limit_s=3),
        "fails": _part(_step("print('the reason'); raise SystemExit(3)")),
        "unreadable": _part(_step("", read=unreadable)),
        "absent": _part(script.Step("a step", ["/no/such/program"])),
        "compares": _part(_step("", read=lambda folder: ("", {"n": 1})), compare=lambda lines: 1 / 0),
        "good": _part(_step("print('done')", read=script.read_last)),
        "left out": _part(_step("", not_run="no GPU")),
    }
    lines = _run(tmp_path, parts)
    assert {name: line.status for name, line in lines.items()} == {
        "raises": "failed",
        "hangs": "timed out",
        "fails": "failed",
        "unreadable": "failed",
        "absent": "failed",
        "compares": "failed",
        "good": "ok",
        "left out": "not run",
    }
    assert {name for name, line in lines.items() if not line.is_fault} == {"good", "left out"}
    assert "no such shape" in lines["raises"].found
    assert lines["hangs"].found == "more than 3 s; its last line: it began"
    assert lines["fails"].found == "exit code 3: the reason"
    assert "ValueError: no numbers" in lines["unreadable"].found
    assert "ZeroDivisionError" in lines["compares"].found
    assert lines["good"].found == "done"
    _wait_until(lambda: not any(_is_running(int(pid)) for pid in pids.read_text().split()))


def test_what_ends_a_campaign_ends_its_processes(tmp_path: Path) -> None:
    pids = tmp_path / "pids"

    def keep(line: Any) -> None:
        _wait_until(pids.is_file)
        raise KeyboardInterrupt

    campaign = script.Campaign(script.Setting(tmp_path / "logs", is_tiny=False), keep)
    parts = {"stays": _part(_step(_STAYS.format(file=str(pids)))), "ends": _part(_step(""))}
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        campaign.run(parts)
    assert time.monotonic() - began < 50
    _wait_until(lambda: not any(_is_running(int(pid)) for pid in pids.read_text().split()))


def test_a_timed_step_has_the_machine_for_itself_and_is_the_last(tmp_path: Path) -> None:
    code = "import time; began = time.monotonic(); time.sleep(0.3); print(began, time.monotonic())"

    def part(is_timed: bool) -> Any:
        return _part(*(_step(code, name, read=script.read_last) for name in ("a", "b")), is_timed=is_timed)

    lines: list[Any] = []
    setting = script.Setting(tmp_path / "logs", is_tiny=False)
    script.Campaign(setting, lines.append).run({"timed": part(True), "first": part(False), "timed too": part(True)})
    spans = {(line.part, line.step): tuple(map(float, line.found.split())) for line in lines}
    together = [spans[key] for key in spans if key[0] == "first"]
    alone = [spans["timed", "a"], spans["timed", "b"], spans["timed too", "a"], spans["timed too", "b"]]
    assert max(end for _, end in together) <= alone[0][0]
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(alone))


def test_a_step_that_finds_no_time_is_a_fault_and_says_so(tmp_path: Path) -> None:
    line = _run(tmp_path, {"late": _part(_step(""))}, total_s=script.gpu_campaign.LEAST_S - 1)["late"]
    assert (line.status, line.is_fault, line.found) == ("not run", True, "no time left of 9 s")
    timed = _run(tmp_path, {"late": _part(_step(""), limit_s=60, is_timed=True)}, total_s=29)["late"]
    assert timed.found == "no time left of 29 s", "a benchmark that would be ended before its first number"


def test_steps_share_the_kernels_that_triton_has_compiled(tmp_path: Path) -> None:
    step = _step("import os; print(os.environ['TRITON_CACHE_DIR'])", read=script.read_last)
    assert len({line.found for line in _run(tmp_path, {"a": _part(step), "b": _part(step)}).values()}) == 1


def test_limits_fit_into_eight_minutes() -> None:
    assert script.gpu_campaign.TOTAL_S <= 480
    assert all(part.limit_s < script.gpu_campaign.TOTAL_S / 2 for part in script.PARTS.values())


@pytest.mark.parametrize("is_tiny", [True, False])
def test_every_command_of_a_step_is_one_that_there_is(is_tiny: bool) -> None:
    setting = script.Setting(Path("logs"), is_tiny)
    steps = [step for part in script.PARTS.values() for step in part.steps(setting)]
    for step in steps:
        if list(step.argv[1:3]) == ["-m", "meshlora"]:
            _parser().parse_args([*step.argv[3:]])
        else:
            assert step.argv[1] == "-m" or (ROOT / step.argv[1]).is_file(), step
    assert is_tiny or not any(step.not_run for step in steps)


def test_proofs_cover_every_axis_precision_and_option() -> None:
    proofs = script.PROOFS.values()
    words = {word for proof in proofs for topology in filter(None, proof.topologies) for word in topology.split(",")}
    assert {field_of(word.partition("=")[0]) for word in words} == {axis.name for axis in dataclasses.fields(Topology)}
    for proof in proofs:
        for topology in filter(None, proof.topologies):  # without one it is that of the number of ranks
            assert Topology.parse(topology).world == proof.num_ranks, topology
    options = {word for proof in proofs for word in proof.arguments.split()}
    assert {
        "float32",
        "bfloat16",
        "llama",
        "qwen3_moe",
        "liger",
        "--recompute",
        "keep_attention",
        "offload",
        "fused",
        "--packing",
    } <= options
    assert {"nf4", "fp8", "mxfp4", "int8"} <= options
    assert any("--dtype" not in proof.arguments for proof in proofs), "float64 is the default"


# --- what is read of steps ------------------------------------------------------------------------------------------


def test_tests_that_failed_are_named(tmp_path: Path) -> None:
    (tmp_path / "log").write_text(
        "F.\nFAILED tests/gpu/a.py::b - AssertionError: 1\n== 1 failed, 8 passed in 8.25s ==\n"
    )
    assert script.read_pytest(tmp_path)[0] == "1 failed, 8 passed in 8.25s\ntests/gpu/a.py::b"


def test_a_proof_says_where_it_differs(tmp_path: Path) -> None:
    good = {"topology": "", "passed": True, "error": None, "phases": {"loss": {"worst_relative": 2e-15}}}
    place = {"phase": "collectives", "name": "backward recv", "relative": 3.0, "cause": "once per linear"}
    wrong = {"topology": "pp=2", "passed": False, "error": None, "first_divergence": place, "phases": {}}
    broken = {**wrong, "topology": "cp=2", "error": "out of memory", "first_divergence": None}
    (tmp_path / "found.json").write_text(json.dumps({"runs": [good, wrong, broken]}))
    assert script.read_proof(tmp_path)[0].splitlines() == [
        "one rank: proved, 2e-15",
        "pp=2: collectives: backward recv: once per linear",
        "cp=2: out of memory",
    ]


@pytest.mark.parametrize(
    ("own", "status"),
    [
        ({"1": 3.0, "2": 2.0}, "ok"),
        ({"1": 3.0, "2": 2.00001}, "failed"),
        ({"1": 3.0, "2": float("nan")}, "failed"),
        ({"1": 3.0}, "failed"),
        (None, "not run"),
    ],
)
def test_losses_that_are_not_the_cpus_are_a_fault(own: dict[str, float] | None, status: str) -> None:
    cpu = results.Line("train", script.TRAIN_ON_CPU, "ok", 1.0, "", {"losses": {"1": 3.0, "2": 2.0}})
    trained = results.Line("train", script.TRAIN, "failed" if own is None else "ok", 1.0, "", {"losses": own or {}})
    line = script.compare_losses([trained, cpu])
    assert (line.status, line.is_fault) == (status, status != "ok")


@pytest.mark.parametrize(
    ("name", "losses", "status"),
    [
        ("fp8", {"1": 3.0, "2": 2.03}, "ok"),
        ("fp8", {"1": 3.0, "2": 2.05}, "failed"),
        ("fp8_backward, two ranks", {"1": 3.0, "2": 2.05}, "failed"),
        ("fp8_backward, two ranks", {"1": 3.0, "2": float("nan")}, "failed"),
        ("fp8, two ranks", {"1": 3.0}, "failed"),
        ("fp8", None, "not run"),
        ("fp8_backward, on the CPU", None, "not run"),
    ],
)
def test_losses_in_float8_that_are_not_the_cpus_are_a_fault(
    name: str, losses: dict[str, float] | None, status: str
) -> None:
    lines = []
    for step in script.float8_trains(script.Setting(Path("logs"), is_tiny=False)):
        found = losses if step.name == name else {"1": 3.0, "2": 2.0}
        is_there = found is not None
        data = {"losses": found} if is_there else {}
        how = "ok" if is_there else "failed"
        lines.append(results.Line("float8", step.name, how, 1.0, "", data, is_fault=not is_there))
    line = script.compare_float8(lines)
    assert (line.part, line.status, line.is_fault) == ("float8", status, status != "ok")
    if status != "not run":
        assert f"{name}: " in line.found


def test_what_a_dry_run_leaves_out_is_not_compared() -> None:
    lines = []
    for step in script.float8_trains(script.Setting(Path("logs"), is_tiny=True)):
        data = {} if step.not_run else {"losses": {"1": 3.0}}
        lines.append(results.Line("float8", step.name, "not run" if step.not_run else "ok", 1.0, step.not_run, data))
    assert any(line.status == "not run" for line in lines)
    assert script.compare_float8(lines).status == "ok"


def test_a_step_that_waits_for_the_host_is_said(tmp_path: Path) -> None:
    names = {"ours_name": "meshlora", "peer_name": "GPU busy", "unit": "ms"}
    row = script.table.smaller("8b, one sequence, a step", [300.0], [250.0], target=1.06, **names)
    rows = [dataclasses.asdict(row) | {"is_met": row.is_met}]
    document = {"parity": {"agrees": True}, "rows": rows, "details": {"shapes": {}}}
    (tmp_path / "found.json").write_text(json.dumps(document))
    (tmp_path / "found.md").write_text("")
    said, _ = script.read_speeds(tmp_path)
    assert said == "one sequence, a step, meshlora: 1.20 of GPU busy (NO: ≤ 1.06)"


def test_a_system_that_is_measured_by_itself_has_a_line(tmp_path: Path) -> None:
    turn = {"step_time_s": 61.5, "peak_bytes": 50 * 2**30}
    shape = {"runs": {"one sequence": {"PEFT + liger-kernel": [turn]}}, "left_out": {}}
    document = {"parity": {"agrees": True}, "rows": [], "details": {"shapes": {"128k": shape}}}
    (tmp_path / "found.json").write_text(json.dumps(document))
    (tmp_path / "found.md").write_text("")
    assert script.read_speeds(tmp_path)[0] == "one sequence, PEFT + liger-kernel: 61.50 s a step, 50.00 GiB"


@pytest.mark.parametrize("is_tiny", [True, False])
def test_every_system_of_a_benchmark_is_one_of_its_shape(is_tiny: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import gpu

    known = {shape.name: {system.name for system in gpu.systems_of(shape)} for shape in gpu.real_shapes()}
    for part in script.PARTS.values():
        for step in part.steps(script.Setting(Path("logs"), is_tiny)):
            words = list(step.argv)
            if "benchmarks/gpu.py" in words:
                systems = {words[at + 1] for at, word in enumerate(words) if word == "--system"}
                assert systems <= known[words[words.index("--shape") + 1]], words
                assert not is_tiny or not systems or any(name.startswith("meshlora") for name in systems)


def test_every_shape_and_every_kernel_of_ours_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import gpu

    shapes, systems = set(), set()
    for part in script.PARTS.values():
        for step in part.steps(script.Setting(Path("logs"), is_tiny=False)):
            words = list(step.argv)
            shapes |= {words[at + 1] for at, word in enumerate(words) if word == "--shape"}
            systems |= {words[at + 1] for at, word in enumerate(words) if word == "--system"}
    assert shapes == {shape.name for shape in gpu.real_shapes()}
    ours = {system.name for shape in gpu.real_shapes() for system in gpu.systems_of(shape) if system.is_ours}
    assert {name for name in ours if "liger" in name or "fused" in name} <= systems


# --- the command ----------------------------------------------------------------------------------------------------


def test_parts_are_chosen_by_name_in_their_own_order(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(script.chosen("train,versions")) == ["versions", "train"]
    assert list(script.chosen(None)) == list(script.PARTS)
    assert script.main(["--dry-run", "--parts", "versions,trian"]) == 2
    assert "--parts trian: there is no such part; did you mean 'train'?" in capsys.readouterr().err


def test_steps_are_chosen_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    setting = script.Setting(Path("logs"), is_tiny=False)
    parts = script.only(script.chosen("tests,proofs,8b"), setting, ["dense, float64", "tests/gpu/test_one_gpu.py"])
    steps = {name: [step.name for step in part.steps(setting)] for name, part in parts.items()}
    assert steps == {"tests": ["tests/gpu/test_one_gpu.py"], "proofs": ["dense, float64"], "8b": []}
    assert script.main(["--dry-run", "--parts", "train,8b", "--step", "int8"]) == 2
    assert "--step int8: no chosen part has such a step" in capsys.readouterr().err


def test_a_dry_run_prints_its_table_and_keeps_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = _step("print('[fine]')", read=script.read_last), _step("raise SystemExit('broken')")
    monkeypatch.setattr(script, "PARTS", {"good": _part(good), "bad": _part(bad), "timed": _part(good, is_timed=True)})
    before = {*os.listdir(script.table.RESULTS)}
    assert script.main(["--dry-run", "--parts", "good,timed"]) == 0
    assert "[fine]" in capsys.readouterr().out
    assert {*os.listdir(script.table.RESULTS)} == before
    assert script.main(["--dry-run", "--out", str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert "bad: a step: exit code 1: broken" in printed
    assert "2 ok, 1 failed in " in printed
    (file,) = tmp_path.glob("gpu_cpu-a-dry-run_*.json")
    assert [line.part for line in results.lines_of(json.loads(file.read_text()))] in (
        ["good", "bad", "timed"],
        ["bad", "good", "timed"],
        ["good", "timed", "bad"],
        ["timed", "good", "bad"],
        ["bad", "timed", "good"],
        ["timed", "bad", "good"],
    )
    assert "| bad | a step | failed |" in file.with_suffix(".md").read_text()


# --- its file, and the pages ----------------------------------------------------------------------------------------


def _row(ours: str, peer: str, what: str, ratio: float, own: float, **rest: Any) -> dict[str, Any]:
    make = script.table.smaller if "memory" in what else script.table.greater
    names = {"ours_name": ours, "peer_name": peer, "unit": "GiB" if "memory" in what else "tokens/s"}
    row = make(what, [own], [own / ratio], **names, **rest)
    return dataclasses.asdict(row) | {"is_met": row.is_met}


def _speeds(part: str, *rows: dict[str, Any]) -> Any:
    details = {"bf16_flops": 7e14, "copy_bytes_s": 2.68e12, "launch_s": 9e-6, "shapes": {}}
    return results.Line(part, "benchmarks/gpu.py", "ok", 60.0, "", {"rows": [*rows], "details": details})


def _file(tmp_path: Path, *lines: Any, versions: dict[str, str] = VERSIONS) -> Path:
    path: Path = results.file_of(tmp_path, "NVIDIA H100 80GB HBM3")
    made = results.Results(path, card="NVIDIA H100 80GB HBM3", command="a command", versions=versions)
    for line in lines:
        made.add(line)
    return path


def test_a_second_run_replaces_its_steps_and_keeps_the_others(tmp_path: Path) -> None:
    old = [results.Line(part, step, "ok", 1.0, "old") for part, step in (("a", "1"), ("a", "2"), ("b", "1"))]
    path = _file(tmp_path, *old)
    assert path.name.startswith("gpu_nvidia-h100-80gb-hbm3_2")
    _file(tmp_path, results.Line("a", "1", "failed", 1.0, "new"))
    lines = results.lines_of(json.loads(path.read_text()))
    found = [(line.part, line.step, line.found) for line in lines]
    assert found == [("a", "1", "new"), ("a", "2", "old"), ("b", "1", "old")]
    with pytest.raises(UserError, match=r"its versions are torch 2\.13\.0: this run's are torch 2\.11\.0"):
        _file(tmp_path, versions={"torch": "2.11.0"})
    path.write_text('{"title": "of another script"}')
    with pytest.raises(UserError, match="it has no results of"):
        _file(tmp_path)


def test_pages_and_the_planners_numbers_are_written_from_results(tmp_path: Path) -> None:
    eight = _speeds(
        "8b",
        _row("meshlora", "PEFT + SDPA", "8b, one sequence", 1.25, 13_000.0, target=1.3),
        _row("meshlora", "PEFT + SDPA", "8b, packed", 1.5, 14_000.0),
        _row("meshlora", "PEFT + SDPA", "8b, one sequence, peak memory", 0.62, 29.9),
        _row("meshlora", "PEFT + liger-kernel", "8b, one sequence", 1.1, 13_000.0),
    )
    path = _file(tmp_path, eight)
    places = {"README.md": tmp_path / "README.md", "docs/performance.md": tmp_path / "docs" / "performance.md"}
    (tmp_path / "docs").mkdir()
    for file in places.values():
        file.write_text(f"before\n\n{results.BEGIN}old{results.END}\n\nafter\n")
    assert {*results.write_docs(path, root=tmp_path)} == {*places.values()}
    page = places["docs/performance.md"].read_text()
    assert page.startswith("before\n\n<!--")
    assert page.endswith("<!-- end -->\n\nafter\n")
    assert "old" not in page
    expected = "1.25× (13,000 tokens/s), the goal of 1.3 is missed | 1.50× | 0.62× (29.9 GiB) |"
    assert f"| Llama 8B, against PEFT + SDPA | {expected}" in page
    # Of these two kernels are liger's on one side only, and this was not measured.
    assert "| Llama 8B, kernels of liger-kernel on both sides |" not in page
    missing = "Llama 8B, kernels of liger-kernel on both sides; Llama 8B, products in float8"
    assert f"Not measured on it: {missing}" in page
    assert f"results/{path.stem}.md" in page
    short = places["README.md"].read_text()
    cells = "1.25× (13,000 tokens/s) | 0.62× (29.9 GiB)"
    assert f"| Llama 8B, against PEFT + SDPA, the goal of 1.3 is missed | {cells} |" in short
    assert "Llama 1B" not in short
    words = results.peaks(json.loads(path.read_text()))
    assert "products 0.708 at best, 0.75 in the planner's steps; copies 0.800 at best, 0.72 in" in words
    assert "its table has no such card" in results.peaks({"card": "NVIDIA of tomorrow", "measured": {"launch_s": 1e-6}})


def test_the_planner_has_no_more_than_cards_were_seen_to_do() -> None:
    """A step's products and all between them together reach less than the best product, and a copy, alone."""
    for file in (ROOT / "benchmarks" / "results").glob("gpu_nvidia-*.json"):
        document = json.loads(file.read_text("utf-8"))
        seen, gpu = document["measured"], card_of(document["card"])
        assert gpu is not None
        assert 0.95 < 1e12 * gpu.matmul_efficiency * gpu.half_tflops / seen["bf16_flops"] < 1, file
        assert 0.6 < 1e9 * gpu.memory_efficiency * gpu.memory_gb_s / seen["copy_bytes_s"] < 1, file


def test_the_pages_have_places_for_results() -> None:
    for name in ("README.md", "docs/performance.md"):
        text = (ROOT / name).read_text("utf-8")
        assert text.count(results.BEGIN) == 1, name
        assert results.END in text.partition(results.BEGIN)[2], name


def test_pages_are_not_written_without_speeds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = _file(tmp_path, results.Line("train", "a step", "ok", 1.0, ""))
    assert script.main(["--write-docs", str(path)]) == 2
    assert "it has no speeds" in capsys.readouterr().err
    assert script.main(["--write-docs", str(tmp_path / "none.json")]) == 2
    assert "there is no such file" in capsys.readouterr().err


# --- what is asked --------------------------------------------------------------------------------------------------


def test_each_bound_is_answered_by_the_best_of_ours_or_by_why_it_is_not_measured(tmp_path: Path) -> None:
    peer, plain = "PEFT + liger-kernel", "meshlora + liger"
    eight = _speeds(
        "8b",
        _row(plain, peer, "8b, one sequence", 1.2, 15_000.0),
        _row(results.RECORDED, peer, "8b, one sequence", 1.4, 17_000.0),
        _row(results.RECORDED_FLOAT8, peer, "8b, one sequence", 9.0, 99_000.0),
        _row(results.RECORDED, peer, "8b, one sequence, peak memory", 0.9, 40.0),
        _row(plain, peer, "8b, one sequence, peak memory", 0.8, 29.0),
    )
    names = {"unit": "ms", "ours_name": results.RECORDED, "peer_name": "GPU busy"}
    step = script.table.smaller("8b, one sequence, a step", [110.0], [100.0], **names)
    eight.data["rows"].append(dataclasses.asdict(step))
    float8 = _speeds("8b-fp8", _row(results.FLOAT8, peer, "8b, one sequence", 1.7, 20_000.0))
    why = f"{results.RECORDED} is left out: NotHere: the cause"
    found = f"{why}\nPEFT + liger-kernel is left out: NotHere: nobody asks for it"
    moe = results.Line("moe", "benchmarks/gpu.py", "ok", 1.0, found, {"rows": []})
    late = results.Line("32k", "benchmarks/gpu.py", "not run", 0.0, "no time left of 560 s")
    path = _file(tmp_path, eight, float8, moe, late)
    document = json.loads(path.read_text())
    answers = {what: (found, met) for what, _, found, met in results.answers(document)}
    assert answers["8B in bf16, of PEFT + liger-kernel"] == (f"1.40, {results.RECORDED}, 8b", "yes")
    assert answers["8B with products in float8, of PEFT + liger-kernel"][1] == "yes"
    assert answers["8B with products in float8, tokens/s"] == (f"20,000, {results.FLOAT8}, 8b-fp8", "yes")
    assert answers["a step of 8B, of the GPU's busy time"] == (f"1.10, {results.RECORDED}, 8b", "no")
    assert answers["1B, of PEFT + liger-kernel"] == ("not measured", "no")
    assert answers["the mixture, of PEFT + SDPA"] == (f"not measured; {why}", "no")
    assert answers["a row of 32,768, of PEFT + liger-kernel"] == ("not measured; no time left of 560 s", "no")
    assert not [what for what in answers if "peak" in what], "asked of another card"
    of_h200 = {what: (found, met) for what, _, found, met in results.answers(document | {"card": "NVIDIA H200"})}
    assert of_h200["8B with products in float8, tokens/s"][1] == "no"
    assert of_h200["peak memory of 8B, GiB"] == (f"40.0, {results.RECORDED}, 8b", "no")
    assert "| 1B, of PEFT + liger-kernel | ≥ 1.3 | not measured | no |" in path.with_suffix(".md").read_text()


def test_every_bound_is_of_systems_that_its_parts_measure() -> None:
    for bound in results.BOUNDS:
        for part in bound.parts:
            (step,) = script.PARTS[part].steps(script.Setting(Path("logs"), is_tiny=False))
            systems = {word for flag, word in itertools.pairwise(step.argv) if flag == "--system"}
            assert systems & {*bound.ours}, (bound, part)
            assert bound.peer in {*systems, None} or (bound.peer == "GPU busy" and "--kernels" in step.argv), bound

"""The planner's arithmetic against runs: states, messages and memory, of real plans on ranks that do not exist."""

from __future__ import annotations

import dataclasses
import inspect
import json
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import AutoConfig

from meshlora.cli.main import main
from meshlora.loading.blueprint import make_blueprint
from meshlora.plan.base_options import BaseOptions
from meshlora.plan.derive import plan_model
from meshlora.run.allocator import most_resident_bytes
from meshlora.verify.budget import Message, micro_batch_budget
from meshlora_extra.planner import fake
from meshlora_extra.planner.choose import all_topologies, choose
from meshlora_extra.planner.communication import grouped, span_of
from meshlora_extra.planner.fake import FakeRun, Work
from meshlora_extra.planner.hardware import GPUS, hardware_named
from meshlora_extra.planner.problem import Problem
from meshlora_extra.planner.simulate import Simulation, simulate
from meshlora_ground.errors import UserError
from meshlora_ground.topology import Topology
from meshlora_judge.twin import twin_config

SHAPE = Path(__file__).parents[2] / "examples" / "llama-3.1-70b-shape.json"


def problem_of(family: str, world: int, *, seq: int = 64, batch: int = 0, lora: Any = None, **options: Any) -> Problem:
    config = twin_config(family, **options.pop("config", {}))
    lora = LoraConfig(r=4, **{"target_modules": "all-linear", **(lora or {})})
    base = BaseOptions(
        dtype=options.pop("dtype", torch.float32), disable_dropout=True, quantization=options.pop("quantization", None)
    )
    return Problem(
        make_blueprint(config, Topology(), base),
        lora,
        gpus=world,
        gpu=hardware_named("h100"),
        seq=seq,
        global_batch=batch or world,
        **options,
    )


def simulated(problem: Problem, topology: str) -> Simulation:
    (prediction,) = choose(problem, [Topology.parse(topology, world=problem.gpus)]).ranked
    return simulate(problem, prediction)


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "topology", "options"),
    [
        pytest.param("llama", "tp=2,sp", {}, id="sp"),
        pytest.param("llama", "dp=2,tp=2", {"batch": 8, "micro_batch": 2}, id="accumulated"),
        pytest.param("llama", "tp=8", {"dtype": torch.bfloat16}, id="heads_on_two_ranks"),
        pytest.param("llama", "dp=4", {}, id="dp", marks=pytest.mark.proof),  # by default with sharded bases
        pytest.param("llama", "tp=4,sp", {"recompute": "full"}, id="recomputed", marks=pytest.mark.proof),
        pytest.param("llama", "tp=2,sp", {"recompute": "offload", "config": {"num_hidden_layers": 6}}, id="offloaded"),
        # Four residual streams.
        pytest.param("deepseek_v4", "tp=2", {}, id="streams"),
        pytest.param("deepseek_v4", "tp=2,sp", {"recompute": "offload"}, id="streams_offloaded"),
        pytest.param("llama", "tp=2,sp", {"recompute": 2, "config": {"num_hidden_layers": 5}}, id="every_second"),
        pytest.param(
            "llama", "tp=4", {"lora": {"use_dora": True, "trainable_token_indices": [7, 200]}}, id="dora_and_rows"
        ),
        pytest.param("llama", "tp=2", {"lora": {"modules_to_save": ["embed_tokens"]}}, id="embedding_trained"),
        pytest.param("gpt2", "tp=2,sp", {}, id="conv1d_tied"),
        pytest.param("llama", "tp=2,sp", {"optimizer": "lora_fa", "micro_batch": 1, "batch": 2}, id="lora_fa"),
        pytest.param("llama", "tp=2,sp", {"optimizer": "adamw_8bit", "min_8bit_size": 300}, id="adamw_8bit"),
        pytest.param("minicpm3", "tp=2,sp", {}, id="input_of_low_rank"),
        # By default with the base sharded, in `test_planner_base`.
        pytest.param(
            *("gemma2", "tp=2", {"config": {"num_hidden_layers": 6}}), id="two_kinds_of_layers", marks=pytest.mark.proof
        ),
        pytest.param("gpt_neox", "tp=2,sp", {}, id="parallel_residual"),
        pytest.param("olmo2", "tp=2", {}, id="wide_norms"),
        pytest.param("olmo_hybrid", "tp=2,sp", {}, id="whole_regions"),
        pytest.param("mixtral", "dp=2,ep=2", {}, id="ep"),
        pytest.param("qwen3_moe", "tp=2,sp,ep=2", {}, id="ep_sp"),
        pytest.param("qwen3_moe", "dp=2,tp=2,ep=2,etp=2,two-stage", {}, id="two_stage"),
        # By default the 70B model below.
        pytest.param("llama", "dp=2048,tp=8,sp", {}, id="16384", marks=pytest.mark.proof),
    ],
)
def test_simulated_step_is_as_predicted(family: str, topology: str, options: dict[str, Any]) -> None:
    """Shapes, states, numbers and bytes of collectives exactly, the peak within 5 %."""
    world = Topology.parse(topology).world
    simulation = simulated(problem_of(family, world, **options), topology)
    assert not list(simulation.differences())
    assert simulation.world == world
    assert world == 1 or simulation.fullest.calls.total()


# By default each family on one, and each topology.
OFTEN = {("llama", "tp=2"), ("olmo2", "dp=2,tp=2"), ("olmo_hybrid", "tp=4,sp"), ("qwen3_moe", "tp=4,sp")}


@pytest.mark.parametrize(
    ("family", "topology"),
    [
        pytest.param(family, topology, marks=[] if (family, topology) in OFTEN else pytest.mark.proof)
        for family in ("llama", "olmo2", "olmo_hybrid", "qwen3_moe")
        for topology in ("tp=2", "tp=4,sp", "dp=2,tp=2")
    ],
)
def test_messages_are_those_of_the_budget(family: str, topology: str) -> None:
    """With the embedding trained, a gradient flows everywhere, and all calls that the budget allows are there."""
    shape = Topology.parse(topology)
    problem = problem_of(family, shape.world, seq=16, lora={"modules_to_save": ["embed_tokens"]})
    (prediction,) = choose(problem, [shape]).ranked
    counted: Counter[tuple[str, str]] = Counter()
    for message in prediction.messages:
        if message.phase != "step":
            counted[message.phase, message.kind] += message.calls
    budget = micro_batch_budget(plan_model(problem.model, shape))
    assert counted == {key: number for key, number in budget.items() if number}


@pytest.mark.parametrize(("num_layers", "seq"), [(8, 1024), pytest.param(80, 8192, marks=pytest.mark.proof)])
def test_a_70b_model_on_16384_ranks_costs_four_collectives_a_layer(num_layers: int, seq: int) -> None:
    """Design section 3: 4 for each layer, and the buckets; beside them the ends of the model and two scalars.

    By default a tenth of its layers, whose weights would still be more than 2 GB on a rank.
    """
    resident_bytes, started = most_resident_bytes(), time.process_time()
    config = AutoConfig.for_model(**json.loads(SHAPE.read_text()) | {"num_hidden_layers": num_layers})
    lora = LoraConfig(r=16, target_modules="all-linear")
    base = make_blueprint(config, Topology(), BaseOptions(dtype="bfloat16"))
    problem = Problem(base, lora, gpus=16_384, gpu=GPUS["h200"], seq=seq, global_batch=16_384)
    (prediction,) = choose(problem, [Topology.parse("tp=8", world=16_384)]).ranked
    simulation = simulate(problem, prediction)
    found = Counter(grouped(prediction.messages, micro_batches=1))
    assert time.process_time() - started < 20
    assert found["layers"] == 4 * num_layers
    assert found["buckets"] == 2
    assert not list(simulation.differences())
    large = sum(n for c, n in simulation.fullest.calls.items() if c.ranks == 8 and c.kind == "allreduce")
    assert large == 4 * num_layers + 1  # the embedding
    # In all, or more than all tests before it.
    assert simulation.host_bytes < max(2e9, resident_bytes + 5e8)


def test_memory_of_a_simulation_is_not_that_of_the_process_that_started_it() -> None:
    """A child inherits its parent's ru_maxrss, which here is at least what it takes to be noticed."""
    imports = "import resource, sys\nfrom pathlib import Path\n"  # those of the file take seconds
    code = f"{imports}{inspect.getsource(most_resident_bytes)}\nprint(most_resident_bytes())"
    alone = int(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)
    large = bytearray(alone + 500_000_000)
    large[::4096] = b"1" * len(range(0, len(large), 4096))  # pages that are touched
    found = int(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)
    assert found < len(large) - 250_000_000


def test_peak_without_a_layers_activations_is_noticed() -> None:
    """The comparison itself: what is wrong by more than 5 %, or by one call or byte, is said."""
    problem = problem_of("llama", 2)
    simulation = simulated(problem, "tp=2")
    predicted, seen = simulation.fullest.bytes["peak"]
    simulation.fullest.bytes["peak"] = (int(predicted * 0.93), seen)
    simulation.fullest.bytes["adapter"] = (
        simulation.fullest.bytes["adapter"][0] - 4,
        simulation.fullest.bytes["adapter"][1],
    )
    (call, *_) = simulation.fullest.predicted_calls
    simulation.fullest.predicted_calls[call] += 1
    found = list(simulation.differences())
    assert len(found) == 3
    assert all(word in " ".join(found) for word in ("peak", "adapter", call.kind))


def test_storages_are_counted_until_they_are_freed() -> None:
    run = FakeRun()
    with run:
        a = torch.empty(1000)
        b = a.view(10, 100)[2:]  # no memory of its own
        c = b * 2
        assert run.live_bytes == 4 * (1000 + 800)
        del a, c
        assert run.live_bytes == 4000
        del b
        assert run.live_bytes == 0
        numbers = torch.arange(6).view(2, 3)
        assert numbers.sum(1).tolist() == [3, 12]  # whole numbers are real
        run.begin("s")
        _ = torch.empty(4, 8) @ torch.empty(8, 2)
    assert run.sections["s"].work[Work(2 * 4 * 8 * 2, 4 * (32 + 16 + 8))] == 1


def test_bytes_are_those_that_an_operator_reads_and_writes() -> None:
    """Nothing for memory that is only taken, the chosen rows of a table, an expanded dimension once."""
    run = FakeRun()
    with run:
        x, table, rows = torch.empty(10, 100), torch.empty(1000, 100), torch.zeros(10, dtype=torch.int64)
        run.begin("s")
        for _ in (x.new_empty(10, 100), torch.empty_like(x), torch.empty(10, 100)):
            pass
        assert not run.sections["s"].work
        _ = torch.zeros_like(x), table[rows], x + x[:, :1].expand(10, 100)
    assert run.sections["s"].work == {Work(0, 4000): 1, Work(0, 8000 + 80): 1, Work(0, 8000 + 40): 1}


def test_step_takes_what_the_host_or_the_gpu_takes_whichever_is_longer() -> None:
    """A host that runs ahead of large kernels has launched the small ones before their turn."""
    gpu = dataclasses.replace(GPUS["h100"], memory_gb_s=1000, memory_efficiency=1, kernel_s=1e-3)
    large, small = Work(0, 10 * 10**9), Work(0, 10**6)
    assert gpu.work_s({large: 1, small: 5}, is_half=True) == pytest.approx(10e-3 + 5e-6)
    assert gpu.work_s({large: 1, small: 20}, is_half=True) == pytest.approx(21e-3)
    assert gpu.waits_s == gpu.wait_s > 0 == dataclasses.replace(gpu, device="cpu").waits_s


def test_operators_of_equal_layers_are_asked_of_torch_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A simulation of 80 layers would take most of its time to hear 80 times what shapes the first had."""
    numbers = []
    for layers in (3, 6):
        known: dict[Any, Any] = {}
        monkeypatch.setattr(fake, "_KNOWN", known)
        problem = problem_of("llama", 2, config={"num_hidden_layers": layers}, recompute="none")
        assert not list(simulated(problem, "tp=2,sp").differences())
        numbers.append(len(known))
    assert numbers[0] == numbers[1]


def test_what_links_carry_is_by_ring() -> None:
    def wire(kind: str, ranks: int) -> float:
        return Message("forward", kind, frozenset({"tp"}), 800).wire_bytes(ranks)

    assert wire("allreduce", 8) == 1400
    assert wire("reducescatter", 8) == wire("alltoall", 8) == 700
    assert wire("allgather", 8) == 5600  # of 800 bytes each has, 7 others' are received


def test_groups_that_leave_a_node_take_the_network() -> None:
    topology = Topology.parse("dp=4,tp=8")
    gpu = GPUS["h200"]
    assert not gpu.crosses_nodes(span_of(topology, frozenset({"tp"})))
    assert gpu.crosses_nodes(span_of(topology, frozenset({"dp"})))
    assert span_of(Topology.parse("dp=4,tp=2"), frozenset({"dp"})) == 7
    assert gpu.message_s(1e9, ranks=8, is_network=True) > gpu.message_s(1e9, ranks=8, is_network=False)


@pytest.mark.long
def test_what_does_not_fit_comes_last_and_says_by_how_much() -> None:
    from meshlora_extra.planner.show import why_not

    problem = problem_of("llama", 2, seq=64, batch=8)
    small = hardware_named("h100")
    every = choose(problem)
    most, least = (pick(p.memory_bytes for p in every.ranked) for pick in (max, min))
    between = (most + least) / 2 / 1e9 / small.usable_memory
    tight = dataclasses.replace(problem, gpu=dataclasses.replace(small, memory_gb=between))
    choice = choose(tight)
    fits = [prediction.fits for prediction in choice.ranked]
    assert fits == sorted(fits, reverse=True)
    assert fits[0]
    words = why_not(choice)
    assert len(words) == len(choice.ranked) - 1 + len({why for _, why in choice.left_out})
    assert [p.time_s for p in choice.ranked if p.fits] == sorted(p.time_s for p in choice.ranked if p.fits)
    if not all(fits):
        assert sum("does not fit by" in word for word in words) == fits.count(False)


def test_topologies_that_are_not_proved_are_left_out_with_the_reason() -> None:
    problem = problem_of("llama", 4)
    problem.shrunk.model.config.model_type = "nobody_proved_me"
    choice = choose(problem)
    assert [str(p.topology) for p in choice.ranked] == ["dp=4", "dp=4,dp_shard"]
    stages = ["pp=2,dp=2", "pp=2,dp=2,dp_shard"]
    assert [name for name, _ in choice.left_out if "pp=" in name] == stages
    assert len(choice.left_out) == len(list(all_topologies(problem))) - 2 + len(stages)
    assert {why for _, why in choice.left_out} == {"its split over this is not proved against one process"}


def test_measured_numbers_replace_the_datasheets(tmp_path: Path) -> None:
    file = tmp_path / "measured.json"
    file.write_text(json.dumps({"matmul_efficiency": 0.7, "node_gb_s": 380}))
    gpu = hardware_named("H200", str(file))
    assert (gpu.matmul_efficiency, gpu.node_gb_s, gpu.network_gb_s) == (0.7, 380, 50)
    for wrong, word in ({"matmul_eficiency": 0.7}, "matmul_efficiency"), ({"link_efficiency": 2}, "at most 1"):
        file.write_text(json.dumps(wrong))
        with pytest.raises(UserError, match=word):
            hardware_named("h200", str(file))


def test_plan_that_fits_nowhere_is_a_failure_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run.yaml"
    words = ["plan", "--model", str(SHAPE), "--gpus", "1", "--gpu", "l40s", "--seq", "512", "--out", str(out)]
    assert main(words) == 1
    assert "no topology fits: dp=1 comes nearest" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.long
def test_plan_writes_a_run_file_that_reads_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from meshlora.run.config.file import read_run

    model = tmp_path / "config.json"
    model.write_text(json.dumps(twin_config("llama").to_dict()))
    out, numbers = tmp_path / "run.yaml", tmp_path / "plan.json"
    words = ["plan", "--model", str(model), "--gpus", "4", "--gpu", "l40s", "--seq", "32", "--global-batch", "8"]
    assert main([*words, "--simulate", "--gradients", "--out", str(out), "--json", str(numbers)]) == 0
    printed = capsys.readouterr().out
    assert all(word in printed for word in ("as predicted", "gradient axes", "l40s", "times are estimates"))
    run = read_run(out)
    found = json.loads(numbers.read_text())
    assert run.topology == found["topologies"][0]["topology"]
    assert (run.train.batch_size, run.data.max_length) == (8, 32)
    assert {t["topology"] for t in found["topologies"]} >= {
        *("dp=4", "dp=2,tp=2", "dp=2,tp=2,sp", "tp=4", "tp=4,sp"),
        *("dp=4,dp_shard", "dp=2,tp=2,dp_shard", "dp=2,tp=2,sp,dp_shard"),
    }

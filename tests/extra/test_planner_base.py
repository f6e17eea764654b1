"""What the planner says of frozen bases that are packed or sharded over dp, against simulated steps and by hand."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import meshlora
from meshlora.cli.main import main
from meshlora.plan.derive import plan_model
from meshlora.verify.budget import Message, micro_batch_budget
from meshlora.wings.quantized.kinds import with_quantization
from meshlora.wings.quantized.quantized import pack
from meshlora_extra.planner.choose import choose, gathers_s
from meshlora_extra.planner.fake import FakeRun
from meshlora_extra.planner.hardware import Hardware
from meshlora_extra.planner.kinds import shrink
from meshlora_extra.planner.memory import LayerMemory, Phase, States, StepMemory, held, peak_of
from meshlora_ground.errors import UnsupportedError, UserError
from meshlora_ground.topology import DATA, Topology
from meshlora_judge.twin import twin_config
from tests.extra.test_planner import problem_of, simulated
from tests.published_twins import read_published, write_published_twin

# Weights beside which activations are nothing, so that a layer's copy that is forgotten shows.
WIDE = {"hidden_size": 1024, "intermediate_size": 4096, "head_dim": 128, "num_hidden_layers": 4, "vocab_size": 512}
# Whole blocks of 64 on each of two tp ranks.
BLOCKS = {"hidden_size": 128, "head_dim": 16, "intermediate_size": 256}


# The stack of GPT-2 returns a view. It has no weights of its own to gather, so that nothing hangs on it.
@pytest.mark.long
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .FSDPGPT2Model. returned a view:UserWarning")
@pytest.mark.parametrize(
    ("family", "topology", "options"),
    [
        pytest.param("llama", "dp=4,dp_shard", {"config": WIDE, "seq": 32}, id="weights_alone"),
        pytest.param("llama", "dp=4,dp_shard", {"config": WIDE, "seq": 32, "recompute": "full"}, id="recomputed"),
        pytest.param("llama", "dp=3,dp_shard", {"lora": {"target_modules": ["q_proj"]}}, id="uneven"),
        pytest.param("llama", "dp=2,tp=2,sp,dp_shard", {"batch": 8, "micro_batch": 2}, id="sp_accumulated"),
        pytest.param("gpt2", "dp=7,dp_shard", {"lora": {"target_modules": ["c_fc"]}}, id="stored_transposed"),
        pytest.param("gemma2", "dp=2,dp_shard", {"config": {"num_hidden_layers": 4}}, id="two_kinds_of_layers"),
        pytest.param("mixtral", "dp=2,dp_shard", {}, id="experts_sharded"),
        pytest.param("mixtral", "dp=4,ep=2,dp_shard", {}, id="experts_left"),
        pytest.param("llama", "tp=2", {"quantization": "nf4", "config": WIDE, "seq": 32}, id="nf4"),
        pytest.param("llama", "tp=2,sp", {"quantization": "int8", "config": BLOCKS, "recompute": "full"}, id="int8"),
        pytest.param(
            *("llama", "dp=2,tp=2,sp,dp_shard", {"quantization": "nf4", "config": WIDE, "seq": 32}),
            id="nf4_sharded",
            marks=pytest.mark.proof,
        ),
        pytest.param(
            "llama",
            "dp=3,dp_shard",
            {"quantization": "int8", "config": BLOCKS, "dtype": torch.bfloat16, "lora": {"use_dora": True}},
            id="int8_sharded_dora",
        ),
    ],
)
def test_simulated_step_is_as_predicted(family: str, topology: str, options: dict[str, Any]) -> None:
    """Shapes, states, numbers and bytes of collectives exactly, the peak within 5 %."""
    simulation = simulated(problem_of(family, Topology.parse(topology).world, **options), topology)
    assert not list(simulation.differences())
    kinds = {call.kind for call in simulation.fullest.calls if call.phase == "forward"}
    assert ("dp_shard" not in topology) or "allgather" in kinds


@pytest.mark.parametrize(
    ("topology", "recompute"),
    [
        ("dp=2,dp_shard", "full"),
        ("dp=2,tp=2,sp,dp_shard", "none"),
        pytest.param("dp=2,dp_shard", "none", marks=pytest.mark.proof),
        pytest.param("dp=2,tp=2,sp,dp_shard", "full", marks=pytest.mark.proof),
    ],
)
def test_gathers_are_those_of_the_budget(topology: str, recompute: str) -> None:
    shape = Topology.parse(topology)
    problem = problem_of("llama", shape.world, seq=16, recompute=recompute, lora={"modules_to_save": ["embed_tokens"]})
    (prediction,) = choose(problem, [shape]).ranked
    counted: Counter[tuple[str, str]] = Counter()
    for message in prediction.messages:
        if message.phase != "step":
            counted[message.phase, message.kind] += message.calls
    budget = micro_batch_budget(plan_model(problem.model, shape), recomputes=recompute == "full")
    assert counted == {key: number for key, number in budget.items() if number}


@pytest.mark.parametrize("kind", ["nf4", "int8", "mxfp4", "fp8"])
def test_packed_bytes_are_those_of_a_packed_matrix(kind: str) -> None:
    problem = problem_of("llama", 2, config=BLOCKS, quantization=kind, dtype=torch.bfloat16)
    plan = with_quantization(plan_model(problem.shrunk.model, Topology.parse("tp=2")), kind)
    name = "model.layers.0.mlp.down_proj.weight"  # [128, 256], of which a rank has 128 columns
    packed = pack(torch.randn(128, 128), kind)
    found = held(name, (128, 256), torch.bfloat16, plan, ())
    assert [t.shape for t in found] == [tuple(packed.codes.shape), tuple(packed.scales.shape)]
    assert [t.nbytes for t in found] == [packed.codes.nbytes, packed.scales.nbytes]
    (head,) = held("lm_head.weight", (256, 128), torch.bfloat16, plan, ())
    assert head.nbytes == 128 * 128 * 2


def test_unpacking_takes_time_and_memory_of_a_step() -> None:
    plain, packed = (
        choose(
            problem_of("llama", 2, config=WIDE, seq=32, quantization=kind, recompute="none", dtype=torch.bfloat16),
            [Topology.parse("dp=2")],
        ).ranked[0]
        for kind in (None, "nf4")
    )
    assert packed.states.weights < 0.35 * plain.states.weights
    assert packed.parts_s["compute"] > plain.parts_s["compute"]
    # The largest matrix in bfloat16, and nothing beside it.
    largest = 4096 * 1024 * 2
    assert largest <= packed.peak.working <= plain.peak.working + largest


def test_gathers_hide_behind_the_layer_before_and_no_further() -> None:
    """Two layers, gathers of 4 s, 80 % of kernels: the first one of either direction hides behind nothing."""
    gpu = Hardware("-", 1, 1, 1, 1e9, 1, 1, link_efficiency=1, launch_s=0, node_hop_s=0, kernel_s=0)
    messages = [Message(phase, "allgather", DATA, 4 * 10**9, 2, 0, is_ahead=True) for phase in ("forward", "backward")]

    def found(forward_s: float, backward_s: float, *, again: bool = False) -> float:
        return gathers_s(
            messages,
            (0, 0),
            (again, again),
            gpu,
            topology=Topology.parse("dp=2"),
            forward_s={0: forward_s},
            backward_s={0: backward_s},
        )

    copies_s = found(100, 100) - 8
    assert 0 < copies_s < 1e-3
    assert found(0, 0) - copies_s == pytest.approx(16)
    assert found(2.5, 100) - copies_s == pytest.approx(8 + 4 - 2)
    assert found(0, 2.5) - copies_s == pytest.approx(8 + 4 + 4 - 2)
    # A layer that is computed twice has its forward beside the gather, too.
    assert found(2.5, 2.5, again=True) - copies_s == pytest.approx(8 + 2 + 0)


def test_memory_that_is_given_back_under_a_living_tensor_is_noticed() -> None:
    run = FakeRun()
    with run:
        a = torch.empty(1000)
        run.begin("s")
        a.untyped_storage().resize_(0)
        assert run.live_bytes == 0
        b = torch.empty(500)
        a.untyped_storage().resize_(4000)
        assert run.live_bytes == 6000
        assert run.sections["s"].peak_bytes == 2000
        del a, b
        assert run.live_bytes == 0
    assert "resize_" not in vars(torch.UntypedStorage)


@pytest.mark.long
def test_every_topology_is_looked_at_whole_and_sharded_and_the_faster_is_first() -> None:
    choice = choose(problem_of("llama", 4, batch=8))
    times = {str(p.topology): p.time_s for p in choice.ranked}
    assert list(times.values()) == sorted(times.values())
    sharded = [name for name in times if "dp_shard" in name]
    assert len(sharded) >= 3
    memory = {str(p.topology): p.states.weights for p in choice.ranked}
    for name in sharded:
        whole = name.replace(",dp_shard", "")
        assert times[whole] < times[name]
        assert memory[whole] > memory[name]


def test_gathers_are_no_messages_one_after_another() -> None:
    """A step with the base sharded takes what it takes with the base whole, and the gathers' own time."""
    problem = problem_of("llama", 4, batch=8, micro_batch=1, recompute="full")
    whole, sharded = (choose(problem, [Topology.parse(text)]).ranked[0] for text in ("dp=2,tp=2", "dp=2,tp=2,dp_shard"))
    assert sharded.parts_s["gathers of weights"] > whole.parts_s["gathers of weights"] == 0
    assert {**sharded.parts_s, "gathers of weights": 0.0} == whole.parts_s
    calls = sharded.traffic["node"].calls - whole.traffic["node"].calls
    assert calls == 2 * len(problem.shrunk.order) * sharded.micro_batches


@pytest.mark.parametrize(
    ("forward", "backward", "parts", "most"),
    [
        # The second layer is copied out, while the buffers of both gathers and what the first one saved are there.
        pytest.param(Phase(0, 10), Phase(0, -10), (50, 50), 3 * 100 + 10, id="copied_out"),
        pytest.param(Phase(500, 10), Phase(0, -10), (50, 50), 500 + 2 * 100 + 10, id="forward"),
        # The last layer's copy and the gather of the first one, with all that both saved.
        pytest.param(Phase(0, 10), Phase(500, -10), (50, 50), 500 + 2 * 100 + 20, id="backward"),
        # The gather of the last layer, which is the larger, and its copy.
        pytest.param(Phase(0, 310), Phase(0, -310), (50, 200), 2 * 400 + 620, id="copied_out_in_backward"),
    ],
)
def test_peak_has_the_copies_of_a_layer_that_are_there(
    forward: Phase, backward: Phase, parts: tuple[int, int], most: int
) -> None:
    """Two layers, of which each of two ranks has `parts`."""
    nothing = Phase(0, 0)
    layer = LayerMemory(forward, backward, saved=10, output=0, kept_input=0, gradients=0)
    memory = StepMemory(nothing, (layer, layer), nothing, nothing, nothing, 1)
    states = States(0, parts, 0, 0, 0, 0, {}, 0, 0)
    assert peak_of(memory, (0, 1), states, recomputed=(False, False), accumulates=False, dp=2).largest == most


def test_what_training_refuses_is_not_planned() -> None:
    with pytest.raises(UserError, match="one of nf4, int8"):
        problem_of("llama", 2, quantization="nf5")
    with pytest.raises(UserError, match="blocks of 64 must divide them"):
        problem_of("mixtral", 2, quantization="nf4", config={"intermediate_size": 100})
    pissa = {"init_lora_weights": "pissa"}
    # Also where the same split was looked at before with the base whole.
    choice = choose(problem_of("llama", 2, lora=pissa))
    assert {str(p.topology) for p in choice.ranked} >= {"dp=2", "tp=2", "tp=2,sp"}
    assert "dp=2,dp_shard" in [name for name, _ in choice.left_out]
    assert not [found for found in choice.ranked if found.topology.dp_shard]
    with pytest.raises(UnsupportedError, match="pissa"):
        choose(problem_of("llama", 2, lora=pissa, quantization="nf4", config=BLOCKS), [Topology.parse("dp=2")])


def test_plan_writes_what_the_base_is_packed_in(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from meshlora.run.config.file import read_run

    model = tmp_path / "config.json"
    model.write_text(json.dumps(twin_config("llama", **WIDE).to_dict()))
    out, numbers = tmp_path / "run.yaml", tmp_path / "plan.json"
    words = ["plan", "--model", str(model), "--gpus", "4", "--gpu", "h100", "--seq", "32", "--quantization", "int8"]
    topology = ["--topology", "dp=4,dp_shard"]
    assert main([*words, *topology, "--simulate", "--out", str(out), "--json", str(numbers)]) == 0
    printed = capsys.readouterr().out
    assert all(word in printed for word in ("as predicted", "and int8 on 4", "gathers of weights"))
    run = read_run(out)
    assert (run.topology, run.model.quantization) == ("dp=4,dp_shard", "int8")
    found = json.loads(numbers.read_text())
    assert found["quantization"] == "int8"
    assert found["topologies"][0]["times_s"]["gathers of weights"] > 0
    assert main(["plan", "--model", str(tmp_path), "--topology", "dp=2", "--quantization", "nf4"]) == 2
    assert "no effect without --gpus" in capsys.readouterr().err


def test_plan_of_products_in_float8_is_faster_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "config.json"
    model.write_text(json.dumps(twin_config("llama", block=192).to_dict()))
    words = ["plan", "--model", str(model), "--gpus", "1", "--gpu", "h100", "--seq", "128", "--dtype", "bfloat16"]
    times = {}
    for compute in ("", "fp8", "fp8_backward"):
        more = ["--compute", compute] if compute else []
        assert main([*words, *more, "--json", str(tmp_path / "plan.json"), "--out", str(tmp_path / "run.yaml")]) == 0
        found = json.loads((tmp_path / "plan.json").read_text())
        assert found["compute"] == (compute or None)
        times[compute] = found["topologies"][0]
        assert ("  compute: " in (tmp_path / "run.yaml").read_text()) == bool(compute)
    assert "llama in bfloat16 with products in fp8_backward" in capsys.readouterr().out
    assert times["fp8"]["memory_bytes"] < times[""]["memory_bytes"]


@pytest.mark.parametrize("family", ["bamba", "jamba"])
def test_kinds_of_layers_that_a_configuration_derives_from_other_fields_are_those_of_the_layers_kept(
    family: str,
) -> None:
    problem = problem_of(family, 1)
    config = shrink(problem.model).model.config
    assert len(config.layer_types) == len(shrink(problem.model).model.model.layers)
    assert set(config.layer_types) == set(problem.model.config.layer_types)


@pytest.mark.parametrize("family", ["gemma4_text", "gemma3n_text"])
def test_no_layer_is_left_out_where_one_matrix_has_inputs_for_all(family: str) -> None:
    """Eight layers of two kinds, of which one each would run elsewhere."""
    problem = problem_of(family, 1, config={"num_hidden_layers": 8}, lora={"target_modules": ["q_proj"]})
    assert shrink(problem.model).num_kinds == 8
    (only,) = choose(problem, [Topology()]).ranked
    assert only.memory_bytes > 0


def test_a_step_that_needs_values_is_refused_in_words() -> None:
    """jetmoe's experts ask for a list of what tensors without content have not."""
    problem = problem_of("jetmoe", 1)
    with pytest.raises(UnsupportedError, match=r"jetmoe.*tensors without content \(RuntimeError: tolist"):
        choose(problem, [Topology()])


def test_experts_of_a_tower_send_nothing_of_a_text() -> None:
    problem = problem_of("ernie4_5_vl_moe", 1, lora={"target_modules": r".*language_model.*q_proj"})
    (only,) = choose(problem, [Topology()]).ranked
    assert only.memory_bytes > 0


@pytest.mark.parametrize("name", ["Qwen--Qwen3-30B-A3B-GPTQ-Int4", "Qwen--Qwen3-8B-AWQ"])
def test_folder_in_few_bits_is_planned_as_it_is_kept(name: str, tmp_path: Path) -> None:
    """Its files say which weights stay packed; --one-gpu asks for the same folder again."""
    folder, file = write_published_twin(read_published(name), tmp_path / "model"), tmp_path / "plan.json"
    command = ["plan", "--model", str(folder), "--quantization", "keep", "--seq", "64"]
    assert main([*command, "--gpus", "1", "--gpu", "h100", "--json", str(file)]) == 0
    memory = json.loads(file.read_text())["topologies"][0]["memory"]
    held = meshlora.load(folder, quantization="keep", device="cpu")
    tensors = {id(t): t for t in (*held.parameters(), *held.buffers())}
    assert memory["weights"] + memory["buffers"] == sum(t.nbytes for t in tensors.values())
    assert main([*command, "--one-gpu", "h100"]) == 0

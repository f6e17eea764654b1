"""benchmarks/gpu.py without a GPU: its arithmetic, and all of its code at tiny sizes."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SCRIPTS = ("gpu", "gpu_kernels", "gpu_machine", "gpu_ranks", "gpu_shapes", "gpu_systems", "processes", "table")


@pytest.fixture(scope="module")
def gpu() -> Iterator[ModuleType]:
    """The module, with its folder in the path as a script has it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        import gpu

        yield gpu
        for name in SCRIPTS:
            patch.delitem(sys.modules, name)


@pytest.fixture
def gpu_systems(gpu: ModuleType) -> ModuleType:
    return sys.modules[gpu.System.__module__]


def test_shapes_are_those_of_the_models_they_are_named_after(gpu: ModuleType) -> None:
    eight, one, experts, long, longest, longer, quantized = gpu.real_shapes()
    assert "8.030 billion parameters" in gpu.describe(eight)  # of meta-llama/Llama-3.1-8B
    assert "1.236 billion parameters" in gpu.describe(one)  # of meta-llama/Llama-3.2-1B
    assert experts.config.num_hidden_layers == 12
    assert experts.has_experts
    assert not eight.has_experts
    assert (long.seq_len, long.recompute, long.config.num_hidden_layers) == (32_768, True, 32)
    assert (longest.seq_len, longest.recompute, longest.config.num_hidden_layers) == (131_072, True, 32)
    assert (longer.seq_len, longer.config.num_hidden_layers) == (8192, 32)
    assert (quantized.is_quantized, quantized.config.num_hidden_layers) == (True, 8)
    # 2 x 7.5 billion matrix entries forward and as many for the gradient of the input; attention 3.2 G, LoRA 0.25 G.
    assert gpu.flops_per_token(eight, [4096]) == pytest.approx(33.5e9, rel=1e-3)


def test_a_base_in_few_bits_is_compared_with_peers_of_its_kind_and_with_a_plain_one(gpu: ModuleType) -> None:
    shape = gpu.real_shapes()[-1]
    pairs = {(ours.name, peer.name) for ours, peer in gpu._pairs(shape, [s.name for s in gpu.systems_of(shape)])}
    of_ours = {"meshlora", "meshlora, nf4", "meshlora, fp8", "meshlora, mxfp4"}
    assert pairs == {*((name, "PEFT + SDPA") for name in of_ours), ("meshlora, nf4", "PEFT QLoRA, nf4")}


def test_packed_rows_fill_the_row_and_no_label_crosses_a_border(gpu: ModuleType) -> None:
    shape = gpu.tiny(gpu.real_shapes()[1])
    one, packed = gpu.inputs_of(shape, torch.device("cpu"))
    assert one.ours.input_ids.shape == one.ids.shape, "attention takes rows of one sequence at once in a record, too"
    assert one.num_trained == one.num_tokens - shape.batch_size
    assert packed.ours.input_ids.shape == (1, packed.num_tokens)
    assert sum(packed.lengths) == shape.seq_len == packed.ids.shape[1]
    assert len(set(gpu.packed_lengths(4096))) > 3
    last = torch.tensor(packed.lengths).cumsum(0) - 1
    assert (packed.shifted[:, last] == -100).all()
    assert packed.num_trained == packed.num_tokens - shape.batch_size * len(packed.lengths)
    assert (packed.position_ids[:, (last + 1)[:-1]] == 0).all()


def test_what_a_peer_changes_in_transformers_holds_in_its_turns_only(gpu: ModuleType, gpu_systems: ModuleType) -> None:
    module = ModuleType("modeling")
    module.norm = "theirs"  # type: ignore[attr-defined]

    def apply() -> None:
        module.norm = "fast"  # type: ignore[attr-defined]
        module.extra = "new"  # type: ignore[attr-defined]

    patch = gpu_systems.ModulePatch(module, apply)
    assert module.norm == "theirs"
    assert not hasattr(module, "extra")
    with patch.applied():
        assert (module.norm, module.extra) == ("fast", "new")
    assert module.norm == "theirs"


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_dry_run_measures_every_system_at_tiny_sizes(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "found.json"
    arguments = ["--dry-run", "--no-compile", "--kernels", "--turns", "1", "--shape", "moe", "--json", str(file)]
    monkeypatch.setattr(sys, "argv", ["benchmarks/gpu.py", *arguments])
    assert gpu.main() == 0
    printed = capsys.readouterr().out
    assert "plan: " in printed
    assert "8.100 billion parameters" in printed
    document = json.loads(file.read_text())
    assert document["parity"]["difference"] < 1e-5
    peers = {row["peer_name"] for row in document["rows"]}
    assert peers == {"PEFT + SDPA", "PEFT + SDPA, bf16 factors", "matmul ceiling"}
    found = document["details"]["shapes"]["moe"]
    # Where liger-kernel is installed, it needs a GPU, as records of joined rows do.
    of_gpus = {"meshlora + liger", "meshlora + fused", "meshlora + fused, recorded", "meshlora, recorded, packed"}
    assert set(found["left_out"]) == {"PEFT + liger-kernel", *of_gpus}
    assert "meshlora, recorded" in found["runs"]["one sequence"]
    assert "meshlora, recorded" not in found["runs"]["packed"], "without a record it is another system"
    assert set(found["kernels"]) == {"meshlora", "meshlora, recorded", "PEFT + SDPA", "PEFT + SDPA, bf16 factors"}
    assert found["kernels"]["meshlora"]["classes"]["gemm"][1] > 0
    assert all(document["details"][name] > 0 for name in ("bf16_flops", "copy_bytes_s", "launch_s"))


def test_a_replay_is_compared_and_an_input_without_a_record_ends_no_other(
    gpu: ModuleType, gpu_systems: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape, cpu = gpu.tiny(gpu.real_shapes()[1]), torch.device("cpu")
    bench = gpu.Bench(shape, gpu.Machine(cpu), torch.bfloat16, tmp_path, "eager")
    bench.build((gpu_systems.OURS, gpu_systems.OF_RECORDS[-1]))
    eager, recorded = bench.candidates.values()
    one, packed = gpu.inputs_of(shape, cpu)
    replays, replay = list[int](), gpu_systems.Graphs._replay
    monkeypatch.setattr(gpu_systems.Graphs, "_replay", lambda *given: replays.append(1) or replay(*given))
    wanted, gradients = bench._first_gradients(eager, one)
    loss, found = bench._first_gradients(recorded, one)
    assert len(replays) == 2, "the first is compared with an eager step, the second with PEFT"
    assert loss == pytest.approx(wanted, rel=1e-2)
    for name, gradient in gradients.items():
        assert float((found[name] - gradient).norm()) < 0.02 * float(gradient.norm())
    assert not recorded.graphs, "their memory would count in the turns"
    bench.warm_up([packed, one])
    assert "has no kernel here that takes all sequences at once" in bench.left_out["meshlora, recorded, packed"]
    runs = bench.measure([packed, one], range(1))
    # On under this name without a record it would be another system.
    assert {name: [*by] for name, by in runs.items()} == {
        "packed": ["meshlora"],
        "one sequence": ["meshlora", "meshlora, recorded"],
    }
    assert len(recorded.graphs["one sequence"]._records) == 1


def test_what_no_gpu_has_run_yet_takes_no_number_of_another_away(
    gpu: ModuleType, gpu_systems: ModuleType, tmp_path: Path
) -> None:
    shape = gpu.tiny(gpu.real_shapes()[0])
    bench = gpu.Bench(shape, gpu.Machine(torch.device("cpu")), torch.bfloat16, tmp_path, "eager")

    def fails() -> None:
        raise gpu.ParityError("the loss", 1.0, 0.1)

    for system in (gpu_systems.RECORDED, gpu_systems.FUSED, gpu_systems.FLOAT8):
        assert bench._attempt(system, fails) == []
        assert bench.left_out[system.name].startswith("ParityError: ")
    for system in (gpu_systems.OURS, gpu_systems.OURS_LIGER, gpu_systems.KEPT, gpu_systems.PEER):
        with pytest.raises(gpu.ParityError):
            bench._attempt(system, fails)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_bases_in_few_bits_are_measured_beside_qlora(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file, systems = tmp_path / "found.json", ["meshlora, nf4", "PEFT QLoRA, nf4"]
    arguments = ["--dry-run", "--shape", "quantized", "--turns", "1", "--json", str(file)]
    arguments += [word for system in systems for word in ("--system", system)]
    monkeypatch.setattr(sys, "argv", ["benchmarks/gpu.py", *arguments])
    assert gpu.main() == 0
    document = json.loads(file.read_text())
    assert document["parity"]["difference"] < 1e-5, "both round the base to the same numbers"
    assert list(document["details"]["shapes"]["quantized"]["runs"]["one sequence"]) == systems
    peers = [(row["ours_name"], row["peer_name"]) for row in document["rows"]]
    assert peers == [*2 * [tuple(systems)], ("meshlora, nf4", "matmul ceiling")]


def test_in_bf16_each_side_is_held_against_fp32_and_not_against_the_other(
    gpu: ModuleType, gpu_systems: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """32 layers of random weights make of two roundings a tenth: each is right, and they differ by more than that."""
    exact = torch.randn(10_000, generator=torch.Generator().manual_seed(0))
    ours, theirs = 0.1 * torch.randn(2, 10_000, generator=torch.Generator().manual_seed(1))
    bench = gpu.Bench(gpu.tiny(gpu.real_shapes()[0]), gpu.Machine(torch.device("cpu")), torch.bfloat16, Path(), "eager")
    rounded = [(10.0, {"a": exact + theirs})]

    def off(own: torch.Tensor, loss: float = 10.0) -> float:
        monkeypatch.setattr(bench, "_first_gradients", lambda *_: (loss, {"a": own}))
        candidate = gpu_systems.Candidate(gpu_systems.OURS, torch.nn.Linear(1, 1), torch.bfloat16)
        (inputs, _) = gpu.inputs_of(bench.shape, torch.device("cpu"))
        found: float = bench._difference(candidate, inputs, (10.0, {"a": exact}), rounded)
        return found

    assert float((ours - theirs).norm() / exact.norm()) > 0.13
    assert 0.9 < off(exact + ours) < 1.1
    for wrong in (1.5 * exact, exact * float("nan")):
        with pytest.raises(gpu.ParityError, match="meshlora, 8b, one sequence, bfloat16, a, against PEFT in fp32"):
            off(wrong)
    with pytest.raises(gpu.ParityError, match="bfloat16, loss, against PEFT in fp32"):
        off(exact + ours, loss=10.1)


def test_time_in_which_kernels_overlap_counts_once_and_copies_are_no_arithmetic(gpu: ModuleType) -> None:
    import gpu_kernels

    spans = [(0.0, 2e6, "nvjet_sm90_tst_320x128_badd"), (1e6, 3e6, "fmha_reduce_head"), (5e6, 6e6, "Memset (Device)")]
    assert gpu_kernels.busy_s(spans) == 4.0
    assert gpu_kernels.by_class(spans) == {"gemm": (2.0, 1), "attention": (2.0, 1), "copy": (1.0, 1)}
    copy = "void at::native::vectorized_elementwise_kernel<8, at::native::bfloat16_copy_kernel_cuda(...)>"
    assert [gpu_kernels.class_of(name) for name in (copy, copy.replace("copy", "mul"))] == ["copy", "elementwise"]


@pytest.mark.long
def test_a_wrong_adapter_ends_the_benchmark(
    gpu: ModuleType, gpu_systems: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = gpu_systems.finish_gradients_on_device
    monkeypatch.setattr(
        gpu_systems, "finish_gradients_on_device", lambda mesh, factors, own: right(mesh, factors, [own[0] + 1])
    )
    monkeypatch.setattr(sys, "argv", ["benchmarks/gpu.py", "--dry-run", "--no-compile", "--shape", "1b"])
    assert gpu.main() == 1
    captured = capsys.readouterr()
    assert "PARITY FAILED: meshlora, 1b, one sequence, float32" in captured.err
    assert "tokens/s |" not in captured.out

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
SCRIPTS = ("gpu", "gpu_shapes", "processes", "table")


@pytest.fixture(scope="module")
def gpu() -> Iterator[ModuleType]:
    """The module, with its folder in the path as a script has it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        import gpu

        yield gpu
        for name in SCRIPTS:
            patch.delitem(sys.modules, name)


def test_shapes_are_those_of_the_models_they_are_named_after(gpu: ModuleType) -> None:
    eight, one, experts = gpu.real_shapes()
    assert "8.030 billion parameters" in gpu.describe(eight)  # of meta-llama/Llama-3.1-8B
    assert "1.236 billion parameters" in gpu.describe(one)  # of meta-llama/Llama-3.2-1B
    assert experts.config.num_hidden_layers == 12
    assert experts.has_experts
    assert not eight.has_experts
    # 2 x 7.5 billion matrix entries forward and as many for the gradient of the input; attention 3.2 G, LoRA 0.25 G.
    assert gpu.flops_per_token(eight, [4096]) == pytest.approx(33.5e9, rel=1e-3)


def test_packed_rows_fill_the_row_and_no_label_crosses_a_border(gpu: ModuleType) -> None:
    shape = gpu.tiny(gpu.real_shapes()[1])
    _, packed = gpu.inputs_of(shape, torch.device("cpu"))
    assert sum(packed.lengths) == shape.seq_len == packed.ids.shape[1]
    assert len(set(gpu.packed_lengths(4096))) > 3
    last = torch.tensor(packed.lengths).cumsum(0) - 1
    assert (packed.shifted[:, last] == -100).all()
    assert packed.num_trained == packed.num_tokens - shape.batch_size * len(packed.lengths)
    assert (packed.position_ids[:, (last + 1)[:-1]] == 0).all()


def test_what_a_peer_changes_in_transformers_holds_in_its_turns_only(gpu: ModuleType) -> None:
    module = ModuleType("modeling")
    module.norm = "theirs"  # type: ignore[attr-defined]

    def apply() -> None:
        module.norm = "fast"  # type: ignore[attr-defined]
        module.extra = "new"  # type: ignore[attr-defined]

    patch = gpu.ModulePatch(module, apply)
    assert module.norm == "theirs"
    assert not hasattr(module, "extra")
    with patch.applied():
        assert (module.norm, module.extra) == ("fast", "new")
    assert module.norm == "theirs"


@pytest.mark.filterwarnings("ignore")
def test_dry_run_measures_every_system_at_tiny_sizes(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "found.json"
    arguments = ["--dry-run", "--no-compile", "--shape", "moe", "--json", str(file)]
    monkeypatch.setattr(sys, "argv", ["benchmarks/gpu.py", *arguments])
    assert gpu.main() == 0
    printed = capsys.readouterr().out
    assert "plan: " in printed
    assert "8.100 billion parameters" in printed
    document = json.loads(file.read_text())
    assert document["parity"]["difference"] < 1e-5
    peers = {row["peer_name"] for row in document["rows"]}
    assert peers == {"PEFT + SDPA", "PEFT + SDPA, bf16 factors", "matmul ceiling"}
    # Where it is installed, it needs a GPU.
    assert set(document["details"]["shapes"]["moe"]["left_out"]) == {"PEFT + liger-kernel"}


def test_a_wrong_adapter_ends_the_benchmark(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = gpu.finish_gradients_on_device
    monkeypatch.setattr(
        gpu, "finish_gradients_on_device", lambda mesh, factors, own: right(mesh, factors, [own[0] + 1])
    )
    monkeypatch.setattr(sys, "argv", ["benchmarks/gpu.py", "--dry-run", "--no-compile", "--shape", "1b"])
    assert gpu.main() == 1
    captured = capsys.readouterr()
    assert "PARITY FAILED: meshlora, 1b, one sequence, float32" in captured.err
    assert "tokens/s |" not in captured.out

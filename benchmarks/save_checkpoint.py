"""What a checkpoint costs whose full tensors rank 0 gathers and writes: seconds by part, and memory by rank.

A mixture with LoRA on all of its experts, whose adapters are large; random weights, two ranks on CPUs, each with half
of the experts. Memory is the peak of a process during the save above what it had before.

    TMPDIR=FOLDER python benchmarks/save_checkpoint.py [--rank 32] [--experts 64]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from peft import LoraConfig

import meshlora
from meshlora.adapter.attach import active_factors
from meshlora.adapter.formats.peft_format import save_adapter
from meshlora.run.checkpoint.manifest import Manifest, write_manifest
from meshlora.run.checkpoint.state import state_writer
from meshlora.verify.pool import Pool
from meshlora_judge.twin import twin_config

SIZES = {"num_hidden_layers": 4, "hidden_size": 512, "moe_intermediate_size": 512, "vocab_size": 1024}


def measure(folder: str, rank: int, experts: int) -> dict[str, float]:
    """Of one of two ranks: seconds and memory of a checkpoint, the adapter alone and with the training state."""
    config = twin_config("qwen3_moe", num_experts=experts, **SIZES)
    lora = LoraConfig(r=rank, target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"])
    model = meshlora.load(config, lora=lora, topology="dp=2,ep=2", dtype="bfloat16")
    parameters = [factor.parameter for factor in active_factors(model)]
    optimizer = torch.optim.AdamW(parameters, fused=True)
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    meshlora.finish_gradients(model, num_tokens=1)
    optimizer.step()
    found = {"of_this_rank_mb": sum(p.numel() * p.element_size() for p in parameters) / 1e6}
    for name in ("adapter", "checkpoint"):
        before = _begin()
        started = time.perf_counter()
        state = state_writer(model, optimizer) if name == "checkpoint" else None
        manifest = Manifest(kind="initial", step=0, steps=1, updates=0, identity={}, versions={})
        if state is not None:
            manifest = replace(manifest, kind="checkpoint", step=1, topology="dp=2,ep=2")
        found[f"{name}_gather_moments_s"] = time.perf_counter() - started
        save_adapter(model, Path(folder) / name, also=partial(_add, state, manifest))
        found[f"{name}_s"] = time.perf_counter() - started
        found[f"{name}_peak_mb"] = _status("VmHWM") - before
        del state
    return found


def _add(state: Callable[[Path], None] | None, manifest: Manifest, folder: Path) -> None:
    """What a run writes beside the adapter."""
    if state is not None:
        state(folder)
    write_manifest(folder, manifest)


def _begin() -> float:
    """Let the peak of this process begin anew; what it holds, in MB."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(key: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1e3 for line in lines if line.startswith(f"{key}:"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--experts", type=int, default=64)
    options = parser.parse_args()
    pool = Pool(2)
    try:
        with tempfile.TemporaryDirectory() as folder:
            for rank, found in enumerate(pool.run(measure, folder, options.rank, options.experts, timeout_s=1200)):
                print(f"rank {rank}: " + "  ".join(f"{name} {value:.1f}" for name, value in found.items()))
            for name in ("adapter", "checkpoint"):
                size = sum(file.stat().st_size for file in (Path(folder) / name).iterdir())
                print(f"{name}: {size / 1e6:.0f} MB on disk")
    finally:
        pool.close()


if __name__ == "__main__":
    main()

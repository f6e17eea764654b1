"""Train the same run on several topologies and on one process by transformers + peft, and print how far they are apart.

    .venv/bin/python scripts/same_adapter.py --data FILE [--steps 200] [--dtype float64 float32]

In float64 (lifted) each factor must be within 1e-5 relative of the one-process run after all steps; in float32 the loss
of every step within 1e-3. Exit code 0 when all are, 1 when one is not.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch
import yaml
from rich.console import Console
from rich.table import Table
from transformers.utils import logging

from meshlora.config import read_run
from meshlora.oracle.compare import compare_adapters, largest_loss_gap, read_losses
from meshlora.oracle.reference import train_run
from meshlora.plan.topology import Topology
from meshlora.train.prepare import prepare

ROOT = Path(__file__).resolve().parents[1]
FACTOR_LIMIT, LOSS_LIMIT = 1e-5, 1e-3


def main() -> int:
    options = _options()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*")
    table = Table("dtype", "topology", "worst factor, rel.", "largest loss gap", "last loss", "seconds", "same")
    good = True
    with tempfile.TemporaryDirectory() as folder, Console().status("") as status:
        for dtype in options.dtype:
            ours = {}
            for topology in options.topology:
                status.update(f"{dtype}: {topology}")
                ours[topology] = _train(Path(folder), options, dtype, topology)
            status.update(f"{dtype}: transformers + peft on one process")
            losses, reference, seconds = _reference(Path(folder), options, dtype)
            table.add_row(dtype, "transformers + peft", "", "", f"{losses[-1]:.4f}", f"{seconds:.0f}", "")
            for topology, (output, seconds) in ours.items():
                worst = compare_adapters(output / "adapter", reference)
                curve = read_losses(output / "metrics.jsonl")
                gap = largest_loss_gap(curve, losses)
                same = gap <= LOSS_LIMIT and (dtype != "float64" or worst.relative <= FACTOR_LIMIT)
                good &= same
                cells = (f"{worst.relative:.1e}", f"{gap:.1e}", f"{curve[-1]:.4f}", f"{seconds:.0f}")
                table.add_row(dtype, topology, *cells, "yes" if same else "NO")
    Console(width=max(100, Console().width)).print(table)
    return 0 if good else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", required=True, help="context||completion lines, or JSONL")
    parser.add_argument("--model", default=str(ROOT / "examples" / "tiny_base"))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--dtype", nargs="+", default=["float64", "float32"], choices=["float64", "float32"])
    parser.add_argument("--topology", nargs="+", default=["dp=1", "tp=2", "tp=2,sp", "dp=2"])
    return parser.parse_args()


def _run_file(folder: Path, options: argparse.Namespace, dtype: str, topology: str) -> Path:
    file = folder / f"{dtype}-{topology}.yaml"
    run = {
        "model": {"path": options.model, "dtype": dtype},
        "lora": {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"},
        "data": {"train": options.data, "max_length": 256},
        "train": {
            "output": str(folder / f"{dtype}-{topology}"),
            "steps": options.steps,
            "batch_size": options.batch_size,
            "micro_batch_size": max(1, options.batch_size // 2),
            "lr": 2e-3,
            "warmup_steps": min(10, options.steps // 2),
        },
        "topology": topology,
    }
    file.write_text(yaml.safe_dump(run))
    return file


def _train(folder: Path, options: argparse.Namespace, dtype: str, topology: str) -> tuple[Path, float]:
    """One `meshlora train`; returns (output folder, seconds)."""
    file = _run_file(folder, options, dtype, topology)
    command = [sys.executable, "-m", "meshlora", "train", str(file), "--nproc", str(Topology.parse(topology).world)]
    started = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stderr}")
    return folder / f"{dtype}-{topology}", time.perf_counter() - started


def _reference(folder: Path, options: argparse.Namespace, dtype: str) -> tuple[list[float], Path, float]:
    """The one-process run, from the same initial adapter; returns (losses, adapter folder, seconds)."""
    first = options.topology[0]
    config = read_run(_run_file(folder, options, dtype, first), ["train.overwrite=true"])
    run = prepare(config)
    started = time.perf_counter()
    losses = train_run(
        config,
        run.train_data,
        steps=run.steps,
        pad_token_id=run.pad_token_id,
        adapter=folder / f"{dtype}-{first}" / "initial",
        out=folder / f"{dtype}-reference",
    )
    return losses, folder / f"{dtype}-reference", time.perf_counter() - started


if __name__ == "__main__":
    sys.exit(main())

"""Train the same run on several topologies and on one process by transformers + peft, and print how far they are apart.

    .venv/bin/python scripts/same_adapter.py --data FILE [--steps 200] [--dtype float64 float32]
    .venv/bin/python scripts/same_adapter.py --data FILE --gpt2-tokenizer FOLDER --topology tp=2

With --gpt2-tokenizer the model is a small GPT-2 with random weights and that vocabulary, and the adapter is on q and v
of its fused qkv. The logits of what meshlora saved, loaded by PEFT and by meshlora, are compared too.

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
from typing import Any

import torch
import yaml
from peft import PeftModel
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from transformers.utils import logging

from meshlora.loading.blueprint import make_blueprint
from meshlora.loading.load import load_blueprint
from meshlora.plan.base_options import BaseOptions
from meshlora.run.config.file import read_run
from meshlora.run.together import prepare_run
from meshlora.verify.alone import reference_run
from meshlora_ground.float64 import lift
from meshlora_ground.topology import Topology
from meshlora_judge.compare import compare_adapters, largest_loss_gap, read_losses

ROOT = Path(__file__).resolve().parents[1]
FACTOR_LIMIT, LOSS_LIMIT, LOGITS_LIMIT = 1e-5, 1e-3, 1e-11
ON_ALL: dict[str, Any] = {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"}
ON_Q_AND_V: dict[str, Any] = {"r": 4, "lora_alpha": 32, "target_modules": ["c_attn"], "pieces": {"c_attn": ["q", "v"]}}


def main() -> int:
    options = _options()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*")
    columns = ("worst factor, rel.", "largest loss gap", "last loss", "logits of PEFT and ours", "seconds", "same")
    table = Table("dtype", "topology", *columns)
    good = True
    with tempfile.TemporaryDirectory() as folder, Console().status("") as status:
        if options.gpt2_tokenizer:
            options.model = str(_gpt2(Path(folder), Path(options.gpt2_tokenizer)))
        for dtype in options.dtype:
            ours = {}
            for topology in options.topology:
                status.update(f"{dtype}: {topology}")
                ours[topology] = _train(Path(folder), options, dtype, topology)
            status.update(f"{dtype}: transformers + peft on one process")
            losses, reference, seconds = _reference(Path(folder), options, dtype)
            table.add_row(dtype, "transformers + peft", "", "", f"{losses[-1]:.4f}", "", f"{seconds:.0f}", "")
            for topology, (output, seconds) in ours.items():
                worst = compare_adapters(output / "adapter", reference)
                curve = read_losses(output / "metrics.jsonl")
                gap = largest_loss_gap(curve, losses)
                same = gap <= LOSS_LIMIT and (dtype != "float64" or worst.relative <= FACTOR_LIMIT)
                logits = _logits_gap(options.model, output / "adapter", dtype)
                same = same and logits <= (LOGITS_LIMIT if dtype == "float64" else LOSS_LIMIT)
                good &= same
                cells = (f"{worst.relative:.1e}", f"{gap:.1e}", f"{curve[-1]:.4f}", f"{logits:.1e}", f"{seconds:.0f}")
                table.add_row(dtype, topology, *cells, "yes" if same else "NO")
    Console(width=max(100, Console().width)).print(table)
    return 0 if good else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", required=True, help="context||completion lines, or JSONL")
    parser.add_argument("--model", default=str(ROOT / "examples" / "tiny_base"))
    parser.add_argument("--gpt2-tokenizer", metavar="FOLDER", help="instead of --model: a small GPT-2, q and v only")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--dtype", nargs="+", default=["float64", "float32"], choices=["float64", "float32"])
    parser.add_argument("--topology", nargs="+", default=["dp=1", "tp=2", "tp=2,sp", "dp=2"])
    return parser.parse_args()


def _gpt2(folder: Path, tokenizer: Path) -> Path:
    """A small GPT-2 with random weights beside the tokenizer in `tokenizer`; returns its folder."""
    model = folder / "gpt2"
    fast = PreTrainedTokenizerFast(tokenizer_file=str(tokenizer / "tokenizer.json"), eos_token="<|endoftext|>")
    config = GPT2Config(
        vocab_size=len(fast), n_embd=64, n_layer=2, n_head=4, n_positions=256, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    torch.manual_seed(0)
    GPT2LMHeadModel(config).save_pretrained(model)
    fast.save_pretrained(model)
    return model


@torch.no_grad()
def _logits_gap(model: str, adapter: Path, dtype: str) -> float:
    """How far the logits of PEFT with `adapter` are from ours with it, relative to the largest."""
    ids = torch.arange(48).view(2, 24)
    blueprint = make_blueprint(model, Topology(), BaseOptions(dtype=dtype)).with_folder(adapter)
    ours = load_blueprint(blueprint, device="cpu").eval()
    base = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
    theirs = PeftModel.from_pretrained(base, str(adapter)).eval()
    with lift(dtype == "float64"):
        a, b = (network(input_ids=ids).logits for network in (ours, theirs))
    return float((a - b).abs().max() / b.abs().max())


def _run_file(folder: Path, options: argparse.Namespace, dtype: str, topology: str) -> Path:
    file = folder / f"{dtype}-{topology}.yaml"
    run = {
        "model": {"path": options.model, "dtype": dtype},
        "lora": ON_Q_AND_V if options.gpt2_tokenizer else ON_ALL,
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
    run = prepare_run(config)
    started = time.perf_counter()
    losses = reference_run(
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

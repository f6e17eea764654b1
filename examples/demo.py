"""`make demo`: train an adapter on two processes, look at it, and compare it with what one process produces.

Runs examples/demo.yaml: the embedded base model learns to write docstrings in one house format, in float64 so that the
comparison at the end is exact. Everything it needs ships with the repository.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
import warnings
from pathlib import Path

import torch
from rich.console import Console
from rich.panel import Panel
from rich.text import Text
from transformers.utils import logging

from meshlora import compare_adapters, generate, largest_loss_gap, prepare_run, read_losses, read_run, reference_run

RUN = Path("examples/demo.yaml")
BASE = "examples/tiny_base"
PROMPTS = [  # held out: neither the prompts nor the functions' names occur in the training data
    'def log_last_packets(data, port=0):\n    """',
    'def list_paths(target):\n    """',
]
LIMIT = 1e-5

console = Console(width=min(100, Console().width), highlight=False)


def main() -> int:
    logging.disable_progress_bar()
    warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*")
    torch.set_num_threads(1)
    started = time.perf_counter()
    config = read_run(RUN, ["train.overwrite=true"])
    output = Path(config.train.output)
    shutil.rmtree(output, ignore_errors=True)

    console.rule("1. the base model, before")
    show_samples(None)

    console.rule("2. training on two processes: tp=2, sp")
    command = [sys.executable, "-m", "meshlora", "train", str(RUN), "--nproc", "2"]
    console.print(f"$ meshlora {' '.join(command[3:])}")
    if code := subprocess.run(command, check=False).returncode:
        return code
    losses = read_losses(output / "metrics.jsonl")
    console.print(loss_curve(losses))

    console.rule("3. with the adapter, after")
    show_samples(output / "adapter")

    console.rule("4. the same run on one process, by transformers + peft")
    run = prepare_run(config)
    torch.set_num_threads(2)  # the two cores that the ranks had
    with console.status("training the reference"):
        reference = reference_run(
            config,
            run.train_data,
            steps=run.steps,
            pad_token_id=run.pad_token_id,
            adapter=output / "initial",
            out=output / "reference",
        )
    worst = compare_adapters(output / "adapter", output / "reference")
    same = worst.relative <= LIMIT
    console.print(f"largest difference of the loss in {len(losses)} steps: {largest_loss_gap(losses, reference):.1e}")
    console.print(f"worst factor of the adapter: {worst.relative:.1e} relative  ({worst.name})")
    console.print(f"[bold]{'the same adapter' if same else 'NOT the same adapter'}[/bold] (limit {LIMIT:.0e})")
    console.print(f"{time.perf_counter() - started:.0f} s; the adapter is in {output / 'adapter'}")
    return 0 if same else 1


def show_samples(adapter: Path | None) -> None:
    """What the model makes of the prompts."""
    for prompt, text in zip(PROMPTS, generate(BASE, PROMPTS, adapter=adapter, dtype="float32"), strict=True):
        console.print(Panel(Text.assemble((prompt, "dim"), text.rstrip()), width=90))


def loss_curve(losses: list[float], *, width: int = 72, height: int = 10) -> str:
    """Losses as a block chart: one column for some steps, their mean as its height, in eighths of a line."""
    columns = [losses[len(losses) * i // width : max(len(losses) * i // width + 1, len(losses) * (i + 1) // width)]
               for i in range(min(width, len(losses)))]  # fmt: skip
    means = [sum(c) / len(c) for c in columns]
    top = max(means)
    eighths = [round(m / top * height * 8) for m in means]
    lines = []
    for row in reversed(range(height)):
        label = f"{top * (row + 1) / height:6.2f} " if row % 3 == 0 or row == height - 1 else " " * 7
        lines.append(label + "│" + "".join(" ▁▂▃▄▅▆▇█"[min(8, max(0, e - row * 8))] for e in eighths))
    lines.append(" " * 7 + "└" + "─" * len(means))
    lines.append(" " * 8 + f"loss, step 1 to {len(losses)}: {losses[0]:.3f} -> {losses[-1]:.3f}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())

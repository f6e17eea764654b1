"""Does `model.compute` cost what is learnt? A real model learns the docstrings of examples/, with and without it.

    python scripts/gate_float8.py --model FOLDER [--folder runs/gate] [--seeds 3] [--steps 64]

Each of `none`, `fp8_backward` and `fp8` is trained from each seed, which draws the adapter and the order of the data.
Every adapter is then judged as it will be served, on the plain base: the loss of examples/docstrings/eval.jsonl, and
how many of its first prompts are answered to the letter. A kind passes if its mean loss and its exact answers stay
within those of the plain runs: no worse than the worst of them.

A run that has ended is not repeated: kill it, and start it again.
FOLDER: a checkpoint, such as that which examples/real_model.py writes, a Llama of 135 million parameters.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from meshlora import GenerateConfig, generate

DATA = Path(__file__).parents[1] / "examples/docstrings"
KINDS = ("none", "fp8_backward", "fp8")
RUN: dict[str, Any] = {
    "lora": {"r": 16, "lora_alpha": 32, "target_modules": "all-linear"},
    "data": {"train": str(DATA / "train.jsonl"), "max_length": 256},
    "train": {"batch_size": 8, "micro_batch_size": 8, "lr": 5e-4, "log_every": 1},
    "topology": "dp=1",
    "device": "cpu",
}


class Judged(NamedTuple):
    """An adapter on the plain base: the loss of its last ten steps, that of held-out texts, exact answers."""

    train_loss: float
    eval_loss: float
    exact: int


def main() -> int:
    options = _options()
    found: dict[str, list[Judged]] = {kind: [] for kind in KINDS}
    for seed in range(options.seeds):
        for kind in KINDS:
            found[kind].append(judged(kind, seed, options))
            print(f"seed {seed}, {kind}: {found[kind][-1]}", file=sys.stderr, flush=True)
    print(table(found, options.prompts))
    return 0


def judged(kind: str, seed: int, options: argparse.Namespace) -> Judged:
    """Train, unless it was trained before, and judge."""
    folder = Path(options.folder) / f"{kind}-{seed}"
    result = folder / "judged.json"
    if result.exists():
        return Judged(**json.loads(result.read_text()))
    folder.mkdir(parents=True, exist_ok=True)
    given = {
        **RUN,
        "model": {"path": options.model, "dtype": options.dtype},
        "train": {**RUN["train"], "output": str(folder / "run"), "steps": options.steps, "seed": seed},
    }
    (folder / "plain.yaml").write_text(yaml.safe_dump(given))
    if kind != "none":
        given["model"]["compute"] = kind
    (folder / "run.yaml").write_text(yaml.safe_dump(given))
    started = time.monotonic()
    if not (folder / "run/adapter").exists():
        _meshlora("train", folder / "run.yaml", "--no-preflight", "--resume", "auto")
    rows = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row][-10:]
    found = Judged(statistics.mean(losses), _eval_loss(folder), _exact(folder, options))
    print(f"{time.monotonic() - started:.0f} s", file=sys.stderr)
    result.write_text(json.dumps(found._asdict()))
    return found


def _eval_loss(folder: Path) -> float:
    """Of the adapter on the plain base."""
    out = folder / "evaluated.json"
    words = ("--adapter", folder / "run/adapter", "--data", DATA / "eval.jsonl", "--json", out)
    _meshlora("evaluate", folder / "plain.yaml", *words)
    loss: float = json.loads(out.read_text())["loss"]
    return loss


def _exact(folder: Path, options: argparse.Namespace) -> int:
    """How many of the first prompts are answered to the letter, by the likeliest token each time."""
    rows = [json.loads(line) for line in (DATA / "eval.jsonl").read_text().splitlines()[: options.prompts]]
    prompts, wanted = [row["prompt"] for row in rows], [row["completion"] for row in rows]
    settings = GenerateConfig(max_new_tokens=128, batch_size=16)
    adapter = folder / "run/adapter"
    texts = generate(options.model, prompts, adapter=adapter, options=settings, dtype=options.dtype)
    return sum(text.strip() == answer.strip() for text, answer in zip(texts, wanted, strict=True))


def _meshlora(*words: Any) -> None:
    subprocess.run([sys.executable, "-m", "meshlora", *map(str, words)], check=True, stdout=subprocess.DEVNULL)


def table(found: dict[str, list[Judged]], prompts: int) -> str:
    """A row for each kind: its seeds, and whether it passes."""
    plain = found["none"]
    worst_loss, fewest = max(one.eval_loss for one in plain), min(one.exact for one in plain)
    lines = [f"| `model.compute` | held-out loss, by seed | mean | exact of {prompts}, by seed | mean | passes |"]
    lines.append("|---|---|---|---|---|---|")
    for kind, each in found.items():
        loss, exact = (statistics.mean(column) for column in list(zip(*each, strict=True))[1:])
        losses = ", ".join(f"{one.eval_loss:.4f}" for one in each)
        numbers = ", ".join(str(one.exact) for one in each)
        passes = "–"
        if kind != "none":
            passes = "yes" if loss <= worst_loss and exact >= fewest else "no"
        lines.append(f"| {kind} | {losses} | {loss:.4f} | {numbers} | {exact:.1f} | {passes} |")
    return "\n".join(lines)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True, metavar="FOLDER")
    parser.add_argument("--folder", default="runs/gate", help="for the runs")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=48)
    parser.add_argument("--dtype", default="bfloat16", help="of the base")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

"""Run files of tests: a small run on the example's base, and what a test has otherwise; metrics of its output."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import yaml

EXAMPLES = Path(__file__).parents[1] / "examples"
TINY = EXAMPLES / "tiny_base"


def write_run_file(file: Path, **groups: Any) -> Path:
    """Write a run file, with data, cache and output beside it, the latter under its name; returns it.

    groups: of the run file. The keys of `model`, `data` and `train` replace single ones of ours; None: no such group.
    """
    data, output = file.with_name("train.jsonl"), file.with_suffix("")
    tree: dict[str, Any] = {
        "model": {"path": str(TINY)},
        "data": {"train": str(data), "max_length": 64, "cache_dir": str(file.with_name("cache"))},
        "train": {"output": str(output), "steps": 3, "batch_size": 4},
        "lora": {"r": 4, "target_modules": "all-linear"},
    }
    for name, values in groups.items():
        tree[name] = tree[name] | values if name in ("model", "data", "train") else values
    file.write_text(yaml.safe_dump({name: values for name, values in tree.items() if values is not None}))
    return file


def copy_lines(name: str, file: Path, start: int, stop: int) -> None:
    """Some of the records of `examples/docstrings/NAME.jsonl`."""
    lines = (EXAMPLES / "docstrings" / f"{name}.jsonl").read_text().splitlines(keepends=True)
    file.write_text("".join(lines[start:stop]))


def copy_tokenizer(folder: Path) -> None:
    """The tokenizer of `TINY` into the folder of another model."""
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(TINY / name, folder)


def metrics_of(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def untimed_metrics_of(output: Path) -> list[dict[str, Any]]:
    """`metrics_of` without what differs from run to run."""
    own = ("step_time_s", "peak_memory_bytes")
    return [{key: value for key, value in line.items() if key not in own} for line in metrics_of(output)]

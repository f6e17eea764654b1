"""The commands that draw: `meshlora plot`, and `meshlora check --plot`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add_pictures(commands: Any) -> None:
    """Add `plot` to the commands of the parser."""
    plot = commands.add_parser("plot", help="draw loss, learning rate, gradient norm and speed of runs into one file")
    plot.add_argument("runs", nargs="+", metavar="RUN", help="output folder of a run, or its metrics.jsonl")
    plot.add_argument("--out", default="runs.png", metavar="FILE", help=".png, .svg, .pdf or .html (default runs.png)")
    plot.set_defaults(run=_plot)


def plot_schedule_of(run: Any, file: str) -> None:
    """Draw the learning rate of every step of a prepared run."""
    from meshlora.train.optimizer import learning_rate
    from meshlora.train.watch.plot import plot_schedule

    options = run.config.train
    rates = [learning_rate(step, options=options, steps=run.steps) for step in range(run.steps)]
    plot_schedule(rates, Path(file), title=f"{options.schedule}, {run.steps:,} steps")


def _plot(options: argparse.Namespace) -> None:
    from meshlora.common.console import Console
    from meshlora.train.watch.plot import plot_runs

    plot_runs([Path(run) for run in options.runs], Path(options.out))
    Console().say(f"drawn: {options.out}")

"""`meshlora plot`: its arguments. The drawing is in `meshlora_extra.plot`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add(commands: Any) -> None:
    plot = commands.add_parser("plot", help="draw loss, learning rate, gradient norm and speed of runs into one file")
    plot.add_argument("runs", nargs="+", metavar="RUN", help="output folder of a run, or its metrics.jsonl")
    plot.add_argument("--out", default="runs.png", metavar="FILE", help=".png, .svg, .pdf or .html (default runs.png)")
    plot.set_defaults(run=_plot)


def _plot(options: argparse.Namespace) -> None:
    from meshlora_extra.plot import plot_runs
    from meshlora_ground.console import Console

    plot_runs(list(map(Path, options.runs)), Path(options.out))
    Console().say(f"drawn: {options.out}")

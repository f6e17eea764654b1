"""`meshlora lr-find`: a sweep of learning rates on the run of a run file.

Does not own: the rule (`meshlora_extra.sweep`), the run, which is `meshlora train`'s and leaves nothing (`cli.train`).
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshlora.cli import train
from meshlora.cli.arguments import add_run_file, run_file_words
from meshlora_ground.errors import MeshloraError, UserError
from meshlora_ground.parser import Parser

_ROWS = 12
# The rates are one argument of each rank, and Linux has none of 128 KiB: 26 characters a step at most.
_MOST_STEPS = 5_000
# What a sweep leaves out of the run: everything between its steps, and its end.
_WITHOUT = {
    **dict.fromkeys(("warmup_steps", "warmup_ratio", "min_lr", "timescale", "decay_steps"), "0"),
    **dict.fromkeys(("eval_every", "save_every", "sample_every", "keep_last"), "0"),
    **dict.fromkeys(("warmup_from_zero", "merge_at_end", "keep_best", "overwrite"), "false"),
    **dict.fromkeys(("epochs", "routing_record", "routing_replay"), "null"),
    **dict.fromkeys(("early_stopping", "on_spike"), "{}"),
}
_WITHOUT |= {"num_cycles": "1", "power": "1", "decay_type": "linear", "track": "[]"}
_WITHOUT |= {"on_nonfinite": "skip", "log_every": "10"}
_WITHOUT_DATA = ("eval", "eval_limit", "sample_prompts")


def add(commands: Any) -> None:
    find = commands.add_parser(
        "lr-find",
        help="try learning rates in one short run, and suggest one",
        description="Trains the run of a run file for some steps while the learning rate rises, prints losses and a "
        "suggestion with its rule, and leaves no adapter and no checkpoint.",
    )
    add_run_file(find, example="train.batch_size=32")
    find.add_argument("--nproc", type=int, default=1, metavar="N", help="ranks on this machine (default 1)")
    find.add_argument("--from", type=float, default=1e-6, metavar="X", dest="lowest", help="first rate (default 1e-6)")
    find.add_argument("--to", type=float, default=1e-1, metavar="X", dest="highest", help="last rate (default 1e-1)")
    find.add_argument("--steps", type=int, default=100, metavar="N", help="optimizer steps (default 100)")
    find.add_argument("--plot", metavar="FILE", help="draw it into a .png, .svg, .pdf or .html")
    find.add_argument("--json", metavar="FILE", help="write rates, losses and the suggestion")
    find.add_argument("--no-preflight", action="store_true", help="as in meshlora train")
    find.set_defaults(run=_find)


def _find(options: argparse.Namespace) -> None:
    from meshlora.processes.launchers import launcher_place
    from meshlora_extra.plot import check_picture, plot_sweep
    from meshlora_extra.sweep import RULE, rates_of, sweep_of
    from meshlora_ground.console import Console
    from meshlora_ground.files import check_result_file, write_json_atomically

    if options.steps > _MOST_STEPS:
        raise UserError(f"--steps {options.steps}", f"a sweep has at most {_MOST_STEPS:,}")
    rates = rates_of(options.lowest, options.highest, options.steps)
    if launcher_place() is not None:
        raise UserError("meshlora lr-find inside a launcher", "it starts ranks of its own", "give --nproc N")
    if options.plot:
        check_picture(Path(options.plot))
    if options.json:
        check_result_file(Path(options.json), f"--json {options.json}")
    console = Console()
    with tempfile.TemporaryDirectory(prefix="meshlora-lr-find-") as folder:
        output = Path(folder) / "run"
        failed = _run(options, rates, output)
        losses = _losses(output / "metrics.jsonl")
        if failed is not None and not losses:
            raise failed
    sweep = sweep_of(rates, losses)
    if failed is not None:
        console.say(f"the run ended at {rates[min(len(losses), len(rates) - 1)]:.2g} ({failed})")
    console.print(_table(sweep))
    if sweep.note:
        console.say(f"note: {sweep.note}")
    console.say("nothing of the run is kept")
    console.say(f"suggested: train.lr: {sweep.suggested:g}, {RULE}")
    if options.plot:
        plot_sweep(sweep, Path(options.plot), title=f"{Path(options.file).name}: suggested {sweep.suggested:g}")
        console.say(f"drawn: {options.plot}")
    if options.json:
        found = {"rates": [*sweep.rates], "losses": [*sweep.losses], "smoothed": [*sweep.smooth]}
        write_json_atomically(Path(options.json), {**found, "suggested": sweep.suggested, "rule": RULE})


def _run(options: argparse.Namespace, rates: Sequence[float], output: Path) -> MeshloraError | None:
    """Train, with the learning rate of each step as in `rates`; returns the error of a run that broke off. Raises:
    MeshloraError: it was asked to stop: its losses are those of too few rates."""
    from meshlora.run.config.file import read_run

    points = ", ".join(f"{step}: {rate!r}" for step, rate in enumerate(rates))
    own = {**_WITHOUT, "schedule": "cycle", "cycle": f"{{{points}}}", "steps": f"{len(rates)}", "lr": f"{rates[-1]!r}"}
    own |= {"output": json.dumps(str(output))}
    overrides = [f"train.{name}={value}" for name, value in own.items()]
    overrides += [*(f"data.{name}=null" for name in _WITHOUT_DATA), "data.eval_categories=all", "generate={}"]
    parser = Parser(prog="meshlora train")
    train.add_training(parser, command="train")
    asked = run_file_words(options.file, [*options.overrides, *overrides])
    asked += ["--nproc", str(options.nproc), *["--no-preflight"] * options.no_preflight]
    words = parser.parse_args(asked, argparse.Namespace(words=options.words))
    read_run(words.file, words.overrides)  # refuses several adapters
    try:
        is_done = train.start(words)
    except UserError:
        raise
    except MeshloraError as error:
        return error
    if not is_done:
        raise MeshloraError("the sweep was stopped before its last rate, and suggests nothing")
    return None


def _losses(file: Path) -> list[float]:
    """The losses of the steps, up to the first that is not finite."""
    from meshlora.run.watch.metrics import records_until

    found: list[float] = []
    for step in records_until(file, _MOST_STEPS):
        if "eval_tokens" in step:
            continue
        if step.get("skipped") or "loss" not in step:
            break
        found.append(float(step["loss"]))
    return found


def _table(sweep: Any) -> Any:
    """Some of the steps, at equal ratios of their rates."""
    from rich.table import Table

    table = Table("learning rate", "loss", "smoothed", box=None, header_style="bold")
    last = len(sweep.losses) - 1
    for number in range(min(_ROWS, last + 1)):
        step = round(number * last / (_ROWS - 1)) if last >= _ROWS else number
        table.add_row(f"{sweep.rates[step]:.1e}", f"{sweep.losses[step]:.4f}", f"{sweep.smooth[step]:.4f}")
    return table

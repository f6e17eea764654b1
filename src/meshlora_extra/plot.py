"""Plots of runs: the content of `metrics.jsonl`, the learning-rate schedule and the lengths of sequences.

Does not own: recording (`run.watch.metrics`), the schedule (`run.optimizer`), numbers of lengths (`reading.summary`).
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshlora_extra.sweep import Sweep
from meshlora_ground.errors import UserError, did_you_mean
from meshlora_ground.files import check_result_file, write_atomically

FORMATS = (".png", ".svg", ".pdf", ".html")
_PAGE = '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<title>meshlora</title>\n{}\n</html>\n'
# Fields read of a step, and of an evaluation.
_FIELDS = {"loss": ("step", "loss", "lr", "grad_norm", "tokens", "step_time_s"), "eval_loss": ("step", "eval_loss")}
# Panel -> its value for one step.
_PANELS: Mapping[str, Callable[[Mapping[str, float]], float]] = {
    "loss": lambda step: step["loss"],
    "learning rate": lambda step: step["lr"],
    "gradient norm, before clipping": lambda step: step["grad_norm"],
    "trained tokens/s": lambda step: step["tokens"] / max(step["step_time_s"], 1e-9),
}


@dataclass(frozen=True)
class Metrics:
    """Content of one `metrics.jsonl`: optimizer steps and evaluations."""

    name: str
    steps: list[dict[str, float]]
    evaluations: list[dict[str, float]]


def read_metrics(run: Path) -> Metrics:
    """Of a run's folder or `metrics.jsonl`, without an incomplete last line. Raises: UserError: none, or malformed."""
    file, folder = run, run.parent
    if run.is_dir():
        file, folder = run / "metrics.jsonl", run
    way_out = "give the output folder of a run, or its metrics.jsonl"
    if not run.exists():
        raise UserError(f"{run}", "there is no such folder or file", way_out)
    if not file.is_file():
        raise UserError(f"{run}", "it is no run: it has no metrics.jsonl", way_out)
    try:
        lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    except OSError as error:
        raise UserError(f"{file}", f"it cannot be read ({error.strerror})", way_out) from None
    except UnicodeDecodeError:
        raise UserError(f"{file}", "it is not text", way_out) from None
    found: dict[str, list[dict[str, float]]] = {"loss": [], "eval_loss": []}
    for number, line in enumerate(lines, 1):
        if not line.endswith("\n"):  # it is being written
            break
        try:
            values = json.loads(line)
            if "eval_tokens" in values and "eval_loss" not in values:  # it was not finite
                continue
            kind = "eval_loss" if "eval_loss" in values else "loss"
            found[kind].append({key: float(values[key]) for key in _FIELDS[kind]})
        except (ValueError, TypeError, KeyError):
            raise UserError(f"{file}, line {number}", "it is not a line of a run's metrics") from None
    if not found["loss"]:
        raise UserError(f"{file}", "no step is recorded there yet")
    return Metrics(folder.name or str(run), found["loss"], found["eval_loss"])


def plot_runs(runs: Sequence[Path], file: Path) -> None:
    """Draw loss, rate, gradient norm and speed of `runs`, evaluations as dots. Raises: UserError: no drawing."""
    pyplot = _pyplot(file)
    all_metrics = list(map(read_metrics, runs))
    names = _labels(runs, all_metrics)
    figure, axes = pyplot.subplots(2, 2, figsize=(12, 7.5), layout="constrained")
    for (title, value), axis in zip(_PANELS.items(), axes.flat, strict=True):
        for number, (name, metrics) in enumerate(zip(names, all_metrics, strict=True)):
            color = f"C{number % 10}"
            x, y = [step["step"] for step in metrics.steps], list(map(value, metrics.steps))
            axis.plot(x, y, color=color, linewidth=1.2, label=name)
            if title == "loss" and metrics.evaluations:
                x, y = ([each[key] for each in metrics.evaluations] for key in ("step", "eval_loss"))
                axis.plot(x, y, color=color, linestyle="--", marker="o", markersize=4, label=f"{name}, held out")
        _label(axis, title)
    axes.flat[0].legend(frameon=False)
    _save(figure, file)


def plot_schedule(rates: Sequence[float], file: Path, *, title: str) -> None:
    """Draw the learning rate of every optimizer step, from 1, into `file`. Raises: UserError: it cannot be drawn."""
    figure, axis = _pyplot(file).subplots(figsize=(9, 4), layout="constrained")
    axis.plot(range(1, len(rates) + 1), rates, marker="o" if len(rates) <= 50 else None, markersize=3)
    _label(axis, title)
    axis.set(ylabel="learning rate", ylim=(0, None))
    _save(figure, file)


def plot_sweep(sweep: Sweep, file: Path, *, title: str) -> None:
    """Draw the loss over the learning rate into `file`, and the suggestion. Raises: UserError: it cannot be drawn."""
    figure, axis = _pyplot(file).subplots(figsize=(9, 4), layout="constrained")
    axis.plot(sweep.rates, sweep.losses, alpha=0.35, label="loss of the step")
    axis.plot(sweep.rates, sweep.smooth, label="smoothed")
    axis.axvline(sweep.suggested, color="black", linestyle="--", linewidth=1, label="suggested")
    _label(axis, title)
    axis.set(xscale="log", xlabel="learning rate", ylabel="loss")
    axis.legend()
    _save(figure, file)


def plot_lengths(bins: Sequence[tuple[int, int, int]], file: Path, *, title: str) -> None:
    """Draw the number of sequences in each range of lengths (shortest, longest, number). Raises: as in `plot_sweep`."""
    figure, axis = _pyplot(file).subplots(figsize=(9, 4), layout="constrained")
    firsts, lasts, numbers = zip(*bins, strict=True)
    widths = [last - first + 1 for first, last in zip(firsts, lasts, strict=True)]
    axis.bar(firsts, numbers, width=widths, align="edge", edgecolor="white")
    _label(axis, title)
    axis.set(xlabel="tokens", ylabel="sequences")
    _save(figure, file)


def check_picture(file: Path) -> None:
    """Refuse a picture that could not be drawn, before the work that it shows. Raises: UserError."""
    _pyplot(file)


def _label(axis: Any, title: str) -> None:
    axis.set_title(title, loc="left", fontsize=11)
    axis.set_xlabel("optimizer step")
    axis.xaxis.get_major_locator().set_params(integer=True)  # there is no step 2.5
    axis.grid(alpha=0.25)


def _labels(runs: Sequence[Path], all_metrics: Sequence[Metrics]) -> list[str]:
    """Names of the folders, or if two are equal, the paths as given."""
    names = [metrics.name for metrics in all_metrics]
    if len(set(names)) < len(names):
        return list(map(str, runs))
    return names


def _pyplot(file: Path) -> Any:
    """matplotlib without a display, after checking that `file` can be drawn."""
    if file.suffix.lower() not in FORMATS:
        raise UserError(f"{file}", f"a picture ends in one of {', '.join(FORMATS)}", did_you_mean(file.suffix, FORMATS))
    check_result_file(file, f"{file}")
    try:
        import matplotlib
    except ImportError:
        raise UserError("pictures", "they need matplotlib", "pip install 'meshlora[plot]'") from None
    matplotlib.use("agg")  # before pyplot is imported, or it looks for a display
    from matplotlib import pyplot

    return pyplot


def _save(figure: Any, file: Path) -> None:
    from matplotlib import pyplot

    kind = file.suffix.lower()
    drawn = io.BytesIO()
    figure.savefig(drawn, format="svg" if kind == ".html" else kind[1:], dpi=130)
    pyplot.close(figure)
    content = drawn.getvalue()
    if kind == ".html":
        # Without the XML declaration before it.
        content = _PAGE.format(content[content.index(b"<svg") :].decode()).encode()
    try:
        write_atomically(file, lambda path: path.write_bytes(content))
    except OSError as error:
        raise UserError(f"{file}", f"it cannot be written ({error.strerror})") from None

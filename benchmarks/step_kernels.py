"""A whole training step of a real shape without a GPU: operators, bytes and host reads, priced by a GPU's roofline.

    python benchmarks/step_kernels.py [--gpu h100] [--shape 8b|1b|moe|all] [--json FILE]
    python benchmarks/step_kernels.py --beside FILE.json        # what a GPU took, by classes, and what this says of it
    python benchmarks/step_kernels.py --commits OLD ... NEW     # what each commit of these changed

Nothing is computed and nothing is timed: the real code of both systems runs on tensors without content (those of the
planner), and each operator that it gives the device is counted with the bytes it must read and write. The GPU is busy
with each for the longer of its arithmetic and its bytes, by the planner's numbers for that GPU; a step takes the time
that it is busy and that it waits for the host in, or that of all launches, whichever is longer. A sum, no measurement:
`--beside` shows how near it comes to the steps that were measured.

The systems are those of gpu.py: a bf16 base with SDPA, LoRA r=16 on all linears; ours by the parts of its trainer
(loss, backward, finished gradients, clipping, sums, AdamW), with `model.kernels: none`, with liger and with fused, a
kernel as one operator, each also with `train.cuda_graphs`, whose record is counted as the trainer makes it, and is one
launch; PEFT in a plain loop with fp32 factors under autocast, as its Trainer would (which reads the host twice more a
step, for its filter of NaN). "Least" is no program: each product once with what it reads and writes, and between
products one operator that reads and writes each tensor once; of a mixture it is not said.

Models of one and of two layers are run; a step is the first, and the difference for each further layer. Counted is what
launches a kernel: no views and no allocations. A row that is gathered counts with its own bytes, an expanded dimension
with its stored ones. Attention is one operator each way, a list of tensors (foreach, AdamW) one; an update has as many
for two layers as for one.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

from gpu_shapes import Shape, real_shapes, tiny
from meshlora_extra.planner.fake import Work
from meshlora_extra.planner.hardware import Hardware, hardware_named
from processes import be_quiet
from step_counts import OURS, PARTS, REPLAY, Counted, count, count_of, count_replayed, peft
from step_prices import COUNTS, busy_by_class, compare, eager_s, replayed_s, table_of
from table import DONE, RESULTS, Findings, Parity, Row, greater, parser, run, smaller

SHAPES = ("8b", "1b", "moe")  # of gpu_shapes.py
TARGET_RATE = 13_000  # tokens/s of the 8B shape on one H100
TARGET_REPLAYED = {"fused": 16_000, "fused, in float8": 19_000}  # the same, with `train.cuda_graphs`
TARGET_OPERATORS = 0.7  # of PEFT's in a layer
MOST_OPERATORS = {"moe": 1558}  # of a step: half of those before its experts' sizes stayed on the device
# Of the rows of `train.cuda_graphs`.
_OF_REPLAYS = (
    "With `train.cuda_graphs` forward and backward are one launch, the update's operators one each. No replay has been "
    "timed on a GPU yet, and the gaps between its kernels are taken as none."
)

# --- output ---------------------------------------------------------------------------------------------------------


def numbers(
    name: str, both: tuple[Counted, Counted], replayed: Counted | None, shape: Shape, gpu: Hardware
) -> dict[str, float]:
    """The numbers of a system, by name. both: its step, a layer of it. replayed: the step with `train.cuda_graphs`."""
    step, layer = both
    work, tokens = step.work(*PARTS), shape.batch_size * shape.seq_len
    busy = busy_by_class(work, gpu)
    step_s = eager_s(work, gpu, waits=name in OURS)
    found = {
        "operators of a layer, forward": layer.number("forward"),
        "– backward": layer.number("backward"),
        "– together": layer.number("forward", "backward"),
        "– casts of factors and their gradients": layer.casts("forward", "backward"),
        "GB that a layer reads and writes": layer.num_bytes("forward", "backward") / 1e9,
        "operators of a step": step.number(*PARTS),
        "host reads of a step": step.reads,
        "ms of products": 1e3 * busy["products"],
        "ms of attention": 1e3 * busy["attention"],
        "ms of everything else": 1e3 * busy["everything else"],
        "ms that the GPU is busy": 1e3 * sum(busy.values()),
        "ms a step": 1e3 * step_s,
        "tokens/s": tokens / step_s,
    }
    if replayed is not None:
        replayed_step_s = replayed_s(replayed.work(REPLAY), replayed.work("update"), gpu)
        found |= {
            "launches with train.cuda_graphs": 1 + replayed.number("update"),
            "ms a step with it": 1e3 * replayed_step_s,
            "tokens/s with it": tokens / replayed_step_s,
        }
    return found


def markdown(found: dict[str, dict[str, float]]) -> str:
    """One column for each system, or commit."""
    lines = [["", *found], ["---"] * (1 + len(found))]
    names = dict.fromkeys(name for own in found.values() for name in own)
    lines += [[name, *(_shown(own.get(name)) for own in found.values())] for name in names]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _shown(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if value >= 1000 or value == int(value) else f"{value:.2f}"


def kinds(step: Counted, gpu: Hardware) -> dict[str, tuple[int, float]]:
    """Operator -> (how often in a step, ms of the GPU), the costliest first."""
    found: dict[str, tuple[int, float]] = {}
    for part in PARTS:
        for (name, work, _), n in step.operators[part].items():
            number, ms = found.get(name, (0, 0.0))
            found[name] = number + n, ms + 1e3 * gpu.busy_s({work: n}, is_half=True)
    return dict(sorted(found.items(), key=lambda item: -item[1][1]))


def measure(options: argparse.Namespace) -> Findings:
    """Count all systems, and compare ours with PEFT's."""
    shape = shape_named(options.shape)
    shape = tiny(shape) if options.tiny else shape
    gpu = hardware_named(options.gpu)
    counted, replayed = count(shape), count_replayed(shape)
    found = {name: numbers(name, both, replayed.get(name), shape, gpu) for name, both in counted.items()}
    costliest = kinds(counted["meshlora"][0], gpu)
    lines = [f"| {name} | {n:,} | {ms:.1f} |" for name, (n, ms) in list(costliest.items())[:16]]
    sizes = f"{shape.batch_size} × {shape.seq_len} tokens, {shape.config.num_hidden_layers} layers"
    head = ["The costliest operators of our step:", "", "| operator | in a step | ms |", "|---|---|---|"]
    page = [f"{shape.name} on {gpu.name}: {sizes}.", "", markdown(found), "", _OF_REPLAYS, "", *head, *lines]
    details = {"gpu": gpu.name, "shape": shape.name, "systems": found, "operators": costliest}
    agreed = Parity("nothing is computed, so nothing can differ", None, None, agrees=True)
    return Findings(agreed, _rows(found, shape, gpu), details, "\n".join(page))


def shape_named(name: str) -> Shape:
    """Of gpu_shapes.py."""
    return next(shape for shape in real_shapes() if shape.name == name)


def _rows(found: dict[str, dict[str, float]], shape: Shape, gpu: Hardware) -> list[Row]:
    mine, peer = found["meshlora"], found["PEFT"]
    names = {"ours_name": "meshlora", "peer_name": "PEFT"}
    together, rate, reads = "– together", "tokens/s", "host reads of a step"
    rows = [
        smaller("operators of a layer", [mine[together]], [peer[together]], unit="", target=TARGET_OPERATORS, **names),
        smaller("predicted step", [mine["ms a step"]], [peer["ms a step"]], unit="ms", **names),
    ]
    asked: dict[str, Any] = {"ours_name": "meshlora", "peer_name": "asked for", "target": 1.0}
    if shape.name == "8b":
        target = [float(TARGET_RATE)]
        rows.append(greater(f"predicted rate, {gpu.name}", [mine[rate]], target, unit="tokens/s", **asked))
    for name, most in TARGET_REPLAYED.items():
        if (shape.name, gpu.name) == ("8b", "h100") and name in found:
            what, own = f"predicted rate, {gpu.name}, train.cuda_graphs", {**asked, "ours_name": f"meshlora, {name}"}
            rows.append(greater(what, [found[name]["tokens/s with it"]], [float(most)], unit="tokens/s", **own))
    if shape.name in MOST_OPERATORS:
        most_of_all = [float(MOST_OPERATORS[shape.name])]
        rows.append(smaller("operators of a step", [mine["operators of a step"]], most_of_all, unit="", **asked))
    rows.append(smaller(reads, [mine[reads]], [1.0], unit="", **asked))
    return rows


# --- what was measured ----------------------------------------------------------------------------------------------


def beside(options: argparse.Namespace) -> None:
    """Print the steps that a file has by classes of kernels, each beside what is predicted of it."""
    document = json.loads(options.beside.read_text("utf-8"))

    def of_peft(shape: str) -> Counter[Work]:
        return count_of(shape_named(shape), peft)[0].work(*PARTS)

    print("Predicted / measured, ms.\n")
    print(table_of(compare(document, of_peft)))


_COUNT_OURS = """
import json
import sys

import step_kernels

# Of commits with and without `step_counts`.
counts = sys.modules.get("step_counts", step_kernels)
ours = {name: system for name, system in counts.SYSTEMS.items() if name in ("meshlora", "with liger")}
counts.SYSTEMS.clear()
counts.SYSTEMS.update(ours)
steps = {}
for shape in step_kernels.real_shapes():
    if shape.name in ("8b", "1b", "moe"):
        for name, (step, _) in counts.count(shape).items():
            rows = {}
            for part in counts.PARTS:
                for (_, work, _), number in step.operators[part].items():
                    cost = work[0], work[1], int(work[2])
                    rows[cost] = rows.get(cost, 0) + number
            steps.setdefault(shape.name, {})[name] = [[*cost, number] for cost, number in rows.items()]
json.dump(steps, sys.stdout)
"""


def counts_of(commit: str, file: Path) -> None:
    """Write what our steps of `commit` need, as it counted itself: for steps that were measured of it."""
    with _checked_out(commit, "src", "benchmarks") as folder:
        environment = {**os.environ, "PYTHONPATH": f"{folder / 'src'}{os.pathsep}{folder / 'benchmarks'}"}
        command = [sys.executable, "-c", _COUNT_OURS]
        done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers", "peft")}
    head = {"command": f"python benchmarks/step_kernels.py --counts-of {commit}", "versions": versions}
    rows = "a row: floating-point operations, bytes, whether it is an attention, how many"
    text = json.dumps({**head, "rows": rows, "steps": json.loads(done.stdout)}, ensure_ascii=False)
    file.write_text(text.replace("]], ", "]],\n").replace(": {", ":\n{") + "\n", "utf-8")


@contextmanager
def _checked_out(commit: str, *folders: str) -> Iterator[Path]:
    """A folder with these of a commit."""
    root = Path(__file__).resolve().parents[1]
    archive = subprocess.run(["git", "archive", commit, *folders], cwd=root, check=True, capture_output=True)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        stack.enter_context(tarfile.open(fileobj=BytesIO(archive.stdout))).extractall(folder, filter="data")
        yield Path(folder)


# --- commits --------------------------------------------------------------------------------------------------------


def of_commits(names: list[str], options: argparse.Namespace) -> None:
    """Print what each commit's `src` needs, and the gain of each over the one before."""
    own = Path(__file__).resolve()
    found: dict[str, dict[str, float]] = {}
    for name in names:
        with _checked_out(name, "src") as folder:
            file = folder / "found.json"
            command = [sys.executable, str(own), "--gpu", options.gpu, "--shape", options.shape, "--json", str(file)]
            environment = {**os.environ, "PYTHONPATH": str(folder / "src")}
            subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
            found[name] = json.loads(file.read_text())["details"]["systems"]["meshlora"]
    columns = {"operators of a layer": "– together", "casts": "– casts of factors and their gradients"}
    print(f"| commit | {' | '.join(columns)} | ms a step | gained | tokens/s |\n|{'---|' * (len(columns) + 4)}")
    before: float | None = None
    for name, own_numbers in found.items():
        ms = own_numbers["ms a step"]
        gained = "–" if before is None else f"{before - ms:.1f} ms"
        command = ["git", "log", "-1", "--format=%s", name]
        subject = subprocess.run(command, cwd=own.parents[1], check=True, capture_output=True, text=True).stdout
        cells = [subject.strip(), *(f"{own_numbers[key]:.0f}" for key in columns.values()), f"{ms:.1f}", gained]
        print(f"| {' | '.join(cells)} | {own_numbers['tokens/s']:,.0f} |")
        before = ms


def main() -> int:
    own = parser(__doc__)
    own.add_argument("--gpu", default="h100", help="of the planner's table")
    own.add_argument("--shape", default="8b", choices=[*SHAPES, "all"], help="of gpu_shapes.py")
    own.add_argument("--commits", nargs="+", help="compare the src of these, the oldest first")
    own.add_argument("--beside", type=Path, help="print what was measured (--kernels) beside what is predicted of it")
    own.add_argument("--counts-of", metavar="COMMIT", help="write what our steps of it need, for --beside")
    options = own.parse_args()
    be_quiet()
    if options.commits:
        of_commits(options.commits, options)
        return DONE
    if options.counts_of:
        counts_of(options.counts_of, options.json or COUNTS)
        return DONE
    if options.beside:
        beside(options)
        return DONE
    codes = []
    for shape in SHAPES if options.shape == "all" else [options.shape]:
        one = argparse.Namespace(**{**vars(options), "shape": shape})
        if one.json is None and not (one.quick or one.tiny):  # no hardware: the machine here changes nothing
            of_shape = "" if shape == "8b" else f"{shape}_"
            one.json = RESULTS / f"step_kernels_{of_shape}{one.gpu}_{time.strftime('%Y%m')}.json"
        codes.append(run("A step without a GPU", one, measure, name="step_kernels"))
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())

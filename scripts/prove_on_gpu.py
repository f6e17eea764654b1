"""meshlora on one GPU: one command, one table, at most eight minutes on one H100 or H200.

    python scripts/prove_on_gpu.py                          # on a machine with a GPU
    python scripts/prove_on_gpu.py --parts train,8b         # these alone; in its file the others' results stay
    python scripts/prove_on_gpu.py --parts proofs --step int8      # of these parts these alone; may repeat
    python scripts/prove_on_gpu.py --dry-run                # without a GPU: all of it, tiny, on the CPU
    python scripts/prove_on_gpu.py --write-docs RESULTS.json    # docs/performance.md and README.md from results

Parts run in the order of `PARTS`: first those without times, several steps at once, then each that is timed alone.
Each step is a process of its own with a limit of its own; one that fails, hangs or raises ends no other, and what has
not run is in the table with its reason. Results are written after each step, to
`benchmarks/results/gpu_<card>_<yyyymm>.json` and `.md`; logs are in `runs/prove_on_gpu`. With `--out FOLDER` both go
there. Exit code 1: a step failed, or found no time. What is asked of the card (`gpu_results.BOUNDS`) is answered last.

Owns: what is run, and the table. Does not own: running it (`gpu_campaign.py`), the file and the pages
(`gpu_results.py`), speeds and their parity (`benchmarks/gpu.py`), proofs (`meshlora verify`).
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import gpu_campaign
import gpu_results
from gpu_campaign import BUDGET, FOUND, RUN, Campaign, Part, Setting, Step, read_last
from gpu_results import ROOT, Line, Results, Status, counts
from rich.console import Console
from rich.table import Table

import table
from meshlora_ground.errors import UserError, did_you_mean

LOSS_LIMIT = 1e-6  # relative, in float64: what the judge allows after AdamW
# The same of products in float8, in bfloat16: ten times what the scales of a GPU, taken on a CPU, change in 12 steps.
FLOAT8_LIMIT = 2e-2
MESHLORA = [sys.executable, "-m", "meshlora"]
ONLY_ON_GPU = "a dry run has no GPU"
LEFT_OUT = "left out of a dry run: its code is that of the steps above"


# --- versions, tests, commands --------------------------------------------------------------------------------------


def environment(_: Setting) -> list[Step]:
    return [Step("meshlora env", [*MESHLORA, "env", "--json", FOUND], read_environment)]


def read_environment(folder: Path) -> tuple[str, dict[str, Any]]:
    found = {
        name: value for name, value in _json(folder).items() if name not in ("platform", "hub", "hub_cache", "cache")
    }
    names = ("torch", "transformers", "peft", "liger-kernel", "bitsandbytes", "cuda", "nccl", "gpus")
    return "\n".join(f"{name} {found[name]}" for name in names if name in found), {"environment": found}


def gpu_tests(setting: Setting) -> list[Step]:
    """A step for each file. Its commands wait for processes of their own, one after the other for minutes; what is
    proved shares processes."""
    no_test_ran = 5
    good_codes = (0, no_test_ran) if setting.is_tiny else (0,)
    steps = []
    for file in sorted(ROOT.glob("tests/gpu/test_*.py")):
        pytest = [sys.executable, "-m", "pytest", "-v", "-m", "gpu", f"tests/gpu/{file.name}", "-p", "no:cacheprovider"]
        if "commands" in file.name and not setting.is_tiny:  # which has none to run
            pytest += ["-n", f"{setting.at_once}", "-p", "no:benchmark"]  # it warns of workers, and warnings are errors
        steps.append(Step(f"tests/gpu/{file.name}", pytest, read_pytest, good_codes=good_codes))
    return steps


def read_pytest(folder: Path) -> tuple[str, dict[str, Any]]:
    """Its last line, or how many have ended if it was stopped, and the names of what failed."""
    said = (folder / "log").read_text("utf-8", "replace")
    ended = [
        (m[1], m[2]) for m in re.finditer(r"^(?:\[gw\d+\] \[.*?\] )?(PASSED|FAILED|ERROR) (\S+)", said, re.MULTILINE)
    ]
    ended += [(m[2], m[1]) for m in re.finditer(r"^(\S+::.*?) (PASSED|FAILED|ERROR) +\[", said, re.MULTILINE)]
    failed = list(dict.fromkeys(name for how, name in ended if how != "PASSED"))
    passed = {name for how, name in ended if how == "PASSED"}
    summary = [line.strip("= ") for line in said.splitlines() if re.search(r"\d+ (passed|failed|desel).* in \d", line)]
    counted = f"{len(passed) + len(failed)} have ended, {len(passed)} passed"
    return "\n".join([*(summary[-1:] or [counted]), *failed]), {"failed": failed}


TRAIN, TRAIN_ON_CPU = "train, float64, preflight", "train, float64, on the CPU"


def commands(setting: Setting) -> list[Step]:
    """What a user starts first, each from an empty cache."""
    few = [f"train.steps={2 if setting.is_tiny else 40}", "train.warmup_steps=1", "train.log_every=1"]
    few = [word for given in few for word in ("--set", given)]
    demo, one = ["examples/demo.yaml", *few, "--set", f"train.output={RUN}"], ["--set", "topology=dp=1"]
    there = ["--set", f"device={setting.device}"]
    bf16 = ["--set", "model.dtype=bfloat16", "--set", "model.kernels=liger"]
    rl = ["rl", "examples/rl.yaml", "--set", "train.steps=4", "--set", f"train.output={RUN}"]
    says = ["generate", "--model", "examples/tiny_base", "--prompt", "def add(a, b):", "--max-new-tokens", "8"]
    on_gpu = {
        "train, bfloat16, liger": (["train", *demo, *one, *there, *bf16], read_losses),
        "train, two ranks": (["train", *demo, *there, *setting.ranks()], read_losses),
        "check --prove": (["check", *demo, *one, *there, "--prove"], read_last),
        "rl": ([*rl, *one, *there], read_losses),
        "generate": (says, read_last),
    }
    return [
        Step(TRAIN, [*MESHLORA, "train", *demo, *one, *there], read_losses),
        Step(TRAIN_ON_CPU, [*MESHLORA, "train", *demo, *one, "--set", "device=cpu", "--no-preflight"], read_losses),
        *(
            Step(name, [*MESHLORA, *argv], read, not_run=setting.unless_tiny(LEFT_OUT))
            for name, (argv, read) in on_gpu.items()
        ),
    ]


def read_losses(folder: Path) -> tuple[str, dict[str, Any]]:
    metrics = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text("utf-8").splitlines()]
    losses = {str(line["step"]): line["loss"] for line in metrics if "loss" in line}
    proofs = re.findall(r"^preflight: (.* proved in .*)$", (folder / "log").read_text("utf-8", "replace"), re.MULTILINE)
    first, *_, last = losses.values()
    return "\n".join([f"{len(losses)} steps, loss {first:.4f} to {last:.4f}", *proofs]), {"losses": losses}


def compare_losses(lines: list[Line]) -> Line:
    """Those of the device beside those of the CPU."""
    return _beside("train", lines, {TRAIN: TRAIN_ON_CPU}, LOSS_LIMIT)


def _beside(part: str, lines: list[Line], pairs: dict[str, str], limit: float) -> Line:
    """The losses of each step of `pairs` beside those of another."""
    losses = {line.step: line.data["losses"] for line in lines if line.status == "ok" and "losses" in line.data}
    what, said, worst, is_right = "losses beside the CPU's", [], 0.0, True
    for name, other in pairs.items():
        if not {name, other} <= losses.keys():
            return Line(part, what, "not run", 0.0, f"{name}: one of the two did not train", is_fault=True)
        own, cpu = losses[name], losses[other]
        errors = [abs(own[step] - cpu[step]) / abs(cpu[step]) for step in own.keys() & cpu.keys()]
        is_right &= own.keys() == cpu.keys() and all(error <= limit for error in errors)  # NaN is not
        off = max(errors, key=lambda error: math.inf if math.isnan(error) else error, default=math.nan)
        worst = off if math.isnan(off) else max(worst, off)
        of_pair = f"{name}: " if len(pairs) > 1 else ""
        said.append(f"{of_pair}{len(own)} and {len(cpu)} steps, at most {off:.1e} off, limit {limit:.0e}")
    status: Status = "ok" if is_right else "failed"
    return Line(part, what, status, 0.0, "\n".join(said), {"difference": worst}, is_fault=not is_right)


FLOAT8_TRAINS = {"fp8": "dp=2,dp_shard", "fp8_backward": "dp=2"}  # blocks of 32 are cut by tp=2 of the demo


def float8_trains(setting: Setting) -> list[Step]:
    """The demo with products in float8, on the GPU, by two ranks of it, and with the numbers of the definition."""
    few = [f"train.steps={2 if setting.is_tiny else 12}", "train.warmup_steps=1", "train.log_every=1"]
    few += ["model.dtype=bfloat16", f"train.output={RUN}"]
    demo = ["train", "examples/demo.yaml", *(word for given in few for word in ("--set", given))]
    steps = []
    for compute, topology in FLOAT8_TRAINS.items():
        own = [*MESHLORA, *demo, "--set", f"model.compute={compute}"]
        one, there = ["--set", "topology=dp=1"], ["--set", f"device={setting.device}"]
        two = ["--set", f"topology={topology}", *setting.ranks(), "--no-preflight"]
        on_cpu = ["--set", "device=cpu", "--no-preflight"]
        steps += [
            Step(f"{compute}", [*own, *one, *there], read_losses),
            Step(f"{compute}, two ranks", [*own, *two, *there], read_losses, not_run=setting.unless_tiny(LEFT_OUT)),
            Step(f"{compute}, on the CPU", [*own, *one, *on_cpu], read_losses),
        ]
    return steps


def compare_float8(lines: list[Line]) -> Line:
    """Those of the device, of one rank and of two, beside those of the CPU."""
    there = {line.step for line in lines if line.status != "not run" or line.is_fault}
    pairs = {}
    for compute in FLOAT8_TRAINS:
        for name in (compute, f"{compute}, two ranks"):
            if name in there:
                pairs[name] = f"{compute}, on the CPU"
    return _beside("float8", lines, pairs, FLOAT8_LIMIT)


# --- proofs ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Proof:
    """Arguments of one `meshlora verify`."""

    arguments: str
    topologies: tuple[str, ...]
    num_ranks: int = 2


LLAMA, QWEN3, MIXTURE = "--family llama", "--family qwen3", "--family qwen3_moe"
FLOAT32, BFLOAT16 = "--dtype float32", "--dtype bfloat16"
PROOFS = {
    "dense, float64": Proof(LLAMA, ("tp=2,sp", "dp=2", "dp=2,dp_shard")),
    "mixture, float64": Proof(MIXTURE, ("dp=2,ep=2", "tp=2,sp,etp=2", "tp=2,sp,ep=2")),
    "stages, float64": Proof(LLAMA, ("pp=2", "pp=2,interleave=2")),
    "context, float64": Proof(LLAMA, ("cp=2", "cp=2,ring")),
    "dense, float32": Proof(f"{LLAMA} {FLOAT32}", ("", "tp=2,sp", "dp=2,dp_shard")),
    "mixture, float32": Proof(f"{MIXTURE} {FLOAT32}", ("", "dp=2,ep=2")),
    "dense, bfloat16": Proof(f"{LLAMA} {BFLOAT16}", ("", "tp=2,sp", "pp=2")),
    "mixture, bfloat16": Proof(f"{MIXTURE} {BFLOAT16}", ("", "dp=2,ep=2")),
    "joined rows": Proof(f"{LLAMA} {BFLOAT16} --packing auto", ("", "tp=2,sp", "cp=2")),
    "fused": Proof(f"{LLAMA} {FLOAT32} --kernels fused", ("", "tp=2,sp")),
    "liger": Proof(f"{LLAMA} {FLOAT32} --kernels liger", ("", "tp=2,sp")),
    "recomputation": Proof(f"{QWEN3} {FLOAT32} --recompute", ("tp=2,sp", "pp=2")),
    "inputs on the host": Proof(f"{QWEN3} {FLOAT32} --recompute offload", ("tp=2,sp", "pp=2")),
    "kept attention": Proof(
        f"{LLAMA} {BFLOAT16} --packing auto --recompute keep_attention", ("", "tp=2,sp", "cp=2,ring")
    ),
    "nf4": Proof(f"{LLAMA} {FLOAT32} --quantization nf4", ("", "tp=2,sp")),
    "fp8": Proof(f"{LLAMA} {FLOAT32} --quantization fp8", ("", "tp=2,sp")),
    "mxfp4": Proof(f"{MIXTURE} {FLOAT32} --quantization mxfp4", ("", "dp=2,ep=2")),
    "int8": Proof(f"{LLAMA} {FLOAT32} --quantization int8", ("", "tp=2,sp")),
    "four ranks": Proof(MIXTURE, ("dp=2,tp=2,sp", "dp=4,ep=2,etp=2,two-stage"), num_ranks=4),
}
TINY_PROOFS = 2  # of the first topology each


def proofs(setting: Setting) -> list[Step]:
    """Every axis by NCCL, the ranks on one GPU."""
    steps = []
    for number, (name, proof) in enumerate(PROOFS.items()):
        topologies = proof.topologies[:1] if setting.is_tiny else proof.topologies
        argv = [*MESHLORA, "verify", *proof.arguments.split(), "--device", setting.device, "--steps", "2"]
        argv += setting.ranks(proof.num_ranks)
        each = [word for topology in topologies for word in ("--topology", topology)]
        left_out = ONLY_ON_GPU if "--kernels" in proof.arguments else LEFT_OUT
        not_run = setting.unless_tiny(left_out) if number >= TINY_PROOFS else ""
        steps.append(Step(name, [*argv, *each, "--json", FOUND], read_proof, not_run=not_run))
    return steps


def read_proof(folder: Path) -> tuple[str, dict[str, Any]]:
    """Each topology, with its worst relative error or the place where it differs."""
    found = []
    for run in _json(folder)["runs"]:
        worst = max((phase["worst_relative"] or 0.0 for phase in run["phases"].values()), default=0.0)
        found.append(f"{run['topology'] or 'one rank'}: {f'proved, {worst:.0e}' if run['passed'] else _reason(run)}")
    return "\n".join(found), {}


def _reason(run: dict[str, Any]) -> str:
    """Why a run is not proved."""
    if run["error"]:
        return str(run["error"]).strip().splitlines()[-1][:200]
    place = run["first_divergence"]
    return f"{place['phase']}: {place['name']}: {place['cause']}"[:200] if place else "it differs"


# --- speeds ---------------------------------------------------------------------------------------------------------

FOUR = ("meshlora", "meshlora + liger", "PEFT + SDPA", "PEFT + liger-kernel")
KEPT, OFFLOADED = "meshlora + liger, keep_attention", "meshlora + liger, offload"
RECORDED, RECORDED_FLOAT8, FLOAT8 = gpu_results.RECORDED, gpu_results.RECORDED_FLOAT8, gpu_results.FLOAT8
# Kernels of liger-kernel run on GPUs alone: without these a dry run would have nothing of ours.
IN_DRY_RUN = {
    FLOAT8: "meshlora, fp8 products",
    KEPT: "meshlora, keep_attention",
    OFFLOADED: "meshlora, offload",
    RECORDED: "meshlora, recorded",
}


def speeds(
    shape: str,
    *systems: str,
    turns: int = 2,
    kernels: bool = False,
    in_dry_run: bool = True,
    name: str = "benchmarks/gpu.py",
) -> Callable[[Setting], list[Step]]:
    """`benchmarks/gpu.py` of one shape; without systems, all of it."""

    def steps(setting: Setting) -> list[Step]:
        argv = [sys.executable, "benchmarks/gpu.py", "--shape", shape, "--no-compile"]
        chosen = systems
        if setting.is_tiny and systems:
            chosen = (*FOUR, *(IN_DRY_RUN[name] for name in systems if name in IN_DRY_RUN))
        argv += [word for system in chosen for word in ("--system", system)]
        argv += [*(["--kernels"] if kernels else []), "--turns", str(1 if setting.is_tiny else turns)]
        argv += ["--device", "cpu", "--tiny"] if setting.is_tiny else []
        not_run = "" if in_dry_run else setting.unless_tiny(LEFT_OUT)
        argv += ["--budget-s", BUDGET, "--json", FOUND]
        return [Step(name, argv, read_speeds, not_run=not_run)]

    return steps


def longest_row(setting: Setting) -> list[Step]:
    """A step takes a minute: each system is a benchmark by itself, and none has a ratio to another."""
    steps = []
    for system in (OFFLOADED, FOUR[3]):
        name = f"benchmarks/gpu.py, {system}"
        steps += speeds("128k", system, turns=1, in_dry_run=False, name=name)(setting)
    return steps


def read_speeds(folder: Path) -> tuple[str, dict[str, Any]]:
    """A line for each of ours on each input, one for the kernels of its step, and what was left out."""
    document = _json(folder)
    if not document["parity"]["agrees"]:
        return f"PARITY FAILED: {document['parity']['what']}", {}
    lines: dict[tuple[str, str], list[str]] = {}
    for row in table.rows_of(document):
        what = row.what.partition(", ")[2]
        if row.unit == "ms":
            goal = f"{'' if row.is_met else 'NO: '}≤ {row.target}"
            lines[what, row.ours_name] = [f"{what}, {row.ours_name}: {row.ratio:.2f} of {row.peer_name} ({goal})"]
        if row.unit != "tokens/s" or row.peer_name == "asked of an H200":
            continue
        name, about = (what, row.ours_name), f"{row.ratio:.2f} of {row.peer_name}"
        about += {None: "", True: f" (≥ {row.target})", False: f" (NO: ≥ {row.target})"}[row.is_met]
        lines.setdefault(name, [f"{what}, {row.ours_name}: {row.ours:,.0f} tokens/s"]).append(about)
    shown = ["; ".join(words) for words in lines.values()]
    for shape in document["details"]["shapes"].values():
        shown += _alone(shape)
        shown += [kernel_words(system, step) for system, step in shape.get("kernels", {}).items()]
        shown += [f"{system} is left out: {reason}" for system, reason in shape["left_out"].items()]
    own_page = (folder / "found.md").read_text("utf-8").partition("\n\n")[2].partition("\n\n")[2]
    return "\n".join(shown), {"rows": document["rows"], "details": document["details"], "page": own_page}


def _alone(shape: dict[str, Any]) -> list[str]:
    """A line for each input of which one system alone was measured: no row has its numbers beside another's."""
    found = []
    for name, runs in shape["runs"].items():
        if len(runs) == 1:
            ((system, (turn, *_)),) = runs.items()
            step_s, peak = turn["step_time_s"], turn["peak_bytes"] / 2**30
            found.append(f"{name}, {system}: {step_s:.2f} s a step, {peak:.2f} GiB")
    return found


def kernel_words(system: str, step: dict[str, Any]) -> str:
    """One line of the kernels of a step."""
    classes = ", ".join(f"{name} {1e3 * seconds:.0f}" for name, (seconds, _) in list(step["classes"].items())[:5])
    step_ms, busy_ms, host_ms = (1e3 * step[name] for name in ("step_time_s", "busy_s", "host_s"))
    return f"{system}, ms of {step_ms:.0f}: GPU busy {busy_ms:.0f} ({classes}), host enqueues in {host_ms:.0f}"


def timed(shows: str, limit_s: float, steps: Callable[[Setting], list[Step]]) -> Part:
    return Part(shows, limit_s, steps, is_timed=True)


# The most telling first. Steps of parts that are not timed run together, before the others.
PARTS = {
    "versions": Part("what is installed, and the card", 60, environment),
    "tests": Part("tests/gpu", 170, gpu_tests),
    "train": Part(
        "the first commands, from an empty cache; losses beside the CPU's", 150, commands, compare=compare_losses
    ),
    "float8": Part("products in float8: losses beside the CPU's", 150, float8_trains, compare=compare_float8),
    "proofs": Part("every axis and option, by NCCL on one GPU", 150, proofs),
    "8b": timed("Llama 8B beside PEFT", 180, speeds("8b", RECORDED, "meshlora + fused", *FOUR, kernels=True)),
    "8b-fp8": timed(
        "Llama 8B with products in float8 beside PEFT",
        150,
        # Another record beside PEFT + SDPA would not fit into 80 GB.
        speeds("8b", RECORDED_FLOAT8, FLOAT8, "meshlora + liger, fp8_backward", FOUR[3], kernels=True),
    ),
    "moe": timed("128 experts beside PEFT", 120, speeds("moe", RECORDED, FOUR[0], FOUR[2], kernels=True)),
    "1b": timed("Llama 1B, 4 rows, beside PEFT", 130, speeds("1b", RECORDED, *FOUR, kernels=True, in_dry_run=False)),
    "32k": timed("one row of 32,768 tokens", 170, speeds("32k", FOUR[1], KEPT, OFFLOADED, FOUR[3], turns=1)),
    "8b-8k": timed(
        "Llama 8B, 8,192 tokens a row, beside PEFT",
        170,
        speeds("8b-8k", RECORDED, RECORDED_FLOAT8, FLOAT8, FOUR[3], turns=1, in_dry_run=False),
    ),
    "quantized": timed("bases in few bits beside QLoRA", 110, speeds("quantized")),
    "128k": timed("one row of 131,072 tokens, ours and PEFT by themselves", 230, longest_row),
}


def _json(folder: Path) -> Any:
    return json.loads((folder / "found.json").read_text("utf-8"))


# --- the command ----------------------------------------------------------------------------------------------------


def card_here() -> str:
    """What the GPU calls itself; "" without one. In a process of its own, which leaves no context on the GPU."""
    code = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else '')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def chosen(text: str | None) -> dict[str, Part]:
    """The parts that `text` names, in the order of `PARTS`; all without it.

    Raises:
        UserError: one is unknown.
    """
    names = list(PARTS) if text is None else text.split(",")
    for name in names:
        if name not in PARTS:
            raise UserError(f"--parts {name}", "there is no such part", did_you_mean(name, PARTS))
    return {name: part for name, part in PARTS.items() if name in names}


def only(parts: dict[str, Part], setting: Setting, asked: Sequence[str] | None) -> dict[str, Part]:
    """`parts` with those of their steps alone that are `asked` for; all without it.

    Raises:
        UserError: no part has one of them.
    """
    if asked is None:
        return parts
    there = [step.name for part in parts.values() for step in part.steps(setting)]
    for name in asked:
        if name not in there:
            raise UserError(f"--step {name}", "no chosen part has such a step", did_you_mean(name, there))

    def some(part: Part) -> Part:
        return replace(part, steps=lambda setting: [step for step in part.steps(setting) if step.name in asked])

    return {name: some(part) for name, part in parts.items()}


def shown(lines: Sequence[Line]) -> Table:
    """The table."""
    made = Table("part", "step", "result", "s", "found", show_lines=True)
    for line in lines:
        style = "red" if line.is_fault else ""
        made.add_row(line.part, line.step, f"[{style}]{line.status}[/]" if style else line.status, *_rest(line))
    return made


def _rest(line: Line) -> tuple[str, str]:
    return f"{line.seconds:.0f}", line.found.replace("[", r"\[")


def shown_answers(document: dict[str, Any]) -> Table:
    """What is asked of the card, answered."""
    made = Table("asked of the card", "bound", "found", "met", show_lines=True)
    for what, asked, found, met in gpu_results.answers(document):
        made.add_row(what, asked, found.replace("[", r"\["), f"[red]{met}[/]" if met == "no" else met)
    return made


def campaign(options: argparse.Namespace, console: Console, scratch: Path) -> int:
    """Run the chosen parts, and print their table; the exit code."""
    parts = only(chosen(options.parts), Setting(scratch, options.dry_run), options.step)
    card = "CPU, a dry run" if options.dry_run else card_here()
    if not card:
        raise UserError("no GPU", "prove_on_gpu.py needs one", "--dry-run runs all of its code without one")
    results_folder = options.out or (scratch if options.dry_run else table.RESULTS)
    logs = (options.out or (scratch if options.dry_run else ROOT / "runs" / "prove_on_gpu")) / "logs"
    words = ["python", "scripts/prove_on_gpu.py", *(["--dry-run"] if options.dry_run else [])]
    words += ["--parts", options.parts] if options.parts else []
    words += [word for name in options.step or () for word in ("--step", name)]
    command = shlex.join(words)
    file = gpu_results.file_of(results_folder, card)
    results = Results(file, card=card, command=command, versions=table.versions())
    lines: list[Line] = []

    def keep(line: Line) -> None:
        lines.append(line)
        results.add(line)
        console.print(f"{line.part}: {line.step}: {line.status}, {line.seconds:.0f} s", markup=False, highlight=False)

    setting = Setting(logs / time.strftime("%Y%m%d-%H%M%S"), options.dry_run)
    total_s = float("inf") if options.dry_run else options.total_s
    began = time.monotonic()
    Campaign(setting, keep, total_s).run(parts)
    console.print(shown(sorted(lines, key=lambda line: list(parts).index(line.part))))
    for line in filter(lambda line: line.is_fault, lines):
        console.print(f"{line.part}: {line.step}: {line.found}", markup=False, highlight=False)
    if parts.keys() & gpu_results.OF_BOUNDS:
        console.print(shown_answers(results.document))
    where = "" if options.dry_run and options.out is None else f"; {file}, logs in {setting.folder}"
    ended = f"{counts(lines)} in {time.monotonic() - began:.0f} s{where}"
    console.print(ended, markup=False, highlight=False, soft_wrap=True)
    return int(any(line.is_fault for line in lines))


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 1 where a step failed or found no time, 2 for a wrong request."""
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    made.add_argument("--parts", metavar="NAME,NAME", help=f"of {', '.join(PARTS)}; default: all")
    made.add_argument("--step", action="append", metavar="NAME", help="of these parts this step; may repeat")
    made.add_argument("--dry-run", action="store_true", help="all of it at tiny sizes on the CPU")
    made.add_argument("--out", type=Path, metavar="FOLDER", help="results and logs go there")
    made.add_argument(
        "--total-s", type=float, default=gpu_campaign.TOTAL_S, metavar="S", help="no step runs longer than this"
    )
    made.add_argument("--write-docs", type=Path, metavar="RESULTS.json", help="only write pages from these results")
    options = made.parse_args(arguments)
    if options.write_docs is not None and (options.parts or options.step or options.dry_run or options.out):
        made.error("--write-docs runs nothing: leave the other options out")
    console = Console()
    try:
        if options.write_docs is not None:
            for file in gpu_results.write_docs(options.write_docs):
                console.print(f"written: {file.relative_to(ROOT)}", highlight=False)
            words = gpu_results.peaks(gpu_results.read_results(options.write_docs))
            console.print(words, markup=False, highlight=False, soft_wrap=True)
            return 0
        with tempfile.TemporaryDirectory(prefix="prove_on_gpu-") as scratch:
            return campaign(options, console, Path(scratch))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    # Who ends this with SIGTERM ends its steps too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main())

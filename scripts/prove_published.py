"""Prove or refuse the published checkpoints of tests/published, and plan each at full size.

    .venv/bin/python scripts/prove_published.py --only Qwen--Qwen3-8B

Each file is the configuration of a checkpoint as it was published. It is planned on the meta device for 1, 2, 4 and 8
tensor-parallel ranks, and its twin (tiny, with the same flags, the same names and the same format on disk) trains on
two processes and is compared, tensor by tensor in float64, with transformers + peft on one process. What comes of it is
printed and written to docs/support.md: ready, refused (with the reason that a user would read), or failed: accepted,
and then different, or broken. Exit code 1 when one failed.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import os
import re
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from peft import LoraConfig
from prove_families import AFTER, difference, page_with, worst
from rich.console import Console
from support_needs import needs_of
from tests.published_twins import Published, config_of, names, read_published, write_published_twin

from meshlora.adapter.formats.peft_format import lora_config
from meshlora.loading.blueprint import Blueprint, make_blueprint
from meshlora.plan.base_options import BaseOptions
from meshlora.verify.faults.of_objectives import as_proved
from meshlora.verify.options import Request
from meshlora.verify.proof import Processes, run_proof
from meshlora.verify.request import default_adapter, prepare_proof
from meshlora.wings.found.feature import use_twins
from meshlora_extra.planner.kinds import Shrunk, shrink
from meshlora_extra.planner.memory import states_of
from meshlora_ground.errors import UnsupportedError, UserError
from meshlora_ground.topology import Topology
from meshlora_ground.versions import versions
from meshlora_judge.twin import shrink_config

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/support.md"
PAIRS = "## What goes with what"
SIZES = (1, 2, 4, 8)
DENSE, EXPERTS = ("tp=2,sp",), ("tp=2,sp,ep=2", "tp=2,sp,etp=2")
ODD = ("tp=3,sp",)  # where 2 does not divide
_STATUSES = ("ready", "refused", "failed")


@dataclass(frozen=True)
class Finding:
    """What came of one checkpoint.

    Attributes:
        status: ready, refused or failed; empty: only planned. reason: why not ready.
        bytes_of: (tp, ep) -> bytes of the frozen base that a rank holds; a size that does not divide is left out.
    """

    name: str
    published: Published
    status: str = ""
    reason: str = ""
    worst: float = 0.0
    bytes_of: dict[tuple[int, int], int] = field(default_factory=dict)

    @property
    def words(self) -> str:
        if self.status != "ready":
            return " ".join(self.reason.split())
        published = self.published
        use = [published.objective] if published.objective != "sft" else []
        use += [published.files[name] for name in ("needs", "pickled") if name in published.files]
        return f"{self.worst:.1e}" + (f" ({'; '.join(use)})" if use else "")


def main() -> int:
    options = _options()
    console = Console()
    findings, seen = list[Finding](), dict[str, Finding]()
    with Processes() as processes:
        for name in options.only or names():
            start = time.perf_counter()
            finding = plan(name, options.tp)
            if not options.plan_only and not finding.reason:
                finding = prove(finding, processes, seen)
            findings.append(finding)
            cells = " ".join(f"{cell:>15}" for cell in _cells(finding, options.tp))
            line = f"{name:50} {finding.status:8} {cells} {time.perf_counter() - start:5.1f} s  {finding.words}"
            console.print(line, highlight=False, soft_wrap=True, markup=False)
    counts = {status: sum(f.status == status for f in findings) for status in _STATUSES}
    console.print(f"{len(findings)} published checkpoints: " + counted(counts), highlight=False)
    if options.record or not (options.only or options.plan_only):
        families, _, own = PAGE.read_text(encoding="utf-8").partition(AFTER)
        pairs = own[own.index(PAIRS) :]  # written by scripts/describe_house.py
        rows = _rows_of(own) if options.only else {}
        rows = {name: row for name, row in rows.items() if name in names()} | {f.name: _row(f) for f in findings}
        PAGE.write_text(page_with(families, f"\n\n{page(rows)}\n{pairs}"), encoding="utf-8")
        console.print(f"written: {PAGE.relative_to(ROOT)}", highlight=False)
    return 1 if counts["failed"] else 0


def plan(name: str, sizes: Sequence[int] = SIZES) -> Finding:
    """Plan a checkpoint at full size, on the meta device. Refused: a size cannot be, whatever divides."""
    found = Finding(name, read_published(name))
    use_twins(functools.partial(shrink_config, tp=2))  # for families whose plan is found
    try:
        options, objective = BaseOptions(disable_dropout="unsupported"), as_proved(found.published.objective)
        base = make_blueprint(config_of(found.published), Topology(), options, objective)
        shrunk = shrink(base.model)
        small = replace(base, model=shrunk.model).on(Topology())
        lora = default_adapter(lora_config({"r": 16, "target_modules": "all-linear"}, "lora"), small.plan)
        for tp in sizes:
            for ep in (1, tp) if small.plan.experts and tp > 1 else (1,):
                if (number := _bytes_of_rank(small, lora, shrunk, Topology(tp=tp, sp=tp > 1, ep=ep))) is not None:
                    found.bytes_of[tp, ep] = number
    except UserError as error:
        return replace(found, status="refused", reason=_without_folder(str(error)))
    return found


def _bytes_of_rank(small: Blueprint, lora: LoraConfig, shrunk: Shrunk, topology: Topology) -> int | None:
    """The frozen base on a rank, as the planner counts it; None if tp or ep does not divide."""
    try:
        of_rank = small.on(topology).with_adapter(lora)
    except UnsupportedError:
        raise
    except UserError:
        if topology.tp == 1:
            raise
        return None
    states = states_of(shrunk, of_rank)
    return states.weights + states.buffers


def prove(finding: Finding, processes: Processes, seen: dict[str, Finding]) -> Finding:
    """Train the twin of a planned checkpoint, and compare it with one process.

    seen: digest of a twin -> what came of it. Sizes of a model that differ in nothing else have the same twin, byte for
    byte, and it is proved once.
    """
    has_experts = any(ep > 1 for _, ep in finding.bytes_of)
    try:
        with tempfile.TemporaryDirectory(prefix="meshlora-") as folder:
            is_odd = (2, 1) not in finding.bytes_of
            model = write_published_twin(finding.published, Path(folder) / "model", tp=3 if is_odd else 2)
            topologies = (*(ODD if is_odd else DENSE), *(EXPERTS if has_experts else ()))
            twin = _digest(model, topologies)
            if twin in seen:
                return replace(finding, status="ready", worst=seen[twin].worst)
            objective = as_proved(finding.published.objective)
            cache = Path(folder) / "cache"
            request = Request(topologies, model=str(model), device="cpu", steps=2, cache_dir=cache, objective=objective)
            outcomes = list(run_proof(prepare_proof(request), processes))
    except UserError as error:
        return replace(finding, status="refused", reason=_without_folder(str(error)))
    except Exception as error:  # noqa: BLE001 - the other checkpoints are proved all the same
        return replace(finding, status="failed", reason=f"{type(error).__name__}: {error}".strip().splitlines()[-1])
    for outcome in outcomes:
        if not outcome.passed:
            return replace(finding, status="failed", reason=f"{outcome.topology}: {difference(outcome)}")
    seen[twin] = replace(finding, status="ready", worst=max(worst(outcome) for outcome in outcomes))
    return seen[twin]


def _digest(folder: Path, topologies: Sequence[str]) -> str:
    """Of every byte in a checkpoint, and of what it is proved on."""
    digest = hashlib.sha256(repr(topologies).encode())
    for file in sorted(folder.iterdir()):
        digest.update(file.name.encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _without_folder(message: str) -> str:
    """A message without the name of the temporary folder."""
    return re.sub(r"/\S*?/(meshlora-|tmp)\w+(/model)?/?", "", message)


def _cells(finding: Finding, sizes: Sequence[int]) -> list[str]:
    """Bytes per rank for each tp; with experts split over as many ranks, too."""
    found = []
    for tp in sizes:
        of = [finding.bytes_of[key] for key in dict.fromkeys(((tp, 1), (tp, tp))) if key in finding.bytes_of]
        found.append(
            " / ".join(f"{number / 1e9:.3g}" if number < 1e12 else f"{number / 1e9:.0f}" for number in of) or "–"
        )
    return found


def counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{number} {status}" for status, number in counts.items())


def _rows_of(page: str) -> dict[str, str]:
    """The rows of the second table of docs/support.md: name of the file -> row."""
    lines = [line for line in page.partition(PAIRS)[0].splitlines() if line.startswith("| ") and "/" in line.split()[1]]
    return {line.split()[1].replace("/", "--"): line for line in lines}


def _row(one: Finding) -> str:
    words = one.words.replace("|", "\\|")
    row = [one.published.repository, one.published.config["model_type"], one.published.format, one.status, words]
    return f"| {' | '.join([*row, *_cells(one, SIZES), needs_of([f'{one.status}: {one.words}'])])} |"


def page(rows: Mapping[str, str]) -> str:
    """The second table of docs/support.md. rows: name of the file -> row."""
    statuses = [row.split(" | ")[3] for row in rows.values()]
    counts = {status: statuses.count(status) for status in _STATUSES}
    lines = [
        "## Published checkpoints",
        "",
        f"Written by `.venv/bin/python scripts/prove_published.py`; {', '.join(map(' '.join, versions().items()))}.",
        "",
        "Each is read as its config.json says (`tests/published`: values written down from the model cards, and of",
        "what a file is unsure). It is *ready* when its twin, tiny but with the same flags, the same names and the",
        f"same format on disk, trains on {DENSE[0]} ({ODD[0]} if 2 does not divide its heads) as one process does,",
        f"and with experts on {' and '.join(EXPERTS)}, too: float64, limit 1e-11. Else it is *refused*,",
        "with its message. The last columns: gigabytes of the frozen base on each rank at full size, in the dtype",
        "of its plain weights (of its files where config.json has none: gpt-oss, MiniMax-M2), as",
        "`meshlora plan` counts them; after the stroke with experts split over ep = tp.",
        "–: tp does not divide.",
        "",
        f"{len(rows)} published checkpoints: {counted(counts)}.",
        "",
        "| checkpoint | model_type | on disk | | worst relative error, or why not | "
        + " | ".join(f"tp {n}" for n in SIZES)
        + " | what would be needed |",
        "|---" * (6 + len(SIZES)) + "|",
    ]
    lines += [rows[name] for name in sorted(rows)]
    return "\n".join(lines) + "\n"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Plan and prove the published checkpoints of tests/published.")
    parser.add_argument("--only", nargs="+", choices=names(), metavar="NAME", help="only these; nothing is written")
    parser.add_argument("--record", action="store_true", help="with --only: renew their rows, and keep the others")
    parser.add_argument("--plan-only", action="store_true", help="train no twin; nothing is written")
    parser.add_argument("--tp", nargs="+", type=int, default=list(SIZES), help="sizes to plan; default 1 2 4 8")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

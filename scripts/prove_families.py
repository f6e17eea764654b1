"""Prove or refuse every causal language model family of the installed transformers.

    .venv/bin/python scripts/prove_families.py --topology tp=2,sp

Each family's twin trains on the given topologies and is compared, tensor by tensor in float64, with transformers + peft
on one process. What comes of it is printed and written to docs/support.md: proved (with the worst relative error),
refused (with the reason that a user would read), or failed: accepted, and then different. Exit code 1 when one failed.
With --record the proved families also become the list that `meshlora.load` accepts, and README's matrix.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

from rich.console import Console

from meshlora.errors import MeshloraError, UserError
from meshlora.oracle.case import versions
from meshlora.plan.twin import causal_lm_types
from meshlora.verify.proof import Outcome, Processes, run_proof
from meshlora.verify.request import Request, prepare_proof

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "src/meshlora/plan/proved.json"
README = ROOT / "README.md"
BEGIN, END = "<!-- proved families: scripts/prove_families.py --record -->", "<!-- end of proved families -->"


@dataclass(frozen=True)
class Finding:
    """What came of one family. status: proved, refused or failed. worst: relative error where proved."""

    family: str
    status: str
    reason: str = ""
    worst: float = 0.0
    seconds: float = 0.0


def main() -> int:
    options = _options()
    console = Console()
    findings = []
    with Processes() as processes:
        for family in options.family or causal_lm_types():
            finding = _prove(family, tuple(options.topology), processes)
            findings.append(finding)
            words = f"{finding.worst:.1e}" if finding.status == "proved" else finding.reason
            console.print(f"{family:32} {finding.status:8} {words}", highlight=False, soft_wrap=True, markup=False)
    counts = {s: sum(f.status == s for f in findings) for s in ("proved", "refused", "failed")}
    console.print(", ".join(f"{n} {status}" for status, n in counts.items()), highlight=False)
    if not options.family:
        Path(options.out).write_text(_page(findings, options.topology), encoding="utf-8")
        console.print(f"written: {options.out}", highlight=False)
    if options.record:
        _record(findings, options.topology)
    return 1 if counts["failed"] else 0


def _prove(family: str, topologies: tuple[str, ...], processes: Processes) -> Finding:
    started = time.perf_counter()
    try:
        proof = prepare_proof(Request(topologies, family=family, device="cpu"))
    except UserError as error:
        return Finding(family, "refused", str(error))
    try:
        outcomes = list(run_proof(proof, processes))
    except UserError as error:
        return Finding(family, "refused", str(error))
    except MeshloraError as error:
        return Finding(family, "failed", str(error).strip().splitlines()[-1])
    seconds = time.perf_counter() - started
    for outcome in outcomes:
        if not outcome.passed:
            return Finding(family, "failed", f"{outcome.topology}: {_difference(outcome)}", seconds=seconds)
    return Finding(family, "proved", worst=max(map(_worst, outcomes)), seconds=seconds)


def _difference(outcome: Outcome) -> str:
    found = outcome.divergence
    if found is None:
        return outcome.error.strip().splitlines()[-1]
    return f"{found.phase} of {found.name}, {found.relative:.1e}: {found.cause}"


def _worst(outcome: Outcome) -> float:
    """Of what is compared before AdamW."""
    phases = (
        p for p in outcome.phases if p.name in ("forward", "logits", "loss", "backward", "gradients", "grad_norm")
    )
    return max(result.error for phase in phases for result in phase.results)


def _page(findings: list[Finding], topologies: list[str]) -> str:
    """docs/support.md."""
    used = ", ".join(f"{name} {number}" for name, number in versions().items())
    lines = [
        "# Which families are proved",
        "",
        f"Written by `.venv/bin/python scripts/prove_families.py {' '.join(f'--topology {t}' for t in topologies)}`;",
        f"{used}.",
        "",
        "A family is *proved* when its twin (tiny, random weights, every kind of layer) trains on these topologies as",
        "one process does: every module's output and gradient, the loss, every factor's gradient and what AdamW makes",
        "of it, the saved file; float64, limit 1e-11. Everything else is *refused* before training where tp > 1, with",
        "the message that stands here. With tp=1 the model's own code runs unchanged, and the preflight of",
        "`meshlora train` proves that.",
        "",
        ", ".join(f"{sum(f.status == s for f in findings)} {s}" for s in ("proved", "refused", "failed")) + ".",
        "",
        "| family | | worst relative error, or why not |",
        "|---|---|---|",
    ]
    for finding in findings:
        words = f"{finding.worst:.1e}" if finding.status == "proved" else finding.reason.replace("|", "\\|")
        lines.append(f"| {finding.family} | {finding.status} | {' '.join(words.split())} |")
    return "\n".join(lines) + "\n"


def _record(findings: list[Finding], topologies: list[str]) -> None:
    proved = {f.family: float(f"{f.worst:.1e}") for f in findings if f.status == "proved"}
    content = {"topologies": topologies, "versions": versions(), "families": proved}
    RECORD.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    readme = README.read_text(encoding="utf-8")
    before, _, rest = readme.partition(BEGIN)
    _, _, after = rest.partition(END)
    README.write_text(f"{before}{BEGIN}\n{len(proved)} families: {' '.join(proved)}\n{END}{after}", encoding="utf-8")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Prove or refuse every causal LM family of transformers.")
    parser.add_argument("--topology", action="append", metavar="T", help="may be repeated; default tp=2 and tp=2,sp")
    parser.add_argument("--family", action="append", metavar="MODEL_TYPE", help="only these; nothing is written")
    parser.add_argument("--out", default=str(ROOT / "docs/support.md"), metavar="FILE")
    parser.add_argument("--record", action="store_true", help="renew the list of proved families and README's matrix")
    options = parser.parse_args()
    options.topology = options.topology or ["tp=2", "tp=2,sp"]
    if options.record and (options.family or set(options.topology) != {"tp=2", "tp=2,sp"}):
        parser.error("--record needs all families on tp=2 and tp=2,sp")
    return options


if __name__ == "__main__":
    sys.exit(main())

"""Prove or refuse every language model family of the installed transformers, composites included.

    .venv/bin/python scripts/prove_families.py --topology tp=2,sp

Each family's twin trains on the given topologies and is compared, tensor by tensor in float64, with transformers + peft
on one process. What comes of it is printed and written to docs/support.md: proved (with the worst relative error),
refused (with the reason that a user would read), or failed: accepted, and then different. Exit code 1 when one failed.
With --record families with experts are proved on topologies with ep and etp too, and five families on every topology of
up to four processes; the numbers are stored in src/meshlora/plan/families/proved.json, whose families `meshlora.load`
accepts, and the tables of docs/proofs.md and README's sentence are written from them.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import textwrap
from dataclasses import dataclass, field, replace
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

from rich.console import Console

from meshlora.common.errors import MeshloraError, UserError
from meshlora.common.versions import versions
from meshlora.plan.families.twin import language_model_types
from meshlora.verify.proof import Outcome, Processes, run_proof
from meshlora.verify.request import Request, prepare_proof

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "src/meshlora/plan/families/proved.json"
# Page -> what is written between these lines of it.
MATRIX = (
    ROOT / "docs/proofs.md",
    "<!-- proved families: scripts/prove_families.py --record -->",
    "<!-- end of proved families -->",
)
SUMMARY = ROOT / "README.md", "<!-- summary: scripts/prove_families.py --record -->", "<!-- end of summary -->"

# From here on docs/support.md is written by scripts/prove_published.py.
AFTER = "<!-- published checkpoints: scripts/prove_published.py -->"

DENSE, EXPERTS = ("tp=2", "tp=2,sp"), ("tp=2,sp,ep=2", "tp=2,sp,etp=2")
# These stand for all on every topology of up to four processes, and on those that experts make of them.
EVERYWHERE = ("llama", "qwen3", "gemma2")
EVERYWHERE_EXPERTS = ("qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "granitemoe", "qwen2_moe", "llama4_text")
WITH_EXPERTS = (
    *("dp=2,ep=2", "tp=2,ep=2", "tp=2,etp=2", *EXPERTS),
    *("dp=4,ep=2", "dp=2,tp=2,sp,ep=4", "dp=2,tp=2,sp,ep=2,etp=2", "dp=2,tp=2,sp,ep=2,etp=2,two-stage"),
)
_STATUSES = ("proved", "refused", "failed")


@dataclass(frozen=True)
class Finding:
    """What came of one family. status: proved, refused or failed. errors: topology -> worst relative error.

    has_experts: whether its twin has routed experts, adapted as all its linears are.
    """

    family: str
    status: str
    reason: str = ""
    errors: dict[str, float] = field(default_factory=dict)
    has_experts: bool = False

    @property
    def words(self) -> str:
        return f"{max(self.errors.values()):.1e}" if self.status == "proved" else " ".join(self.reason.split())


def main() -> int:
    options = _options()
    console = Console()
    findings = []
    with Processes() as processes:
        for family in options.family or language_model_types():
            finding = _prove(family, tuple(options.topology), processes)
            if options.record and finding.status == "proved" and finding.has_experts:
                more = _prove(family, EXPERTS, processes)
                finding = replace(more, errors=finding.errors | more.errors)
            findings.append(finding)
            line = f"{family:32} {finding.status:8} {finding.words}"
            console.print(line, highlight=False, soft_wrap=True, markup=False)
        all_of_them = options.record and not options.family
        everywhere = [_prove(family, ("auto",), processes) for family in EVERYWHERE if all_of_them]
        everywhere += [_prove(family, WITH_EXPERTS, processes) for family in EVERYWHERE_EXPERTS if all_of_them]
    counts = {s: sum(f.status == s for f in findings) for s in _STATUSES}
    console.print(", ".join(f"{n} {status}" for status, n in counts.items()), highlight=False)
    if options.record:
        assert all(finding.status == "proved" for finding in everywhere), everywhere
        _record([*findings, *everywhere], keep=bool(options.family))
    if not options.family or options.record:
        page = Path(options.out)
        before, _, after = (page.read_text(encoding="utf-8") if page.exists() else "").partition(AFTER)
        text = _page((_rows(before) if options.family else {}) | _own_rows(findings), options.topology)
        page.write_text(f"{text}\n{AFTER}{after}" if after else text, encoding="utf-8")
        console.print(f"written: {page}", highlight=False)
    return 1 if counts["failed"] else 0


def _prove(family: str, topologies: tuple[str, ...], processes: Processes) -> Finding:
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
    for outcome in outcomes:
        if not outcome.passed:
            return Finding(family, "failed", f"{outcome.topology}: {difference(outcome)}")
    has_experts = any(plan.experts for plan in proof.plans.values())
    errors = {str(o.topology): float(f"{worst(o):.1e}") for o in outcomes}
    return Finding(family, "proved", errors=errors, has_experts=has_experts)


def difference(outcome: Outcome) -> str:
    """The first difference of a run that did not pass."""
    found = outcome.divergence
    if found is None:
        return outcome.error.strip().splitlines()[-1]
    return f"{found.phase} of {found.name}, {found.relative:.1e}: {found.cause}"


def worst(outcome: Outcome) -> float:
    """The worst relative error of what is compared before AdamW."""
    phases = (
        p for p in outcome.phases if p.name in ("forward", "logits", "loss", "backward", "gradients", "grad_norm")
    )
    return max(result.error for phase in phases for result in phase.results)


def _own_rows(findings: list[Finding]) -> dict[str, tuple[str, str]]:
    """Family -> (status, words)."""
    return {finding.family: (finding.status, finding.words.replace("|", "\\|")) for finding in findings}


def _rows(page: str) -> dict[str, tuple[str, str]]:
    """The rows of docs/support.md, as in `_own_rows`."""
    parts = [line.strip("|").split(" | ", 2) for line in page.splitlines() if line.startswith("| ")]
    return {part[0].strip(): (part[1], part[2].strip()) for part in parts if len(part) == 3 and part[1] in _STATUSES}


def _page(rows: dict[str, tuple[str, str]], topologies: list[str]) -> str:
    """docs/support.md."""
    used = ", ".join(f"{name} {number}" for name, number in versions().items())
    lines = [
        "# Which families are proved",
        "",
        f"Written by `.venv/bin/python scripts/prove_families.py {' '.join(f'--topology {t}' for t in topologies)}`;",
        f"{used}.",
        "",
        "A family is *proved* when its twin (tiny, random weights, every kind of layer) trains on these topologies as",
        "one process does: every module's output and gradient, every router's choice, the loss, every factor's",
        "gradient (every expert's by itself) and what AdamW makes of it, the saved file; float64, limit 1e-11.",
        f"Families with experts are recorded when they pass {' and '.join(EXPERTS)} too. Everything else is",
        "*refused* before training where tp, ep or etp is above 1, with the message that stands here. With dp alone",
        "the model's own code runs unchanged, and the preflight of `meshlora train` proves that.",
        "",
        "Composites (a vision or audio part beside a text part) train on text here: their text part is split, all else",
        "is whole on every rank.",
        "",
        ", ".join(f"{sum(status == s for status, _ in rows.values())} {s}" for s in _STATUSES) + ".",
        "",
        "| family | | worst relative error, or why not |",
        "|---|---|---|",
    ]
    lines += [f"| {family} | {status} | {words} |" for family, (status, words) in sorted(rows.items())]
    return "\n".join(lines) + "\n"


def _record(findings: list[Finding], *, keep: bool) -> None:
    """Write the record. keep: families that were not asked for stay as they are."""
    errors: dict[str, dict[str, float]] = {}
    if keep:
        asked = {finding.family for finding in findings}
        known = json.loads(RECORD.read_text(encoding="utf-8"))["families"]
        errors = {family: found for family, found in known.items() if family not in asked}
    for finding in findings:
        if finding.status == "proved":
            errors[finding.family] = errors.get(finding.family, {}) | finding.errors
    errors = dict(sorted(errors.items()))
    RECORD.write_text(json.dumps({"versions": versions(), "families": errors}, indent=2) + "\n", encoding="utf-8")
    for (page, begin, end), text in ((MATRIX, matrix(errors)), (SUMMARY, summary(errors))):
        before, _, rest = page.read_text(encoding="utf-8").partition(begin)
        page.write_text(f"{before}{begin}\n{text}{end}{rest.partition(end)[2]}", encoding="utf-8")


def summary(errors: dict[str, dict[str, float]]) -> str:
    """README's sentence."""
    dense, sparse = _kinds(errors)
    text = f"{len(errors)} families of transformers (worst relative error in float64, limit 1e-11): " + ", ".join(
        f"{len(families)} {words} ({max(errors[f][t] for f in families for t in common):.1e} on {' and '.join(common)})"
        for words, families, common in (("dense", dense, DENSE), ("with experts", sparse, EXPERTS))
    )
    return textwrap.fill(f"{text}.", width=120, break_on_hyphens=False) + "\n"


def _kinds(errors: dict[str, dict[str, float]]) -> tuple[list[str], list[str]]:
    """(dense, with experts)."""
    sparse = sorted(family for family, found in errors.items() if EXPERTS[0] in found)
    return sorted(errors.keys() - set(sparse)), sparse


def matrix(errors: dict[str, dict[str, float]]) -> str:
    """The support matrix: the worst relative error of each family and topology, from proofs alone."""
    dense, sparse = _kinds(errors)
    topologies = list(dict.fromkeys(t for family in EVERYWHERE for t in errors[family]))
    text = [_table(errors, EVERYWHERE, topologies, dense, DENSE), "With experts, and adapters on them:"]
    text += [_table(errors, EVERYWHERE_EXPERTS, list(WITH_EXPERTS), sparse, EXPERTS)]
    for words, families in (("dense families", dense), ("families with experts", sparse)):
        text.append(textwrap.fill(f"The {len(families)} {words}: {', '.join(families)}.", width=120))
    return "\n\n".join(text) + "\n"


def _table(
    errors: dict[str, dict[str, float]],
    shown: tuple[str, ...],
    topologies: list[str],
    families: list[str],
    common: tuple[str, ...],
) -> str:
    """Rows for the families `shown`, and one for the worst of all `families` on the topologies `common`."""
    rows = {family: errors[family] for family in shown}
    rows[f"the worst of all {len(families)} families"] = {t: max(errors[f][t] for f in families) for t in common}
    lines = ["| | " + " | ".join(topologies) + " |", "|---" * (len(topologies) + 1) + "|"]
    for name, found in rows.items():
        lines.append(f"| {name} | " + " | ".join(f"{found[t]:.1e}" if t in found else "" for t in topologies) + " |")
    return "\n".join(lines)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Prove or refuse every language model family of transformers.")
    parser.add_argument("--topology", action="append", metavar="T", help="may be repeated; default tp=2 and tp=2,sp")
    parser.add_argument("--family", action="extend", nargs="+", metavar="MODEL_TYPE", help="only these")
    parser.add_argument("--out", default=str(ROOT / "docs/support.md"), metavar="FILE")
    parser.add_argument(
        "--record", action="store_true", help="renew the list of proved families, and what pages say of it"
    )
    options = parser.parse_args()
    options.topology = options.topology or list(DENSE)
    if options.record and set(options.topology) != set(DENSE):
        parser.error("--record is of tp=2 and tp=2,sp")
    return options


if __name__ == "__main__":
    sys.exit(main())

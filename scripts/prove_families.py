"""Prove or refuse every language model family of the installed transformers, composites included.

    .venv/bin/python scripts/prove_families.py --topology tp=2,sp

Each family's twin trains on the given topologies and is compared, tensor by tensor in float64, with transformers + peft
on one process. What comes of it is printed and written to docs/support.md: proved (with the worst relative error),
refused (with the reason that a user would read), or failed: accepted, and then different. Exit code 1 when one failed.
With --record families with experts are proved on topologies with ep and etp too, and some families on more topologies
of up to four processes; the numbers are stored in src/meshlora/wings/proved/proved.json, whose families
`meshlora.load` accepts, and the tables of docs/proofs.md and README's sentence are written from them. What is proved
together is a `Part`, a column of docs/support.md; --record without --topology renews all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import textwrap
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

sys.path.insert(0, str(Path(__file__).resolve().parent))

from rich.console import Console
from support_needs import checkpoints_on, counts_line, needs_of

from meshlora.verify.options import Request
from meshlora.verify.proof import Outcome, Processes, run_proof
from meshlora.verify.request import prepare_proof
from meshlora.wings.found.probe import sees_later_tokens
from meshlora_ground.errors import MeshloraError, UnsupportedError, UserError
from meshlora_ground.float64 import lift
from meshlora_ground.topology import LAYERS, TOKENS, Topology
from meshlora_ground.versions import versions
from meshlora_judge.twin import language_model_types, twin_config

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "src/meshlora/wings/proved/proved.json"
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
# These stand for all on more topologies of up to four processes, and on those that experts make of them.
EVERYWHERE = ("llama", "qwen3", "gemma2")
EVERYWHERE_EXPERTS = ("qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "granitemoe", "qwen2_moe", "llama4_text")
WITH_EXPERTS = (
    *("dp=2,ep=2", "tp=2,ep=2", "tp=2,etp=2", *EXPERTS),
    *("dp=4,ep=2", "dp=2,tp=2,sp,ep=4", "dp=2,tp=2,sp,ep=2,etp=2", "dp=2,tp=2,sp,ep=2,etp=2,two-stage"),
)


@dataclass(frozen=True)
class Part:
    """What is proved and recorded together: a column of docs/support.md, and tables of docs/proofs.md.

    dense, experts: the topologies of every family, and those besides of families with experts. everywhere,
    everywhere_experts: those of `families`, and of those of them with experts.
    """

    name: str
    dense: tuple[str, ...]
    experts: tuple[str, ...]
    everywhere: tuple[str, ...]
    everywhere_experts: tuple[str, ...]
    families: tuple[str, ...] = EVERYWHERE
    with_experts: tuple[str, ...] = EVERYWHERE_EXPERTS

    def has(self, topology: str) -> bool:
        """Whether the record of `topology` is of this part."""
        cut = Topology.parse(topology)
        return self is (STAGES if cut.size_over(LAYERS) > 1 else CONTEXT if cut.size_over(TOKENS) > 1 else SPLIT)


SPLIT = Part("tp, sp, ep, etp", DENSE, EXPERTS, ("auto",), WITH_EXPERTS)
CONTEXT = Part(
    "cp",
    ("cp=2",),
    ("cp=2,ep=2",),
    ("cp=2", "cp=4", "dp=2,cp=2", "cp=2,tp=2", "cp=2,tp=2,sp"),
    ("cp=2,ep=2", "cp=4,ep=2", "dp=2,cp=2,ep=2", "cp=2,tp=2,ep=2", "cp=2,tp=2,sp,ep=2", "cp=2,tp=2,sp,etp=2"),
    with_experts=tuple(name for name in EVERYWHERE_EXPERTS if name != "llama4_text"),
)
STAGES = Part("pp", ("pp=2",), ("pp=2",), ("pp=2",), ("pp=2",), with_experts=CONTEXT.with_experts)
PARTS = (SPLIT, CONTEXT, STAGES)
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
    failed = 0
    with Processes() as processes:
        for part in PARTS if options.topology is None else (_part_of(options.topology),):
            failed += _prove_part(part, options, processes)
    return 1 if failed else 0


def _prove_part(part: Part | None, options: argparse.Namespace, processes: Processes) -> int:
    """Prove the families on `part`, or on the topologies asked for where they are of none. Returns how many failed."""
    console, findings = Console(), list[Finding]()
    topologies = tuple(options.topology or (part or SPLIT).dense)
    for family in options.family or language_model_types():
        finding = _prove(family, topologies, processes)
        if part and options.record and finding.status == "proved" and finding.has_experts:
            more = _prove(family, part.experts, processes)
            finding = replace(more, errors=finding.errors | more.errors)
        if (
            part in (CONTEXT, STAGES)
            and finding.status == "proved"
            and not any(map(SPLIT.has, _recorded().get(family, ())))
        ):
            finding = Finding(family, "refused", f"proved, but not on {SPLIT.dense[0]}: no record accepts it")
        findings.append(finding)
        line = f"{family:32} {finding.status:8} {finding.words}"
        console.print(line, highlight=False, soft_wrap=True, markup=False)
    counts = {s: sum(f.status == s for f in findings) for s in _STATUSES}
    console.print(f"{', '.join(topologies)}: " + ", ".join(f"{n} {s}" for s, n in counts.items()), highlight=False)
    if part and options.record:
        everywhere = []
        if not options.family:
            everywhere = [_prove(family, part.everywhere, processes) for family in part.families]
            everywhere += [_prove(family, part.everywhere_experts, processes) for family in part.with_experts]
        assert all(finding.status == "proved" for finding in everywhere), everywhere
        record(part, [*findings, *everywhere], keep=bool(options.family))
    if part and (not options.family or options.record):
        write_page(part, findings, Path(options.out), keep=bool(options.family))
        console.print(f"written: {options.out}", highlight=False)
    return counts["failed"]


def _part_of(topologies: list[str]) -> Part | None:
    """The part that all of `topologies` are of."""
    return next((part for part in PARTS if set(topologies) <= set(part.dense)), None)


def _prove(family: str, topologies: tuple[str, ...], processes: Processes) -> Finding:
    try:
        proof = prepare_proof(Request(topologies, family=family, device="cpu"))
    except UserError as error:
        return Finding(family, "refused", str(error))
    try:
        outcomes = list(run_proof(proof, processes))
    except UnsupportedError as error:
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


def write_page(part: Part, findings: list[Finding], page: Path, *, keep: bool) -> None:
    """Write the column of `part` of docs/support.md. keep: the cells of families that were not asked for, too."""
    before, _, after = (page.read_text(encoding="utf-8") if page.exists() else "").partition(AFTER)
    rows = rows_of(before)
    if not keep:
        rows = {family: cells | {part.name: ""} for family, cells in rows.items()}
    for finding in findings:
        cells = rows.setdefault(finding.family, dict.fromkeys((part.name for part in PARTS), ""))
        cells[part.name] = f"{finding.status}: {finding.words}".replace("|", "\\|")
    text = _page({family: cells for family, cells in rows.items() if any(cells.values())}, after)
    page.write_text(f"{text}\n{AFTER}{after}" if after else text, encoding="utf-8")


def page_with(families: str, after: str) -> str:
    """docs/support.md with another part on published checkpoints."""
    return f"{_page(rows_of(families), after)}\n{AFTER}{after}"


def rows_of(page: str) -> dict[str, dict[str, str]]:
    """The rows of docs/support.md: family -> name of a part -> cell, "status: words"."""
    found = {}
    for line in (line for line in page.splitlines() if line.startswith("| ")):
        family, *cells = (cell.strip() for cell in line.strip("|").split(" | "))
        del cells[len(PARTS) :]  # what would be needed
        if len(cells) == len(PARTS) and any(cell.startswith(_STATUSES) for cell in cells):
            same = [cell.replace(_ALIKE, cells[0]) for cell in cells]
            found[family] = dict(zip((part.name for part in PARTS), same, strict=True))
    return found


_ALIKE = "refused: the same"


def _page(rows: dict[str, dict[str, str]], after: str) -> str:
    """docs/support.md. rows: as in `rows_of`. after: its part on published checkpoints."""
    used = ", ".join(f"{name} {number}" for name, number in versions().items())
    counts = {part.name: _statuses(rows, part).count("proved") for part in PARTS}
    lines = [
        "# What goes with what, and which families are proved",
        "",
        counts_line(len(rows), counts, checkpoints_on(after)),
        "",
        "Search it for a `model_type` (`gemma4`) or a checkpoint (`Qwen/Qwen3-8B`); the site's search finds them, too.",
        "The last column of a row that is refused says what would be needed.",
        "",
        f"Written by `.venv/bin/python scripts/prove_families.py --record`; {used}.",
        "",
        "A family is *proved* when its twin (tiny, random weights, every kind of layer) trains as one process does:",
        "every module's output and gradient, every router's choice, the loss, every factor's gradient (every expert's",
        "by itself) and what AdamW makes of it, the saved file; float64, limit 1e-11. The number is the worst relative",
        "error. Everything else is *refused* before training on such a topology, with the message that stands here.",
        "With dp alone the model's own code runs unchanged, and the preflight of `meshlora train` proves that.",
        "",
        "Composites (a vision or audio part beside a text part) train on text here: their text part is split, all else",
        "is whole on every rank.",
        "",
        "Encoder-decoders of text have no row, as they have no sp. On tp=2 t5, mt5, umt5, m2m_100, and bart and mbart",
        "as published, are proved (`meshlora verify --family t5 --topology tp=2`), t5, m2m_100 and bart on dp=2; each",
        "run is by its preflight.",
        "",
        "| | topologies | with experts also | |",
        "|---|---|---|---|",
    ]
    for part in PARTS:
        statuses = _statuses(rows, part)
        counts = ", ".join(f"{statuses.count(status)} {status}" for status in _STATUSES)
        lines.append(f"| {part.name} | {' and '.join(part.dense)} | {' and '.join(part.experts)} | {counts} |")
    names = [part.name for part in PARTS]
    lines += ["", "| family | " + " | ".join((*names, "what would be needed")) + " |", "|---" * (len(names) + 2) + "|"]
    for family, cells in sorted(rows.items()):
        first, *rest = (cells[name] for name in names)
        rest = [_ALIKE if cell == first and cell.startswith("refused") else cell for cell in rest]
        lines.append("| " + " | ".join((family, first, *rest, needs_of(cells.values()))) + " |")
    return "\n".join(lines) + "\n"


def _statuses(rows: dict[str, dict[str, str]], part: Part) -> list[str]:
    return [cells[part.name].partition(":")[0] for cells in rows.values()]


def record(part: Part, findings: list[Finding], *, keep: bool) -> None:
    """Renew what the record says of `part`. keep: families that were not asked for stay as they are."""
    known = _recorded()
    asked = {finding.family for finding in findings} if keep else set(known)
    errors: dict[str, dict[str, float]] = {
        family: {t: error for t, error in found.items() if family not in asked or not part.has(t)}
        for family, found in known.items()
    }
    for finding in findings:
        if finding.status == "proved":
            errors[finding.family] = errors.get(finding.family, {}) | finding.errors
    errors = {family: found for family, found in sorted(errors.items()) if any(map(SPLIT.has, found))}  # no other alone
    later = _that_see_later_tokens(errors, {finding.family for finding in findings})
    written = {"versions": versions(), "see_later_tokens": later, "families": errors}
    RECORD.write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
    for (page, begin, end), text in ((MATRIX, matrix(errors)), (SUMMARY, summary(errors))):
        before, _, rest = page.read_text(encoding="utf-8").partition(begin)
        page.write_text(f"{before}{begin}\n{text}{end}{rest.partition(end)[2]}", encoding="utf-8")


def _that_see_later_tokens(recorded: Iterable[str], asked: Collection[str]) -> list[str]:
    """Those of `recorded` that see later tokens: what is known of them, or of those `asked` for what their twins do."""
    known: list[str] = json.loads(RECORD.read_text(encoding="utf-8"))["see_later_tokens"]
    found = {*known} - {*asked}
    with lift():
        for family in {*asked} & {*recorded}:
            if sees_later_tokens(twin_config(family)):
                found.add(family)
    return sorted(found & {*recorded})


def _recorded() -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = json.loads(RECORD.read_text(encoding="utf-8"))["families"]
    return found


def summary(errors: dict[str, dict[str, float]]) -> str:
    """README's sentence."""
    found = []
    for part, words in ((SPLIT, "tp, sp, ep, etp"), (CONTEXT, "cp"), (STAGES, "pp")):
        (dense, of_dense), (sparse, of_sparse) = _proved(part, errors)
        found.append(f"{words} {len(dense)} dense ({of_dense:.1e}), {len(sparse)} with experts ({of_sparse:.1e})")
    text = "Families of transformers (worst relative error in float64, limit 1e-11): " + "; ".join(found)
    return textwrap.fill(f"{text}.", width=120, break_on_hyphens=False) + "\n"


def _proved(part: Part, errors: dict[str, dict[str, float]]) -> list[tuple[list[str], float]]:
    """(families, their worst error on the topologies of all) that are proved on `part`: dense, with experts."""
    found = []
    for families, common in zip(_kinds(errors), (part.dense, part.experts), strict=True):
        proved = [family for family in families if errors[family].keys() >= {*common}]
        found.append((proved, max(errors[family][t] for family in proved for t in common)))
    return found


def _kinds(errors: dict[str, dict[str, float]]) -> tuple[list[str], list[str]]:
    """(dense, with experts)."""
    sparse = sorted(family for family, found in errors.items() if EXPERTS[0] in found)
    return sorted(errors.keys() - set(sparse)), sparse


def matrix(errors: dict[str, dict[str, float]]) -> str:
    """The support matrix: the worst relative error of each family and topology, from proofs alone."""
    kinds = _kinds(errors)
    text = []
    titles = ("", "The tokens of each sequence cut over cp:", "Decoder layers in stages over pp:")
    for part, title in zip(PARTS, titles, strict=True):
        seen = (t for family in part.families for t in errors[family] if part.has(t))
        tables = [
            _table(errors, part.families, list(dict.fromkeys(seen)), kinds[0], part.dense),
            _table(errors, part.with_experts, list(part.everywhere_experts), kinds[1], part.experts),
        ]
        text += [title, tables[0], "With experts, and adapters on them:", tables[1]]
    return "\n\n".join(filter(None, text)) + "\n"


def _table(
    errors: dict[str, dict[str, float]],
    shown: tuple[str, ...],
    topologies: list[str],
    families: list[str],
    common: tuple[str, ...],
) -> str:
    """Rows for the families `shown`, and one for the worst of all `families` on the topologies `common`."""
    rows = {family: errors[family] for family in shown}
    proved = [errors[family] for family in families if errors[family].keys() >= {*common}]
    rows[f"the worst of all {len(proved)} families"] = {t: max(found[t] for found in proved) for t in common}
    lines = ["| | " + " | ".join(topologies) + " |", "|---" * (len(topologies) + 1) + "|"]
    for name, found in rows.items():
        lines.append(f"| {name} | " + " | ".join(f"{found[t]:.1e}" if t in found else "" for t in topologies) + " |")
    return "\n".join(lines)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Prove or refuse every language model family of transformers.")
    parser.add_argument(
        "--topology",
        action="append",
        metavar="T",
        help="may be repeated; default tp=2 and tp=2,sp, with --record every part",
    )
    parser.add_argument("--family", action="extend", nargs="+", metavar="MODEL_TYPE", help="only these")
    parser.add_argument("--out", default=str(ROOT / "docs/support.md"), metavar="FILE")
    parser.add_argument(
        "--record", action="store_true", help="renew the list of proved families, and what pages say of it"
    )
    options = parser.parse_args()
    if options.record and options.topology and not any(set(options.topology) == set(part.dense) for part in PARTS):
        parser.error("--record is of " + ", or of ".join(" and ".join(part.dense) for part in PARTS))
    if not options.record:
        options.topology = options.topology or list(DENSE)
    return options


if __name__ == "__main__":
    sys.exit(main())

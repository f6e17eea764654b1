"""The report: a proof as one self-contained HTML file.

Does not own: its looks (`report.html.j2`, `report.css`, `report.js`), the document of plain values that it is made of
(`verify.report.document`).

Its content security policy allows no request and no script but its own. The template escapes all text. Without
JavaScript everything is shown, unfolded.
"""

from __future__ import annotations

import base64
import hashlib
import math
import time
from collections import Counter
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from meshlora_ground.files import write_atomically
from meshlora_judge.judge import PHASES
from meshlora_judge.report import figures
from meshlora_judge.report.heatmap import COLUMNS, HeatMap, excess, scale

Document = dict[str, Any]

_NOT_TENSORS = ("sequences", "collectives")  # compared as well, but they are counts
_MAX_LISTED = 12


def write_report(document: Document, path: Path) -> None:
    """Write the report of `document(..., details=True)` to `path` atomically."""
    # A command line may contain bytes that are not UTF-8 (surrogates): shown, never an error.
    page = render(document).encode("utf-8", "backslashreplace")
    write_atomically(path, lambda temporary: temporary.write_bytes(page))


def render(document: Document) -> str:
    """The page as text."""
    script = _part("report.js")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"number": number, "times": times, "several": several, "limit": limit_text}
    environment.filters["on_scale"] = figures.on_scale
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return environment.from_string(_part("report.html.j2")).render(
        style=Markup(_part("report.css")),
        script=Markup(script),
        script_hash=digest,
        date=time.strftime("%Y-%m-%d %H:%M %Z"),
        document=document,
        **_page(document),
    )


def _page(document: Document) -> dict[str, Any]:
    """The values of the template besides the document itself."""
    plain, mutated = list[Document](), list[Document]()
    kills: dict[str, dict[str, Document]] = {}  # mutation -> topology -> run, if it can show
    # Runs without a fault are the proof; those with one show that it would be noticed.
    for run in document["runs"]:
        if run["mutation"] is None:
            plain.append(run)
        else:
            mutated.append(run)
            kills.setdefault(run["mutation"], {})[run["topology"]] = run
    differing = [run for run in plain if not run["passed"]]
    decades = 6.0 if document["dtype"] == "float64" else 2.0
    verdict = "proved"
    if not document["passed"]:  # with all runs right, it is a fault that survived
        verdict = "differs" if differing or not plain else "not proved"
    return {
        "verdict": verdict,
        "model": _model(document),
        "plain": plain,
        "differing": list(map(_differing, differing)),
        "mutated": mutated,
        "survived": sum(run["passed"] for run in mutated),
        "kills": kills,
        "compared": [run["topology"] for run in plain if run["phases"]],
        "num_tensors": _num_tensors(plain),
        "worst": _worst(plain),
        "spread": figures.spread(_measured(plain)),
        "columns": [title for _, _, title in COLUMNS],
        "maps": [HeatMap(run, decades=decades) for run in plain],
        "shown_map": plain.index(differing[0]) if differing else 0,
        "scale": scale(plain, decades=decades),
        "phases": _phases(plain),
        "curves": [(run, figures.curve(run["losses"]), figures.gaps(run)) for run in plain],
        "lora": {key: _short(value) for key, value in document["lora"].items()},
    }


def _num_tensors(plain: list[Document]) -> int:
    number = 0
    for run in plain:
        for name, phase in run["phases"].items():
            if name not in _NOT_TENSORS:
                number += phase["num_tensors"]
    return number


def _model(document: Document) -> str:
    name = document["model"]
    if name == "twin":
        return f"twin of {document['model_type']}"
    return Path(name).name if name.startswith((".", "/", "~")) else name


def _worst(plain: list[Document]) -> Document | None:
    """The tensor with the largest error relative to its limit."""
    worst, most = None, -1.0
    for run in plain:
        for name, phase in run["phases"].items():
            relative, limit = phase["worst_relative"], phase["limit"]
            if (limit or not phase["passed"]) and excess(relative, limit) > most:
                most = excess(relative, limit)
                worst = {"run": run, "phase": name, "name": phase["worst_name"], "relative": relative, "limit": limit}
    return worst


def _measured(plain: list[Document]) -> list[Document]:
    """Tensors whose error counts: exact ones only if they are wrong."""
    found = list[Document]()
    for run in plain:
        for tensors in run.get("tensors", {}).values():
            found += [tensor for tensor in tensors if tensor["limit"] or not tensor["passed"]]
    return found


def _phases(plain: list[Document]) -> list[Document]:
    """One row per phase, with a cell per topology."""
    names = dict[str, None]()  # in the order in which they are first seen
    for run in plain:
        names |= dict.fromkeys(run["phases"])
    result = []
    for name in names:
        row: Document = {"name": name, "title": PHASES.get(name, name), "num_tensors": 0, "limit": None, "cells": []}
        for run in plain:
            phase = run["phases"].get(name)
            row["cells"].append(phase)
            if phase:
                row["num_tensors"] = max(row["num_tensors"], phase["num_tensors"])
                if phase["limit"] is not None:
                    row["limit"] = max(row["limit"] or 0.0, phase["limit"])
        result.append(row)
    return result


def _differing(run: Document) -> Document:
    """A failing run: counts of failed tensors by phase, and the first of them."""
    failed, counts = list[Document](), Counter[str]()
    for phase, tensors in run.get("tensors", {}).items():
        for tensor in tensors:
            if not tensor["passed"]:
                failed.append(tensor | {"phase": phase})
                counts[phase] += 1
    return {"run": run, "failed": failed[:_MAX_LISTED], "num_failed": len(failed), "counts": list(counts.items())}


# Text.


def number(value: float | None) -> str:
    """`3.0e-15`, `0`, `0.70`, or `∞` if not finite."""
    if value is None or not math.isfinite(value):
        return "∞"
    if not value:
        return "0"
    if 0.1 <= value < 99.5:
        return f"{value:#.2g}".removesuffix(".")
    digits, _, exponent = f"{value:.1e}".partition("e")
    return f"{digits}e{int(exponent)}"


def limit_text(value: float | None) -> str:
    """A limit; zero means equal to the bit."""
    if value is None:
        return "–"
    return number(value).replace(".0e", "e") if value else "exact"


def times(relative: float | None, limit: float | None) -> str:
    """`2,600 times below the limit`."""
    ratio = excess(relative, limit)
    if not ratio:
        return "equal to the last bit"
    if math.isinf(ratio):
        return "cannot be compared" if relative is None else "must be exact"
    if ratio > 1:
        return f"{_factor(ratio)} times above the limit"
    return f"{_factor(1 / ratio)} times below the limit"


def _factor(factor: float) -> str:
    if factor < 10:
        return f"{factor:.1f}"
    if factor >= 1e6:
        return number(factor)
    return f"{float(f'{factor:.2g}'):,.0f}"  # 2,600, of 2,594


def several(count: int, noun: str) -> str:
    """`1 fault`, `2 faults`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def _short(value: Any) -> str:
    if not isinstance(value, list):
        return str(value)
    if len(value) > _MAX_LISTED:
        return f"{', '.join(map(str, value[:3]))} … ({len(value)})"
    return ", ".join(map(str, value))


def _part(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")

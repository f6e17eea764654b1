"""The heat map of the report: modules down, phases across, shaded by error.

Does not own: colours (`report.css`) and markup (`report.html.j2`).
"""

from __future__ import annotations

import math
import re
from collections import Counter
from typing import Any

Tensor = dict[str, Any]  # an entry of the document: name, relative, limit, passed, note
Key = tuple[str, str]  # (phase, factor; "" for phases of whole modules)

COLUMNS = (
    ("forward", "", "forward"),
    ("backward", "", "backward"),
    ("gradients", "A", "gradient A"),
    ("gradients", "B", "gradient B"),
    ("deltas", "A", "delta A"),
    ("deltas", "B", "delta B"),
    ("saved_file", "A", "saved A"),
    ("saved_file", "B", "saved B"),
)
CALM_SHADES, ALARM_SHADES = 12, 7
_ROW_OF = {"logits of PEFT": "logits"}
_LAYER = re.compile(r"(.*?\.\d+)(?:\.|$)")


class HeatMap:
    """The heat map of one run, as the template draws it. decades: below the limit, where the calmest shade begins.

    A group is a layer with its modules, or a single module; its heads are the worst cells inside, per column.
    """

    def __init__(self, run: dict[str, Any], *, decades: float) -> None:
        self.run, self._decades = run, decades
        self._rows = _rows(run.get("tensors", {}))
        self.limits = [self._usual_limit((phase, side)) for phase, side, _ in COLUMNS]
        groups: dict[str, list[str]] = {}
        for module in self._rows:
            layer = _LAYER.match(module)
            name = layer[1] if layer else module
            groups.setdefault(name, []).append(module)
        self.groups = [self._group(name, modules) for name, modules in groups.items()]
        layers = [group for group in self.groups if group["is_layer"]]
        # One layer is open, the first that fails if any does: the others look alike.
        failing = [layer for layer in layers if self._fails(layer)]
        self.can_fold = bool(layers)
        for group in (failing or layers)[:1]:
            group["is_open"] = True

    def _usual_limit(self, key: Key) -> float:
        """The most common limit of a column; cells with another one carry it."""
        counts = Counter(row[key]["limit"] for row in self._rows.values() if key in row)
        return counts.most_common(1)[0][0] if counts else 0.0

    def _fails(self, group: dict[str, Any]) -> bool:
        for row in group["rows"]:
            for tensor in self._rows[row["name"]].values():
                if not tensor["passed"]:
                    return True
        return False

    def _group(self, name: str, modules: list[str]) -> dict[str, Any]:
        splits, rows = self.run.get("splits", {}), []
        for module in modules:
            label = module
            if len(modules) > 1:
                label = _inside(name, module) or "whole layer"
            rows.append({"name": module, "label": label, "split": splits.get(module, ""), "cells": self._cells(module)})
        heads = list[Tensor | None]()
        if len(modules) > 1:
            heads = [self._worst(name, modules, column) for column in range(len(COLUMNS))]
        return {"name": name, "is_layer": len(modules) > 1, "is_open": False, "heads": heads, "rows": rows}

    def _worst(self, name: str, modules: list[str], column: int) -> Tensor | None:
        """The worst cell of a column in layer `name`, with its module as `of`."""
        key = COLUMNS[column][:2]
        worst, most = None, (False, -1.0)
        for module in modules:
            tensor = self._rows[module].get(key)
            if tensor is None:
                continue
            place = not tensor["passed"], excess(tensor["relative"], tensor["limit"])
            if place > most:
                worst, most = self._cell(tensor, column, of=_inside(name, module)), place
        return worst

    def _cells(self, module: str) -> list[Tensor | None]:
        """One cell per column; a whole module in columns of factors spans both."""
        row, cells = self._rows[module], list[Tensor | None]()
        for column, (phase, side, _) in enumerate(COLUMNS):
            if side and (phase, "") in row:
                if side == "A":
                    cells.append(self._cell(row[phase, ""], column, span=2))
            elif (phase, side) in row:
                cells.append(self._cell(row[phase, side], column))
            else:
                cells.append(None)
        return cells

    def _cell(self, tensor: Tensor, column: int, *, of: str = "", span: int = 1) -> Tensor:
        """`tensor` with its shade; limit: None if it is that of the column."""
        limit = tensor["limit"]
        if limit == self.limits[column]:
            limit = None
        return tensor | {"shade": shade_of(tensor, decades=self._decades), "limit": limit, "of": of, "span": span}


def _inside(layer: str, module: str) -> str:
    """The name of a module inside a layer; "" for the layer itself."""
    return module.removeprefix(layer).removeprefix(".")


def _rows(tensors: dict[str, list[Tensor]]) -> dict[str, dict[Key, Tensor]]:
    """Module -> its tensors, modules in execution order. Of two with one name, the failing one."""
    rows: dict[str, dict[Key, Tensor]] = {}
    for phase in ("forward", "logits", "backward", "gradients", "deltas", "saved_file"):
        for tensor in tensors.get(phase, []):
            name: str = tensor["name"]
            module, found, side = name.rpartition(".lora_")
            if not found:
                module, side = _ROW_OF.get(name, name), ""
            # The logits are the output of the whole model: a row among the modules.
            key = ("forward" if phase == "logits" else phase, side[:1])
            row = rows.setdefault(module, {})
            if key not in row or row[key]["passed"]:
                row[key] = tensor
    return rows


def excess(relative: float | None, limit: float | None) -> float:
    """Error over limit; infinite if the error is not finite, or not zero where it must be."""
    if relative is None or (relative and not limit):
        return math.inf
    return relative / limit if limit else 0.0


def shade_of(tensor: Tensor, *, decades: float) -> str:
    """z: exactly zero; c0..c11: decades below the limit; a0..a6: from the limit up to 1."""
    relative, limit = tensor["relative"], tensor["limit"]
    if tensor["passed"]:
        if not relative or not limit:
            return "z"
        return f"c{_step(1 + math.log10(relative / limit) / decades, CALM_SHADES)}"
    if not relative or not limit or limit >= 1:
        return f"a{ALARM_SHADES - 1}"
    return f"a{_step(math.log10(relative / limit) / -math.log10(limit), ALARM_SHADES)}"


def _step(place: float, shades: int) -> int:
    return min(max(math.floor(place * shades), 0), shades - 1)


def scale(runs: list[dict[str, Any]], *, decades: float) -> list[tuple[str, float, float, float]]:
    """The legend: (phases, where calm shades begin, smallest and largest limit)."""
    kinds: dict[str, set[float]] = {}
    for run in runs:
        for phase, tensors in run.get("tensors", {}).items():
            kind = "delta, saved" if phase in ("deltas", "saved_file") else "forward to gradient"
            kinds.setdefault(kind, set()).update(tensor["limit"] for tensor in tensors if tensor["limit"])
    return [(what, min(found) / 10.0**decades, min(found), max(found)) for what, found in kinds.items() if found]

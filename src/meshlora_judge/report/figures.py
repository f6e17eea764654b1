"""Geometry of the report's figures: numbers in, coordinates out. No user text, no markup.

Owns: scales, ticks and points, in units of each drawing's viewBox. Does not own: drawing them (`report.html.j2`).
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

Drawing = dict[str, Any]

_FLOOR = -17.0  # lowest decade drawn
_MOST_TONES = 3
_WIDTH, _LEFT, _RIGHT, _TOP, _BOTTOM = 560.0, 52.0, 14.0, 14.0, 28.0  # of curves


def on_scale(value: float | None) -> float | None:
    """Percent of the way from 1e-17 to 1 on a log scale; None for exactly zero."""
    if value is None:
        return 100.0
    if not value:
        return None
    return round(100 * min(max(1 - math.log10(value) / _FLOOR, 0.0), 1.0), 1)


def spread(tensors: list[Drawing]) -> Drawing | None:
    """Histogram of tensor errors: bars of half a decade, with zero and infinity at the ends.

    Each limit is a line with its own tone of bars; if tensors have many limits (low precision), these form a band.
    """
    if not tensors:
        return None
    width, height, top, base = 1120.0, 196.0, 44.0, 162.0
    limits = sorted({tensor["limit"] for tensor in tensors if tensor["limit"]})
    tones = dict[float, int]()
    # In low precision each tensor has a limit of its own: too many for tones.
    if len(limits) <= _MOST_TONES:
        tones = {value: tone for tone, value in enumerate(limits)}
    finite = [tensor["relative"] for tensor in tensors if tensor["relative"] is not None]
    first, last = 2 * int(_FLOOR), 0  # half decades
    if max(finite, default=0.0) >= 1:
        last = 4
    slot = (width - 40) / (last - first + 4)
    counts, totals = Counter[tuple[int, str]](), Counter[int]()
    for tensor in tensors:
        kind = "over"
        if tensor["passed"]:
            kind = f"tone{tones.get(tensor['limit'], 0)}"
        place = _slot(tensor["relative"], first, last)
        counts[place, kind] += 1
        totals[place] += 1
    tops: dict[int, float] = {}
    bars: list[Drawing] = []
    for (place, kind), count in sorted(counts.items(), key=lambda item: item[0][1], reverse=True):  # failures on top
        # A single tensor is still seen beside thousands.
        size = max((base - top) * count / max(totals.values()), 2.0)
        tops[place] = tops.get(place, base) - size
        bars.append(
            {"x": _r(21.5 + slot * place), "y": _r(tops[place]), "w": _r(slot - 3), "h": _r(size)}
            | {"kind": kind, "count": count, "range": _range(place, first, last)}
        )

    def x_of(exponent: float) -> float:
        return _r(20 + slot * (2 + 2 * min(max(exponent, _FLOOR), last / 2) - first))

    drawing: Drawing = {"width": width, "height": height, "base": base, "bars": bars, "totals": []}
    for place, y in tops.items():
        total = {"x": _r(20 + slot * (place + 0.5)), "y": _r(y - 5), "count": totals[place]}
        drawing["totals"].append(total | {"over": (place, "over") in counts})
    drawing["ticks"] = [{"x": x_of(e), "exponent": e} for e in range(int(_FLOOR) + 1, last // 2 + 1, 2)]
    drawing["lines"] = [{"x": x_of(math.log10(value)), "value": value, "tone": tone} for value, tone in tones.items()]
    drawing |= {"zero": None, "infinite": None, "band": None}
    if 0 in totals:
        drawing["zero"] = _r(20 + slot / 2)
    if len(finite) < len(tensors):
        drawing["infinite"] = _r(20 + slot * (last - first + 3.5))
    if limits and not tones:
        drawing["band"] = x_of(math.log10(limits[0])), x_of(math.log10(limits[-1]))
    return drawing


def _slot(relative: float | None, first: int, last: int) -> int:
    """0: zero. 1: a gap. Then half decades. Last: infinity."""
    if relative is None:
        return last - first + 3
    if not relative:
        return 0
    return 2 + math.floor(min(max(2 * math.log10(relative), first), last - 1e-9)) - first


def _range(place: int, first: int, last: int) -> tuple[float | None, float | None]:
    if place == 0:
        return 0.0, 0.0
    if place >= last - first + 3:
        return None, None
    low = (place - 2 + first) / 2
    return 10.0**low, 10.0 ** (low + 0.5)


def curve(losses: dict[str, list[float | None]]) -> Drawing | None:
    """Both losses over the steps; None if a run has none."""
    there = list[float]()
    for values in losses.values():
        there += [value for value in values if value is not None]
    if not there:
        return None
    ticks = _nice_ticks(min(there), max(there))
    low, high = min(ticks[0], min(there)), max(ticks[-1], max(there))
    frame = _frame(max(map(len, losses.values())), height=230.0)
    bottom, num_steps = frame["bottom"], frame["num_steps"]

    def y_of(value: float) -> float:
        return _r(bottom - (bottom - _TOP) * (value - low) / (high - low))

    frame["y_ticks"] = [{"y": y_of(value), "text": f"{value:.6g}"} for value in ticks]
    for side, values in losses.items():
        frame[side] = [(_x(i, num_steps), y_of(v)) for i, v in enumerate(values) if v is not None]
    return frame


def gaps(run: Drawing) -> Drawing | None:
    """The relative difference of the losses at each step, on a log scale from 1e-17."""
    values = list(map(_gap, run["losses"]["ours"], run["losses"]["reference"]))
    if not values:
        return None
    limits = [tensor["limit"] for tensor in run.get("tensors", {}).get("loss", []) if tensor["limit"]]
    limit = min(limits, default=None)
    shown = [math.log10(value) for value in [*values, limit] if value]
    high = math.ceil(min(max(shown, default=_FLOOR + 3) + 0.5, 3.0))
    frame = _frame(len(values), height=150.0)
    bottom = frame["bottom"]

    def y_of(value: float | None) -> float:
        if value is None:
            return _TOP - 4
        if not value:
            return bottom
        return _r(bottom - (bottom - _TOP) * min(max((math.log10(value) - _FLOOR) / (high - _FLOOR), 0.02), 1.0))

    every = max(1, math.ceil((high - _FLOOR) / 5))
    frame["y_ticks"] = [{"y": y_of(10.0**e), "exponent": e} for e in range(int(_FLOOR) + every, high + 1, every)]
    frame |= {"points": [], "limit": None, "worst": 0.0}
    if limit:
        frame["limit"] = {"y": y_of(limit), "value": limit}
    for index, gap in enumerate(values):
        passed = gap is not None and (limit is None or gap <= limit)
        point = {"x": _x(index, len(values)), "y": y_of(gap), "step": index + 1, "gap": gap, "passed": passed}
        frame["points"].append(point)
        if gap is None or frame["worst"] is None:  # of one that is infinite there is no worst
            frame["worst"] = None
        else:
            frame["worst"] = max(frame["worst"], gap)
    return frame


def _gap(ours: float | None, reference: float | None) -> float | None:
    if ours is None or reference is None:
        return None
    return abs(ours - reference) / max(abs(reference), 1e-300)


def _frame(num_steps: int, *, height: float) -> Drawing:
    """The part common to both drawings over steps."""
    for every in (1, 2, 5, 10, 20, 25, 50, 100, 200, 500, 1000, 10**9):
        if num_steps / every <= 8:
            break
    steps = sorted({1, *range(every, num_steps + 1, every)})
    return {
        "width": _WIDTH,
        "height": height,
        "left": _LEFT,
        "right": _WIDTH - _RIGHT,
        "bottom": height - _BOTTOM,
        "x_ticks": [{"x": _x(step - 1, num_steps), "step": step} for step in steps],
        "num_steps": num_steps,
        "show_points": num_steps <= 40,
    }


def _x(index: int, number: int) -> float:
    """The x of a step: evenly spaced, slightly inset."""
    inside, part = _WIDTH - _LEFT - _RIGHT - 24, 0.5
    if number > 1:
        part = index / (number - 1)
    return _r(_LEFT + 12 + inside * part)


def _nice_ticks(low: float, high: float) -> list[float]:
    """About four round numbers that span low..high."""
    if high - low <= 1e-9 * max(abs(high), 1e-300):
        margin = max(abs(high), 1e-3) * 0.05
        low, high = low - margin, high + margin
    raw = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(raw))
    for multiple in (1, 2, 2.5, 5, 10):
        step = power * multiple
        if step >= raw * 0.999:  # a step that is right but for rounding
            break
    return [step * i for i in range(math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9) + 1)]


def _r(value: float) -> float:
    return round(value, 1)

"""Faults around the formula of an objective: wrong code takes the original, the objective, and its inputs."""

from __future__ import annotations

import functools
from typing import Any

from meshlora.run import heads, objectives
from meshlora.verify.faults.fault import fault


def _in_each(wrong: Any, formulas: Any) -> Any:
    return {kind: functools.partial(wrong, formula) for kind, formula in formulas.items()}


of_formula = functools.partial(fault, _in_each, objectives, "FORMULAS")
of_head = functools.partial(fault, _in_each, heads, "FORMULAS")

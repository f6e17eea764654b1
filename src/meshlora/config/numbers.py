"""Rules for numeric options, declared as metadata of their dataclass fields.

Owns: the rules and their check. Does not own: which option has which rule (`config.run`, `config.objective`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from meshlora.common.errors import UserError

_HOLDS: dict[str, Callable[[float], bool]] = {
    "at least 1": lambda value: value >= 1,
    "not negative": lambda value: value >= 0,
    "not negative, at most 1,000,000": lambda value: 0 <= value <= 1e6,
    "above 0": lambda value: value > 0,
    "above 0, at most 1": lambda value: 0 < value <= 1,
    "above 0, at most 1,000,000": lambda value: 0 < value <= 1e6,
    "in [0, 1)": lambda value: 0 <= value < 1,
    "in [0, 0.5): from there on the other answer would be the better": lambda value: 0 <= value < 0.5,
}


def number(default: float | str | None, rule: str = "", *, most: float | None = None) -> Any:
    """A field whose value satisfies `rule`, a key of `_HOLDS`, and is at most `most`, unless it is the default.

    lr: float = number(2e-4, "above 0", most=1e3)
    """
    assert not rule or rule in _HOLDS, rule
    return dataclasses.field(default=default, metadata={"rule": rule, "most": most})


def check_numbers(group: str, values: Any) -> None:
    """Check the fields of `values`, options of `group`. Raises: UserError."""
    for item in dataclasses.fields(values):
        value, rule, most = getattr(values, item.name), item.metadata.get("rule"), item.metadata.get("most")
        if most is not None and isinstance(value, int | float):
            require(value <= most, f"{group}.{item.name}", value, f"at most {most:,.0f}")
        if rule and value != item.default:  # which may be None
            require(_HOLDS[rule](value), f"{group}.{item.name}", value, rule)


def require(ok: bool, name: str, value: object, rule: str) -> None:
    """Raises: UserError unless `ok`."""
    if not ok:
        raise UserError(f"{name}={value}", f"it must be {rule}")

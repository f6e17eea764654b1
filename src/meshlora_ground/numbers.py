"""Rules for numeric options, declared as metadata of their dataclass fields, and their check."""

from __future__ import annotations

import dataclasses
from operator import ge, gt, le, lt
from typing import Any

from meshlora_ground.errors import UserError

# Each rule in the keywords of a JSON schema, which an editor checks.
_RULES: dict[str, dict[str, float]] = {
    "": {},
    "at least 1": {"minimum": 1},
    "not negative": {"minimum": 0},
    "not negative, at most 1,000,000": {"minimum": 0, "maximum": 1e6},
    "above 0": {"exclusiveMinimum": 0},
    "above 1": {"exclusiveMinimum": 1},
    "above 0, below 1": {"exclusiveMinimum": 0, "exclusiveMaximum": 1},
    "above 0, at most 1": {"exclusiveMinimum": 0, "maximum": 1},
    "above 0, at most 1,000,000": {"exclusiveMinimum": 0, "maximum": 1e6},
    "in [0, 1)": {"minimum": 0, "exclusiveMaximum": 1},
    "in [0, 1]": {"minimum": 0, "maximum": 1},
    "in [0, 0.5): from there on the other answer would be the better": {"minimum": 0, "exclusiveMaximum": 0.5},
}
_HOLDS = {"minimum": ge, "exclusiveMinimum": gt, "maximum": le, "exclusiveMaximum": lt}


def number(default: float | str | None, rule: str = "", *, most: float | None = None) -> Any:
    """A field whose value satisfies `rule`, a key of `_RULES`, and is at most `most`, unless it is the default.

    lr: float = number(2e-4, "above 0", most=1e3)
    """
    limits = _RULES[rule] | ({} if most is None else {"maximum": most})
    return dataclasses.field(default=default, metadata={"rule": rule, "most": most, "json_schema_extra": limits})


def check_numbers(group: str, values: Any) -> None:
    """Check the fields of `values`, options of `group`. Raises: UserError."""
    for item in dataclasses.fields(values):
        value, rule, most = getattr(values, item.name), item.metadata.get("rule"), item.metadata.get("most")
        if most is not None and isinstance(value, int | float):
            require(value <= most, f"{group}.{item.name}", value, f"at most {most:,.0f}")
        if rule and isinstance(value, int | float) and value != item.default:
            holds = all(_HOLDS[name](value, limit) for name, limit in _RULES[rule].items())
            require(holds, f"{group}.{item.name}", value, rule)


def require(ok: bool, name: str, value: object, rule: str) -> None:
    """Raises: UserError unless `ok`."""
    if not ok:
        raise UserError(f"{name}={value}", f"it must be {rule}")

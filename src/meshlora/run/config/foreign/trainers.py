"""The trainers whose recipes `meshlora import` reads, and what their keys are here, all together.

    KNOWN["warmup_ratio"].here    # what the parser says of a key that a run file has not

A row of the YAML beside this file says how their keys are read and which these are; then `here`, `note`, `values` and
`off`, as `Fact` has them.

    - approximated: flash_attention
      here: model.attn_implementation
      note: written as sdpa, which also keeps packed sequences apart

Owns: how rows are written down. Does not own: the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from meshlora.run.config.foreign.fact import Fact, How, Trainer, by_name
from meshlora_ground.yaml_reading import parse_yaml

_FILES = Path(__file__).parent


def _read(name: str) -> dict[str, Any]:
    values: dict[str, Any] = parse_yaml((_FILES / f"{name}.yaml").read_text(encoding="utf-8"))
    return values


def _facts(rows: Sequence[dict[str, Any]]) -> tuple[Fact, ...]:
    return tuple(_fact(**row) for row in rows)


def _fact(*, here: str = "", note: str = "", values: Any = None, off: Sequence[Any] = (), **names: Any) -> Fact:
    ((how, theirs),) = names.items()
    if how == "no effect" and not note:
        note = "it changes no number"
    return Fact(theirs, here, cast(How, how), note, values, tuple(off))


_TRANSFORMERS = _read("transformers")
INHERITED = _facts(_TRANSFORMERS["facts"])
OTHERS = _facts(_read("others")["facts"])
NUMBERS = frozenset(_TRANSFORMERS["numbers"].split())


def _ours(names: dict[str, str]) -> dict[str, str]:
    """Their name -> ours."""
    found: dict[str, str] = {}
    for ours, theirs in names.items():
        found |= dict.fromkeys(theirs.split(), ours)
    return found


OPTIMIZERS, SCHEDULES = _ours(_TRANSFORMERS["optimizers"]), _ours(_TRANSFORMERS["schedules"])
OF_SFT_CONFIG: dict[str, Any] = _read("unsloth")["of_sft_config"]


def _trainer(name: str) -> Trainer:
    values = _read(name.replace("-", "_"))
    facts = _facts(values["facts"])
    if "further" in values:  # keys of a trainer that this one extends
        facts += _facts(_read(values["further"])["facts"])
    inherited = _TRANSFORMERS["defaults"] if "defaults" in values["inherits"] else {}
    return Trainer(
        name,
        values["title"],
        values["recipe"],
        tuple(values["signs"]),
        facts,
        inherits="facts" in values["inherits"],
        defaults=inherited | values["defaults"],
        differs=tuple(values["differs"]),
    )


_NAMES = ("axolotl", "llama-factory", "swift", "torchtune", "trl", "unsloth", "automodel")
TRAINERS = {name: _trainer(name) for name in _NAMES}


def facts_of(trainer: Trainer) -> dict[str, Fact]:
    """Their key -> its row, of a trainer and of what it inherits."""
    inherited = INHERITED if trainer.inherits else ()
    return by_name((*trainer.facts, *inherited))


def _known() -> dict[str, Fact]:
    """Name elsewhere -> the row by which a message is written; of several trainers the first in this order.

    Of keys in groups the last part, where it is a word that says enough by itself.
    """
    rows = [*OTHERS, *INHERITED]
    for name in ("trl", "axolotl", "llama-factory", "swift", "unsloth", "torchtune", "automodel"):
        rows += TRAINERS[name].facts
    known: dict[str, Fact] = {}
    for name, fact in by_name(tuple(rows)).items():
        last = name.rpartition(".")[2]
        if last == name or ("_" in last and not last.startswith("_")):
            known.setdefault(last, fact)
    return known


KNOWN = _known()

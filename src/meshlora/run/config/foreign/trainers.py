"""The trainers whose recipes `meshlora import` reads, and what their keys are here, all together.

    KNOWN["warmup_ratio"].here    # what the parser says of a key that a run file has not

Does not own: the rows (the files beside this one).
"""

from __future__ import annotations

from meshlora.run.config.foreign.automodel import AUTOMODEL
from meshlora.run.config.foreign.axolotl import AXOLOTL
from meshlora.run.config.foreign.fact import Fact, Trainer, by_name
from meshlora.run.config.foreign.inherited import INHERITED
from meshlora.run.config.foreign.llama_factory import LLAMA_FACTORY
from meshlora.run.config.foreign.others import OTHERS
from meshlora.run.config.foreign.swift import SWIFT
from meshlora.run.config.foreign.torchtune import TORCHTUNE
from meshlora.run.config.foreign.trl import TRL
from meshlora.run.config.foreign.unsloth import UNSLOTH

TRAINERS = {each.name: each for each in (AXOLOTL, LLAMA_FACTORY, SWIFT, TORCHTUNE, TRL, UNSLOTH, AUTOMODEL)}


def facts_of(trainer: Trainer) -> dict[str, Fact]:
    """Their key -> its row, of a trainer and of what it inherits."""
    inherited = INHERITED if trainer.inherits else ()
    return by_name((*trainer.facts, *inherited))


def _known() -> dict[str, Fact]:
    """Name elsewhere -> the row by which a message is written; of several trainers the first in this order.

    Of keys in groups the last part, where it is a word that says enough by itself.
    """
    rows = [*OTHERS, *INHERITED]
    for trainer in (TRL, AXOLOTL, LLAMA_FACTORY, SWIFT, UNSLOTH, TORCHTUNE, AUTOMODEL):
        rows += trainer.facts
    known: dict[str, Fact] = {}
    for name, fact in by_name(tuple(rows)).items():
        last = name.rpartition(".")[2]
        if last == name or ("_" in last and not last.startswith("_")):
            known.setdefault(last, fact)
    return known


KNOWN = _known()

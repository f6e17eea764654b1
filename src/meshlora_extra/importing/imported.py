"""A recipe of another trainer as a draft of a run file.

    draft = imported(Path("lora-8b.yml"))

Owns: the order of the rules. Does not own: the rules of each trainer, and what the command does with gaps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from meshlora_extra.importing import automodel, axolotl, llama_factory, swift, torchtune, trl, unsloth
from meshlora_extra.importing.beside import Beside, read_beside
from meshlora_extra.importing.draft import Draft, fill_defaults, take_the_rest
from meshlora_extra.importing.reading import read_recipe
from meshlora_extra.importing.sources import settle_adapter

# Name of a trainer -> what reads the keys that are computed from several.
RULES: Mapping[str, Callable[[Draft, Beside], None]] = {
    "axolotl": lambda draft, _: axolotl.rules(draft),
    "llama-factory": llama_factory.rules,
    "swift": lambda draft, _: swift.rules(draft),
    "torchtune": lambda draft, _: torchtune.rules(draft),
    "trl": lambda draft, _: trl.rules(draft),
    "unsloth": lambda draft, _: unsloth.rules(draft),
    "automodel": lambda draft, _: automodel.rules(draft),
}


def imported(
    file: Path, *, whose: str | None = None, processes: int | None = None, beside: Sequence[Path] = ()
) -> Draft:
    """Read a recipe, and write down what each of its keys is here.

    Args:
        whose: name of its trainer; default: as its keys say. processes: that it is started with; default: as a launcher
            beside it says, or 1. beside: accelerate's, DeepSpeed's and LLaMA-Factory's files.

    Raises:
        UserError: a file that cannot be read, is nobody's, or trains something else than an adapter.
    """
    recipe = read_recipe(file, whose)
    found = read_beside([*beside, *(each for each in recipe.beside if each.is_file())], file, recipe.given)
    given = {**recipe.given, **found.given}
    if recipe.trainer.name == "axolotl" and "per_device_train_batch_size" in found.given:
        given["micro_batch_size"] = given.pop("per_device_train_batch_size")
    count = processes or found.processes or int(given.pop("num_processes", 0) or 0) or 1
    given.pop("num_processes", None)
    draft = Draft(dataclasses.replace(recipe, given=given), count)
    for each in found.files:
        if not each.endswith("dataset_info.json"):
            draft.say(f"{each} is read beside it: its numbers win")
        elif recipe.trainer.name == "LLaMA-Factory":  # no other reads it
            draft.say(f"{each} is read beside it")
    RULES[recipe.trainer.name](draft, found)
    take_the_rest(draft)
    settle_adapter(draft)
    fill_defaults(draft)
    return draft

"""Checks of the numbers in a model's configuration, before a model is built.

Owns: refusing sizes for which transformers would build lists and modules for minutes, and values that make every
forward non-finite. Does not own: consistency with each other (transformers) or with the weights (`model.weights`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from meshlora_ground.errors import UserError

# Counts and sizes, by name. Lengths, windows and token counts allocate nothing, and may be large.
_SIZE = re.compile(
    r"^(n|num)_|^vocab|(layers?|heads?|experts?|labels|size|dim|blocks?|depth|channels|rank|embd|hidden|inner)$"
)
_NO_SIZE = re.compile(r"param|token|step|sample|position|window|chunk|context|ctx|length|seq")
_LAYERS = re.compile(r"(layers?|blocks?|depth)$")
_MOST_LAYERS, _MOST_LABELS, _MOST = 1024, 2**20, 2**24
# Fields that must be above 0 for a finite forward.
_POSITIVE = re.compile(r"_(eps|epsilon)$|(^|_)theta$|rotary_emb_base$|base_freq$")


def check_numbers(values: Mapping[str, Any], where: str, *, num_tensors: Callable[[], int] = lambda: 0) -> None:
    """Refuse numbers that no model has.

    where: their source, for messages. num_tensors: number of tensors in the checkpoint, called only if there are more
    layers than in any known model: each layer needs at least one.

    Raises:
        UserError: names the field.
    """
    for name, value, is_in_list in _numbers(values):
        # Longer ones fill the screen, and Python refuses to print thousands of digits.
        given = f"{where}: {name}"
        if abs(value) < 10**40:
            given += f"={value}"
        if isinstance(value, float) and (math.isnan(value) or (math.isinf(value) and not is_in_list)):
            raise UserError(given, "it must be a finite number")  # those in lists may be limits, hence infinite
        if _POSITIVE.search(name) and not is_in_list and not value > 0:
            raise UserError(given, "it must be above 0", "is this the config.json that came with the weights?")
        if not _SIZE.search(name) or _NO_SIZE.search(name):
            continue
        most = _MOST
        if name == "num_labels":
            most = _MOST_LABELS
        # Reading the names of a checkpoint costs time: only where the number is doubtful.
        if _LAYERS.search(name) and value > _MOST_LAYERS:
            most = max(_MOST_LAYERS, num_tensors())
        if value > most:
            raise UserError(given, f"no such model has more than {most:,}")


def _numbers(values: Any, name: str = "", is_in_list: bool = False) -> Iterator[tuple[str, int | float, bool]]:
    """(name, number, whether it is in a list), at every depth."""
    if isinstance(values, Mapping):
        if "__float__" in values:  # transformers' encoding of floats that JSON lacks
            try:
                values = float(values["__float__"])
            except (TypeError, ValueError):
                return
        else:
            for key, value in values.items():
                yield from _numbers(value, str(key), is_in_list)
            return
    if isinstance(values, list | tuple):
        for value in values:
            yield from _numbers(value, name, True)
    # True is an int to isinstance.
    elif isinstance(values, int | float) and not isinstance(values, bool):
        yield name, values, is_in_list

"""The numbers of a model's configuration, before anything is built of them.

Owns: those of which transformers would make lists and modules for minutes, and those with which no forward is finite.
Does not own: whether they fit each other or the weights; transformers and `model.weights` say that.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from meshlora.common.errors import UserError

# Counts and sizes by their names; lengths, windows and numbers of tokens make nothing, and may be large.
_SIZE = re.compile(
    r"^(n|num)_|^vocab|(layers?|heads?|experts?|labels|size|dim|blocks?|depth|channels|rank|embd|hidden|inner)$"
)
_NO_SIZE = re.compile(r"param|token|step|sample|position|window|chunk|context|ctx|length|seq")
_LAYERS = re.compile(r"(layers?|blocks?|depth)$")
_MOST_LAYERS, _MOST_LABELS, _MOST = 1024, 2**20, 2**24
# No forward is finite unless these are above 0.
_POSITIVE = re.compile(r"_(eps|epsilon)$|(^|_)theta$|rotary_emb_base$|base_freq$")


def check_numbers(values: Mapping[str, Any], where: str, *, num_tensors: Callable[[], int] = lambda: 0) -> None:
    """Refuse what no model has.

    where: they come from, for messages. num_tensors: how many its checkpoint holds; asked where there are more layers
    than any known model has, each of which needs one.

    Raises:
        UserError: names the field.
    """
    for name, value, is_in_list in _numbers(values):
        given = f"{where}: {name}={value}" if abs(value) < 10**40 else f"{where}: {name}"
        if isinstance(value, float) and (math.isnan(value) or (math.isinf(value) and not is_in_list)):
            raise UserError(given, "it must be a finite number")  # of lists some are limits, and may be infinite
        if _POSITIVE.search(name) and not is_in_list and not value > 0:
            raise UserError(given, "it must be above 0", "is this the config.json that came with the weights?")
        if not _SIZE.search(name) or _NO_SIZE.search(name):
            continue
        most = _MOST_LABELS if name == "num_labels" else _MOST
        if _LAYERS.search(name) and value > _MOST_LAYERS:
            most = max(_MOST_LAYERS, num_tensors())
        if value > most:
            raise UserError(given, f"no such model has more than {most:,}")


def _numbers(values: Any, name: str = "", is_in_list: bool = False) -> Iterator[tuple[str, int | float, bool]]:
    """(name, number, whether it stands in a list), at every depth."""
    if isinstance(values, Mapping):
        if "__float__" in values:  # transformers' word for what JSON has none for
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
    elif isinstance(values, int | float) and not isinstance(values, bool):
        yield name, values, is_in_list

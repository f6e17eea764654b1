"""The name of the argument by which a forward of transformers takes a cache: each of its releases may have another."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import transformers

from meshlora_ground.errors import UnsupportedError

# transformers 5.24 has `cache` alone; before, most have `past_key_values`, recurrent mixers `cache_params`, and the
# oldest attentions `layer_past`.
_NAMES = ("cache", "past_key_values", "cache_params", "layer_past")


def cache_argument(function: Callable[..., Any]) -> str:
    """The argument of `function` for a cache, by its signature; a model's output has its cache under the same name.

        cache_argument(model.forward)  # "past_key_values"

    Raises:
        UnsupportedError: it takes no cache under a name that is known.
    """
    parameters = inspect.signature(function).parameters
    for name in _NAMES:
        if name in parameters:
            return name
    given = f"{function.__qualname__} of {function.__module__} with transformers {transformers.__version__}"
    rule = f"a cache must be taken under one of the names {', '.join(_NAMES)}"
    raise UnsupportedError(given, rule, "use the transformers of constraints.txt")

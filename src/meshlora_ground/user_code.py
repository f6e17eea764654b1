"""Functions of a user's own, named in a run file: `path/to/file.py:function`, or `package.module:function`.

Owns: loading them, the file that one is in, what is said of one that is not there. Does not own: what a function is
called with, and by which rank (its callers: rank 0 calls, the others are told).

Loading runs the file. The user has named it on purpose; nothing else of a run is ever executed.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from meshlora_ground.errors import UserError, reason

_NAMED = re.compile(r"[\w.]+:\w+|.+\.py:\w+")


def is_function(given: str) -> bool:
    """Whether `given` has the form of a function's name."""
    return _NAMED.fullmatch(given) is not None


def file_of(given: str) -> Path | None:
    """The file of `path/to/file.py:function`; None of one in a package, which is installed and has a version."""
    place = given.rpartition(":")[0]
    return Path(place) if place.endswith(".py") else None


def load_function(option: str, given: str) -> Callable[..., Any]:
    """The function: `load_function("data.map", "rows.py:only_short")`. Runs its file or module, with all it imports.

    option: where it is named, for messages.

    Raises:
        UserError: no such file, module or function; its code raised.
    """
    place, _, name = given.rpartition(":")
    option, file = f"{option}={given}", file_of(given)
    try:
        module = importlib.import_module(place) if file is None else _module_of(file, option)
    except UserError:
        raise
    except ModuleNotFoundError as error:
        raise UserError(option, f"{error}", f"install it, or name its file: path/to/{place}.py:{name}") from None
    except (Exception, SystemExit) as error:  # a user's code may raise anything
        raise UserError(option, f"its code raised {type(error).__name__} ({reason(error)})") from error
    found = getattr(module, name, None)
    if not callable(found):
        raise UserError(option, f"{place} has no function {name}")
    function: Callable[..., Any] = found
    return function


def _module_of(file: Path, option: str) -> ModuleType:
    if not file.is_file():
        raise UserError(option, f"there is no file {file}", f"paths are relative to {Path.cwd()}")
    # Two files of one name are two modules.
    name = f"_user_code_{file.stem}_{hashlib.sha256(str(file.resolve()).encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses of the file look for its names
    spec.loader.exec_module(module)
    return module

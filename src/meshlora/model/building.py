"""Building the model of a configuration on the meta device, within limits.

Owns: names and shapes without memory, aborted if a configuration asks for more than its checkpoint can hold. Does not
own: reading the configuration (`loading.load`), what is derived from the model (`plan`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import PretrainedConfig

from meshlora.model.stored import num_stored
from meshlora_ground.errors import UserError, reason
from meshlora_ground.limits import OutOfTimeError, time_limit
from meshlora_ground.model_class import model_class

_BUILD_S = 120
# Parameters allowed without a look at the checkpoint (each takes about a millisecond), and without any checkpoint.
_UNASKED, _MOST = 2_000, 300_000


def build_on_meta(config: PretrainedConfig, **options: Any) -> Any:
    """`model_class(config).from_config(config, **options)` on the meta device.

    Raises:
        UserError: transformers cannot build it, it takes too long, or it has far more parameters than the checkpoint
            that `config` was read from has tensors.
    """
    what = f"model_type {config.model_type!r}"
    try:
        with torch.device("meta"), _no_more_parameters_than_stored(config), time_limit(_BUILD_S):
            return model_class(config).from_config(config, **options)
    except UserError:
        raise
    except OutOfTimeError:
        raise UserError(what, f"its names and shapes alone take more than {_BUILD_S} s to build", _CHECK) from None
    except Exception as error:  # ImportError for an attention that is not installed, ZeroDivisionError for 0 heads
        raise UserError(what, f"transformers cannot build it ({reason(error)})") from error


_CHECK = "are its numbers of layers and experts right?"


@contextlib.contextmanager
def _no_more_parameters_than_stored(config: PretrainedConfig) -> Iterator[None]:
    """Abort a build in the block that registers far more parameters than there are stored tensors.

    Every parameter is stored, some under two names; merging on load makes them fewer.
    """
    num_parameters, most = 0, _UNASKED

    def count(*_: Any) -> None:
        nonlocal num_parameters, most
        num_parameters += 1
        if num_parameters == _UNASKED:  # small models are built without a look at their files
            most = _MOST
            if config.name_or_path and (stored := num_stored(Path(config.name_or_path))):
                most = 4 * stored + _UNASKED
        if num_parameters > most:
            what = f"model_type {config.model_type!r} with the sizes of its configuration"
            raise UserError(what, f"it has more than {most:,} parameters to store", _CHECK)

    handle = register_module_parameter_registration_hook(count)
    try:
        yield
    finally:
        handle.remove()

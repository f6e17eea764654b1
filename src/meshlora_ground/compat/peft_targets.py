"""Private names of PEFT: targets, as it reads them and as they are stored."""

from __future__ import annotations

import contextlib
from typing import Any

from meshlora_ground.compat import replaced


def refuse_mamba_targets(config: Any, model: Any, leaf: str) -> None:
    """PEFT's check for modules whose fused kernels read weights past an adapter. Publicly it runs only on attaching.
    Raises: ValueError: PEFT refuses the target `leaf` on `model`."""
    from peft.tuners.tuners_utils import _check_lora_target_modules_mamba

    _check_lora_target_modules_mamba(config, model, leaf)


def rewrite_targets(config: Any, model: Any) -> None:
    """Convert `config` as PEFT does on attaching: experts as in transformers 4. Raises: ValueError: gate without up."""
    from peft.utils import transformers_weight_conversion

    transformers_weight_conversion.convert_peft_config_for_transformers(config, model, None)


def targets_as_configured() -> contextlib.AbstractContextManager[None]:
    """Make PEFT take target names literally inside the block, as in every file that it and we write today.

    For many families with experts it reads `gate_proj` in `target_modules`, even in `shared_expert.gate_proj`, as
    transformers 4's name for the experts, and skips the linears of that name. It has no option for that.
    """
    from peft.utils import transformers_weight_conversion

    return replaced(transformers_weight_conversion, "convert_peft_config_for_transformers", lambda *_, **__: None)


def is_stored_in_out(wrapper: Any) -> bool:
    """Whether PEFT reads the experts' weights under a `ParamWrapper` as `[E, in, out]` rather than `[E, out, in]`.

    The shapes of its factors tell, unless `in` equals `out`.
    """
    return not wrapper._did_swap_in_out_features

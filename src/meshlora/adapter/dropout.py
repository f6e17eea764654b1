"""Which adapters can have dropout.

Owns: refusing those whose dropout PEFT or meshlora has not. Does not own: its range (`adapter.values`), the masks.
"""

from __future__ import annotations

from collections.abc import Collection

from peft import LoraConfig

from meshlora.errors import UnsupportedError
from meshlora.plan.rules import ModelPlan


def check_dropout(stored: LoraConfig, targets: Collection[str], plan: ModelPlan) -> None:
    """Refuse a `lora_dropout` that would not be followed. On an embedding there is none, as in PEFT.

    stored: the configuration as it will be saved, in which some linears are parameters.

    Raises:
        UnsupportedError: names the option, and what it does not go with.
    """
    if not stored.lora_dropout:
        return
    given, off = f"LoraConfig(lora_dropout={stored.lora_dropout})", "leave lora_dropout at 0.0"
    if stored.use_dora:
        raise UnsupportedError(f"{given} with use_dora", "the two together are not supported yet", f"{off}")
    if stored.target_parameters:
        raise UnsupportedError(
            f"{given} with an adapter on the parameter {min(stored.target_parameters)}",
            "PEFT has no dropout for experts, routers and linears that it names as parameters",
            f"{off}, or leave these targets out",
        )
    if plan.head in targets:
        raise UnsupportedError(
            f"{given} with an adapter on the output head {plan.head}",
            "it is computed for some trained tokens at a time",
            f"{off}, or leave the head out",
        )

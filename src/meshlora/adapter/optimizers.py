"""What `train.optimizer` asks of an adapter: which of its parameters stay as they are, and what it cannot train.

Owns: these facts, of names and shapes alone. Does not own: the optimizers (`train.optimizer`).
"""

from __future__ import annotations

from meshlora.adapter.plan import AdapterPlan
from meshlora.common.errors import UnsupportedError
from meshlora.plan.rules import ModelPlan


def is_frozen(name: str, optimizer: str) -> bool:
    """Whether the factor `name` stays as it is under `train.optimizer`."""
    return optimizer == "lora_fa" and ".lora_A" in name


def check_trainable(optimizer: str, adapter: AdapterPlan, plan: ModelPlan) -> None:
    """Refuse an adapter that `train.optimizer` would not train as one process does.

    Raises:
        UnsupportedError: names what of it.
    """
    if optimizer == "lora_fa":
        _check_pairs(adapter, plan)


def _check_pairs(adapter: AdapterPlan, plan: ModelPlan) -> None:
    """Refuse other parameters than an A and a B of a linear."""
    given = {
        "modules_to_save, or biases": bool(adapter.copies),
        "use_dora": adapter.config.use_dora,
        "an adapter on the embedding": plan.embedding in adapter.targets,
        "an adapter on parameters (experts, routers)": bool(adapter.stored.target_parameters),
        "an adapter on pieces of fused matrices": any(".lora_A." in name for name in adapter.parameters),
    }
    if what := next((name for name, is_there in given.items() if is_there), None):
        rule = "PEFT's optimizer pairs one A with one B of a linear, and would take other parameters for these"
        raise UnsupportedError(f"train.optimizer=lora_fa with {what}", rule, "leave it out, or use optimizer: adamw")

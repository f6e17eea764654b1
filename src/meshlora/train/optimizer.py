"""Which parameters the optimizer treats alike.

Owns: groups of parameters and their learning rates relative to the schedule's. Does not own: the schedule, the step.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers.pytorch_utils import ALL_LAYERNORM_LAYERS

from meshlora.adapter.manage import active_factors, runtime
from meshlora.config import TrainConfig


def parameter_groups(model: Any, options: TrainConfig) -> list[dict[str, Any]]:
    """Groups for a torch optimizer; `times_lr` is their learning rate over that of the schedule.

    One group without LoRA+. With it (Hayou et al., 2024; the groups are those of PEFT's `create_loraplus_optimizer`):
    A and matrices that are trained in full at the rate of the schedule; B, magnitudes, norms and biases at
    `lora_plus_ratio` times that, biases and layer norms (not RMS norms) without weight decay; factors of the embedding
    at a rate of their own.
    """
    factors = active_factors(model)
    ratio = options.lora_plus_ratio
    if ratio is None:
        return [{"params": [factor.parameter for factor in factors], "times_lr": 1.0}]
    swapped = {name for name, rule in runtime(model).plan.projections.items() if rule.is_swapped}
    groups: dict[str, list[nn.Parameter]] = {"A": [], "embedding": [], "B": [], "no decay": []}
    for factor in factors:
        if ".lora_embedding_" in factor.name:
            group = "embedding"
        elif ".lora_A" in factor.name or ".lora_B" in factor.name:
            group = _letter(factor.name, swapped)
        elif factor.name.endswith(".lora_magnitude_vector"):
            group = "B"
        else:
            group = "A" if factor.parameter.ndim > 1 else "no decay" if _is_undecayed(model, factor.name) else "B"
        groups[group].append(factor.parameter)
    times = {"A": 1.0, "embedding": options.lora_plus_embedding_lr / options.peak_lr, "B": ratio, "no decay": ratio}
    decay = {"no decay": 0.0}
    return [
        {"params": parameters, "times_lr": times[name], "weight_decay": decay.get(name, options.weight_decay)}
        for name, parameters in groups.items()
        if parameters
    ]


def _letter(name: str, swapped: set[str]) -> str:
    """What PEFT calls a factor; of experts whose input it takes for their output that is the other letter."""
    module, _, part = name.rpartition(".lora_")
    return ("B" if part[0] == "A" else "A") if module in swapped else part[0]


def _is_undecayed(model: Any, name: str) -> bool:
    """Whether PEFT leaves a vector of the base without weight decay."""
    owner = model.get_submodule(name.rpartition(".")[0])
    return "bias" in name or isinstance(owner, tuple(ALL_LAYERNORM_LAYERS))

"""The optimizer of a run, and its parameter groups.

Owns: which optimizer `train.optimizer` names; groups of parameters and their learning rates relative to the schedule's.
Does not own: the step (`run.lora_fa`, `run.eight_bit`, torch), schedules (`run.learning_rate`), optimizers of a
user's own (`train.elementwise`), the compatibility of settings (`config`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import ALL_LAYERNORM_LAYERS

from meshlora.adapter.attach import active_factors, runtime
from meshlora.run.config.run_file import TrainConfig
from meshlora.run.eight_bit import AdamW8bit
from meshlora.run.lora_fa import LoraFA, corrections
from meshlora.run.optimizers import is_frozen


def make_optimizer(model: Any, groups: list[dict[str, Any]], options: TrainConfig) -> torch.optim.Optimizer:
    """The optimizer of the active adapter. groups: from `parameter_groups`. Collective.

    Its state of a factor is `exp_avg` and `exp_avg_sq`, of the factor's shape except in 8 bits, and `step`.
    """
    adam: dict[str, Any] = {"lr": options.lr, "betas": (options.beta1, options.beta2), "eps": options.eps}
    if options.optimizer == "lora_fa":
        return LoraFA(groups, corrections(model, active_factors(model)), **adam)
    if options.optimizer == "adamw_8bit":
        state = runtime(model)
        assert state.active is not None
        parameters = state.adapters[state.active].plan.parameters
        return AdamW8bit(groups, active_factors(model), parameters, state.mesh, least=options.min_8bit_size, **adam)
    # Fused: one kernel for many parameters, as adapters on experts have many.
    return torch.optim.AdamW(groups, weight_decay=options.weight_decay, fused=True, **adam)


def parameter_groups(model: Any, options: TrainConfig) -> list[dict[str, Any]]:
    """Groups for a torch optimizer, without frozen factors; `times_lr` is the ratio of their learning rate to the
    schedule's.

    One group without LoRA+. With it (Hayou et al., 2024; groups as in PEFT's `create_loraplus_optimizer`): A and fully
    trained matrices at the schedule's rate; B, magnitudes, norms and biases at `lora_plus_ratio` times that, biases and
    layer norms (not RMS norms) without weight decay; factors of the embedding at a separate rate. Without
    `decay_biases_and_norms`, biases and norms of every kind have no weight decay, with or without LoRA+.
    """
    # PEFT names A and B by their sides of the stored matrix, which some experts have transposed.
    swapped = {name for name, rule in runtime(model).plan.projections.items() if rule.is_swapped}
    ratio = options.lora_plus_ratio
    times = {"A": 1.0, "all": 1.0}
    if ratio is not None:
        times |= {"B": ratio, "embedding": options.lora_plus_embedding_lr / options.peak_lr}
    groups: dict[tuple[str, bool], list[nn.Parameter]] = {}
    for factor in active_factors(model):
        if is_frozen(factor.name, options.optimizer):
            continue
        kind = "all" if ratio is None else _kind(factor.name, factor.parameter.ndim, swapped)
        is_decayed = options.decay_biases_and_norms or not _is_bias_or_norm(model, factor.name)
        if kind == "vector":
            kind, is_decayed = "B", is_decayed and not _is_undecayed(model, factor.name)
        groups.setdefault((kind, is_decayed), []).append(factor.parameter)
    return [
        {"params": parameters, "times_lr": times[kind], "weight_decay": options.weight_decay if is_decayed else 0.0}
        for (kind, is_decayed), parameters in groups.items()
    ]


def _kind(name: str, num_dims: int, swapped: set[str]) -> str:
    """The LoRA+ group of a factor as in PEFT: A, B, embedding, or vector, for biases of B and vectors of the base."""
    if ".lora_embedding_" in name:
        return "embedding"
    if name.endswith(".lora_B.bias"):
        return "vector"
    if ".lora_A" in name or ".lora_B" in name:
        module, _, part = name.rpartition(".lora_")
        is_a = (part[0] == "A") != (module in swapped)  # PEFT swaps input and output of some experts
        return "A" if is_a else "B"
    if name.endswith(".lora_magnitude_vector"):
        return "B"
    return "A" if num_dims > 1 else "vector"


def _is_undecayed(model: Any, name: str) -> bool:
    """Whether PEFT exempts a vector from weight decay."""
    owner = model.get_submodule(name.rpartition(".")[0])
    return "bias" in name or isinstance(owner, tuple(ALL_LAYERNORM_LAYERS))


def _is_bias_or_norm(model: Any, name: str) -> bool:
    """Whether a parameter is a bias, of the base or of B, or belongs to a norm."""
    owner, _, part = name.rpartition(".")
    if ".lora_" in name:
        return part == "bias"
    return "bias" in part or "norm" in type(model.get_submodule(owner)).__name__.lower()

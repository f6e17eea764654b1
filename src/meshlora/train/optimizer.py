"""The optimizer of a run, its parameter groups, and learning-rate schedules.

Owns: which optimizer `train.optimizer` names; groups of parameters and their learning rates relative to the schedule's;
schedules, pure functions of the optimizer step; which optimizers and rates a mesh takes. Does not own: the step
(`train.lora_fa`, `train.eight_bit`, torch), the compatibility of settings (`config`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import ALL_LAYERNORM_LAYERS

from meshlora.adapter.attach import active_factors, runtime
from meshlora.adapter.optimizers import is_frozen
from meshlora.comm.groups import Mesh
from meshlora.common.errors import UnsupportedError, UserError
from meshlora.config.run import TrainConfig
from meshlora.plan.topology import LAYERS, Topology
from meshlora.train.eight_bit import AdamW8bit
from meshlora.train.lora_fa import LoraFA, corrections

# Optimizers that treat each element by itself, so that a shard of a factor is updated as the whole one would be.
_ELEMENTWISE = (
    torch.optim.AdamW,
    torch.optim.Adam,
    torch.optim.SGD,
    torch.optim.Adagrad,
    torch.optim.RMSprop,
)
WHOLE = "it uses whole matrices, or rounds their blocks, and a rank has a part of each"


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


def check_optimizer(kind: type, mesh: Mesh) -> None:
    """Refuse an optimizer that may not treat each element by itself.

    Raises:
        UnsupportedError: its class is none of those that are known to.
    """
    if mesh.topology.world > 1 and kind not in _ELEMENTWISE:
        names = ", ".join(known.__name__ for known in _ELEMENTWISE)
        raise UnsupportedError(f"the optimizer {kind.__name__}", WHOLE, f"use torch's {names}")


def check_rates(of_ranks: Sequence[float], topology: Topology) -> None:
    """Refuse learning rates, summed over the groups of each rank's optimizer, that differ within a stage.

    Raises:
        UserError: they do, on all ranks.
    """
    for ranks in topology.groups_over(frozenset(topology.sizes) - LAYERS):
        if len({of_ranks[rank] for rank in ranks}) > 1:
            each = ", ".join(f"{of_ranks[rank]:g} on rank {rank}" for rank in ranks)
            rule = "all ranks make the same update of their parts"
            raise UserError(f"learning rates that differ: {each}", rule, "set them alike, as a scheduler on each does")


def parameter_groups(model: Any, options: TrainConfig) -> list[dict[str, Any]]:
    """Groups for a torch optimizer, without frozen factors; `times_lr` is the ratio of their learning rate to the
    schedule's.

    One group without LoRA+. With it (Hayou et al., 2024; groups as in PEFT's `create_loraplus_optimizer`): A and fully
    trained matrices at the schedule's rate; B, magnitudes, norms and biases at `lora_plus_ratio` times that, biases and
    layer norms (not RMS norms) without weight decay; factors of the embedding at a separate rate. Without
    `decay_biases_and_norms`, biases and norms of every kind have no weight decay, with or without LoRA+.
    """
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
    """The LoRA+ group of a factor as in PEFT: A, B, embedding, or vector, for vectors of the base."""
    if ".lora_embedding_" in name:
        return "embedding"
    if ".lora_A" in name or ".lora_B" in name:
        module, _, part = name.rpartition(".lora_")
        is_a = (part[0] == "A") != (module in swapped)  # PEFT swaps input and output of some experts
        return "A" if is_a else "B"
    if name.endswith(".lora_magnitude_vector"):
        return "B"
    return "A" if num_dims > 1 else "vector"


def _is_undecayed(model: Any, name: str) -> bool:
    """Whether PEFT exempts a vector of the base from weight decay."""
    owner = model.get_submodule(name.rpartition(".")[0])
    return "bias" in name or isinstance(owner, tuple(ALL_LAYERNORM_LAYERS))


def _is_bias_or_norm(model: Any, name: str) -> bool:
    """Whether a parameter is a bias of the base, or belongs to a norm."""
    owner, _, part = name.rpartition(".")
    if ".lora_" in name:
        return False
    return "bias" in part or "norm" in type(model.get_submodule(owner)).__name__.lower()


def learning_rate(step: int, *, options: TrainConfig, steps: int) -> float:
    """Rate of optimizer step `step` of `steps`, from 0, by `options.schedule`.

    Every schedule but `cycle` first rises linearly for `warmup_steps`. Neither end wastes a step: step 0 of a warm-up
    has 1/warmup_steps of the peak rate, unless `warmup_from_zero`, and the last step of a decay is still above the
    final rate. `cosine_of_run` is the cosine of the whole run, of which the warm-up replaces the first part.
    """
    if options.schedule == "cycle":
        return piecewise_linear(step, options.cycle)
    if step < options.warmup_steps:
        return options.lr * (step + (not options.warmup_from_zero)) / options.warmup_steps
    t, remaining = step - options.warmup_steps, max(1, steps - options.warmup_steps)
    if options.schedule == "cosine_of_run":
        t, remaining = step, steps
    if options.schedule == "inverse_sqrt":
        # Vaswani et al. (2017): the peak is at the end of the warm-up; without one, at the first step.
        start = max(1, options.warmup_steps)
        return options.lr * math.sqrt(start / (start + t))
    if options.schedule == "warmup_stable_decay":
        t, remaining = max(0, t - (remaining - options.decay_steps)), options.decay_steps
    span = options.lr - options.min_lr
    return options.min_lr + span * _LEFT[options.schedule](min(1.0, t / max(1, remaining)))


# Remaining fraction of the way from peak to final rate, after fraction `x` of the decay.
_LEFT: Mapping[str, Callable[[float], float]] = {
    "constant": lambda x: 1.0,
    "linear": lambda x: 1.0 - x,
    "cosine": lambda x: (1.0 + math.cos(math.pi * x)) / 2.0,
    "cosine_of_run": lambda x: (1.0 + math.cos(math.pi * x)) / 2.0,
    "warmup_stable_decay": lambda x: 1.0 - x,
}


def piecewise_linear(step: int, points: Mapping[int, float]) -> float:
    """Linear interpolation at `step` between `points`, step -> rate; constant beyond the first and last."""
    known = sorted(points.items())
    for (start, low), (end, high) in itertools.pairwise(known):
        if start <= step < end:
            return low + (high - low) * (step - start) / (end - start)
    return known[0][1] if step < known[0][0] else known[-1][1]

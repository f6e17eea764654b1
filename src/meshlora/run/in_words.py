"""A run in words: its scale, the arithmetic of its batches, its rates, and which values are our defaults.

For `meshlora check` and the model card. Does not own: the numbers (`adapter.targets`, `run.learning_rate`).
"""

from __future__ import annotations

import math
from collections.abc import Collection

from meshlora.adapter.plan import AdapterPlan
from meshlora.run.config.run_file import OF_SCHEDULES, RunConfig, TrainConfig
from meshlora_ground.topology import Topology

# Key -> what others take where it is not given: whoever moves a recipe here should see that it changes.
_ELSEWHERE = {
    "lora.lora_alpha": "LLaMA-Factory: 2 r",
    "train.lr": "transformers: 5e-05",
    "train.batch_size": "TRL: 8 a device",
    "data.train_on": "TRL: everything, of messages",
}
_LR_OF_TRL = {"sft": "2e-05", "dpo": "1e-06", "kto": "1e-06", "orpo": "1e-06", "grpo": "1e-06"}


def scale_in_words(adapter: AdapterPlan) -> str:
    """`2 = lora_alpha 16 / r 8`: the factor of `B @ A`."""
    config = adapter.config
    scales = sorted({target.scaling for target in adapter.targets.values()})
    rank = f"r {config.r}"
    if config.rank_pattern or config.alpha_pattern:
        rank = "r, by module"
    if config.use_rslora:
        rank = f"sqrt({rank}), as use_rslora has it"
    if not scales:  # of an adapter without factors
        return "none"
    value = f"{scales[0]:.4g}"
    if len(scales) > 1:
        value += f" to {scales[-1]:.4g}"
    return f"{value} = lora_alpha {config.lora_alpha:g} / {rank}"


def batch_in_words(train: TrainConfig, topology: Topology) -> str:
    """`16 sequences = 4 at once x 2 dp ranks x 2 accumulated`."""
    of_a_rank = math.ceil(train.batch_size / topology.dp)
    at_once = min(train.micro_batch_size, of_a_rank)
    number = math.ceil(of_a_rank / at_once)
    equals = "="
    if at_once * number * topology.dp != train.batch_size:
        equals = "<="  # the last ones are smaller
    ranks = "1 dp rank" if topology.dp == 1 else f"{topology.dp} dp ranks"
    return f"{train.batch_size} sequences {equals} {at_once} at once x {ranks} x {number} accumulated"


def rates_in_words(train: TrainConfig) -> str:
    """`0.0002, linear after 3 steps of warm-up, whose first has 1/3 of it`."""
    if train.schedule == "cycle":
        return f"up to {train.peak_lr:g}, cycle"
    course: str = train.schedule
    for name, (default, _) in OF_SCHEDULES.items():
        value = getattr(train, name)
        if value != default:
            course += f" ({name} {value:g})" if isinstance(value, int | float) else f" ({name} {value})"
    if not train.warmup_steps:
        return f"{train.lr:g}, {course}, without warm-up"
    first = "0" if train.warmup_from_zero else f"1/{train.warmup_steps} of it"
    steps = "1 step" if train.warmup_steps == 1 else f"{train.warmup_steps} steps"
    return f"{train.lr:g}, {course} after {steps} of warm-up, the first at {first}"


def defaults_in_words(config: RunConfig, given: Collection[str]) -> str:
    """The values of keys that are not `given` for which other trainers have another default; "" if there are none."""
    kind, words = config.train.objective.kind, []
    for key, others in _ELSEWHERE.items():
        group, _, name = key.partition(".")
        if key in given or (group == "lora" and config.lora is None) or (name == "train_on" and kind != "sft"):
            continue
        if name == "lr":
            if config.train.schedule == "cycle":
                continue
            others = f"TRL: {_LR_OF_TRL[kind]}" if kind in _LR_OF_TRL else others
        value = 8 if group == "lora" else getattr(getattr(config, group), name)  # 8 is PEFT's
        shown = f"{value:g}" if isinstance(value, float) else value
        words.append(f"{name} {shown} ({others})")
    return ", ".join(words)

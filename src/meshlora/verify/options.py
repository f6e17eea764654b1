"""What a proof is asked for: its options, as a value.

Does not own: which of them are refused (`verify.request`), the case that is made of them (`verify.case`).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from transformers import PretrainedConfig

from meshlora.run.config.run_file import Schedule
from meshlora_ground.objective import Objective, Sft
from meshlora_ground.proof_records import CACHE
from meshlora_judge.case import Case

DEFAULT_LORA: dict[str, Any] = {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"}
DROPOUT = 0.12  # the default of the command
SEED = 3  # not 0, the default of a run
STEPS_OF_OTHERS = 4  # than linear schedules: in three a cosine and a line meet half-way


@dataclass(frozen=True)
class Request:
    """What to prove.

    Attributes:
        model: folder of a checkpoint, or a configuration to run with random weights. family: a `model_type` instead.
        twin: shrink the model's configuration instead of reading its weights.
        plan: file with the family's plan; None: that of a table, or one that is found.
        topologies: as text; "auto" is every one that the model and the number of processes allow.
        lora: fields of `peft.LoraConfig`. default_dropout: lora_dropout of the default adapter, unless on experts.
        reference: fields of the frozen adapter that the objective compares with, unless it does with the base; None: as
            `lora`.
        dtype, steps, seed: of the run. micro_batch_size: sequences per micro-batch. objective, neftune_alpha,
            optimizer, lora_plus_ratio, lora_plus_embedding_lr, packing, quantization, compute: as in a run file.
            schedule and its options: too, for a peak of 0.01. recompute: of all layers,
            "keep_attention": but for their attention, "offload": from inputs on the host. resume: our side stops
            before its last step and resumes from its checkpoint. adapters: from 2 on, also prove that many trained
            together, each against itself alone.
        attn_implementation: as in transformers; None: its choice. kernels: of our side, as in a run file.
        router_aux_loss_coef: as in a run file; None: nonzero for a family with a load-balancing loss.
        routed: the rollouts say the experts of each token, random ones; auto: if that can be proved of the model.
        images: some sequences have images, with random pixels.
        overrides: fields of the twin's configuration.
        data: source of sequences; None: random tokens. nproc: maximum number of processes.
        mutations: faults to inject, one per run, after the runs without any.
        ranks_per_gpu: so many share each GPU.
    """

    topologies: tuple[str, ...]
    model: str | PretrainedConfig | None = None
    family: str | None = None
    twin: bool = False
    plan: str | None = None
    lora: dict[str, Any] = field(default_factory=lambda: dict(DEFAULT_LORA))
    reference: dict[str, Any] | None = None
    default_dropout: float = 0.0
    dtype: str = "float64"
    steps: int = 3
    micro_batch_size: int = 2
    adapters: int = 1
    seed: int = SEED
    objective: Objective = field(default_factory=Sft)
    packing: bool | Literal["auto"] = False
    recompute: bool | Literal["keep_attention", "offload"] = False
    resume: bool = False
    routed: bool | Literal["auto"] = False
    images: bool = False
    attn_implementation: str | None = "eager"
    quantization: str | None = None
    compute: str | None = None
    kernels: Literal["liger", "fused", "none"] = "none"
    router_aux_loss_coef: float | None = None
    neftune_alpha: float = 0.0
    optimizer: Literal["adamw", "adamw_8bit", "lora_fa"] = "adamw"
    lora_plus_ratio: float | None = None
    lora_plus_embedding_lr: float = 1e-6
    schedule: Schedule = "linear"
    warmup_from_zero: bool = False
    min_lr: float = 0.0
    num_cycles: int = 1
    power: float = 1.0
    timescale: int = 0
    decay_steps: int = 0
    decay_type: str = "linear"
    cycle: dict[int, float] = field(default_factory=dict)
    overrides: dict[str, Any] = field(default_factory=dict)
    data: str | None = None
    nproc: int | None = None
    mutations: tuple[str, ...] = ()
    device: str = "auto"
    ranks_per_gpu: int = 1
    trust_remote_code: bool = False
    cache_dir: Path = CACHE


def same_fields(kind: Any, source: object) -> dict[str, Any]:
    """The fields of `kind` that `source` also has, as keyword arguments."""
    names = [item.name for item in dataclasses.fields(kind) if hasattr(source, item.name)]
    return {name: getattr(source, name) for name in names}


def of_schedule(
    kind: Schedule,
    *,
    ends_above_zero: bool,
    starts_at_zero: bool = False,
    decay_type: str = "linear",
    has_timescale: bool = False,
) -> dict[str, Any]:
    """Fields of a request with the schedule `kind`, in the steps and rates of a case.

    ends_above_zero: its final rate. starts_at_zero: its warm-up. decay_type: of warmup_stable_decay. has_timescale: of
    its own, of inverse_sqrt.
    """
    fields: dict[str, Any] = {"schedule": kind, "steps": STEPS_OF_OTHERS, "warmup_from_zero": starts_at_zero}
    fields["decay_type"] = decay_type
    if kind == "linear":
        fields["steps"] = 3
    if ends_above_zero:
        fields["min_lr"] = 0.3 * Case.lr
    if kind == "warmup_stable_decay":
        fields["decay_steps"] = 2
        if decay_type != "linear":  # in the middle of its decay a cosine is a line
            fields |= {"decay_steps": 3, "steps": STEPS_OF_OTHERS + 1}
    if kind == "cosine_with_restarts":
        fields["num_cycles"] = 2
    if kind == "polynomial":
        fields["power"] = 2.0
    if has_timescale:
        fields["timescale"] = 3
    if kind == "cycle":
        fields["cycle"] = {0: 0.2 * Case.lr, 1: Case.lr, 3: 0.4 * Case.lr}
    return fields

"""What the judge is told of a run: its base model and its training, as plain values.

Owns: their names and defaults, which are those of a run file. Does not own: run files, their rules, or what becomes of
them here (`meshlora.verify.alone`).
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field

from meshlora_ground.objective import Objective, Sft


@dataclass(frozen=True)
class Base:
    """A base model.

    Attributes:
        path: checkpoint folder. dtype: a name of torch. attn_implementation: as in transformers.
        quantization: of the frozen weights: nf4, int8, mxfp4, nvfp4, fp8; keep, as they are stored; or None.
        compute: products in float8: fp8, fp8_backward, or None.
    """

    path: str
    _: KW_ONLY
    dtype: str
    attn_implementation: str | None = None
    trust_remote_code: bool = False
    quantization: str | None = None
    compute: str | None = None


@dataclass(frozen=True, kw_only=True)
class Training:
    """A training: all that its steps depend on but the model, the adapter and the data. Sizes are in sequences.

    Attributes:
        steps: optimizer steps. batch_size: of a step; micro_batch_size: of a forward.
        lr: peak rate. schedule: a key of `meshlora_judge.reference.rates_of`, with its options.
        optimizer: adamw; adamw_8bit, in 8 bits from min_8bit_size elements on; or lora_fa.
        decay_biases_and_norms: apply weight decay to biases and norm weights too.
        max_grad_norm: 0: no clipping. neftune_alpha: of the noise on embedded tokens.
        router_aux_loss_coef: weight of the routers' load-balancing loss.
        lora_plus_ratio: the rate of B over that of A; lora_plus_embedding_lr: of factors on the embedding.
        seed: of the order of the data, dropout and noise.
    """

    steps: int
    batch_size: int = 16
    micro_batch_size: int = 4
    lr: float = 2e-4
    schedule: str = "linear"
    warmup_steps: int = 0
    warmup_from_zero: bool = False
    min_lr: float = 0.0
    num_cycles: int = 1
    power: float = 1.0
    timescale: int = 0
    decay_steps: int = 0
    decay_type: str = "linear"
    cycle: dict[int, float] = field(default_factory=dict)
    optimizer: str = "adamw"
    min_8bit_size: int = 4096
    weight_decay: float = 0.0
    decay_biases_and_norms: bool = True
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    max_grad_norm: float = 1.0
    objective: Objective = field(default_factory=Sft)
    neftune_alpha: float = 0.0
    router_aux_loss_coef: float = 0.0
    lora_plus_ratio: float | None = None
    lora_plus_embedding_lr: float = 1e-6
    seed: int = 0

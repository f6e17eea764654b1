"""Shapes of gpu.py: models of a real size, the tokens of a step, the arithmetic that it takes at the least.

Owns: configurations, batches, FLOPs. Does not own: who runs them.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from peft import LoraConfig
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen3MoeConfig

from meshlora.train.batch import Batch
from meshlora.train.collation import collate
from meshlora.train.packing import joined, with_positions
from meshlora_ground.dataset import Sequence

RANK = 16
LONG, LONGEST = 32_768, 131_072  # tokens of long rows
SHALLOW = 2  # layers of a comparison in float32
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj"]


@dataclass(frozen=True)
class Shape:
    """A model, the tokens of a step, what is trained, and what is asked for.

    Attributes:
        is_packed: also measured on packed rows. recompute: all layers compute their activations twice. is_quantized:
            measured with its base in few bits too. steps: timed ones of a turn.
    """

    name: str
    config: PretrainedConfig
    batch_size: int
    seq_len: int
    lora: Mapping[str, Any]
    is_packed: bool = True
    recompute: bool = False
    is_quantized: bool = False
    steps: int = 3
    target_speed: float | None = None  # against PEFT + SDPA
    target_memory: float | None = None
    target_rate: float | None = None  # tokens/s on an H200
    # With kernels of liger-kernel on both sides, against PEFT + liger-kernel: one sequence a row, packed rows, and ours
    # with products in float8, or with kept attention where PEFT recomputes all.
    target_liger: float | None = None
    target_packed: float | None = None
    target_float8: float | None = None
    target_kept: float | None = None
    target_busy: float | None = None  # a step, of the time in which the GPU has work

    @property
    def has_experts(self) -> bool:
        return hasattr(self.config, "num_experts")

    def lora_config(self) -> LoraConfig:
        """B is not zero: every gradient is one."""
        return LoraConfig(r=RANK, lora_alpha=2 * RANK, init_lora_weights=False, **self.lora)


def _llama(**sizes: Any) -> LlamaConfig:
    return LlamaConfig(**{"vocab_size": 128_256, "max_position_embeddings": 8192, "use_cache": False, **sizes})


def real_shapes() -> list[Shape]:
    """Llama 3.1 8B, Llama 3.2 1B, 12 of the 48 layers of Qwen3-30B-A3B, 8B on longer rows, 8 of 8B in few bits."""
    eight = _llama(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
    )
    one = _llama(
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
    )
    experts = Qwen3MoeConfig(
        vocab_size=151_936,
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_hidden_layers=12,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        max_position_embeddings=8192,
        use_cache=False,
    )
    long = resized(eight, max_position_embeddings=LONGEST)
    dense = {"target_modules": "all-linear"}
    mixed = {"target_modules": LINEARS, "target_parameters": EXPERTS}
    return [
        Shape(
            "8b",
            eight,
            1,
            4096,
            dense,
            target_speed=1.3,
            target_memory=0.75,
            target_rate=14_000,
            target_liger=1.35,
            target_packed=1.6,
            target_float8=1.6,
            target_busy=1.06,
        ),
        Shape("1b", one, 4, 4096, dense, target_liger=1.3, target_packed=1.7, target_busy=1.06),
        Shape("moe", experts, 1, 4096, mixed, target_speed=1.8, target_busy=1.06),
        Shape("32k", long, 1, LONG, dense, is_packed=False, recompute=True, steps=1, target_kept=1.2),
        Shape("128k", long, 1, LONGEST, dense, is_packed=False, recompute=True, steps=1),
        Shape("8b-8k", eight, 1, 8192, dense, target_liger=1.35, target_packed=1.6, target_float8=1.6, steps=2),
        Shape("quantized", resized(eight, num_hidden_layers=8), 1, 4096, dense, is_packed=False, is_quantized=True),
    ]


def tiny(shape: Shape) -> Shape:
    """The same family with sizes for a CPU, and no targets."""
    sizes = {
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 128,
    }
    if shape.has_experts:
        sizes |= {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
    if shape.is_quantized:
        sizes |= {"hidden_size": 64, "intermediate_size": 128}  # whole blocks of 64
    config = resized(shape.config, **sizes)
    no_targets = dict.fromkeys(field.name for field in fields(shape) if field.name.startswith("target_"))
    return replace(shape, config=config, batch_size=min(shape.batch_size, 2), seq_len=64, **no_targets)


def shallow(shape: Shape) -> Shape:
    """Two layers of it on one short row: for a comparison in float32."""
    config = resized(shape.config, num_hidden_layers=SHALLOW)
    return replace(shape, config=config, batch_size=1, seq_len=min(shape.seq_len, 512))


def resized(config: PretrainedConfig, **sizes: Any) -> PretrainedConfig:
    """A copy of another size."""
    made = copy.deepcopy(config)
    for name, value in sizes.items():
        setattr(made, name, value)
    if getattr(made, "layer_types", None):
        made.layer_types = made.layer_types[: made.num_hidden_layers]
    return made


def packed_lengths(seq_len: int) -> list[int]:
    """Lengths of the sequences of a packed row: from half of it to a thirty-second, unlike each other."""
    lengths = [seq_len // 2 - seq_len // 32, seq_len // 4, seq_len // 8 + seq_len // 32, seq_len // 16, seq_len // 32]
    return [*lengths, seq_len - sum(lengths)]


@dataclass(frozen=True)
class Inputs:
    """A batch on the device. labels: `[B, S]`, those of the tokens themselves, -100 where a sequence begins."""

    name: str
    lengths: list[int]
    ids: Tensor
    labels: Tensor
    shifted: Tensor  # labels[b, t + 1]
    position_ids: Tensor | None
    ours: Batch  # the same as meshlora's trainer has it: packed sequences all in one row, counted on the host

    @property
    def num_tokens(self) -> int:
        return self.ids.numel()

    @property
    def num_trained(self) -> int:
        return self.ours.num_trained_tokens


def inputs_of(shape: Shape, device: torch.device) -> list[Inputs]:
    """One sequence a row, and packed rows, if they are asked for."""
    generator = torch.Generator().manual_seed(0)
    size = (shape.batch_size, shape.seq_len)
    ids = torch.randint(0, shape.config.vocab_size, size, generator=generator)
    found = []
    kinds = {"one sequence": [shape.seq_len]}
    if shape.is_packed:
        kinds["packed"] = packed_lengths(shape.seq_len)
    for name, lengths in kinds.items():
        positions = torch.cat([torch.arange(length) for length in lengths]).expand(size).contiguous()
        labels = torch.where(positions == 0, -100, ids)
        shifted = F.pad(labels[:, 1:], (0, 1), value=-100)
        tensors = (t.to(device) for t in (ids, labels, shifted))
        packed = positions.to(device) if len(lengths) > 1 else None
        found.append(Inputs(name, lengths, *tensors, packed, _joined(ids, lengths).to(device)))
    return found


def _joined(ids: Tensor, lengths: list[int]) -> Batch:
    """All sequences of these rows in one; of one sequence each, the rows."""
    sequences = [
        Sequence(part.numpy().astype(np.int32), np.ones(len(part), dtype=bool))
        for row in ids
        for part in row.split(lengths)
    ]
    if len(lengths) == 1:
        return collate(sequences, pad_token_id=0)
    batch = collate([joined(sequences)], pad_token_id=0)
    return with_positions(batch, [[len(s.input_ids) for s in sequences]], [range(len(sequences))])


def flops_per_token(shape: Shape, lengths: list[int]) -> float:
    """The least that a step needs: frozen products twice (forward, gradient of the input), LoRA's three times, causal
    attention two products forward and four backward."""
    c = shape.config
    head_dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    heads, groups = c.num_attention_heads * head_dim, c.num_key_value_heads * head_dim
    attention = [(c.hidden_size, heads), (c.hidden_size, groups), (c.hidden_size, groups), (heads, c.hidden_size)]
    if shape.has_experts:
        width, choices = c.moe_intermediate_size, c.num_experts_per_tok
        # Gate and up are one projection with one A.
        adapted = attention + choices * [(c.hidden_size, 2 * width), (width, c.hidden_size)]
        frozen = [*adapted, (c.hidden_size, c.num_experts)]
    else:
        width = c.intermediate_size
        adapted = frozen = [*attention, *(2 * [(c.hidden_size, width)]), (width, c.hidden_size)]
    per_layer = 4 * sum(a * b for a, b in frozen) + 6 * RANK * sum(a + b for a, b in adapted)
    context = sum(length * (length + 1) / 2 for length in lengths) / sum(lengths)
    return c.num_hidden_layers * (per_layer + 12 * context * heads) + 4 * c.hidden_size * c.vocab_size


def describe(shape: Shape) -> str:
    """The shape in words, with sizes from the model as transformers builds it, which takes no memory."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(copy.deepcopy(shape.config), dtype=torch.bfloat16)
    num_params = sum(p.numel() for p in model.parameters())
    trained = shape.lora.get("target_parameters", []) or ["all linears"]
    giga = [flops_per_token(shape, lengths) / 1e9 for lengths in ([shape.seq_len], packed_lengths(shape.seq_len))]
    return (
        f"{shape.config.model_type}, {shape.config.num_hidden_layers} layers, {num_params / 1e9:.3f} billion "
        f"parameters ({num_params * 2 / 2**30:.2f} GiB in bf16), LoRA on {'attention, ' if shape.has_experts else ''}"
        f"{', '.join(trained)}, {shape.batch_size} × {shape.seq_len} tokens, "
        f"{'all layers recomputed, ' if shape.recompute else ''}{giga[0]:.2f} GFLOP a token "
        f"({giga[1]:.2f} packed)"
    )

"""Runs that are stopped, with few or many micro-batches, or of several adapters: what of their faults must come out."""

from __future__ import annotations

from typing import Any

from meshlora.verify.faults.registry import MUTATIONS
from meshlora.verify.options import DROPOUT
from tests.verify.diagnoses import FIRST_Q, FIRST_Q_A, LAST_DOWN_B


def needing(word: str) -> list[str]:
    """The faults that show only in a run that has it."""
    return [name for name, fault in MUTATIONS.items() if word in fault.needs]


_DORA = {"r": 4, "lora_alpha": 6, "use_dora": True, "target_modules": ["q_proj", "o_proj", "up_proj", "down_proj"]}
_ALONE = "what one adapter alone has"
_MOMENTS = ("deltas", FIRST_Q_A, "what the optimizer makes of them")
RUNS: dict[str, tuple[dict[str, Any], dict[str, tuple[str, str, str]]]] = {
    "a run that is stopped and goes on": (
        {"family": "llama", "topologies": ("tp=2,sp",), "resume": True, "default_dropout": DROPOUT},
        dict.fromkeys(needing("resume"), _MOMENTS)
        | {
            "masks_begin_again": ("loss", "loss of step 3", "masks of another step"),
            "moments_of_another_rank": ("deltas", f"{FIRST_Q}.lora_B", "what the optimizer makes of them"),
            "resumed_one_step_late": ("deltas", FIRST_Q_A, "2 optimizer steps were taken, not 3"),
            "order_begins_again": ("deltas", FIRST_Q_A, "later ones take other sequences"),
            "schedule_begins_again": ("deltas", FIRST_Q_A, "learning rate of step 3 is 0.01, not 0.005"),
        },
    ),
    "five micro-batches a step": (
        {"family": "llama", "topologies": ("tp=2",), "micro_batch_size": 1},
        {"fourth_micro_batch_dropped": ("gradients", LAST_DOWN_B, "")},
    ),
    "one micro-batch a step": (
        {"family": "qwen3_moe", "topologies": ("dp=2",), "micro_batch_size": 5},
        {"balance_of_one_micro_batch_counted_locally": ("loss", "load-balancing loss of step 1", "")},
    ),
    "several adapters at once": (
        {"family": "llama", "topologies": ("tp=2,sp",), "adapters": 3, "default_dropout": DROPOUT},
        {
            "adapters_divided_by_tokens_of_all": ("adapters", "adapter-1: model.layers.1.mlp.down_proj.lora_A", _ALONE),
            "adapters_clipped_as_the_next": ("adapters", "adapter-1: model.layers.0.mlp.down_proj.lora_A", _ALONE),
            "adapters_gradients_kept": ("adapters", "adapter-1: model.layers.0.self_attn.q_proj.lora_A", _ALONE),
            "adapters_dropped_as_the_first": ("adapters", "adapter-2: model.layers.0.self_attn.o_proj.lora_A", _ALONE),
        },
    ),
    "several adapters on experts": (
        {"family": "qwen3_moe", "topologies": ("dp=2,ep=2",), "adapters": 3},
        {
            "adapters_exchanged_at_experts": (
                "adapters",
                "adapter-1: model.layers.1.mlp.experts.base_layer.lora_A",
                _ALONE,
            )
        },
    ),
    "several adapters with DoRA": (
        {"family": "llama", "topologies": ("tp=2",), "adapters": 3, "lora": _DORA},
        {
            "adapters_scaled_by_the_norm_of_the_first": (
                "adapters",
                "adapter-2: model.layers.0.self_attn.o_proj.lora_A",
                _ALONE,
            )
        },
    ),
}

# Faults of fused kernels, which only a GPU has -> (phase, module) where each shows in `tests/verify/test_kernels.py`.
OF_KERNELS = {
    "kernel_norm_without_weight": ("forward", "model.layers.0.input_layernorm"),
    "kernel_gate_and_up_exchanged": ("backward", "model.layers.1.mlp.up_proj"),
    "kernel_rotates_gradients_forward": ("backward", "model.layers.1.self_attn.k_proj"),
    "kernel_writes_product_over_gate": ("backward", "model.layers.1.mlp.up_proj"),
}
# The same of those with low-rank terms, in which gate and up have no output by themselves.
OF_TAILS = {
    "tail_left_out_of_gate": ("forward", "model.layers.0.mlp.down_proj"),
    "tail_left_out_of_gradient_of_product": ("backward", "model.layers.1.post_attention_layernorm"),
    "tail_gradients_of_gate_and_up_exchanged": ("gradients", "model.layers.1.mlp.up_proj.lora_B"),
    "tail_without_scale_of_next_linear": ("forward", "model.layers.0.mlp.down_proj"),
    "chunk_gradient_without_labels": ("backward", "model"),
}
# Those of its sums with the residual stream, which show in what comes after o_proj and down_proj.
OF_SUMS = {
    "sum_without_low_rank_term": ("forward", "model.layers.0.post_attention_layernorm"),
    "sum_without_gradient_of_stream": ("backward", "model.layers.1.self_attn.v_proj"),
    "sum_without_scale_in_gradient": ("backward", "model.layers.1.self_attn.v_proj"),
}

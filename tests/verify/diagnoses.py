"""Where each deliberate fault shows on the family that the kill table is of, and the words of its cause."""

from __future__ import annotations

# The last layer is the first whose gradients are computed, and the first layer the first that runs.
LAST_MLP, FIRST_ATTENTION, LAST_ATTENTION = "model.layers.1.mlp", "model.layers.0.self_attn", "model.layers.1.self_attn"
FIRST_Q, FIRST_Q_A, FIRST_O = (f"{FIRST_ATTENTION}.{leaf}" for leaf in ("q_proj", "q_proj.lora_A", "o_proj"))
LAST_DOWN_B, LAST_EXPERT = f"{LAST_MLP}.down_proj.lora_B", f"{LAST_MLP}.experts.7"

# Of an attention over cp, and of what is kept of its gradients.
SEEN = ("forward", FIRST_O, "what it sees of the tokens of other cp ranks")
LACKING = "lack the terms of the tokens of other cp ranks"

OWN_WEIGHTS = ("forward", FIRST_Q, "its own weights")
LOSS = ("loss", "loss of step 1", "what the objective makes of them")
# Of ranks that each look at their own part of a vocabulary.
OWN_PART = ("loss", "loss of step 1", "its own part of the vocabulary")
EVALUATION = ("loss", "loss of evaluation 1", "what is evaluated, or how it is averaged")

# mutation -> (topology, phase, where, words of the cause).
DIAGNOSES = {
    "row_output_not_reduced": ("tp=2", "forward", FIRST_O, "not reduced over tp"),
    "row_output_averaged": ("tp=2,sp", "forward", FIRST_O, "averaged over tp instead of summed"),
    "row_output_reduced_twice": ("tp=2,sp", "forward", FIRST_O, "reduced over tp twice"),
    "column_bias_of_rank_0": ("tp=2", "forward", FIRST_Q, "bias is missing, or is another rank's"),
    "row_bias_on_every_rank": ("tp=2", "forward", FIRST_O, "bias of a row-parallel linear"),
    "base_shards_reversed": ("tp=2", "loaded_adapter", f"{FIRST_ATTENTION}.o_proj.lora_A", "base weight that it goes"),
    "column_input_gradient_not_reduced": (
        "tp=2",
        "backward",
        "model.layers.1.post_attention_layernorm",
        f"column-parallel linears of {LAST_MLP} is not reduced",
    ),
    "head_input_gradient_not_reduced": ("tp=2,sp", "backward", LAST_MLP, "output head is not reduced"),
    "embedding_rows_of_another_rank": ("tp=2", "forward", "model.embed_tokens", "rows of the embedding"),
    "embedding_of_others_not_masked": ("tp=2", "forward", "model.embed_tokens", "rows of the embedding"),
    "embedding_not_reduced": ("tp=2,sp", "forward", "model.embed_tokens", "embedding is not summed over tp"),
    "logits_gathered_in_another_order": ("tp=2", "logits", "logits", "not joined in the ranks' order"),
    "labels_of_another_rank": ("tp=2", "loss", "loss of step 1", "a vocabulary that is split"),
    "column_input_gradient_reduced_per_linear": ("tp=2", "collectives", "backward allreduce", "once per linear"),
    "column_a_not_summed": ("tp=2", "gradients", f"{LAST_MLP}.up_proj.lora_A", "A of column-parallel linears is not"),
    "row_b_not_summed": ("tp=2,sp", "gradients", LAST_DOWN_B, "B of row-parallel linears is not"),
    "factor_gradients_averaged": ("tp=2", "gradients", LAST_DOWN_B, "averaged over tp"),
    "a_gradient_without_scale": ("tp=2", "gradients", f"{LAST_MLP}.down_proj.lora_A", "0.5 times what it should be"),
    "dp_reduction_skipped": ("dp=2", "gradients", LAST_DOWN_B, "not summed over dp"),
    "dp_mean_of_means": ("dp=2", "gradients", LAST_DOWN_B, "weighed unequally"),
    "local_token_count": ("dp=2", "gradients", LAST_DOWN_B, "its own token count"),
    "micro_batch_means": ("dp=2", "loss", "loss of step 1", "mean of micro-batch means"),
    "accumulation_indices_of_rank_0": ("dp=2", "sequences", "sequence 0", "accumulation index"),
    "dummy_micro_batch_counted": ("dp=2", "sequences", "tokens of step 1", "dummy micro-batch"),
    "first_tokens_counted": ("dp=2", "sequences", "tokens of step 1", "tokens are counted that train nothing"),
    "labels_not_shifted": ("dp=2", "loss", "loss of step 1", "other labels"),
    "epochs_in_one_order": ("dp=2", "deltas", FIRST_Q_A, "later ones take other sequences"),
    "evaluation_per_sequence": ("dp=2", "loss", "loss of evaluation 1", "how it is averaged"),
    "labels_shifted_after_the_split": ("tp=2,sp", "sequences", "tokens of step 1", "labels shifted after"),
    "kaiming_on_local_fan_in": ("tp=2", "fresh_adapter", f"{FIRST_ATTENTION}.o_proj.lora_A", "local fan-in"),
    "a_drawn_per_rank": ("tp=2", "fresh_adapter", FIRST_Q_A, "seed depends on the rank"),
    "lora_scale_divided_by_tp": ("tp=2", "forward", FIRST_Q, "scale is divided by tp"),
    "lora_scale_squared": ("tp=2", "forward", FIRST_Q, "scale is 2 times"),
    "sp_slices_rotated": ("tp=2,sp", "forward", "model.layers.0.input_layernorm", "wrong order"),
    "sp_gather_reversed": ("tp=2,sp", "forward", FIRST_Q, "wrong order"),
    "clip_norm_counts_replicas": ("tp=2", "grad_norm", "norm of step 1", "counted as often as there are ranks"),
    "clip_before_reduction": ("tp=2", "gradients", LAST_DOWN_B, "clipped or scaled before the sum"),
    "clipping_skipped": ("tp=2", "grad_norm", f"clipped {LAST_DOWN_B}", "clipped gradients are not"),
    "warmup_skipped": ("tp=2", "deltas", FIRST_Q_A, "rate of step 2 is 0.00667, not 0.01"),
    "weight_decay_skipped": ("tp=2", "deltas", FIRST_Q_A, "weight decay"),
    "default_betas": ("dp=2", "deltas", FIRST_Q_A, "betas"),
    "last_step_left_out": ("dp=2", "deltas", FIRST_Q_A, "2 optimizer steps were taken, not 3"),
    "scale_of_fresh_squared": (
        "tp=2",
        "fresh_adapter",
        "fresh/adapter_config.json",
        "its scale, is not what PEFT says",
    ),
    "adapter_loaded_on_rank_0_only": ("tp=2", "loaded_adapter", FIRST_Q_A, "hold zeros"),
    "shard_missing_in_file": ("tp=2", "saved_file", "", "shard of tp rank 1 is missing"),
    "shards_reversed_in_file": ("tp=2", "saved_file", "", "reversed order"),
    "whole_entries_duplicated_in_file": ("tp=2", "saved_file", "adapter_model.safetensors", "more than once"),
    "rounded_in_file": ("tp=2", "saved_file", "", "rounded"),
    "extra_entry_in_file": (
        "dp=2",
        "saved_file",
        "run/adapter/adapter_model.safetensors",
        "entries that no factor has",
    ),
    "alpha_doubled_in_file": ("dp=2", "saved_file", "logits of PEFT", "lora_alpha is 32, not 16"),
    "target_missing_in_fresh_file": ("dp=2", "saved_file", "", "target_modules is"),
    "evaluation_remainder_dropped": ("dp=2", *EVALUATION),
    "evaluation_filled_up": ("dp=2", *EVALUATION),
    "evaluation_counts_dummies": ("dp=2", *EVALUATION),
    "sampler_seed_ignored": ("dp=2", "sequences", "sequence 3", "the order of the epoch"),
    "batch_filled_up": ("dp=2", "deltas", FIRST_Q_A, "later ones take other sequences"),
    "fresh_seed_ignored": ("tp=2", "fresh_adapter", FIRST_Q_A, "seed and name determine"),
    "fresh_b_not_zero": ("tp=2", "fresh_adapter", f"{FIRST_ATTENTION}.q_proj.lora_B", "seed and name determine"),
    "learning_rate_constant": ("tp=2", "deltas", FIRST_Q_A, "rate of step 3 is 0.01, not 0.005"),
    "clipped_factor_by_factor": ("tp=2", "grad_norm", f"clipped {LAST_DOWN_B}", "how much they are scaled"),
    "gradient_flipped_in_the_last_step": (
        "tp=2",
        "grad_norm",
        f"clipped {LAST_DOWN_B}, step 3",
        "loss of a later step is right",
    ),
    "clipping_scales_up": (
        "tp=2",
        "grad_norm",
        "clipped model.layers.0.self_attn.q_proj.lora_A, step 3",
        "loss of a later step is right",
    ),
    "norm_after_clipping_reported": ("tp=2", "grad_norm", "norm of step 1", "their norm is not"),
    "ride_ends_at_the_next_linear": ("tp=2,sp", "forward", "model.layers.0.mlp.gate_proj", "how it is split"),
    "ride_gradient_without_scale": ("tp=2,sp", "gradients", f"{LAST_MLP}.up_proj.lora_A", "column-parallel linears is"),
    "ride_gradient_stops_at_a": (
        "tp=2,sp",
        "backward",
        "model.layers.1.post_attention_layernorm",
        f"column-parallel linears of {LAST_MLP} is not reduced",
    ),
    "prompts_and_padding_counted": ("tp=2,sp", "loss", "loss of step 1", "divided by their global number"),
    "default_max_grad_norm": ("tp=2,sp", "grad_norm", f"clipped {LAST_DOWN_B}", "clipped gradients are"),
    "earlier_micro_batches_dropped": ("tp=2,sp", "gradients", LAST_DOWN_B, "every gradient is off"),
    "b_unequal_on_replicas": ("tp=2,sp", "fresh_adapter", f"{FIRST_ATTENTION}.q_proj.lora_B", "drew different values"),
    "default_eps": ("tp=2,sp", "deltas", FIRST_Q_A, "what the optimizer makes of them"),
    "epoch_in_file_order": ("tp=2,sp", "sequences", "sequence 1", "the order of the epoch"),
    "optimizer_state_forgotten": ("tp=2,sp", "deltas", FIRST_Q_A, "what the optimizer makes"),
    "bias_correction_runs_ahead": ("tp=2,sp", "deltas", FIRST_Q_A, "the optimizer makes of"),
    "learning_rate_one_step_late": ("tp=2,sp", "deltas", FIRST_Q_A, "step 3 is 0.01, not 0.005"),
    "tokens_of_one_rank_reported": ("dp=2", "loss", "loss of step 1", "reports the mean of its own tokens"),
}

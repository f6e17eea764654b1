"""What the kill table must find of faults in what only some runs have: where each shows, and the words of its cause.

Does not own: those of the family that the table is of (`tests.verify.diagnoses`).
"""

from __future__ import annotations

from typing import Any

from meshlora.verify.faults.of_objectives import PROVED
from meshlora.verify.faults.registry import MUTATIONS
from meshlora.verify.options import DROPOUT
from meshlora_ground.objectives.policies import Grpo
from tests.verify.diagnoses import (
    EVALUATION,
    FIRST_ATTENTION,
    FIRST_O,
    FIRST_Q,
    FIRST_Q_A,
    LACKING,
    LAST_ATTENTION,
    LAST_DOWN_B,
    LAST_EXPERT,
    LAST_MLP,
    LOSS,
    OWN_PART,
    OWN_WEIGHTS,
    SEEN,
)
from tests.verify.run_cases import RUNS, needing

_ALL = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}
_ON_PIECES = {"r": 4, "lora_alpha": 8, "target_modules": ["c_attn"], "pieces": {"c_attn": ["q", "v"]}}
_ROWS = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "trainable_token_indices": [200, 0, 7]}
_INVOKED = {**_ALL, "lora_dropout": 0.12, "alora_invocation_tokens": [5, 9], "task_type": "CAUSAL_LM"}
_TIED_COPY = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}
_TIED_COPY |= {"ensure_weight_tying": True}
_ON_EMBEDDING = {
    "r": 4,
    "lora_alpha": 8,
    "target_modules": ["embed_tokens", "q_proj", "down_proj"],
    "modules_to_save": ["model.norm", "input_layernorm"],
}
_SHARED = {**_ALL, "target_parameters": ["experts.gate_up_proj", "experts.down_proj"], "share_experts": True}
_TEXT = "model.language_model.layers"
_GPT2_BLOCK = "transformer.h.0"
_DELTA_NET, _MAMBA = "model.layers.0.linear_attn", "model.layers.0.mamba"
_QKV, _C_ATTN = f"{FIRST_ATTENTION}.qkv_proj", f"{_GPT2_BLOCK}.attn.c_attn"

# what it is -> (request, mutation -> (phase, where, words of the cause)).
# Those that show with any policy gradient; and what the others need, which one objective has.
_OF_EACH_POLICY = [name for name in needing("policy_gradient") if "examples" not in MUTATIONS[name].needs]
_OF_EACH_POLICY += needing("clips")
_OF_OPTIONS = ("importance", "sequence_ratio", "means_of_sequences", "cispo", "entropy", "kl_estimate", "grpo")
_OF_OPTIONS += ("scaled_otherwise",)
_EVERYTHING = Grpo(
    ratio="sequence",
    loss="cispo",
    mean_over="sequence",
    clip_low=0.3,  # ratios of short sequences are far from 1: some are between the bounds, and some beyond
    clip_high=0.1,
    importance_cap=1.2,
    kl_coef=0.1,
    kl="k2",
    entropy_coef=0.07,
    scale_rewards="batch",
)

CASES: dict[str, tuple[dict[str, Any], dict[str, tuple[str, str, str]]]] = {
    "a block that mixes tokens and is kept whole": (
        {"family": "doge", "topologies": ("tp=2,sp",)},
        {"whole_region_sees_its_slice": ("forward", FIRST_Q, "saw only its rank's slice of the tokens")},
    ),
    "a delta net with more value heads than key heads": (
        {"family": "qwen3_next", "topologies": ("tp=2,sp",)},
        {
            "mixer_decay_of_the_neighbour": ("forward", f"{_DELTA_NET}.out_proj", ""),
            "mixer_values_of_the_neighbour": (
                "loaded_adapter",
                f"{_DELTA_NET}.in_proj_qkvz.lora_B",
                "the base weight that it goes with is held otherwise",
            ),
            "mixer_channels_of_another_piece": ("forward", f"{_DELTA_NET}.out_proj", ""),
        },
    ),
    "several residual streams, and groups of heads": (
        {"family": "deepseek_v4", "topologies": ("tp=2,sp",)},
        {
            "streams_reversed_after_the_layers": ("forward", "model.layers.2", ""),
            "ids_of_the_token_before": ("forward", "model.layers.0.mlp.experts", ""),
            "output_groups_of_another_rank": ("forward", f"{FIRST_ATTENTION}.o_a_proj", ""),
            "sinks_of_another_rank": ("forward", f"{FIRST_ATTENTION}.o_a_proj", ""),
        },
    ),
    "a state-space mixer whose only group all ranks share": (
        {"family": "bamba", "topologies": ("tp=2",), "lora": _ALL},
        {
            "gated_norm_before_its_gate": ("forward", f"{_MAMBA}.norm", ""),
            "wide_norm_over_local_width": ("forward", f"{_MAMBA}.norm", ""),
            "mixer_channels_of_another_piece": ("forward", f"{_MAMBA}.norm", ""),
            "kv_replicas_not_summed": ("gradients", f"{_MAMBA}.in_proj.lora_B", ""),
        },
    ),
    "fused matrices": (
        {"family": "phi3", "topologies": ("tp=2",), "lora": _ALL},
        {
            "qkv_pieces_reversed": ("loaded_adapter", f"{_QKV}.lora_B", "rows of it that the base's rows do not go"),
            "gate_and_up_swapped": (
                "loaded_adapter",
                "model.layers.0.mlp.gate_up_proj.lora_B",
                "rows of it that the base's rows do not go with",
            ),
            "fused_base_cut_as_one_matrix": ("forward", FIRST_O, "heads of q, k and v"),
            "fused_b_cut_as_one_matrix": ("loaded_adapter", f"{_QKV}.lora_B", "in the order of the ranks"),
        },
    ),
    "an adapter on pieces": (
        {"family": "gpt2", "topologies": ("tp=2",), "lora": _ON_PIECES},
        {
            "piece_lands_on_the_next": ("forward", _C_ATTN, "another piece of a fused matrix"),
            "piece_on_the_next_in_file": ("saved_file", f"{_C_ATTN}.lora_B outside its pieces", "not those of its"),
        },
    ),
    "names that PEFT changes": (
        {"family": "laguna", "topologies": ("tp=2",)},
        {"names_that_peft_changes_in_file": ("saved_file", "model.layers.1.mlp.shared_experts.gate_proj.lora_A", "")},
    ),
    "an adapter that tokens invoke": (
        {"family": "llama", "topologies": ("tp=2,sp",), "lora": _INVOKED},
        {
            "invoked_after_the_first_token": ("forward", FIRST_Q, ""),
            "invoked_from_the_first_occurrence": ("loss", "loss of step 2", ""),
            "invoked_everywhere": ("forward", FIRST_Q, ""),
            "invoked_by_the_neighbours_row": ("forward", FIRST_Q, ""),
            "invoked_by_the_first_token_alone": ("forward", FIRST_Q, ""),
            "invoked_without_dropout": ("forward", FIRST_Q, ""),
        },
    ),
    "an adapter that tokens invoke, in packed rows": (
        {"family": "llama", "topologies": ("dp=2",), "lora": _INVOKED, "packing": True},
        {"invoked_by_the_row_not_the_sequence": ("forward", FIRST_Q, "")},
    ),
    "heads that several ranks hold": (
        {
            "family": "llama",
            "topologies": ("tp=4",),
            "overrides": {"num_key_value_heads": 2},
            "lora": _ALL | {"use_dora": True},
        },
        {
            "kv_head_of_another_rank": ("forward", FIRST_O, "heads of q, k and v"),
            "kv_replicas_not_summed": (
                "gradients",
                f"{LAST_ATTENTION}.v_proj.lora_magnitude_vector",
                "not summed over the tp ranks that hold it",
            ),
            "kv_replicas_counted_in_norm": ("grad_norm", "norm of step 1", "rows that several of them hold"),
        },
    ),
    "padding, DoRA, smoothing, LoRA+, a cosine": (
        {
            "family": "llama",
            "topologies": ("tp=2",),
            "overrides": {"vocab_size": 249},
            "lora": _ALL | {"use_dora": True},
            "objective": PROVED["sft"],
            "lora_plus_ratio": 4.0,
            "schedule": "cosine",
            "min_lr": 3e-3,
            "steps": 4,
        },
        {
            "padding_in_softmax": ("loss", "loss of step 1", "a vocabulary that is split"),
            "smoothed_over_local_vocabulary": ("loss", "loss of step 1", "ranks have different losses"),
            "label_smoothing_ignored": ("loss", "loss of step 1", "smoothing"),
            "evaluation_smoothed": EVALUATION,
            "schedule_taken_for_linear": ("deltas", FIRST_Q_A, "rate of step 3 is 0.00767, not 0.00825"),
            "schedule_to_zero": ("deltas", FIRST_Q_A, "rate of step 3 is 0.0075, not 0.00825"),
            "lora_plus_ratio_ignored": ("deltas", FIRST_Q_A, "rates of its groups"),
            "dora_norm_over_local_slice": ("forward", FIRST_O, "DoRA's norm"),
            "dora_norm_of_base_alone": ("forward", FIRST_Q, "DoRA's norm"),
            "row_magnitude_of_one_rank": (
                "gradients",
                f"{LAST_MLP}.down_proj.lora_magnitude_vector",
                "magnitude of row-parallel linears is averaged over tp",
            ),
        },
    ),
    "DoRA with dropout": (
        {"family": "llama", "topologies": ("tp=2,sp",), "lora": _ALL | {"use_dora": True, "lora_dropout": 0.1}},
        dict.fromkeys(
            ("dora_scales_the_base_without_dropout", "dora_draws_anew_for_the_base", "dora_drops_all_of_the_base"),
            ("forward", FIRST_Q, "dropout"),
        ),
    ),
    "biases of B": (
        {"family": "qwen2", "topologies": ("tp=2",), "lora": _ALL | {"lora_bias": True}},
        {
            "bias_of_b_added_on_each_rank": ("forward", FIRST_O, "bias of a row-parallel linear"),
            "bias_of_b_not_scaled": ("forward", FIRST_Q, ""),
            "row_bias_of_b_of_one_rank": (
                "gradients",
                f"{LAST_MLP}.down_proj.lora_B.bias",
                "B of row-parallel linears is averaged over tp",
            ),
        },
    ),
    "a norm over a split width": (
        {"family": "olmo2", "topologies": ("tp=2",)},
        {
            "wide_norm_weight_of_rank_0": ("forward", f"{FIRST_ATTENTION}.q_norm", "its own weights"),
            "wide_norm_over_local_width": ("forward", f"{FIRST_ATTENTION}.q_norm", "rank's part of the width"),
            "wide_norm_gradient_not_reduced": (
                "backward",
                f"{LAST_ATTENTION}.k_proj",
                "backward of model.layers.1.self_attn.k_norm",
            ),
        },
    ),
    "an argument with heads": (
        {"family": "bloom", "topologies": ("tp=2",)},
        {
            "heads_of_rank_0_in_arguments": (
                "forward",
                "transformer.h.0.self_attention.dense",
                "its part of an argument",
            )
        },
    ),
    "layers in stages": (
        {"family": "qwen3", "topologies": ("pp=2",), "micro_batch_size": 2},
        {
            "stream_of_other_tokens_sent": ("forward", "model.layers.1.input_layernorm", ""),
            "stage_gradient_not_sent": ("backward", "model.layers.0", ""),
            "stage_gradient_halved": ("backward", "model.layers.0", ""),
            "stage_gradient_of_first_micro_batch_alone": ("backward", "model.layers.0", ""),
            "norm_of_one_stage": ("grad_norm", "norm of step 1", ""),
            "loss_counted_on_every_stage": LOSS,
            "other_stages_missing_in_file": ("saved_file", f"{LAST_ATTENTION}.q_proj.lora_A", ""),
            "last_layer_without_an_adapter": ("fresh_adapter", f"{LAST_MLP}.down_proj.lora_A", ""),
            "earlier_micro_batches_dropped": ("gradients", LAST_DOWN_B, ""),
        },
    ),
    "inputs of each layer, experts beside its MLP, keys of an earlier layer": (
        {"family": "gemma4_text", "topologies": ("tp=2,sp",)},
        {
            "second_input_of_the_neighbour": ("forward", "model.layers.0.per_layer_projection", ""),
            "second_input_gradient_not_gathered": ("backward", "model.per_layer_projection_norm", ""),
            "router_beside_mlp_reads_other_tokens": ("forward", "model.layers.0.router.norm", ""),
            "shared_keys_of_the_neighbour": ("forward", "model.layers.2.self_attn.o_proj", ""),
            "shared_keys_without_gradient": ("backward", f"{LAST_ATTENTION}.v_norm", ""),
        },
    ),
    "inputs of each layer, and keys of an earlier layer, over cp": (
        {"family": "gemma4_text", "topologies": ("cp=2",)},
        {
            "context_second_input_of_the_first_tokens": ("forward", "model.layers.0.per_layer_projection", ""),
            "shared_keys_without_gradient": ("backward", f"{LAST_ATTENTION}.v_norm", ""),
        },
    ),
    "inputs of each layer, over stages": (
        {"family": "gemma4_text", "topologies": ("pp=2",)},
        {
            "second_input_of_other_tokens_sent": ("forward", "model.layers.1.per_layer_projection", ""),
            "second_input_gradient_not_sent": ("backward", "model.per_layer_projection_norm", ""),
        },
    ),
    "experts that are split": (
        {"family": "qwen3_moe", "topologies": ("tp=2,sp,etp=2",)},
        {
            "experts_first_a_not_summed_over_etp": (
                "gradients",
                f"{LAST_EXPERT}.gate_up_proj.lora_A",
                "A of the experts' first projections is not summed over etp",
            ),
            "experts_second_b_not_summed_over_etp": (
                "gradients",
                f"{LAST_EXPERT}.down_proj.lora_B",
                "B of the experts' second projections is not summed over etp",
            ),
            "experts_reduced_twice": ("forward", f"{LAST_MLP}.experts", "output is summed over etp twice"),
        },
    ),
    "copies of experts that are on ranks of their own": (
        {"family": "qwen3_moe", "topologies": ("dp=2,tp=2,sp,ep=2",)},
        {
            "experts_not_summed_over_edp": (
                "gradients",
                f"{LAST_EXPERT}.gate_up_proj.lora_B",
                "is not summed over edp",
            ),
            "experts_norm_counted_per_rank": ("grad_norm", "norm of step 1", "their norm is not"),
        },
    ),
    "experts on ranks of their own": (
        {"family": "qwen3_moe", "topologies": ("tp=2,sp,ep=2",)},
        {
            "experts_permuted_over_ep": (
                "loaded_adapter",
                f"{LAST_MLP}.experts.0.down_proj.lora_A",
                "not those of the experts",
            ),
            "routing_weight_applied_twice": ("forward", f"{LAST_MLP}.experts", "routing weights that do not go"),
            "tokens_cut_twice": ("forward", f"{LAST_MLP}.experts", "goes to other tokens"),
            "rows_combined_in_order_of_arrival": ("forward", f"{LAST_MLP}.experts", "do not go together"),
            "token_dropped": ("forward", f"{LAST_MLP}.experts", "goes to other tokens"),
            "experts_b_stored_expert_major": (
                "saved_file",
                f"{LAST_MLP}.experts.0.down_proj.lora_B",
                "what is stored is not what the ranks hold",
            ),
            "experts_gate_and_up_swapped": ("forward", f"{LAST_MLP}.experts", "what experts make of their tokens"),
            "aux_loss_of_local_tokens": ("loss", "load-balancing loss of step 1", "all micro-batches and all ranks"),
            "aux_loss_at_default": ("backward", f"{LAST_MLP}.gate", "that of the load-balancing loss"),
            "aux_loss_left_out": ("backward", f"{LAST_MLP}.gate", "that of the load-balancing loss"),
            "experts_drawn_alike": (
                "fresh_adapter",
                f"{LAST_MLP}.experts.0.down_proj.lora_A",
                "not those that seed and name determine",
            ),
        },
    ),
    "experts that compute nothing": (
        {"family": "longcat_flash", "topologies": ("tp=2,sp,ep=2",)},
        {
            "zero_experts_left_out": ("forward", "model.layers.0.mlp.experts", ""),
            "zero_experts_teach_no_router": ("backward", "model.layers.1.mlp.router", ""),
        },
    ),
    "one adapter for the experts of all ranks": (
        {"family": "qwen3_moe", "topologies": ("tp=2,sp,ep=2",), "lora": _SHARED},
        {
            "shared_experts_not_summed_over_ep": (
                "gradients",
                f"{LAST_MLP}.experts.gate_up_proj.lora_B",
                "of the experts' first projections",
            )
        },
    ),
    "experts whose copies are not those of attention": (
        {"family": "qwen3_moe", "topologies": ("tp=2,sp",)},
        {"experts_summed_over_dense_dp": ("gradients", f"{LAST_EXPERT}.gate_up_proj.lora_B", "is not summed over edp")},
    ),
    "a clipped policy gradient, held to the base": (
        {"family": "qwen3", "objective": PROVED["policy"], "topologies": ("dp=2",)},
        dict.fromkeys(_OF_EACH_POLICY, LOSS) | {"base_with_adapter_on": LOSS, "base_halved": LOSS},
    ),
    "rewards of groups, with every option": (
        {"family": "qwen3", "objective": _EVERYTHING, "topologies": ("dp=2",)},
        dict.fromkeys((name for word in _OF_OPTIONS for name in needing(word)), LOSS)
        | {
            "grpo_prompts_trained": ("sequences", "tokens of step 1", "tokens are counted that train nothing"),
            "sequence_means_per_token": LOSS,
            "cispo_weight_with_gradient": ("backward", "model", "the first gradient, from the loss on"),
        },
    ),
    "ratios that are squashed, engines by sequence": (
        {"family": "qwen3", "objective": PROVED["sapo"], "topologies": ("dp=2",)},
        dict.fromkeys(
            (*needing("sapo"), *needing("masks_weights"), *needing("corrects_sequences"), *needing("kl_correction")),
            LOSS,
        )
        | dict.fromkeys(needing("masks_truncated"), LOSS)
        | {"truncated_rollouts_trained": ("sequences", "tokens of step 1", "tokens are counted that train nothing")},
    ),
    "the least certain tokens of a step": (
        {"family": "qwen3", "objective": PROVED["cispo"], "topologies": ("dp=2",)},
        dict.fromkeys(needing("top_entropy"), LOSS),
    ),
    "weights of whole sequences": (
        {"family": "qwen3", "objective": PROVED["vespo"], "topologies": ("tp=2,sp",)},
        dict.fromkeys(needing("vespo"), LOSS),
    ),
    "bounded ratios": (
        {"family": "qwen3", "objective": PROVED["policy"], "topologies": ("dp=2",)},
        dict.fromkeys(needing("delta"), LOSS),
    ),
    "sequences that are left out": (
        {"family": "qwen3", "objective": PROVED["luspo"], "topologies": ("dp=2",)},
        # Of the rollouts of the first step few are bad ones of several tokens.
        dict.fromkeys((*needing("off_policy_mask"), *needing("importance_floor")), ("loss", "loss of step 2", ""))
        | {"sequences_left_out_by_their_sum": ("loss", "loss of step 1", "")},
    ),
    "rollouts that say the experts of each token": (
        {"family": "qwen3_moe", "objective": PROVED["grpo"], "topologies": ("tp=2,sp,ep=2",), "routed": True},
        dict.fromkeys(needing("routed"), ("forward", f"{LAST_MLP}.experts", "tokens are sent to other experts"))
        | {"base_goes_to_the_experts_of_the_engine": LOSS},
    ),
    "sequences that share a row": (
        {"family": "qwen3", "packing": True, "topologies": ("dp=2",)},
        {
            "packing_left_out": ("sequences", "packed rows", "a row of its own"),
            "packing_positions_run_on": ("sequences", "sequence 0", "takes other sequences"),
            "packing_seen_across": ("forward", FIRST_O, "which tokens see each other"),
            "packing_with_a_mask": ("sequences", "sequence 0", "takes other sequences"),
            "packing_cut_a_token_late": ("forward", FIRST_O, "which tokens see each other"),
            "packing_labels_across": ("sequences", "tokens of step 1", "tokens are counted that train nothing"),
            "packing_first_tokens_trained": ("sequences", "tokens of step 1", "tokens are counted that train nothing"),
        },
    ),
    "sequences that share a row, with M-RoPE": (
        {"family": "qwen2_5_vl", "packing": True, "topologies": ("dp=2",)},
        {
            "packing_without_positions_in_the_row": (
                "forward",
                "model.language_model.layers.0.self_attn.o_proj",
                "which tokens see each other",
            )
        },
    ),
    "images, with an adapter on the tower": (
        {"family": "qwen3_vl", "images": True, "topologies": ("tp=2,sp",), "lora": _ALL | {"vision": True}},
        {
            "image_tokens_trained": ("sequences", "tokens of step 1", ""),
            "images_of_another_sequence": ("forward", f"{_TEXT}.0.input_layernorm", ""),
            "pixels_in_another_order": ("forward", f"{_TEXT}.0.input_layernorm", ""),
            "grid_of_images_without_positions": ("forward", "model.language_model.rotary_emb", ""),
            "features_of_layers_at_other_tokens": ("forward", f"{_TEXT}.1.input_layernorm", ""),
            "features_of_layers_without_gradient": (
                "gradients",
                "model.visual.deepstack_merger_list.0.linear_fc2.lora_B",
                "",
            ),
            "vision_gradients_counted_on_each_rank": ("gradients", "model.visual.merger.linear_fc2.lora_B", ""),
        },
    ),
    "images on ranks of dp, with an adapter on the tower": (
        {"family": "qwen3_vl", "images": True, "topologies": ("dp=2",), "lora": _ALL | {"vision": True}},
        {"vision_gradients_of_a_rank_lost": ("gradients", "model.visual.merger.linear_fc2.lora_B", "")},
    ),
    "images in stages of layers, with an adapter on the tower": (
        {"family": "qwen3_vl", "images": True, "topologies": ("pp=2",), "lora": _ALL | {"vision": True}},
        {
            "positions_of_a_later_stage_without_grids": ("forward", f"{_TEXT}.1.self_attn.o_proj", ""),
            "vision_gradients_of_the_first_stage_lost": ("gradients", "model.visual.merger.linear_fc2.lora_B", ""),
        },
    ),
    "images whose tokens see each other, in stages of layers": (
        {"family": "gemma3", "images": True, "topologies": ("pp=2",)},
        {"image_mask_of_a_later_stage_shifted": ("forward", f"{_TEXT}.1.self_attn.o_proj", "")},
    ),
    "images whose tokens see each other": (
        {"family": "gemma3", "images": True, "topologies": ("tp=2",)},
        {"images_seen_causally": ("forward", f"{_TEXT}.0.self_attn.o_proj", "")},
    ),
    "prompts that an encoder reads": (
        {"family": "t5", "topologies": ("tp=2",)},
        {
            "padding_of_prompts_seen": ("forward", "decoder.block.0.layer.1.EncDecAttention.o", ""),
            "prompts_masked_as_completions": ("forward", "decoder.block.0.layer.1.EncDecAttention.o", ""),
            "completions_read_unshifted": ("sequences", "sequence 0", ""),
            "encoder_states_gradient_not_reduced": (
                "gradients",
                "encoder.block.1.layer.1.DenseReluDense.wo.lora_B",
                "",
            ),
            "relative_bias_of_other_heads": ("forward", "decoder.block.0.layer.0.SelfAttention.o", ""),
        },
    ),
    "pairs of answers": (
        {"family": "qwen3", "objective": PROVED["dpo"], "topologies": ("dp=2",)},
        dict.fromkeys((*needing("dpo"), *needing("of_sigmoid"), *needing("reference")), LOSS),
    ),
    "pairs of answers, without a base": (
        {"family": "qwen3", "objective": PROVED["orpo"], "topologies": ("dp=2",)},
        dict.fromkeys(needing("orpo"), LOSS),
    ),
    "pairs of answers by their length": (
        {"family": "qwen3", "objective": PROVED["ipo"], "topologies": ("tp=2,sp",)},
        dict.fromkeys((*needing("by_length"), *needing("length_weight"), *needing("other_pair_loss")), LOSS),
    ),
    "several losses of pairs": (
        {"family": "qwen3", "objective": PROVED["dpo_differences"], "topologies": ("dp=2",)},
        dict.fromkeys((*needing("loss_weights"), *needing("f_divergence"), *needing("alpha")), LOSS),
    ),
    "pairs of answers, weighted": (
        {"family": "qwen3", "objective": PROVED["wpo"], "topologies": ("tp=2,sp",)},
        {
            "pair_weights_of_likelihood_alone": LOSS,
            "pair_weights_with_gradient": ("backward", "model", ""),
            "squares_of_own_vocabulary": OWN_PART,
        },
    ),
    "pairs of answers, in order": (
        {"family": "qwen3", "objective": PROVED["dpo_ordered"], "topologies": ("dp=2",)},
        dict.fromkeys(needing("ordered_pairs"), LOSS),
    ),
    "pairs of answers, without a base, by their mean": (
        {"family": "qwen3", "objective": PROVED["simpo"], "topologies": ("dp=2",)},
        dict.fromkeys(needing("simpo"), LOSS),
    ),
    "tokens weighted by their probability": (
        {"family": "qwen3", "objective": PROVED["dft"], "topologies": ("dp=2",)},
        {
            "dft_without_weight": LOSS,
            "dft_weight_with_gradient": ("backward", "model", "the first gradient, from the loss on"),
        },
    ),
    "pairs of answers, scored": (
        {"family": "qwen3", "objective": PROVED["reward"], "topologies": ("dp=2",)},
        dict.fromkeys(needing("reward"), LOSS) | {"reward_of_the_padding": ("logits", "logits", "")},
    ),
    "a teacher that is another model": (
        {"family": "qwen3", "objective": PROVED["distill"], "topologies": ("tp=2",)},
        dict.fromkeys(("teacher_is_the_student", "other_divergence", "mixture_of_equal_shares"), LOSS)
        | dict.fromkeys(("teacher_not_tempered", "teacher_of_next_token", "cross_entropy_doubled"), LOSS)
        | {"divergence_of_own_vocabulary": OWN_PART, "gradient_not_tempered": ("backward", "model", "")},
    ),
    "a teacher's likeliest tokens": (
        {"family": "qwen3", "objective": PROVED["distill_top"], "topologies": ("tp=2",)},
        {"likeliest_of_own_vocabulary": OWN_PART},
    ),
    "a teacher's record": (
        {"family": "qwen3", "objective": PROVED["distill_recorded"], "topologies": ("tp=2",)},
        dict.fromkeys(needing("recorded_teacher"), LOSS),
    ),
    "a teacher that sees more": (
        {"family": "qwen3", "objective": PROVED["distill_in_context"], "topologies": ("tp=2",)},
        dict.fromkeys((*needing("teaches_itself"), *needing("in_context")), LOSS),
    ),
    "labels of texts": (
        {"family": "qwen3", "objective": PROVED["classify"], "topologies": ("tp=2,sp",)},
        {
            "label_of_next_text": LOSS,
            "classify_per_token": LOSS,
            "head_gradient_summed_over_tp": ("gradients", "score.weight", "summed over tp twice"),
            "hidden_states_summed_twice": ("backward", LAST_MLP, "reduced over tp twice"),
        },
    ),
    "labels of words": (
        {"family": "bert", "objective": PROVED["classify_tokens"], "topologies": ("dp=2",)},
        dict.fromkeys(needing("classify_tokens"), LOSS),
    ),
    "embeddings compared with those of other ranks": (
        {
            "family": "bert",
            "objective": PROVED["embed_mean"],
            "topologies": ("dp=2",),
            "lora": _ALL | {"exclude_modules": ["pooler.dense"]},
        },
        dict.fromkeys(needing("embed"), LOSS)
        | {"embed_gradient_of_others_lost": ("backward", "encoder", "from the loss on")},
    ),
    "answers that were liked or not": (
        {"family": "llama", "objective": PROVED["kto"], "topologies": ("dp=2",), "default_dropout": DROPOUT},
        # The case has a step whose mean is below 0, and others.
        dict.fromkeys((*needing("kto"), *needing("kto_point")), LOSS)
        | {"kto_point_below_zero": ("loss", "loss of step 3", "from step 3 on; step 1 is right")},
    ),
    "dropout of the adapter and of the model, held to the base": (
        {
            "family": "gpt2",
            "objective": PROVED["policy"],
            "topologies": ("tp=2,sp",),
            "overrides": {"resid_pdrop": 0.1, "embd_pdrop": 0.1},
            "lora": _ALL | {"lora_dropout": 0.12},
            "steps": 2,
        },
        {
            "dropout_by_local_token": ("forward", "transformer.drop", "drops other elements"),
            "dropout_by_local_feature": ("forward", f"{_GPT2_BLOCK}.attn.c_proj", "drops other elements"),
            "dropout_same_in_every_step": ("loss", "loss of step 2", "masks of another step"),
            "dropout_same_in_every_module": ("forward", "transformer.drop", "drops other elements"),
            "dropout_per_tp_rank": ("forward", "transformer.drop", "drops other elements"),
            "dropout_seed_ignored": ("forward", "transformer.drop", "drops other elements"),
            "dropout_rate_in_tenths": ("forward", _C_ATTN, "drops other elements"),
            "evaluation_ends_dropout": ("loss", "loss of step 2", "from step 2 on; step 1 is right"),
            "dropout_not_scaled": ("forward", "transformer.drop", "not divided by the share"),
            "dropout_of_later_tokens_as_the_first": ("forward", "transformer.drop", "drops other elements"),
            "base_with_dropout": LOSS,
        },
    ),
    "a start that looks at data": (
        {"family": "llama", "topologies": ("tp=2",), "lora": {**_ALL, "r": 8, "init_lora_weights": "eva"}},
        dict.fromkeys(needing("eva"), ("eva", FIRST_Q, "the start is that of other data"))
        | {"eva_features_of_one_rank": ("eva", FIRST_O, "of a part of their features")},
    ),
    "moments in 8 bits": (
        {"family": "llama", "topologies": ("tp=2,sp",), "optimizer": "adamw_8bit"},
        dict.fromkeys(needing("adamw_8bit"), ("deltas", FIRST_Q_A, "what the optimizer makes of them")),
    ),
    "LoRA-FA": (
        {"family": "llama", "topologies": ("tp=2,sp",), "lora": _ALL, "optimizer": "lora_fa", "steps": 2},
        dict.fromkeys(
            needing("lora_fa"), ("deltas", f"{FIRST_ATTENTION}.q_proj.lora_B", "what the optimizer makes of them")
        ),
    ),
    "noise on embedded tokens": (
        {"family": "llama", "topologies": ("dp=2",), "lora": _ALL, "neftune_alpha": 5.0, "steps": 2},
        {
            "noise_by_padded_length": ("forward", "model.embed_tokens", "noise on embedded tokens"),
            "noise_drawn_by_each_rank": ("forward", "model.embed_tokens", "noise on embedded tokens"),
            "noise_by_local_token": ("forward", "model.embed_tokens", "noise on embedded tokens"),
            "noise_seed_ignored": ("forward", "model.embed_tokens", "noise on embedded tokens"),
            "noise_same_in_every_step": ("loss", "loss of step 2", "noise is that of another step"),
        },
    ),
    "keys and values that pass by": (
        {"family": "llama", "topologies": ("cp=3,ring",)},
        {
            "ring_parts_of_own_tokens": ("forward", FIRST_O, ""),
            "ring_parts_added_up": ("forward", FIRST_O, ""),
            "ring_gradients_of_own_queries": ("backward", f"{LAST_ATTENTION}.v_proj", ""),
        },
    ),
    "layers that run twice, their attention once": (
        {"family": "llama", "topologies": ("tp=2,sp",), "recompute": "keep_attention", "attn_implementation": "sdpa"},
        {"kept_attention_of_the_layer_before": ("backward", f"{LAST_MLP}.up_proj", "")},
    ),
    "layers that run twice, from inputs that waited on the host": (
        {"family": "llama", "topologies": ("tp=2,sp",), "recompute": "offload"},
        dict.fromkeys(needing("offloaded"), ("backward", "model.layers.0.mlp.up_proj", "")),
    ),
    "attention that runs once, of keys and values that pass by": (
        {"family": "llama", "topologies": ("cp=3,ring",), "recompute": "keep_attention", "attn_implementation": "sdpa"},
        {"kept_ring_goes_round_again": ("collectives", "backward alltoall", "")},
    ),
    "scores with soft caps, of keys and values that pass by": (
        {"family": "gemma2", "topologies": ("cp=2,ring",)},
        {"ring_last_queries_left_out": ("forward", FIRST_O, "")},
    ),
    "a frozen base in few bits": (
        {"family": "llama", "topologies": ("tp=2",), "quantization": "fp8"},
        {"quantized_scale_of_neighbour": OWN_WEIGHTS, "quantized_scale_off_by_a_power": OWN_WEIGHTS},
    ),
    "experts in few bits": (
        {"family": "gpt_oss", "topologies": ("tp=2",), "quantization": "mxfp4"},
        {
            "quantized_blocks_straddle": ("forward", FIRST_Q, ""),
            "quantized_codes_of_neighbour": OWN_WEIGHTS,
            "quantized_halves_swapped": ("loaded_adapter", f"{FIRST_ATTENTION}.o_proj.lora_A", ""),
            "quantized_expert_transposed": ("forward", "model.layers.0.mlp.experts", ""),
        },
    ),
    "experts in few bits, with a factor a matrix": (
        {"family": "qwen3_moe", "topologies": ("tp=2",), "quantization": "nvfp4"},
        {
            "nvfp4_scale_as_exponent": OWN_WEIGHTS,
            "nvfp4_factor_divides": OWN_WEIGHTS,
            "nvfp4_factor_of_another_expert": ("forward", "model.layers.0.mlp.experts", ""),
        },
    ),
    "integers of GPTQ, in the order of activations": (
        {"family": "llama", "topologies": ("tp=2",), "quantization": "gptq"},
        {
            "ints_in_the_order_of_another_format": OWN_WEIGHTS,
            "ints_zeros_off_by_one": OWN_WEIGHTS,
            "ints_zero_of_neighbour": OWN_WEIGHTS,
            "ints_order_ignored": OWN_WEIGHTS,
            "ints_order_of_the_first_inputs": ("forward", FIRST_O, ""),
        },
    ),
    "integers of AWQ": (
        {"family": "llama", "topologies": ("tp=2",), "quantization": "awq"},
        {
            "quantized_halves_swapped": ("loaded_adapter", f"{FIRST_ATTENTION}.o_proj.lora_A", ""),
            "quantized_scale_of_neighbour": OWN_WEIGHTS,
        },
    ),
    "a frozen base in few bits, on whole matrices": (
        {"family": "llama", "topologies": ("dp=2",), "quantization": "int8"},
        {
            "quantized_otherwise_in_backward": (
                "backward",
                f"{LAST_MLP}.up_proj",
                "the backward of what this module's",
            ),
            "quantized_parts_by_first_scales": OWN_WEIGHTS,
        },
    ),
    "products in float8": (
        {"family": "llama", "topologies": ("dp=2",), "compute": "fp8"},
        {
            "float8_weights_off_by_a_power": OWN_WEIGHTS,
            "float8_scale_of_neighbour": ("forward", FIRST_Q, ""),
            "float8_scale_of_last_call": ("forward", FIRST_O, ""),  # the first input has none before it
            "float8_largest_saturates": ("forward", FIRST_Q, ""),
            "float8_with_two_bits_of_mantissa": ("forward", FIRST_Q, ""),
            "float8_low_rank_path_rounded": ("forward", FIRST_Q, ""),
            "float8_other_scales_in_backward": ("backward", f"{LAST_MLP}.up_proj", ""),
            "float8_gradients_not_rounded": ("backward", f"{LAST_MLP}.up_proj", ""),
        },
    ),
    "gradients alone in float8": (
        {"family": "llama", "topologies": ("dp=2",), "compute": "fp8_backward"},
        {"float8_backward_of_plain_weights": ("backward", f"{LAST_MLP}.up_proj", "")},
    ),
    "products of a base that is stored in float8": (
        {"family": "llama", "topologies": ("dp=2",), "quantization": "fp8", "compute": "fp8"},
        {
            "float8_stored_rounded_again": OWN_WEIGHTS,
            "float8_stored_backward_of_neighbour": ("backward", f"{LAST_MLP}.up_proj", ""),
        },
    ),
    "a frozen base that is sharded over dp": (
        {"family": "llama", "topologies": ("dp=2,dp_shard",)},
        {
            "dp_shards_gathered_in_reverse": ("forward", FIRST_Q, "gathered over dp"),
            "dp_shard_stale_in_backward": ("backward", "model.layers.0.mlp.up_proj", "gathered for it over dp"),
            "dp_shard_of_another_layer": ("forward", f"{LAST_ATTENTION}.q_proj", "gathered over dp"),
        },
    ),
    "an adapter on the embedding, norms that are trained": (
        {
            "family": "llama",
            "topologies": ("tp=2,sp",),
            "overrides": {"pad_token_id": 0},
            "lora": _ON_EMBEDDING,
            "lora_plus_ratio": 4.0,
        },
        {
            "embedding_padding_trained": ("gradients", "model.embed_tokens.lora_embedding_A", "A of the embedding"),
            "lora_plus_embedding_rate_ignored": (
                "deltas",
                "model.embed_tokens.lora_embedding_A",
                "what the optimizer makes",
            ),
            "norms_not_decayed": ("deltas", "model.embed_tokens.lora_embedding_A", "what the optimizer makes of them"),
            "embedding_b_not_summed": ("gradients", "model.embed_tokens.lora_embedding_B", "not summed over tp"),
            "trained_norm_not_summed": ("gradients", "model.norm.weight", "trained of the base"),
            "trained_weights_missing_in_file": ("saved_file", "adapter_model.safetensors", "PEFT expects another file"),
        },
    ),
    "rows of an embedding and its tied head": (
        {"family": "gemma3_text", "topologies": ("tp=2,sp",), "lora": _ROWS},
        {
            "token_rows_not_summed": ("gradients", "model.embed_tokens.trainable_tokens_delta", "not summed over tp"),
            "tied_head_keeps_rows_of_base": ("logits", "logits", "the output head"),
        },
    ),
    "an embedding in full with its tied head": (
        {"family": "gemma3_text", "topologies": ("tp=2,sp",), "lora": _TIED_COPY},
        {"tied_head_keeps_weight_of_base": ("logits", "logits", "the output head")},
    ),
    "tokens that are cut over cp": (
        {"family": "llama", "topologies": ("cp=2",), "default_dropout": DROPOUT},
        {
            "context_keys_in_reverse": SEEN,
            "context_mask_of_rank_0": SEEN,
            "context_order_not_undone": SEEN,
            "context_first_key_left_out": SEEN,
            "context_positions_begin_again": SEEN,
            "context_key_gradients_not_summed": ("backward", f"{LAST_ATTENTION}.v_proj", LACKING),
            "context_keys_and_values_gathered_apart": (
                "collectives",
                "backward reducescatter",
                "the backward communicates more than once for the keys and values",
            ),
            "context_cut_in_one_piece": ("forward", "model.layers.0.input_layernorm", "the cut over cp"),
            "context_dropout_of_the_first_tokens": ("forward", FIRST_Q, "drops other elements"),
            "context_rows_cut_to_a_multiple": ("sequences", "sequence 2", "other tokens of them"),
            "context_label_lost_at_a_cut": ("sequences", "tokens of step 1", "shifted after the tokens were split"),
            "context_label_twice_at_a_cut": ("loss", "loss of step 1", "other labels"),
            "context_tokens_counted_on_each_rank": ("sequences", "tokens of step 1", "of a rank twice"),
            "context_gradients_not_summed": ("gradients", LAST_DOWN_B, "is not summed over cp"),
            "context_gradients_summed_twice": ("gradients", LAST_DOWN_B, "summed over cp twice"),
            "dp_mean_of_means": ("gradients", LAST_DOWN_B, "the ranks of cp are weighed unequally"),
            "tokens_of_one_rank_reported": ("loss", "loss of step 1", "reports the mean of its own tokens"),
        },
    ),
    "rows of several documents that are cut over cp": (
        {"family": "llama", "packing": True, "topologies": ("cp=2",)},
        {"context_mask_of_the_first_row": SEEN, "packing_seen_across": SEEN},
    ),
    "rows of few tokens that are cut over cp": (
        {
            "family": "llama",
            "packing": "auto",
            "topologies": ("cp=2",),
            "default_dropout": DROPOUT,
            "micro_batch_size": 1,
        },
        {"context_tokens_taken_for_pooled": ("forward", FIRST_Q, "drops other elements")},
    ),
    "pairs of answers that are cut over cp": (
        {"family": "qwen3", "objective": PROVED["dpo"], "topologies": ("cp=2",)},
        {"context_losses_of_rows_on_each_rank": LOSS, "context_examples_counted_on_each_rank": LOSS},
    ),
    "experts on cp ranks": (
        {"family": "qwen3_moe", "topologies": ("cp=2,ep=2",)},
        {
            "context_choices_of_one_rank": ("loss", "load-balancing loss of step 1", "all ranks"),
            "context_tokens_of_balance_divided": ("backward", f"{LAST_MLP}.gate", "that of the load-balancing loss"),
        },
    ),
    "a norm of what experts give": (
        {"family": "muse_spark", "topologies": ("tp=2,sp,etp=2",)},
        {"expert_norm_of_each_term": ("forward", "model.language_model.layers.1.mlp.experts", "")},
    ),
    "keys from a cache, and those of an indexer": (
        {"family": "deepseek_v32", "topologies": ("cp=2",)},
        {
            "context_cached_key_gradients_not_summed": ("backward", f"{LAST_ATTENTION}.kv_a_layernorm", LACKING),
            "context_cached_mask_of_rank_0": SEEN,
            "context_indexer_keys_of_own_tokens": SEEN,
        },
    ),
    "an attention with a causal mask of its own": (
        {"family": "gpt_neo", "topologies": ("cp=2",)},
        {"context_keys_after_own_tokens": ("forward", "transformer.h.1.attn.attention.out_proj", SEEN[2])},
    ),
    "an attention that numbers tokens": (
        {"family": "llama4_text", "topologies": ("cp=2",)},
        {"context_numbers_begin_again": ("forward", f"{LAST_ATTENTION}.o_proj", "positions, or which tokens see")},
    ),
    "states of earlier blocks": (
        {"family": "inkling2_text", "topologies": ("tp=2,sp",)},
        {
            "block_states_without_gradient": ("backward", "model.layers.1", ""),
            "block_states_of_other_tokens": ("forward", "model.layers.1.attention_input.norm", ""),
        },
    ),
    "states of earlier blocks, from another stage": (
        {"family": "inkling2_text", "topologies": ("pp=2,interleave=2",)},
        {
            "sent_block_states_without_gradient": ("backward", "model.layers.1", ""),
            "sent_block_states_of_other_tokens": ("forward", "model.layers.1.attention_input.norm", ""),
        },
    ),
    "a bias of keys, and a head with padding": (
        {"family": "inkling_text", "topologies": ("cp=2",)},
        {"context_bias_of_the_first_queries": SEEN, "padding_of_the_head_counted": ("loss", "loss of step 1", "")},
    ),
    "states that pass from one cp rank to the next": (
        {"family": "qwen3_next", "topologies": ("cp=2",)},
        {
            "context_state_begins_again": ("forward", f"{_DELTA_NET}.out_proj", SEEN[2]),
            "context_convolution_begins_again": ("forward", f"{_DELTA_NET}.out_proj", SEEN[2]),
            "context_state_without_gradient": ("backward", "model.layers.1.linear_attn.in_proj_ba", LACKING),
        },
    ),
    "an adapter on the embedding of tokens that are cut over cp and tp": (
        {"family": "llama", "topologies": ("cp=2,tp=2,sp",), "lora": _ON_EMBEDDING},
        {"embedding_b_not_summed": ("gradients", "model.embed_tokens.lora_embedding_B", "not summed over tp")},
    ),
    **RUNS,
}

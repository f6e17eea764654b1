"""Names of other programs than those whose recipes are imported, and further spellings: for the parser's messages."""

from __future__ import annotations

from meshlora.run.config.foreign.fact import same

OTHERS = (
    same("peak_lr", "train.lr"),
    same("total_steps num_steps", "train.steps"),
    same("train_batch_size global_batch_size", "train.batch_size, of all ranks together"),
    same("adam_eps", "train.eps"),
    same("gradient_clipping clip_grad", "train.max_grad_norm"),
    same("label_smoothing", "train.objective, as in objective: {kind: sft, label_smoothing: 0.1}"),
    same("noise_alpha", "train.neftune_alpha"),
    same("optimizer_name", "train.optimizer, as in optimizer: adamw"),
    same("epsilon clip_ratio clip_ratio_low clip_low", "train.objective, as in {kind: grpo, clip_low: 0.2}"),
    same("epsilon_high clip_ratio_high clip_high", "train.objective, as in {kind: grpo, clip_high: 0.28}"),
    same("importance_sampling_level", "train.objective, as in {kind: grpo, ratio: sequence}"),
    same(
        "vllm_importance_sampling_cap vllm_importance_sampling_clip_max tis_cap",
        "train.objective, as in {kind: grpo, importance_cap: 2}",
    ),
    same("vllm_importance_sampling_clip_min", "train.objective, as in {kind: grpo, importance_floor: 0.2}"),
    same("vllm_importance_sampling_mode", "train.objective, as in {kind: grpo, correction: sequence_mask}"),
    same("use_bias_correction_kl", "train.objective, as in {kind: grpo, kl_coef: 0.04, kl_correction: true}"),
    same("off_policy_mask_threshold", "train.objective, as in {kind: grpo, off_policy_mask: 0.1}"),
    same("mask_truncated_completions", "train.objective, as in {kind: grpo, mask_truncated: true}"),
    same("top_entropy_quantile", "train.objective, as in {kind: grpo, top_entropy: 0.2}"),
    same("clip_ratio_c", "train.objective, as in {kind: grpo, delta: 3}, of negative advantages"),
    same("kl_loss_coef use_kl_loss kl_coef", "train.objective, as in {kind: grpo, kl_coef: 0.01}"),
    same("kl_loss_type", "train.objective, as in {kind: grpo, kl: k3}"),
    same("loss_agg_mode", "train.objective, as in {kind: grpo, mean_over: sequence}"),
    same("norm_adv_by_std_in_grpo", "train.objective, as in {kind: grpo, scale_rewards: none}"),
    same("entropy_coeff ent_coef", "train.objective, as in {kind: grpo, entropy_coef: 0.001}"),
    same("train_file train_data", "data.train"),
    same("validation_file", "data.eval"),
    same("multipack", "data.packing, as in packing: rows"),
    same("max_eval_samples", "data.eval_limit, for evaluation only"),
    same("zero_stage", "topology, as in topology: dp=8,dp_shard, where every rank keeps a part of the base"),
    same("pipeline_parallel_size", "topology, as in topology: dp=2,pp=2"),
    same("use_cuda", "device, as in device: cpu"),
)

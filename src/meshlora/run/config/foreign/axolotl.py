"""axolotl's YAML. Read in its sources of July 2026 (067b021)."""

from __future__ import annotations

from meshlora.run.config.foreign.fact import Trainer, computed, idle, near, none, same

FACTS = (
    computed("micro_batch_size", "train.micro_batch_size", "per process there; accumulated, a mean of means (0.19.0)"),
    computed("sequence_len", "data.max_length", "512 by default there; longer sequences are left out, not cut"),
    computed("excess_length_strategy", "data.too_long", "drop by default there"),
    idle("min_sample_len"),
    computed("optimizer", "train.optimizer", "adamw_torch_fused by default"),
    computed("lr_scheduler", "train.schedule", "cosine by default"),
    computed("cosine_min_lr_ratio", "train.min_lr, a rate: the ratio times train.lr"),
    none("cosine_constant_lr_ratio", "cosine ends with the last step here"),
    none("lr_quadratic_warmup jagged_restart_steps jagged_restart_warmup_steps lr_groups", "no schedule here has it"),
    computed(
        "num_epochs",
        "train.epochs",
        "rounded once over all epochs there, epoch by epoch here: up to a step an epoch more",
    ),
    computed("sample_packing", "data.packing, as in packing: rows", "incomplete last rows are left out there"),
    idle(
        "eval_sample_packing pad_to_sequence_len sample_packing_bin_size sample_packing_group_size "
        "multipack_real_batches "
        "sample_packing_sequentially batch_flattening",
        "rows of packing differ in padding alone",
    ),
    computed("saves_per_epoch", "train.save_every, as in save_every: epoch/4"),
    computed("evals_per_epoch", "train.eval_every, as in eval_every: epoch/4", "one more before the first step there"),
    computed("datasets", "data.train"),
    computed("test_datasets", "data.eval"),
    computed("pretraining_dataset", "data.train, with streaming: true"),
    computed(
        "val_set_size",
        "data.eval, as in eval: 0.05: a share of data.train, or a number of its rows",
        "another draw than theirs",
    ),
    computed("adapter", "lora, or adapter: a folder to go on from", "lora and qlora; all parameters without it"),
    none("peft_autocast_adapter_dtype", "factors are float32 here", True),
    same("lora_model_dir", "adapter, a folder"),
    same("lora_fan_in_fan_out", "lora.fan_in_fan_out"),
    computed(
        "lora_target_linear",
        "lora.target_modules, as in target_modules: all-linear",
        "routers and vision towers too there, neither here",
    ),
    same("peft_use_dora", "lora.use_dora"),
    same("peft_use_rslora", "lora.use_rslora"),
    same("peft_layers_to_transform", "lora.layers_to_transform"),
    same("lora_rank_pattern", "lora.rank_pattern"),
    same("lora_alpha_pattern", "lora.alpha_pattern"),
    same("peft_init_lora_weights", "lora.init_lora_weights"),
    computed("peft", "lora, with the fields of peft.LoraConfig"),
    computed("chat_template", "data.chat_template"),
    same("chat_template_jinja", "data.chat_template, a file"),
    none("chat_template_kwargs", "a template is rendered without options of its own"),
    same("default_system_message", "data.system"),
    computed("train_on_inputs", "data.train_on: all is completions and answers, everything is prompts too"),
    computed("roles_to_train", "data.train_on, a list of roles"),
    none("train_on_eos", "the end of a trained turn is trained, as the template has it", "turn"),
    none("train_on_eot", "the end of a trained turn is trained, as the template has it", "turn"),
    near(
        "eot_tokens",
        "",
        "the token that ends a turn is trained here whatever it is; there, if it is the eos or among eot_tokens",
    ),
    computed("special_tokens", "", "a padding token has no effect; the others are the tokenizer's"),
    same("tokens", "model.add_tokens", "new rows are the mean here, and trained alone unless modules_to_save has all"),
    none("added_tokens_overrides", "no token of a tokenizer is renamed; prepare the tokenizer first"),
    idle("dataset_prepared_path", "tokens are cached in data.cache_dir"),
    idle(
        "dataset_exact_deduplication shuffle_merged_datasets dataset_keep_in_memory dataset_shard_num "
        "dataset_shard_idx "
        "skip_prepare_dataset push_dataset_to_hub hf_use_auth_token dataset_num_proc"
    ),
    computed("rl", "train.objective, as in objective: dpo"),
    computed("rl_beta", "train.objective, as in objective: {kind: dpo, beta: 0.1}"),
    computed("dpo_beta", "train.objective, as in objective: {kind: dpo, beta: 0.1}"),
    computed("orpo_alpha", "train.objective, as in objective: {kind: orpo, beta: 0.1}"),
    computed("kto_desirable_weight", "train.objective, as in objective: {kind: kto, desirable_weight: 1}"),
    computed("kto_undesirable_weight", "train.objective, as in objective: {kind: kto, undesirable_weight: 1}"),
    computed("dpo_loss_type", "train.objective, as in objective: {kind: dpo, loss: ipo}", "by the same names"),
    computed("dpo_loss_weights", "train.objective, as in {kind: dpo, loss: [sigmoid, sft], loss_weights: [1, 0.2]}"),
    computed("rpo_alpha", "train.objective, as in {kind: dpo, loss: [sigmoid, sft], loss_weights: [1, 0.2]}"),
    computed("simpo_gamma", "train.objective, as in objective: {kind: simpo, gamma: 0.5}"),
    computed("cpo_alpha", "", "simpo has no likelihood beside it: give 0"),
    computed("dpo_use_weighting", "train.objective, as in objective: {kind: dpo, weighted: true}"),
    none("dpo_norm_loss", "the loss of pairs has no such part"),
    computed("dpo_label_smoothing", "", "sigmoid and others ignore it there: nothing is written"),
    computed("trl", "rl, and train.objective: grpo", "rollouts are made by meshlora rl"),
    idle(
        "wandb_entity wandb_watch wandb_name wandb_log_model wandb_run_id wandb_mode mlflow_experiment_name "
        "mlflow_tracking_uri mlflow_run_name comet_project_name trackio_run_name trackio_space_id use_otel_metrics",
        "trackers read their own environment",
    ),
    computed("use_wandb wandb_project", "train.track, as in track: [wandb]"),
    computed("use_tensorboard use_mlflow use_comet use_trackio trackio_project_name", "train.track"),
    idle(
        "model_type tokenizer_type processor_type tokenizer_config base_model_config is_llama_derived_model "
        "is_falcon_derived_model is_mistral_derived_model is_qwen_derived_model tokenizer_use_fast tokenizer_legacy",
        "the checkpoint says it",
    ),
    same("revision_of_model", "model.revision"),
    same("adam_eps", "train.eps"),
    none("batch_size", "micro_batch_size and gradient_accumulation_steps say it"),
    none("model_config", "set it in the checkpoint's config.json"),
    idle(
        "tokenizer_use_mistral_common eval_batch_size gemma4_hybrid_attn_impl fused_attn_kernel "
        "llama4_linearized_experts "
        "flex_attn_compile_kwargs.* use_dsv4_kernels use_glm_dsa_kernels expert_parallel_num_nvl_bytes "
        "expert_parallel_token_capacity gptq_disable_exllama otel_metrics_host otel_metrics_port eval_table_size "
        "eval_max_new_tokens eval_causal_lm_metrics do_causal_lm_eval test_value use_swanlab swanlab_project "
        "swanlab_experiment_name swanlab_description swanlab_mode swanlab_workspace swanlab_log_completions "
        "swanlab_completion_log_interval swanlab_completion_max_buffer auto_resume_from_checkpoints",
        "of effect on rounding, speed and pages alone",
    ),
    none("resize_token_embeddings_to_32x", "a vocabulary has a row for each token, and no more"),
    idle(
        "plugins strict liger_rope liger_rms_norm liger_rms_norm_gated liger_glu_activation liger_swiglu "
        "liger_layer_norm liger_fused_linear_cross_entropy liger_cross_entropy lora_mlp_kernel lora_qkv_kernel "
        "lora_o_kernel lora_embedding_kernel cut_cross_entropy flash_attn_cross_entropy flash_attn_rms_norm "
        "flash_attn_fuse_mlp flash_attn_fuse_qkv use_kernels use_scattermoe use_sonicmoe experts_implementation "
        "unsloth_lora_mlp unsloth_lora_qkv unsloth_lora_o unsloth_cross_entropy_loss low_cpu_mem_usage "
        "experimental_skip_move_to_device xformers_attention sdp_attention eager_attention flex_attention "
        "sage_attention torch_compile gpu_memory_limit lora_on_cpu device_map max_memory "
        "use_ray ray_num_workers profiler_steps debug gc_steps include_tkps save_first_step",
        "kernels and places, of effect on rounding and speed: model.kernels, topology",
    ),
    near("flash_attention", "model.attn_implementation", "written as sdpa, which also keeps packed sequences apart"),
    computed("gptq", "model.quantization: keep", ""),
    none("bnb_config_kwargs", "4 bits have no further options"),
    computed("model_quantization_config model_quantization_config_kwargs", "model.quantization"),
    none("quantize_moe_experts", "model.quantization holds routed experts packed as well as linears"),
    none("shuffle_before_merging_datasets", "the order is of all data at once"),
    computed(
        "curriculum_sampling",
        "data.shuffle, as in shuffle: false",
        "shuffled once before, unless shuffle_merged_datasets: false",
    ),
    computed("loss_watchdog_threshold loss_watchdog_patience", "train.on_spike, as in {above: 5, patience: 3}"),
    none("unfrozen_parameters", "an adapter is all that is trained, with lora.modules_to_save"),
    none(
        "relora relora_steps relora_prune_ratio lisa_n_layers lisa_step_interval pose_split_on_token_ids use_pose "
        " s2_attention qat fp8 sft_mixin llmcompressor reward_model process_reward_model "
        "num_labels diffusion kd_trainer",
        "it is not here",
    ),
    none("overrides_of_model_config rope_scaling overrides_of_model_kwargs", "set it in the checkpoint's config.json"),
    none("reinit_weights", "the base is as its checkpoint has it"),
    computed("context_parallel_size sequence_parallel_degree", "topology, as in topology: cp=2"),
    computed("tensor_parallel_size", "topology, as in topology: tp=2"),
    computed("expert_parallel_size", "topology, as in topology: ep=2"),
    computed("dp_shard_size dp_replicate_size", "topology, as in topology: dp=2,tp=4"),
    idle("fsdp_final_state_dict_type ddp_find_unused_parameters dataloader_num_workers heads_k_stride ring_attn_func"),
    none(" image_size image_resize_algorithm", "images keep the size that the processor gives", 512),
    idle("freeze_mm_modules", "the vision part is frozen unless lora.vision says otherwise"),
)

AXOLOTL = Trainer(
    "axolotl",
    "axolotl",
    "its YAML",
    ("base_model", "sequence_len", "sample_packing", "val_set_size", "lora_target_linear"),
    FACTS,
    defaults={
        "train.schedule": "cosine",
        "train.weight_decay": 0.0,
        "train.seed": 42,
        "train.save_every": "epoch",
        "train.keep_last": 4,
        "data.max_length": 512,
        "data.too_long": "drop",
        "model.dtype": "bfloat16",
        "train.output": "model-out",
        "train.log_every": 10,
        "lora.lora_dropout": 0.0,
    },
    differs=("sequences without a trained token are left out there; here they are an error (data.on_bad_row: skip)",),
)

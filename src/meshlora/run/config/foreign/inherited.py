"""Keys of transformers' TrainingArguments and PEFT's LoraConfig, which five trainers inherit."""

from __future__ import annotations

from meshlora.run.config.foreign.fact import Fact, computed, idle, near, none, same

OPTIMIZERS = {
    **dict.fromkeys(("adamw_torch_fused", "adamw_torch", "adamw_hf", "adamw_apex_fused", "adamw"), "adamw"),
    **dict.fromkeys(("paged_adamw_32bit", "paged_adamw", "torch.optim.adamw"), "adamw"),
    **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit"), "adamw_8bit"),
}
# Those with options of their own are read together with these (`meshlora_extra.importing.schedule`).
SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
    "cosine_with_min_lr": "cosine",
    "cosine_with_restarts": "cosine_with_restarts",
    "polynomial": "polynomial",
    "inverse_sqrt": "inverse_sqrt",
    "warmup_stable_decay": "warmup_stable_decay",
}
ATTENTIONS = {"sdpa": "sdpa", "eager": "eager"}
_FLASH = "written as sdpa, which also keeps packed sequences apart; flash kernels differ in rounding"

INHERITED = (
    same("model_name_or_path base_model model_name model_id", "model.path"),
    same("trust_remote_code", "model.trust_remote_code"),
    same("model_revision", "model.revision"),
    computed(
        "bf16 fp16 torch_dtype precision",
        "model.dtype, as in dtype: bfloat16",
        "of the base, which computes in it; factors are float32, as PEFT casts them there",
    ),
    idle("tf32", "it is a mode of products in float32 on GPUs, and changes their last bits"),
    near("attn_implementation attn_impl flash_attn flash_attention", "model.attn_implementation", _FLASH, ATTENTIONS),
    computed("load_in_4bit bnb_4bit_quant_type", "model.quantization, as in quantization: nf4", "scales in float32"),
    computed("load_in_8bit", "model.quantization, as in quantization: int8"),
    none("bnb_4bit_use_double_quant use_bnb_nested_quant", "scales of 4 bits are not quantised themselves here"),
    computed("learning_rate", "train.lr"),
    computed("num_train_epochs", "train.epochs"),
    computed("max_steps", "train.steps", "above 0 it wins over epochs there; here a run has one of both"),
    computed(
        "per_device_train_batch_size",
        "train.micro_batch_size, and train.batch_size is of all ranks together",
        "per process there, times processes and gradient_accumulation_steps here",
    ),
    computed(
        "gradient_accumulation_steps",
        "",
        "it follows from train.batch_size, which is global, and train.micro_batch_size",
    ),
    idle(
        "per_device_eval_batch_size",
        "evaluations take train.micro_batch_size; their mean is over all tokens, there over batches",
    ),
    computed("lr_scheduler_type", "train.schedule"),
    computed("lr_scheduler_kwargs", "train.min_lr, or what train.schedule has besides"),
    computed(
        "warmup_steps",
        "train.warmup_steps",
        "the first rate is 0 there: warmup_from_zero; a number below 1 is a share of the steps",
    ),
    computed("warmup_ratio lr_warmup_ratio", "train.warmup_ratio", "with warmup_from_zero: true"),
    computed("optim", "train.optimizer, as in optimizer: adamw"),
    none("optim_args optim_target_modules", "options of optimizers that are not here"),
    same("adam_beta1", "train.beta1"),
    same("adam_beta2", "train.beta2"),
    same("adam_epsilon", "train.eps"),
    same(
        "weight_decay",
        "train.weight_decay",
        "biases and norms are left out there, if they are trained at all: decay_biases_and_norms: false",
    ),
    same("max_grad_norm", "train.max_grad_norm"),
    computed("label_smoothing_factor", "train.objective, as in objective: {kind: sft, label_smoothing: 0.1}"),
    near("neftune_noise_alpha", "train.neftune_alpha", "its length is the padded row's there, the sequence's here"),
    same("router_aux_loss_coef", "train.router_aux_loss_coef", "0 by default here"),
    computed("gradient_checkpointing activation_checkpointing", "train.recompute, as in recompute: full"),
    idle("gradient_checkpointing_kwargs activation_checkpointing_kwargs"),
    idle("activation_offloading", "activations stay on the device here; no number changes"),
    computed("save_strategy save_steps", "train.save_every, in optimizer steps or parts of an epoch"),
    computed("save_total_limit", "train.keep_last"),
    computed(
        "eval_strategy evaluation_strategy eval_steps do_eval",
        "train.eval_every, in optimizer steps or parts of an epoch",
    ),
    none("eval_on_start", "a run begins with a step; meshlora evaluate --base says what the base does"),
    idle("eval_delay eval_accumulation_steps batch_eval_metrics prediction_loss_only include_num_input_tokens_seen"),
    computed(
        "load_best_model_at_end",
        "train.keep_best",
        "the last adapter stays the result; the best is in checkpoints/best",
    ),
    computed("early_stopping_patience", "train.early_stopping, as in {patience: 3}"),
    idle("metric_for_best_model greater_is_better", "the best has the lowest loss on data.eval"),
    computed("logging_steps", "train.log_every"),
    idle(
        "logging_first_step logging_strategy logging_dir log_level run_name disable_tqdm include_tokens_per_second "
        "logging_nan_inf_filter skip_memory_metrics"
    ),
    computed(
        "seed data_seed",
        "train.seed",
        "one seed is of factors, order and dropout; no run draws what another trainer's does",
    ),
    idle("average_tokens_across_devices", "always so"),
    none("dataloader_drop_last", "the last batch of an epoch is trained, too"),
    none("group_by_length", "the order of the data is that of one process, whatever the topology"),
    idle(
        "dataloader_num_workers dataset_num_proc preprocessing_num_workers dataset_processes dataloader_pin_memory "
        "dataloader_prefetch_factor dataloader_persistent_workers dataset_batch_size dataset_kwargs",
        "data are tokenised once and read from data.cache_dir",
    ),
    idle("remove_unused_columns", "columns that are not read are named"),
    idle("auto_find_batch_size", "meshlora plan finds what fits"),
    computed("output_dir", "train.output"),
    computed("overwrite_output_dir", "train.overwrite"),
    idle(
        "resume_from_checkpoint",
        "give --resume auto on the command line; checkpoints of others are not read, their adapters are: adapter",
    ),
    computed(
        "deepspeed fsdp fsdp_config fsdp_version",
        "topology, as in topology: dp=8,dp_shard, where every rank keeps a part of the base",
    ),
    computed("report_to", "train.track, as in track: [wandb]"),
    idle(
        "push_to_hub hub_model_id hub_strategy hub_private_repo hub_token hub_always_push",
        "meshlora push does it after the run",
    ),
    idle(
        "local_rank ddp_backend ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers",
        "the launcher and topology say it",
    ),
    computed("ddp_timeout", "train.timeout_s"),
    idle("torch_compile torch_compile_backend torch_compile_mode", "the model's own code runs as it is"),
    idle(
        "do_train do_predict save_only_model save_safetensors save_on_each_node use_liger_kernel "
        "torch_empty_cache_steps",
        "a run trains and saves what resuming needs",
    ),
    computed("use_cpu no_cuda", "device, as in device: cpu"),
    computed("lora_r r", "lora.r"),
    same("lora_alpha", "lora.lora_alpha"),
    computed("lora_dropout", "lora.lora_dropout", "there all dropout is off in preference runs"),
    computed("target_modules lora_target_modules", "lora.target_modules", "PEFT's by family where none are named"),
    same("target_parameters lora_target_parameters", "lora.target_parameters"),
    same("modules_to_save lora_modules_to_save", "lora.modules_to_save"),
    same("use_rslora", "lora.use_rslora"),
    same("use_dora", "lora.use_dora"),
    Fact("lora_bias bias", "lora.bias", "same", off=("none",)),
    same("rank_pattern", "lora.rank_pattern"),
    same("alpha_pattern", "lora.alpha_pattern"),
    same("layers_to_transform", "lora.layers_to_transform"),
    same("layers_pattern", "lora.layers_pattern"),
    same("exclude_modules", "lora.exclude_modules"),
    same("trainable_token_indices", "lora.trainable_token_indices"),
    same("loraplus_lr_ratio", "train.lora_plus_ratio"),
    same("loraplus_lr_embedding", "train.lora_plus_embedding_lr"),
)

# Our key -> what transformers' default means.
DEFAULTS = {
    "train.lr": 5e-5,
    "train.schedule": "linear",
    "train.weight_decay": 0.0,
    "train.seed": 42,
    "train.log_every": 500,
}

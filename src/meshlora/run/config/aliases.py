"""Other tools' names for keys of a run file, so that a message can name ours.

Owns: names of transformers' and TRL's arguments, losses and schedules, axolotl's and LLaMA-Factory's keys, and what is
said of each. Does not own: other messages about keys (`run.config.types`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from meshlora_ground.errors import UserError, did_you_mean

_TOPOLOGY = "topology, as in topology: dp=2,tp=4"
# Name elsewhere -> key here, with what differs.
_KEYS = {
    **dict.fromkeys(("learning_rate", "peak_lr"), "train.lr"),
    **dict.fromkeys(("num_train_epochs", "num_epochs"), "train.epochs"),
    **dict.fromkeys(("max_steps", "total_steps", "num_steps"), "train.steps"),
    "per_device_train_batch_size": "train.micro_batch_size, and train.batch_size is of all ranks together",
    "per_device_eval_batch_size": "train.micro_batch_size, for evaluation too",
    **dict.fromkeys(("train_batch_size", "global_batch_size"), "train.batch_size, of all ranks together"),
    **dict.fromkeys(("lr_scheduler_type", "lr_scheduler"), "train.schedule"),
    "lr_scheduler_kwargs": "train.min_lr, train.decay_steps or train.cycle, as train.schedule has it",
    **dict.fromkeys(("warmup_ratio", "lr_warmup_ratio"), "train.warmup_steps, a number of optimizer steps"),
    "cosine_min_lr_ratio": "train.min_lr, a rate and no ratio",
    **{f"adam_{name}": f"train.{name}" for name in ("beta1", "beta2")},
    **dict.fromkeys(("adam_epsilon", "adam_eps"), "train.eps"),
    **dict.fromkeys(("gradient_clipping", "clip_grad"), "train.max_grad_norm"),
    "output_dir": "train.output",
    "overwrite_output_dir": "train.overwrite",
    "logging_steps": "train.log_every",
    **dict.fromkeys(("save_steps", "save_strategy", "saves_per_epoch"), "train.save_every, in optimizer steps"),
    **dict.fromkeys(
        ("eval_steps", "eval_strategy", "evaluation_strategy", "evals_per_epoch"),
        "train.eval_every, in optimizer steps",
    ),
    "save_total_limit": "train.keep_last",
    "load_best_model_at_end": "train.keep_best",
    "early_stopping_patience": "train.early_stopping, as in {patience: 3}",
    **dict.fromkeys(("report_to", "use_wandb", "wandb_project"), "train.track, as in track: [wandb]"),
    **dict.fromkeys(
        ("gradient_checkpointing", "gradient_checkpointing_kwargs", "activation_checkpointing"),
        "train.recompute, as in recompute: full",
    ),
    **dict.fromkeys(
        ("label_smoothing_factor", "label_smoothing"),
        "train.objective, as in objective: {kind: sft, label_smoothing: 0.1}",
    ),
    **dict.fromkeys(("stage", "loss_type", "finetuning_stage"), "train.objective, as in objective: dpo"),
    **dict.fromkeys(("pref_beta", "rl_beta", "dpo_beta"), "train.objective, as in objective: {kind: dpo, beta: 0.1}"),
    **dict.fromkeys(("neftune_noise_alpha", "noise_alpha"), "train.neftune_alpha"),
    **dict.fromkeys(("optim", "optimizer_name"), "train.optimizer, as in optimizer: adamw"),
    # Of TRL's and verl's GRPO.
    **{
        name: f"train.objective, as in {{kind: grpo, {ours}}}"
        for ours, names in {
            "clip_low: 0.2": ("epsilon", "clip_ratio", "clip_ratio_low", "clip_low"),
            "clip_high: 0.28": ("epsilon_high", "clip_ratio_high", "clip_high"),
            "ratio: sequence": ("importance_sampling_level",),
            "importance_cap: 2": ("vllm_importance_sampling_cap", "vllm_importance_sampling_clip_max", "tis_cap"),
            "kl_coef: 0.01": ("kl_loss_coef", "use_kl_loss", "kl_coef"),
            "kl: k3": ("kl_loss_type",),
            "mean_over: sequence": ("loss_agg_mode",),
            "scale_rewards: none": ("norm_adv_by_std_in_grpo",),
            "entropy_coef: 0.001": ("entropy_coeff", "ent_coef"),
        }.items()
        for name in names
    },
    "loraplus_lr_ratio": "train.lora_plus_ratio",
    "loraplus_lr_embedding": "train.lora_plus_embedding_lr",
    "ddp_timeout": "train.timeout_s",
    "data_seed": "train.seed",
    **dict.fromkeys(("bf16", "fp16", "tf32", "torch_dtype", "precision"), "model.dtype, as in dtype: bfloat16"),
    **dict.fromkeys(("model_name_or_path", "base_model", "model_name", "model_id"), "model.path"),
    **dict.fromkeys(("flash_attention", "flash_attn", "attn_impl"), "model.attn_implementation"),
    **dict.fromkeys(("load_in_4bit", "bnb_4bit_quant_type"), "model.quantization, as in quantization: nf4"),
    **dict.fromkeys(("load_in_8bit", "quantization_bit"), "model.quantization, as in quantization: int8"),
    **dict.fromkeys(
        ("max_seq_length", "max_seq_len", "sequence_len", "cutoff_len", "model_max_length"), "data.max_length"
    ),
    **dict.fromkeys(("datasets", "dataset", "dataset_name", "dataset_path", "train_file", "train_data"), "data.train"),
    **dict.fromkeys(("eval_dataset", "test_datasets", "validation_file", "val_set_size"), "data.eval, data of its own"),
    **dict.fromkeys(("dataset_text_field", "dataset_kwargs", "remove_unused_columns"), "data.columns"),
    **dict.fromkeys(("sample_packing", "multipack"), "data.packing"),
    **dict.fromkeys(
        ("train_on_inputs", "train_on_prompt", "loss_on", "completion_only_loss", "assistant_only_loss"),
        "data.train_on: all is completions and answers, everything is prompts too",
    ),
    **dict.fromkeys(("excess_length_strategy", "truncation_mode", "truncation"), "data.too_long"),
    "dataset_prepared_path": "data.cache_dir",
    **dict.fromkeys(("max_eval_samples", "max_samples"), "data.eval_limit, for evaluation only"),
    **dict.fromkeys(("lora_r", "lora_rank", "rank"), "lora.r"),
    **dict.fromkeys(("lora_target", "lora_target_modules", "lora_target_linear"), "lora.target_modules"),
    **{name: f"lora.{name}" for name in ("lora_alpha", "lora_dropout", "target_modules", "use_dora", "use_rslora")},
    "r": "lora.r",
    "lora_modules_to_save": "lora.modules_to_save",
    "trainable_token_indices": "lora.trainable_token_indices",
    "peft_use_dora": "lora.use_dora",
    **dict.fromkeys(("peft_config", "lora_config", "peft"), "lora, with the fields of peft.LoraConfig"),
    **dict.fromkeys(("lora_model_dir", "adapter_name_or_path"), "adapter, a folder"),
    **dict.fromkeys(
        ("deepspeed", "fsdp", "fsdp_config", "fsdp_version", "zero_stage"),
        "topology, as in topology: dp=8,dp_shard, where every rank keeps a part of the base",
    ),
    **dict.fromkeys(("tensor_parallel_size", "context_parallel_size", "expert_parallel_size"), _TOPOLOGY),
    **dict.fromkeys(("pipeline_parallel_size", "sequence_parallel_degree", "dp_shard_size"), _TOPOLOGY),
    **dict.fromkeys(("use_cpu", "no_cuda", "use_cuda"), "device, as in device: cpu"),
}
# Name elsewhere -> why there is no such key here.
_NONE = {
    "gradient_accumulation_steps": "it follows from train.batch_size, which is global, and train.micro_batch_size",
    "group_by_length": "the order of the data is that of one process, whatever the topology",
    **dict.fromkeys(
        ("dataloader_num_workers", "dataset_num_proc", "preprocessing_num_workers", "dataset_processes"),
        "data are tokenised once and read from data.cache_dir",
    ),
    "auto_find_batch_size": "meshlora plan finds what fits",
    "resume_from_checkpoint": "give --resume auto on the command line",
    **dict.fromkeys(("push_to_hub", "hub_model_id"), "meshlora push does it after the run"),
    **dict.fromkeys(("local_rank", "ddp_backend", "ddp_find_unused_parameters"), "the launcher and topology say it"),
    "torch_compile": "the model's own code runs as it is",
    "finetuning_type": "an adapter is all that is trained: lora, or adapter to go on from one",
}


# Losses of preferences that TRL and others name, and that are not here.
_LOSSES_ELSEWHERE = {
    *("ipo", "hinge", "simpo", "cpo", "rpo", "robust", "apo_zero", "apo_down", "sigmoid_norm", "exo_pair", "nca_pair"),
    *("bco", "bco_pair", "sppo", "sppo_hard", "aot", "aot_pair", "aot_unpaired", "discopop"),
}
_LOSSES_HERE = "of pairs there are dpo, whose loss is the sigmoid one, and orpo; of single answers kto"


def unknown_loss(path: str, name: object) -> UserError | None:
    """The error for the name of an objective that is a loss of preferences elsewhere; None if it is none."""
    if str(name).lower() not in _LOSSES_ELSEWHERE:
        return None
    return UserError(f"{path}: {name!r}", "this loss of preferences is not there", _LOSSES_HERE)


# Schedules of transformers that are not here by this name -> (the rule, what is near in meaning).
_SCHEDULES_ELSEWHERE = {
    "constant_with_warmup": (
        "it has another name here",
        "constant with train.warmup_steps, and train.warmup_from_zero: true for the same first rates",
    ),
    "cosine_with_min_lr": ("it has another name here", "cosine with train.min_lr, a rate and no ratio"),
    "cosine_warmup_with_min_lr": (
        "a warm-up from a rate of its own is not there",
        "cosine with train.warmup_steps and train.min_lr, whose warm-up begins at lr / warmup_steps",
    ),
    "polynomial": ("only its power 1 is there", "linear with train.min_lr: 1e-7, or what lr_end is, is that one"),
    "cosine_with_restarts": (
        "a schedule that restarts is not there",
        "cosine is that with one cycle; cycle draws straight lines through rates that are given by step",
    ),
    **dict.fromkeys(
        ("reduce_lr_on_plateau", "greedy"),
        (
            "it follows a measured loss, and the rate here is a function of the step, as resuming needs it",
            "cosine or linear; train.early_stopping ends a run whose loss no longer falls",
        ),
    ),
}


def unknown_schedule(path: str, name: object) -> UserError | None:
    """The error for the name of a schedule of transformers that is not here; None if it is none."""
    if path != "train.schedule" or str(name).lower() not in _SCHEDULES_ELSEWHERE:
        return None
    return UserError(f"{path}: {name!r}", *_SCHEDULES_ELSEWHERE[str(name).lower()])


def unknown_key(path: Sequence[str], near: Iterable[str], groups: Mapping[str, Iterable[str]]) -> UserError:
    """The error for a key that its group has not. near: the keys of the group. groups: name -> keys, "" the top."""
    where, name = ".".join(path), path[-1].lower().replace("-", "_")
    if name == "loss_type" and "objective" in path:
        return UserError(where, "there is no such key: an objective has one loss", _LOSSES_HERE)
    if name in _NONE:
        return UserError(where, "there is no such key", _NONE[name])
    ours = _KEYS.get(name) or next((f"{group}.{name}".strip(".") for group, keys in groups.items() if name in keys), "")
    return UserError(where, "unknown key", f"here it is {ours}" if ours else did_you_mean(path[-1], near))

"""Other tools' names for keys of a run file, so that a message can name ours.

Owns: names of transformers' and TRL's arguments, losses and schedules, axolotl's and LLaMA-Factory's keys, and what is
said of each. Does not own: other messages about keys (`run.config.types`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from meshlora_ground.errors import UserError, did_you_mean

# Key here, with what differs -> its names elsewhere.
_NAMES = {
    "train.lr": "learning_rate peak_lr",
    "train.epochs": "num_train_epochs num_epochs",
    "train.steps": "max_steps total_steps num_steps",
    "train.micro_batch_size, and train.batch_size is of all ranks together": "per_device_train_batch_size",
    "train.micro_batch_size, for evaluation too": "per_device_eval_batch_size",
    "train.batch_size, of all ranks together": "train_batch_size global_batch_size",
    "train.schedule": "lr_scheduler_type lr_scheduler",
    "train.min_lr, num_cycles, power, timescale or decay_type, as train.schedule has it": "lr_scheduler_kwargs",
    "train.warmup_ratio": "lr_warmup_ratio lr_warmup_fraction",
    "train.min_lr, a rate and no ratio": "cosine_min_lr_ratio",
    "train.beta1": "adam_beta1",
    "train.beta2": "adam_beta2",
    "train.eps": "adam_epsilon adam_eps",
    "train.max_grad_norm": "gradient_clipping clip_grad",
    "train.output": "output_dir",
    "train.overwrite": "overwrite_output_dir",
    "train.log_every": "logging_steps",
    "train.save_every, in optimizer steps, or epoch": "save_steps save_strategy",
    "train.eval_every, in optimizer steps, or epoch": "eval_steps eval_strategy evaluation_strategy",
    "train.save_every, as in epoch/4": "saves_per_epoch",
    "train.eval_every, as in epoch/4": "evals_per_epoch",
    "train.on_spike, as in {above: 5}": "loss_watchdog_threshold",
    "train.on_spike, as in {above: 5, patience: 3}": "loss_watchdog_patience",
    "train.keep_last": "save_total_limit",
    "train.keep_best": "load_best_model_at_end",
    "train.early_stopping, as in {patience: 3}": "early_stopping_patience",
    "train.track, as in track: [wandb]": "report_to use_wandb wandb_project",
    "train.recompute, as in recompute: full": (
        "gradient_checkpointing gradient_checkpointing_kwargs activation_checkpointing"
    ),
    "train.objective, as in objective: {kind: sft, label_smoothing: 0.1}": "label_smoothing_factor label_smoothing",
    "train.objective, as in objective: dpo": "stage loss_type finetuning_stage",
    "train.objective, as in objective: {kind: dpo, beta: 0.1}": "pref_beta rl_beta dpo_beta",
    "train.neftune_alpha": "neftune_noise_alpha noise_alpha",
    "train.optimizer, as in optimizer: adamw": "optim optimizer_name",
    "train.objective, as in {kind: grpo, clip_low: 0.2}": "epsilon clip_ratio clip_ratio_low clip_low",
    "train.objective, as in {kind: grpo, clip_high: 0.28}": "epsilon_high clip_ratio_high clip_high",
    "train.objective, as in {kind: grpo, ratio: sequence}": "importance_sampling_level",
    "train.objective, as in {kind: grpo, importance_cap: 2}": (
        "vllm_importance_sampling_cap vllm_importance_sampling_clip_max tis_cap"
    ),
    "train.objective, as in {kind: grpo, kl_coef: 0.01}": "kl_loss_coef use_kl_loss kl_coef",
    "train.objective, as in {kind: grpo, kl: k3}": "kl_loss_type",
    "train.objective, as in {kind: grpo, mean_over: sequence}": "loss_agg_mode",
    "train.objective, as in {kind: grpo, scale_rewards: none}": "norm_adv_by_std_in_grpo",
    "train.objective, as in {kind: grpo, entropy_coef: 0.001}": "entropy_coeff ent_coef",
    "train.lora_plus_ratio": "loraplus_lr_ratio",
    "train.lora_plus_embedding_lr": "loraplus_lr_embedding",
    "train.timeout_s": "ddp_timeout",
    "train.seed": "data_seed",
    "model.dtype, as in dtype: bfloat16": "bf16 fp16 tf32 torch_dtype precision",
    "model.path": "model_name_or_path base_model model_name model_id",
    "model.attn_implementation": "flash_attention flash_attn attn_impl",
    "model.quantization, as in quantization: nf4": "load_in_4bit bnb_4bit_quant_type",
    "model.quantization, as in quantization: int8": "load_in_8bit quantization_bit",
    "data.max_length": "max_seq_length max_seq_len sequence_len cutoff_len model_max_length",
    "data.train": "datasets dataset dataset_name dataset_path train_file train_data",
    "data.eval, data of its own": "eval_dataset test_datasets validation_file val_set_size",
    "data.columns": "dataset_text_field dataset_kwargs remove_unused_columns",
    "data.packing": "sample_packing multipack",
    "data.train_on: all is completions and answers, everything is prompts too": (
        "train_on_inputs train_on_prompt loss_on completion_only_loss assistant_only_loss"
    ),
    "data.too_long": "excess_length_strategy truncation_mode truncation",
    "data.cache_dir": "dataset_prepared_path",
    "data.eval_limit, for evaluation only": "max_eval_samples max_samples",
    "lora.r": "lora_r lora_rank rank r",
    "lora.target_modules": "lora_target lora_target_modules lora_target_linear target_modules",
    "lora.lora_alpha": "lora_alpha",
    "lora.lora_dropout": "lora_dropout",
    "lora.use_dora": "use_dora peft_use_dora",
    "lora.use_rslora": "use_rslora",
    "lora.modules_to_save": "lora_modules_to_save",
    "lora.trainable_token_indices": "trainable_token_indices",
    "lora, with the fields of peft.LoraConfig": "peft_config lora_config peft",
    "adapter, a folder": "lora_model_dir adapter_name_or_path",
    "topology, as in topology: dp=8,dp_shard, where every rank keeps a part of the base": (
        "deepspeed fsdp fsdp_config fsdp_version zero_stage"
    ),
    "topology, as in topology: dp=2,tp=4": (
        "tensor_parallel_size context_parallel_size expert_parallel_size pipeline_parallel_size "
        "sequence_parallel_degree dp_shard_size"
    ),
    "device, as in device: cpu": "use_cpu no_cuda use_cuda",
}
# Why there is no such key here -> its names elsewhere.
_NAMES_OF_NONE = {
    "it follows from train.batch_size, which is global, and train.micro_batch_size": "gradient_accumulation_steps",
    "the order of the data is that of one process, whatever the topology": "group_by_length",
    "data are tokenised once and read from data.cache_dir": (
        "dataloader_num_workers dataset_num_proc preprocessing_num_workers dataset_processes"
    ),
    "meshlora plan finds what fits": "auto_find_batch_size",
    "give --resume auto on the command line": "resume_from_checkpoint",
    "meshlora push does it after the run": "push_to_hub hub_model_id",
    "the launcher and topology say it": "local_rank ddp_backend ddp_find_unused_parameters",
    "the model's own code runs as it is": "torch_compile",
    "an adapter is all that is trained: lora, or adapter to go on from one": "finetuning_type",
}


def _by_name(names: Mapping[str, str]) -> dict[str, str]:
    """Name elsewhere -> what is said of it."""
    found: dict[str, str] = {}
    for said, each in names.items():
        found |= dict.fromkeys(each.split(), said)
    return found


_KEYS, _NONE = _by_name(_NAMES), _by_name(_NAMES_OF_NONE)
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


# Schedules of transformers that are not here -> (the rule, what is near in meaning).
_SCHEDULES_ELSEWHERE = {
    "cosine_warmup_with_min_lr": (
        "a warm-up from a rate of its own is not there",
        "cosine with train.warmup_steps and train.min_lr has the same warm-up, and each later rate a step later",
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

"""NeMo AutoModel's YAML. Read in its sources of August 2026 (36044ad)."""

from __future__ import annotations

from meshlora.run.config.foreign.fact import Trainer, computed, idle, none, same

FACTS = (
    computed("step_scheduler.global_batch_size", "train.batch_size", "global there, too"),
    same("step_scheduler.local_batch_size", "train.micro_batch_size"),
    computed("step_scheduler.num_epochs", "train.epochs", "10 where neither length is given"),
    computed("step_scheduler.max_steps", "train.steps", "with both, the smaller counts there"),
    computed("step_scheduler.ckpt_every_steps", "train.save_every", "also at the end of each epoch there"),
    computed("step_scheduler.val_every_steps", "train.eval_every"),
    computed("model.pretrained_model_name_or_path", "model.path"),
    computed("model.torch_dtype", "model.dtype"),
    same("model.trust_remote_code", "model.trust_remote_code"),
    computed("peft.dim", "lora.r"),
    computed("peft.alpha", "lora.lora_alpha", "32 by default"),
    computed("peft.target_modules", "lora.target_modules", "a wildcard there, a regular expression here"),
    computed("peft.match_all_linear", "lora.target_modules, as in all-linear", "the head too there"),
    same("peft.exclude_modules", "lora.exclude_modules"),
    computed("peft.dropout", "lora.lora_dropout"),
    none("peft.dropout_position", "dropout is before the factors, as in PEFT", "pre"),
    computed(
        "peft.lora_A_init", "lora.init_lora_weights", "A is drawn normal after Xavier there; uniform after Kaiming here"
    ),
    none("peft.lora_dtype", "factors are float32", "float32"),
    same("peft.use_dora", "lora.use_dora"),
    idle("parallelizer.* tokenizer.* optimizer.fused model.force_hf model.config.* model.output_hidden_states"),
    none(
        "model.mtp_loss_scaling_factor model.num_nextn_predict_layers model.mtp_use_repeated_layer",
        "further predicted tokens are not trained here",
    ),
    none("peft.moe_rank_scaling", "every expert has the rank r"),
    computed("optimizer._target_", "train.optimizer"),
    computed("optimizer.lr", "train.lr"),
    computed("optimizer.betas", "train.beta1, train.beta2"),
    same("optimizer.eps", "train.eps"),
    computed("optimizer.weight_decay", "train.weight_decay", "with Adam it is of the loss, not of the weights"),
    computed("lr_scheduler.lr_decay_style", "train.schedule", "constant where there is no lr_scheduler"),
    computed("lr_scheduler.min_lr", "train.min_lr"),
    computed("lr_scheduler.lr_warmup_steps", "train.warmup_steps", "from a tenth of the rate there, from 0 here"),
    computed("clip_grad_norm.max_norm max_grad_norm", "train.max_grad_norm"),
    computed("loss_fn._target_", "train.objective"),
    computed("dataset._target_", "data.train", "prompts made in code have no place here"),
    computed("dataset.dataset_name dataset.path_or_dataset dataset.path_or_dataset_id", "data.train"),
    computed("dataset.split", "data.train, with split and rows"),
    computed("dataset.limit_dataset_samples dataset.num_samples_limit", "data.train, with rows"),
    computed("validation_dataset.*", "data.eval"),
    computed("dataloader.shuffle", "data.shuffle", "false in many of its recipes: the order of the file"),
    computed("packed_sequence.packed_sequence_size", "data.packing, as in packing: rows"),
    computed("seed", "train.seed", "42 by default"),
    idle("rng.seed", "its fine-tuning recipe reads the seed at the top alone"),
    computed("distributed.tp_size", "topology, as in topology: tp=2"),
    computed("distributed.cp_size", "topology, as in topology: cp=2"),
    computed("distributed.pp_size", "topology, as in topology: pp=2"),
    computed("distributed.ep_size", "topology, as in topology: ep=2"),
    computed("distributed.sequence_parallel", "topology, as in topology: tp=2,sp"),
    computed("distributed.strategy", "topology, as in topology: dp=2,dp_shard"),
    computed("checkpoint.checkpoint_dir", "train.output"),
    computed("checkpoint.enabled", "train.save_every"),
    computed("dist_env.timeout_minutes", "train.timeout_s"),
    idle(
        "recipe ci.* rng.* loss_fn.* checkpoint.* dist_env.* dataloader.* validation_dataloader.* model._target_ "
        "peft._target_ "
        "peft.use_triton optimizer.foreach lr_scheduler._target_ compile.* wandb.* dataset.collate_fn "
        "model.attn_implementation "
        "model.use_liger_kernel model.use_sdpa_patching distributed.* packed_sequence.* logger.* step_scheduler.* "
        "model.backend.* model.text_config.*",
        "of effect on speed and places alone",
    ),
)

AUTOMODEL = Trainer(
    "automodel",
    "NeMo AutoModel",
    "its YAML",
    ("step_scheduler", "loss_fn", "packed_sequence", "dist_env"),
    FACTS,
    inherits=False,
    defaults={
        "train.lr": 1e-3,
        "train.schedule": "constant",
        "train.weight_decay": 0.0,
        "train.max_grad_norm": 1.0,
        "train.save_every": "epoch",
        "data.max_length": "model",
        "lora.r": 8,
        "lora.lora_alpha": 32,
        "lora.lora_dropout": 0.0,
        "lora.target_modules": ".*_proj",
        "train.seed": 42,
        "train.output": "checkpoints",
    },
)

"""torchtune's YAML. Read in its sources of April 2026 (bd2a0fc)."""

from __future__ import annotations

from meshlora.run.config.foreign.fact import Trainer, computed, idle, none, same

FACTS = (
    computed("model._component_", "model.path", "a builder for each size; the checkpoint here says it"),
    computed("checkpointer.checkpoint_dir", "model.path"),
    idle(
        "checkpointer._component_ checkpointer.checkpoint_files checkpointer.model_type checkpointer.output_dir "
        "checkpointer.recipe_checkpoint checkpointer.adapter_checkpoint checkpointer.safe_serialization "
        "checkpointer.keep_last_n_checkpoints checkpointer.should_load_recipe_state ref_checkpointer._component_ "
        "ref_checkpointer.checkpoint_dir "
        "ref_checkpointer.checkpoint_files ref_checkpointer.model_type ref_checkpointer.output_dir "
        "ref_checkpointer.recipe_checkpoint "
        "tokenizer._component_ tokenizer.path tokenizer.vocab_path tokenizer.merges_file "
        "tokenizer.special_tokens_path "
        "resume_from_checkpoint save_adapter_weights_only compile device log_peak_memory_stats log_level "
        "metric_logger.log_dir metric_logger.project metric_logger.name metric_logger.output_dir "
        "enable_async_checkpointing "
        "optimizer.fused optimizer_in_bwd fsdp_cpu_offload fsdp_reshard_after_forward loss.num_output_chunks "
        "loss.chunk_size "
        " cudnn_deterministic_mode custom_sharded_layers",
        "of effect on speed and places alone",
    ),
    computed(
        "tokenizer.max_seq_len max_seq_len",
        "data.max_length",
        "unlimited where it is null; the last token of a cut sequence is its end there",
    ),
    computed("tokenizer.prompt_template", "data.prompt"),
    computed("model.lora_attn_modules", "lora.target_modules", "output_proj is o_proj"),
    computed("model.apply_lora_to_mlp", "lora.target_modules", "gate_proj, up_proj, down_proj"),
    computed("model.apply_lora_to_output", "lora.target_modules", "lm_head"),
    idle("profiler.*", "it changes no number"),
    none("quantizer.*", "training that knows of quantisation is not here"),
    none(
        "teacher_model.* teacher_checkpointer.* kd_loss.* kd_ratio",
        "say objective: {kind: distill, teacher: FOLDER, cross_entropy: …} yourself",
    ),
    none(
        "model.decoder_trainable model.encoder_trainable model.fusion_trainable",
        "the vision part is frozen; lora.vision adapts it",
    ),
    idle("model.image_size tokenizer.image_size tokenizer.max_num_tiles collate_fn tokenizer.merges_path"),
    none("dataset.subset", "OWNER/NAME:CONFIG/SPLIT names it"),
    computed("model.lora_rank", "lora.r"),
    computed("model.lora_alpha", "lora.lora_alpha"),
    computed("model.lora_dropout", "lora.lora_dropout"),
    same("model.use_dora", "lora.use_dora"),
    computed(
        "model.quantize_base",
        "model.quantization, as in quantization: nf4",
        "torchao's nf4 quantises the scales, too, and has other values than bitsandbytes'",
    ),
    computed("batch_size", "train.batch_size", "per process there; incomplete batches are left out"),
    computed("epochs", "train.epochs", "rounded down there"),
    computed("max_steps_per_epoch", "train.steps"),
    computed("optimizer._component_", "train.optimizer"),
    computed("optimizer.lr", "train.lr"),
    computed("optimizer.weight_decay", "train.weight_decay", "0.01 there where it is absent"),
    computed("optimizer.betas", "train.beta1, train.beta2"),
    same("optimizer.eps", "train.eps"),
    computed("lr_scheduler._component_", "train.schedule", "constant where it is absent"),
    computed(
        "lr_scheduler.num_warmup_steps num_warmup_steps",
        "train.warmup_steps",
        "the first rate is 0 there: warmup_from_zero",
    ),
    none("lr_scheduler.num_cycles", "half a wave of the cosine", 0.5),
    computed("clip_grad_norm", "train.max_grad_norm", "no clipping where it is null: 0"),
    computed("loss._component_", "train.objective"),
    computed("loss.beta", "train.objective, as in objective: {kind: dpo, beta: 0.1}"),
    computed("loss.label_smoothing", "train.objective, as in objective: {kind: dpo, label_smoothing: 0.1}"),
    computed("dtype", "model.dtype", "factors and moments have it there, too; here they are float32"),
    computed("dataset._component_", "data.train"),
    computed("dataset.source", "data.train"),
    computed("dataset.data_files", "data.train"),
    computed("dataset.split", "data.train, with split and rows"),
    computed("dataset.packed", "data.packing, as in packing: rows"),
    computed("dataset.train_on_input dataset.masking_strategy", "data.train_on", "alpaca trains on the prompt there"),
    computed("dataset.column_map", "data.columns"),
    computed("dataset.column", "data.columns"),
    computed("dataset.conversation_column dataset.conversation_style", "data.columns, data.format"),
    same("dataset.new_system_prompt", "data.system"),
    none("dataset.split_across_pack", "sequences are whole in rows"),
    idle("dataset.image_dir dataset.image_tag dataset.name dataset.filter_fn"),
    computed("dataset_val._component_", "data.eval"),
    computed("dataset_val.source", "data.eval"),
    computed("dataset_val.split", "data.eval, with split and rows"),
    idle(
        "dataset_val.packed dataset_val.train_on_input dataset_val.masking_strategy dataset_val.column_map "
        "batch_size_val"
    ),
    computed("run_val_every_n_steps", "train.eval_every"),
    computed("shuffle", "data.shuffle"),
    computed("seed", "train.seed", "another each time where it is null"),
    computed("enable_activation_checkpointing", "train.recompute, as in recompute: full"),
    idle("enable_activation_offloading", "activations stay on the device here; no number changes"),
    computed("log_every_n_steps", "train.log_every"),
    computed("metric_logger._component_", "train.track"),
    computed("output_dir", "train.output"),
    computed(
        "gradient_accumulation_steps",
        "",
        "it follows from train.batch_size, which is global, and train.micro_batch_size",
    ),
    computed("tensor_parallel_dim", "topology, as in topology: tp=2"),
    idle("tensor_parallel_plan._component_ data_parallel_shard_dim data_parallel_replicate_dim"),
)

TORCHTUNE = Trainer(
    "torchtune",
    "torchtune",
    "its YAML",
    ("checkpointer", "model._component_", "tokenizer._component_"),
    FACTS,
    inherits=False,
    defaults={
        "train.lr": 1e-3,
        "train.schedule": "constant",
        "train.weight_decay": 0.01,
        "train.max_grad_norm": 0,
        "train.save_every": "epoch",
        "data.max_length": "model",
        "data.too_long": "truncate",
        "lora.r": 8,
        "lora.lora_alpha": 16,
        "lora.lora_dropout": 0.0,
        "train.output": "runs/torchtune",
    },
    differs=(
        "steps are rounded down there: incomplete batches are left out, and what is left of an epoch is added to the "
        "first step of the next",
    ),
)

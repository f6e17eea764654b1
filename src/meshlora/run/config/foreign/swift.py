"""ms-swift's scripts and YAML. Read in its sources of August 2026 (3602360)."""

from __future__ import annotations

from meshlora.run.config.foreign.fact import Trainer, computed, idle, near, none, same
from meshlora.run.config.foreign.inherited import DEFAULTS

FACTS = (
    computed("model", "model.path", "names are ModelScope's unless use_hf"),
    idle(
        "model_type use_hf check_model load_from_cache_file dataset_num_proc dataloader_num_workers "
        "save_only_model create_checkpoint_symlink add_version output_dir_version "
        "ignore_args_error log_interval use_logits_to_keep truncation_side packing_num_proc lazy_tokenize "
        "strict load_args logprobs acc_strategy dataset_shuffle use_flash_ckpt vit_gradient_checkpointing "
        "experts_impl cached_dataset padding_side",
        "of effect on speed and places alone",
    ),
    near(
        "torch_dtype",
        "model.dtype",
        "there the base is computed under autocast",
        {"bfloat16": "bfloat16", "float16": "float16", "float32": "float32", "auto": "auto"},
    ),
    computed("tuner_type train_type sft_type", "lora", "lora; the others are not here"),
    computed("rlhf_type", "train.objective, as in objective: dpo"),
    none("task_type", "train.objective: classify or embed; their rows are other ones there", "causal_lm"),
    none("num_labels", "train.objective: {kind: classify, labels: [...]}"),
    computed("dataset", "data.train", "NAME#N is N rows drawn at random there, the first N here"),
    computed("val_dataset", "data.eval"),
    computed("split_dataset_ratio", "data.eval, as in eval: 0.01", "of each source by data_seed there"),
    computed("columns", "data.columns"),
    none("interleave_prob stopping_strategy", "data.train: [{path, weight}] draws sources so", "first_exhausted"),
    none("shuffle_buffer_size", "a stream is read in its order", 1000),
    computed("max_length", "data.max_length", "the model's by default there"),
    computed("truncation_strategy", "data.too_long", "delete by default: drop"),
    computed("lora_rank", "lora.r"),
    near("target_modules", "lora.target_modules", "all-linear by default; vision tower and aligner are frozen"),
    same("target_regex", "lora.target_modules, as text: a regular expression"),
    none("freeze_llm", "its linears are what is adapted", False),
    none("freeze_vit freeze_aligner", "the vision part is frozen; lora.vision adapts it", True),
    none(
        "freeze_parameters trainable_parameters freeze_parameters_ratio freeze_parameters_regex "
        "trainable_parameters_regex",
        "an adapter is all that is trained, with lora.modules_to_save",
        0.0,
    ),
    computed("init_weights", "lora.init_lora_weights"),
    same("lorap_lr_ratio", "train.lora_plus_ratio"),
    none("lora_dtype", "factors are float32", "float32", "None"),
    computed("quant_method", "model.quantization, nf4 or int8"),
    computed("quant_bits", "model.quantization, nf4 (4) or int8 (8)"),
    none("bnb_4bit_compute_dtype", "products are in model.dtype", "bfloat16", "bf16"),
    same("system", "data.system"),
    none("model_author", "it fills the rows of swift/self-cognition, which are made in code"),
    none("model_name", "it fills the rows of swift/self-cognition, which are made in code"),
    computed("template", "data.chat_template", "its templates are code of its own"),
    none("use_chat_template", "rows of text are trained as text: data.format: text", True),
    none("template_backend", "the tokenizer's own template is rendered", "jinja", "swift"),
    none("enable_thinking", "a template is rendered with the tokenizer's own default", True),
    none("response_prefix add_non_thinking_prefix agent_template norm_bbox", "the template says it", True),
    computed("loss_scale", "data.train_on", "default trains all answers; last_round the last; all everything"),
    computed("packing", "data.packing, as in packing: rows", "rows count as the batch"),
    idle("padding_free", "data.packing: auto joins the sequences of a micro-batch so"),
    none("packing_length", "rows are as long as data.max_length"),
    computed("beta", "train.objective, as in objective: {kind: dpo, beta: 0.1}"),
    computed("loss_type", "train.objective, as in objective: {kind: dpo, loss: ipo}", "by the same names"),
    computed(
        "loss_weights rpo_alpha", "train.objective, as in {kind: dpo, loss: [sigmoid, sft], loss_weights: [1, 0.2]}"
    ),
    computed("ld_alpha", "train.objective, as in objective: {kind: dpo, length_weight: 0.3}"),
    computed("discopop_tau", "train.objective, as in objective: {kind: dpo, loss: discopop, discopop_tau: 0.05}"),
    computed("simpo_gamma", "train.objective, as in objective: {kind: simpo, gamma: 1}"),
    computed("cpo_alpha", "", "simpo has no likelihood beside it: give 0"),
    computed("desirable_weight", "train.objective, as in objective: {kind: kto, desirable_weight: 1}"),
    computed("undesirable_weight", "train.objective, as in objective: {kind: kto, undesirable_weight: 1}"),
    none(
        "ref_model ref_adapters reward_model teacher_model",
        "the reference is the base, or an adapter: objective: {kind: dpo, reference: FOLDER}",
    ),
    computed(
        "num_generations max_completion_length temperature epsilon reward_funcs num_iterations",
        "rl, and train.objective: grpo",
        "rollouts are made by meshlora rl",
    ),
    computed("sequence_parallel_size", "topology, as in topology: cp=2"),
    none("new_special_tokens", "no token is added to a vocabulary"),
    computed("adapters", "adapter, a folder"),
    idle("resume_only_model", "moments of others are not read"),
    same("streaming", "data.streaming"),
    computed("label_smoothing"),
    idle(
        "predict_with_generate max_model_len lora_ga_batch_size lora_ga_iters lora_ga_max_length lora_ga_direction "
        "lora_ga_scale lora_ga_stable_gamma tuner_backend"
    ),
    none("optimizer", "the optimizers here are adamw, adamw_8bit and lora_fa"),
    none("rope_scaling", "set it in the checkpoint's config.json"),
    computed("early_stop_interval", "train.early_stopping, as in {patience: 3}"),
    none("max_epochs", "train.epochs is the one length"),
    none("galore_rank use_galore use_muon lisa_activated_layers", "it is not here", 0),
)

SWIFT = Trainer(
    "swift",
    "ms-swift",
    "a script with `swift sft` or `swift rlhf`, or its YAML",
    ("tuner_type", "train_type", "rlhf_type", "split_dataset_ratio", "torch_dtype", "model_author"),
    FACTS,
    defaults=DEFAULTS
    | {
        "train.lr": 1e-4,
        "train.schedule": "cosine",
        "train.weight_decay": 0.1,
        "train.beta2": 0.95,
        "train.log_every": 5,
        "train.save_every": 500,
        "lora.r": 8,
        "lora.lora_alpha": 32,
        "lora.lora_dropout": 0.05,
        "lora.target_modules": "all-linear",
        "data.max_length": "model",
        "data.too_long": "drop",
        "train.recompute": "full",
        "train.output": "output",
    },
    differs=(
        "models and data of a name are ModelScope's there; here a name is Hugging Face's, where it may be another's",
    ),
)

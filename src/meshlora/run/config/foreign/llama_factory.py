"""LLaMA-Factory's YAML. Read in its sources of August 2026 (ff6d4d1)."""

from __future__ import annotations

from meshlora.run.config.foreign.fact import Trainer, computed, idle, near, none, same
from meshlora.run.config.foreign.inherited import DEFAULTS

FACTS = (
    computed("stage finetuning_stage", "train.objective, as in objective: dpo", "sft, dpo, kto; pt is plain text"),
    computed("finetuning_type", "", "an adapter is all that is trained: lora, or adapter to go on from one"),
    idle(
        "do_train plot_loss overwrite_cache preprocessing_num_workers dataloader_num_workers "
        "preprocessing_batch_size "
        "tokenized_path use_fast_tokenizer low_cpu_mem_usage use_unsloth use_unsloth_gc enable_liger_kernel "
        "print_param_status "
        "cache_dir hf_hub_token ms_hub_token om_hub_token use_swanlab swanlab_project swanlab_run_name "
        "include_effective_tokens_per_second",
        "of effect on speed and places alone",
    ),
    computed(
        "cutoff_len", "data.max_length", "cut turn by turn there, a long prompt before its answer; on the right here"
    ),
    computed("dataset", "data.train", "names in dataset_info.json"),
    computed("eval_dataset", "data.eval", "names in dataset_info.json"),
    computed("dataset_dir", "", "where dataset_info.json is, which import reads"),
    idle("media_dir image_max_pixels image_min_pixels video_max_pixels video_min_pixels crop_to_patches"),
    computed("val_size", "data.eval, as in eval: 0.05", "a random share or number there too, another draw"),
    idle(
        "use_kt kt_cpu_activation kt_config kt_weight_path kt_non_expert_weight_path use_v1_kernels ray_num_workers "
        "video_fps video_maxlen",
        "kernels and places, of effect on rounding and speed",
    ),
    same("max_samples", "data.max_samples", "the first rows of each source"),
    computed(
        "template",
        "data.chat_template",
        "its templates are code of its own, some with a system text; a line break after an answer is trained there",
    ),
    same("default_system", "data.system"),
    none("enable_thinking", "a template is rendered with the tokenizer's own default", True),
    none("preserve_thinking", "the template says it", False),
    none("tool_format", "the template writes tools"),
    computed("train_on_prompt", "data.train_on: all is completions and answers, everything is prompts too"),
    computed("mask_history", "data.train_on, as in train_on: last", "it also cuts from the first turns there"),
    computed(
        "packing neat_packing",
        "data.packing, as in packing: rows",
        "without neat_packing sequences see each other there, never here",
    ),
    none("mix_strategy", "interleaving is source weights: data.train: [{path, weight}]", "concat"),
    none("interleave_probs", "data.train: [{path, weight}] draws sources so"),
    same("streaming", "data.streaming"),
    idle("buffer_size shuffle_buffer_size"),
    computed("disable_shuffling", "data.shuffle, as in shuffle: false"),
    computed("lora_rank rank", "lora.r"),
    computed("lora_alpha", "lora.lora_alpha", "2 * lora_rank there where it is absent, 8 here"),
    computed("lora_target", "lora.target_modules", "all is all-linear; routers too there, not here"),
    same("additional_target", "lora.modules_to_save"),
    computed("pissa_init", "lora.init_lora_weights, as in init_lora_weights: pissa"),
    computed("pissa_iter", "lora.init_lora_weights, as in init_lora_weights: pissa_niter_16"),
    idle("pissa_convert", "meshlora export has it"),
    none("create_new_adapter", "merge the adapter into the base first"),
    computed("adapter_name_or_path", "adapter, a folder"),
    computed("quantization_bit", "model.quantization, as in quantization: nf4 (4) or int8 (8)"),
    none(
        "quantization_method",
        "bitsandbytes' kinds are here, and checkpoints as they are: quantization: keep",
        "bnb",
        "bitsandbytes",
    ),
    none("quantization_type", "4 bits are nf4", "nf4"),
    computed("double_quantization", "", "scales of 4 bits are not quantised themselves here"),
    computed("disable_gradient_checkpointing", "train.recompute, which is full there unless disabled"),
    none("pure_bf16", "factors are float32 here"),
    none("upcast_layernorm upcast_lmhead_output", "norms and head are in model.dtype"),
    none("infer_dtype", "model.dtype", "auto"),
    computed("pref_beta", "train.objective, as in objective: {kind: dpo, beta: 0.1}"),
    computed("pref_loss", "train.objective", "orpo and simpo are kinds, the others losses of dpo"),
    computed("pref_ftx", "train.objective, as in {kind: dpo, loss: [sigmoid, sft], loss_weights: [1, 0.2]}"),
    computed("simpo_gamma", "train.objective, as in objective: {kind: simpo, gamma: 0.5}"),
    computed("ld_alpha", "train.objective, as in objective: {kind: dpo, length_weight: 0.3}"),
    none("pref_bco_weight", "the loss of pairs has no such part", 0.0),
    computed("use_dft_loss", "train.objective, as in objective: {kind: sft, loss: dft}"),
    computed("dpo_label_smoothing", "train.objective, as in objective: {kind: dpo, label_smoothing: 0.1}"),
    computed("kto_chosen_weight", "train.objective, as in objective: {kind: kto, desirable_weight: 1}"),
    computed("kto_rejected_weight", "train.objective, as in objective: {kind: kto, undesirable_weight: 1}"),
    none(
        "ref_model reward_model", "the reference is the base, or an adapter: objective: {kind: dpo, reference: FOLDER}"
    ),
    near(
        "flash_attn",
        "model.attn_implementation",
        "written as sdpa; flash kernels differ in rounding",
        {"auto": None, "sdpa": "sdpa", "disabled": "eager", "fa2": "sdpa", "fa3": "sdpa"},
    ),
    none("rope_scaling shift_attn", "set it in the checkpoint's config.json"),
    none(
        "use_asft_loss use_eaft_loss fp8 use_galore use_apollo use_badam use_muon use_adam_mini "
        "mixture_of_depths "
        "use_llama_pro",
        "it is not here",
    ),
    same("moe_aux_loss_coef", "train.router_aux_loss_coef"),
    computed("add_tokens", "model.add_tokens"),
    computed("add_special_tokens", "model.add_special_tokens"),
    computed("resize_vocab", "", "it trains embedding and head in full there; here new rows, unless modules_to_save"),
    none("new_special_tokens_config", "new rows are the mean of those that are there"),
    computed("early_stopping_steps", "train.early_stopping, as in {patience: 3}"),
    none("freeze_vision_tower freeze_multi_modal_projector", "the vision part is frozen; lora.vision adapts it", True),
    none("freeze_language_model", "its linears are what is adapted"),
    idle(
        "compute_accuracy predict_with_generate max_new_tokens top_p temperature do_sample ddp_find_unused_parameters"
    ),
    none("ignore_pad_token_for_loss", "padding is never trained", True),
)

LLAMA_FACTORY = Trainer(
    "llama-factory",
    "LLaMA-Factory",
    "its YAML, with dataset_info.json beside it",
    ("finetuning_type", "cutoff_len", "stage", "lora_target", "dataset_dir"),
    FACTS,
    defaults=DEFAULTS
    | {
        "lora.r": 8,
        "lora.lora_dropout": 0.0,
        "lora.target_modules": "all-linear",
        "data.max_length": 2048,
        "data.too_long": "truncate",
        "train.recompute": "full",
        "train.save_every": 500,
        "train.output": "saves/lora",
    },
    differs=("a folder with a checkpoint goes on by itself there; here --resume auto says so",),
)

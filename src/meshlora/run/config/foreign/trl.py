"""TRL's arguments, on its command line, in YAML or in a script. Read in its sources of July 2026 (f2cd577)."""

from __future__ import annotations

from meshlora.run.config.foreign.fact import Trainer, computed, idle, near, none, same
from meshlora.run.config.foreign.inherited import DEFAULTS

FACTS = (
    computed("dtype", "model.dtype", "float32 by default in its scripts, under bfloat16 autocast"),
    computed("dataset_name dataset_path", "data.train"),
    computed("dataset_config", "data.train, as in OWNER/NAME:CONFIG/SPLIT"),
    computed("dataset_train_split", "data.train, as in OWNER/NAME:CONFIG/SPLIT", "train by default"),
    computed("dataset_test_split", "data.eval, as in OWNER/NAME:CONFIG/SPLIT", "test by default"),
    computed("datasets", "data.train"),
    same("streaming", "data.streaming"),
    same("dataset_streaming", "data.streaming"),
    computed("use_peft", "lora", "all parameters without it there"),
    computed("peft_config lora_config", "lora, with the fields of peft.LoraConfig"),
    computed("lora_task_type", "train.objective"),
    computed("max_length max_seq_length max_seq_len model_max_length", "data.max_length", "1024 by default"),
    computed("truncation_mode truncation", "data.too_long", "keep_start is truncate"),
    none("max_prompt_length", "a sequence has one limit, data.max_length; no answer is cut for its prompt"),
    computed("packing", "data.packing, as in packing: rows", "rows count as the batch"),
    none(
        "packing_strategy",
        "rows are made of whole sequences, best fit first; wrapped lets them run together",
        "bfd",
        "ffd",
    ),
    idle("padding_free eval_packing pad_to_multiple_of", "rows differ in padding alone"),
    computed(
        "assistant_only_loss completion_only_loss loss_on",
        "data.train_on: all is completions and answers, everything is prompts too",
        "conversations and text are trained whole there unless it is true",
    ),
    computed("dataset_text_field", "data.columns"),
    none("eos_token", "the end of a sequence is the tokenizer's"),
    idle("pad_token model_init_kwargs"),
    computed("chat_template_path", "data.chat_template"),
    computed("loss_type", "train.objective, as in objective: {kind: dpo, loss: ipo}", "by the same names"),
    computed("loss_weights", "train.objective, as in {kind: dpo, loss: [sigmoid, sft], loss_weights: [1, 0.2]}"),
    computed("rpo_alpha", "train.objective, as in {kind: dpo, loss: [sigmoid, sft], loss_weights: [1, 0.2]}"),
    computed("f_divergence_type", "train.objective, as in objective: {kind: dpo, f_divergence: forward_kl}"),
    computed("f_alpha_divergence_coef", "train.objective, as in objective: {kind: dpo, f_alpha: 0.5}"),
    computed("ld_alpha", "train.objective, as in objective: {kind: dpo, length_weight: 0.3}"),
    computed("discopop_tau", "train.objective, as in objective: {kind: dpo, loss: discopop, discopop_tau: 0.05}"),
    computed("simpo_gamma", "train.objective, as in objective: {kind: simpo, gamma: 0.5}"),
    computed("cpo_alpha", "", "simpo has no likelihood beside it: give 0"),
    none("shuffle_dataset", "the order is drawn at each epoch", True),
    computed("beta", "train.objective, as in objective: {kind: dpo, beta: 0.1}"),
    near("label_smoothing", "", "sigmoid and others ignore it there: nothing is written"),
    computed("use_weighting", "train.objective, as in objective: {kind: dpo, weighted: true}"),
    none("sync_ref_model", "the loss of pairs has no such part"),
    none("disable_dropout", "all dropout is off there in preference runs, and lora_dropout 0 here", True),
    none("precompute_ref_log_probs", "the base is run beside it"),
    none("ref_model", "the reference is the base, or an adapter: objective: {kind: dpo, reference: FOLDER}"),
    computed("center_rewards_coefficient", "train.objective, as in objective: {kind: reward, center: 0.01}"),
    computed("desirable_weight", "train.objective, as in objective: {kind: kto, desirable_weight: 1}"),
    computed("undesirable_weight", "train.objective, as in objective: {kind: kto, undesirable_weight: 1}"),
    idle("activation_offloading", "activations stay on the device here; no number changes"),
    idle(
        "use_liger_kernel formatting_func data_collator args tokenizer processing_class train_dataset "
        "dataset_num_proc no_remove_unused_columns config model_class",
        "of effect on speed and places alone",
    ),
    computed(
        "num_generations max_completion_length num_iterations reward_funcs",
        "rl, and train.objective: grpo",
        "rollouts are made by meshlora rl",
    ),
)

TRL = Trainer(
    "trl",
    "TRL",
    "its YAML, a command line as text or in a script, or a Python script",
    ("use_peft", "dataset_name", "dataset_train_split", "assistant_only_loss", "completion_only_loss", "lora_r"),
    FACTS,
    defaults=DEFAULTS
    | {
        "train.lr": 2e-5,
        "train.save_every": 500,
        "train.log_every": 10,
        "lora.r": 16,
        "lora.lora_alpha": 32,
        "lora.lora_dropout": 0.05,
        "lora.target_modules": ["q_proj", "v_proj"],
        "data.max_length": 1024,
        "data.too_long": "truncate",
        "model.dtype": "float32",
        "train.recompute": "full",
        "train.output": "trainer_output",
    },
    differs=(
        "routers of a mixture of experts have router_aux_loss_coef 0.001 by default there, 0 here",
        "sequences without a trained token after the cut are left out there; here they are an error "
        "(data.on_bad_row: "
        "skip)",
    ),
)

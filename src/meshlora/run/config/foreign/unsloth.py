"""unsloth's scripts and notebooks. Read in its sources of August 2026 (015bdef)."""

from __future__ import annotations

from meshlora.run.config.foreign.fact import Trainer, computed, idle, none
from meshlora.run.config.foreign.inherited import DEFAULTS
from meshlora.run.config.foreign.trl import FACTS as TRLS

FACTS = (
    computed("load_in_4bit", "model.quantization, as in quantization: nf4", "true by default there"),
    computed("max_seq_length", "data.max_length", "2048 by default there"),
    computed("dtype", "model.dtype", "bfloat16 where the GPU has it"),
    computed("full_finetuning", "", "an adapter is all that is trained"),
    computed("use_gradient_checkpointing", "train.recompute, as in recompute: full"),
    computed("random_state", "train.seed", "it seeds the adapter there, seed the order; one seed here"),
    none("loftq_config", "init_lora_weights: pissa is the nearest"),
    none("embedding_learning_rate", "one rate; train.lora_plus_embedding_lr is of factors on the embedding"),
    none("finetune_vision_layers", "the vision part is frozen; lora.vision adapts it", False),
    idle("finetune_language_layers finetune_attention_modules finetune_mlp_modules", "lora.target_modules says it"),
    idle(
        "token fast_inference gpu_memory_utilization max_lora_rank device_map attn_implementation "
        "use_exact_model_name "
        "unsloth_tiled_mlp float8_kv_cache temporary_location text instruction_part response_part",
        "of effect on speed and places alone",
    ),
    computed(
        "train_on_responses_only", "data.train_on: all where it is called, everything else", "a call, not an argument"
    ),
    computed("get_chat_template", "data.chat_template", "a call, not an argument"),
    computed("load_dataset", "data.train", "a call; what the script maps its rows with is not run"),
    *TRLS,
)

UNSLOTH = Trainer(
    "unsloth",
    "unsloth",
    "a notebook or a Python script, read and never run",
    ("get_chat_template", "train_on_responses_only", "random_state", "use_gradient_checkpointing"),
    FACTS,
    defaults=DEFAULTS
    | {
        "lora.r": 16,
        "lora.lora_alpha": 16,
        "lora.lora_dropout": 0.0,
        "lora.target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        "data.max_length": 2048,
        "data.too_long": "truncate",
        "model.dtype": "bfloat16",
        "train.recompute": "full",
        "train.save_every": 500,
        "train.output": "trainer_output",
        "train.seed": 3407,
    },
    differs=("what the script maps its rows with is not run: the rows are read as data.format has it",),
)
# What SFTConfig defaults to once unsloth has patched it; plain TrainingArguments keep transformers' own.
OF_SFT_CONFIG = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "learning_rate": 5e-5,
    "optim": "adamw_8bit",
    "weight_decay": 0.001,
    "warmup_ratio": 0.1,
    "seed": 3407,
    "logging_steps": 1,
}

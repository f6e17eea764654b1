"""Presets: published recipes as values of a run file.

Owns: their values, and how they are filled in. Does not own: the meaning of the keys (`run.config.run_file`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from meshlora.run.config.model_presets import OF_MODEL, Facts
from meshlora_ground.errors import UserError, did_you_mean

PRESETS: Mapping[str, Mapping[str, Any]] = {
    # LoRA of GPT-2 medium on E2E: examples/NLG of microsoft/LoRA (README.md, src/gpt2_ft.py, src/gpt2_beam.py).
    "microsoft-e2e": {
        # Its GPT-2 (src/model.py) has no dropout but the adapter's.
        "model": {"disable_dropout": True},
        "lora": {
            "r": 4,
            "lora_alpha": 32,
            "lora_dropout": 0.1,
            "target_modules": ["c_attn"],
            "pieces": {"c_attn": ["q", "v"]},
        },
        "data": {"max_length": 512, "train_on": "all", "separator": "<|endoftext|>"},
        "train": {
            "epochs": 5,
            "batch_size": 8,
            "lr": 2e-4,
            "schedule": "linear",
            "warmup_steps": 500,
            "warmup_from_zero": True,
            "weight_decay": 0.01,
            "decay_biases_and_norms": True,
            "beta1": 0.9,
            "beta2": 0.999,
            "eps": 1e-6,
            "max_grad_norm": 0.0,
            "objective": {"kind": "sft", "label_smoothing": 0.1},
        },
        "generate": {
            "search": "gpt2_beam",
            "num_beams": 10,
            "length_penalty": 0.8,
            "no_repeat_ngram_size": 4,
            "max_new_tokens": 64,
            "stop": ["\n\n"],  # token 628
        },
    },
    # Schulman et al., "LoRA Without Regret" (thinkingmachines.ai/blog/lora, 2025): all linears, alpha 32 whatever the
    # rank, small batches, a constant rate. beta2, eps and no clipping are defaults of `tinker.AdamParams`.
    "lora-without-regret": {
        "lora": {"r": 32, "lora_alpha": 32, "lora_dropout": 0.0, "target_modules": "all-linear"},
        "train": {
            "batch_size": 32,
            "schedule": "constant",
            "weight_decay": 0.0,
            "beta1": 0.9,
            "beta2": 0.95,
            "eps": 1e-12,
            "max_grad_norm": 0.0,
        },
    },
    # Dettmers et al., "QLoRA" (arXiv 2305.14314, appendix B); scripts/finetune_guanaco_7b.sh of artidoro/qlora.
    "qlora": {
        "model": {"quantization": "nf4"},
        "lora": {"r": 64, "lora_alpha": 16, "target_modules": "all-linear"},
        "train": {
            "batch_size": 16,
            "schedule": "constant",
            "weight_decay": 0.0,
            "beta1": 0.9,
            "beta2": 0.999,
            "max_grad_norm": 0.3,
        },
    },
    # recipes/zephyr-7b-beta/dpo/config_qlora.yaml of huggingface/alignment-handbook, on one process.
    "dpo": {
        "lora": {
            "r": 128,
            "lora_alpha": 128,
            "lora_dropout": 0.05,
            "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        },
        "data": {"max_length": 1024},
        "train": {
            "epochs": 1,
            "batch_size": 16,
            "lr": 5e-6,
            "schedule": "cosine",
            "warmup_ratio": 0.1,
            "warmup_from_zero": True,
            "objective": {"kind": "dpo", "beta": 0.01},
        },
    },
}
# Keys of a group that belong together: if one of them is given, the others are not taken from elsewhere.
_TARGETS = {"target_modules", "target_parameters", "pieces"}
TOGETHER: Mapping[str, Collection[Collection[str]]] = {
    "train": [{"steps", "epochs"}, {"warmup_steps", "warmup_ratio"}],
    "lora": [_TARGETS],
}


def filled(
    own: Mapping[str, Any], rest: Mapping[str, Any], together: Collection[Collection[str]] = ()
) -> dict[str, Any]:
    """`own`, completed from `rest`. together: sets of keys that all come from `own` if it has any of them."""
    found = dict(rest)
    for keys in together:
        if not own.keys().isdisjoint(keys):
            for key in keys:
                found.pop(key, None)
    return found | dict(own)


def with_preset(tree: Mapping[str, Any], *, facts: Callable[[], Facts] | None = None) -> dict[str, Any]:
    """The tree of a run file, completed with the values of its `preset`.

    Values of the file win, key by key. With `adapter:` the preset's `lora` is ignored, as the adapter has its own.
    facts: of the model, asked for by presets that depend on it; without it their values are left out.

    Raises:
        UserError: a preset that is not known, or not for this model.
    """
    name = tree.get("preset")
    if name is None:
        return dict(tree)
    if not isinstance(name, str) or name not in PRESETS:
        raise UserError(f"preset: {name!r}", "there is no such preset", did_you_mean(str(name), PRESETS))
    whole, preset = dict(tree), {group: dict(values) for group, values in PRESETS[name].items()}
    if name in OF_MODEL and facts is not None:
        for group, values in OF_MODEL[name](facts(), tree).items():
            preset[group] = preset.get(group, {}) | values
    for group, values in preset.items():
        own = tree.get(group)
        if group in tree and not isinstance(own, Mapping):
            continue  # `run.config.file` reports the error
        if group == "lora" and tree.get("adapter") is not None:
            continue
        if group == "lora" and own and own.keys() & _TARGETS:
            values.pop("rank_pattern", None)  # of the preset's own targets
        whole[group] = filled(own or {}, values, TOGETHER.get(group, ()))
    return whole


def resolved(config: Any) -> str:
    """The values that a run uses for the keys of its preset, one line per group. config: the `RunConfig`."""
    lines, of_model = [], dict[str, list[str]]()
    if config.preset in OF_MODEL:
        of_model = {"lora": ["lora_dropout", "rank_pattern"], "train": ["lr"]}
    for group, values in PRESETS[config.preset].items():
        inside = [key for key in values.get("objective", ()) if key != "kind"]
        values = dict.fromkeys([*values, *inside, *of_model.get(group, ())])
        shown = own = getattr(config, group)
        if group == "train":
            shown = {**vars(own.objective), **vars(own), "objective": own.objective.kind}
            if not own.warmup_ratio:  # the run has it in steps
                values = dict.fromkeys("warmup_steps" if key == "warmup_ratio" else key for key in values)
        elif group != "lora":
            shown = vars(own)
        if shown is not None:  # of an adapter that is given there is no lora
            words = [f"{key} {shown[key]}" for key in values if shown.get(key) is not None]
            lines.append(f"{group}: {', '.join(words)}")
    return "\n".join(lines)

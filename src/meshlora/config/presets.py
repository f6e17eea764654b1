"""Presets: published recipes as values of a run file.

Owns: their values, and how they are filled in. Does not own: the meaning of the keys (`config.run`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from meshlora.common.errors import UserError, did_you_mean

PRESETS: Mapping[str, Mapping[str, Any]] = {
    # LoRA of GPT-2 medium on E2E: examples/NLG of microsoft/LoRA (README.md, src/gpt2_ft.py, src/gpt2_beam.py).
    "microsoft-e2e": {
        "lora": {
            "r": 4,
            "lora_alpha": 32,
            "lora_dropout": 0.1,
            "target_modules": ["c_attn"],
            "pieces": {"c_attn": ["q", "v"]},
        },
        "data": {"max_length": 512, "loss_on": "completion"},
        "train": {
            "epochs": 5,
            "batch_size": 8,
            "lr": 2e-4,
            "schedule": "linear",
            "warmup_steps": 500,
            "weight_decay": 0.01,
            "decay_biases_and_norms": True,
            "beta1": 0.9,
            "beta2": 0.999,
            "eps": 1e-6,
            "max_grad_norm": 0.0,
            "label_smoothing": 0.1,
        },
        "generate": {"num_beams": 10, "length_penalty": 0.8, "no_repeat_ngram_size": 4},
    },
}
# Keys of a group that belong together: if one of them is given, the others are not taken from elsewhere.
LENGTH, _TARGETS = {"steps", "epochs"}, {"target_modules", "target_parameters", "pieces"}
_TOGETHER = {"train": LENGTH, "lora": _TARGETS}


def filled(own: Mapping[str, Any], rest: Mapping[str, Any], together: Collection[str] = ()) -> dict[str, Any]:
    """`own`, completed from `rest`. together: keys that all come from `own` if it has any of them."""
    replaced = together if own.keys() & set(together) else ()
    return {key: value for key, value in rest.items() if key not in replaced} | dict(own)


def with_preset(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The tree of a run file, completed with the values of its `preset`.

    Values of the file win, key by key. With `adapter:` the preset's `lora` is ignored, as the adapter has its own.

    Raises:
        UserError: a preset that is not known.
    """
    name = tree.get("preset")
    if name is None:
        return dict(tree)
    if not isinstance(name, str) or name not in PRESETS:
        raise UserError(f"preset: {name!r}", "there is no such preset", did_you_mean(str(name), PRESETS))
    whole = dict(tree)
    for group, values in PRESETS[name].items():
        own = tree.get(group)
        if group in tree and not isinstance(own, Mapping):
            continue  # `config.file` reports the error
        if group == "lora" and tree.get("adapter") is not None:
            continue
        whole[group] = filled(own or {}, values, _TOGETHER.get(group, ()))
    return whole


def resolved(config: Any) -> str:
    """The values that a run uses for the keys of its preset, one line per group. config: the `RunConfig`."""
    lines = []
    for group, values in PRESETS[config.preset].items():
        own = getattr(config, group)
        shown = own if group == "lora" else vars(own) | vars(getattr(own, "objective", own))
        if shown is not None:
            lines.append(
                f"{group}: " + ", ".join(f"{key} {shown[key]}" for key in values if shown.get(key) is not None)
            )
    return "\n".join(lines)

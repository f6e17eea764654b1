"""The JSON schema of a run file, which `meshlora schema` prints and editors read, written from the code.

    .venv/bin/python scripts/write_schema.py    # write it; scripts/describe_house.py does too, and --check compares

Types, choices, limits and defaults are those of the dataclasses; descriptions are the sentences of their docstrings.
Here besides: what `config.file` allows in other words (an objective by its name, several adapters), and the fields of
`lora`.
"""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

from meshlora.run.config import file
from meshlora.run.config.endings import EarlyStopping, LossSpike
from meshlora.run.config.metrics import RegexMetric
from meshlora.run.config.presets import presets
from meshlora.run.config.rl import REWARDS, RlConfig
from meshlora.run.config.run_file import (
    BY_EPOCH,
    PER_ADAPTER,
    SCHEDULES_TOO,
    DataConfig,
    GenerateConfig,
    ModelConfig,
    RunConfig,
    Source,
    TrainConfig,
)
from meshlora.run.config.types import adapter
from meshlora_ground.objectives.kinds import KINDS

FILE = Path(file.__file__).with_name("run-file.schema.json")
_TEXT, _TEXTS = {"type": "string"}, {"type": "array", "items": {"type": "string"}}
_RANK, _ALPHA, _SWITCH = {"type": "integer", "minimum": 1}, {"type": "number"}, {"type": "boolean"}
_TOKENS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1, "uniqueItems": True}
# The fields of `peft.LoraConfig` that are supported, and those of our own.
LORA: dict[str, Any] = {
    "r": _RANK,
    "lora_alpha": _ALPHA,
    "lora_dropout": {"type": "number", "minimum": 0, "exclusiveMaximum": 1},
    "use_rslora": _SWITCH,
    "use_dora": _SWITCH,
    "lora_bias": _SWITCH,
    "ensure_weight_tying": _SWITCH,
    "target_modules": {"anyOf": [_TEXT, _TEXTS]},
    "exclude_modules": {"anyOf": [_TEXT, _TEXTS, {"type": "null"}]},
    "target_parameters": {"anyOf": [_TEXTS, {"type": "null"}]},
    "layers_to_transform": {"type": ["integer", "array", "null"], "items": {"type": "integer"}},
    "layers_pattern": {"anyOf": [_TEXT, _TEXTS, {"type": "null"}]},
    "rank_pattern": {"type": "object", "additionalProperties": _RANK},
    "alpha_pattern": {"type": "object", "additionalProperties": _ALPHA},
    "init_lora_weights": {
        "anyOf": [
            {"enum": [True, False, "gaussian", "orthogonal", "eva", "pissa", "olora", "OLoRA"]},
            {"type": "string", "pattern": "^pissa_niter_[0-9]{1,3}$"},
        ]
    },
    "eva_config": {
        "type": "object",
        "additionalProperties": False,
        "properties": {
            "rho": {"type": "number", "minimum": 1},
            "tau": {"type": "number", "minimum": 0, "maximum": 1},
            "label_mask_value": {"type": "integer"},
            **dict.fromkeys(("use_label_mask", "whiten", "adjust_scaling_factors"), _SWITCH),
        },
    },
    "bias": {"enum": ["none", "all", "lora_only"]},
    "modules_to_save": {"anyOf": [_TEXTS, {"type": "null"}]},
    "trainable_token_indices": {
        "anyOf": [_TOKENS, {"type": "object", "additionalProperties": _TOKENS}, {"type": "null"}]
    },
    "alora_invocation_tokens": {"anyOf": [{**_TOKENS, "uniqueItems": False}, {"type": "null"}]},
    "fan_in_fan_out": _SWITCH,
    "pieces": {"type": "object", "additionalProperties": _TEXTS, "description": "of fused matrices: name -> pieces"},
    "share_experts": {"type": "boolean", "description": "one adapter for all experts of a layer"},
    "vision": {"anyOf": [_SWITCH, _TEXTS], "description": "also the linears of a vision part, or these of them"},
}


def schema() -> dict[str, Any]:
    """The schema of a run file."""
    whole = adapter().json_schema()
    groups: dict[str, Any] = whole["$defs"]
    _describe(whole, RunConfig)
    kinds = (*KINDS.values(), *REWARDS.values())
    for cls in (
        ModelConfig,
        DataConfig,
        Source,
        TrainConfig,
        EarlyStopping,
        LossSpike,
        GenerateConfig,
        RegexMetric,
        RlConfig,
        *kinds,
    ):
        _describe(groups[cls.__name__], cls)
        groups[cls.__name__]["title"] = cls.__name__.removesuffix("Config").lower()
    for cls in kinds:
        needs_too = groups[cls.__name__].get("required", [])
        groups[cls.__name__]["required"] = ["kind", *needs_too]
    keys, train = whole["properties"], groups["TrainConfig"]["properties"]
    by_name = {"enum": list(KINDS), "description": "The kind alone, with its own values as they are."}
    train["objective"] = {"anyOf": [by_name, train["objective"]], "description": train["objective"]["description"]}
    train["schedule"]["enum"] += [*SCHEDULES_TOO]
    for name in ("eval_every", "save_every"):
        train[name]["pattern"] = f"^({BY_EPOCH.pattern})$"
    lora = {
        "type": "object",
        "properties": LORA,
        "additionalProperties": {},
        "description": keys["lora"]["description"],
    }
    keys["lora"] = {"anyOf": [lora, {"type": "null"}], "description": lora["description"]}
    keys["preset"] |= {"anyOf": [{"enum": list(presets())}, {"type": "null"}]}
    own = {"lora": lora, "adapter": keys["adapter"]}
    for group, names in PER_ADAPTER.items():
        properties = groups[f"{group.title()}Config"]["properties"]
        own[group] = _group({key: value for key, value in properties.items() if key in names})
    keys["adapters"] = {
        "type": "object",
        "additionalProperties": _group(own),
        "description": "Several adapters in one run: name -> keys of its own.",
    }
    # With adapters, what each must have may be its own.
    needs = {name: groups[f"{name.title()}Config"].pop("required") for name in PER_ADAPTER}
    of_one = {name: {"required": names} for name, names in needs.items()}
    whole |= {"required": ["model"], "if": {"not": {"required": ["adapters"]}}}
    whole["then"] = {"required": list(needs), "properties": of_one}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **whole, "title": "A run file of meshlora"}


def _group(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _describe(group: dict[str, Any], cls: type) -> None:
    """Put the sentences of the docstrings of `cls` to its keys."""
    names = [item.name for item in dataclasses.fields(cls)]
    for base in reversed(cls.__mro__):
        one, text = "|".join(names), " ".join((base.__doc__ or "").split())
        parts = re.split(rf"(?:^|(?<=[.;]) |Attributes: )((?:{one})(?:, (?:{one}))*): ", text)
        for listed, text in zip(parts[1::2], parts[2::2], strict=True):
            for name in listed.split(", "):
                group["properties"][name]["description"] = text[0].upper() + text[1:].rstrip(";.") + "."
    group["description"] = (cls.__doc__ or "").partition("\n")[0]
    for key in group["properties"].values():
        key.pop("title", None)


def text() -> str:
    """The file."""
    return json.dumps(schema(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    FILE.write_text(text(), "utf-8")

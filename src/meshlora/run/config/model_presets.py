"""Presets whose values depend on the model: learning rates by width, ranks of experts.

Owns: their rules, each with its source, and what they read of a model's config.json. Does not own: how values get into
a run file (`run.config.presets`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshlora_ground.errors import UserError
from meshlora_ground.files import read_json
from meshlora_ground.reading import no_such_folder

# Exponents of the width in `_regret_lr`, by the beginning of a model type.
_EXPONENTS = {"llama": 0.781, "qwen": 0.0775}
_WIDTHS = ("hidden_size", "n_embd", "d_model")
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts", "experts_per_token")
_EXPERTS = ("experts.gate_up_proj", "experts.down_proj")
# LLaMA 13B has 5,120 features, 33B 6,656.
_WIDTH_OF_13B = 5120


@dataclass(frozen=True)
class Facts:
    """What presets know of a model. num_chosen: experts of a token; 0: it has none."""

    model_type: str
    width: int
    num_chosen: int


def facts_of(folder: str | Path) -> Facts:
    """Read them of a model's config.json, or its text part. Raises: UserError: it is missing, or has no width."""
    if not Path(folder).is_dir():
        raise no_such_folder(folder)
    config = read_json(Path(folder) / "config.json")
    whole = config if isinstance(config, Mapping) else {}
    text = _group(whole, "text_config") or whole
    width = next((text[name] for name in _WIDTHS if isinstance(text.get(name), int)), 0)
    if width < 1:
        raise UserError(f"{folder}/config.json", "it has no hidden_size", "leave out the preset")
    return Facts(str(text.get("model_type") or whole.get("model_type") or ""), width, num_chosen(text))


def num_chosen(text: Mapping[str, Any]) -> int:
    """Experts of a token, by the configuration of a text model; 0: it names none."""
    return next((text[name] for name in _CHOSEN if isinstance(text.get(name), int)), 0)


def _without_regret(facts: Facts, own: Mapping[str, Any]) -> dict[str, Any]:
    """lora-without-regret: the rate, and experts with the rank divided by how many a token sees.

    As in the experiments of thinkingmachines.ai/blog/lora (2025) with mixtures of experts.
    """
    found: dict[str, Any] = {}
    if "lr" not in _group(own, "train"):
        found["train"] = {"lr": _regret_lr(facts)}
    rank = _group(own, "lora").get("r", 32)
    if facts.num_chosen and isinstance(rank, int):
        each = max(1, rank // facts.num_chosen)
        found["lora"] = {"target_parameters": [*_EXPERTS], "rank_pattern": dict.fromkeys(_EXPERTS, each)}
    return found


def has_known_rate(facts: Facts) -> bool:
    """Whether `lora-without-regret` has a learning rate for the model."""
    return facts.model_type.startswith(tuple(_EXPONENTS))


def _regret_lr(facts: Facts) -> float:
    """`get_lr` of tinker-cookbook/hyperparam_utils.py: ten times the rate of full training, by width and family.
    Raises: UserError: a family for which it was not calibrated."""
    family = next((name for name in _EXPONENTS if facts.model_type.startswith(name)), None)
    if family is None:
        rule = f"its learning rate is known for {' and '.join(_EXPONENTS)}, and this is {facts.model_type or 'another'}"
        raise UserError("preset: lora-without-regret", rule, "give train.lr; meshlora lr-find suggests one")
    return float(f"{5e-5 * 10 * (2000 / facts.width) ** _EXPONENTS[family]:.4g}")


def _qlora(facts: Facts, _: Mapping[str, Any]) -> dict[str, Any]:
    """qlora: rate and dropout by size (Dettmers et al., 2023, appendix B; the border is between 13B and 33B)."""
    is_small = facts.width <= _WIDTH_OF_13B
    return {"train": {"lr": 2e-4 if is_small else 1e-4}, "lora": {"lora_dropout": 0.1 if is_small else 0.05}}


def _group(tree: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = tree.get(name)
    return found if isinstance(found, Mapping) else {}


# Preset -> the values that depend on the model. The second argument is the run file's own tree.
OF_MODEL: Mapping[str, Callable[[Facts, Mapping[str, Any]], dict[str, Any]]] = {
    "lora-without-regret": _without_regret,
    "qlora": _qlora,
}

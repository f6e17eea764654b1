"""What serving engines make of an adapter: served as it is, converted, or not at all. One table, and who asks it.

Owns: `served`, which `publish`, `export`, `rl` and `check` ask before anything is written, and the table in
docs/merge-and-export.md. Does not own: the conversion (`meshlora_extra.engine_export`), names of single experts
(`wings.experts.per_expert`).

Read in vLLM's and SGLang's sources: both take `r` and `lora_alpha` of adapter_config.json for all of an adapter. vLLM
knows rsLoRA and passes over patterns; SGLang divides by r. Neither applies what is trained besides LoRA, but passes
over it, or refuses it on its own.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Literal

from peft import LoraConfig

from meshlora.adapter.plan import AdapterPlan
from meshlora.adapter.targets.resolve import Target
from meshlora.plan.rules import ModelPlan
from meshlora.wings.experts.per_expert import ENGINE_NAMES, FUSED, TEXT_CLASSES, engine_names, reads_fused_experts
from meshlora_ground.errors import UnsupportedError, UserError

Layout = Literal["peft", "per-expert"]
_MERGE = "merge it: meshlora merge"
# Options by which an engine computes the same: of training alone, of names, or converted to one rank and one scale.
_SERVED = frozenset(
    (
        *("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "lora_dropout", "init_lora_weights"),
        *("target_modules", "target_parameters", "exclude_modules", "layers_to_transform", "layers_pattern"),
        *("task_type", "base_model_name_or_path", "revision", "inference_mode", "peft_type", "peft_version"),
        *("fan_in_fan_out", "auto_mapping", "eva_config", "pieces", "share_experts"),
    )
)
# Option -> why not, in words that a user reads.
_NOT_SERVED = {
    "use_dora": "not every engine computes with it",
    "bias": "adapters for serving engines are LoRA and nothing more",
    "lora_bias": "adapters for serving engines are LoRA and nothing more",
    "modules_to_save": "adapters for serving engines are LoRA and nothing more",
    "trainable_token_indices": "engines take LoRA, and no rows of a vocabulary besides",
    "alora_invocation_tokens": "engines apply an adapter to all tokens",
    "layer_replication": "engines run the base's own layers",
    "vision": "engines apply an adapter to the language model alone",
}
# Of `init_lora_weights`: the factors fit the base that they are of.
_PLAIN_INITS = (True, False, "gaussian", "orthogonal", "eva")
# What there is -> (in vLLM, in SGLang): the rows of the table, which `served` and the conversion carry out.
_ROWS = {
    "LoRA on linears, embeddings and heads, one rank and scale": ("as it is", "as it is"),
    "rsLoRA; ranks that differ at one scale; targets as a pattern": ("converted", "converted"),
    "scales that differ": ("refused", "refused"),
    "experts, one pair of factors each": ("converted", "not known"),
    "experts in PEFT's fused form, both projections": ("as it is", "not known"),
    "one projection of fused experts alone": ("refused", "refused"),
    "experts of a text class whose composite has that form": ("refused", "refused"),
    "routers; a vocabulary of the base in the folder": ("refused", "refused"),
}


def check_options(config: LoraConfig, where: str) -> None:
    """Refuse an adapter that engines compute otherwise than it was trained, by its options.

    Raises:
        UnsupportedError: the option.
    """
    default = LoraConfig()
    for field in dataclasses.fields(config):
        name = field.name
        value = getattr(config, name)
        if name in _SERVED or not value or value == getattr(default, name, None):
            continue
        rule = _NOT_SERVED.get(name, "engines do not know this option")
        raise UnsupportedError(f"{where}: {name}={value!r}", rule, f"train without, or {_MERGE}")
    if config.init_lora_weights not in _PLAIN_INITS:
        given = f"{where}: init_lora_weights={config.init_lora_weights!r}"
        rule = "the factors are of a base from which a part was taken, and engines have the whole"
        raise UnsupportedError(given, rule, _MERGE)


def served(adapter: AdapterPlan, plan: ModelPlan, where: str) -> Layout:
    """The layout in which engines read `adapter`. where: it is, for messages.

    Raises:
        UserError: targets of several scales. UnsupportedError: what engines read in no layout, by name.
    """
    check_options(adapter.config, where)
    targets = adapter.targets
    for name in targets:
        if name in plan.routers:
            raise UnsupportedError(f"{where}: LoRA on the router {name}", "not every engine applies it", _MERGE)
    one_scaling(where, {name: target.scaling for name, target in targets.items()})
    if not any(target.num_experts for target in targets.values()):
        return "peft"
    if reads_fused_experts(plan.model_type):
        _check_fused(where, targets, plan)
        return "peft"
    engine_names(plan.model_type)  # refuses families that no engine reads so
    return "per-expert"


def _check_fused(where: str, targets: Mapping[str, Target], plan: ModelPlan) -> None:
    """Refuse an adapter on fused experts that engines would compute otherwise, or not at all."""
    for rule in plan.experts.values():
        there = [each for each in rule.projections if each.name in targets]
        if len(there) == 1:
            words = f"of the experts it is on {there[0].name} alone, and engines need both projections or none"
            raise UnsupportedError(where, words, f"train both, or {_MERGE}")
        for one in there:
            if one.is_swapped:
                words = f"the file has the A of {one.name} on the side of the output, where engines read its B"
                raise UnsupportedError(where, words, _MERGE)
    # On disk the pieces of a matrix are one adapter of the sum of their ranks.
    ranks = {name: target.r * max(1, len(target.pieces)) for name, target in targets.items()}
    first = next(iter(ranks))
    for name, r in ranks.items():
        if r != ranks[first]:
            words = f"{first} has rank {ranks[first]}, {name} {r}, and engines read one"
            raise UnsupportedError(where, words, f"train without rank_pattern and pieces, or {_MERGE}")


def one_scaling(where: str, scalings: Mapping[str, float]) -> float:
    """The common scale of `B A` of all targets, by name. Raises: UserError: two differ."""
    first = next(iter(scalings))
    for name, scaling in scalings.items():
        # With use_rslora the scale of pieces comes from a square root.
        if not math.isclose(scaling, scalings[first], rel_tol=1e-12):
            given = f"{where}: {first} is scaled by {scalings[first]:g}, {name} by {scaling:g}"
            rule = "engines know one lora_alpha and one r for all of an adapter"
            raise UserError(given, rule, f"train with the same lora_alpha / r everywhere, or {_MERGE}")
    return scalings[first]


def table() -> str:
    """The table of docs/merge-and-export.md."""
    lines = ["| adapter | vLLM | SGLang |", "|---|---|---|"]
    for what, (vllm, sglang) in _ROWS.items():
        lines.append(f"| {what} | {vllm} | {sglang} |")
    for name, why in _NOT_SERVED.items():
        lines.append(f"| `{name}` | refused: {why} | refused |")
    plain = _listed(str(init).lower() for init in _PLAIN_INITS)
    lines.append(f"| `init_lora_weights` but {plain} | refused: the factors are of a changed base | refused |")
    fused, single = _listed(sorted(FUSED)), _listed(sorted(ENGINE_NAMES))
    return "\n".join([*lines, "", f"PEFT's fused form: {fused}, not {_listed(TEXT_CLASSES)}. One pair each: {single}."])


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)

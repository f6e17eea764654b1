"""Whether an adapter's tensors and its configuration belong together, as far as the folder alone tells.

Owns: what is missing, what is there twice, what PEFT would drop by its name, and ranks and scales.
Does not own: what only the base model tells (`adapter_files.on_model`), values (`adapter_files.values`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import math
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

from meshlora_ground.errors import UserError
from meshlora_ground.limits import OutOfTimeError, time_limit
from meshlora_judge.adapter_files.finding import Finding, found
from meshlora_judge.adapter_files.names import Part
from meshlora_judge.adapter_files.reading import Adapter
from meshlora_judge.experts import ROWS

_AGAIN = "save the adapter again with save_pretrained of the unwrapped PeftModel"
_LONGEST_S = 1.0
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.)")


def is_of_experts(config: Mapping[str, Any], module: str) -> bool:
    """Whether factors of `module` are those of a stack of experts, by its name or by target_parameters."""
    name = module
    while name.endswith(".base_layer"):
        name = name.removesuffix(".base_layer")
    owners = [target.rpartition(".")[0] for target in config.get("target_parameters") or ()]
    is_named = any(owner and f".{name}".endswith(f".{owner}") for owner in owners)
    return is_named or name.endswith((".experts", ".experts.gate_up_proj", ".experts.down_proj"))


def ranks_of(config: Mapping[str, Any], module: str) -> list[int]:
    """The ranks that `module` may have: one, and several for a stack whose parameter the name does not tell."""
    rank, pattern = config.get("r"), config.get("rank_pattern") or {}
    if not isinstance(rank, int) or rank < 1:
        return []
    if is_of_experts(config, module):
        # The name of a stack does not say which of its parameters it is: each rank of a pattern may be meant.
        others = [int(each) for each in pattern.values() if each >= 1]
        return list(dict.fromkeys([rank, *others]))
    return [int(_of_pattern(pattern, module, rank))]


def _of_pattern(pattern: Mapping[str, float], module: str, default: float) -> float:
    """The value of the first pattern that matches, as PEFT matches them. Raises: UserError: it takes too long."""
    if not pattern:
        return default
    try:
        with time_limit(_LONGEST_S):
            for key, value in pattern.items():
                with contextlib.suppress(re.error):
                    if re.match(rf"(.*\.)?({key})$", module):
                        return value
    except OutOfTimeError:
        rule = "matching one of them takes too long"
        raise UserError("rank_pattern or alpha_pattern", rule, "write patterns without nested repeats") from None
    return default


def scale_of(config: Mapping[str, Any], module: str) -> float | None:
    """What PEFT multiplies B A with; None where the configuration does not tell."""
    alpha = config.get("lora_alpha")
    ranks = ranks_of(config, module)
    if not isinstance(alpha, int | float) or not ranks:
        return None
    alpha = _of_pattern(config.get("alpha_pattern") or {}, module, alpha)
    if config.get("use_rslora"):
        return float(alpha / math.sqrt(ranks[0]))
    return float(alpha / ranks[0])


def of_names(adapter: Adapter) -> list[Finding]:
    """Names that PEFT would drop, tensors there twice, several adapters in one file."""
    names = adapter.names
    result = []
    own = Counter(part.adapter for part in names.parts if part.adapter)
    if len(own) > 1:
        words = f"it holds {len(own)} adapters"
        result += found("several adapters", words, sorted(own), "save each into a folder of its own")
    if names.is_peft and adapter.config:
        flaws: dict[str, list[str]] = {}
        for part in names.parts:
            is_said = len(own) > 1 and part.flaw.startswith("the adapter's name")
            is_right = not adapter.is_lora and part.flaw.startswith("no .weight")  # AdaLoRA's are bare
            if part.flaw and not is_said and not is_right:
                flaws.setdefault(part.flaw, []).append(part.key)
        for flaw, keys in flaws.items():
            what = f"PEFT would drop these tensors silently: their names have {flaw}"
            result += found("dropped", what, keys, _AGAIN)
    by_name: dict[tuple[str, str], list[Part]] = {}
    for part in names.parts:
        # One adapter alone may have its name in some keys only: these are the same tensors twice.
        of = part.adapter if len(own) > 1 else ""
        by_name.setdefault((part.name, of), []).append(part)
    same, other = list[str](), list[str]()
    for parts in by_name.values():
        for part in parts[1:]:
            one, two = adapter.read(parts[0].key), adapter.read(part.key)
            if one.shape == two.shape and torch.equal(one, two):
                same.append(part.key)
            else:
                other.append(part.key)
    result += found("twice", "tensors are there twice, under two names", same, _AGAIN)
    what = "one tensor is there under two names with different values: replicas that drifted, or shards"
    return result + found("drifted", what, other, _AGAIN)


def of_config(adapter: Adapter) -> list[Finding]:
    """What the configuration of a LoRA says is there and is not, or the other way round."""
    config, parts = adapter.config, adapter.names.parts
    if not config:
        return []
    result = []
    saved = config.get("modules_to_save") or []
    # PEFT adds classifier and score for tasks of classification, of which a model has one.
    if saved and not any(f".{name}." in f".{part.module}." for name in saved for part in parts if not part.side):
        result += found("missing", "no module of modules_to_save is in the file", saved, _AGAIN)
    if config.get("trainable_token_indices") and not any(ROWS in part.key for part in parts):
        name = "trainable_token_indices"
        result += found("missing", "no rows of trained tokens are in the file", [name], _AGAIN)
    by_module = adapter.names.by_module()
    magnitudes = [module for module, sides in by_module.items() if "magnitude" in sides]
    without = [module for module, sides in by_module.items() if "magnitude" not in sides]
    if config.get("use_dora"):
        result += found("missing", "DoRA's magnitudes are missing, which use_dora needs", without, _AGAIN)
    else:
        way_out = "set use_dora: true"
        result += found("missing", "magnitudes of DoRA, which the configuration does not have", magnitudes, way_out)
    if config.get("lora_bias") and by_module and not any("bias" in sides for sides in by_module.values()):
        result += found("missing", "biases of B are missing, which lora_bias needs", by_module, _AGAIN)
    return result


def of_fields(config: Mapping[str, Any]) -> list[Finding]:
    """Fields, or a method, that the installed peft does not have."""
    from peft import PEFT_TYPE_TO_CONFIG_MAPPING

    kind = PEFT_TYPE_TO_CONFIG_MAPPING.get(str(config.get("peft_type", "LORA")).upper())
    if kind is None:
        return found("unknown type", "the installed peft has no such peft_type", [f"{config.get('peft_type')}"])
    known = {each.name for each in dataclasses.fields(kind)} | {"peft_type", "task_type", "auto_mapping"}
    slips, others = [], []
    for name in sorted(config.keys() - known):
        near = difflib.get_close_matches(name[:100], known - config.keys(), n=1, cutoff=0.8)
        if near:
            slips.append(f"{name} for {near[0]}")
        elif config[name]:
            others.append(name)
    result = found("unknown field", "fields that PEFT ignores, near to names that it knows", slips, "correct the name")
    what = "fields that the installed peft does not know and ignores"
    return result + found("unknown field", what, others, "a newer peft may compute otherwise", is_note=True)


def of_pairs(adapter: Adapter, shapes: Mapping[str, tuple[int, ...]]) -> list[Finding]:
    """Factors without the other, empty or flat ones, ranks that are not those of the configuration."""
    alone, flat, turned, ranks, apart = [], [], [], [], []
    for module, sides in adapter.names.by_module().items():
        a, b = sides.get("A") or sides.get("embedding_A"), sides.get("B") or sides.get("embedding_B")
        if a is None or b is None:
            alone += [part.name for part in sides.values()]
            continue
        shape_a, shape_b = shapes[a.key], shapes[b.key]
        if min(len(shape_a), len(shape_b)) < 2 or 0 in (*shape_a, *shape_b):
            flat.append(f"{module} {list(shape_a)}, {list(shape_b)}")
            continue
        is_stack = is_of_experts(adapter.config, module)
        # Written so by others; PEFT's own stacks have two dims.
        if is_stack and len(shape_a) == 3:  # [E, r, in] and [E, out, r]
            shape_a, shape_b = shape_a[1:], (shape_b[1], shape_b[-1])
        wanted = ranks_of(adapter.config, module)
        words = f"{module} A {list(shape_a)}, B {list(shape_b)}"
        fits = [shape_a[0] % r == 0 if is_stack else shape_a[0] == r for r in wanted]
        is_turned_a = bool(wanted) and not any(fits) and shape_a[1] in wanted
        is_turned_b = shape_b[1] != shape_a[0] and shape_b[0] in (shape_a[0], *wanted)
        if is_turned_a or is_turned_b:
            turned.append(words)
        elif wanted and not any(fits):
            ranks.append(f"{module}: {shape_a[0]} in the file, {wanted[0]} in the configuration")
        elif shape_a[0] != shape_b[1] and (adapter.names.is_peft or shape_a[0] % shape_b[1]):
            apart.append(words)
    way_out = "their ranks do not fit the scale lora_alpha / r: correct r or rank_pattern, or save again"
    return [
        *found("alone", "one factor without the other", alone, _AGAIN),
        *found("flat", "factors are empty or have one dim: shards of ZeRO-3 or FSDP, not gathered", flat, _AGAIN),
        *found("transposed", "a factor is transposed: PEFT has A as [r, in] and B as [out, r]", turned, "transpose it"),
        *found("rank", "ranks are not those of the configuration", ranks, way_out),
        *found("rank", "A and B have different ranks: one of them is a shard", apart, _AGAIN),
    ]


def of_scale(adapter: Adapter) -> list[Finding]:
    """A scale that switches the adapter off, or an invalid one."""
    config = adapter.config
    if not config or not adapter.is_lora:
        return []
    rank = config.get("r")
    if isinstance(rank, int) and rank < 1:
        return found("rank", f"r is {rank}", [f"r={rank}"], "give the rank of the factors")
    off = [module for module in adapter.names.by_module() if scale_of(config, module) == 0]
    what = "lora_alpha is 0: PEFT multiplies these factors by zero"
    return found("scale", what, off, "give the alpha of the training")


def of_layers(adapter: Adapter) -> list[Finding]:
    """Modules that others of their kind have, and experts and layers left out, where targets are the same for all."""
    config = adapter.config
    targets = config.get("target_modules")
    modules = adapter.names.by_module()
    named = targets if isinstance(targets, list) else []
    unused = [name for name in named if not any(f".{module}".endswith(f".{name}") for module in modules)]
    what = "targets of the configuration have no factor"
    result = found("incomplete", what, unused, "--model tells whether the model has them", is_note=True)
    leaves: dict[str, set[str]] = {}
    for module in modules:
        parent, _, leaf = module.rpartition(".")
        leaves.setdefault(parent, set()).add(leaf)
    is_chosen = isinstance(targets, str) and targets != "all-linear"
    is_chosen |= any(re.search(r"\.\d+\.", f".{name}.") for name in targets or ())
    is_chosen |= bool(config.get("exclude_modules"))
    if is_chosen:
        return result
    # Parents of one kind have the same path but for numbers, and share a leaf: a hybrid's mixers may be of several.
    kinds: dict[str, list[str]] = {}
    for parent in leaves:
        kinds.setdefault(_NUMBER.sub("*", parent), []).append(parent)
    missing, unclear, experts = list[str](), list[str](), list[str]()
    for kind, parents in kinds.items():
        for leaf in set[str]().union(*map(leaves.__getitem__, parents)):
            lacking = _lacking(leaf, parents, leaves)
            # gemma3n and gemma4 have layers that take keys, values or both from another.
            is_shared = leaf in ("k_proj", "v_proj")
            if 2 * len(lacking) < len(parents) and not is_shared:
                missing += lacking
            else:
                unclear += lacking
        if kind.endswith(".experts.*"):
            experts += _gaps(parents)
    what = "modules have no factors, which those of other layers have"
    way_out = "parts were not saved: gather over pipeline and expert ranks before saving"
    result += found("incomplete", what, sorted(missing), way_out)
    result += found("experts missing", "experts have no factors, which other layers have", experts, way_out)
    return result + found("incomplete", what, sorted(unclear), "--model tells whether the model has them", is_note=True)


def _lacking(leaf: str, parents: list[str], leaves: Mapping[str, set[str]]) -> list[str]:
    """`leaf` under each parent that lacks it, though it has another leaf of those that have it."""
    beside = set[str]().union(*(leaves[parent] for parent in parents if leaf in leaves[parent]))
    return [f"{parent}.{leaf}" for parent in parents if leaf not in leaves[parent] and leaves[parent] & beside]


def _gaps(parents: list[str]) -> list[str]:
    """Experts that a layer lacks, of the numbers that any layer has."""
    numbers: dict[str, set[int]] = {}
    for parent in parents:
        owner, _, number = parent.rpartition(".")
        if len(number) < 7:
            numbers.setdefault(owner, set()).add(int(number))
    most = max(set[int]().union(*numbers.values()), default=-1)
    lacking = []
    for owner, own in sorted(numbers.items()):
        if gone := sorted(set(range(most + 1)) - own):
            lacking.append(f"{owner}: {len(gone)} of {most + 1}, first {gone[0]}")
    return lacking

"""Which topologies a proof runs on, with their plans, and which adapter it trains there.

Owns: what "auto" means; what the default adapter is on; one that a file asks for; the targets of an adapter on experts
by their full names. Does not own: the other rules of a request (`verify.request`).
"""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from transformers import PretrainedConfig

from meshlora.adapter.expert_targets import with_whole_projections
from meshlora.adapter.many import check_many
from meshlora.adapter.targets import resolve_targets
from meshlora.api import build_meta
from meshlora.errors import UserError
from meshlora.plan.rules import ModelPlan
from meshlora.plan.topology import Topology, divisors
from meshlora.reading import parse_yaml, read_text
from meshlora.train.recompute import check_recompute

# Linears of families with experts that the default adapter is not on: one process gives them no gradient, as what they
# compute only chooses; and those of state-space mixers that PEFT refuses.
_LEFT_OUT = re.compile(r"\.indexer\.|^jamba\..*\.dt_proj$|^nemotron_h\..*\.out_proj$")


def plans_and_adapter(
    config: PretrainedConfig,
    given: Collection[Topology],
    lora: LoraConfig,
    *,
    dtype: str,
    is_default: bool,
    default_dropout: float,
    recomputes: bool,
    processes: int | None,
    trust_remote_code: bool,
    attn_implementation: str | None = "eager",
    quantization: str | None = None,
    several: bool = False,
) -> tuple[dict[Topology, ModelPlan], LoraConfig]:
    """Topology -> plan; and the adapter.

    given: topologies that were asked for by name; one that is refused is an error. processes: also every topology that
    the model allows on so many. is_default: nobody chose the adapter; of a model with experts it is on them too, and
    else it has `default_dropout`: PEFT has none for experts. recomputes: refuse layers that cannot be computed twice.
    several: and what several adapters at once cannot have.
    """
    final = lora

    def plan(topology: Topology) -> ModelPlan:
        nonlocal final
        model, plan = build_meta(
            config,
            topology,
            dtype=getattr(torch, dtype),
            attn_implementation=attn_implementation,
            disable_dropout="unsupported",
            trust_remote_code=trust_remote_code,
            quantization=quantization,
        )
        check_recompute(model, "full" if recomputes else "none")
        wanted = dataclasses.replace(lora, lora_dropout=default_dropout) if is_default and default_dropout else lora
        if is_default and plan.projections:
            left_out = [name for name in plan.linears if _LEFT_OUT.search(f"{plan.model_type}.{name}")]
            wanted = dataclasses.replace(
                lora, target_parameters=list(plan.projections), exclude_modules=left_out or None
            )
        targets = resolve_targets(model, plan, wanted)
        if several:
            check_many("adapter-1", wanted, targets, plan)
        final = _in_full(wanted, targets, plan)
        return plan

    plans = {topology: plan(topology) for topology in given}
    if processes is None:
        return plans, final
    has_experts = bool(plan(Topology()).experts)  # what is refused everywhere is refused with its reason
    for topology in every_topology(processes, has_experts=has_experts):
        try:
            plans.setdefault(topology, plan(topology))
        except UserError:
            continue
    return plans, final


def every_topology(processes: int, *, has_experts: bool = False) -> list[Topology]:
    """All with more than one process, whose number divides `processes`; small ones first.

    has_experts: each of them also with experts split over ep, over etp and over both, by the smallest number that there
    is; more ranks on these axes show nothing that two do not.
    """
    found = []
    for world in divisors(processes)[1:]:
        parts = divisors(world)[1]
        splits = [(1, 1, False)]
        if has_experts:
            splits += [(parts, 1, False), (1, parts, False)]
            splits += [(parts, parts, way) for way in (False, True) if world % parts**2 == 0]
        found += [
            Topology(dp=world // tp, tp=tp, sp=sp, ep=ep, etp=etp, two_stage=two_stage)
            for tp in divisors(world)
            for sp in (False, True)
            if tp > 1 or not sp
            for ep, etp, two_stage in splits
        ]
    return found or [Topology()]


def _in_full(lora: LoraConfig, targets: Collection[str], plan: ModelPlan) -> LoraConfig:
    """An adapter on parameters with all of its targets by their full names, which PEFT takes as they are."""
    if not lora.target_parameters:
        return lora
    found = copy.copy(with_whole_projections(lora, plan))
    ends = list(found.target_parameters or ())
    weights = [
        name for name in targets if any(f"{name}.weight" == end or f"{name}.weight".endswith(f".{end}") for end in ends)
    ]
    experts = [name for name in targets if name in plan.projections]
    found.target_parameters = experts + [f"{name}.weight" for name in weights]
    found.target_modules = [name for name in targets if name not in {*experts, *weights}]
    return found


def read_lora(path: str | Path) -> dict[str, Any]:
    """Fields of `peft.LoraConfig` from a YAML file, alone or under the key `lora`, as in a run file.

    Raises:
        UserError: not readable, not a mapping.
    """
    try:
        values = parse_yaml(read_text(Path(path)))
    except FileNotFoundError:
        raise UserError(f"--lora {path}", "there is no such file") from None
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"--lora {path}", f"it is not readable YAML ({why})") from None
    if isinstance(values, dict) and isinstance(values.get("lora"), dict):
        values = values["lora"]
    if not isinstance(values, dict):
        raise UserError(f"--lora {path}", "it must hold fields of peft.LoraConfig, as in r: 16")
    return values

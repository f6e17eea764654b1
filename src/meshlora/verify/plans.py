"""Which topologies "auto" means, and which adapter a proof trains there.

Owns: what the default adapter is on; the targets of an adapter on experts by their full names. Does not own: the other
rules of a request (`verify.request`).
"""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Collection

from peft import LoraConfig

from meshlora.adapter.targets.expert_targets import with_whole_projections
from meshlora.plan.rules import ModelPlan
from meshlora.plan.topology import Topology, divisors

# Linears of families with experts that the default adapter is not on: one process gives them no gradient, as what they
# compute only chooses; and those of state-space mixers that PEFT refuses.
_LEFT_OUT = re.compile(r"\.indexer\.|^jamba\..*\.dt_proj$|^nemotron_h\..*\.out_proj$")


def default_adapter(lora: LoraConfig, plan: ModelPlan, *, dropout: float) -> LoraConfig:
    """`lora`, which nobody chose: of a model with experts it is on them too, and else it has dropout: PEFT has none for
    experts.
    """
    if not plan.projections:
        return dataclasses.replace(lora, lora_dropout=dropout)
    left_out = [name for name in plan.linears if _LEFT_OUT.search(f"{plan.model_type}.{name}")]
    return dataclasses.replace(lora, target_parameters=list(plan.projections), exclude_modules=left_out or None)


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


def in_full(lora: LoraConfig, targets: Collection[str], plan: ModelPlan) -> LoraConfig:
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

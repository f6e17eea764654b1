"""The collective budget: how many collectives a plan costs, by arithmetic alone.

Owns: the numbers that `docs/parallelism.md` derives. Does not own: counting what a run really does (`oracle.capture`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from meshlora.plan.grads import FactorRule
from meshlora.plan.rules import ModelPlan, Split


def micro_batch_budget(plan: ModelPlan) -> Counter[tuple[str, str]]:
    """(phase, kind) -> the most calls in the forward and the backward of one micro-batch.

    A split region costs one collective where it is entered, and each of its row-parallel linears one, in either
    direction; a whole region under sp one gather. Under sp the residual stream is cut once and joined once.
    """
    entered = sum(region.is_split for region in plan.regions)
    left = sum(rule.split is Split.ROW for rule in plan.linears.values())
    whole = len(plan.regions) - entered
    if plan.topology.tp == 1:
        return Counter()
    if not plan.topology.sp:
        return Counter({("forward", "allreduce"): left, ("backward", "allreduce"): entered})
    return Counter(
        {
            ("forward", "allgather"): entered + whole + 1,
            ("forward", "reducescatter"): left,
            ("backward", "allgather"): left + whole + 1,
            ("backward", "reducescatter"): entered,
        }
    )


def step_budget(plan: ModelPlan, factors: Iterable[FactorRule]) -> Counter[tuple[str, str]]:
    """Of one optimizer step besides: a bucket for each set of gradient axes that spans ranks, and the token count."""
    sizes = plan.topology.sizes
    axes = {(rule.grad_axes, rule.mean_axes) for rule in factors}
    buckets = [pair for pair in axes if any(sizes[axis] > 1 for axis in pair[0] | pair[1])]
    return Counter({("step", "allreduce"): len(buckets) + (plan.topology.dp > 1)})

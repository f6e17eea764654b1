"""The collective budget: how many collectives a plan costs, by arithmetic alone.

Owns: the numbers that `docs/parallelism.md` derives. Does not own: counting what a run really does (`oracle.capture`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from meshlora.plan.grads import FactorRule
from meshlora.plan.layout import Split
from meshlora.plan.rules import ModelPlan
from meshlora.plan.topology import DATA

# Of a model's forwards with gradients, and of those without: how many compare the tokens of tp ranks.
COMPARED_FORWARDS = 2


def micro_batch_budget(plan: ModelPlan, *, scaled_rows: int = 0, recomputes: bool = False) -> Counter[tuple[str, str]]:
    """(phase, kind) -> the most calls in the forward, the loss and the backward of one micro-batch.

    A split region costs one collective where it is entered, and each of its row-parallel linears one, in either
    direction; a whole region under sp one gather. The embedding is summed once. The residual stream is cut once under
    sp; what follows the last layer is entered as a region is, and left by the loss: one gather a chunk of tokens, here
    one chunk. A norm over a split width takes a small sum in either direction. Experts: see `_of_experts`. Under
    dp_shard each decoder layer is gathered over dp once in either direction.

    scaled_rows: row-parallel linears with DoRA, each of which needs the norms of its rows.
    recomputes: the backward runs the layers' forward once more: all but the sum of the embedding and what follows the
    last layer.
    """
    units = len(plan.units)
    if recomputes:
        once = micro_batch_budget(plan, scaled_rows=scaled_rows)
        is_split = not plan.topology.is_whole
        # The backward gathers a layer that dp_shard shards in any case.
        outside = Counter({"allreduce": int(is_split), "allgather": units + int(is_split and plan.topology.sp)})
        forward = Counter({kind: number for (phase, kind), number in once.items() if phase == "forward"}) - outside
        return once + Counter({("backward", kind): number for kind, number in forward.items()})
    budget = _of_experts(plan) + Counter({("forward", "allgather"): units, ("backward", "allgather"): units})
    entered = sum(region.is_split for region in plan.regions)
    whole = len(plan.regions) - entered
    left = sum(rule.split is Split.ROW for rule in plan.linears.values())
    norms = len(plan.wide_norms)
    if plan.topology.is_whole:
        return budget
    if not plan.topology.sp:
        return budget + Counter(
            {
                ("forward", "allreduce"): 1 + left + norms + scaled_rows,
                ("loss", "allgather"): 1,
                ("backward", "allreduce"): entered + norms + 1,
            }
        )
    return budget + Counter(
        {
            ("forward", "allreduce"): 1 + norms + scaled_rows,
            ("forward", "allgather"): entered + whole + 1,
            ("forward", "reducescatter"): left,
            ("loss", "allgather"): 1,
            ("backward", "allreduce"): norms,
            ("backward", "allgather"): left + whole + 1,
            ("backward", "reducescatter"): entered + 1,
        }
    )


def _of_experts(plan: ModelPlan) -> Counter[tuple[str, str]]:
    """Of all layers' experts, with or without LoRA on them: rows go there and come back, in either direction.

    The forward tells besides how many. On two stages each way has a gather or a reduce-scatter more; without sp each
    direction has a gather over tp, as every tp rank sends its share of the tokens.
    """
    topology, layers = plan.topology, len(plan.experts)
    is_apart = topology.ep * topology.etp > 1
    shares = topology.tp > 1 and not topology.sp
    two = topology.two_stage
    sends = is_apart and (topology.ep > 1 or not two)
    found = Counter(
        {
            ("forward", "alltoall"): 2 * layers * sends,
            ("forward", "allgather"): layers * (is_apart + two + shares),
            ("forward", "reducescatter"): layers * two,
            ("backward", "alltoall"): 2 * layers * sends,
            ("backward", "allgather"): layers * (two + shares),
            ("backward", "reducescatter"): layers * two,
        }
    )
    return +found


def first_forwards_budget(plan: ModelPlan, num_forwards: int) -> Counter[tuple[str, str]]:
    """Of the first forwards of a loaded model besides: what compares their tokens over tp."""
    compared = 0 if plan.topology.is_whole else min(num_forwards, COMPARED_FORWARDS)
    return Counter({("forward", "allgather"): compared})


def step_budget(plan: ModelPlan, factors: Iterable[FactorRule]) -> Counter[tuple[str, str]]:
    """Of one optimizer step besides: a bucket for each set of gradient axes that spans ranks, and the token count."""
    segments = [segment for rule in factors for segment in rule.segments(rank=0, size=plan.topology.tp)]
    buckets = {(s.grad_axes, s.mean_axes) for s in segments if plan.topology.size_over(s.grad_axes | s.mean_axes) > 1}
    return Counter({("step", "allreduce"): len(buckets) + (plan.topology.size_over(DATA) > 1)})

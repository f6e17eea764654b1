"""Experts on a mesh against the model's own experts in one process: outputs, every gradient, collectives, bits."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from meshlora.plan.grads import Side, expert_rule
from meshlora_ground.float64 import lift
from meshlora_ground.topology import EXPERT_AXES, Topology
from meshlora_judge.capture import CollectiveCounter
from tests.for_each import for_each
from tests.pool import Pool
from tests.ranks.expert_cases import (
    ALWAYS,
    NEVER,
    ORDER,
    Case,
    Result,
    block_of,
    close,
    load,
    mesh_of,
    of_rank,
    own_batch,
    reference,
    run,
    whole_factors,
)

TOPOLOGIES = [
    "dp=4,ep=2",
    "dp=4,ep=4",
    "dp=4,etp=2",
    "dp=4,ep=2,etp=2",
    "dp=4,ep=2,etp=2,two-stage",
    "dp=2,tp=2",
    "dp=2,tp=2,ep=2,etp=2",
    "tp=4,ep=2,etp=2,two-stage",
    "dp=2,tp=2,sp,ep=2,etp=2",
]


# Of these, by default: both axes, on ranks of dp, of tp and with sp, and the way in two stages.
OFTEN = ("dp=4,ep=2,etp=2", "dp=4,ep=2,etp=2,two-stage", "dp=2,tp=2,ep=2,etp=2", "dp=2,tp=2,sp,ep=2,etp=2")


def _rest(values: Iterable[str], often: Collection[str]) -> list[Any]:
    """Values of a parameter, of which those that are not in `often` are for `make proof`."""
    return [value if value in often else pytest.param(value, marks=pytest.mark.proof) for value in values]


def _check(case: Case, pools: Callable[[int], Pool]) -> list[Result]:
    topology = Topology.parse(case.topology)
    results = pools(topology.world).run(run, case, timeout_s=60)
    with lift(True):
        references, factors = reference(replace(case, topology=""), topology.dp)
    for rank, result in enumerate(results):
        expected = references[rank // topology.tp]
        if topology.sp:
            first = -(-len(expected.out) // topology.tp)
            rows = slice(first) if rank % topology.tp == 0 else slice(first, None)
            weights = None if expected.weights is None else expected.weights[rows]
            expected = Result(expected.out[rows], expected.hidden[rows], weights, {})
        close(result.out, expected.out)
        close(result.hidden, expected.hidden)
        if expected.weights is not None:
            close(result.weights, expected.weights)
        assert result.frozen is not None
        assert not any(result.frozen.values()), result.frozen
    whole = whole_factors(case, results)
    assert whole.keys() == factors.keys()
    for key, gradient in whole.items():
        close(gradient, factors[key])
    if references[0].router is not None:
        counted = [r.router for rank, r in enumerate(results) if topology.sp or rank % topology.tp == 0]
        close(torch.stack([g for g in counted if g is not None]).sum(0), references[0].router)
    return results


# On all topologies the first family; the others, which have no axis of their own, on those of `OFTEN`.
@pytest.mark.parametrize(
    ("family", "topology", "tokens"),
    [
        pytest.param(family, topology, tokens, marks=[] if is_first or topology in OFTEN[2:] else pytest.mark.proof)
        for family, topology in itertools.product(ORDER, TOPOLOGIES)
        for tokens, is_first in (("ranks differ", family == "qwen3_moe"), ("one expert gets all, one none", False))
    ],
)
def test_outputs_and_gradients_are_those_of_one_process(
    family: str, topology: str, tokens: str, pools: Callable[[int], Pool]
) -> None:
    _check(Case(family, topology, tokens), pools)


@for_each("tokens", ["one rank has none", "one rank alone has some", "one token", "nobody has any"])
@pytest.mark.parametrize("topology", _rest(TOPOLOGIES, OFTEN))
def test_ranks_without_tokens_take_part_all_the_same(topology: str, tokens: str, pools: Callable[[int], Pool]) -> None:
    """None waits for ever, and its gradients are there."""
    for result in _check(Case("gpt_oss", topology, tokens), pools):
        assert all(gradient is not None for gradient in result.factors.values())


@pytest.mark.parametrize("tokens", ["one rank has none", "one token"])
@pytest.mark.parametrize("topology", ["dp=4,ep=2,etp=2", "dp=2,tp=2,ep=4", "tp=4,ep=2"])
def test_block_that_scales_tokens_first_takes_any_number_of_them(
    topology: str, tokens: str, pools: Callable[[int], Pool]
) -> None:
    _check(Case("llama4_text", topology, tokens), pools)


@for_each("is_shared", [False, True], ids=["each", "shared"])
@pytest.mark.parametrize("topology", _rest(["dp=4,etp=4", "dp=2,tp=2,ep=2,etp=2", "dp=4,ep=4"], OFTEN))
@for_each("adapter", ["first alone", "second alone", "gate", "up", "gate, up, second", "both", "none"])
@for_each("family", ["qwen3_moe", "gpt_oss"])
def test_adapter_on_any_part_for_each_expert_or_for_all(
    family: str, adapter: str, topology: str, is_shared: bool, pools: Callable[[int], Pool]
) -> None:
    if adapter != "none" or not is_shared:
        _check(Case(family, topology, adapter=adapter, is_shared=is_shared), pools)


@pytest.mark.parametrize("family", ORDER)
def test_expert_without_tokens_has_gradients_of_exact_zeros(family: str, pools: Callable[[int], Pool]) -> None:
    case = Case(family, "dp=4,ep=2,etp=2", "one expert gets all, one none")
    whole = whole_factors(case, pools(4).run(run, case))
    for gradient in whole.values():
        zeros = [expert for expert, of_one in enumerate(gradient) if not of_one.any()]
        assert NEVER in zeros
        assert ALWAYS not in zeros


@pytest.mark.parametrize("tokens", ["ranks differ", "one token"])
@pytest.mark.parametrize("topology", ["dp=2,tp=2,ep=2,etp=2", "tp=4,ep=2", "dp=2,tp=2"])
def test_ranks_of_one_tensor_parallel_group_hold_the_same_bits(
    topology: str, tokens: str, pools: Callable[[int], Pool]
) -> None:
    results = pools(4).run(run, Case("qwen3_moe", topology, tokens))
    for group in Topology.parse(topology).groups_over(frozenset({"tp"})):
        first = results[group[0]]
        for rank in group[1:]:
            assert torch.equal(results[rank].out, first.out)
            assert torch.equal(results[rank].hidden, first.hidden)
            assert first.weights is not None
            assert results[rank].weights is not None
            assert torch.equal(results[rank].weights, first.weights)


# --- gradient axes ----------------------------------------------------------------------------------------------------


def _is_whole(case: Case, results: list[Result], key: str, axes: frozenset[str], whole: Tensor) -> bool:
    """Whether summing the gradients over `axes` gives every rank its part of the whole one."""
    groups = Topology.parse(case.topology).groups_over(axes) if axes else [[rank] for rank in range(len(results))]
    for ranks in groups:
        total = sum(results[rank].factors[key] for rank in ranks)
        assert isinstance(total, Tensor)
        expected = whole[of_rank(key, case, ranks[0])]
        if (total - expected).norm() > 1e-13 * expected.norm():
            return False
    return True


@for_each("is_shared", [False, True], ids=["each", "shared"])
@for_each("topology", ["dp=4,ep=2", "dp=4,etp=2", "dp=4,ep=2,etp=2", "dp=4,ep=4", "dp=2,tp=2"])
def test_gradients_are_whole_after_a_sum_over_their_axes_and_over_no_others(
    topology: str, is_shared: bool, pools: Callable[[int], Pool]
) -> None:
    case = Case("qwen3_moe", topology, is_shared=is_shared)
    results, shape = pools(4).run(run, case), Topology.parse(topology)
    _, rule = block_of(case.family)
    for key, gradient in whole_factors(case, results).items():
        which, _, side = key.partition(".")
        projection = rule.first if which == "first" else rule.second
        axes = expert_rule(projection, Side(side), is_shared=is_shared).grad_axes
        large = {axis for axis in EXPERT_AXES if shape.expert_sizes[axis] > 1}
        assert _is_whole(case, results, key, axes, gradient)
        for number in range(len(large) + 1):
            for others in itertools.combinations(sorted(large), number):
                if set(others) != axes & large:
                    assert not _is_whole(case, results, key, frozenset(others), gradient), (key, others)


# --- collectives ------------------------------------------------------------------------------------------------------

_FLAT = {"alltoall": 2}
_STAGED = {"alltoall": 2, "allgather": 1, "reducescatter": 1}
_CUT = {"alltoall": 2, "allgather": 1}  # of tokens that all tp ranks have
COSTS: dict[str, dict[str, int]] = {  # each way, but for the counts
    "dp=4,ep=2": _FLAT,
    "dp=4,etp=2": _FLAT,
    "dp=4,ep=2,etp=2": _FLAT,
    "dp=4,ep=2,etp=2,two-stage": _STAGED,
    "dp=2,tp=2": {"allgather": 1},
    "dp=2,tp=2,ep=2,etp=2": _CUT,
    "dp=2,tp=2,ep=2,etp=2,two-stage": _STAGED | {"allgather": 2},
    "dp=2,tp=2,sp,ep=2,etp=2": _FLAT,
}


def _count(case: Case, is_first_layer: bool) -> tuple[dict[tuple[str, str], int], dict[str, Tensor | None]]:
    """(collectives, gradients of the factors); of a first layer, whose input needs no gradient, or of a later one."""
    mesh = mesh_of(case.topology)
    _, experts, trained = load(case, mesh.rank, mesh)
    batch = own_batch(case, mesh.rank, mesh.topology)
    counter = CollectiveCounter()
    with counter:
        counter.phase = "forward"
        hidden, weights = (t.requires_grad_(not is_first_layer) for t in (batch.hidden, batch.weights))
        out = experts(hidden, batch.index, weights)
        counter.phase = "backward"
        out.backward(batch.g)
    return dict(counter.counts), {key: parameter.grad for key, parameter in trained.items()}


@pytest.mark.parametrize("adapter", _rest(["both", "gate", "none"], ["both", "none"]))
@pytest.mark.parametrize("tokens", _rest(["ranks differ", "one rank has none"], ["one rank has none"]))
@for_each("topology", COSTS)
def test_a_layer_of_experts_costs_the_same_collectives_with_and_without_lora(
    topology: str, tokens: str, adapter: str, pools: Callable[[int], Pool]
) -> None:
    travels = "ep=" in topology or "etp=" in topology
    backward = COSTS[topology]
    forward = backward | ({"allgather": backward.get("allgather", 0) + 1} if travels else {})
    expected = {("forward", kind): n for kind, n in forward.items()}
    expected |= {("backward", kind): n for kind, n in backward.items()}
    for found, _ in pools(4).run(_count, Case("qwen3_moe", topology, tokens, adapter), False, timeout_s=60):
        assert found == expected


@for_each("tokens", ["ranks differ", "one rank has none", "one token"])
@for_each("topology", ["dp=4,ep=2,etp=2", "dp=2,tp=2,ep=2,etp=2", "tp=4,ep=2,etp=2,two-stage"])
def test_input_that_needs_no_gradient_saves_its_way_back_on_every_rank(
    topology: str, tokens: str, pools: Callable[[int], Pool]
) -> None:
    case = Case("qwen3_moe", topology, tokens)
    results = pools(4).run(_count, case, True, timeout_s=60)
    backward = {kind: n for (phase, kind), n in results[0][0].items() if phase == "backward"}
    assert backward == ({"alltoall": 1, "allgather": 1} if "two-stage" in topology else {"alltoall": 1})
    assert all(counts == results[0][0] for counts, _ in results)
    _, factors = reference(replace(case, topology=""), Topology.parse(topology).dp)
    empty = torch.empty(0)
    whole = whole_factors(case, [Result(empty, empty, None, gradients) for _, gradients in results])
    for key, gradient in whole.items():
        close(gradient, factors[key])


# --- bits -------------------------------------------------------------------------------------------------------------


def _bits(result: Result) -> list[Tensor]:
    found = [result.out, result.hidden, result.weights, *result.factors.values()]
    return [tensor for tensor in found if tensor is not None]


@pytest.mark.parametrize("topology", ["dp=4,ep=2,etp=2", "dp=4,ep=4", "dp=2,tp=2,ep=2,etp=2,two-stage"])
def test_two_runs_give_the_same_bits(topology: str, pools: Callable[[int], Pool]) -> None:
    case = Case("gpt_oss", topology)
    for first, second in zip(pools(4).run(run, case), pools(4).run(run, case), strict=True):
        assert len(_bits(first)) == 7
        assert all(torch.equal(a, b) for a, b in zip(_bits(first), _bits(second), strict=True))


def test_where_experts_lie_changes_nothing_but_the_last_bit(pools: Callable[[int], Pool]) -> None:
    two, four, alone = (Case("gpt_oss", topology) for topology in ("dp=4,ep=2", "dp=4,ep=4", "dp=4"))
    results = {case: pools(4).run(run, case) for case in (two, four, alone)}
    for case in (four, alone):
        for ours, theirs in zip(results[case], results[two], strict=True):
            for a, b in zip(_bits(ours)[:3], _bits(theirs)[:3], strict=True):
                close(a, b, limit=1e-15)
        before = whole_factors(two, results[two])
        for key, gradient in whole_factors(case, results[case]).items():
            close(gradient, before[key], limit=1e-15)

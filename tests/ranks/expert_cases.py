"""A layer of experts on a mesh and in one process, from the same numbers: what the tests of experts compare.

The reference is the module of transformers, run by its own code with `W + s B A` in the place of its matrices, and
autograd. What a rank holds of a matrix is written a second time here.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import AutoModelForCausalLM

from meshlora.comm.groups import Mesh, open_mesh
from meshlora.layers.adapted import become
from meshlora.plan.rules import ExpertsRule
from meshlora.wings.experts.forms import find_experts
from meshlora.wings.experts.module import ParallelExpertLinear, ScaledExpertsBlock, parallelize_experts
from meshlora_ground.float64 import lift
from meshlora_ground.topology import Topology
from meshlora_judge.twin import twin_config

SCALE, RANK, ALWAYS, NEVER = 0.5, 4, 3, 7
# How gate and up lie in the first matrix: in two blocks, in pairs of rows, or there is no gate.
ORDER = {"qwen3_moe": "blocks", "gpt_oss": "pairs", "nemotron_h": "plain", "llama4_text": "blocks"}
# Which factors the adapter has.
ADAPTERS: dict[str, dict[str, list[str]]] = {
    "both": {"first": ["A", "B"], "second": ["A", "B"]},
    "first alone": {"first": ["A", "B"]},
    "second alone": {"second": ["A", "B"]},
    "gate": {"first": ["A.gate", "B.gate"]},
    "up": {"first": ["A.up", "B.up"]},
    "gate, up, second": {"first": ["A.gate", "B.gate", "A.up", "B.up"], "second": ["A", "B"]},
    "none": {},
}
# How many tokens each dp rank has.
TOKENS: dict[str, Callable[[int], int]] = {
    "ranks differ": lambda dp: 5 + 2 * dp,
    "one expert gets all, one none": lambda dp: 5 + 2 * dp,
    "one rank has none": lambda dp: 7 * min(dp, 1),
    "one rank alone has some": lambda dp: 7 * (dp == 0),
    "one token": lambda dp: 1,
    "nobody has any": lambda dp: 0,
}


@dataclass(frozen=True)
class Case:
    """What is run. is_shared: one adapter for all experts."""

    family: str
    topology: str
    tokens: str = "ranks differ"
    adapter: str = "both"
    is_shared: bool = False


# --- what both sides are given ----------------------------------------------------------------------------------------


@functools.cache
def block_of(family: str) -> tuple[nn.Module, ExpertsRule]:
    """(a block of experts on the meta device, its rule)."""
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(
            twin_config(family), dtype=torch.float64, experts_implementation="eager"
        )
    rule = list(find_experts(model, Topology()).values())[-1]
    return model.get_submodule(rule.block), rule


def _draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _weights(family: str) -> dict[str, Tensor]:
    """Parameter of the block -> value."""
    block, _ = block_of(family)
    parameters = enumerate(block.named_parameters())
    weights = {name: _draw(*p.shape, seed=50 + index) / p.shape[-1] ** 0.5 for index, (name, p) in parameters}
    if family == "llama4_text":  # for tokens whose first feature is 10
        weights["router.weight"][:, 0] = 0
        weights["router.weight"][ALWAYS, 0], weights["router.weight"][NEVER, 0] = 1, -1
    return weights


def _inner(family: str) -> int:
    return block_of(family)[1].second.in_features


def _rows_of(piece: str, family: str) -> Tensor:
    """Where the rows of the gate, or of the up, lie in the first matrix."""
    inner = torch.arange(_inner(family))
    second = piece == "up"
    return 2 * inner + second if ORDER[family] == "pairs" else inner + second * len(inner)


def factors_of(case: Case) -> dict[str, Tensor]:
    """`first.A` and so on -> whole factor."""
    _, rule = block_of(case.family)
    found = {}
    for which, parts in ADAPTERS[case.adapter].items():
        projection = rule.first if which == "first" else rule.second
        for part in parts:
            out = _inner(case.family) if "." in part else projection.out_features
            matrix = (RANK, projection.in_features) if part[0] == "A" else (out, RANK)
            number = 1 if case.is_shared else rule.num_experts
            found[f"{which}.{part}"] = _draw(number, *matrix, seed=90 + len(found)) / matrix[1] ** 0.5
    return found


@dataclass(frozen=True)
class Batch:
    """Of one dp rank: hidden states, what is chosen and how it is weighted, gradient of the output."""

    hidden: Tensor
    index: Tensor
    weights: Tensor
    g: Tensor

    def part(self, rows: slice) -> Batch:
        return Batch(self.hidden[rows], self.index[rows], self.weights[rows], self.g[rows])


def _batch(case: Case, dp: int) -> Batch:
    _, rule = block_of(case.family)
    number, width = TOKENS[case.tokens](dp), rule.first.in_features
    hidden = _draw(number, width, seed=dp)
    generator = torch.Generator().manual_seed(dp)
    index = torch.rand(number, rule.num_experts, generator=generator).topk(3).indices
    if case.tokens == "one expert gets all, one none":
        hidden[:, 0] = 10
        others = torch.tensor([e for e in range(rule.num_experts) if e not in (ALWAYS, NEVER)])
        chosen = torch.rand(number, len(others), generator=generator).topk(2).indices
        index = torch.cat([others[chosen], torch.full((number, 1), ALWAYS)], 1)
    weights = torch.rand(number, 3, dtype=torch.float64, generator=generator)
    return Batch(hidden, index, weights, _draw(number, width, seed=30 + dp))


# --- one process ------------------------------------------------------------------------------------------------------


@dataclass
class Result:
    """Outputs and gradients of one rank's tokens, and gradients of what is trained; `router` of llama4 alone."""

    out: Tensor
    hidden: Tensor
    weights: Tensor | None
    factors: dict[str, Tensor | None]
    router: Tensor | None = None
    frozen: dict[str, bool] | None = None


def _with_adapter(case: Case, weights: Mapping[str, Tensor], factors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The parameters of the block, `W_e + s B_e A_e` for those of experts."""
    _, rule = block_of(case.family)
    changed = dict(weights)
    for key in (key for key in factors if ".A" in key):
        which = key.partition(".")[0]
        projection = rule.first if which == "first" else rule.second
        name = projection.name.removeprefix(f"{rule.block}.")
        delta = SCALE * torch.einsum("eor,eri->eoi", factors[key.replace(".A", ".B")], factors[key])
        if key.count(".") == 2:
            rows = _rows_of(key.rpartition(".")[2], case.family)
            delta = delta.new_zeros(len(delta), projection.out_features, delta.shape[2]).index_copy(1, rows, delta)
        changed[name] = changed[name] + (delta.mT if projection.is_transposed else delta)
    return changed


@functools.cache
def reference(case: Case, number: int) -> tuple[list[Result], dict[str, Tensor]]:
    """(one result for each of `number` dp ranks, gradients of the factors over all their tokens)."""
    block, rule = block_of(case.family)
    factors = {key: value.requires_grad_() for key, value in factors_of(case).items()}
    weights = _weights(case.family)
    is_block = case.family == "llama4_text"
    if is_block:
        weights["router.weight"].requires_grad_()
    parameters = _with_adapter(case, weights, factors)
    own = rule.name.removeprefix(f"{rule.block}.")
    results = []
    for dp in range(number):
        batch = _batch(case, dp)
        hidden, routing = batch.hidden.requires_grad_(), batch.weights.requires_grad_()
        if is_block:
            out = functional_call(block, parameters, (hidden,))[0]
        else:
            of_experts = {n.removeprefix(f"{own}."): v for n, v in parameters.items() if n.startswith(f"{own}.")}
            out = functional_call(block.get_submodule(own), of_experts, (hidden, batch.index, routing))
        if len(hidden):  # of no tokens there is no graph
            out.backward(batch.g, retain_graph=True)
        dx = torch.zeros_like(hidden) if hidden.grad is None else hidden.grad
        dw = torch.zeros_like(routing) if routing.grad is None else routing.grad
        results.append(Result(out.detach(), dx, None if is_block else dw, {}))
    if is_block:
        results[0].router = weights["router.weight"].grad
    return results, {key: torch.zeros_like(f) if f.grad is None else f.grad for key, f in factors.items()}


# --- ranks ------------------------------------------------------------------------------------------------------------


@functools.cache
def mesh_of(topology: str) -> Mesh:
    return open_mesh(Topology.parse(topology), has_experts=True)


def _place(topology: Topology, rank: int, num_experts: int) -> tuple[slice, int]:
    """(the experts of a rank, which part of them)."""
    each = num_experts // topology.ep
    ep = rank // topology.etp % topology.ep
    return slice(ep * each, (ep + 1) * each), rank % topology.etp


def of_rank(key: str, case: Case, rank: int) -> tuple[Any, ...]:
    """Index of what a rank holds of a factor `[E, ...]`, or of a weight `first.B` stored `[E, out, in]`."""
    topology = Topology.parse(case.topology)
    _, rule = block_of(case.family)
    experts, part = _place(topology, rank, rule.num_experts)
    rows = torch.arange(_inner(case.family)).chunk(topology.etp)[part]
    kind, whole = ORDER[case.family], slice(None)
    if key == "first.B" and kind == "pairs":
        rows = torch.stack([2 * rows, 2 * rows + 1], 1).flatten()
    elif key == "first.B" and kind == "blocks":
        rows = torch.cat([rows, rows + _inner(case.family)])
    is_cut = key.startswith(("first.B", "second.A"))
    own = slice(None) if case.is_shared else experts
    return (own, *((rows, whole) if key.startswith("first.B") else (whole, rows) if is_cut else (whole, whole)))


def load(case: Case, rank: int, mesh: Mesh) -> tuple[nn.Module, nn.Module, dict[str, nn.Parameter]]:
    """(block, its experts, trained parameters) of a rank."""
    plain, rule = block_of(case.family)
    block = copy.deepcopy(plain)
    experts = block.get_submodule(rule.name.removeprefix(f"{rule.block}."))
    parallelize_experts(experts, rule, mesh, dtype=torch.float64, sp=mesh.topology.sp)
    if rule.weights_first:
        become(block, ScaledExpertsBlock)
    weights = _weights(case.family)
    alike = replace(case, is_shared=False)
    trained = {}
    for which, projection, like in (("first", rule.first, "first.B"), ("second", rule.second, "second.A")):
        name = projection.name.removeprefix(f"{rule.block}.")
        leaf = block.get_submodule(name)
        assert isinstance(leaf, ParallelExpertLinear)
        value = weights.pop(name)
        value = (value.mT if projection.is_transposed else value)[of_rank(like, alike, rank)]
        _set(leaf, "weight", value.mT if projection.is_transposed else value)
        if projection.has_bias:
            bias = weights.pop(f"{name}_bias")
            index = of_rank(like, alike, rank)
            _set(leaf, "bias", bias[index[:2]] if which == "first" else bias[index[0]])
        parts = {
            k.partition(".")[2]: v[of_rank(k, case, rank)] for k, v in factors_of(case).items() if k.startswith(which)
        }
        if parts:
            leaf.add_adapter("default", parts, scaling=SCALE)
            leaf.active = "default"
        for part, parameter in leaf.trained("default").items():
            trained[f"{which}.{part}"] = parameter.requires_grad_()
    for name, value in weights.items():  # what is around the experts
        owner, _, leaf_name = name.rpartition(".")
        _set(block.get_submodule(owner), leaf_name, value)
    return block, experts, trained


def _set(module: nn.Module, name: str, value: Tensor) -> None:
    assert getattr(module, name).shape == value.shape, (name, value.shape)
    setattr(module, name, nn.Parameter(value.contiguous(), requires_grad=False))


def own_batch(case: Case, rank: int, topology: Topology) -> Batch:
    batch = _batch(case, rank // topology.tp)
    if not topology.sp:
        return batch
    first = -(-len(batch.hidden) // topology.tp)  # unequal shares
    return batch.part(slice(first) if rank % topology.tp == 0 else slice(first, None))


def run(case: Case) -> Result:
    mesh = mesh_of(case.topology)
    block, experts, trained = load(case, mesh.rank, mesh)
    batch = own_batch(case, mesh.rank, mesh.topology)
    hidden, weights = batch.hidden.requires_grad_(), batch.weights.requires_grad_()
    is_block = case.family == "llama4_text"
    router = block.get_parameter("router.weight").requires_grad_() if is_block else None
    with lift(True):
        out = block(hidden)[0] if is_block else experts(hidden, batch.index, weights)
        out.backward(batch.g)
    assert hidden.grad is not None
    return Result(
        out.detach(),
        hidden.grad,
        None if is_block else weights.grad,
        {key: parameter.grad for key, parameter in trained.items()},
        None if router is None else router.grad,
        {name: p.grad is not None or p.requires_grad for name, p in experts.named_parameters() if "lora" not in name},
    )


def close(actual: Tensor | None, expected: Tensor, limit: float = 1e-13) -> None:
    """Relative L2, and zeros are zeros."""
    assert actual is not None
    assert actual.shape == expected.shape
    error, size = (actual - expected).norm(), expected.norm()
    assert error <= limit * size, f"relative error {float(error / size):.1e}"


def whole_factors(case: Case, results: list[Result]) -> dict[str, Tensor]:
    """The gradients of all ranks, each added where it belongs."""
    whole = {key: torch.zeros_like(factor) for key, factor in factors_of(case).items()}
    for rank, result in enumerate(results):
        for key, gradient in result.factors.items():
            assert gradient is not None, (rank, key)
            whole[key][of_rank(key, case, rank)] += gradient
    return whole

"""Routed experts: finding them in a model, and how their matrices are split.

Owns: finding the experts of a model (`find_experts`), and which topologies they allow. Does not own: their rules' data
types (`plan.rules`), the layers that run them (`wings.experts.module`), gradient axes (`plan.grads`).

Most families of transformers keep the experts of a layer as one module with a stack of matrices per projection,
`gate_up_proj [E, 2I, H]` and `down_proj [E, H, I]`, called as `experts(hidden_states, top_k_index, top_k_weights)`;
attributes tell the storage order. Over ep each rank gets whole experts; over etp each expert is split like an MLP over
tp: its first matrix by output features (column), its second by input features (row).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from meshlora.plan.layout import Layout, Piece, Split
from meshlora.plan.rules import ExpertRule, ExpertsRule, LinearRule, PlannedBlock, Region
from meshlora_ground.compat.transformers_models import gate_of
from meshlora_ground.errors import UnsupportedError, UserError
from meshlora_ground.topology import Topology, divisors, set_of

# Class names of routed experts. A module that matches and is not recognised below is whole on every rank.
_EXPERTS = re.compile(r"Experts|MoE$|Moe$|MoeBlock|MoEBlock")
_UNKNOWN = "these experts do not have the form that most families share"
_FLAGS = ("has_gate", "has_bias", "is_transposed", "is_concatenated")


def find_experts(model: Any, topology: Topology) -> dict[str, ExpertsRule]:
    """Name -> rule of every routed experts module of `model`, which may be on the meta device.

    Raises:
        UnsupportedError: ep or etp with experts of an unknown form.
        UserError: ep or etp without experts; ep does not divide their number or etp their width (names values that do).
    """
    found: dict[str, ExpertsRule] = {}
    for name, module in model.named_modules():
        if _is_stack(module) and (rule := _rule(name, module, model)) is not None:
            found[name] = rule
    if topology.ep * topology.etp > 1 and (name := unknown_experts(model, found)) is not None:
        kind = type(model.get_submodule(name)).__name__
        raise UnsupportedError(f"{name}: {kind}", _UNKNOWN, "leave out ep and etp")
    if not found and topology.ep * topology.etp > 1:
        given = f"topology {topology}"
        raise UserError(given, f"model_type {model.config.model_type!r} has no routed experts", "leave out ep, etp")
    for rule in found.values():
        _check_divides("ep", topology.ep, rule.num_experts, f"the {rule.num_experts} experts of {rule.name}")
        if rule.first.num_zero:
            zero = rule.first.num_zero
            _check_divides("ep", topology.ep, zero, f"the {zero} experts of {rule.name} that compute nothing")
        width = rule.second.in_features
        _check_divides("etp", topology.etp, width, f"the width {width} of the experts of {rule.name}")
    return found


def lacking_conversions(model: Any) -> list[Any]:
    """Of experts that a checkpoint has one by one, as linears `[out, in]`, and the model as stacks `[E, in, out]`, gate
    before up: compressed-tensors stores llama4's so, and transformers reads no such stack.
    """
    from transformers import core_model_loading as loading

    stacks = {type(module): (name, module) for name, module in model.named_modules() if _is_stack(module)}
    rules = [rule for name, module in stacks.values() if (rule := _rule(name, module, model)) is not None]
    if not any(rule.first.is_transposed and rule.first.fused and rule.first.fused.groups == 1 for rule in rules):
        return []
    stack, turn = loading.MergeModulelist(dim=0), loading.Transpose(1, 2)
    gate_up = ["experts.*.gate_proj.weight", "experts.*.up_proj.weight"]
    return [
        loading.WeightConverter(gate_up, "experts.gate_up_proj", [stack, loading.Concatenate(dim=1), turn]),
        loading.WeightConverter("experts.*.down_proj.weight", "experts.down_proj", [stack, turn]),
    ]


def odd_experts(
    model_type: str, path: str, module: nn.Module, linears: Mapping[str, LinearRule], *, name: str, tp: int
) -> PlannedBlock | None:
    """A block with experts of a form that `find_experts` does not know: all of it is whole."""
    for inner in module.modules():
        if _is_experts(inner):
            number = sum(parameter.numel() for parameter in module.parameters())
            return PlannedBlock(Region(name, is_split=False, reason=f"{_UNKNOWN} ({number:,} weights a layer)"))
    return None


def unknown_experts(model: Any, found: Mapping[str, ExpertsRule]) -> str | None:
    """The first module of `model` with experts that are none of `found`; None: all are."""
    known = {*found, *(rule.block for rule in found.values())}
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{other}.") for other in known)
        around = any(other.startswith(f"{name}.") for other in known)
        if _is_experts(module) and name not in known and not inside and not around:
            return str(name)
    return None


def _is_experts(module: nn.Module) -> bool:
    return _is_stack(module) or bool(_EXPERTS.search(type(module).__name__))


def _is_stack(module: nn.Module) -> bool:
    own = dict(module.named_parameters(recurse=False))
    down = own.get("down_proj")
    # With gate and up apart they are shared ones (inkling_text), of which every token takes all.
    names = own.keys() & {"gate_up_proj", "up_proj", "gate_proj"}
    return down is not None and down.ndim == 3 and bool(names) and "gate_proj" not in names


def _rule(name: str, module: Any, model: Any) -> ExpertsRule | None:
    """None: their form is not known."""
    block = name.rpartition(".")[0]
    flags = {flag: getattr(module, flag, None) for flag in _FLAGS}
    weights_first = False
    if type(module).__name__ == "Llama4TextExperts":
        # Its block scales the tokens and calls it with all of them for every expert.
        flags = {"has_gate": True, "has_bias": False, "is_transposed": True, "is_concatenated": True}
        weights_first = True
    is_tried = set(flags.values()) == {None} and _is_usual(module)
    if is_tried:
        flags = {"has_gate": True, "has_bias": False, "is_transposed": False, "is_concatenated": True}
    has_norm = isinstance(getattr(module, "post_expert_norm", None), nn.Module)
    if None in flags.values() or getattr(module, "has_post_expert_norm", False) != has_norm:
        return None
    first_name, of_inputs = "up_proj", 2
    if flags["has_gate"]:
        first_name = "gate_up_proj"
    is_transposed = bool(flags["is_transposed"])
    if is_transposed:
        of_inputs = 1
    first, second = getattr(module, first_name), module.down_proj
    num_experts, inner, hidden = second.shape[0], second.shape[of_inputs], first.shape[of_inputs]
    num_zero = len(first) - num_experts
    if num_zero and not is_tried:
        return None
    known = {first_name, "down_proj"}
    if flags["has_bias"]:
        known |= {f"{first_name}_bias", "down_proj_bias"}
    if has_norm:
        known.add("post_expert_norm.weight")
    if dict(module.named_parameters()).keys() - known:
        return None
    pieces, fused = Layout.plain(inner), None
    if flags["has_gate"]:
        groups = inner  # gate and up of each feature are neighbours
        if flags["is_concatenated"]:
            groups = 1
        pieces = fused = Layout((Piece("gate", inner, 1), Piece("up", inner, 1)), groups)
    # PEFT reads the module's attribute, and assumes [E, out, in] without one.
    is_swapped = is_transposed and not getattr(module, "is_transposed", False)
    common: dict[str, Any] = {
        "has_bias": bool(flags["has_bias"]),
        "is_transposed": is_transposed,
        "num_experts": num_experts,
        "is_swapped": is_swapped,
    }
    return ExpertsRule(
        name,
        block,
        num_experts,
        ExpertRule(
            *(f"{name}.{first_name}", Split.COLUMN, hidden, pieces.size),
            **{"layout": pieces, "fused": fused, "num_zero": num_zero, **common},
        ),
        ExpertRule(f"{name}.down_proj", Split.ROW, inner, hidden, layout=Layout.plain(inner), **common),
        _routers(model.get_submodule(block), block, name, len(first)),
        weights_first,
    )


def _is_usual(module: nn.Module) -> bool:
    """Whether a stack that says nothing of its form (step3p7) has the usual one: it is run on a few numbers, and
    compared with what `wings.experts.module` computes of them. Experts without a second matrix give back their input.
    """
    own = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    number, width, hidden = own.get("gate_up_proj", (0, 0, 0))
    routed = own["down_proj"][0]
    if own != {"gate_up_proj": (number, width, hidden), "down_proj": (routed, hidden, width // 2)} or width % 2:
        return False
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")

    first, second, weights = drawn(number, 6, 5), drawn(routed, 5, 3), drawn(8, 2)
    # Small and large: a clamp that the gate knows nothing of shows.
    x = drawn(8, 5) * 10.0 ** torch.arange(-2.0, 2.0, 0.5, dtype=torch.float64, device="cpu").unsqueeze(1)
    of_tokens = torch.arange(8, device="cpu")
    chosen = torch.stack([of_tokens % number, (number - 1 - 3 * of_tokens) % number], 1)
    chosen[0, 1] = min(routed, number - 1)  # the first without a second matrix, if there is one
    gate = gate_of(module)
    expected = torch.zeros_like(x)
    for token, choice in itertools.product(range(8), range(2)):
        expert = int(chosen[token, choice])
        if expert >= routed:
            expected[token] += weights[token, choice] * x[token]
            continue
        inner = (first[expert] @ x[token]).unsqueeze(0)
        if gate is not None:
            inner = gate(inner)
        else:
            inner = module.act_fn(inner[:, :3]) * inner[:, 3:]  # type: ignore[operator]
        expected[token] += weights[token, choice] * (second[expert] @ inner[0])
    try:
        found = functional_call(module, {"gate_up_proj": first, "down_proj": second}, (x, chosen, weights))
    except (RuntimeError, TypeError):  # it takes something else
        return False
    return isinstance(found, Tensor) and found.shape == x.shape and torch.allclose(found, expected, 1e-9, 1e-12)


def _routers(block: nn.Module, block_name: str, experts: str, num_experts: int) -> tuple[str, ...]:
    """The modules that score experts. A shared expert can be as wide as there are experts (qwen3_next): it is told
    apart by another matrix of its MLP that takes that width as input.
    """
    found = []
    for name, module in block.named_modules(prefix=block_name):
        # Of inkling they score shared experts, too.
        numbers = {num_experts, num_experts + getattr(module, "n_shared_experts", 0)}
        own = [p for p in module.parameters(recurse=False) if p.ndim == 2 and len(p) in numbers]
        if not own or name.startswith(experts):
            continue
        owner = block.get_submodule(name.removeprefix(block_name).lstrip(".").rpartition(".")[0])
        if owner is block or not any(p.ndim == 2 and p.shape[1] == num_experts for p in owner.parameters()):
            found.append(name)
    return tuple(found)


def _check_divides(axis: str, size: int, number: int, what: str) -> None:
    if number % size:
        raise UserError(f"{axis}={size}", f"{axis} must divide {what}", f"use {axis} in {set_of(divisors(number))}")

"""Experts in the judge: stacks of matrices, and adapters on them separated by expert.

Owns: which modules hold routed experts, the orientation of their matrices, and PEFT's order of the factors of all
experts, derived a second time from its code: in A `[r E, in]` the ranks of one expert are adjacent, in B `[out, r E]`
the experts of one rank. Compared tensors are named by expert, `model.layers.0.mlp.experts.3.gate_up_proj.lora_A`, or if
all share one adapter `model.layers.0.mlp.experts.gate_up_proj.lora_A`; A is on the input side and B on the output side.
Does not own: which rank holds which expert (`meshlora_judge.unshard`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.hooks import RemovableHandle

from meshlora_ground.compat.torch_tensors import own_child, own_parameter

PREFIX = "base_model.model."
_DEFAULT = re.compile(r"\.default(?=$|\.bias$)")  # the adapter of PEFT
_OF_PEFT = re.compile(
    r"\.(base_layer|token_adapter|original_module|modules_to_save\.default|parametrizations\.weight\.original)(?=\.|$)"
)
ROWS = ".trainable_tokens_delta"  # rows of a vocabulary in place of the base's
# PEFT wraps several projections of a layer in this order: the last is outermost.
PROJECTIONS = ("gate_up_proj", "up_proj", "down_proj")
# Stored as [E, in, out] without an `is_transposed` attribute.
_SILENTLY_TRANSPOSED = "Llama4TextExperts"


@dataclass(frozen=True)
class Stack:
    """An adapter on one projection of all experts of a layer.

    Attributes:
        num_experts: in the layer. is_swapped: PEFT's A is on the output side. is_shared: one adapter for all experts.
    """

    num_experts: int
    is_swapped: bool = False
    is_shared: bool = False


def expert_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Name in the model without adapters -> module of routed experts; for the reference's model and for ours."""
    return {plain_name(name): module for name, module in model.named_modules() if _projections(module)}


def matrices(model: nn.Module) -> dict[str, Tensor]:
    """Projection, such as `model.layers.0.mlp.experts.down_proj` -> its matrices on this rank, `[E, out, in]`."""
    found = {}
    for name, module in expert_modules(model).items():
        for leaf, parameter in _projections(module).items():
            matrix = parameter.detach()
            found[f"{name}.{leaf}"] = matrix.mT if is_transposed(module) else matrix
    return found


def is_transposed(experts: nn.Module) -> bool:
    """Whether the matrices are stored `[in, out]`."""
    return bool(getattr(experts, "is_transposed", False)) or _is_llama4(experts)


def _is_llama4(experts: nn.Module) -> bool:
    return any(cls.__name__ == _SILENTLY_TRANSPOSED for cls in type(experts).__mro__)


def _projections(module: nn.Module) -> dict[str, Tensor]:
    """The stacks of a module of experts, as its own parameters or as child modules; {} for any other module."""
    found: dict[str, Tensor] = {}
    if own_parameter(module, "gate_proj") is not None:  # shared ones: every token takes all of them (inkling)
        return found
    for leaf in PROJECTIONS:
        own = own_parameter(module, leaf)
        if own is None:
            own = getattr(own_child(module, leaf), "weight", None)
        if isinstance(own, Tensor) and own.ndim == 3:
            found[leaf] = own
    return found


def plain_name(path: str) -> str:
    """The name of a module or parameter in the model without PEFT's wrappers."""
    name = _OF_PEFT.sub("", path.removeprefix(PREFIX))
    if ".lora_" in name or ROWS in name:
        # Of the bias of B the last word says what it is, as in `lora_B.default.bias`.
        return _DEFAULT.sub("", name.removesuffix(".weight"))
    return name


def watch_choices(
    model: nn.Module, name: str, experts: nn.Module, keep: Callable[[Tensor, Tensor], None]
) -> list[RemovableHandle]:
    """Install hooks that call `keep(weights, indices)` with the chosen experts of each token, `[T, k]` each."""
    if not _is_llama4(experts):

        def called(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            index, weights = [*args, *kwargs.values()][1:3]
            keep(weights, index)

        return [experts.register_forward_pre_hook(called, with_kwargs=True)]
    # llama4's block passes every token to every expert; the router's scores are zero except for the chosen ones.
    block = next(m for path, m in model.named_modules() if plain_name(path) == name.rpartition(".")[0])
    router, top_k = block.get_submodule("router"), int(getattr(block, "top_k", 1))

    def returned(_: nn.Module, args: Any, output: tuple[Tensor, Tensor]) -> None:
        keep(*output[0].detach().topk(top_k, dim=1))

    return [router.register_forward_hook(returned)]


def wrappers(model: nn.Module) -> dict[str, tuple[str, ParamWrapper]]:
    """Path of PEFT's wrapper of a parameter -> (target of the adapter, the wrapper).

    The target is a linear for its `weight`, and `MODULE.PROJECTION` for a projection of experts.
    """
    found = {}
    for path, module in model.named_modules():
        if isinstance(module, ParamWrapper):
            target = plain_name(path)
            if module.parameter_name != "weight":
                target = f"{target}.{module.parameter_name}"
            found[path] = target, module
    return found


def adapted_stacks(model: nn.Module, *, is_shared: bool = False) -> dict[str, Stack]:
    """Projection -> layout of PEFT's adapter, for all projections that have one, in module order.

    is_shared: experts share it, for callers that know before `share_adapters` has changed the model.
    """
    found: dict[str, Stack] = {}
    is_shared = is_shared or any(isinstance(module, Repeated) for module in model.modules())
    owners = expert_modules(model)
    for name, wrapper in wrappers(model).values():
        owner, _, leaf = name.rpartition(".")
        if owner in owners and leaf in PROJECTIONS:
            experts = owners[owner]
            is_swapped = is_transposed(experts) and not getattr(experts, "is_transposed", False)
            found[name] = Stack(wrapper.num_experts, is_swapped, is_shared)
    return dict(sorted(found.items(), key=lambda item: _order(item[0])))


def _order(name: str) -> tuple[str, int]:
    module, _, leaf = name.rpartition(".")
    return module, PROJECTIONS.index(leaf)


class Repeated(nn.Module):
    """Parametrization: one matrix repeated for all experts, in PEFT's order."""

    def __init__(self, num_experts: int, *, is_a: bool) -> None:
        super().__init__()
        self.num_experts, self.is_a = num_experts, is_a

    def forward(self, one: Tensor) -> Tensor:
        if self.is_a:  # [r, in] -> [E r, in]
            return one.repeat(self.num_experts, 1)
        return one.repeat_interleave(self.num_experts, dim=1)  # [out, r] -> [out, r E]

    def right_inverse(self, every: Tensor) -> Tensor:
        if self.is_a:
            return every[: len(every) // self.num_experts].clone()
        return every[:, :: self.num_experts].clone()


def share_adapters(model: nn.Module) -> None:
    """Make all experts of a layer share one adapter: PEFT's factors become repetitions of one matrix."""
    stacks = adapted_stacks(model)
    for name, wrapper in wrappers(model).values():
        if name in stacks:
            for leaves, is_a in ((wrapper.lora_A, True), (wrapper.lora_B, False)):
                repeated = Repeated(wrapper.num_experts, is_a=is_a)
                parametrize.register_parametrization(leaves["default"], "weight", repeated)


def unshare_adapters(model: nn.Module) -> None:
    """Write the repetitions of `share_adapters` out, under PEFT's names."""
    for _, wrapper in wrappers(model).values():
        for leaves in (wrapper.lora_A, wrapper.lora_B):
            if parametrize.is_parametrized(leaves["default"], "weight"):
                parametrize.remove_parametrizations(leaves["default"], "weight")


def plain_names(model: nn.Module) -> dict[str, str]:
    """Path of a wrapper, without PEFT's prefix -> target of its adapter."""
    return {path.removeprefix(PREFIX): name for path, (name, _) in wrappers(model).items()}


def in_experts(
    tensors: Mapping[str, Tensor], stacks: Mapping[str, Stack], *, in_file: bool = False
) -> dict[str, Tensor]:
    """Factors by name, with PEFT's factors for all experts of a layer separated by expert.

    in_file: a shared factor is stored once per expert; a copy that differs gets its own name.
    """
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        module, _, side = name.rpartition(".lora_")
        stack = stacks.get(module)
        if stack is None:
            found[name] = tensor
            continue
        number = 1 if stack.is_shared and not in_file else stack.num_experts
        owner, _, leaf = module.rpartition(".")
        if tensor.ndim != 2 or tensor.shape[0 if side == "A" else 1] % number:
            found[f"{name} of another number of experts"] = tensor
            continue
        if side == "A":
            parts, other = tensor.reshape(number, -1, tensor.shape[1]), "B"
        else:
            parts, other = tensor.reshape(len(tensor), -1, number).permute(2, 0, 1), "A"
        if stack.is_swapped:
            side, parts = other, parts.mT
        for expert, part in enumerate(parts.unbind()):
            if not stack.is_shared:
                found[f"{owner}.{expert}.{leaf}.lora_{side}"] = part.contiguous()
            elif expert == 0:
                found[f"{module}.lora_{side}"] = part.contiguous()
            elif not torch.equal(part, parts[0]):
                found[f"{module}.lora_{side} of expert {expert}"] = part.contiguous()
    return found


def output_side(stack: Stack | None) -> str:
    """PEFT's letter for the output-side factor."""
    return "A" if stack is not None and stack.is_swapped else "B"


def names_in_file(keys: Iterable[str], stacks: Mapping[str, Stack]) -> dict[str, str]:
    """Key of an adapter file, without PEFT's prefix -> name of the factor, for keys of experts.

    With two projections in a layer the inner wrapper belongs to the first; a single one has no inner wrapper.
    """
    by_module: dict[str, list[str]] = {}
    for name in stacks:
        by_module.setdefault(name.rpartition(".")[0], []).append(name)
    found = {}
    for key in keys:
        path, _, rest = key.rpartition(".lora_")
        module = plain_name(path)
        if module in by_module:
            ordered = sorted(by_module[module], key=_order)
            depth = path.removeprefix(module).count(".base_layer")
            if depth < len(ordered):
                found[key] = f"{ordered[len(ordered) - 1 - depth]}.lora_{rest.removesuffix('.weight')}"
    return found


def stack_of(module: str) -> str:
    """`model.layers.0.mlp.experts.3.down_proj` -> `model.layers.0.mlp.experts.down_proj`."""
    path, _, leaf = module.rpartition(".")
    owner, dot, expert = path.rpartition(".")
    if dot and expert.isdecimal() and leaf in PROJECTIONS:
        return f"{owner}.{leaf}"
    return module

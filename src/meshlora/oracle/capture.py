"""Capture: copies of what every module returned, and of the gradients that came back to it.

Owns: the hooks and what they copy, in plain tensors, with the tokens that each forward was run on; the count of
collectives. Used on both sides. Does not own: putting the parts of several ranks together (`oracle.unshard`).

Everything is copied when it is seen: in-place operations overwrite what an output's memory holds. Only calls inside a
forward of the whole model count; a module that is run again to recompute activations is not captured twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from meshlora.common.compat import TorchDispatchMode
from meshlora.oracle.experts import expert_modules, watch_choices, wrappers

# Inside a PEFT layer: the frozen layer, captured by itself, and the parts of the adapter, which have no counterpart.
_BASE, _ADAPTER = ".base_layer", (".lora_", ".modules_to_save.", ".original_module", ".parametrizations.")

SCORES, CHOICES = "#router scores", "#router choices"


@dataclass
class MicroBatchCapture:
    """One forward and its backward.

    Attributes:
        input_ids: `[B, S]`. attention_mask: `[B, S]`, 0 at padding, else the number of the sequence in its row, from 1.
        forward: module -> output, in order of completion; several calls of a module are `name#word` or `name#1`. The
            whole model's output, its logits, has the name "". What comes into experts is `name#router scores` and
            `name#router choices`, `[B*S, k]`.
        backward: module -> gradient of the output.
        base: target of an adapter -> output without the adapter, where the model keeps it apart.
    """

    input_ids: Tensor
    attention_mask: Tensor
    forward: dict[str, Tensor] = field(default_factory=dict)
    backward: dict[str, Tensor] = field(default_factory=dict)
    base: dict[str, Tensor] = field(default_factory=dict)


class Capture:
    """Hooks on a Hugging Face causal LM. A context manager; `micro_batches` grows by one with each forward."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.micro_batches: list[MicroBatchCapture] = []
        self.is_forward = False
        self._calls: Counter[str] = Counter()
        self._without_graph: set[str] = set()
        self._handles: list[Any] = []

    def __enter__(self) -> Capture:
        self._handles.append(self.model.register_forward_pre_hook(self._begin, with_kwargs=True))
        experts = expert_modules(self.model)
        inside = tuple(f"{name}." for name in experts)  # these see rows in an order of their own
        wrapped = {f"{path}{_BASE}" for path in wrappers(self.model)}  # these compute with the adapter in their weights
        for name, module in self.model.named_modules():
            if any(part in name for part in _ADAPTER) or name.startswith(inside) or name in wrapped:
                continue
            self._handles.append(module.register_forward_hook(self._hook(name), with_kwargs=True))
        for name, experts_module in experts.items():
            self._handles += watch_choices(self.model, name, experts_module, self._keep_choices(name))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _begin(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.micro_batches.append(MicroBatchCapture(copy(kwargs["input_ids"]), sequence_numbers(kwargs)))
        self.is_forward = True
        self._calls.clear()
        self._without_graph.clear()

    def _hook(self, name: str) -> Any:
        def hook(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            tensor = first_tensor(output)
            if name == "" and not _has_values(tensor):  # logits that are not computed
                self.is_forward = False
            if tensor is None or not _has_values(tensor) or not tensor.is_floating_point() or not self.micro_batches:
                return
            # Several calls are told apart by a word among the arguments (a rotary embedding's layer type, in an order
            # that may differ between processes), else by their number.
            call = name + "".join(f"#{word}" for word in (*args, *kwargs.values()) if isinstance(word, str))
            if self.is_forward:
                self._calls[call] += 1
                key = call if self._calls[call] == 1 else f"{call}#{self._calls[call] - 1}"
                self._keep(name, key, tensor)
            elif call in self._without_graph:
                self._watch_gradient(call, tensor)

        return hook

    def _keep(self, name: str, key: str, tensor: Tensor) -> None:
        micro = self.micro_batches[-1]
        if name.endswith(_BASE):
            micro.base[name.removesuffix(_BASE)] = copy(tensor)
            return
        micro.forward[key] = copy(tensor)
        if tensor.requires_grad:
            self._watch_gradient(key, tensor)
        else:
            self._without_graph.add(key)
        if name == "":
            self.is_forward = False

    def _keep_choices(self, name: str) -> Any:
        """Scores and choices of the router in front of the experts `name`."""

        def keep(scores: Tensor, choices: Tensor) -> None:
            if self.is_forward:
                self.micro_batches[-1].forward[f"{name}{SCORES}"] = copy(scores)
                self.micro_batches[-1].forward[f"{name}{CHOICES}"] = copy(choices)

        return keep

    def _watch_gradient(self, key: str, tensor: Tensor) -> None:
        """Copy the gradient of an output when it comes; recomputed outputs have one where the first had no graph."""
        micro = self.micro_batches[-1]
        self._without_graph.discard(key)
        if tensor.requires_grad:
            tensor.register_hook(lambda grad: micro.backward.__setitem__(key, copy(grad)))


def sequence_numbers(kwargs: Mapping[str, Any]) -> Tensor:
    """For each token that a model is called with the number of its sequence in its row, from 1; 0 at padding.

    Where position ids are given and no mask, a sequence begins wherever a position does not follow that before it.
    Padding then shows as sequences that the reference does not have, as it does where there is neither.
    """
    mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
    if mask is not None:
        return copy(mask).long()
    if positions is None:
        return torch.ones_like(kwargs["input_ids"], device="cpu")
    follows = positions[:, 1:] == positions[:, :-1] + 1
    return 1 + torch.nn.functional.pad((~follows).long().cumsum(1), (1, 0)).cpu()


def spans(input_ids: Tensor, numbers: Tensor) -> list[tuple[int, int, tuple[int, ...]]]:
    """(row, where it begins, token ids) of each sequence of a batch; numbers: as of `sequence_numbers`."""
    found = []
    for row, (ids, of_row) in enumerate(zip(input_ids.cpu(), numbers, strict=True)):
        for number in of_row[of_row > 0].unique().tolist():
            places = (of_row == number).nonzero().flatten()
            found.append((row, int(places[0]), tuple(ids[places].tolist())))
    return found


def rows_of_tokens(input_ids: Tensor, numbers: Tensor, starts: Mapping[tuple[int, ...], int]) -> Tensor:
    """For each of the B·S tokens of a batch its row where all sequences lie one after another, `[B*S]`.

    numbers: as of `sequence_numbers`. starts: sequence -> row of its first token; a token of none of them has row -1.
    """
    rows = torch.full(input_ids.shape, -1, dtype=torch.int64)
    for row, place, sequence in spans(input_ids, numbers):
        if (start := starts.get(sequence)) is not None:
            rows[row, place : place + len(sequence)] = torch.arange(start, start + len(sequence))
    return rows.flatten()


def first_tensor(output: Any) -> Tensor | None:
    """The tensor that a module returned, alone, first in a tuple, or first in a transformers output; its logits."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, dict) and isinstance(output.get("logits"), Tensor):
        return output["logits"]  # not the loss of load balancing
    values = output.values() if isinstance(output, dict) else output if isinstance(output, tuple | list) else ()
    return next((value for value in values if isinstance(value, Tensor)), None)


def _has_values(tensor: Tensor | None) -> bool:
    """Whether it is a tensor as any other; one that takes over how torch dispatches stands for values nobody has."""
    return tensor is not None and type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__


def copy(tensor: Tensor) -> Tensor:
    """A copy on the CPU that shares nothing."""
    return tensor.detach().to("cpu", copy=True).contiguous()


class CollectiveCounter(TorchDispatchMode):
    """Counts collectives by phase and kind at dispatch level, whoever calls them.

    Attributes:
        phase: under which name the next one is counted; None: not at all.
        counts: (phase, kind) -> calls. sent: (phase, kind) -> bytes that this rank put in.
    """

    KINDS = ("allreduce", "allgather", "reducescatter", "alltoall", "broadcast")

    def __init__(self) -> None:
        super().__init__()
        self.phase: str | None = None
        self.counts: Counter[tuple[str, str]] = Counter()
        self.sent: Counter[tuple[str, str]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        space, _, name = func.name().partition("::")
        if "c10d" in space and self.phase is not None:
            plain = name.replace("_", "")
            kind = next((k for k in self.KINDS if k in plain), plain)
            self.counts[self.phase, kind] += 1
            # Of a gather or a reduce-scatter both tensors are among the arguments; the smaller is one rank's part.
            sizes = [t.numel() * t.element_size() for t in tensors(args)]
            self.sent[self.phase, kind] += min(sizes, default=0) if kind == "allgather" else max(sizes, default=0)
        return func(*args, **(kwargs or {}))


def tensors(value: Any) -> Iterator[Tensor]:
    """All tensors in nested tuples and lists."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors(item)

"""Capture: copies of every module's output and of its gradient, on both sides; the count of collectives.

Does not own: putting the parts of several ranks together (`meshlora_judge.unshard`). Outputs are copied at once, before
in-place operations overwrite their memory. Only calls inside a forward of the whole model count: recomputation of
activations is not captured again.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from meshlora_ground.compat.torch_operators import TorchDispatchMode
from meshlora_judge.experts import expert_modules, watch_choices, wrappers

# Inside a PEFT layer: the frozen layer, captured separately, and parts of the adapter, which have no counterpart.
_BASE = ".base_layer"
_ADAPTER = (".lora_", ".modules_to_save.", ".original_module", ".parametrizations.", ".token_adapter")
# The trained copy of a block; it is captured under the block's name, and its parts under theirs.
_COPY = ".modules_to_save.default."

SCORES, CHOICES = "#router scores", "#router choices"


@dataclass
class MicroBatchCapture:
    """One forward and its backward.

    Attributes:
        input_ids: `[B, S]`. attention_mask: `[B, S]`, 0 at padding, else the number of the sequence in its row, from 1.
        forward: module -> output, in order of completion; repeated calls of a module are `name#word` or `name#1`. The
            model's logits have the name "". Inputs of experts are `name#router scores` and `name#router choices`,
            `[B*S, k]`.
        backward: module -> gradient of the output.
        base: target of an adapter -> output without the adapter, if the model computes it separately.
        held: `[B, n]`, the positions of the tokens that a rank says it has in its layers; None: all.
    """

    input_ids: Tensor
    attention_mask: Tensor
    held: Tensor | None = None
    forward: dict[str, Tensor] = field(default_factory=dict)
    backward: dict[str, Tensor] = field(default_factory=dict)
    base: dict[str, Tensor] = field(default_factory=dict)


class Capture:
    """Hooks on a Hugging Face causal LM. A context manager; `micro_batches` grows by one with each forward.

    held: the positions of the rank's tokens in the running forward. is_absent: whether a rank says that the module of
    this name is another's in the running forward; what it passes on is not recorded.

    Attributes:
        number: of the micro-batch whose forward may come in parts; None: each forward is one of its own.
        mask: of the next forwards that get none, `[B, S]`.
    """

    def __init__(
        self,
        model: nn.Module,
        held: Callable[[], Tensor | None] = lambda: None,
        is_absent: Callable[[str], bool] = lambda name: False,
    ) -> None:
        self.model, self.held, self.is_absent = model, held, is_absent
        self.number: int | None = None
        self.mask: Tensor | None = None
        self.micro_batches: list[MicroBatchCapture] = []
        self.is_forward = False
        self._calls: Counter[str] = Counter()
        # Of each micro-batch, as it may be followed by the forwards of others before its backward.
        self._without_graphs: dict[int, set[str]] = {}
        self._handles: list[Any] = []

    def __enter__(self) -> Capture:
        self._handles.append(self.model.register_forward_pre_hook(self._begin, with_kwargs=True))
        experts = expert_modules(self.model)
        # Their rows are in another order on each side, and what runs once for each chosen expert (dbrx) is called as
        # often as a micro-batch chooses.
        odd = [path for path, module in self.model.named_modules() if type(module).__name__.endswith("Experts")]
        inside = [f"{name}." for name in (*experts, *odd)]
        inside += _on_logits(self.model)  # which are compared as they leave
        for path, module in self.model.named_modules():
            if isinstance(module, nn.Embedding):  # its norm (inkling) runs before ranks sum up what they look up
                inside.append(f"{path.replace(_COPY, '.')}.")
        wrapped = {f"{path}{_BASE}" for path in wrappers(self.model)}  # their weights include the adapter
        own = tokens_modules(self.model)
        for path, module in self.model.named_modules():
            name = path.replace(_COPY, ".")
            if (
                not own(name)
                or any(part in name for part in _ADAPTER)
                or name.startswith(tuple(inside))
                or name in wrapped
            ):
                continue
            self._handles.append(module.register_forward_hook(self._hook(name), with_kwargs=True))
        if any(p.requires_grad and not own(name) for name, p in self.model.named_parameters()):
            # Gradients would pass the first layer on their way to the tower in micro-batches with images alone, and
            # each topology has its own micro-batches.
            model: Any = self.model
            self._handles.append(model.get_input_embeddings().register_forward_hook(_begin_graph))
        for name, experts_module in experts.items():
            self._handles += watch_choices(self.model, name, experts_module, self._keep_choices(name))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _begin(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        held = self.held()
        if held is not None:
            held = copy(held)
        if self.number is None or self.number >= len(self.micro_batches):
            given = kwargs
            if kwargs.get("decoder_input_ids") is not None:  # beside an encoder, which has other tokens
                given = {name: kwargs.get(f"decoder_{name}") for name in ("input_ids", "attention_mask")}
            if given.get("position_ids") is None and given.get("attention_mask") is None:
                given = given | {"attention_mask": self.mask}
            self.micro_batches.append(MicroBatchCapture(copy(given["input_ids"]), sequence_numbers(given), held))
            self._without_graphs[id(self.micro_batches[-1])] = set()
        self._current = self.micro_batches[-1]
        if self.number is not None:
            self._current = self.micro_batches[self.number]
        self.is_forward = True
        self._calls.clear()

    def again(self, number: int) -> None:
        """The backward of micro-batch `number` begins, in which its layers may run again."""
        self._current, self.is_forward = self.micro_batches[number], False

    @property
    def _without_graph(self) -> set[str]:
        """Of the running micro-batch: modules whose forward had no graph."""
        return self._without_graphs.setdefault(id(self._current), set())

    def _hook(self, name: str) -> Any:
        def hook(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            tensor = first_tensor(output)
            if self.is_absent(name):
                self.is_forward = self.is_forward and name != ""
                return
            if name == "" and not _has_values(tensor):  # placeholder logits
                self.is_forward = False
            if tensor is None or not _has_values(tensor) or not tensor.is_floating_point() or not self.micro_batches:
                return
            # Repeated calls are distinguished by a string argument (a rotary embedding's layer type, in an order that
            # may differ between processes), else by their number.
            call = name + "".join(f"#{word}" for word in (*args, *kwargs.values()) if isinstance(word, str))
            if self.is_forward:
                before, key = self._calls[call], call
                if before:
                    key = f"{call}#{before}"
                self._calls[call] += 1
                self._keep(name, key, tensor)
            elif call in self._without_graph:
                self._watch_gradient(call, tensor)

        return hook

    def _keep(self, name: str, key: str, tensor: Tensor) -> None:
        micro = self._current
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
        """A callback that keeps the router's scores and choices for the experts `name`."""

        def keep(scores: Tensor, choices: Tensor) -> None:
            if self.is_forward:
                self._current.forward[f"{name}{SCORES}"] = copy(scores)
                self._current.forward[f"{name}{CHOICES}"] = copy(choices)

        return keep

    def _watch_gradient(self, key: str, tensor: Tensor) -> None:
        """Copy an output's gradient when it arrives. If the first forward had no graph, a recomputed output has one."""
        micro = self._current
        self._without_graph.discard(key)
        if tensor.requires_grad:
            tensor.register_hook(lambda grad: micro.backward.__setitem__(key, copy(grad)))


def _on_logits(model: nn.Module) -> list[str]:
    """What acts on logits (a softcap, of inkling2): the modules without parameters beside the head of a model."""
    find = getattr(model, "get_output_embeddings", None)
    head = find() if find is not None else None
    found = []
    for path, owner in model.named_modules():
        if head is None or not hasattr(owner, "get_output_embeddings") or head not in owner.children():
            continue
        for name, child in owner.named_children():
            if child is not head and next(child.parameters(), None) is None:
                found.append(f"{path}.{name}".removeprefix("."))
    return found


def _begin_graph(_: nn.Module, __: Any, output: Tensor) -> None:
    if torch.is_grad_enabled() and not output.requires_grad:
        output.requires_grad_()


def tokens_modules(model: Any) -> Callable[[str], bool]:
    """Whether a module, by its name, runs on tokens: in a composite no tower and no projector, beside a decoder no
    encoder and no table, of which one side may have one, and the other two that are tied."""
    config = getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        encoder, tables = model.get_encoder(), (nn.Embedding, model.get_input_embeddings().__class__)
        apart = {*encoder.modules()}.union(m for m in model.modules() if isinstance(m, tables))
        left_out = {name for name, module in model.named_modules() if module in apart}
        return lambda name: name not in left_out
    if config is None or config.get_text_config() is config:
        return lambda name: True
    names = {module: name for name, module in model.named_modules()}
    text, inside = names[model.get_decoder()], list[str]()
    for module in (model.get_decoder(), model.get_input_embeddings(), model.get_output_embeddings()):
        if names.get(module):
            inside.append(f"{names[module]}.")

    def is_own(name: str) -> bool:
        # What holds the text part runs on tokens as well, and so does the model itself, "".
        return not name or f"{text}.".startswith(f"{name}.") or f"{name}.".startswith(tuple(inside))

    return is_own


def sequence_numbers(kwargs: Mapping[str, Any]) -> Tensor:
    """For each token of a model's call the number of its sequence in its row, from 1; 0 at padding.

    With position ids and no mask, a sequence begins at each position that is not the previous one plus 1. Without a
    mask padding shows as sequences that the reference does not have.
    """
    mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
    if mask is not None:
        return copy(mask).long()
    if positions is None:
        return torch.ones_like(kwargs["input_ids"], device="cpu")
    positions = positions[0] if positions.ndim == 3 else positions  # with M-RoPE those in the row come first
    follows = positions[:, 1:] == positions[:, :-1] + 1
    return 1 + torch.nn.functional.pad((~follows).long().cumsum(1), (1, 0)).cpu()


def spans(input_ids: Tensor, numbers: Tensor) -> list[tuple[int, int, tuple[int, ...]]]:
    """(row, first position, token ids) of each sequence of a batch; numbers: from `sequence_numbers`."""
    found = []
    for row, (ids, of_row) in enumerate(zip(input_ids.cpu(), numbers, strict=True)):
        for number in of_row[of_row > 0].unique().tolist():
            places = (of_row == number).nonzero().flatten()
            found.append((row, int(places[0]), tuple(ids[places].tolist())))
    return found


def rows_of_tokens(input_ids: Tensor, numbers: Tensor, starts: Mapping[tuple[int, ...], int]) -> Tensor:
    """The row of each of the B·S tokens of a batch in the concatenation of all sequences, `[B*S]`; -1 if in none.

    numbers: from `sequence_numbers`. starts: sequence -> row of its first token.
    """
    rows = torch.full(input_ids.shape, -1, dtype=torch.int64)
    for row, place, sequence in spans(input_ids, numbers):
        if (start := starts.get(sequence)) is not None:
            rows[row, place : place + len(sequence)] = torch.arange(start, start + len(sequence))
    return rows.flatten()


def first_tensor(output: Any) -> Tensor | None:
    """A module's output tensor: alone, first in a tuple, or the logits, else the first, of a transformers output."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, dict) and isinstance(output.get("logits"), Tensor):
        return output["logits"]  # the load-balancing loss may come first
    if isinstance(output, dict):
        output = tuple(output.values())
    if isinstance(output, tuple | list):
        for value in output:
            if isinstance(value, Tensor):
                return value
    return None


def _has_values(tensor: Tensor | None) -> bool:
    """Whether it is an ordinary tensor; a subclass with its own dispatch stands for values that are not computed."""
    return tensor is not None and type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__


def copy(tensor: Tensor) -> Tensor:
    """A detached copy on the CPU that shares no memory."""
    return tensor.detach().to("cpu", copy=True).contiguous()


class CollectiveCounter(TorchDispatchMode):
    """Counts all collectives and messages by phase and kind, at dispatch level; torch's `recv` is a `receive`.

    Attributes:
        phase: the phase to count under; None: do not count.
        counts: (phase, kind) -> calls. sent: (phase, kind) -> bytes contributed by this rank.
    """

    KINDS = ("allreduce", "allgather", "reducescatter", "alltoall", "broadcast")

    def __init__(self) -> None:
        super().__init__()
        self.phase: str | None = None
        self.counts: Counter[tuple[str, str]] = Counter()
        self.sent: Counter[tuple[str, str]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind = self._kind(func)
        if kind and self.phase is not None:
            self.counts[self.phase, kind] += 1
            # Gather and reduce-scatter have both tensors as arguments; the smaller is one rank's part.
            sizes = [t.numel() * t.element_size() for t in tensors(args)] or [0]
            self.sent[self.phase, kind] += min(sizes) if kind == "allgather" else max(sizes)
        return func(*args, **(kwargs or {}))

    @staticmethod
    @functools.cache  # asked for every operator
    def _kind(func: Any) -> str:
        space, _, name = func.name().partition("::")
        if "c10d" not in space:
            return ""
        plain: str = name.replace("_", "")
        if plain.startswith("recv"):
            return "receive"
        for kind in CollectiveCounter.KINDS:
            if kind in plain:
                return kind
        return plain


def tensors(value: Any) -> Iterator[Tensor]:
    """All tensors in nested tuples and lists."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors(item)

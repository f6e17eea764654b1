"""A traced micro-batch with one layer of each kind, on fake tensors: its saved memory, peaks and work.

Owns: building a model on a topology without processes (`assemble`), and tracing a micro-batch through it (`trace`).
Does not own: totals over layers (`meshlora_extra.planner.memory`), messages (`meshlora_extra.planner.communication`).
Nothing here reads the number of collectives, so that the simulation can check them independently.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from meshlora.adapter import attach
from meshlora.adapter.targets.resolve import Target
from meshlora.comm.groups import Axis, Mesh
from meshlora.layers.dropout import replace_dropouts
from meshlora.layers.frozen import FrozenMatrix
from meshlora.layers.head_loss import IGNORED, chunk_tokens, summed_cross_entropy_from_hidden
from meshlora.layers.held_tokens import HeldTokens
from meshlora.layers.linear import ParallelHead
from meshlora.loading.blueprint import Blueprint
from meshlora.loading.guards import guard_model
from meshlora.model.dp_shard import finish_sharding, shard_unit
from meshlora.model.inject import parallelize
from meshlora.model.regions import tensors_in
from meshlora.plan.derive import decoder_layers
from meshlora.plan.layout import Split
from meshlora.plan.rules import ModelPlan
from meshlora.plan.token_order import token_order
from meshlora.run.optimizers import is_frozen
from meshlora.verify.budget import Flow
from meshlora.wings.context import context
from meshlora.wings.experts.module import ParallelExperts
from meshlora_extra.planner.fake import FakeRun, Section, Work
from meshlora_extra.planner.memory import LayerMemory, Phase, StepMemory, packed_like
from meshlora_ground.compat import replaced
from meshlora_ground.errors import UnsupportedError
from meshlora_ground.float64 import wide_dtype
from meshlora_ground.topology import TOKENS, Topology, axis_sets


@dataclass(frozen=True)
class Trace:
    """Of a micro-batch. work: part ("before", "layer 0", "layer 0 back", ..., "chunk", "back") -> its operators."""

    memory: StepMemory
    work: Mapping[str, Counter[Work]]
    flow: Flow


def tokens_of_chunk(vocab: int, dtype: torch.dtype, tokens: int, *, device: str) -> int:
    """Tokens per chunk of the loss, at most `tokens` (`layers.head_loss`). device: cpu or cuda."""
    return min(tokens, chunk_tokens(vocab, wide_dtype(dtype), is_cpu=device == "cpu"))


def model_vocab(model: Any) -> int:
    """Rows of the head of an unsplit model."""
    return int(model.get_output_embeddings().weight.shape[0])


def fake_mesh(topology: Topology, copies: set[int], *, has_experts: bool) -> Mesh:
    """The mesh of rank 0 with groups of the right sizes, all of which use the default process group."""
    axes = {}
    for names in axis_sets(copies, has_experts=has_experts):
        size = topology.size_over(names)
        axes[names] = Axis(size, 0, tuple(range(size)), None)
    return Mesh(topology, 0, torch.device("cpu"), axes)


def assemble(model: Any, blueprint: Blueprint, mesh: Mesh, run: FakeRun, *, optimizer: str) -> Any:
    """Turn `model`, a copy of the blueprint's, into what `meshlora.load` returns, with fake weights and factors.

    optimizer: as in a run file; what it freezes is frozen.

    Called inside `run`, which then counts the states. With `plan.units` the groups of `mesh` must be real.
    """
    plan, adapter = blueprint.plan, blueprint.trained
    cuts = parallelize(model, plan, mesh, targets={*adapter.targets, *plan.quantized}, dtype=model.dtype)
    for name in sorted(plan.quantized):
        leaf = model.get_submodule(name)
        assert isinstance(leaf, FrozenMatrix)
        leaf.hold(packed_like(name, leaf.weight.dtype, plan))
    for unit in plan.units:
        shard_unit(model, unit, plan, mesh)
    if not plan.stages:  # else no stage has both of what could be tied
        model.tie_weights()
    finish_sharding(model, plan, mesh)
    run.hold(model)
    model.meshlora = attach.Runtime(plan, mesh, None, *cuts, attach.Whole(model, plan))
    replace_dropouts(model, plan.model_type, model.meshlora.dropout)
    guard_model(model, plan.topology)

    def factors(target: Target) -> dict[str, Tensor]:
        return {part: torch.empty(shape) for part, shape in target.shapes.items() if part != "magnitude"}

    attach.attach(model, "default", adapter, factors)
    attach.set_adapter(model, "default")
    for factor in attach.active_factors(model):
        factor.parameter.requires_grad_(not is_frozen(factor.name, optimizer))
    model.train()
    return model


def trace(small: Blueprint, *, rows: int, tokens: int, device: str = "cuda", optimizer: str = "adamw") -> Trace:
    """Trace a micro-batch of `rows` sequences of `tokens` tokens. small: blueprint of the shrunk model. device: cpu or
    cuda, whose operators are run. optimizer: as in a run file.

    Under dp_shard, layers are traced with unsharded weights; the cost of gathers is added analytically.

    A simulated job of any size must be open.

    Raises:
        UnsupportedError: a model without an ordinary head; recurrent mixers under cp.
    """
    plan = dataclasses.replace(small.plan, units=())  # gathers are added by formula
    if plan.recurrent:
        rule = "its recurrent mixers run on one cp rank after the other, and it is not planned how long they wait"
        raise UnsupportedError(f"model_type {plan.model_type!r} on {plan.topology}", rule, "plan it without cp")
    run = FakeRun(device)
    own = rows * tokens // plan.topology.size_over(TOKENS)  # tokens of this rank
    chunk_tokens = tokens_of_chunk(model_vocab(small.model), small.model.dtype, own, device=device)
    with run:
        mesh = fake_mesh(plan.topology, plan.copies, has_experts=bool(plan.experts))
        model = assemble(
            copy.deepcopy(small.model), dataclasses.replace(small, plan=plan), mesh, run, optimizer=optimizer
        )
        watch = _Watch(run, model, plan)
        run.begin("before")  # until the first layer begins its own
        with (
            replaced(HeldTokens, "gathered", watch.gathering(HeldTokens.gathered)),
            replaced(context, "attend", watch.attending(context.attend)),
        ):
            ids = torch.zeros(rows, tokens, dtype=torch.int64)  # real, as integers are
            loss = loss_of(model, plan, mesh, ids, chunk_tokens, at_chunk=lambda: run.begin("chunk"))
        run.end()
        watch.release_outputs()
        run.begin("back")
        loss.backward()
        run.end()
    sections = run.sections
    layers = []
    for number, layer in enumerate(decoder_layers(model)[1]):
        gradients = sum(p.grad.nbytes for p in layer.parameters() if p.grad is not None)
        layers.append(_layer_memory(sections, watch, number, gradients))
    before, after, chunk, back = (_phase(sections[name]) for name in ("before", "after", "chunk", "back"))
    memory = StepMemory(before, tuple(layers), after, chunk, back, chunk_tokens)
    return Trace(memory, {name: section.work for name, section in sections.items()}, watch.flow())


def _phase(section: Section) -> Phase:
    return Phase(section.peak_bytes, section.end_bytes)


def _layer_memory(sections: Mapping[str, Section], watch: _Watch, number: int, gradients: int) -> LayerMemory:
    """Memory of one layer, from a trace that keeps every layer's output alive."""
    forward = _phase(sections[f"layer {number}"])
    output = watch.output[number]
    given = watch.output.get(number - 1, 0)  # the first layer's input is freed after the layers
    kept = given * watch.is_kept.get(number - 1, False)
    return LayerMemory(
        Phase(forward.peak, forward.end - given + kept),
        _phase(sections.get(f"layer {number} back", Section(0))),
        forward.end - output,
        output,
        kept,
        gradients,
    )


def loss_of(
    model: Any, plan: ModelPlan, mesh: Mesh, ids: Tensor, num_trained: int, *, at_chunk: Callable[[], None]
) -> Tensor:
    """The loss as in training, over `num_trained` tokens, at most one chunk, as all chunks are alike.

    ids: `[B, S]`. at_chunk: called before the logits of the chunk.
    """
    rows, tokens = ids.shape
    head = model.get_submodule(plan.head) if plan.head else None
    if not isinstance(head, ParallelHead):
        rule = "its head is not an ordinary one"
        raise UnsupportedError(f"model_type {plan.model_type!r}", rule, "it is not planned")
    head.is_lazy = True  # logits are a recipe, computed chunk by chunk
    if mesh.cp.size > 1:
        cut = model.meshlora.context
        cut.next(token_order([[tokens]] * rows, size=mesh.cp.size, is_balanced=cut.balances))
    recipe = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
    trained = [parameter for parameter in head.parameters() if parameter.requires_grad]
    hidden = recipe.hidden.flatten(0, -2)
    labels = ids.new_full((len(hidden),), IGNORED)
    labels[:num_trained] = 0  # any label: times do not depend on it

    def local_logits(hidden: Tensor) -> Tensor:
        at_chunk()
        return recipe.replay(head.local_logits(hidden))

    return summed_cross_entropy_from_hidden(hidden, local_logits, labels, trained, axis=mesh.tp, vocab=recipe.shape[-1])


class _Watch:
    """Hooks that begin the sections of a run, and record where gradients flow."""

    def __init__(self, run: FakeRun, model: Any, plan: ModelPlan) -> None:
        self.run = run
        self.output: dict[int, int] = {}
        self.is_kept: dict[int, bool] = {}
        self._held: dict[int, Tensor] = {}
        self.reached: set[str] = set()
        self.top_k: dict[str, int] = {}
        self.weight_bytes: dict[str, int] = {}
        self.key_bytes: dict[str, int] = {}
        self.keys_reached: set[str] = set()
        self.is_trained_before = False
        self._second = plan.per_layer[0]
        layers = decoder_layers(model)[1]
        for number, layer in enumerate(layers):
            self._watch_layer(layer, number, is_last=number == len(layers) - 1)
        entered, left = [*plan.wide_norms], []  # where a gradient is summed on the way in, and on the way out
        for region in plan.regions:
            if region.is_split:
                entered.append(region.name)
            else:
                left.append(region.name)
        left += [name for name, rule in plan.linears.items() if rule.split is Split.ROW]
        for name in entered:
            note = functools.partial(self._note_input, name)
            model.get_submodule(name).register_forward_pre_hook(note, with_kwargs=True, prepend=True)
        for name in left:
            model.get_submodule(name).register_forward_hook(functools.partial(self._note_output, name))
        self._attention = ""
        for name in plan.attentions:
            model.get_submodule(name).register_forward_pre_hook(functools.partial(self._enter_attention, name))
        for name in plan.experts:
            model.get_submodule(name).register_forward_pre_hook(functools.partial(self._enter_experts, name))

    def flow(self) -> Flow:
        return Flow(
            frozenset(self.reached),
            self.top_k,
            self.weight_bytes,
            self.key_bytes,
            frozenset(self.keys_reached),
            self.is_trained_before,
        )

    def gathering(self, gathered: Callable[[HeldTokens, Tensor], Tensor]) -> Callable[[HeldTokens, Tensor], Tensor]:
        """`HeldTokens.gathered`, which also records the keys and values of an attention."""

        def record(held: HeldTokens, pair: Tensor) -> Tensor:
            self._note_keys(pair, [pair])
            return gathered(held, pair)

        return record

    def attending(self, attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """`attend`, which also records the keys and values that are passed round a ring, with their gradients."""

        def record(query: Tensor, pair: Tensor, sinks: Tensor | None, parts: Sequence[Any], *rest: Any) -> Tensor:
            if len(parts) > 1:
                self._note_keys(pair, [query, pair, sinks])
            return attend(query, pair, sinks, parts, *rest)

        return record

    def _note_keys(self, pair: Tensor, given: Sequence[Tensor | None]) -> None:
        self.key_bytes[self._attention] = pair[0, 0].nbytes
        if _has_gradient(given):
            self.keys_reached.add(self._attention)

    def _enter_attention(self, name: str, *_: Any) -> None:
        self._attention = name

    def release_outputs(self) -> None:
        """Release the layers' outputs, and record which are still alive, saved by the next layer for its backward."""
        for number in list(self._held):
            before = self.run.live_bytes
            del self._held[number]
            self.is_kept[number] = self.run.live_bytes == before  # nothing was freed: the next layer holds it

    def _watch_layer(self, layer: nn.Module, number: int, *, is_last: bool) -> None:
        def enter(_: nn.Module, args: Any, kwargs: Any) -> None:
            if number == 0 and self._second:
                self.is_trained_before = _has_gradient(args[:1])
                if _has_gradient((args[1:], kwargs)):
                    self.reached.add(self._second)
            elif number == 0:
                self.is_trained_before = _has_gradient((args, kwargs))
            self.run.begin(f"layer {number}")

        def leave(_: nn.Module, args: Any, output: Any) -> None:
            hidden = output[0] if isinstance(output, tuple | list) else output
            self.output[number] = hidden.nbytes
            self._held[number] = hidden  # until `release_outputs` sees who else holds it
            if hidden.requires_grad:
                # Called when the backward reaches the layer's output.
                hidden.register_hook(lambda _: self.run.begin(f"layer {number} back"))
            if is_last:
                self.run.begin("after")

        layer.register_forward_pre_hook(enter, with_kwargs=True, prepend=True)
        # Before the hook that gathers the tokens after the last layer.
        layer.register_forward_hook(leave, prepend=True)

    def _note_input(self, name: str, _: nn.Module, *given: Any) -> None:
        if _has_gradient(given):
            self.reached.add(name)

    def _note_output(self, name: str, _: nn.Module, __: Any, output: Any) -> None:
        if _has_gradient(output):
            self.reached.add(name)

    def _enter_experts(self, name: str, module: nn.Module, args: Any) -> None:
        assert isinstance(module, ParallelExperts)
        hidden, chosen, weights = args
        self.top_k[name], self.weight_bytes[name] = chosen.shape[-1], weights.element_size()
        if hidden.requires_grad or weights.requires_grad:
            self.reached.add(name)


def _has_gradient(value: Any) -> bool:
    return any(tensor.requires_grad for tensor in tensors_in(value))

"""Stages of a pipeline: the Hugging Face model without what other ranks have.

Owns: taking modules of other ranks out, which of a rank's stages runs, and where the residual stream enters and leaves
it. Does not own: which layers are whose (`wings.stages.cut`), the messages (`comm.collectives`), the order of
micro-batches (`wings.stages.pipeline_schedule`).

Each stage runs the model's own forward with the same arguments, so it makes its own masks, positions and rotary tables,
and nothing but the residual stream is sent. Modules of other stages pass their input on; those of other ranks are empty
besides. The embedding then gives zeros, the layer before a stage's first one the residual stream of the stage before,
and the layer after its last one sends it on. Layers keep their numbers.

Towers, second inputs of layers (gemma4) and states of earlier blocks on their way: docs/parallelism.md, "Stages of
layers".
"""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionCacheLayerMixin

from meshlora.comm.collectives import broadcast_of
from meshlora.comm.groups import Mesh
from meshlora.comm.messages import hand_on, open_channel, take_over
from meshlora.model.pipeline import Pipeline
from meshlora.model.regions import SECOND_INPUTS
from meshlora.plan.pairs import check
from meshlora.plan.rules import ModelPlan
from meshlora.wings.mixers.block_states import BlockStates
from meshlora.wings.stages.cut import beside_text


class HeldStages(Pipeline):
    """The running forward's way through this rank's stages. One object per model.

    plan: of this rank. stage: outside of `at` the last of this rank.
    """

    def __init__(self, mesh: Mesh, plan: ModelPlan) -> None:
        super().__init__()
        self.mesh, self.plan = mesh, plan
        self.stage, self._is_chosen, self._is_alone = plan.own_stages[-1], False, False
        self._shape: tuple[int, ...] = ()
        # The stream, states of earlier blocks, and the second inputs of the layers after the running stage.
        self._sending: list[Tensor] = []
        self._second: dict[int, Tensor] = {}  # layer -> its second input, as the stage before has sent it
        self._states: BlockStates | None = None
        for channel in mesh.channels.in_order:
            open_channel(channel)

    @property
    def is_last(self) -> bool:
        """As in `Pipeline`."""
        return self.stage == len(self.plan.stages) - 1

    @contextlib.contextmanager
    def at(self, stage: int) -> Iterator[None]:
        """As in `Pipeline`."""
        before = self.stage, self._is_chosen
        self.stage, self._is_chosen = stage, True
        try:
            yield
        finally:
            self.stage, self._is_chosen = before

    def earlier(self) -> Iterator[int]:
        """As in `Pipeline`."""
        if self._is_chosen:  # inside of `at`: it runs that one alone
            return
        for stage in self.plan.own_stages[:-1]:
            with self.at(stage):
                yield stage

    def runs(self, name: str) -> bool:
        """As in `Pipeline`."""
        return self.plan.stage_of(name) == self.stage

    def signal(self) -> Tensor:
        """As in `Pipeline`."""
        assert self.sent is not None, "no forward has run"
        found, self.sent = self.sent, None  # once: it holds the graph of its forward
        return found

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """As in `Pipeline`."""
        before, self._is_alone = self._is_alone, True
        try:
            yield
        finally:
            self._is_alone = before

    def whole(self, x: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
        """As in `Pipeline`."""
        pp, own = self.mesh.pp, x.detach().to(dtype)
        found = broadcast_of(own, own, pp, source=pp.size - 1, device=x.device)
        if pp.rank == pp.size - 1:
            return x
        return found.to(x.dtype) + x  # x is 0, and has the backward of what was sent

    def passed(self, layer: int, x: Tensor, second: Any = None) -> Tensor:
        """What `layer`, of another stage, makes of the residual stream. second: its other input, if it has one."""
        plan = self.plan
        first, stop = plan.stages[self.stage]
        channels = self.mesh.channels
        has_second = bool(plan.per_layer[0])
        if layer == first - 1:
            like = self.enter(x)
            sizes = [width := like.shape[-1]]
            if self._states is not None:
                sizes.append(width * self._states.before[first])
            if has_second:
                sizes += [plan.per_layer[1]] * (plan.num_layers - first)
            if len(sizes) == 1:
                return take_over(like, channels.from_before, channels.to_before)
            like = like.new_empty(*like.shape[:-1], sum(sizes))
            x, *others = take_over(like, channels.from_before, channels.to_before).split(sizes, -1)
            if self._states is not None:
                self._states.take(first, others.pop(0))
            self._second = dict(enumerate(others, first))
            return x.contiguous()
        if layer < stop:
            return x
        if layer == stop:
            self._sending = [x]
            if self._states is not None:
                self._sending.append(self._states.given(stop))
            x = x.new_zeros(*self._shape, x.shape[-1])  # of what follows nothing is used
        if has_second:
            self._sending.append(self._second_of(layer, second))
        if layer == (plan.num_layers - 1 if has_second else stop):
            sent = torch.cat(self._sending, -1) if len(self._sending) > 1 else self._sending[0]
            self._sending = []
            self.sent = hand_on(sent, channels.to_next, channels.from_next)
        return x

    def _second_of(self, layer: int, made: Tensor) -> Tensor:
        """The second input of `layer` as this rank has the stream. made: by this rank's own code."""
        if self.stage > 0:
            return self._second[layer]
        # That of a layer of this rank, of a later stage, is cut by the layer's hooks.
        return made if self.plan.holds(f"{self.plan.layers}.{layer}") else self.enter(made)

    def _give_second_inputs(self, layers: nn.ModuleList) -> None:
        """Let the layers of this rank take what other stages have sent, whatever this rank's own code makes."""

        def give(index: int, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if self.stage == 0 or index not in self._second:
                return args, kwargs
            return args[:1], kwargs | {SECOND_INPUTS[0]: self._second[index]}  # it is the second by place, too

        for index, layer in enumerate(layers):
            if self.plan.holds(f"{self.plan.layers}.{index}"):
                layer.register_forward_pre_hook(functools.partial(give, index), with_kwargs=True)
        self.note_also(lambda: functools.partial(setattr, self, "_second", self._second))

    def begin(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Note the shape `[B, S]` of the tokens of a forward that begins; keep what its stage needs of `kwargs`."""
        for name in ("inputs_embeds", "return_dict"):  # stages make positions of tokens, and give what has a name
            if kwargs.get(name, True) is not True and kwargs[name] is not None:
                check({"topology": self.mesh.topology, "argument": f"{name} of a forward"})
        tokens = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        self._shape = tuple(tokens.shape)
        if self.stage == 0:
            return args, kwargs
        return args, without_images(kwargs)

    def end(self, model: Any, _: Any, output: Any) -> None:
        """Give all stages the logits `[B, S, V]` of the last, after a forward that is not of one stage alone."""
        logits = output.get("logits") if isinstance(output, Mapping) else None
        if self._is_alone or self._is_chosen or logits is None:
            return
        if not self.is_last:
            signal = self.signal() if torch.is_grad_enabled() else logits.new_zeros(())
            # Inkling leaves out rows of its head that are padding.
            vocab = getattr(model.config.get_text_config(), "unpadded_vocab_size", None)
            vocab = vocab or model.get_output_embeddings().out_features
            logits = signal.to(logits.dtype).expand(*logits.shape[:-1], vocab)
        output.logits = self.whole(logits, logits.dtype)

    def take_turns(self, model: Any) -> None:
        """As in `Pipeline`."""
        plan = self.plan
        if isinstance(states := getattr(model, "block_states", None), BlockStates):
            self._states = states
            states.is_running = lambda layer: self.runs(f"{plan.layers}.{layer}")
        if plan.per_layer[0]:
            self._give_second_inputs(model.get_submodule(plan.layers))
        if len(plan.own_stages) == 1:
            return
        if plan.has_first_stage:
            for name in filter(None, (plan.embedding, plan.per_layer[0])):
                embedding = model.get_submodule(name)
                zeros = functools.partial(_zeros, embedding.embedding_dim, embedding.weight.dtype)
                _unless(embedding, functools.partial(self.runs, name), zeros)
        if plan.has_last_stage:
            for name in plan.after:
                _unless(model.get_submodule(name), functools.partial(self.runs, name), _in_place_of(name, plan.head))


def hold_stages(model: Any, plan: ModelPlan, mesh: Mesh) -> HeldStages | None:
    """Take out of `model`, on the meta device, what other ranks have, and let its layers take turns. plan: of a rank.

    Returns None where no other rank has anything.
    """
    if not plan.stages:
        return None
    pipeline = HeldStages(mesh, plan)
    model.register_forward_pre_hook(pipeline.begin, with_kwargs=True)
    model.register_forward_hook(pipeline.end)
    for index, layer in enumerate(model.get_submodule(plan.layers)):
        names = [*inspect.signature(layer.forward).parameters]
        passed = functools.partial(
            _pass_layer, functools.partial(pipeline.passed, index), index, names, _returned(type(layer))
        )
        _unless(layer, functools.partial(pipeline.runs, f"{plan.layers}.{index}"), passed)
    tables = [model.get_input_embeddings()]
    if plan.per_layer[0]:
        tables.append(model.get_submodule(plan.per_layer[0]))
    if not plan.has_first_stage:
        for table in tables:
            _unless(table, _never, functools.partial(_zeros, table.embedding_dim, table.weight.dtype))
    if not plan.has_last_stage:
        head = next(name for name, module in model.named_modules() if module is model.get_output_embeddings())
        for name in plan.after:
            _unless(model.get_submodule(name), _never, _in_place_of(name, head))
    for name, module in model.named_modules():
        is_inside = name.startswith(f"{plan.layers}.") or name in plan.after
        if is_inside and not plan.holds(name):
            weight = getattr(module, "weight", None)
            _empty(module)
            if module is model.get_output_embeddings() and weight is not None:
                # No tensor, which others would take for a weight: hy_v4 itself asks for the dtype of its head's.
                vars(module)["weight"] = SimpleNamespace(dtype=weight.dtype)
    if not plan.has_first_stage:
        for table in tables:
            _empty(table)
        # Some models make their positions on its device.
        weight = tables[0].weight
        stand_in = weight.new_empty(0, device=mesh.device)
        if plan.per_layer[0]:  # gemma4 looks at its row of padding: one of zeros stands for all
            stand_in = weight.new_zeros(1, weight.shape[1], device=mesh.device).expand(weight.shape)
        vars(tables[0])["weight"] = stand_in
        for name in beside_text(model, plan):
            _empty(model.get_submodule(name))
        for name, module in model.named_modules():
            if plan.text.startswith(f"{name}."):  # around it: `image_newline` of llava_next
                _take_out(module, module.named_parameters(recurse=False))
    return pipeline


def without_images(given: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a model without what a tower sees, which the first stage has: numbers that are no mask's."""
    found = {}
    for name, value in given.items():
        is_float = isinstance(value, Tensor) and value.is_floating_point()
        if not is_float or name in ("attention_mask", "num_items_in_batch"):
            found[name] = value
    return found


def _never() -> bool:
    return False


def _in_place_of(name: str, head: str) -> Callable[..., Any]:
    """What a stage does that does not run module `name`, of those after the layers."""
    if name == head:
        return _narrow
    return _first


def _zeros(size: int, dtype: torch.dtype, input_ids: Tensor, *_: Any, **__: Any) -> Tensor:
    return torch.zeros(*input_ids.shape, size, dtype=dtype, device=input_ids.device)  # some families write into it


def _first(x: Tensor, *_: Any, **__: Any) -> Tensor:
    return x


def _narrow(x: Tensor) -> Tensor:
    return x[..., :1]  # what models do to logits is done to less


def _returned(kind: Any) -> int:
    """The length of the tuple that a decoder layer returns; 0: it returns a tensor, whatever its annotation says."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(kind.forward))))
    except (OSError, SyntaxError):
        return 0
    lengths, longest = dict[str, int](), 0
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Assign | ast.Return)]
    for node in sorted(nodes, key=lambda node: isinstance(node, ast.Return)):  # `outputs = (hidden_states,)` first
        # `return (hidden_states,) + outputs`
        value = node.value.left if isinstance(node.value, ast.BinOp) else node.value
        length = len(value.elts) if isinstance(value, ast.Tuple | ast.List) else 0
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            lengths[name] = max(length, lengths.get(name, 0))
        elif isinstance(node, ast.Return):
            longest = max(longest, lengths.get(value.id, 0) if isinstance(value, ast.Name) else length)
    return longest


def _pass_layer(
    passed: Callable[..., Tensor], index: int, names: Sequence[str], length: int, *args: Any, **kwargs: Any
) -> Any:
    """`passed` of the residual stream, alone or first in a tuple, as the layer's own forward returns it.

    index: of the layer. names: of the layer's arguments, in order.
    """
    given = dict(zip(names, args, strict=False)) | kwargs
    x = args[0] if args else kwargs["hidden_states"]
    for value in given.values():
        if isinstance(value, Cache):  # under a name of the family's, or of the version's
            note_tokens(value, index, x)
    x = passed(x, given.get(SECOND_INPUTS[0]))
    if length == 0:
        return x
    return (x, *[None] * (length - 1))


def note_tokens(cache: Cache, layer: int, x: Tensor) -> None:
    """Let `cache` know that `layer`, of another stage, has had the tokens x `[B, S, H]`: a model makes its masks and
    positions of the lengths that any of its layers has in it.
    """
    held = cache.layers[layer] if layer < len(cache.layers) else None
    if isinstance(held, LinearAttentionCacheLayerMixin):
        held.has_previous_state = dict.fromkeys(held.has_previous_state, True)
    if held is None or isinstance(held, CacheLayerMixin):
        # One number a token: it is counted, and never read.
        one = x.new_zeros(*x.shape[:1], 1, x.shape[1], 1)
        cache.update(one, one, layer)


def _unless(module: nn.Module, is_running: Callable[[], bool], other: Callable[..., Any]) -> None:
    """Let `module` run `other` in place of its own forward, unless `is_running`."""
    own = vars(module).get("forward")  # that of this module alone, if it was given one

    @functools.wraps(module.forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not is_running():
            return other(*args, **kwargs)
        # Its class may have changed: that of an embedding does with its adapter.
        if own is None:
            return type(module).forward(module, *args, **kwargs)
        return own(*args, **kwargs)

    module.forward = run


def _empty(module: nn.Module) -> None:
    """Take out what `module` contains, on the meta device. It keeps plain attributes of their names, which are none of
    its modules, parameters or buffers any more: code of the model asks for the dtype of a head's weight, or fills
    buffers in all layers.
    """
    for contents in (
        module.named_children(),
        module.named_parameters(recurse=False),
        module.named_buffers(recurse=False),
    ):
        _take_out(module, contents)


def _take_out(module: nn.Module, contents: Iterator[tuple[str, Any]]) -> None:
    for name, value in list(contents):  # what is walked over loses its entries
        delattr(module, name)
        vars(module)[name] = value  # past nn.Module, which would take it in again

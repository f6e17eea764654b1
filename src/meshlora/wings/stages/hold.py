"""Stages of a pipeline: the Hugging Face model without what other ranks have.

Owns: taking modules of other ranks out, which of a rank's stages runs, and where the residual stream enters and leaves
it. Does not own: which layers are whose (`wings.stages.cut`), the messages (`comm.collectives`), the order of
micro-batches (`wings.stages.pipeline_schedule`).

Each stage runs the model's own forward with the same arguments, so it makes its own masks, positions and rotary tables,
and nothing but the residual stream is sent. Modules of other stages pass their input on; those of other ranks are empty
besides. The embedding then gives zeros, the layer before a stage's first one the residual stream of the stage before,
and the layer after its last one sends it on. Layers keep their numbers.

Towers and projectors of a composite are of the first stage: what they make is in the stream when its layers begin.
Others are given what positions and masks are made of (grids, token types), without pixels, and so run no tower.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from meshlora.comm.groups import Mesh
from meshlora.comm.messages import hand_on, open_channel, take_over
from meshlora.model.pipeline import Pipeline
from meshlora.plan.rules import ModelPlan
from meshlora.wings.stages.cut import beside_text


class HeldStages(Pipeline):
    """The running forward's way through this rank's stages. One object per model.

    plan: of this rank. stage: outside of `at` the last of this rank.
    """

    def __init__(self, mesh: Mesh, plan: ModelPlan) -> None:
        super().__init__()
        self.mesh, self.plan = mesh, plan
        self.stage, self._is_chosen = plan.own_stages[-1], False
        self._signal: Tensor | None = None
        self._shape: tuple[int, ...] = ()
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
        assert self._signal is not None, "no forward has run"
        found, self._signal = self._signal, None  # once: it holds the graph of its forward
        return found

    def passed(self, layer: int, x: Tensor) -> Tensor:
        """What `layer`, of another stage, makes of the residual stream."""
        first, stop = self.plan.stages[self.stage]
        channels = self.mesh.channels
        if layer == first - 1:
            return take_over(self.enter(x), channels.from_before, channels.to_before)
        if layer == stop:
            self._signal = hand_on(x, channels.to_next, channels.from_next)
            return x.new_zeros(*self._shape, x.shape[-1])  # of what follows nothing is used
        return x

    def begin(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Note the shape `[B, S]` of the tokens of a forward that begins; keep what its stage needs of `kwargs`."""
        tokens = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        self._shape = tuple(tokens.shape)
        if self.stage == 0:
            return args, kwargs
        return args, {name: value for name, value in kwargs.items() if not _is_of_tower(name, value)}

    def take_turns(self, model: Any) -> None:
        """As in `Pipeline`."""
        plan = self.plan
        if len(plan.own_stages) == 1:
            return
        embedding = model.get_input_embeddings()
        if plan.has_first_stage:
            zeros = functools.partial(_zeros, embedding.embedding_dim, embedding.weight.dtype)
            _unless(embedding, functools.partial(self.runs, plan.embedding), zeros)
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
    for index, layer in enumerate(model.get_submodule(plan.layers)):
        passed = functools.partial(_pass_layer, functools.partial(pipeline.passed, index), _returned(type(layer)))
        _unless(layer, functools.partial(pipeline.runs, f"{plan.layers}.{index}"), passed)
    embedding = model.get_input_embeddings()
    zeros = functools.partial(_zeros, embedding.embedding_dim, embedding.weight.dtype)
    if not plan.has_first_stage:
        _unless(embedding, _never, zeros)
    if not plan.has_last_stage:
        head = _head(model)
        for name in plan.after:
            _unless(model.get_submodule(name), _never, _in_place_of(name, head))
    for name, module in model.named_modules():
        is_inside = name.startswith(f"{plan.layers}.") or name in plan.after
        if is_inside and not plan.holds(name):
            _empty(module)
    if not plan.has_first_stage:
        _empty(embedding)
        # Some models make their positions on its device.
        vars(embedding)["weight"] = embedding.weight.new_empty(0, device=mesh.device)
        for name in beside_text(model, plan):
            _empty(model.get_submodule(name))
        for name, module in model.named_modules():
            if plan.text.startswith(f"{name}."):  # around it: `image_newline` of llava_next
                _take_out(module, module.named_parameters(recurse=False))
    return pipeline


def _head(model: Any) -> str:
    return next(name for name, module in model.named_modules() if module is model.get_output_embeddings())


def _is_of_tower(name: str, value: Any) -> bool:
    """Whether an argument of a model's forward is what a tower sees: numbers that are no mask's."""
    return isinstance(value, Tensor) and value.is_floating_point() and name != "attention_mask"


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
    longest = 0
    for node in ast.walk(tree):
        if not isinstance(node, ast.Return):
            continue
        if isinstance(node.value, ast.Tuple):
            longest = max(longest, len(node.value.elts))
        elif isinstance(node.value, ast.Name) and "output" in node.value.id:  # `outputs = (hidden_states,)`
            longest = max(longest, 1)
    return longest


def _pass_layer(passed: Callable[[Tensor], Tensor], length: int, *args: Any, **kwargs: Any) -> Any:
    """`passed` of the residual stream, alone or first in a tuple, as the layer's own forward returns it."""
    x = passed(args[0] if args else kwargs["hidden_states"])
    if length == 0:
        return x
    return (x, *[None] * (length - 1))


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

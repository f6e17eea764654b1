"""What a trainer does in an optimizer step, recorded from outside: a few hooks, in the trainer's own processes.

Owns: when what is copied. Each rank writes its own file when a recorded step ends; nothing of the trainer is changed
but dropout, whose masks nobody could replay. Does not own: how tensors lie (`recording.tensors`), what a trainer's
loss is (`recording.losses`), the files (`recording.files`).

A step ends when a torch optimizer that has trained parameters of the model has stepped. Before clipping: the gradients
as clipping found them, or without it as the last backward left them, after what DDP and FSDP do at its end. After
clipping: as the optimizer takes them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from meshlora_ground.compat import replaced
from meshlora_ground.compat.torch_tensors import clippings
from meshlora_ground.errors import UserError
from meshlora_judge.recording.dropout import without_dropout
from meshlora_judge.recording.files import Recording, Step, check_free
from meshlora_judge.recording.losses import loss_of, trainer_parts
from meshlora_judge.recording.names import Names, as_function
from meshlora_judge.recording.tensors import (
    copied,
    fingerprint,
    full_state,
    gathered,
    is_fsdp1,
    local,
    placement,
    plain,
    rank_and_size,
    unwrapped,
    whole,
    whole_gradients,
)

_NUMBERS = (bool, int, float, str)


class Recorder:
    """What one rank saw of the first `steps` optimizer steps.

    Attributes:
        recording: what is written. is_done: all steps are recorded, and the trainer is as it was.
        then: called once after the last recorded step.
    """

    def __init__(
        self,
        model: nn.Module,
        folder: Path,
        *,
        steps: int,
        loss: Mapping[str, Any],
        max_norm: float | None = None,
        adapter: Any = None,
        names: Names = None,
    ) -> None:
        self.model, self.folder, self.steps = model, folder, steps
        self._max_norm = max_norm
        self._adapter, self._named = adapter, as_function(names)
        rank, size = rank_and_size()
        self.recording = Recording(rank=rank, world_size=size, loss=dict(loss))
        self.is_done = False
        self.then: Callable[[], None] | None = None
        self._step = Step()
        self._further: dict[str, Any] = {}
        self._left: dict[str, Tensor] = {}
        self._raw: dict[str, Tensor] = {}
        self._depth = 0
        self._is_clipped = False
        self._stack = ExitStack()
        self._is_described = False

    # What a loop of its own may say.

    def note(self, **tensors: Any) -> None:
        """Keep what the model's next forward is not given but its loss depends on: labels, advantages."""
        self._further.update(_kept(tensors))

    # When it listens.

    def start(self) -> None:
        inner = unwrapped(self.model)
        self._stack.callback(without_dropout(inner, self.recording.notes))
        hooks = [
            inner.register_forward_pre_hook(self._called, with_kwargs=True),
            _first_leaf(inner).register_forward_pre_hook(self._computes),
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        for hook in hooks:
            self._stack.callback(hook.remove)
        self._hear(torch.autograd, "backward", self._backward)
        for owner, name in clippings():
            self._hear(owner, name, self._clipped)
        self._hear(FullyShardedDataParallel, "clip_grad_norm_", self._clipped_by_fsdp)
        self._hear(torch.amp.GradScaler, "unscale_", self._unscaled)
        self._hear(torch.amp.GradScaler, "step", self._scaler_steps)

    def _hear(self, owner: Any, name: str, by: Callable[..., Any]) -> None:
        """Until the end `owner.name` goes through `by`, which is given the original first."""
        original = getattr(owner, name)

        @functools.wraps(original)
        def through(*args: Any, **kwargs: Any) -> Any:
            return by(original, *args, **kwargs)

        self._stack.enter_context(replaced(owner, name, through))

    def stop(self) -> None:
        """Leave the trainer as it was."""
        self._stack.close()
        self.is_done = True

    # What it hears.

    def _called(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.is_grad_enabled() or not self.model.training:
            return
        given = _kept(kwargs) | self._further
        self._further = {}
        if args and isinstance(args[0], Tensor):
            given.setdefault("input_ids", args[0].detach().cpu().clone())
        # What is there before the step's first forward was not cleared.
        if not self._step.micro_batches:
            self._left = self._gradients()
        self._step.micro_batches.append(given)

    def _computes(self, _: nn.Module, args: tuple[Any, ...]) -> None:
        """Inside the model: Trainers turn autocast on and off around its forward."""
        kind = args[0].device.type if args and isinstance(args[0], Tensor) else "cpu"
        if torch.is_autocast_enabled(kind):
            self.recording.autocast = str(torch.get_autocast_dtype(kind)).removeprefix("torch.")

    def _backward(self, original: Callable[..., Any], tensors: Any, *args: Any, **kwargs: Any) -> Any:
        self._depth += 1  # recomputed layers have backwards of their own inside
        try:
            found = original(tensors, *args, **kwargs)
        finally:
            self._depth -= 1
        if self._depth:
            return found
        roots = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        self._step.losses.append(float(sum(root.detach().double().sum() for root in roots)))
        self._raw, self._is_clipped = self._gradients(), False
        return found

    def _gradients(self) -> dict[str, Tensor]:
        """As they lie on this rank."""
        return {name: copied(p.grad) for name, p in self._trained().items() if p.grad is not None}

    def _keep_unclipped(self) -> None:
        """Before the first clipping of a step: loops of their own sum over ranks, and unscale, after the backward."""
        if not self._is_clipped:
            self._raw, self._is_clipped = self._gradients(), True

    def _note_clip(self, max_norm: float, norm: Tensor) -> None:
        calls = self._step.clip.get("calls", 0) + 1
        self._step.clip = {"max_norm": float(max_norm), "norm": float(whole(norm)), "calls": calls}

    def _clipped(
        self,
        original: Callable[..., Any],
        parameters: Any,
        max_norm: float,
        total_norm: Tensor,
        *rest: Any,
        **more: Any,
    ) -> Any:
        self._keep_unclipped()
        self._note_clip(max_norm, total_norm)
        return original(parameters, max_norm, total_norm, *rest, **more)

    def _clipped_by_fsdp(self, original: Callable[..., Any], model: Any, max_norm: float, *rest: Any) -> Any:
        self._keep_unclipped()
        norm = original(model, max_norm, *rest)
        self._note_clip(max_norm, norm)
        return norm

    def _unscaled(self, original: Callable[..., Any], scaler: Any, optimizer: Any) -> Any:
        """What a loss scale multiplied is no gradient before it is divided again."""
        found = original(scaler, optimizer)
        if self._is_ours(optimizer):
            self._raw = self._gradients()
        return found

    def _scaler_steps(
        self, original: Callable[..., Any], scaler: Any, optimizer: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """A step that the scaler leaves out, as its gradients overflowed, is none."""
        before = len(self.recording.steps)
        found = original(scaler, optimizer, *args, **kwargs)
        if len(self.recording.steps) == before and self._is_ours(optimizer):
            self._step, self._raw = Step(), {}
        return found

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not self._is_ours(optimizer):
            return
        self._describe()
        step = self._step
        if self._max_norm and not step.clip:
            step.clip = {"max_norm": float(self._max_norm)}
        # Outside of `gathered`: `full_state` gathers by itself.
        names = {parameter: name for name, parameter in self._trained().items()}
        step.optimizer = _described(optimizer, names, full_state(self.model, self._trained, optimizer))
        with gathered(self.model):
            trained = self._trained()
            step.before = {name: whole(parameter) for name, parameter in trained.items()}
            step.clipped = {name: whole(p.grad) for name, p in trained.items() if p.grad is not None}
        step.left = whole_gradients(self.model, self._trained, self._left)
        step.raw = whole_gradients(self.model, self._trained, self._raw)

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not self._is_ours(optimizer):
            return
        with gathered(self.model):
            self._step.after = {name: whole(parameter) for name, parameter in self._trained().items()}
        self.recording.steps.append(self._step)
        self._step, self._raw = Step(), {}
        # After each step: a run that is killed leaves what it had.
        self.recording.write(self.folder)
        if len(self.recording.steps) == self.steps:
            self.stop()
            if self.then is not None:
                self.then()

    # What it knows of the model.

    def _trained(self) -> dict[str, nn.Parameter]:
        """By PEFT's name. Looked up each time: FSDP2 puts other parameters into a model's place."""
        return {self._named(plain(name)): p for name, p in self.model.named_parameters() if p.requires_grad}

    def _is_ours(self, optimizer: Any) -> bool:
        ours = set(map(id, self._trained().values()))
        return any(id(p) in ours for group in optimizer.param_groups for p in group["params"])

    def _describe(self) -> None:
        """Once: what the model is, and how it lies."""
        if self._is_described:
            return
        self._is_described = True
        found, inner = self.recording, unwrapped(self.model)
        is_flat = is_fsdp1(self.model)
        found.fsdp = is_flat or any(isinstance(module, FSDPModule) for module in self.model.modules())
        if inner is not self.model:
            found.wrapper = type(self.model).__name__
        configs = getattr(inner, "peft_config", None) or {}
        # A model that is not PEFT's has none, and who records it may say which PEFT would take.
        if not configs and self._adapter is not None:
            configs = {"default": self._adapter}
        found.adapters = {name: _plain_config(config) for name, config in configs.items()}
        active = getattr(inner, "active_adapters", None) or []
        if callable(active):  # a method of transformers' models, a property of PEFT's
            active = active()
        found.active = list(active)
        config = getattr(inner, "config", None)
        if config is not None and hasattr(config, "to_dict"):
            found.config = _plain_config(config)
            found.base = str(getattr(config, "name_or_path", "") or "")
        with gathered(self.model):
            for name, parameter in self.model.named_parameters():
                name = self._named(plain(name))
                lies = placement(parameter) | {"dtype": str(parameter.dtype).removeprefix("torch.")}
                part = local(parameter)
                if part.numel() and not parameter.requires_grad:
                    lies["fingerprint"] = fingerprint(part)
                if is_flat:
                    lies["kind"] = "fsdp1"
                if parameter.requires_grad:
                    found.trained[name] = lies
                    continue
                found.frozen[name] = lies
                # A frozen adapter is in no base that the judge could read: it is kept whole.
                if any(part in found.adapters for part in name.split(".")):
                    found.frozen_adapters[name] = whole(parameter)


@contextmanager
def record(
    subject: Any,
    folder: str | Path,
    *,
    optimizer: Any = None,
    steps: int = 1,
    loss: Mapping[str, Any] | None = None,
    max_norm: float | None = None,
    adapter: Any = None,
    names: Names = None,
) -> Iterator[Recorder]:
    """Record the next `steps` optimizer steps of any torch trainer, on every rank, into `folder`.

        with meshlora_judge.record(model, "seen") as step:
            for batch in batches:
                ...  # the loop as it is

    subject: the model that is trained, wrapped or not, or a Trainer of transformers or TRL. optimizer: not needed:
    any torch optimizer that has the model's trained parameters is listened to. loss: what the loss is, where the
    model is not given its labels, as in `{"kind": "sft"}` (`recording.losses`). max_norm: of clipping by code of a
    loop's own; torch's is heard. adapter, names: of a model that is not PEFT's: the configuration that PEFT would take,
    and PEFT's names of its parameters (`recording.names`).

    Raises:
        UserError: no step was seen, or the folder holds another recording.
    """
    options: dict[str, Any] = {"steps": steps, "max_norm": max_norm, "adapter": adapter, "names": names}
    with started(subject, folder, loss=loss, **options) as recorder:
        yield recorder
    check_seen(recorder)


@contextmanager
def started(
    subject: Any, folder: str | Path, *, loss: Mapping[str, Any] | None = None, **options: Any
) -> Iterator[Recorder]:
    """`record`, but for its last check: a Trainer's callback ends elsewhere."""
    folder = Path(folder)
    check_free(folder, rank_and_size()[0])
    model, around = (subject, None) if isinstance(subject, nn.Module) else trainer_parts(subject)
    recorder = Recorder(model, folder, loss=loss_of(subject) if loss is None else loss, **options)
    with ExitStack() as stack:
        stack.callback(recorder.stop)
        recorder.start()
        if around is not None:
            stack.enter_context(around(recorder))
        yield recorder


def check_seen(recorder: Recorder) -> None:
    """Raises: UserError: no step was recorded."""
    if not recorder.recording.steps:
        rule = "no optimizer stepped on trained parameters of this model"
        way_out = "put the training loop inside the block, or give its model"
        raise UserError(f"recording to {recorder.folder}", rule, way_out)


def _kept(values: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors, on the CPU, and the plain numbers among `values`."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Tensor):
            found[name] = whole(value)
        elif isinstance(value, _NUMBERS):
            found[name] = value
    return found


def _plain_config(config: Any) -> dict[str, Any]:
    """A configuration of PEFT or transformers as plain values; what is none is left out."""
    found = {}
    for name, value in config.to_dict().items():
        if isinstance(value, set):
            value = sorted(value)
        if isinstance(value, _NUMBERS) or value is None or isinstance(value, list | dict):
            found[name] = value
        elif hasattr(value, "value"):  # an enum
            found[name] = value.value
        else:
            found[name] = str(value)
    return found


def _described(optimizer: Any, names: Mapping[Any, str], whole_state: Mapping[str, Any]) -> dict[str, Any]:
    """The optimizer's class, its groups with the names of their parameters, and its state before the step."""
    groups, state = [], {}
    for group in optimizer.param_groups:
        options = {}
        for key, value in group.items():
            if key == "params":
                continue
            if isinstance(value, Tensor):
                value = float(value)
            if value is None or isinstance(value, (*_NUMBERS, tuple, list)):
                options[key] = value
        known = [names[p] for p in group["params"] if p in names]
        groups.append({"options": options, "names": known, "others": len(group["params"]) - len(known)})
        for parameter in group["params"]:
            if parameter not in names:
                continue
            name = names[parameter]
            # A parameter that lies on other ranks has its state there, too.
            if given := whole_state.get(name) or optimizer.state.get(parameter):
                state[name] = _kept(given)
    return {"class": f"{type(optimizer).__module__}.{type(optimizer).__qualname__}", "groups": groups, "state": state}


def _first_leaf(model: nn.Module) -> nn.Module:
    """A module that every forward calls: no adapter's, as that may be another's turn."""
    return next((module for module in model.modules() if isinstance(module, nn.Embedding | nn.Linear)), model)

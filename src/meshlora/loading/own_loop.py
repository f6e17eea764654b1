"""A model in a loop of the user's own: the loss of its labels, and the numbers of its tokens.

Owns: the loss that Hugging Face's models return for one process, on any mesh, with its sum and its number of tokens
(`own_loss`); the mark that a divided loss has given gradients, which `train.gradsync.finish_gradients` would divide
again; which forwards get numbers, by which dropout masks are the same on every topology. Does not own: losses without
whole logits (`train.losses`), how a step uses a loss (`train.step`), the numbering (`meshlora_ground.masks`), what is
done with it (`layers.tokens`).

A loss is a mean over this rank's rows: gradients of dp ranks with unequal numbers of tokens cannot be put together from
means. So the sum is kept beside it.

Forwards of a step with gradients (`adapter.attach.Loop.masks`) get numbers by the tokens themselves, as nobody knows
the place of a row in a global batch. `meshlora train` knows the places, and says them.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from meshlora.adapter.attach import Loop, Runtime, runtime
from meshlora.comm.collectives import reduce_each_to_one
from meshlora.layers.head_loss import IGNORED, shifted
from meshlora.layers.logits_recipe import LogitsRecipe
from meshlora.layers.tokens import Share
from meshlora.plan.pairs import check
from meshlora.plan.token_order import order_of_rows
from meshlora_ground.errors import UserError
from meshlora_ground.masks import numbers_by_content
from meshlora_ground.tasks import CAUSAL, task_of

_OWN = "_meshlora_own"


@dataclass(frozen=True, eq=False)
class OwnLoss:
    """The sum behind a loss that a model's forward has returned.

    total: `[]`, over this rank's trained tokens. number: int64 `[]`, of the trained tokens of its rows, which all cp
    ranks count alike. divisor: what the loss was divided by, if the caller gave it.
    """

    total: Tensor
    number: Tensor
    divisor: Any = None


def own_loss(loss: Tensor) -> OwnLoss | None:
    """The sum behind `loss`, if it is what a forward with labels has returned, untouched."""
    found = getattr(loss, _OWN, None)
    return found if isinstance(found, OwnLoss) else None


def take_labels(model: Any) -> None:
    """Let `model(input_ids, attention_mask, labels=labels)` return the loss as Hugging Face's models do, on any mesh.

    labels: `[B, S]`, not shifted, -100 where untrained. num_items_in_batch: divide the sum by it, not by the number
    of tokens. Under cp all ranks are given the same rows; with gradients there are no logits then.
    """
    names = list(inspect.signature(model.forward).parameters)

    @functools.wraps(model.forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        named = dict(zip(names, args, strict=False)) | kwargs
        if named.get("labels") is None:
            return type(model).forward(model, *args, **kwargs)
        return _labelled(model, named)

    object.__setattr__(model, "forward", forward)  # past nn.Module, on this model alone
    state = runtime(model)
    if state.mesh.cp.size == 1:
        return

    def cut(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        named = dict(zip(names, args, strict=False)) | kwargs
        if named.get("labels") is not None and torch.is_grad_enabled() and task_of(model.config) == CAUSAL:
            context = state.context
            given = (named["labels"].shape, named.get("position_ids"))
            context.next(order_of_rows(*given, size=state.mesh.cp.size, is_balanced=context.balances))

    model.register_forward_pre_hook(cut, with_kwargs=True, prepend=True)  # before that of the cut


def _labelled(model: Any, given: dict[str, Any]) -> Any:
    plain, state = functools.partial(type(model).forward, model), runtime(model)
    mesh, wants_routers = state.mesh, given.get("output_router_logits")
    if wants_routers is None:
        wants_routers = getattr(model.config.get_text_config(), "output_router_logits", False)
    check({"topology": mesh.topology, "door": "labels", "output_router_logits": wants_routers})
    if wants_routers or task_of(model.config) != CAUSAL:  # a loss that has more in it than a sum over tokens
        outputs = plain(**given)
        if isinstance(found := getattr(outputs, "loss", None), Tensor):
            outputs.loss = _Divided.apply(found, torch.ones_like(found), state.loop)
        return outputs
    labels, divisor, after = given.pop("labels"), given.pop("num_items_in_batch", None), given.pop("shift_labels", None)
    returns_dict = given.get("return_dict")
    if returns_dict is None:
        returns_dict = model.config.return_dict
    given["return_dict"] = True  # the loss needs the logits by name
    if after is None:
        after = shifted(labels)
    number = (after != IGNORED).sum()  # before the cut: all cp ranks count alike
    if torch.is_grad_enabled():
        given.setdefault("use_cache", False)  # nothing is generated in training
    outputs = plain(**given)
    logits = outputs.logits
    held = state.context.held  # of this forward: known once it has begun
    if held is not None:
        after = after.gather(1, held.own.to(after.device))
    if state.pipeline.is_last and logits.shape[:-1] != after.shape:
        rule = f"its logits are of {list(logits.shape[:-1])} tokens, and a loss needs those of each label"
        raise UserError(f"labels {list(labels.shape)}", rule, "leave out logits_to_keep")
    if state.pipeline.is_last:
        flat, wanted = logits.flatten(0, -2).float(), after.flatten().to(logits.device)
        total = F.cross_entropy(flat, wanted, ignore_index=IGNORED, reduction="sum")
    else:
        total = state.pipeline.signal()
    rest, whole = dict(outputs), state.pipeline.whole(total)
    total = whole
    if held is not None:
        whole = reduce_each_to_one(total, mesh.cp)
    if held is not None or (mesh.pp.size > 1 and torch.is_grad_enabled()):
        del rest["logits"]  # of this rank's tokens alone, or of the last stage
    by = number.to(whole)
    if divisor is not None:
        by = torch.as_tensor(divisor, device=whole.device).to(whole)
    is_sum = isinstance(divisor, int | float) and divisor == 1
    if whole.requires_grad and not is_sum:
        loss = _Divided.apply(whole, by, state.loop)
    else:
        loss = whole / by
    setattr(loss, _OWN, OwnLoss(total, number, divisor))
    found = type(outputs)(loss=loss, **rest)
    return found if returns_dict else found.to_tuple()


class _Divided(Function):
    """`total / by`, and a mark in `loop` once it gives gradients."""

    @staticmethod
    def forward(ctx: Any, total: Tensor, by: Tensor, loop: Loop) -> Tensor:
        ctx.save_for_backward(by)
        ctx.loop = loop
        return total / by

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (by,) = ctx.saved_tensors
        ctx.loop.is_divided = True
        return grads[0] / by, None, None


# --- the numbers of tokens --------------------------------------------------------------------------------------------


def given_tokens(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, Tensor | None]:
    """(name, value) of the token argument of a model's forward: ids `[B, S]`, or embeddings `[B, S, H]`."""
    for name in ("input_ids", "inputs_embeds"):
        if isinstance(given := kwargs.get(name), Tensor):
            return name, given
    return "input_ids", args[0] if args else None


def number_tokens(model: Any) -> None:
    """Let the forwards of a step say their tokens; what one says holds in its backward too, where layers may be
    recomputed, whatever other forwards there are between the two.
    """
    state, before = runtime(model), list[Any]()

    def begin(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        name, ids = given_tokens(args, kwargs)
        mask = kwargs.get("attention_mask", args[1] if len(args) > 1 else None)
        if not isinstance(mask, Tensor) or mask.ndim != 2:  # none, or one of its own for each pair of tokens
            mask = None
        masks, own = state.loop.masks, None
        if masks is not None and name == "input_ids" and ids is not None and torch.is_grad_enabled():
            own = functools.cache(functools.partial(_share, ids, mask, masks))
        before.append((state.dropout.say(own), own))

    def end(_: nn.Module, __: Any, output: Any) -> None:
        earlier, own = before.pop() if before else (None, None)  # none of a forward that another hook has refused
        if not torch.is_grad_enabled():  # between a forward and its backward, as of a reference
            state.dropout.say(earlier)
        elif own is not None:
            know_again = state.pipeline.noted()  # what borders know of this forward
            for tensor in (*_with_gradients(output), *_with_gradients((state.pipeline.sent,))):
                tensor.register_hook(functools.partial(_begin_backward, state, own, know_again))

    model.register_forward_pre_hook(begin, with_kwargs=True)
    model.register_forward_hook(end, always_call=True)


def _share(ids: Tensor, mask: Tensor | None, masks: tuple[int, int]) -> Share:
    return Share(None, numbers_by_content(ids, mask), *masks)


def _begin_backward(state: Runtime, share: Callable[[], Share], know_again: Callable[[], None], _: Tensor) -> None:
    """The gradient of a forward's result is there: what is recomputed from now on is of its tokens."""
    know_again()
    state.dropout.say(share)


def _with_gradients(output: Any) -> list[Tensor]:
    """The tensors of a model's output that a backward may begin with."""
    values: Iterable[Any] = [output]
    if isinstance(output, Mapping):
        values = output.values()
    elif isinstance(output, tuple):
        values = output
    found = []
    for value in values:
        tensor = value.hidden if isinstance(value, LogitsRecipe) else value
        if (own := getattr(tensor, _OWN, None)) is not None:  # a step goes back from the sum
            tensor = own.total
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            found.append(tensor)
    return found

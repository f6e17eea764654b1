"""Activation recomputation: decoder layers whose activations are recomputed in the backward instead of kept.

Owns: which layers, and how their second forward runs. Does not own: the mechanism, which is that of transformers and
`torch.utils.checkpoint`, on the forward of a decoder layer, inside the region that sp splits by tokens.

The collectives of such a layer run again in its backward, in the order of its forward, all of them on every rank:
under torch's `early_stop` a rank would leave the second forward once *it* has what it needs, which for experts could
be earlier than its neighbours. No random state is kept, as nothing in a training forward is random.

Of `keep_attention` the second forward does not run attention, whose work grows with the square of a row: what its
kernels gave is kept (`layers.kept_attention`). Of `offload` the inputs of layers wait in host memory (`run.offload`).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Literal

from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from meshlora.adapter.attach import runtime
from meshlora.layers.kept_attention import KeptAttention
from meshlora.plan.derive import decoder_layers
from meshlora.run.offload import Offload
from meshlora_ground.compat.transformers_models import attention_of, checkpoint_with
from meshlora_ground.errors import UnsupportedError
from meshlora_ground.float64 import is_lifted, lift

KEEP_ATTENTION: Literal["keep_attention"] = "keep_attention"
OFFLOAD: Literal["offload"] = "offload"


def recompute_layers(model: PreTrainedModel, recompute: str | int) -> None:
    """Make `model` recompute the layers selected by `recompute` in the backward.

    recompute: "none", "full", "keep_attention": all layers but their attention; "offload": all, from inputs in host
        memory; or n: layers 0, n, 2n, ...

    Raises:
        UnsupportedError: as in `check_recompute`.
    """
    check_recompute(model, recompute)
    every = recomputed_every(recompute)
    if not every:
        return
    name, layers = decoder_layers(model)
    offload, is_first = Offload(), True
    for number, layer in enumerate(layers):
        if not runtime(model).plan.holds(f"{name}.{number}"):
            is_first = True
            continue
        layer.gradient_checkpointing = number % every == 0  # type: ignore[assignment]
        function: Callable[..., Any] = _checkpointed
        if recompute == KEEP_ATTENTION:
            function = _checkpointed_but_attention
        elif recompute == OFFLOAD:
            function = functools.partial(_checkpointed_on_host, offload, is_first)
        checkpoint_with(layer, function)
        is_first = False


def switch_by_own_rule(model: PreTrainedModel, recompute: str | int) -> None:
    """Let who turns recomputation off and on again, as TRL does around generation, get this one, not transformers'."""

    def off(*_: Any, **__: Any) -> None:
        for layer in decoder_layers(model)[1]:
            layer.gradient_checkpointing = False  # type: ignore[assignment]

    def on(*_: Any, **__: Any) -> None:
        recompute_layers(model, recompute)

    for name in ("gradient_checkpointing", "activation_checkpointing"):
        setattr(model, f"{name}_enable", on)
        setattr(model, f"{name}_disable", off)


def check_recompute(model: PreTrainedModel, recompute: str | int) -> None:
    """Refuse recomputation for a model whose layers do not support it. `model` may be on the meta device. Raises:
    UnsupportedError: names the type of the layer, or the number of layers."""
    every = recomputed_every(recompute)
    if not every:
        return
    _, layers = decoder_layers(model)
    for layer in layers:
        if not isinstance(layer, GradientCheckpointingLayer):
            raise UnsupportedError(
                f"train.recompute={recompute} with model_type {model.config.model_type!r}",
                f"its {type(layer).__name__} cannot be computed twice (no GradientCheckpointingLayer of transformers)",
                "use train.recompute: none",
            )
    if every > len(layers):
        rule = f"the model has {len(layers)} layers, so that only the first would be computed twice"
        raise UnsupportedError(f"train.recompute={recompute}", rule, f"use at most {len(layers)}, full or none")
    attention = attention_of(model.config.get_text_config()) or ""
    if recompute == KEEP_ATTENTION and not attention.endswith("sdpa"):  # ours, as over cp, end in what they are made of
        given, rule = f"train.recompute={recompute} with attn_implementation={attention}", "only sdpa has what is kept"
        raise UnsupportedError(given, rule, "use model.attn_implementation: sdpa, or train.recompute: full")


def recompute_of(asked: bool | Literal["keep_attention", "offload"]) -> str:
    """`train.recompute` of a proof: of all layers, or of none."""
    if isinstance(asked, str):
        return asked
    return "full" if asked else "none"


def asked_of(recompute: str | int) -> bool | Literal["keep_attention", "offload"]:
    """What a proof is asked for, of `train.recompute` of a run."""
    if recompute == KEEP_ATTENTION:
        return KEEP_ATTENTION
    if recompute == OFFLOAD:
        return OFFLOAD
    return recompute != "none"


def recomputed_every(recompute: str | int) -> int:
    """The distance between recomputed layers, of which the first is one; 0 for none."""
    return recompute if isinstance(recompute, int) else {"none": 0, "full": 1, KEEP_ATTENTION: 1, OFFLOAD: 1}[recompute]


def _checkpointed(function: Callable[..., Any], *args: Any, kept: KeptAttention | None = None) -> Any:
    """`function(*args)`, with activations recomputed in the backward, but for the attention in `kept`."""
    return checkpoint(
        function,
        *args,
        use_reentrant=False,
        preserve_rng_state=False,
        early_stop=False,
        context_fn=functools.partial(_contexts, is_lifted(), kept),
    )


def _checkpointed_but_attention(function: Callable[..., Any], *args: Any) -> Any:
    return _checkpointed(function, *args, kept=KeptAttention())  # of this layer and micro-batch: freed with its graph


def _checkpointed_on_host(offload: Offload, is_first: bool, function: Callable[..., Any], *args: Any) -> Any:
    if not args:  # what is named stays in the closure of the second forward
        rule = "layers of this family take their input by name, where it cannot be replaced"
        raise UnsupportedError(f"train.recompute={OFFLOAD}", rule, "use train.recompute: full")
    with offload.saving(args[0], is_first=is_first):
        return _checkpointed(function, *args)


def _contexts(
    was_lifted: bool, kept: KeptAttention | None
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Contexts of the first forward and of the second, which runs outside of the first one's lift."""
    if kept is None:
        return contextlib.nullcontext(), lift(was_lifted)
    return kept.first(), _both(lift(was_lifted), kept.second())


@contextlib.contextmanager
def _both(outer: AbstractContextManager[None], inner: AbstractContextManager[None]) -> Iterator[None]:
    with outer, inner:
        yield

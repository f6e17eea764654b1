"""The tokens on which an adapter acts that others invoke (aLoRA): from its invocation on, in each sequence.

Owns: the rule (`invoked_tokens`), and what it says of the running forward on this rank (`Invocations`). Does not own:
the linears that ask (`wings.invoked.linear`), the cuts of tokens over cp and tp (`layers.tokens`).

PEFT's rule: an adapter acts from the start of the last occurrence of `alora_invocation_tokens` on, and nowhere in a
sequence that has none. It follows from the ids of whole rows, which every rank is called with before anything is cut.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from meshlora.adapter.attach import runtime
from meshlora.comm.groups import SharedByCopies
from meshlora.layers.tokens import ForwardTokens, Share
from meshlora.loading.own_loop import given_tokens
from meshlora_ground.caches import cache_argument
from meshlora_ground.errors import UserError

_NAME = "meshlora_invocations"


def invoked_tokens(
    ids: Tensor, invocation: Sequence[int], positions: Tensor | None = None, mask: Tensor | None = None
) -> Tensor:
    """bool `[B, S]`: whether the token at t is of the last `invocation` of its sequence, or after it.

        invoked_tokens(torch.tensor([[5, 7, 5, 2]]), [5])  # [[False, False, True, True]]

    ids: `[B, S]`. positions: `[B, S]` of packed rows, 0 at the start of each sequence; None: rows are sequences.
    mask: `[B, S]`, 0 at padding, which is part of no invocation.
    """
    sequence = torch.zeros_like(ids)
    if positions is not None:
        sequence = (positions == 0).expand_as(ids).cumsum(1)
    found = _occurrences(ids, invocation, sequence, mask).long()
    # Of each sequence of a row, by its number, which never exceeds S.
    number = found.new_zeros(len(ids), ids.shape[1] + 1).scatter_add(1, sequence, found)
    until_its_end = number.cumsum(1).gather(1, sequence)
    return (number.gather(1, sequence) > 0) & (found.cumsum(1) == until_its_end)


def _occurrences(ids: Tensor, invocation: Sequence[int], sequence: Tensor, mask: Tensor | None) -> Tensor:
    """bool `[B, S]`: whether `invocation` starts at t, and ends in the same sequence."""
    length, size = ids.shape[1], len(invocation)
    found = torch.zeros_like(ids, dtype=torch.bool)
    starts = max(0, length - size + 1)
    if not starts:
        return found
    is_one = sequence[:, :starts] == sequence[:, size - 1 :]
    for place, token in enumerate(invocation):
        here = slice(place, place + starts)
        is_one = is_one & (ids[:, here] == token)
        if mask is not None:
            is_one = is_one & (mask[:, here] != 0)
    found[:, :starts] = is_one
    return found


@dataclass
class _Forward:
    """What the running forward was called with. first: the tokens before it, in a cache.

    found: adapter -> int64 `[B, S]`, 1 where it acts.
    """

    ids: Tensor | None
    positions: Tensor | None = None
    mask: Tensor | None = None
    first: Any = 0
    found: dict[str, Tensor] = field(default_factory=dict)


class Invocations(SharedByCopies):
    """The invoked adapters of a model, and where they act in its running forward. One object per model.

    Attributes:
        of: adapter -> the tokens that invoke it.
    """

    def __init__(self, model: Any) -> None:
        state = runtime(model)
        self.of: dict[str, tuple[int, ...]] = {}
        self._model = model
        self._tokens = ForwardTokens(state.mesh.tp, sp=state.plan.topology.sp, context=state.context)
        self._forward = _Forward(None)
        self._prompts: _Forward | None = None
        model.register_forward_pre_hook(self._begin, with_kwargs=True)
        state.pipeline.note_also(lambda: functools.partial(setattr, self, "_forward", self._forward))

    def acts_on(self, adapter: str, module: str, num_rows: int) -> Tensor:
        """bool `[num_rows]`: the input rows of `module` on which `adapter` acts."""
        found = self._forward.found
        if adapter not in found:
            found[adapter] = self._found(adapter).long()
        # They are cut as the numbers of tokens are: over cp, and under sp over tp.
        with self._tokens.of([Share(None, found[adapter])], [None]):
            (part,) = self._tokens.parts(module, num_rows)
        return part.tokens.bool()

    @contextlib.contextmanager
    def generating(self, ids: Tensor | None, mask: Tensor | None) -> Iterator[None]:
        """Inside the block forwards go on from the prompts `ids` `[B, S]`, which alone invoke."""
        self._prompts = _Forward(ids, mask=mask)
        try:
            yield
        finally:
            self._prompts = None

    def _found(self, adapter: str) -> Tensor:
        forward, prompts = self._forward, self._prompts
        if forward.ids is None or (prompts is not None and prompts.ids is None):
            rule = "it is invoked by tokens, and these are not known"
            raise UserError(f"inputs_embeds with adapter {adapter!r}", rule, "give input_ids")
        if prompts is None:
            return invoked_tokens(forward.ids, self.of[adapter], forward.positions, forward.mask)
        assert prompts.ids is not None
        acts = invoked_tokens(prompts.ids, self.of[adapter], mask=prompts.mask)
        never = torch.iinfo(torch.int64).max
        start = torch.where(acts.any(1), acts.shape[1] - acts.sum(1), never)
        # Several answers to a prompt are rows next to each other.
        start = start.repeat_interleave(len(forward.ids) // len(start))
        place = forward.first + torch.arange(forward.ids.shape[1], device=start.device)
        return place >= start.unsqueeze(1)

    def _begin(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        name, ids = given_tokens(args, kwargs)
        if name != "input_ids" or ids is None:
            self._forward = _Forward(None)
            return
        mask = kwargs.get("attention_mask", args[1] if len(args) > 1 else None)
        if not isinstance(mask, Tensor) or mask.shape != ids.shape:  # none, or one of pairs of tokens
            mask = None
        first: Any = 0
        if self._prompts is not None:
            cache = kwargs.get(cache_argument(type(self._model).forward))
            first = 0 if cache is None else cache.get_seq_length()
        positions = kwargs.get("position_ids")
        if positions is not None and positions.ndim != 2:  # of images, whose rows are not packed
            positions = None
        self._forward = _Forward(ids, positions, mask, first)


def invocations(model: Any) -> Invocations | None:
    """Those of `model`; None: it has no invoked adapter."""
    return vars(model).get(_NAME)


def invoked_by(model: Any) -> tuple[int, ...] | None:
    """The tokens that invoke the active adapter of `model`; None: it acts on all tokens."""
    own = invocations(model)
    return None if own is None else own.of.get(runtime(model).active or "")


def made_invocations(model: Any) -> Invocations:
    """Those of `model`, made with its first invoked adapter."""
    found = invocations(model)
    if found is None:
        found = Invocations(model)
        object.__setattr__(model, _NAME, found)  # past nn.Module
    return found

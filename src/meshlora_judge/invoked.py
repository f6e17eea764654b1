"""Adapters that tokens invoke (aLoRA) on one process: PEFT's own rule and layers, and sequences that show it.

PEFT finds the invocations in the forward of its wrapper, which a proof's forwards do not pass; here the model's own
forward does, by PEFT's function, and each of PEFT's layers is told.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.variants import calculate_alora_offsets
from torch import Tensor, nn

from meshlora_ground.dataset import TokenizedDataset
from meshlora_ground.errors import UserError


def invoke(model: Any) -> None:
    """Let the forwards of PEFT's `model` with an invoked adapter know the offsets of their rows."""
    if not getattr(model.active_peft_config, "alora_invocation_tokens", None):
        return
    running: dict[str, Any] = {}

    def begin(_: nn.Module, __: tuple[Any, ...], given: dict[str, Any]) -> None:
        running["alora_offsets"] = calculate_alora_offsets(model.peft_config, "default", given["input_ids"])

    def tell(_: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, given | running

    model.get_base_model().register_forward_pre_hook(begin, with_kwargs=True)
    for module in model.modules():
        if isinstance(module, LoraLayer):
            module.register_forward_pre_hook(tell, with_kwargs=True)
            # PEFT adds in place, through a view: torch 2.13 crashes where a hook is put on the gradient of such a sum.
            module.register_forward_hook(lambda _, __, found: found.clone())


def acting_rows(model: Any, ids: Tensor) -> Tensor | None:
    """bool `[B, S]`: the tokens that PEFT gives to the adapter; None: all."""
    if not getattr(model.active_peft_config, "alora_invocation_tokens", None):
        return None
    acts = torch.zeros_like(ids, dtype=torch.bool)
    for row, offset in enumerate(calculate_alora_offsets(model.peft_config, "default", ids)):
        if offset is not None:
            acts[row, ids.shape[1] - offset :] = True
    return acts


def with_invocations(data: TokenizedDataset, invocation: Sequence[int]) -> TokenizedDataset:
    """The same sequences, in turn with `invocation` twice, not at all and once, as far as they are long enough; its
    first tokens alone are at the end of the others. Of an adapter that acts everywhere, all as they are.
    """
    found, size = data.input_ids.copy(), len(invocation)
    if not size:
        return data
    for place, (start, end) in enumerate(itertools.pairwise(data.offsets.tolist())):
        at = list[int]()
        if place % 3 != 1 and end - start > size + 1:
            at = [start + 1 + place % 2]
        if place % 3 == 0 and end - start > 2 * size + 5:
            at.append(start + size + 4)
        for first in at:
            found[first : first + size] = invocation
        if not at and end - start > size > 1:
            found[end - size + 1 : end] = invocation[:-1]
    return replace(data, input_ids=found)


def check_invocations(data: TokenizedDataset, invocation: Sequence[int]) -> None:
    """Check that some sequence has `invocation`, if there is one. Raises: UserError."""
    words = list(invocation)
    for sequence in data:
        ids = sequence.input_ids.tolist()
        if any(ids[at : at + len(words)] == words for at in range(len(ids))):
            return
    rule = "no sequence of the proof has them, so the adapter would act nowhere"
    raise UserError(f"alora_invocation_tokens={words}", rule, "give --data with them")

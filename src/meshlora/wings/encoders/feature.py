"""What this wing brings to the core: encoders beside a decoder, which attends to their states.

A batch has the tokens of the decoder, as of a language model; those of the encoder come as a further input
(`meshlora_ground.encoded`). Does not own: how the layers of both are split (`wings.found`, `plan.derive`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from meshlora.comm.collectives import copy_one_to_each
from meshlora.comm.groups import Mesh
from meshlora.feature import Feature
from meshlora.plan.rules import ModelPlan
from meshlora_ground.encoded import IDS, MASK

_LOGITS_BIAS = "final_logits_bias"  # bart's, `[1, V]`
_STATES = "encoder_hidden_states"  # by which a decoder is called with them


def inputs_of_both(given: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a forward, `input_ids` of the decoder and what a batch has beside them -> those of the model.

    A batch without sequences (`train.collation`) has none for the encoder, which then reads those of the decoder.
    """
    own = dict(given)
    ids, mask = own.pop(IDS, own["input_ids"]), own.pop(MASK, None)
    own |= {"decoder_input_ids": own["input_ids"], "decoder_attention_mask": own["attention_mask"]}
    return own | {"input_ids": ids, "attention_mask": torch.ones_like(ids) if mask is None else mask}


class Wing(Feature):
    def replace(self, model: nn.Module, plan: ModelPlan, mesh: Mesh, *, dtype: torch.dtype) -> None:
        if not plan.encoder or plan.topology.tp == 1:
            return
        # Both look up in one table, of which a rank has a part: not in whole ones of their own, tied to it.
        model.set_input_embeddings(model.get_input_embeddings())  # type: ignore[operator]

        def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
            states = kwargs[_STATES]
            assert isinstance(states, Tensor), args
            # The heads of each rank attend to them: their gradient is a sum, made here once for all layers.
            return args, kwargs | {_STATES: copy_one_to_each(states, mesh.tp)}

        model.get_decoder().register_forward_pre_hook(enter, with_kwargs=True)  # type: ignore[operator]

    def watch(self, model: Any) -> None:
        if not model.meshlora.plan.encoder:
            return

        def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
            return args, inputs_of_both(kwargs)

        model.register_forward_pre_hook(enter, with_kwargs=True)
        if isinstance(getattr(model, _LOGITS_BIAS, None), Tensor):
            _move_bias(model, model.get_submodule(model.meshlora.plan.head))


def _move_bias(model: Any, head: Any) -> None:
    """Let this rank's part of the head add the bias of its logits, which bart's kin add to whole ones."""
    whole = getattr(model, _LOGITS_BIAS)[0]
    first = head.out_features * (head.tp.rank if len(whole) > head.out_features else 0)
    own = whole[first : first + head.out_features]
    own = torch.nn.functional.pad(own, (0, head.out_features - len(own)))  # rows that no token has
    head.bias = nn.Parameter(own.clone(), requires_grad=False)
    setattr(model, _LOGITS_BIAS, torch.zeros_like(whole[:1]))

"""Faults of encoders: what they read, what a decoder sees of their states, and the gradient of these."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshlora.model import weights
from meshlora.verify.faults.fault import after, around, instead_of, stating
from meshlora.verify.features import Feature
from meshlora.wings.encoders import feature as encoders

Inputs = dict[str, Any]


@after(encoders, "inputs_of_both", needs={Feature.ENCODER})
def padding_of_prompts_seen(inputs: Inputs, *_: Any) -> Inputs:
    """neither the encoder nor the decoder sees the padding of a prompt"""
    return inputs | {"attention_mask": torch.ones_like(inputs["attention_mask"])}


@after(encoders, "inputs_of_both", needs={Feature.ENCODER})
def prompts_masked_as_completions(inputs: Inputs, *_: Any) -> Inputs:
    """the decoder sees all of its prompt, however short its own row is"""
    mask, own = inputs["attention_mask"].clone(), inputs["decoder_attention_mask"]
    mask[:, : own.shape[1]] = own
    return inputs | {"attention_mask": mask}


@after(encoders, "inputs_of_both", needs={Feature.ENCODER})
def completions_read_unshifted(inputs: Inputs, *_: Any) -> Inputs:
    """the decoder reads the token before the one that it is to write"""
    return inputs | {"decoder_input_ids": inputs["decoder_input_ids"].roll(-1, 1)}


@around(weights, "_read_local", needs={Feature.RELATIVE_BIAS})
def relative_bias_of_other_heads(original: Any, name: str, *rest: Any) -> Tensor:
    """a rank has the relative position bias of its own heads"""
    found: Tensor = original(name, *rest)
    return found.roll(1, 1) if "relative_attention_bias" in name else found


encoder_states_gradient_not_reduced = instead_of(encoders, "copy_one_to_each", needs={Feature.ENCODER, Feature.TP})(
    stating("the gradient of an encoder's states is the sum over the heads of all tp ranks", lambda states, *_: states)
)

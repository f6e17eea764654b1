"""What an encoder-decoder reads of a pair: the tokens of the prompt, beside those of the decoder.

A sequence of a dataset is what the decoder reads: its start token, then the completion, each token of which predicts
the next one, as in a causal model. The prompt is a further input, padded by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from meshlora_ground.further_inputs import KnownInputs

# Further inputs `[1, S]` of a sequence; zeros behind them are padding.
IDS, MASK = "encoder_input_ids", "encoder_attention_mask"
# Their decoders begin with the last token of a completion: the language that it is in.
_BY_LANGUAGE = ("mbart", "plbart")


def with_start(config: Any, completion: np.ndarray) -> np.ndarray:
    """`[S]`, the tokens of a completion -> `[S + 1]`, as transformers shifts labels."""
    start = completion[-1:] if config.model_type in _BY_LANGUAGE else [config.decoder_start_token_id]
    return np.concatenate([start, completion]).astype(np.int32)


def prompts(each: Sequence[np.ndarray]) -> KnownInputs:
    """The further inputs of sequences whose prompts have the tokens `each`."""
    return KnownInputs([{IDS: ids[None].astype(np.int64), MASK: np.ones((1, len(ids)), np.int64)} for ids in each])

"""Families that no proof can make right, by their configuration alone.

Owns: which, and why. Does not own: which others are proved (`wings.proved`).
"""

from __future__ import annotations

from typing import Any

from meshlora_ground.errors import UnsupportedError
from meshlora_ground.model_class import reads_pairs
from meshlora_ground.topology import LAYERS, TOKENS, Topology

# Families for which a single process deviates from its own files, or cannot be compared.
_REFUSED = {
    "emu3_text_model": "transformers stores it under a name that it does not load",
    **dict.fromkeys(("pp_formulanet", "qwen2_5_omni"), "it is several models and has no input embedding"),
    **dict.fromkeys(
        ("qwen4_exp", "qwen4_exp_text"),
        "its indexer runs once for each block of a batch, which a proof does not follow",
    ),
    **dict.fromkeys(
        ("qwen2_5_omni_thinker", "qwen3_omni_moe_thinker"),
        "transformers itself fails on text with its configuration, which lacks vision_start_token_id",
    ),
    "shieldgemma2": "transformers stores it under names that it does not load",
    "youtu": "transformers zeroes the padding token's embedding whenever it loads this family, and meshlora reads the "
    "stored one",
    "xglm": "transformers itself overflows on it in float64, so that it cannot be proved",
}

# Families whose split cannot be proved, or is not right yet.
_REFUSED_SPLIT = {
    **dict.fromkeys(
        ("blip-2", "instructblip", "instructblipvideo"), "transformers' forward takes no text without images"
    ),
    "big_bird": "it puts other modules in place of its attention's when it runs on short texts",
    "chameleon": "transformers' forward sets the logits of image tokens by their numbers, past the split of its head",
    "cpmant": "it takes the tokens of a prompt out of its stream after the layers, past the border of sp",
    "molmo2": "transformers' forward asks for mm_token_type_ids in training, which text alone does not have",
    "xmod": "its layers choose rows of the stream by their language, in whole texts",
    "zaya": "its routers read those of the layer before, past the cut of sp",
    "zamba": "its layers share weights that are stored once",
    "prophetnet": "transformers stores its embeddings under a name that its decoder alone has not",
    "vibevoice_asr": "its audio part cannot be shrunk to that of a twin",
    "reformer": "its layers are reversible: they compute the backward themselves, past the borders of a split",
    "voxtral_realtime": "transformers' forward takes no text without audio",
}
# Families that need, beside the residual stream, what another stage has.
_REFUSED_STAGES = {
    "inkling2_loop": "some of its layers run three times, and stages once",
    "nanochat": "its last norm runs before the layers too",
    "openai-gpt": "its layers share an activation",
    "qwen2_audio": "its code asks for the device of its tower, which other stages do not have",
    "rwkv": "its layers pass a state on beside the residual stream",
}


def check_family(model: Any, topology: Topology) -> None:
    """Refuse families that no proof can make right. `model` may be on the meta device.

    Raises:
        UnsupportedError: an encoder-decoder not of text, a family in `_REFUSED`, bloom with `slow_but_exact`; on
            `topology` one in `_REFUSED_SPLIT` or `_REFUSED_STAGES`, gpt2 with `reorder_and_upcast_attn`, deberta with
            `relative_attention`.
    """
    config = model.config
    what = f"model_type {config.model_type!r}"
    if config.model_type in _REFUSED:
        raise UnsupportedError(what, _REFUSED[config.model_type])
    if not topology.is_whole and config.model_type in _REFUSED_SPLIT:
        raise UnsupportedError(f"{what} on {topology}", _REFUSED_SPLIT[config.model_type], "use dp alone")
    if not topology.is_whole and getattr(config, "relative_attention", False):  # as deberta is published
        rule = "its attention projects a table of relative positions by linears, too"
        raise UnsupportedError(f"{what} on {topology}", rule, "use dp alone")
    # Of gpt2, with eager alone.
    if topology.size_over(TOKENS) > 1 and getattr(config, "reorder_and_upcast_attn", False):
        given = f"reorder_and_upcast_attn on {topology}"
        rule = "it is attention in code of the family's own, which sees no tokens of other ranks"
        raise UnsupportedError(given, rule, "set it to false in config.json, or use dp, tp and sp")
    if topology.size_over(LAYERS) > 1 and config.model_type in _REFUSED_STAGES:
        raise UnsupportedError(f"{what} on {topology}", _REFUSED_STAGES[config.model_type], "use pp=1")
    if config.model_type == "bloom" and config.pretraining_tp > 1 and config.slow_but_exact:
        rule = "it slices a weight past its adapter"
        raise UnsupportedError("slow_but_exact", rule, "set it to false in config.json")
    if config.model_type in ("marian", "t5gemma") and reads_pairs(config):
        rule = "its embeddings and positions are stored in other forms than those of t5 and bart, which are not read"
        raise UnsupportedError(f"{what} with its encoder", rule, "use t5, bart or their kin, or its decoder alone")
    if config.is_encoder_decoder and not reads_pairs(config):
        raise UnsupportedError(what, "of encoder-decoders, those that read text alone are supported")

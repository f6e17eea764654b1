"""Which modules of the decoder layers see other tokens, and in which way: found in the code of their classes.

Owns: finding them, in place of a list of families. Does not own: the ways themselves (`wings.context.borders`).

transformers' code states where a module sees earlier tokens: it asks a registry for its attention function, or it reads
a cache, by the cache's own methods. What does neither, and still sees others, is named in `_BY_THEMSELVES`.
"""

from __future__ import annotations

import copy
import inspect
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from meshlora.plan.pairs import check
from meshlora.plan.rules import ModelPlan
from meshlora.wings.mixers.mixers import mixer_of
from meshlora_ground.compat import transformers_attention, transformers_models
from meshlora_ground.errors import UnsupportedError
from meshlora_ground.topology import TOKENS

# The ways of `ModelPlan.mixing`. CACHE: keys of all tokens come from the cache, and the mask is that of own queries.
# PAST: as CACHE, of earlier tokens and own ones alone. OFFSET: attention by the registry, which asks the cache how many
# tokens are before those at hand. WHOLE: the module runs on whole rows, on each cp rank.
CACHE, PAST, OFFSET, WHOLE = "cache", "past", "offset", "whole"
_ATTENDS, _STATES = "attends", "states"

# States, shifts and masks of their own, which no cache has.
_BY_THEMSELVES = {
    "openai.modeling_openai.Attention",
    "minimax.modeling_minimax.MiniMaxLightningAttention",
    "recurrent_gemma.modeling_recurrent_gemma.RecurrentGemmaRecurrentBlock",
    "rwkv.modeling_rwkv.RwkvFeedForward",
    "rwkv.modeling_rwkv.RwkvSelfAttention",
    "xlstm.modeling_xlstm.xLSTMLayer",
}
# Of streams of one token (transformers 5.24 computes it by the registry).
_OF_ONE_TOKEN = "Inkling2BlockAttentionResidual"
_POOLS = ("compress_rate", "index_kpool_compress_gate")  # attributes of parts of an attention
# Attentions by the registry that make a mask or a bias of the keys, and so need them earlier than the registry's
# function does.
_MASK_OF_KEYS = {
    "doge.modeling_doge.DogeAttention",
    "inkling.modeling_inkling.InklingAttention",
    "inkling2.modeling_inkling2.Inkling2FullAttention",
    "inkling2.modeling_inkling2.Inkling2SlidingAttention",
}


def with_mixers(model: Any, plan: ModelPlan) -> ModelPlan:
    """`plan` with what sees tokens of other cp ranks.

    A layer without any, such as one that is an MLP alone, is of a type that has some in other layers.

    Raises:
        UnsupportedError: a layer sees other tokens in no way that is known, or in one that the topology does not allow.
    """
    # Each rank has whole sequences: nobody need know who mixes tokens.
    if plan.topology.size_over(TOKENS) == 1:
        return plan
    text = model.config.get_text_config()
    check({"topology": plan.topology, "model.attn_implementation": transformers_models.attention_of(text)})
    attentions, recurrent, mixing, known = list[str](), dict[str, tuple[str, ...]](), dict[str, str](), set[type]()
    layers = model.get_submodule(plan.layers)
    for index, layer in enumerate(layers):
        for path, module in layer.named_modules():
            name = f"{plan.layers}.{index}.{path}"
            mixer = mixer_of(text.model_type, path, module)
            state = mixer.state if mixer is not None else ()
            way = _way_of(module, state)
            around = [mixing[other] for other in mixing if name.startswith(f"{other}.")]
            if around and (way != _STATES or WHOLE in around):
                continue  # a part, such as an indexer: it is given the same cache, or whole rows; not a convolution
            if way == _ATTENDS and _numbers_tokens(module):
                rule = f"its {type(module).__name__} itself numbers the tokens that it is called with, from 0"
                raise UnsupportedError(f"model_type {plan.model_type!r} on {plan.topology}", rule, "use dp, tp and sp")
            if way == _STATES:
                recurrent[name] = state
            elif way in (CACHE, PAST, OFFSET, WHOLE):
                _check(module, name, way, plan)
                mixing[name] = way
            if way in (_ATTENDS, OFFSET):
                # Once for each call in a forward: see `ModelPlan`.
                attentions += [name] * transformers_models.calls_of_attention(module)
            if way:
                known.add(type(layer))
    for layer in layers:
        if type(layer) not in known:
            rule = "sees other tokens neither by transformers' attention functions nor by a cache"
            way_out = "use dp, tp and sp, which keep sequences whole in it"
            given = f"model_type {plan.model_type!r} on {plan.topology}"
            raise UnsupportedError(given, f"its {type(layer).__name__} {rule}", way_out)
    return replace(plan, attentions=tuple(attentions), recurrent=recurrent, mixing=mixing)


def keep_attention_of_one_token(model: nn.Module, base: str) -> None:
    """Let attention that sees no other token stay transformers' own, `base`, where others are ours."""
    module: Any
    for module in model.modules():
        if type(module).__name__ == _OF_ONE_TOKEN and hasattr(module, "config"):
            module.config = copy.copy(module.config)
            transformers_attention.set_attention(module.config, base)


def _way_of(module: nn.Module, state: tuple[str, ...]) -> str:
    """How `module` itself sees other tokens; "": not at all. state: that of its mixer's form."""
    name = f"{type(module).__module__}.{type(module).__qualname__}".removeprefix("transformers.models.")
    if type(module).__name__ == _OF_ONE_TOKEN:
        return ""
    attends, reads = transformers_models.calls_attention(module), transformers_models.reads_keys(module)
    reaches, keeps = transformers_models.keeps_inputs(module), transformers_models.keeps_state(module)
    # Keys pooled over windows of tokens, by a compressor or in an indexer, may be of several ranks' tokens.
    if name in _BY_THEMSELVES or any(hasattr(part, pool) for part in module.children() for pool in _POOLS):
        return WHOLE
    # With an indexer, or a mask of keys, an attention looks into its mask: none of the blocks of the registry's.
    if reads and (hasattr(module, "indexer") or name in _MASK_OF_KEYS):
        return CACHE
    # A module may both attend and keep inputs or a state: of such nobody knows what a rank must pass on.
    if reaches or keeps:
        return _STATES if reaches and not attends and bool(state) == keeps else WHOLE
    if attends:
        return OFFSET if transformers_models.asks_for_earlier(module) else _ATTENDS
    if not reads:
        return ""
    # A causal mask of its own, a buffer of all positions: it takes the last rows, which are those of its queries only
    # while there are no later keys.
    own = getattr(module, "bias", None)
    return PAST if isinstance(own, Tensor) and own.ndim == 4 else CACHE


def _numbers_tokens(module: nn.Module) -> bool:
    """Whether the forward of `module` gives tokens positions by how many it is called with."""
    return "arange" in inspect.unwrap(type(module).forward).__code__.co_names


def _check(module: nn.Module, name: str, way: str, plan: ModelPlan) -> None:
    """
    Raises:
        UnsupportedError: this way is not known on the topology.
    """
    given, topology = f"{type(module).__name__} on {plan.topology}", plan.topology
    if topology.ring and way in (CACHE, PAST):
        raise UnsupportedError(given, "it takes the keys of all tokens together from a cache", "leave out ring")
    is_split = any(region.is_split and f"{name}.".startswith(f"{region.name}.") for region in plan.regions)
    if topology.sp and way == WHOLE and is_split:
        rule = "it runs on whole rows on each cp rank, and sp cuts what leaves it before cp does"
        raise UnsupportedError(given, rule, "leave out sp")

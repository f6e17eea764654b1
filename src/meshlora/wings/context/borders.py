"""What the decoder layers of a rank are called with under cp, and what lets them see the tokens of other ranks.

Owns: the cut of the arguments of layers, and which modules attend over cp or pass states on. Does not own: attention
(`wings.context.context`), states (`wings.context.passed_states`), the cut of the residual stream (`model.regions`).
"""

from __future__ import annotations

import copy
import functools
import inspect
from typing import Any

from torch import Tensor

from meshlora.layers.held_tokens import ContextCut, HeldTokens
from meshlora.model.regions import map_arguments, map_output
from meshlora.plan.rules import ModelPlan
from meshlora.wings.context.context import ContextAttention, RowsOfMask, hold_context
from meshlora.wings.context.context_cache import OF_KEYS, hold_cache
from meshlora.wings.context.mixing import OFFSET, PAST, WHOLE, keep_attention_of_one_token
from meshlora.wings.context.passed_states import pass_states
from meshlora.wings.context.whole_rows import UncutArguments, run_on_whole_rows
from meshlora_ground.compat import transformers_attention, transformers_models
from meshlora_ground.errors import UnsupportedError

# Words in the name of an argument of decoder layers -> its dims of rows and of tokens.
_TOKEN_DIMS = {
    "position_embeddings": (-3, -2),
    "sinusoidal_pos": (0, -2),  # of roformer: one for all rows
    "position_ids": (-2, -1),
    "attention_scaling": (-4, -2),
    "per_layer_input": (-3, -2),
    "input_ids": (-2, -1),
    "relative_distance": (-3, -2),  # of inkling2: of each query to each key, in all rows
}


def install_context(model: Any, plan: ModelPlan, context: ContextCut) -> None:
    """Let the decoder layers attend over cp, and cut what they are called with besides the residual stream."""
    if context.axis.size == 1:
        return
    layers = model.get_submodule(plan.layers)
    # The modules around the layers make the masks, by their own configuration.
    parts = plan.layers.split(".")
    parents = [model.get_submodule(".".join(parts[:number])) for number in range(len(parts))]
    base = transformers_models.attention_of(model.config.get_text_config()) or ""
    hold_context(model, layers, ContextAttention(context, is_ring=plan.topology.ring), parents)
    keep_attention_of_one_token(model, base)
    if transformers_attention.views_as_its_input(parents[-1]):
        for name in {*plan.after} - {plan.head} or {f"{plan.layers}.{plan.num_layers - 1}"}:
            map_output(model.get_submodule(name), functools.partial(_kept, context))
    # A window has as much work everywhere, and a state goes from one token to the next: on all stages alike.
    context.balances = is_balanced(model.config, plan)
    for name, state in plan.recurrent.items():
        if plan.holds(name):
            pass_states(model.get_submodule(name), name, state, context)
    for index, layer in enumerate(layers):
        if not plan.holds(f"{plan.layers}.{index}"):
            continue
        _hold_mixers(model, plan, f"{plan.layers}.{index}", context, base)
        stream = next(iter(inspect.signature(layer.forward).parameters))
        map_arguments(layer, functools.partial(_cut_beside, context, stream))


def _hold_mixers(model: Any, plan: ModelPlan, layer: str, context: ContextCut, base: str) -> None:
    """Let what sees other tokens in `layer`, beside attention by transformers' functions and states, see them."""
    own = {name: way for name, way in plan.mixing.items() if name.startswith(f"{layer}.")}
    if WHOLE in own.values():
        uncut = UncutArguments(model.get_submodule(layer))  # before the hook that cuts them
    for name, way in own.items():
        module = model.get_submodule(name)
        if way != OFFSET and (config := getattr(module, "config", None)) is not None:
            # A copy: the modules around it make masks by the configuration that they share.
            module.config = copy.copy(config)
            transformers_attention.set_attention(module.config, base)
        if way == WHOLE:
            run_on_whole_rows(module, context, uncut)
        else:
            hold_cache(module, way, context)


def _cut_beside(context: ContextCut, stream: str, name: str, value: Any) -> Any:
    """An argument of a decoder layer, cut, but for the residual stream, which is cut already."""
    return value if name in (stream, "hidden_states") else cut_argument(context.held, name, value)


def is_balanced(config: Any, plan: ModelPlan) -> bool:
    """Whether cp ranks have heads and tails of sequences: nothing needs to know which tokens are before a rank's."""
    return sees_all(config) and not plan.recurrent and not {OFFSET, PAST} & {*plan.mixing.values()}


def sees_all(config: Any) -> bool:
    """Whether a layer of a model of this configuration attends to all earlier tokens."""
    text = config.get_text_config()
    types = getattr(text, "layer_types", None)
    if types:
        return "full_attention" in types
    return not getattr(text, "sliding_window", None)


def cut_argument(held: HeldTokens | None, name: str, value: Any) -> Any:
    """An argument of a decoder layer, of its own tokens in place of all.

    Raises:
        UnsupportedError: it has something for each token, and it is not known along which dim.
    """
    # A mask is cut where its rows are made, and block states are kept as the layers have them (`mixers.block_states`).
    if held is None or isinstance(value, RowsOfMask) or name == "block_states":
        return value
    if isinstance(value, tuple):
        return tuple(cut_argument(held, name, each) for each in value)
    if not isinstance(value, Tensor) or held.length not in value.shape[1:]:
        return value
    if name.endswith("_mask") and value.ndim == 2:  # of recurrent mixers, 0 at padding
        return held.cut(value, 1)
    if name in OF_KEYS or name.startswith("prev_"):  # of keys, all of which are seen; of the layer before, cut there
        return value
    if name.endswith("attention_mask") and value.ndim == 4:  # in numbers; one row for all queries has 1
        return value if value.shape[-2] == 1 else held.cut(value, -2, rows=0)
    rows, dim = 0, 0
    for word, dims in _TOKEN_DIMS.items():
        if word in name:
            rows, dim = dims
    if not dim or value.shape[dim] != held.length:
        rule = "it may hold something of each token, and it is not known where"
        raise UnsupportedError(f"cp with a decoder layer that takes {name} {list(value.shape)}", rule, "use cp=1")
    return held.cut(value, dim, rows=rows if value.ndim >= -rows else None)


def _kept(context: ContextCut, x: Tensor) -> Tensor:
    """x `[B, S/cp, H]`, of which the model's code makes a view as `[B, S, H]`: that is x itself."""
    if context.held is None:
        return x
    return x.as_subclass(transformers_attention.Unviewed)

"""What this wing brings to the core: adapters that act from their invocation on (aLoRA)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from meshlora.adapter.plan import AdapterPlan
from meshlora.feature import Feature
from meshlora.layers.adapted import become
from meshlora.layers.linear import ParallelLinear
from meshlora.loading.own_loop import given_tokens
from meshlora.model.inject import parallel_leaves
from meshlora.plan.pairs import check
from meshlora.plan.rules import ModelPlan
from meshlora.wings.generation.continuous import generate_batch
from meshlora.wings.generation.rows import generate
from meshlora.wings.invoked.linear import InvokedLinear
from meshlora.wings.invoked.rows import invocations, invoked_by, made_invocations
from meshlora_ground.errors import UserError

_OPTION = "alora_invocation_tokens"


class Wing(Feature):
    def check_adapter(self, model: Any, plan: ModelPlan, adapter: AdapterPlan) -> None:
        tokens = adapter.config.alora_invocation_tokens
        if tokens is None:
            return
        given = f"LoraConfig({_OPTION}={tokens!r})"
        if not isinstance(tokens, list | tuple) or not tokens or not all(type(i) is int and i >= 0 for i in tokens):
            raise UserError(given, "it is a list of token ids", "give those that the tokenizer makes of the invocation")
        size = model.config.get_text_config().vocab_size
        if max(tokens) >= size:
            raise UserError(given, f"the vocabulary has {size} tokens", "give ids of this model's tokenizer")
        if tokens[-1] == getattr(model.config.get_text_config(), "pad_token_id", None):
            rule = "it ends with the padding token, which follows any row that is padded"
            raise UserError(given, rule, "leave that token out of it")

    def attached(self, model: Any, name: str, adapter: AdapterPlan) -> None:
        if not adapter.config.alora_invocation_tokens:
            return
        own = made_invocations(model)
        own.of[name] = tuple(adapter.config.alora_invocation_tokens)
        for leaf in parallel_leaves(model).values():
            if isinstance(leaf, ParallelLinear) and name in leaf.scaling and not isinstance(leaf, InvokedLinear):
                become(leaf, InvokedLinear)
                object.__setattr__(leaf, "invocations", own)  # past nn.Module

    def methods(self, model: Any) -> Mapping[str, Callable[..., Any]]:
        if not hasattr(model, "generate"):
            return {}
        return {"generate": _generate, "generate_batch": _generate_batch}


def _generate(model: Any, *args: Any, **options: Any) -> Any:
    """As without this wing; an invoked adapter acts from its invocation in the prompt on, as in PEFT."""
    if (tokens := invoked_by(model)) is None:
        return generate(model, *args, **options)
    config = options.get("generation_config") or model.generation_config
    check({_OPTION: tokens, "generate.num_beams": options.get("num_beams", getattr(config, "num_beams", None))})
    name, prompts = given_tokens(args, options)
    if "inputs" in options:
        name, prompts = "input_ids", options["inputs"]
    own, mask = invocations(model), options.get("attention_mask")
    assert own is not None
    with own.generating(prompts if name == "input_ids" else None, mask):
        return generate(model, *args, **options)


def _generate_batch(model: Any, *args: Any, **options: Any) -> Any:
    check({_OPTION: invoked_by(model), "door": "generate_batch"})
    return generate_batch(model, *args, **options)

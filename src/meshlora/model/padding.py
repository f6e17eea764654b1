"""Padding at the end of rows: for which models no mask is needed.

Owns: the rule, and that nobody warns of it. Does not own: who pads (`train.collation`), the forward (`train.losses`).

A token of a causal model sees none after it, so padding at the end of its row changes nothing for it, with a mask or
without. A mask `[B, 1, S, S]` would cost: torch's attention has no fused kernel for it on a GPU, and transformers reads
the device to see whether there is padding at all. Padding itself then has other values, which nothing reads. Shown in
float64 for every proved dense family by `tests/unit/test_padding_mask.py`, and by the preflight of each run.
"""

from __future__ import annotations

from typing import Any

from meshlora.feature import features
from meshlora.plan.rules import ModelPlan
from meshlora_ground.tasks import CAUSAL

# Options of configurations -> the values with which tokens see later ones, as encoders' do. Of some families (rembert,
# step3p7) their masks alone follow them, of others attentions say so, too (bert, gemma3).
_SEE_ALL: dict[str, tuple[Any, ...]] = {
    "is_causal": (False,),
    "is_decoder": (False,),
    "use_bidirectional_attention": (True, "all"),
}

# Of some families (gpt2, openai-gpt, roformer) each forward calls it, and it reads the device for a warning.
_LOOKS = "warn_if_padding_and_no_attention_mask"


def is_causal(model: Any, plan: ModelPlan) -> bool:
    """Whether no token of `model`, of a family proved causal, sees a later one, as its configuration can say. plan: of
    all its stages. Of any other model padding is masked.
    """
    if not leaves_mask(plan):
        return False
    text = model.config.get_text_config()
    if any(getattr(text, name, None) in values for name, values in _SEE_ALL.items()):
        return False
    for name, module in model.named_modules():
        # Of an image part attentions may see all of it: an image has no later tokens.
        if plan.is_text(name) and getattr(module, "is_causal", True) is False:
            return False
    return True


def expect_no_mask(model: Any) -> None:
    """Let models of transformers within `model` not look for padding in rows without a mask: the host would wait."""
    for module in model.modules():
        if hasattr(module, _LOOKS):
            setattr(module, _LOOKS, _nothing)


def _nothing(*_: Any) -> None:
    pass


def leaves_mask(plan: ModelPlan) -> bool:
    """Whether a model of this plan needs no mask, if each of its attentions is causal."""
    return plan.task == CAUSAL and any(feature.is_proved_causal(plan.model_type) for feature in features())

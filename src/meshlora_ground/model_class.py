"""The transformers class of a configuration's model, for the product and the judge alike.

A composite (a vision or audio part beside a text part) is loaded whole, as it is published.
"""

from __future__ import annotations

from typing import Any

from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    AutoModelForSeq2SeqLM,
    PretrainedConfig,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from meshlora_ground.tasks import CAUSAL, class_of_task, task_of

# Auto classes of language models with their mappings, in order of preference.
_CAUSAL: tuple[tuple[Any, Any], ...] = (
    (AutoModelForCausalLM, MODEL_FOR_CAUSAL_LM_MAPPING),
    (AutoModelForImageTextToText, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING),
    (AutoModelForMultimodalLM, MODEL_FOR_MULTIMODAL_LM_MAPPING),
    (AutoModelForSeq2SeqLM, MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING),
)


def model_class(config: PretrainedConfig) -> Any:
    """The auto class with `from_config` and `from_pretrained` for `config`: `model_class(config).from_config(config)`.

    Some composites have two classes, one of them for the text part alone. The one named by `config.architectures` is
    chosen, else the first that takes the whole configuration. Without any: the first, whose own error says so.
    """
    return _found(config)[0]


def own_class(config: PretrainedConfig) -> Any:
    """The class of the model that `model_class` makes, or None if transformers has none (code of the checkpoint)."""
    return _found(config)[1]


def reads_pairs(config: PretrainedConfig) -> bool:
    """Whether its model is an encoder-decoder of text: it reads a prompt by its encoder, and writes a completion."""
    return bool(getattr(config, "is_encoder_decoder", False)) and _found(config)[0] is AutoModelForSeq2SeqLM


def family_of(architectures: Any) -> str | None:
    """The only model_type whose causal model in transformers is named by `architectures`; None: there is none."""
    found = [family for family, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items() if [name] == architectures]
    return str(found[0]) if len(found) == 1 else None


def take_quantization(config: PretrainedConfig) -> Any:
    """Remove `quantization_config` from a configuration, or from its text part (kimi_k25), and return it; else None."""
    given = vars(config).pop("quantization_config", None)
    of_text = vars(config.get_text_config(decoder=True)).pop("quantization_config", None)
    return given or of_text or None


def _found(config: PretrainedConfig) -> tuple[Any, Any]:
    task = task_of(config)
    classes = _CAUSAL if task == CAUSAL else (class_of_task(task),)
    remote = getattr(config, "auto_map", None) or {}
    for auto, _ in classes:
        if auto.__name__ in remote:
            return auto, None
    # In order of preference: named by the checkpoint, for the whole configuration, any.
    named, whole, others = list[Any](), list[Any](), list[Any]()
    for auto, mapping in classes:
        for cls in _classes_of(mapping, config):
            kind = others
            if cls.__name__ in (config.architectures or ()):
                kind = named
            elif getattr(cls, "config_class", None) is type(config):
                kind = whole
            kind.append((auto, cls))
    best: tuple[Any, Any] = (*named, *whole, *others, (classes[0][0], None))[0]
    return best


def _classes_of(mapping: Any, config: PretrainedConfig) -> tuple[Any, ...]:
    found = mapping.get(type(config), ())
    return found if isinstance(found, tuple) else (found,)

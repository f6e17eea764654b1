"""The task of a model: which head it has, as `config.architectures` says.

Does not own: what is trained for a task (`meshlora_ground.objective`).
"""

from __future__ import annotations

from typing import Any

from meshlora_ground.errors import UnsupportedError, UserError

CAUSAL = "CAUSAL_LM"
PAIRED = "SEQ_2_SEQ_LM"  # of an encoder-decoder, which is a language model too, and is trained as one
# PEFT's name of a task -> transformers' auto class, its mapping, the word for messages.
_TASKS = {
    "SEQ_CLS": (
        "AutoModelForSequenceClassification",
        "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING",
        "classification of texts",
    ),
    "TOKEN_CLS": (
        "AutoModelForTokenClassification",
        "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING",
        "classification of words",
    ),
    "FEATURE_EXTRACTION": ("AutoModel", "MODEL_MAPPING", "embeddings"),
}
# transformers' names of the heads that PEFT trains in full, without being asked to.
HEADS = ("classifier", "score")


def task_of(config: Any) -> str:
    """PEFT's name of the task of a configuration: CAUSAL_LM unless its architecture is another's.

    Raises:
        UserError: its architectures are no list.
    """
    named = getattr(config, "architectures", None) or []
    if not isinstance(named, list | tuple):
        raise UserError(f"architectures {str(named)[:60]!r}", "config.json must have a list of names there", "mend it")
    for task in _TASKS:
        name = _class_name(config, task)
        if name is not None and list(named[:1]) == [name]:
            return task
    return CAUSAL


def class_of_task(task: str) -> tuple[Any, Any]:
    """(transformers' auto class, its mapping) of a task that is not language modelling."""
    import transformers  # takes a second, and run files are read without

    auto, mapping, _ = _TASKS[task]
    return getattr(transformers, auto), getattr(transformers, mapping)


def set_task(config: Any, task: str) -> None:
    """Make `config` that of a model for `task`. Raises: UnsupportedError: transformers has none of this family."""
    if task == CAUSAL:
        if task_of(config) != CAUSAL:
            config.architectures = None
        return
    if task not in _TASKS:
        known = ", ".join((CAUSAL, *_TASKS))
        raise UnsupportedError(f"task_type={str(task)[:60]!r}", f"meshlora knows {known}")
    name = _class_name(config, task)
    if name is None:
        rule = f"transformers has no model of this family for {_TASKS[task][2]}"
        raise UnsupportedError(f"model_type {config.model_type!r}", rule, "use a model of another family")
    config.architectures = [name]
    if hasattr(config, "use_cache"):
        config.use_cache = False  # nothing is generated


def labels_of(config: Any) -> dict[str, Any]:
    """What else a configuration says of its head, as plain values; nothing for a language model."""
    if task_of(config) in (CAUSAL, "FEATURE_EXTRACTION"):
        return {}
    names = [config.id2label[number] for number in sorted(config.id2label)]
    pad = getattr(config.get_text_config(), "pad_token_id", None)
    return {"labels": names, "problem_type": getattr(config, "problem_type", None), "pad_token_id": pad}


def set_labels(config: Any, labels: list[str], problem_type: str | None) -> None:
    """Write into `config` what `labels_of` reads."""
    config.id2label = dict(enumerate(labels))
    config.label2id = {label: number for number, label in enumerate(labels)}
    config.problem_type = problem_type


def _class_name(config: Any, task: str) -> str | None:
    found = class_of_task(task)[1].get(type(config), None)
    if isinstance(found, tuple):  # of several the first is transformers' own choice
        found = found[0]
    return None if found is None else str(found.__name__)

"""What the loss of a trainer is, as plain values that the judge computes again: its kind and its numbers.

Knows the trainers of transformers and TRL by their class and their arguments; a loop of its own says it, or gives the
model its labels. Does not own: formulas (`meshlora_judge.objectives`).

    {"kind": "sft"}                                    the mean over the step's trained tokens of -log p
    {"kind": "sft", "loss_type": "dft"}                each token weighted by its probability
    {"kind": "dpo", "beta": 0.1, "loss_type": "ipo"}   TRL's loss of pairs against the base; default: sigmoid
    {"kind": "simpo", "beta": 2.0, "gamma": 1.0}       of a loop of its own, as {"kind": "orpo", "beta": 0.1}
    {"kind": "grpo", "loss_type": "dapo", ...}         TRL's clipped loss, without a divergence
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from meshlora_ground.errors import UnsupportedError, UserError

# Arguments of TRL's trainers, with the values that the judge's formulas are of.
_ONLY: dict[str, dict[str, Any]] = {
    "dpo": {"sync_ref_model": False},
    "grpo": {"top_entropy_quantile": 1.0, "use_liger_kernel": False, "entropy_coef": 0.0},
    "sft": {"label_smoothing_factor": 0.0},
}
# Arguments of TRL's that a recording keeps, by their names.
_KEPT = {
    "dpo": (
        *("beta", "label_smoothing", "loss_type", "loss_weights", "ld_alpha", "discopop_tau"),
        "use_weighting",
        *("f_divergence_type", "f_alpha_divergence_coef"),
    ),
    "grpo": (
        *("beta", "temperature", "epsilon", "epsilon_high", "loss_type", "max_completion_length", "delta"),
        *("importance_sampling_level", "off_policy_mask_threshold", "use_bias_correction_kl"),
        *("sapo_temperature_pos", "sapo_temperature_neg"),
        *("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"),
    ),
    "sft": ("loss_type",),
}
# Losses that a recording does not hold all of, and why.
LACKING = {
    "kto": "its reference point is of a whole step, and a recording has micro-batches",
    "distill": "a recording does not have what the teacher says",
    "reward": "a model with a head of one number is not replayed",
    "classify": "a model with another head is not replayed",
    "embed": "the texts of a whole step are compared, and a recording has micro-batches",
}
_TRAINERS = {"KTOTrainer": "kto", "GKDTrainer": "distill", "DistillationTrainer": "distill", "RewardTrainer": "reward"}


def loss_of(subject: Any) -> dict[str, Any]:
    """What the loss of a model's own loop or of a Trainer is. Raises: UnsupportedError: the judge has no formula."""
    if isinstance(subject, nn.Module):
        return {"kind": "sft"}
    names = [cls.__name__ for cls in type(subject).__mro__]
    kinds = {"DPOTrainer": "dpo", "GRPOTrainer": "grpo", "SFTTrainer": "sft", "Trainer": "sft"}
    kind = next((kinds[name] for name in names if name in kinds), None)
    # Those of TRL inherit from each other, and have losses of their own.
    of_trl = [cls.__name__ for cls in type(subject).__mro__ if cls.__module__.startswith("trl.")]
    if kind is None or (of_trl and of_trl[0] not in kinds):
        name = of_trl[0] if of_trl else names[0]
        rule = LACKING.get(_TRAINERS.get(name, ""), "the judge has no formula of its loss")
        raise UnsupportedError(f"a {name}", rule, f"there are those of {', '.join(kinds)}")
    given = subject.args
    if getattr(subject, "compute_loss_func", None) is not None:
        raise UnsupportedError("compute_loss_func", "the judge has no formula of it", "record a run without it")
    for name, value in _ONLY[kind].items():
        found = getattr(given, name, value)
        found = getattr(found, "value", found)  # an enum in some releases
        if found != value and found not in (None, [value], value):
            rule = f"the judge's formula of {kind} is for {name}={value}"
            raise UnsupportedError(f"{name}={found}", rule, "record a run without it")
    if getattr(given, "neftune_noise_alpha", None):
        rule = "its noise is not replayed"
        raise UnsupportedError(f"neftune_noise_alpha={given.neftune_noise_alpha}", rule, "record a run without it")
    found = {"kind": kind} | {name: _plain(getattr(given, name, None)) for name in _KEPT[kind]}
    if kind == "dpo" and "sft" in names_of(found["loss_type"]):
        rule = "TRL's is a mean over the better answers' tokens of a micro-batch, and the judge's is of each pair"
        raise UnsupportedError(f"loss_type={found['loss_type']}", rule, "record a run without sft")
    if kind == "dpo" and "sigmoid" in names_of(found["loss_type"]) and found["label_smoothing"]:
        rule = "some releases of TRL read it with sigmoid, and others do not"
        raise UnsupportedError(f"label_smoothing={found['label_smoothing']}", rule, "record a run without it")
    return found


def names_of(loss_type: Any) -> list[str]:
    """TRL's `loss_type`, one name or several, as a list."""
    return [loss_type] if isinstance(loss_type, str) else list(loss_type or ["sigmoid"])


def _plain(value: Any) -> Any:
    """An enum as its value, in a list too: releases differ."""
    if isinstance(value, list | tuple):
        return list(map(_plain, value))
    return value.value if isinstance(value, enum.Enum) else value


def trainer_parts(trainer: Any) -> tuple[nn.Module, Any]:
    """(the model of a Trainer, what to enter while it is recorded: its `compute_loss` tells what it is given)."""
    model = getattr(trainer, "model", None)
    if not isinstance(model, nn.Module) or not hasattr(trainer, "compute_loss"):
        raise UserError(f"{type(trainer).__name__}", "neither a torch module nor a Trainer", "give the model")

    @contextmanager
    def around(recorder: Any) -> Iterator[None]:
        original = trainer.compute_loss

        @functools.wraps(original)
        def compute_loss(model: Any, inputs: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
            extra = {name: inputs[name] for name in inputs if name not in ("input_ids", "attention_mask", "labels")}
            if model.training:
                recorder.note(**kwargs | extra)
            return original(model, inputs, *args, **kwargs)

        trainer.compute_loss = compute_loss
        try:
            yield
        finally:
            del trainer.compute_loss

    return model, around

"""What the loss of a trainer is, as plain values that the judge computes again: its kind and its numbers.

Knows the trainers of transformers and TRL by their class and their arguments; a loop of its own says it, or gives the
model its labels. Does not own: formulas (`meshlora_judge.objectives`).

    {"kind": "sft"}                                    the mean over the step's trained tokens of -log p
    {"kind": "dpo", "beta": 0.1}                       TRL's sigmoid loss against the base
    {"kind": "grpo", "loss_type": "dapo", ...}         TRL's clipped loss, without a divergence
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from meshlora_ground.errors import UnsupportedError, UserError

# Arguments of TRL's trainers, with the values that the judge's formulas are of.
_ONLY: dict[str, dict[str, Any]] = {
    "dpo": {
        "loss_type": "sigmoid",  # a list of it in later releases
        "f_divergence_type": "reverse_kl",
        "ld_alpha": None,
        "use_weighting": False,
        "sync_ref_model": False,
    },
    "grpo": {
        "delta": None,
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "use_liger_kernel": False,
        "entropy_coef": 0.0,
    },
    "sft": {"loss_type": "nll", "label_smoothing_factor": 0.0},
}
_NUMBERS = {
    "dpo": {"beta": "beta", "label_smoothing": "label_smoothing"},
    "grpo": {
        "beta": "beta",
        "temperature": "temperature",
        "epsilon": "epsilon",
        "epsilon_high": "epsilon_high",
        "loss_type": "loss_type",
        "max_completion_length": "max_completion_length",
        "importance_sampling_level": "importance_sampling_level",
    },
    "sft": {},
}


def loss_of(subject: Any) -> dict[str, Any]:
    """What the loss of a model's own loop or of a Trainer is. Raises: UnsupportedError: the judge has no formula."""
    if isinstance(subject, nn.Module):
        return {"kind": "sft"}
    names = [cls.__name__ for cls in type(subject).__mro__]
    kinds = {"DPOTrainer": "dpo", "GRPOTrainer": "grpo", "SFTTrainer": "sft", "Trainer": "sft"}
    kind = next((kinds[name] for name in names if name in kinds), None)
    own = {"KTOTrainer", "ORPOTrainer", "RewardTrainer", "RLOOTrainer", "PPOTrainer"}.intersection(names)
    if kind is None or own:
        rule = "the judge has no formula of its loss"
        raise UnsupportedError(f"a {names[0]}", rule, f"there are those of {', '.join(kinds)}")
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
    if kind == "grpo" and getattr(given, "beta", None) and getattr(given, "use_bias_correction_kl", False):
        # Its value is the same; its gradient has beta * kl besides.
        rule = "the judge's formula of grpo is without it"
        raise UnsupportedError("use_bias_correction_kl=True", rule, "record a run with it False, or with beta=0")
    return {"kind": kind} | {ours: getattr(given, theirs, None) for ours, theirs in _NUMBERS[kind].items()}


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

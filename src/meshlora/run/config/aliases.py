"""Other tools' names for keys of a run file, so that a message can name ours.

Owns: names of losses and schedules elsewhere, and what is said of a key. Does not own: the keys of other trainers
(`run.config.foreign`), other messages about keys (`run.config.types`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from meshlora.run.config.foreign.trainers import KNOWN
from meshlora_ground.errors import UserError, did_you_mean

# Losses of preferences that TRL and others name, and that are not here.
_LOSSES_ELSEWHERE = {
    *("ipo", "hinge", "simpo", "cpo", "rpo", "robust", "apo_zero", "apo_down", "sigmoid_norm", "exo_pair", "nca_pair"),
    *("bco", "bco_pair", "sppo", "sppo_hard", "aot", "aot_pair", "aot_unpaired", "discopop"),
}
_LOSSES_HERE = "of pairs there are dpo, whose loss is the sigmoid one, and orpo; of single answers kto"


def unknown_loss(path: str, name: object) -> UserError | None:
    """The error for the name of an objective that is a loss of preferences elsewhere; None if it is none."""
    if str(name).lower() not in _LOSSES_ELSEWHERE:
        return None
    return UserError(f"{path}: {name!r}", "this loss of preferences is not there", _LOSSES_HERE)


# Schedules of transformers that are not here -> (the rule, what is near in meaning).
_SCHEDULES_ELSEWHERE = {
    "cosine_warmup_with_min_lr": (
        "a warm-up from a rate of its own is not there",
        "cosine with train.warmup_steps and train.min_lr has the same warm-up, and each later rate a step later",
    ),
    **dict.fromkeys(
        ("reduce_lr_on_plateau", "greedy"),
        (
            "it follows a measured loss, and the rate here is a function of the step, as resuming needs it",
            "cosine or linear; train.early_stopping ends a run whose loss no longer falls",
        ),
    ),
}


def unknown_schedule(path: str, name: object) -> UserError | None:
    """The error for the name of a schedule of transformers that is not here; None if it is none."""
    if path != "train.schedule" or str(name).lower() not in _SCHEDULES_ELSEWHERE:
        return None
    return UserError(f"{path}: {name!r}", *_SCHEDULES_ELSEWHERE[str(name).lower()])


def unknown_key(path: Sequence[str], near: Iterable[str], groups: Mapping[str, Iterable[str]]) -> UserError:
    """The error for a key that its group has not. near: the keys of the group. groups: name -> keys, "" the top."""
    where, name = ".".join(path), path[-1].lower().replace("-", "_")
    if name == "loss_type" and "objective" in path:
        return UserError(where, "there is no such key: an objective has one loss", _LOSSES_HERE)
    # A key of ours in another place goes before a trainer's of the same name.
    ours = next((f"{group}.{name}".strip(".") for group, keys in groups.items() if name in keys), "")
    if not ours and (fact := KNOWN.get(name)) is not None:
        if not fact.here:
            return UserError(where, "there is no such key", fact.note)
        ours = fact.here
    return UserError(where, "unknown key", f"here it is {ours}" if ours else did_you_mean(path[-1], near))

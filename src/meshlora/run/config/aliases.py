"""Other tools' names for keys of a run file, so that a message can name ours.

Owns: names of losses and schedules elsewhere, and what is said of a key. Does not own: the keys of other trainers
(`run.config.foreign`), other messages about keys (`run.config.types`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import get_args

from meshlora_ground.errors import UserError, did_you_mean
from meshlora_ground.objectives.preferences import PairLoss

# Names of losses elsewhere -> what they are here.
_LOSSES_ELSEWHERE = {
    **dict.fromkeys(get_args(PairLoss), "objective: {{kind: dpo, loss: {}}}"),
    **dict.fromkeys(("rpo", "rpo_alpha"), "objective: {{kind: dpo, loss: [sigmoid, sft], loss_weights: [1, alpha]}}"),
    "bco": "objective: {{kind: dpo, loss: bco_pair}}",
    "nca": "objective: {{kind: dpo, loss: nca_pair}}",
    "exo": "objective: {{kind: dpo, loss: exo_pair, label_smoothing: 0.001}}",
    "sppo": "objective: {{kind: dpo, loss: sppo_hard}}",
    "aot_pair": "objective: {{kind: dpo, loss: aot}}",
    "wpo": "objective: {{kind: dpo, weighted: true}}",
    "dft": "objective: {{kind: sft, loss: dft}}",
    "simpo": "objective: simpo",
    "apo_zero_unpaired": "objective: {{kind: kto, loss: apo_zero_unpaired}}",
    "luspo": "objective: {{kind: grpo, ratio: sequence, mean_over: constant, max_completion_length: 1}}",
    "dapo": "objective: grpo",
    "bnpo": "objective: grpo, whose mean is over all tokens of a step, not of a micro-batch",
    "dr_grpo": "objective: {{kind: grpo, scale_rewards: none, mean_over: constant, max_completion_length: N}}",
    "gspo": "objective: {{kind: grpo, ratio: sequence, mean_over: sequence}}",
    **dict.fromkeys(("cispo", "sapo", "vespo"), "objective: {{kind: grpo, loss: {}}}"),
}
_LOSSES_HERE = "of pairs there are dpo, with loss as in loss: ipo, simpo and orpo; of single answers kto"


def unknown_loss(path: str, name: object) -> UserError | None:
    """The error for a loss that has another name or place here, or none; None if nobody knows it."""
    given = str(name).lower()
    if given == "cpo":
        return UserError(f"{path}: {name!r}", "this loss of preferences is not there", _LOSSES_HERE)
    if given not in _LOSSES_ELSEWHERE:
        return None
    return UserError(f"{path}: {name!r}", "it is not there by this name", _LOSSES_ELSEWHERE[given].format(given))


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
    from meshlora.run.config.foreign.trainers import KNOWN  # a thousand lines of YAML, read for this alone

    where, name = ".".join(path), path[-1].lower().replace("-", "_")
    if name == "loss_type" and "objective" in path:
        return UserError(
            where,
            "there is no such key",
            "here it is loss, of dpo, kto, sft, policy and grpo; orpo and simpo are kinds",
        )
    # A key of ours in another place goes before a trainer's of the same name.
    ours = next((f"{group}.{name}".strip(".") for group, keys in groups.items() if name in keys), "")
    if not ours and (fact := KNOWN.get(name)) is not None:
        if not fact.here:
            return UserError(where, "there is no such key", fact.note)
        ours = fact.here
    return UserError(where, "unknown key", f"here it is {ours}" if ours else did_you_mean(path[-1], near))

"""The loss of a recorded micro-batch, computed again from whole logits on one process: a sum and the number of units.

The formulas are the judge's (`meshlora_judge.objectives`); here recorded inputs become its batches, and options of TRL
its objectives. A variant computes a known mistake instead (`steps.causes`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

import torch
from torch import Tensor, nn

from meshlora_ground.errors import UnsupportedError
from meshlora_ground.float64 import lift
from meshlora_ground.objective import Objective, Sft
from meshlora_ground.objectives.policies import Grpo
from meshlora_ground.objectives.preferences import Dpo, Orpo, PairLoss, Simpo
from meshlora_judge.batches import UNTRAINED, MicroBatch
from meshlora_judge.formulas.pairs import said
from meshlora_judge.objectives import losses
from meshlora_judge.recording.losses import LACKING, names_of
from meshlora_judge.steps.causes import BARE_REFERENCE, OVER_BORDERS
from meshlora_judge.steps.model import as_reference

PAIRED = ("dpo", "simpo", "orpo")
# Of older releases of TRL's DPO, which joins them in the forward.
_OF_SIDES = {f"{side}_{what}" for side in ("prompt", "chosen", "rejected") for what in ("input_ids", "attention_mask")}
# What a forward is given that is no input of the model: of its loss, or of what it returns.
_OF_LOSS = {"labels", "shift_labels", "num_items_in_batch", "logits_to_keep", "use_cache", "return_dict"}
_OF_LOSS |= {"fused_lm_head", "output_attentions", "output_hidden_states", "output_router_logits", "completion_mask"}
_OF_LOSS |= {"prompt_ids", "prompt_mask", "completion_ids", "tool_mask", "advantages"}
_OF_LOSS |= {"old_per_token_logps", "ref_per_token_logps", "sampling_per_token_logps", "importance_sampling_ratio"}
_OF_LOSS |= _OF_SIDES


def objective_of(loss: Mapping[str, Any]) -> Objective:
    """The judge's objective of a recording's `loss`. Raises: UnsupportedError: it has no formula of it."""
    kind = loss.get("kind")
    if kind == "sft" and loss.get("loss_type") in (None, "nll", "dft"):
        return Sft(loss=loss.get("loss_type") or "nll")
    if kind == "dpo" and {*names_of(loss.get("loss_type"))} <= {*get_args(PairLoss)} - {"sft"}:
        return _dpo(loss)
    if kind == "simpo":
        return Simpo(**_given(loss, beta="beta", gamma="gamma", label_smoothing="label_smoothing"))
    if kind == "orpo":
        return Orpo(**_given(loss, beta="beta"))
    if kind == "grpo" and loss.get("loss_type") in _GRPO:
        return _grpo(loss)
    rule = LACKING.get(kind or "", "the judge has no formula of it")
    raise UnsupportedError(f"a loss of {dict(loss)}", rule, "there are sft, dpo, simpo, orpo and grpo")


def _given(loss: Mapping[str, Any], **names: str) -> dict[str, Any]:
    """Our name -> the value that a recording has under TRL's; without those that it does not have."""
    return {ours: loss[theirs] for ours, theirs in names.items() if loss.get(theirs) is not None}


def _dpo(loss: Mapping[str, Any]) -> Dpo:
    names: Any = names_of(loss.get("loss_type"))  # checked: of `PairLoss`
    own = _given(loss, beta="beta", loss_weights="loss_weights", length_weight="ld_alpha", weighted="use_weighting")
    if {*names} & {"sigmoid", "exo_pair", "robust", "aot", "aot_unpaired"}:  # the others do not read it
        own |= _given(loss, label_smoothing="label_smoothing")
    if "discopop" in names:
        own |= _given(loss, discopop_tau="discopop_tau")
    own |= _given(loss, f_divergence="f_divergence_type")
    if own.get("f_divergence") == "alpha_divergence":
        own |= _given(loss, f_alpha="f_alpha_divergence_coef")
    return Dpo(loss=names, **own)


# TRL's `loss_type` -> what the judge's objective has for it.
_GRPO: dict[str, dict[str, Any]] = {
    "grpo": {"mean_over": "sequence"},
    "bnpo": {},
    "dapo": {},
    "dr_grpo": {"mean_over": "constant"},
    "luspo": {"mean_over": "constant", "max_completion_length": 1},
    "cispo": {"loss": "cispo", "clip_low": 1.0},  # its upper limit is of the ratio itself, and it has no lower one
    "sapo": {"loss": "sapo", "mean_over": "sequence"},
    "vespo": {"loss": "vespo"},
}


def _grpo(loss: Mapping[str, Any]) -> Grpo:
    name = loss["loss_type"]
    own = {"importance_cap": None, **_GRPO[name]}
    own |= _given(loss, ratio="importance_sampling_level", kl_coef="beta", off_policy_mask="off_policy_mask_threshold")
    if name == "dr_grpo":
        own |= _given(loss, max_completion_length="max_completion_length")
    if name == "cispo":
        own["clip_high"] = (loss.get("epsilon_high") or loss["epsilon"]) - 1
    elif name in ("sapo", "vespo"):
        own |= {key: value for key, value in loss.items() if key.startswith(name) and value is not None}
    else:
        own |= _given(loss, clip_low="epsilon", delta="delta")
        own["clip_high"] = loss.get("epsilon_high") or loss["epsilon"]
    if own.get("kl_coef"):
        own |= _given(loss, kl_correction="use_bias_correction_kl")
    return Grpo(**own)


def is_mean_of_micro_batches(loss: Mapping[str, Any]) -> bool:
    """Whether the loss is defined as the mean of the micro-batches' means."""
    return loss.get("kind") == "grpo" and loss.get("loss_type") == "bnpo"


def loss_sum(
    model: Any,
    given: Mapping[str, Any],
    loss: Mapping[str, Any],
    variant: str = "",
    *,
    start: Mapping[str, Tensor] | None = None,
    is_lifted: bool = True,
) -> tuple[Tensor, int]:
    """(sum of the losses, their number: tokens, pairs or sequences) of one recorded micro-batch.

    start: what the trained parameters were when the run began, for losses against a reference; None: the bare base.
    is_lifted: what transformers casts to float32 stays in float64, where the model is.
    """
    objective = objective_of(loss)
    _check_whole(given)
    batch = {"sft": _text, "grpo": _rollouts}.get(loss["kind"], _pairs)(given, variant)
    inputs = {k: v for k, v in given.items() if isinstance(v, Tensor) and k not in _OF_LOSS}
    dtype = next(model.parameters()).dtype
    for name, value in inputs.items():
        if value.is_floating_point():
            inputs[name] = value.to(dtype)
    if variant == "no attention mask":
        inputs.pop("attention_mask", None)
    if is_packed(given):
        # transformers looks for the borders of packed sequences only where it is given no mask.
        inputs.pop("attention_mask", None)
        if variant == OVER_BORDERS:
            inputs["attention_mask"] = torch.ones_like(given["input_ids"])
    if variant == "no positions":
        inputs.pop("position_ids", None)
    if variant == "positions are one too far":
        shape = inputs["input_ids"].shape
        inputs["position_ids"] = torch.arange(1, shape[1] + 1).expand(shape)
    if variant == "not causal":
        length = inputs["input_ids"].shape[1]
        inputs["attention_mask"] = torch.zeros(len(inputs["input_ids"]), 1, length, length, dtype=dtype)
    with lift(is_lifted and dtype == torch.float64):
        base = None
        if objective.needs_base:
            with torch.no_grad(), as_reference(model, None if variant == BARE_REFERENCE else start):
                base = model(**inputs, use_cache=False).logits
        logits = model(**inputs, use_cache=False).logits
        if loss.get("temperature"):
            logits = logits / loss["temperature"]
            base = base / loss["temperature"] if base is not None else None
        if variant.startswith("logits are divided"):
            logits = logits / float(variant.removeprefix("logits are divided"))
        if loss["kind"] in PAIRED:  # TRL has the chosen rows before the rejected ones
            order = _order_of_pairs(len(logits), variant)
            logits, base = logits[order], None if base is None else base[order]
        if variant == "labels are smoothed":  # the part that smoothing adds
            trained = logits[batch.labels != UNTRAINED].float()
            return -trained.log_softmax(-1).mean(-1).sum(), len(trained)
        point = said(objective, logits, base, batch)  # TRL puts the pairs of a micro-batch in order
        each = losses(objective, logits, batch, base, is_training=True, point=point)
        if variant == "mean of rows' means":
            counts = (batch.labels != UNTRAINED).sum(1)
            each = each / counts.repeat_interleave(counts)
        return each.sum(), len(each)


def _check_whole(given: Mapping[str, Any]) -> None:
    """Raises: UnsupportedError: the loss has a term, or a sequence a beginning, that this rank's forward has not."""
    if given.get("output_router_logits") is True:
        rule = "the routers' load-balancing loss is not replayed"
        raise UnsupportedError("output_router_logits=True", rule, "record a run without it")
    positions = given.get("position_ids")
    # Padding on the left may have position 1.
    if isinstance(positions, Tensor) and int(positions.min()) > 1:
        rule = f"positions begin at {int(positions.min())}, so sequences are cut over ranks, which is not replayed"
        raise UnsupportedError("position_ids of a micro-batch", rule, "record a run without context parallelism")


def is_packed(given: Mapping[str, Any]) -> bool:
    """Whether a row holds several sequences: without padding, its positions begin again."""
    positions, mask = given.get("position_ids"), given.get("attention_mask")
    if not isinstance(positions, Tensor) or positions.ndim != 2:
        return False
    if mask is not None and (mask.ndim != 2 or not bool((mask == 1).all())):
        return False
    return bool((positions[:, 1:] == 0).any())


def _text(given: Mapping[str, Any], variant: str) -> MicroBatch:
    ids = given["input_ids"]
    mask = given.get("attention_mask")
    if mask is None or mask.ndim != 2:
        mask = torch.ones_like(ids)
    labels = given.get("labels")
    if "shift_labels" in given:
        shifted = given["shift_labels"]
    elif labels is None:
        rule = "the model was not given labels, and nothing was noted"
        raise UnsupportedError("a micro-batch without labels", rule, "step.note(labels=...) before its forward")
    else:
        shifted = _shifted(labels)
    if variant == "labels not shifted" and labels is not None:
        shifted = labels
    if variant == "labels shifted twice":
        shifted = _shifted(shifted)
    if variant == "the last token is not trained":
        shifted = shifted.masked_fill((shifted != UNTRAINED) & (_shifted(shifted) == UNTRAINED), UNTRAINED)
    if variant in ("prompts are trained too", "padding is trained too"):
        is_padding = mask == 0
        if variant.startswith("prompts"):
            shifted = _shifted(ids.masked_fill(is_padding, UNTRAINED))
        else:
            shifted = torch.where(_shifted(is_padding.long()) == 1, _shifted(ids), shifted)
    return MicroBatch(ids, mask, shifted)


def _shifted(labels: Tensor) -> Tensor:
    return nn.functional.pad(labels[:, 1:], (0, 1), value=UNTRAINED)


def _pairs(given: Mapping[str, Any], variant: str) -> MicroBatch:
    if "labels" not in given and given.keys() >= _OF_SIDES:
        given = {**given, "labels": _labels_of_sides(given)}
    found = _text(given, variant)
    order = _order_of_pairs(len(found.input_ids), variant)
    return MicroBatch(found.input_ids[order], found.attention_mask[order], found.labels[order])


def _order_of_pairs(number: int, variant: str) -> Tensor:
    """From TRL's chosen rows, then rejected ones, to a pair's two side by side."""
    halves = torch.arange(number).view(2, -1)
    return (halves.flip(0) if variant == "chosen and rejected are exchanged" else halves).T.flatten()


def _labels_of_sides(given: Mapping[str, Any]) -> Tensor:
    """Labels `[2B, S]` of chosen, then rejected rows: each is its prompt and its completion, with padding behind."""
    ids = given["input_ids"]
    prompts = given["prompt_attention_mask"].sum(1).repeat(2)
    completions = torch.cat([given["chosen_attention_mask"].sum(1), given["rejected_attention_mask"].sum(1)])
    places = torch.arange(ids.shape[1])
    is_trained = (places >= prompts[:, None]) & (places < (prompts + completions)[:, None])
    return torch.where(is_trained, ids, UNTRAINED)


def _rollouts(given: Mapping[str, Any], variant: str) -> MicroBatch:
    ids, completion = given["input_ids"], given["completion_ids"]
    mask = given["completion_mask"]
    if "tool_mask" in given:
        mask = mask * given["tool_mask"]
    start = ids.shape[1] - completion.shape[1] - 1  # the position that predicts the first token
    labels = torch.full_like(ids, UNTRAINED)
    labels[:, start:-1] = torch.where(mask == 1, completion, UNTRAINED)
    wide = {name: torch.full(ids.shape, value) for name, value in _COLUMNS.items()}
    advantages = given["advantages"]
    wide["advantage"][:, start:-1] = advantages[:, None] if advantages.ndim == 1 else advantages
    for name, theirs in (("old_log_prob", "old_per_token_logps"), ("engine_log_prob", "sampling_per_token_logps")):
        if isinstance(given.get(theirs), Tensor):
            wide[name][:, start:-1] = given[theirs]
    return MicroBatch(ids, given.get("attention_mask", torch.ones_like(ids)), labels, columns=wide)


# Of the objective: what each is where a recording has none.
_COLUMNS = {"advantage": 0.0, "old_log_prob": float("nan"), "engine_log_prob": float("nan"), "weight": 1.0}

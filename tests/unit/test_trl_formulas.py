"""Our policy gradients are TRL's on the same numbers, in float64, where both have them: loss and gradient."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from meshlora.run.entropies import least_kept
from meshlora.run.formulas.policies import policy
from meshlora.run.formulas.seen import Seen
from meshlora_ground.objectives.policies import Grpo

ROWS, LENGTH, CAP = 4, 6, 2.5
MASK = torch.arange(LENGTH) < torch.tensor([[6], [3], [1], [5]])  # completions of unequal length
LOW, HIGH, BETA, ENTROPY = 0.15, 0.3, 0.2, 0.1
_COMMON: dict[str, Any] = {"clip_low": LOW, "clip_high": HIGH, "importance_cap": CAP, "kl_coef": BETA}
_UNCLIPPED = {"clip_low": 0.2, "clip_high": 0.2}  # not read
# Of SAPO and VESPO TRL has constants in float32: only what that holds exactly is the same number.

# Ours, and what TRL calls it: loss_type, importance_sampling_level.
KINDS: dict[str, tuple[dict[str, Any], str, str]] = {
    "dapo": ({"entropy_coef": ENTROPY}, "dapo", "token"),
    "grpo": ({"mean_over": "sequence"}, "grpo", "token"),
    "dr_grpo": ({"mean_over": "constant", "max_completion_length": 9}, "dr_grpo", "token"),
    "gspo": ({"mean_over": "sequence", "ratio": "sequence"}, "grpo", "sequence"),
    # TRL's upper limit of CISPO is of the ratio itself, and it has no lower one.
    "cispo": ({"loss": "cispo", "clip_low": 1.0, "clip_high": HIGH, "entropy_coef": ENTROPY}, "cispo", "token"),
    # All ratios of a sequence at once, its tokens summed.
    "luspo": ({"ratio": "sequence", "mean_over": "constant", "max_completion_length": 1}, "luspo", "sequence"),
    "sapo": ({**_UNCLIPPED, "loss": "sapo", "mean_over": "sequence", "sapo_temperature_neg": 1.25}, "sapo", "token"),
    "vespo": ({**_UNCLIPPED, "loss": "vespo", "vespo_k_pos": 0.625, "vespo_lambda_neg": 0.5}, "vespo", "token"),
    "vespo-masked": ({**_UNCLIPPED, "loss": "vespo", "correction": "token_mask"}, "vespo", "token"),
    "kl_correction": ({"kl_correction": True, "delta": 1.6}, "dapo", "token"),
    "kl_correction-sequence": (
        {"kl_correction": True, "mean_over": "sequence", "ratio": "sequence", "delta": 1.02},
        "grpo",
        "sequence",
    ),
    **{
        name: ({"correction": name, "importance_floor": 0.6, "off_policy_mask": 0.05}, "dapo", "token")
        for name in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
    },
}
for _name in ("dapo", "grpo", "cispo", "gspo", "luspo", "sapo", "vespo"):
    _options, *_rest = KINDS[_name]
    KINDS[f"{_name}-top_entropy"] = (_options | {"top_entropy": 0.4}, *_rest)
for _name in ("dapo", "grpo", "dr_grpo", "gspo", "luspo", "vespo"):
    _options, *_rest = KINDS[_name]
    KINDS[f"{_name}-truncated"] = (_options | {"mask_truncated": True}, *_rest)


@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradient_are_those_of_trl(kind: str) -> None:
    options, loss_type, level = KINDS[kind]
    mask = mask_of(options)
    generator = torch.Generator().manual_seed(7)

    def drawn(scale: float) -> Tensor:
        return scale * torch.randn(ROWS, LENGTH, generator=generator, dtype=torch.float64)

    log_p, entropy = (drawn(0.5) - 2).requires_grad_(), drawn(0.1).square().requires_grad_()
    old, ref = log_p.detach() + drawn(0.3), log_p.detach() + drawn(0.4)
    engine, advantages = old + drawn(0.8), drawn(1.0)[:, 0]
    assert ((old - engine).exp()[mask] > CAP).any()
    objective = Grpo(**_COMMON | options)
    point = least_kept(entropy.detach()[mask], objective.top_entropy) if objective.has_first_pass else None
    columns = {
        "advantage": advantages.unsqueeze(1).expand_as(log_p),
        "old_log_prob": old,
        "engine_log_prob": engine,
        "weight": torch.ones_like(old),
    }
    losses, _ = policy(
        objective, Seen(log_p, ref, mask, columns, True, point, entropy if objective.token_score else None)
    )
    ours = losses.sum() / (mask.sum() if objective.per == "token" else ROWS)
    theirs = _of_trl(loss_type, level, log_p, entropy, old, ref, engine, advantages, options)
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-12)
    for of in (log_p, entropy) if options.get("entropy_coef") else (log_p,):
        found, expected = (torch.autograd.grad(loss, of, retain_graph=True)[0] for loss in (ours, theirs))
        assert torch.allclose(found, expected, rtol=1e-10, atol=1e-15)


def mask_of(options: dict[str, Any]) -> Tensor:
    """Which tokens are trained: none of a completion that was cut off, if those are masked (TRL: `completion_mask`)."""
    mask = MASK.clone()
    if options.get("mask_truncated"):
        mask[0] = False
    return mask


def _of_trl(
    loss_type: str,
    level: str,
    log_p: Tensor,
    entropy: Tensor,
    old: Tensor,
    ref: Tensor,
    engine: Tensor,
    advantages: Tensor,
    options: dict[str, Any],
) -> Tensor:
    """The loss of `GRPOTrainer` on given log-probabilities: one process, one micro-batch, nothing but its formula."""
    from trl import GRPOTrainer

    coef = options.get("entropy_coef", 0.0)
    usual = {"sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05, "delta": None}
    usual |= {"vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0}
    own = {name: options.get(name, value) for name, value in usual.items()}
    corrects = options.get("kl_correction", False)
    args = SimpleNamespace(use_bias_correction_kl=corrects, steps_per_generation=1, **own)
    itself = mock.MagicMock(
        args=args,
        loss_type=loss_type,
        importance_sampling_level=level,
        epsilon_low=LOW,
        epsilon_high=1 + HIGH if loss_type == "cispo" else HIGH,
        beta=BETA,
        entropy_coef=coef,
        _entropy_bonus_enabled=bool(coef),
        use_adaptive_entropy=False,
        top_entropy_quantile=options.get("top_entropy", 1.0),
        off_policy_mask_threshold=options.get("off_policy_mask"),
        get_off_policy_mask=GRPOTrainer.get_off_policy_mask,
        get_gamma_weights=GRPOTrainer.get_gamma_weights,
        use_vllm=True,
        vllm_importance_sampling_correction=True,
        current_gradient_accumulation_steps=1,
        max_completion_length=options.get("max_completion_length"),
        aux_loss_enabled=False,
    )
    itself.accelerator.num_processes = 1
    itself.get_high_entropy_mask = functools.partial(GRPOTrainer.get_high_entropy_mask, itself)
    itself.accelerator.pad_across_processes = lambda value, **_: value
    itself.accelerator.gather = lambda value: value
    itself.accelerator.reduce = lambda value, reduction: value
    itself._get_per_token_logps_and_entropies.return_value = (log_p, entropy, None)
    ids, mask = torch.zeros(ROWS, LENGTH, dtype=torch.int64), mask_of(options).long()
    inputs = {
        "prompt_ids": ids,
        "prompt_mask": mask,
        "completion_ids": ids,
        "completion_mask": mask,
        "old_per_token_logps": old,
        "ref_per_token_logps": ref,
        "importance_sampling_ratio": _weight(old, engine, options),
        "sampling_per_token_logps": engine,
        "advantages": advantages,
        "num_items_in_batch": mask.sum(),
    }
    found: Tensor = GRPOTrainer._compute_loss(itself, mock.MagicMock(training=True), inputs)
    return found


def _weight(old: Tensor, engine: Tensor, options: dict[str, Any]) -> Tensor:
    """What `_generate_and_score_completions` of TRL makes of them: there it is no function of its own."""
    mode, low = options.get("correction", "token_truncate"), options.get("importance_floor")
    gap = (old - engine) * MASK
    ratio = torch.exp(gap.sum(-1, keepdim=True) if mode.startswith("sequence") else gap)
    if mode.endswith("truncate"):
        return ratio.clamp(min=low, max=CAP)
    return ratio.masked_fill((ratio < (low or 0.0)) | (ratio > CAP), 0.0)

"""What objectives are proved with, and faults of those with another head: labels, embeddings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import torch
from torch import Tensor

from meshlora.model import regions
from meshlora.plan.rules import Domain, ModelPlan
from meshlora.run import heads, trainer
from meshlora.run.config.aliases import unknown_loss
from meshlora.train import batches
from meshlora.train.batch import Batch
from meshlora.verify.faults.fault import after, around, instead_of
from meshlora.verify.faults.formulas import of_head
from meshlora.verify.features import Feature
from meshlora_ground.errors import UserError, did_you_mean
from meshlora_ground.objective import Objective, Sft
from meshlora_ground.objectives.distillation import ITSELF, Distill
from meshlora_ground.objectives.labels import Classify, ClassifyTokens, Embed
from meshlora_ground.objectives.policies import Grpo, Policy
from meshlora_ground.objectives.preferences import Dpo, Kto, Orpo, PairLoss, Simpo
from meshlora_ground.objectives.rewards import Reward

# Kind -> objective that the command proves: no value is a default, or equal to that of another parameter.
PROVED: dict[str, Objective] = {
    "sft": Sft(label_smoothing=0.1),
    "dft": Sft(loss="dft"),
    "policy": Policy(clip_low=0.15, clip_high=0.3, delta=1.5, kl_coef=0.1, importance_cap=1.2, reference="base"),
    "grpo": Grpo(
        clip_low=0.15, clip_high=0.3, importance_cap=1.3, kl_coef=0.1, kl="k2", entropy_coef=0.07, scale_rewards="batch"
    ),
    "gspo": Grpo(ratio="sequence", mean_over="sequence", clip_low=0.03, clip_high=0.05, importance_cap=1.2),
    "dr_grpo": Grpo(
        scale_rewards="none",
        mean_over="constant",
        max_completion_length=9,
        clip_low=0.1,
        clip_high=0.25,
        importance_cap=None,
        kl_coef=0.2,
        kl="k1",
    ),
    "cispo": Grpo(
        loss="cispo",
        clip_low=0.4,
        clip_high=0.1,
        importance_cap=1.1,
        kl_coef=0.1,
        entropy_coef=0.3,
        top_entropy=0.35,
    ),
    "sapo": Grpo(
        loss="sapo",
        sapo_temperature_pos=1.4,
        sapo_temperature_neg=0.7,
        mean_over="sequence",
        correction="sequence_mask",
        importance_cap=1.5,
        importance_floor=0.4,
        mask_truncated=True,
        kl_coef=0.1,
        kl_correction=True,
    ),
    "vespo": Grpo(
        loss="vespo",
        vespo_k_pos=0.7,
        vespo_lambda_pos=0.9,
        vespo_k_neg=0.4,
        vespo_lambda_neg=0.6,
        correction="token_mask",
        importance_cap=1.3,
    ),
    "luspo": Grpo(
        ratio="sequence",
        mean_over="constant",
        max_completion_length=1,
        clip_low=0.03,
        clip_high=0.05,
        off_policy_mask=0.5,
        correction="sequence_truncate",
        importance_cap=1.6,
        importance_floor=0.7,
        kl_coef=0.1,
        kl_correction=True,
    ),
    "dpo": Dpo(beta=0.3, label_smoothing=0.1),
    "ipo": Dpo(beta=0.4, loss="ipo", length_weight=0.3),
    "dpo_differences": Dpo(
        beta=0.3,
        loss=["robust", "discopop", "hinge", "sft"],
        loss_weights=[0.9, 0.4, 1.2, 0.7],
        label_smoothing=0.2,
        discopop_tau=0.6,
        f_divergence="alpha_divergence",
        f_alpha=0.4,
    ),
    "dpo_answers": Dpo(
        beta=0.3,
        loss=["apo_zero", "apo_down", "nca_pair", "bco_pair", "sppo_hard"],
        loss_weights=[1.1, 0.8, 0.4, 0.6, 0.05],
        reference="base",
    ),
    "dpo_normed": Dpo(beta=0.3, loss=["exo_pair", "sigmoid_norm"], label_smoothing=0.1, f_divergence="js_divergence"),
    "wpo": Dpo(beta=0.4, loss=["hinge", "sigmoid"], weighted=True),
    "dpo_ordered": Dpo(
        beta=0.4, loss=["aot", "aot_unpaired"], loss_weights=[0.7, 1.3], label_smoothing=0.2, length_weight=0.3
    ),
    "simpo": Simpo(beta=1.7, gamma=0.4, label_smoothing=0.1),
    "orpo": Orpo(beta=0.4),
    "kto": Kto(beta=0.3, desirable_weight=1.3, undesirable_weight=0.7, reference="base"),
    "distill": Distill(teacher="a model", divergence="jsd", beta=0.3, temperature=1.7, cross_entropy=0.2),
    "distill_top": Distill(teacher="a model", divergence="reverse_kl", top_k=6, rest="renormalize", temperature=0.7),
    "distill_recorded": Distill(top_k=4, cross_entropy=0.4),
    "distill_in_context": Distill(teacher=ITSELF, context="Be brief.", divergence="reverse_kl", temperature=1.3),
    "classify": Classify(labels=["Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun"]),
    "classify_multi": Classify(num_labels=5, problem="multi"),
    "regression": Classify(num_labels=2, problem="regression"),
    "classify_tokens": ClassifyTokens(num_labels=5),
    "embed": Embed(pooling="last", temperature=0.3),
    "embed_mean": Embed(temperature=8.0, normalize=False),
    "embed_cls": Embed(pooling="cls", temperature=0.3),
    "reward": Reward(center=0.02),
}


def _of_losses() -> dict[str, Objective]:
    """Losses that are no kind by themselves, each with the kind that has it."""
    found: dict[str, Objective] = {"apo_zero_unpaired": Kto(beta=0.3, loss="apo_zero_unpaired")}
    for name in get_args(PairLoss):
        if name not in PROVED:
            smoothing = 0.2 if name in ("exo_pair", "robust") else 0.0
            found[name] = Dpo(beta=0.3, loss=name, label_smoothing=smoothing)
    return found


_OF_LOSSES = _of_losses()


def as_proved(kind: str) -> Objective:
    """The objective that `--objective KIND` proves; for the name of a loss, the kind that has it. Raises: UserError:
    no such kind.
    """
    if kind in PROVED:
        return PROVED[kind]
    if kind in _OF_LOSSES:
        return _OF_LOSSES[kind]
    if (mistake := unknown_loss("--objective", kind)) is not None:
        raise mistake
    raise UserError(f"--objective {kind}", did_you_mean(kind, [*PROVED, *_OF_LOSSES]))


@after(batches, "collate", needs={Feature.CLASSIFY})
def label_of_next_text(batch: Batch, *_: Any, **__: Any) -> Batch:
    """each text is trained with its own label"""
    return replace(batch, targets=None if batch.targets is None else batch.targets.roll(1, 0))


@instead_of(trainer, "count", needs={Feature.CLASSIFY})
def classify_per_token(objective: Objective, batch: Batch) -> int:
    """the loss of texts is a mean over the texts of all ranks"""
    return batch.num_trained_tokens


@around(ModelPlan, "domain_of", needs={Feature.CLASSIFY, Feature.TP})
def head_gradient_summed_over_tp(original: Any, plan: Any, module: str) -> Any:
    """every tp rank has the whole gradient of the head"""
    return Domain.PARTIAL if not module.startswith(plan.layers) else original(plan, module)


@around(regions.TokenCut, "whole", needs={Feature.CLASSIFY, Feature.SP})
def hidden_states_summed_twice(original: Any, cut: Any, x: Tensor, *, terms: bool) -> Tensor:
    """without a vocabulary every tp rank has the whole gradient of the hidden states"""
    return original(cut, x, terms=True)  # as if ranks had terms of it


@of_head(needs={Feature.CLASSIFY_TOKENS})
def label_of_next_word(original: Any, objective: Any, outputs: Tensor, batch: Batch, point: Any) -> Any:
    """each word is trained with its own label"""
    return original(objective, outputs.roll(1, 1), batch, point)


@instead_of(heads, "all_reduce_sum", needs={Feature.EMBED, Feature.DP})
def embed_texts_of_own_rank(tensor: Tensor, axis: Any) -> Tensor:
    """a text is compared with those of all ranks"""
    return tensor


@around(heads, "info_nce", needs={Feature.EMBED})
def embed_gradient_of_others_lost(original: Any, objective: Embed, texts: Tensor) -> Any:
    """a text has the gradient of each comparison with it"""
    return original(objective, torch.cat([texts[:, :1], texts[:, 1:].detach()], 1))  # that of anchors stays


@around(heads, "info_nce", needs={Feature.EMBED})
def embed_without_negatives(original: Any, objective: Embed, texts: Tensor) -> Any:
    """an anchor is compared with the negatives of all records"""
    return original(objective, texts[:, :2])


@around(heads, "embeddings", needs={Feature.EMBED, Feature.POOLS_TO_THE_END})
def embed_padding_pooled(original: Any, objective: Embed, hidden: Tensor, mask: Tensor) -> Tensor:
    """the padding is no part of an embedding"""
    return original(objective, hidden, torch.ones_like(mask))


@around(heads, "info_nce", needs={Feature.EMBED})
def embed_temperature_at_default(original: Any, objective: Embed, texts: Tensor) -> Any:
    """similarities are divided by the temperature as configured"""
    return original(replace(objective, temperature=0.05), texts)


@around(heads, "embeddings", needs={Feature.EMBED})
def embed_normalized_the_other_way(original: Any, objective: Embed, hidden: Tensor, mask: Tensor) -> Tensor:
    """embeddings are normalized as configured"""
    return original(replace(objective, normalize=not objective.normalize), hidden, mask)


@instead_of(heads, "places_of", needs={Feature.EMBED})
def embed_places_of_micro_batch(batch: Batch) -> Tensor:
    """the second pass finds the gradients of its own texts"""
    return torch.arange(len(batch.input_ids), device=batch.input_ids.device)

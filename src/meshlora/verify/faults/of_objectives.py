"""What objectives are proved with, and faults of those with another head: labels, embeddings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from meshlora.model import regions
from meshlora.plan.rules import Domain, ModelPlan
from meshlora.run import heads, trainer
from meshlora.run.config.aliases import unknown_loss
from meshlora.train import batches
from meshlora.train.batch import Batch
from meshlora.verify.faults.fault import after, around, configured, instead_of, passing, stating, unreduced
from meshlora.verify.faults.formulas import of_head
from meshlora.verify.features import Feature
from meshlora_ground.errors import UserError, did_you_mean
from meshlora_ground.objective import Objective
from meshlora_ground.objectives.kinds import KINDS
from meshlora_ground.objectives.labels import Embed
from meshlora_ground.objectives.preferences import Dpo, Kto, PairLoss
from meshlora_ground.yaml_reading import parse_yaml


def _proved() -> dict[str, Objective]:
    """Name -> objective that the command proves, by its kind or else by the name."""
    rows = parse_yaml(Path(__file__).with_name("objectives.yaml").read_text(encoding="utf-8"))
    return {name: KINDS[row.pop("kind", name)](**row) for name, row in rows.items()}


PROVED = _proved()


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


@around(ModelPlan, "domain_of", needs={Feature.CLASSIFY, Feature.TP})
def head_gradient_summed_over_tp(original: Any, plan: Any, module: str) -> Any:
    """every tp rank has the whole gradient of the head"""
    return Domain.PARTIAL if not module.startswith(plan.layers) else original(plan, module)


@around(regions.TokenCut, "whole", needs={Feature.CLASSIFY, Feature.SP})
def hidden_states_summed_twice(original: Any, cut: Any, x: Tensor, *, terms: bool) -> Tensor:
    """without a vocabulary every tp rank has the whole gradient of the hidden states"""
    return original(cut, x, terms=True)  # as if ranks had terms of it


@around(heads, "info_nce", needs={Feature.EMBED})
def embed_gradient_of_others_lost(original: Any, objective: Embed, texts: Tensor) -> Any:
    """a text has the gradient of each comparison with it"""
    return original(objective, torch.cat([texts[:, :1], texts[:, 1:].detach()], 1))  # that of anchors stays


@instead_of(heads, "places_of", needs={Feature.EMBED})
def embed_places_of_micro_batch(batch: Batch) -> Tensor:
    """the second pass finds the gradients of its own texts"""
    return torch.arange(len(batch.input_ids), device=batch.input_ids.device)


embed_temperature_at_default = around(heads, "info_nce", needs={Feature.EMBED})(
    configured("similarities are divided by the temperature as configured", temperature=0.05)
)
embed_texts_of_own_rank = instead_of(heads, "all_reduce_sum", needs={Feature.EMBED, Feature.DP})(
    unreduced("a text is compared with those of all ranks")
)
embed_without_negatives = around(heads, "info_nce", needs={Feature.EMBED})(
    passing("an anchor is compared with the negatives of all records", texts=lambda texts: texts[:, :2])
)
embed_padding_pooled = around(heads, "embeddings", needs={Feature.EMBED, Feature.POOLS_TO_THE_END})(
    passing("the padding is no part of an embedding", mask=torch.ones_like)
)
embed_normalized_the_other_way = around(heads, "embeddings", needs={Feature.EMBED})(
    configured("embeddings are normalized as configured", normalize=lambda objective: not objective.normalize)
)
label_of_next_word = of_head(needs={Feature.CLASSIFY_TOKENS})(
    passing("each word is trained with its own label", outputs=lambda outputs: outputs.roll(1, 1))
)
classify_per_token = instead_of(trainer, "count", needs={Feature.CLASSIFY})(
    stating("the loss of texts is a mean over the texts of all ranks", lambda _, batch: batch.num_trained_tokens)
)

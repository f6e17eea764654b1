"""Faults of reward models: margins, the centre, which row and which token of it the score is of."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from meshlora.run import trainer
from meshlora.run.formulas import rewards
from meshlora.train.batch import Batch
from meshlora.verify.faults.fault import after, instead_of
from meshlora.verify.faults.formulas import of_head
from meshlora.verify.features import Feature
from meshlora_ground.objective import Objective
from meshlora_ground.objectives.rewards import Reward


@after(rewards, "margins", needs={Feature.REWARD})
def reward_margin_added(found: Tensor, *_: Any) -> Tensor:
    """the better answer is to lead by its margin"""
    return -found


@after(rewards, "margins", needs={Feature.REWARD})
def reward_margin_of_next_pair(found: Tensor, *_: Any) -> Tensor:
    """each pair has its own margin"""
    return found.roll(1)


@of_head(needs={Feature.REWARD})
def reward_center_not_squared(original: Any, objective: Reward, outputs: Tensor, batch: Batch, point: Any) -> Any:
    """the sum of the scores of a pair counts by its square"""
    losses, values = original(replace(objective, center=0.0), outputs, batch, point)
    return losses + objective.center * (outputs[0::2, 0] + outputs[1::2, 0])[: len(losses)], values


@of_head(needs={Feature.REWARD})
def reward_center_at_default(original: Any, objective: Reward, outputs: Tensor, batch: Batch, point: Any) -> Any:
    """scores are held around 0 as configured"""
    return original(replace(objective, center=0.0), outputs, batch, point)


@of_head(needs={Feature.REWARD})
def reward_pairs_swapped(original: Any, objective: Reward, outputs: Tensor, batch: Batch, point: Any) -> Any:
    """the first of a pair is the better answer"""
    if batch.is_dummy:  # of one row
        return original(objective, outputs, batch, point)
    return original(objective, outputs.unflatten(0, (-1, 2)).flip(1).flatten(0, 1), batch, point)


@instead_of(trainer, "set_padding", needs={Feature.REWARD})
def reward_of_the_padding(model: Any, pad_token_id: int) -> None:
    """the score is that of the last token, not of the padding behind it"""
    model.config.get_text_config().pad_token_id = -1  # which no token is


@instead_of(trainer, "count", needs={Feature.REWARD})
def reward_per_answer(objective: Objective, batch: Batch) -> int:
    """the loss is a mean over the pairs of all ranks"""
    return 0 if batch.is_dummy else len(batch.input_ids)

"""Advantages of rollouts from their rewards, each compared with the others of its group; and which rollouts train.

Owns: group-normalised advantages, over all rollouts that are read: so neither the order of the data, nor batch size or
mesh decides with which others a rollout is compared. Does not own: rewards and groups (`reading.rollouts`), the loss
(`run.objectives`).
"""

from __future__ import annotations

import dataclasses

import numpy as np

from meshlora.reading.rollouts import TRUNCATED
from meshlora_ground.dataset import TokenizedDataset
from meshlora_ground.objective import Objective
from meshlora_ground.objectives.policies import Grpo

_EPSILON = 1e-4  # as TRL: a group of nearly equal rewards is not blown up


def with_advantages(objective: Objective, data: TokenizedDataset) -> TokenizedDataset:
    """`data` with the column `advantage` in place of rewards and groups; of other objectives, `data` itself. Truncated
    rollouts are compared with the others of their group, and train nothing if they are masked.
    """
    data = without_truncated(data)
    if not isinstance(objective, Grpo) or data.targets is None:
        return data
    rewards, since = data.targets.astype(np.float64).T
    groups = np.arange(len(rewards)) - since.astype(np.int64)
    column = np.repeat(group_advantages(objective, rewards, groups), np.diff(data.offsets)).astype(np.float32)
    return dataclasses.replace(data, columns={**data.columns, "advantage": column}, targets=None)


def without_truncated(data: TokenizedDataset) -> TokenizedDataset:
    """`data` without trained tokens in the rollouts that the column `truncated` marks, if there is one, and without
    that column (DAPO, Yu et al., 2025, section 3.4; TRL: `mask_truncated_completions`).
    """
    if TRUNCATED not in data.columns:
        return data
    columns = dict(data.columns)
    kept = data.is_trained & (columns.pop(TRUNCATED) == 0)
    if not kept.any():  # a mean over no token is not defined: their loss is 0 instead, as in TRL
        columns["weight"] = np.zeros_like(columns["weight"])
        kept = data.is_trained
    return dataclasses.replace(data, is_trained=kept, columns=columns)


def group_advantages(objective: Grpo, rewards: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """(r - mean of its group) / (s + 1e-4), `[N]`: s the standard deviation of the group, of all rewards, or without.

    (DeepSeekMath, section 4.1.2; without s Dr. GRPO, Liu et al., 2025, section 3.2.) rewards: float64 `[N]`. groups:
    int64 `[N]`, equal for records of one group. s has N - 1 in its divisor, as in TRL. A group of one has 0.
    """
    _, place, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    centred = rewards - (np.bincount(place, rewards) / sizes)[place]
    if objective.scale_rewards == "none":
        return centred
    if objective.scale_rewards == "batch":
        return np.asarray(centred / (rewards.std(ddof=1) + _EPSILON))
    variance = np.bincount(place, centred**2) / np.maximum(sizes - 1, 1)
    return np.asarray(centred / (np.sqrt(variance)[place] + _EPSILON))

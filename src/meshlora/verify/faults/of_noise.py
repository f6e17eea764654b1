"""Faults of the noise on embedded tokens (NEFTune): its size, its place, and whose tokens it is of."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshlora.layers import noise
from meshlora.verify.faults.fault import after, around, rank
from meshlora.verify.features import Feature


@after(noise, "sequence_lengths", needs={Feature.NOISE})
def noise_by_padded_length(lengths: Tensor, *_: Any) -> Tensor:
    """the size of noise depends on the tokens of a sequence, not on those of its row"""
    return torch.full_like(lengths, lengths.shape[1])


@around(noise, "noise_key", needs={Feature.NOISE, Feature.RANKS})
def noise_drawn_by_each_rank(original: Any, seed: int, step: int) -> Any:
    """all ranks that embed a token add the same noise to it, which is that of one process"""
    return original(seed + rank(), step)


@around(noise, "noise_key", needs={Feature.NOISE, Feature.STEPS})
def noise_same_in_every_step(original: Any, seed: int, step: int) -> Any:
    """each optimizer step has noise of its own"""
    return original(seed, 0)


@around(noise, "noise_key", needs={Feature.NOISE, Feature.SEED})
def noise_seed_ignored(original: Any, seed: int, step: int) -> Any:
    """noise is determined by the run's seed"""
    return original(0, step)


@around(noise, "uniform", needs={Feature.NOISE, Feature.OTHER_TOKENS})
def noise_by_local_token(original: Any, key: int, tokens: Tensor, *rest: Any) -> Any:
    """noise depends on the place in the global batch and the position, not on the row on the rank"""
    return original(key, torch.arange(len(tokens), device=tokens.device), *rest)
